"""What a request wants pinned, and what it is told of it.

A prefix can be pinned when it is in the tree, so the wishes of a request are seen to when all of its prompt has been
computed and published: just before its first output, which takes the answer along.
"""

from __future__ import annotations

import msgspec

from radix import Pins
from scheduler.request import Request
from srt.cache_messages import PinReport, PinWish


def pin_prompt(request: Request, pins: Pins, stores: bool) -> None:
    """Pin what the request wants pinned, and put into its report what came of it.

    `stores`: whether the request gives to the cache; if not, none of it can be pinned.
    """
    request.pins_due = False
    told = tuple(_pin(request, wish, pins, stores) for wish in request.message.pins)
    if request.cache_report is not None:
        request.cache_report = msgspec.structs.replace(request.cache_report, pins=told)


def _pin(request: Request, wish: PinWish, pins: Pins, stores: bool) -> PinReport:
    if wish.tokens is None:
        return PinReport(0, 0, wish.ttl, "unknown_place", wish.message)
    tokens = request.message.prompt_ids[: 4 * wish.tokens]
    asked = len(tokens) // 4
    if not stores:
        return PinReport(asked, 0, wish.ttl, "bypassed", wish.message)
    pinned, shortfall = pins.pin(request.message.namespace, tokens, wish.ttl)
    return PinReport(asked, pinned, wish.ttl, shortfall, wish.message)
