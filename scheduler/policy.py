"""In which order the waiting requests are looked at.

A policy gives every waiting request a score; the highest goes first, and the earlier arrival among equals.  All
scores grow with the time waited without bound, at the same rate for everybody, so no request waits for ever:

    lpm    matched tokens + 256 for every second waited + 4,096 for every step of priority
    fcfs   seconds waited + 16 for every step of priority

Under lpm a request can only be overtaken by one that arrived d seconds later if that one matches over 256 * d
tokens more (or ranks higher); with a context of L tokens and equal priorities nobody who arrives more than
L / 256 seconds later gets ahead, whatever is cached.  Under fcfs nobody of equal priority gets ahead at all.

A retracted request is put before everybody: it has been admitted once, in its turn.
"""

from __future__ import annotations

from typing import Protocol

from scheduler.request import Request

LPM_TOKENS_PER_SECOND = 256.0
LPM_TOKENS_PER_PRIORITY = 4096.0
FCFS_SECONDS_PER_PRIORITY = LPM_TOKENS_PER_PRIORITY / LPM_TOKENS_PER_SECOND


class Policy(Protocol):
    """An order of the waiting requests."""

    name: str
    # Whether `score` reads Request.hint_tokens, which must then be kept up to date.
    uses_matches: bool

    def score(self, request: Request, now: float) -> float:
        """Higher goes first."""
        ...


class LongestPrefixMatch:
    """What is cached goes first, weighed against age and priority."""

    name = "lpm"
    uses_matches = True

    def score(self, request: Request, now: float) -> float:
        """In tokens."""
        return (
            request.hint_tokens
            + LPM_TOKENS_PER_SECOND * (now - request.arrival)
            + LPM_TOKENS_PER_PRIORITY * request.message.priority
        )


class FirstComeFirstServed:
    """Arrival order, moved by priority."""

    name = "fcfs"
    uses_matches = False

    def score(self, request: Request, now: float) -> float:
        """In seconds."""
        return now - request.arrival + FCFS_SECONDS_PER_PRIORITY * request.message.priority


POLICIES: dict[str, type[LongestPrefixMatch] | type[FirstComeFirstServed]] = {
    LongestPrefixMatch.name: LongestPrefixMatch,
    FirstComeFirstServed.name: FirstComeFirstServed,
}


def in_order(waiting: list[Request], policy: Policy, now: float) -> list[Request]:
    """The waiting requests, first to be looked at first."""
    return sorted(waiting, key=lambda r: (r.retractions == 0, -policy.score(r, now), r.order))
