"""`sapwood lint FILE.jsonl`: how much of a row of requests a prefix cache can reuse, and what keeps it from more.

The cache of this calculation never forgets and has prompts only: what replies add to it comes on top.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sapwood.bodies import Body, bodies_in, read_lines
from sapwood.breaks import MOVABLE, Break, find_break, move_to_end
from sapwood.offline import OfflineTokenizer
from sapwood.prefixes import Reuse, infinite_cache
from srt.answer import RequestFailed
from srt.child import StartError

MAX_ROUNDS = 8
SHOWN_KINDS = 12
# Prompts in the tokenizer's hands at once.
CHUNK = 256


@dataclass(frozen=True)
class Found:
    """A break with the two requests that part there, by name, and the tokens they share before it."""

    what: Break
    earlier: str
    request: str
    shared: int
    lost: int


@dataclass(frozen=True)
class Lint:
    """The findings.  `best`: what is reused once what varies stands at the end, which `moved` names; `hidden`: the
    breaks of these kinds that came to light only when others had been moved."""

    bodies: Sequence[Body]
    reuses: Sequence[Reuse]
    found: Sequence[Found]
    best: Sequence[Reuse]
    moved: Sequence[str]
    hidden: Sequence[Found]


def lint(path: Path, model: Path, chat_template: str | None) -> int:
    """Print what a file of requests promises a prefix cache.  Raises StartError."""
    bodies = list(read_lines(path))
    if not bodies:
        raise StartError(f"{path}: has no requests")
    with OfflineTokenizer(model, chat_template) as tokenizer:
        for line in report(examine(bodies, tokenizer)):
            print(line)
    return 0


def examine(bodies: Sequence[Body], tokenizer: OfflineTokenizer) -> Lint:
    """Look for what breaks prefixes, then for what moving it to the end would give.  Raises StartError."""
    reuses = _reuses(bodies, tokenizer)
    found = _breaks(bodies, reuses)
    best, moved, seen = _improve(bodies, reuses, found, tokenizer)
    first = {_group(one) for one in found}
    names = sorted({" in ".join(_group_of(what)) for what in moved})
    hidden = [one for one in seen if _group(one) not in first and _group(one) in set(map(_group_of, moved))]
    return Lint(bodies, reuses, found, best, names, hidden)


def _group_of(what: Break) -> tuple[str, str]:
    return what.kind, what.where


def _group(found: Found) -> tuple[str, str]:
    return _group_of(found.what)


def _reuses(bodies: Sequence[Body], tokenizer: OfflineTokenizer) -> list[Reuse]:
    prompts: list[list[int]] = []
    for start in range(0, len(bodies), CHUNK):
        part = bodies[start : start + CHUNK]
        for body, tokens in zip(part, tokenizer.tokenize([body.prompt for body in part]), strict=True):
            if isinstance(tokens, RequestFailed):
                raise StartError(f"request {body.name}: {tokens.message}")
            prompts.append(tokens.ids)
    return infinite_cache(prompts)


def _breaks(bodies: Sequence[Body], reuses: Sequence[Reuse]) -> list[Found]:
    """Every request that parts from the earlier one most like it, with the reason."""
    found = []
    for index, reuse in enumerate(reuses):
        # Where nothing is shared there is no telling what the request should have shared with which.
        earlier = reuse.earlier if reuse.earlier is not None else (index - 1 if index else None)
        if earlier is None or reuse.shared >= min(reuse.tokens, reuses[earlier].tokens):
            continue
        what = find_break(bodies[earlier].fields, bodies[index].fields)
        if what is not None:
            lost = reuse.tokens - 1 - reuse.reused
            found.append(Found(what, bodies[earlier].name, bodies[index].name, reuse.shared, lost))
    return found


def _improve(
    bodies: Sequence[Body], reuses: Sequence[Reuse], found: Sequence[Found], tokenizer: OfflineTokenizer
) -> tuple[Sequence[Reuse], list[Break], list[Found]]:
    """Move what varies to the end, round by round: behind what was moved the next difference comes to light, so that
    a round may gain nothing before the next gains all.  The best round counts."""
    moved: list[Break] = []
    best: tuple[Sequence[Reuse], list[Break]] = (reuses, [])
    seen: list[Found] = []
    for _ in range(MAX_ROUNDS):
        known = set(map(_group_of, moved))
        new = [one.what for one in found if one.what.kind in MOVABLE and _movable_from(one.what, bodies)]
        new = [what for what in new if _group_of(what) not in known]
        if not new:
            break
        moved = [*moved, *new]
        changed = [_changed(body, moved) for body in bodies]
        now = _reuses(changed, tokenizer)
        found = _breaks(changed, now)
        seen += found
        if total(now) > total(best[0]):
            best = now, moved
    return best[0], best[1], seen


def _movable_from(what: Break, bodies: Sequence[Body]) -> bool:
    """What is in the last message of its requests stands at the end already."""
    last = max((len(body.messages) for body in bodies), default=0) - 1
    return what.message is None or what.message < last or what.kind == "whitespace"


def _changed(body: Body, breaks: Sequence[Break]) -> Body:
    if not body.messages and not isinstance(body.fields.get("prompt", body.fields.get("text")), str):
        return body
    return bodies_in(move_to_end(body.fields, breaks), f"request {body.name}", body.name)[0]


def total(reuses: Sequence[Reuse]) -> int:
    """Tokens reused in all."""
    return sum(reuse.reused for reuse in reuses)


def rate(reuses: Sequence[Reuse]) -> float:
    """Share of the prompt tokens that is reused."""
    return total(reuses) / (sum(reuse.tokens for reuse in reuses) or 1)


def report(lint: Lint) -> Iterator[str]:
    """The findings for people, line by line."""
    tokens = sum(reuse.tokens for reuse in lint.reuses)
    yield f"{len(lint.bodies)} prompts, {tokens} tokens"
    yield (
        f"achievable hit rate: {rate(lint.reuses):.1%} ({total(lint.reuses)} tokens; "
        "a cache that never forgets, requests in this order)"
    )
    if lint.found:
        yield "what breaks prefixes:"
        yield from _groups(lint.found)
    else:
        yield "nothing breaks prefixes"
    if lint.hidden:
        yield "what would break them behind that:"
        yield from _groups(lint.hidden)
    if lint.moved:
        yield f"with this moved to the end (or made uniform): {rate(lint.best):.1%}"
        for line in lint.moved:
            yield f"  {line}"


def _groups(breaks: Sequence[Found]) -> Iterator[str]:
    groups: dict[tuple[str, str], list[Found]] = {}
    for found in breaks:
        groups.setdefault(_group(found), []).append(found)
    # What can be helped comes first.
    ranked = sorted(
        groups.items(), key=lambda group: (group[0][0] not in MOVABLE, -sum(found.lost for found in group[1]))
    )
    for (kind, where), members in ranked[:SHOWN_KINDS]:
        yield from _group_lines(kind, where, members)
    if len(ranked) > SHOWN_KINDS:
        yield f"  and {len(ranked) - SHOWN_KINDS} more"


def _group_lines(kind: str, where: str, members: Sequence[Found]) -> Iterator[str]:
    lost = sum(found.lost for found in members)
    names = ", ".join(found.request for found in members[:10]) + (", ..." if len(members) > 10 else "")
    yield f"  {kind} in {where}: {len(members)} requests, {lost} tokens computed behind it"
    yield f"    requests {names}"
    example = members[0]
    yield (
        f"    {example.request} parts from {example.earlier} at token {example.shared}: "
        f"{example.what.text!r} where it was {example.what.earlier_text!r}"
    )
