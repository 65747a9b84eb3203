"""Calls about a tenant's part of the cache: list its pins, let them go, forget prefixes."""

from __future__ import annotations

from collections import Counter
from functools import partial

from radix import Pin
from scheduler.holdings import Holdings
from scheduler.misses import tenant_of
from scheduler.sessions import Sessions
from srt.cache_messages import CachePin, CacheTree, Call, CallReply

# First and last tokens of a pinned prefix that are shown.
SHOWN_TOKENS = 16

NOTHING = {"pages": 0, "kept_pages": 0, "pins": 0}


def list_pins(holdings: Holdings, call: Call, now: float) -> CacheTree:
    """The pins of the caller's tenant, in the order in which they were made."""
    holdings.pins.expire(now)
    mine = tuple(_told(holdings, pin) for pin in holdings.pins if tenant_of(pin.namespace) == call.tenant)
    limit = holdings.pins.most_of_one * holdings.page_size
    return CacheTree(call.call_id, (), holdings.page_size, pins=mine, pin_limit=limit)


def _told(holdings: Holdings, pin: Pin) -> CachePin:
    tokens = holdings.pins.tokens(pin)
    return CachePin(
        name=pin.name,
        namespace=pin.namespace,
        tokens=len(tokens) // 4,
        asked=pin.asked,
        ttl=pin.ttl,
        seconds_left=holdings.pins.seconds_left(pin),
        hits=pin.hits,
        head=tokens[: 4 * SHOWN_TOKENS],
        tail=tokens[-4 * SHOWN_TOKENS :],
    )


def unpin(holdings: Holdings, call: Call, now: float) -> CallReply:
    """Let go of the pins that the call names.  Not ok: there is no pin of that name, or it is another tenant's."""
    holdings.pins.expire(now)
    if call.pin is not None:
        found = holdings.pins.find(call.pin)
        if found is None or tenant_of(found.namespace) != call.tenant:
            return CallReply(call.call_id, False, f"there is no pin {call.pin}")
        pins = [found]
    else:
        pins = [
            pin for namespace in _namespaces(holdings, call) for pin in holdings.pins.of_prefix(namespace, call.tokens)
        ]
    for pin in pins:
        holdings.pins.unpin(pin)
    return CallReply(call.call_id, True, counts={"pins": len(pins)})


def forget(holdings: Holdings, sessions: Sessions, call: Call, now: float) -> CallReply:
    """Forget the prefixes that the call names, pinned or not, as far as no request holds them.

    Not ok: the session that it names is not known.
    """
    holdings.pins.expire(now)
    if call.session is not None:
        return _forget_session(holdings, sessions, call, call.session)
    counts = Counter(NOTHING)
    for namespace in _namespaces(holdings, call):
        counts.update(_forget_prefix(holdings, namespace, call.tokens))
    # The lower tier may have namespaces that nothing else is left of.
    holdings.tier.forget(partial(_concerns, call.tenant, call.namespace), call.tokens)
    return CallReply(call.call_id, True, counts=counts)


def _forget_session(holdings: Holdings, sessions: Sessions, call: Call, name: str) -> CallReply:
    runs = sessions.runs(call.tenant, name)
    if not runs:
        return CallReply(call.call_id, False, "the session is not known, or has nothing in the cache yet")
    counts = Counter(NOTHING)
    for run in runs:
        counts.update(_forget_prefix(holdings, run.namespace, run.tokens))
        holdings.tier.forget(partial(_concerns, call.tenant, run.namespace), run.tokens)
    sessions.forget(call.tenant, name)
    return CallReply(call.call_id, True, counts=counts)


def _forget_prefix(holdings: Holdings, namespace: str, tokens: bytes) -> dict[str, int]:
    pins = holdings.pins.of_prefix(namespace, tokens)
    for pin in pins:
        holdings.pins.unpin(pin)
    forgotten = holdings.forget(namespace, tokens)
    return {"pages": forgotten.pages, "kept_pages": forgotten.kept, "pins": len(pins)}


def _namespaces(holdings: Holdings, call: Call) -> list[str]:
    """Those that the call is about: the one that it names, which is the tenant's, or all of the tenant's."""
    names = dict.fromkeys([*holdings.tree.namespaces(), *(pin.namespace for pin in holdings.pins)])
    return [name for name in names if _concerns(call.tenant, call.namespace, name)]


def _concerns(tenant: str, namespace: str | None, name: str) -> bool:
    return tenant_of(name) == tenant and namespace in (None, name)
