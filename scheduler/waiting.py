"""The waiting requests: in which order they are looked at, and which of them had better wait a little longer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from scheduler.holdings import Holdings
from scheduler.policy import Policy, in_order
from scheduler.request import Request

# Requests that share so many tokens, which one of them computes now, do not compute them twice: the others wait.  They
# wait to the end of what is shared, since the rest of it takes no longer to come than to compute it again.
SHARE_TOKENS = 32
# Waiting requests whose match is brought up to date in one plan; the others keep the one they have.
HINTS_PER_PLAN = 256


class WaitingQueue:
    """Requests that are not admitted yet, or were retracted."""

    def __init__(self, holdings: Holdings, policy: Policy) -> None:
        self._holdings = holdings
        self._policy = policy
        self._requests: list[Request] = []
        self._hint_cursor = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """At the end; the policy's order does not depend on the place."""
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request does not wait."""
        self._requests.remove(request)

    def remove_all(self, rids: set[str]) -> None:
        """Those that were admitted in one plan."""
        if rids:
            self._requests = [request for request in self._requests if request.rid not in rids]

    def oldest_wait(self, now: float) -> float:
        """Seconds since the arrival of whoever has waited longest."""
        return max((now - request.arrival for request in self._requests), default=0.0)

    def in_order(self, now: float) -> list[Request]:
        """First to be looked at first."""
        if self._policy.uses_matches:
            self._refresh_hints()
        return in_order(self._requests, self._policy, now)

    def _refresh_hints(self) -> None:
        """Bring matches up to date, a bounded number in each plan, in turn."""
        count = len(self._requests)
        for offset in range(min(count, HINTS_PER_PLAN)):
            self._holdings.refresh_hint(self._requests[(self._hint_cursor + offset) % count])
        self._hint_cursor = (self._hint_cursor + HINTS_PER_PLAN) % count if count > HINTS_PER_PLAN else 0

    def awaits_shared_prefix(self, request: Request, running: list[Request]) -> bool:
        """Whether a running request is about to publish more of a prefix that both share than is cached now."""
        if not self._holdings.caches(request):
            return False
        page_size = self._holdings.page_size
        for other in running:
            will_publish = len(other.key) // 4 // page_size * page_size
            if other.cached >= will_publish or not self._holdings.caches(other):
                continue
            if other.message.namespace != request.message.namespace:
                continue
            self._holdings.refresh_hint(request)
            needed = max(request.hint_tokens + 1, SHARE_TOKENS)
            reach = min(request.match_limit, will_publish)
            if reach >= needed and min(reach, common_prefix_tokens(request.key, other.key)) >= needed:
                return True
        return False


def common_prefix_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens that two packed sequences share."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end // 4
    differs = np.frombuffer(a, np.int32, end // 4) != np.frombuffer(b, np.int32, end // 4)
    return int(differs.argmax())
