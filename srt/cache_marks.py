"""`cache_control` marks on chat messages, as users of Anthropic's API know them.

A mark is {"type": "ephemeral", "ttl": "5m" or "1h"}, on a message or on a part of its content; the prompt up to the end
of that message is pinned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from srt.answer import RequestFailed
from srt.cache_messages import PinWish

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_MARKS = 4


def marked_places(messages: Sequence[Mapping[str, Any]]) -> tuple[PinWish, ...]:
    """What the marks of a chat ask for, in order.  Raises RequestFailed 400 for a mark that means nothing here."""
    wishes = []
    for index, message in enumerate(messages):
        ttls = [_ttl(mark, where) for where, mark in _marks(message, f"messages[{index}]")]
        if ttls:
            wishes.append(PinWish(max(ttls), message=index))
    if len(wishes) > MAX_MARKS:
        text = f"At most {MAX_MARKS} messages may have a cache_control mark, and {len(wishes)} have one."
        raise RequestFailed(400, text, "messages", "invalid_value")
    return tuple(wishes)


def _marks(message: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """The marks of a message and its parts, each with the path of its field."""
    if message.get("cache_control") is not None:
        yield f"{where}.cache_control", message["cache_control"]
    content = message.get("content")
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, Mapping) and part.get("cache_control") is not None:
            yield f"{where}.content[{place}].cache_control", part["cache_control"]


def _ttl(mark: Any, where: str) -> float:
    if not isinstance(mark, Mapping):
        raise _refused(where, f'{where} must be an object such as {{"type": "ephemeral"}}, not {_quoted(mark)}.')
    for name in mark:
        if name not in ("type", "ttl"):
            raise _refused(f"{where}.{name}", f"{where} has no field {_quoted(name)}; it has type and ttl.")
    if mark.get("type") != "ephemeral":
        raise _refused(f"{where}.type", f'{where}.type must be "ephemeral", not {_quoted(mark.get("type"))}.')
    ttl = mark.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise _refused(f"{where}.ttl", f'{where}.ttl must be "5m" or "1h", not {_quoted(ttl)}.')
    return TTL_SECONDS[ttl]


def _refused(param: str, message: str) -> RequestFailed:
    return RequestFailed(400, message, param, "invalid_value")


def _quoted(value: Any) -> str:
    return json.dumps(value)[:60]
