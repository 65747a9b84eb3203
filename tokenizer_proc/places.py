"""Where each message of a chat stands in its rendered prompt.

A template may do anything with a message, so it is asked: the chat is rendered once more with a mark before and behind
every content.  Where the text without the marks is that of the prompt, the marks tell the places; where it is not,
nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

# Characters for private use, which prompts hardly hold; a chat that does hold them gets no places.
OPENING, CLOSING, END = "\uf8f0", "\uf8f1", "\uf8f2"
MARK = re.compile(f"([{OPENING}{CLOSING}])([0-9]+){END}")

Render = Callable[[list[dict[str, Any]]], str]


def message_starts(messages: list[dict[str, Any]], rendered: str, render: Render) -> list[int] | None:
    """The character at which each message begins, and as one more entry the one at which what follows the messages
    (the generation prompt) begins.  None where that cannot be told.

    `render` renders messages without a generation prompt.  The text that the template puts between two contents
    belongs to the later message, but for what it puts behind the last one, which belongs to each.
    """
    if any(mark in rendered for mark in (OPENING, CLOSING, END)):
        return None
    marked = render([_marked(message, index) for index, message in enumerate(messages)])
    text, opened, closed = _without_marks(marked)
    if not rendered.startswith(text):
        return None
    for index, end in closed.items():
        # The marks stand inside the white space around a content, which the template may have kept.
        content = messages[index]["content"]
        space = content[len(content.rstrip()) :]
        closed[index] = end + len(space) if text.startswith(space, end) else end
    last = len(messages) - 1
    trailer = text[closed[last] :] if last in closed else ""
    starts = [0]
    for index in range(1, len(messages)):
        behind = closed.get(index - 1)
        if behind is None:
            # Nothing is known of the message before (it is empty, or left out): this one begins with its content.
            behind = opened.get(index, starts[-1])
        elif trailer and text.startswith(trailer, behind):
            behind += len(trailer)
        starts.append(max(starts[-1], behind))
    return [*starts, len(text)]


def _marked(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Templates strip white space and ask whether there is any content: neither may notice the marks."""
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    core = content.strip()
    begin = content.index(core)
    end = begin + len(core)
    marked = f"{content[:begin]}{OPENING}{index}{END}{core}{CLOSING}{index}{END}{content[end:]}"
    return {**message, "content": marked}


def _without_marks(marked: str) -> tuple[str, dict[int, int], dict[int, int]]:
    """The text, and by the message's number where its content begins and ends in it."""
    parts: list[str] = []
    places: dict[str, dict[int, int]] = {OPENING: {}, CLOSING: {}}
    at = size = 0
    for mark in MARK.finditer(marked):
        parts.append(marked[at : mark.start()])
        size += len(parts[-1])
        places[mark[1]].setdefault(int(mark[2]), size)
        at = mark.end()
    parts.append(marked[at:])
    return "".join(parts), places[OPENING], places[CLOSING]
