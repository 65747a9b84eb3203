"""Whether a chat template keeps each turn a prefix of the next, found by trying.

A server that reuses prefixes can only reuse as much of a conversation as its template says again in the same way.
Some templates do not: they open the reply with something that the history lacks (a thinking block), strip white space,
or leave something out of earlier turns.
"""

from __future__ import annotations

from typing import Any

from tokenizer_proc.errors import PromptError
from tokenizer_proc.template import ChatTemplate

QUESTIONS = ("First question?", "Second question?", "Third question?")
# What a model that thinks says; templates that know of it mostly leave it out of the history.
PLAIN_REPLY = "A reply."
THINKING_REPLY = "<think>\nA thought.\n</think>\n\nA reply."
QUOTED_CHARACTERS = 30


def how_turns_part(template: ChatTemplate) -> str | None:
    """None when every turn, the prompt and its reply, is a prefix of the next; else one sentence that says where and
    how they part.  A template that refuses a plain conversation is told of in the same way."""
    replies = [PLAIN_REPLY]
    if template.mentions("</think>"):
        replies.append(THINKING_REPLY)
    try:
        return next((parting for reply in replies if (parting := _parting(template, reply)) is not None), None)
    except PromptError as error:
        return error.message


def _parting(template: ChatTemplate, reply: str) -> str | None:
    messages: list[dict[str, Any]] = []
    before = ""
    for number, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        prompt = template.render(messages, True)
        if not prompt.startswith(before):
            shorter = min(len(before), len(prompt))
            kept = next((place for place in range(shorter) if before[place] != prompt[place]), shorter)
            return (
                f"after {before[max(0, kept - QUOTED_CHARACTERS) : kept]!r} turn {number - 1} goes on with "
                f"{before[kept : kept + QUOTED_CHARACTERS]!r} and turn {number} with "
                f"{prompt[kept : kept + QUOTED_CHARACTERS]!r}"
            )
        before = prompt + reply
        messages.append({"role": "assistant", "content": reply})
    return None
