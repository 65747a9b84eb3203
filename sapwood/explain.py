"""`sapwood explain A.json B.json`: where two requests' prompts part, without a server.

The exit code is 0 when B's prompt begins with all of A's (so that B finds A in the cache), 1 when they part before,
2 when that cannot be told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sapwood.bodies import Body, read_body
from sapwood.offline import OfflineTokenizer, PromptTokens
from srt.answer import RequestFailed
from srt.child import StartError

SHOWN_TOKENS = 12


def explain(first: Path, second: Path, model: Path, chat_template: str | None) -> int:
    """Print where the prompts part; the exit code, 0 or 1.  Raises StartError."""
    bodies = [read_body(first), read_body(second)]
    with OfflineTokenizer(model, chat_template) as tokenizer:
        found = []
        for path, tokens in zip((first, second), tokenizer.tokenize([body.prompt for body in bodies]), strict=True):
            if isinstance(tokens, RequestFailed):
                raise StartError(f"{path}: {tokens.message}")
            found.append(tokens)
        for line in describe(bodies, found, tokenizer):
            print(line)
    return 0 if parting(found[0].ids, found[1].ids) == len(found[0].ids) else 1


def parting(first: list[int], second: list[int]) -> int:
    """How many leading tokens two prompts share."""
    shorter = min(len(first), len(second))
    return next((place for place in range(shorter) if first[place] != second[place]), shorter)


def describe(bodies: list[Body], found: list[PromptTokens], tokenizer: OfflineTokenizer) -> Iterator[str]:
    """What there is to say, line by line."""
    a, b = found
    place = parting(a.ids, b.ids)
    yield f"A has {len(a.ids)} tokens, B has {len(b.ids)}; they share the first {place}."
    if place == len(a.ids) == len(b.ids):
        yield "The prompts are the same."
    elif place == len(a.ids):
        yield f"B extends A: it goes on at token {place}, {source_of(bodies[1], b, place)}."
    elif place == len(b.ids):
        yield f"B ends where A goes on, at token {place}, {source_of(bodies[0], a, place)}."
    else:
        in_a, in_b = source_of(bodies[0], a, place), source_of(bodies[1], b, place)
        yield f"They part at token {place}: in A {in_a}, in B {in_b}."
    yield f"  before: {tokenizer.text(a.ids[max(0, place - SHOWN_TOKENS) : place])!r}"
    for name, tokens in (("A", a), ("B", b)):
        following = tokens.ids[place : place + SHOWN_TOKENS]
        yield f"  {name}:      {tokenizer.text(following)!r}" if following else f"  {name}:      (ends here)"


def source_of(body: Body, tokens: PromptTokens, place: int) -> str:
    """Where a token of a prompt comes from, in words."""
    if not tokens.message_starts:
        return "in the prompt"
    index = sum(start <= place for start in tokens.message_starts) - 1
    if index >= len(body.messages):
        return "behind the last message"
    role = body.messages[index].get("role")
    return f"token {place - tokens.message_starts[index]} of messages[{index}] ({role})"
