"""In which order the waiting requests are looked at.

A policy gives every waiting request a rank; the lowest goes first, and the earlier arrival among equals.  A rank
says how good it is to serve the request now, less what it gains by waiting; since everybody gains at the same pace,
the order does not depend on the time, and a rank changes only with the request's match:

    lpm       256 * arrival - matched tokens - 4,096 * priority                   in tokens
    fcfs      arrival - 16 * priority                                             in seconds

The bound on waiting: under lpm a request can only be overtaken by one that arrived d seconds later if that one matches
over 256 * d tokens more (or ranks higher); with a context of L tokens and equal priorities nobody who arrives more than
L / 256 seconds later gets ahead, whatever is cached.  Under fcfs nobody of equal priority gets ahead at all.
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
    # Whether `rank` reads Request.hint_tokens, which must then be kept up to date.
    uses_matches: bool

    def rank(self, request: Request) -> float:
        """Lower goes first.  Depends on the request alone."""
        ...


class LongestPrefixMatch:
    """What is cached goes first, weighed against age and priority."""

    name = "lpm"
    uses_matches = True

    def rank(self, request: Request) -> float:
        """In tokens."""
        return (
            LPM_TOKENS_PER_SECOND * request.arrival
            - request.hint_tokens
            - LPM_TOKENS_PER_PRIORITY * request.message.priority
        )


class FirstComeFirstServed:
    """Arrival order, moved by priority."""

    name = "fcfs"
    uses_matches = False

    def rank(self, request: Request) -> float:
        """In seconds."""
        return request.arrival - FCFS_SECONDS_PER_PRIORITY * request.message.priority


POLICIES: dict[str, type[LongestPrefixMatch] | type[FirstComeFirstServed]] = {
    LongestPrefixMatch.name: LongestPrefixMatch,
    FirstComeFirstServed.name: FirstComeFirstServed,
}
