"""What a request says of its place in the prefix cache: `pin`, and `cache_control` marks on chat messages.

The marks are those of Anthropic's API: {"type": "ephemeral", "ttl": "5m" or "1h"}, on a message or on a part of its
content; the prompt up to the end of that message is pinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from srt.http.errors import bad_request, quoted
from srt.http.schema import ChatMessage, PinField
from srt.messages import PinWish

DEFAULT_TTL_SECONDS = 300.0
TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_MARKS = 4


def wishes_of(pin: PinField | None, messages: Sequence[ChatMessage] = ()) -> tuple[PinWish, ...]:
    """What of a prompt is to be pinned, shortest first.  Raises ApiError for a mark that means nothing here."""
    wishes = []
    for index, message in enumerate(messages):
        ttls = [_ttl(mark, where) for where, mark in _marks(message, f"messages[{index}]")]
        if ttls:
            wishes.append(PinWish(max(ttls), message=index))
    if len(wishes) > MAX_MARKS:
        raise bad_request(
            "messages", f"At most {MAX_MARKS} messages may have a cache_control mark, and {len(wishes)} have one."
        )
    if pin is not None:
        wishes.append(PinWish(DEFAULT_TTL_SECONDS if pin.ttl_seconds is None else pin.ttl_seconds, pin.tokens))
    return tuple(wishes)


def _marks(message: ChatMessage, where: str) -> list[tuple[str, Any]]:
    """The marks of a message and its parts, each with the path of its field."""
    marks: list[tuple[str, Any]] = [(f"{where}.cache_control", message.cache_control)]
    if isinstance(message.content, list):
        marks += [
            (f"{where}.content[{place}].cache_control", part.get("cache_control"))
            for place, part in enumerate(message.content)
        ]
    return [(field, mark) for field, mark in marks if mark is not None]


def _ttl(mark: Any, where: str) -> float:
    if not isinstance(mark, dict):
        raise bad_request(where, f'{where} must be an object such as {{"type": "ephemeral"}}, not {quoted(mark)}.')
    for name in mark:
        if name not in ("type", "ttl"):
            raise bad_request(f"{where}.{name}", f"{where} has no field {quoted(name)}; it has type and ttl.")
    if mark.get("type") != "ephemeral":
        raise bad_request(f"{where}.type", f'{where}.type must be "ephemeral", not {quoted(mark.get("type"))}.')
    ttl = mark.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise bad_request(f"{where}.ttl", f'{where}.ttl must be "5m" or "1h", not {quoted(ttl)}.')
    return TTL_SECONDS[ttl]
