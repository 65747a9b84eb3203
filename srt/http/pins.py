"""What a request says of its place in the prefix cache: `pin`, and `cache_control` marks on chat messages."""

from __future__ import annotations

from collections.abc import Sequence

from srt.cache_marks import marked_places
from srt.cache_messages import PinWish
from srt.http.generation import faults_named
from srt.http.schema import ChatMessage, PinField

DEFAULT_TTL_SECONDS = 300.0


def wishes_of(pin: PinField | None, messages: Sequence[ChatMessage] = ()) -> tuple[PinWish, ...]:
    """What of a prompt is to be pinned.  Raises ApiError for a mark that means nothing here."""
    with faults_named(lambda param: param):
        wishes = marked_places([{"cache_control": one.cache_control, "content": one.content} for one in messages])
    if pin is None:
        return wishes
    return (*wishes, PinWish(DEFAULT_TTL_SECONDS if pin.ttl_seconds is None else pin.ttl_seconds, pin.tokens))
