"""In which order the waiting requests are looked at: one ordered container for each policy, and its bound on waiting.

lpm         rank = 256 * arrival - matched tokens - 4,096 * priority, in tokens.  A request is overtaken by one that
            came d seconds later only if that one matches over 256 * d tokens more (or ranks higher): with a context of
            L tokens nobody of equal priority who comes more than L / 256 seconds later gets ahead, whatever is cached.
fcfs        rank = arrival - 16 * priority, in seconds.  Nobody of equal priority gets ahead.
priority    rank = arrival - 60 * priority, in seconds.  A request of priority p is overtaken by one of priority q only
            if that one came less than 60 * (q - p) seconds later.
deadline    rank = arrival + target - prefill time of the whole prompt, in seconds: least slack to the target for the
            first token.  What is cached is not taken off, since it may be gone by then, and since who has much cached
            would come later for it.  Requests whose slack lies in the same half second are alike: of them the longest
            match goes first.  Whoever names no target has one of 10 s, so nobody of the same kind who comes more than a
            prefill and half a second later gets ahead.
dfs-weight  the waiting requests as a trie, depth first, heaviest branch first: what shares a prefix goes together.  A
            request that has waited for 10 s goes before all that have not, in order of arrival.
fair        the tenant that has been served least goes next (virtual token counters of "Fairness in Serving Large
            Language Models", Sheng et al. 2024: one for each token computed for it, two for each token generated, so
            a prefix hit costs what it really costs).  Between two tenants that always have requests waiting the
            service differs by no more than two of the largest requests; inside a tenant the order is that of lpm.

A request that waits for a prefix that another is computing just now lets others pass meanwhile, under any policy: for
as long as that prefix takes, and with less to compute of its own afterwards.

A rank says how good it is to serve a request now less what it gains by waiting; since everybody gains at the same
pace, it does not depend on the time.  A retracted request goes before all others: it has been admitted once, in its
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from sortedcontainers import SortedKeyList

from scheduler.request import Request
from scheduler.trie import depth_first

LPM_TOKENS_PER_SECOND = 256.0
LPM_TOKENS_PER_PRIORITY = 4096.0
FCFS_SECONDS_PER_PRIORITY = LPM_TOKENS_PER_PRIORITY / LPM_TOKENS_PER_SECOND
PRIORITY_SECONDS = 60.0
DEFAULT_TARGET_SECONDS = 10.0
# A guess for machines of every kind; only the order among requests of like targets hangs on it.
PREFILL_TOKENS_PER_SECOND = 1000.0
DEPTH_FIRST_PATIENCE_SECONDS = 10.0
DEPTH_FIRST_REBUILD_SECONDS = 0.1
# Slacks that differ by less are alike.
SLACK_SECONDS = 0.5
FAIR_COST_OF_OUTPUT = 2.0
FIRST_LOOK = 32

Rank = tuple[bool, float, int]


class Policy(Protocol):
    """The waiting requests in an order."""

    name: str
    # Whether the order hangs on Request.hint_tokens, which must then be kept up to date.
    uses_matches: bool
    # Whether the order hangs on the output tokens that `charge` is told of.
    charges_outputs: bool

    def add(self, request: Request) -> None:
        """A request waits from now on."""
        ...

    def remove(self, request: Request) -> None:
        """It does not wait any more.  Raises KeyError or ValueError when it does not wait."""
        ...

    def moved(self, request: Request, old_hint: int) -> None:
        """The match of a waiting request has changed."""
        ...

    def ordered(self, now: float) -> Iterator[Request]:
        """First to be looked at first.  Those yielded already may be removed on the way."""
        ...

    def charge(self, request: Request, computed_tokens: int, output_tokens: int) -> None:
        """The request, running, was served so much."""
        ...

    def overtake_seconds(self, context_length: int) -> float:
        """Nobody of the same priority, target and tenant who comes more than so many seconds later gets ahead."""
        ...

    def check(self) -> None:
        """Recompute what is kept for speed.  Raises AssertionError."""
        ...


def lpm_rank(request: Request) -> float:
    """See the head of the file."""
    priority = LPM_TOKENS_PER_PRIORITY * request.message.priority
    return LPM_TOKENS_PER_SECOND * request.arrival - request.hint_tokens - priority


def fcfs_rank(request: Request) -> float:
    """See the head of the file."""
    return request.arrival - FCFS_SECONDS_PER_PRIORITY * request.message.priority


def priority_rank(request: Request) -> float:
    """See the head of the file."""
    return request.arrival - PRIORITY_SECONDS * request.message.priority


def deadline_rank(request: Request) -> float:
    """See the head of the file."""
    target = request.message.ttft_target
    prefill = request.known / PREFILL_TOKENS_PER_SECOND
    slack = request.arrival + (DEFAULT_TARGET_SECONDS if target is None else target) - prefill
    return SLACK_SECONDS * (slack // SLACK_SECONDS) - SLACK_SECONDS * request.hint_tokens / (request.known + 1)


class Ranked:
    """Order by a rank that depends on the request and its match alone."""

    def __init__(
        self,
        name: str,
        rank: Callable[[Request], float],
        uses_matches: bool,
        tokens_per_second: float = math.inf,
        seconds: float = 0.0,
    ) -> None:
        """`tokens_per_second`: how many tokens weigh as much in the rank as a second of waiting; `seconds`: what else
        may weigh."""
        self.name = name
        self._seconds = seconds
        self._tokens_per_second = tokens_per_second
        self.uses_matches = uses_matches
        self.charges_outputs = False
        self._rank = rank
        self._requests: SortedKeyList[Request] = SortedKeyList(key=lambda request: request.rank)

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """O(log n)."""
        request.rank = (request.retractions == 0, self._rank(request), request.order)
        self._requests.add(request)

    def remove(self, request: Request) -> None:
        """O(log n)."""
        self._requests.remove(request)

    def moved(self, request: Request, old_hint: int) -> None:
        """O(log n)."""
        self._requests.remove(request)
        self.add(request)

    def ordered(self, now: float) -> Iterator[Request]:
        """By rank.  Most plans look at a few requests only, so the many behind them are not listed at once."""
        first = list(islice(self._requests, FIRST_LOOK))
        yield from first
        if len(first) == FIRST_LOOK:
            seen = {request.order for request in first}
            yield from [request for request in self._requests if request.order not in seen]

    def charge(self, request: Request, computed_tokens: int, output_tokens: int) -> None:
        """Makes no difference."""

    def overtake_seconds(self, context_length: int) -> float:
        """What the longest prompt or match is worth."""
        return context_length / self._tokens_per_second + self._seconds

    def check(self) -> None:
        """Every rank is what it would be now."""
        for request in self._requests:
            assert request.rank == (request.retractions == 0, self._rank(request), request.order), "rank"


class DepthFirst:
    """The waiting requests as a trie, walked depth first, the branch with most requests first."""

    name = "dfs-weight"
    uses_matches = False
    charges_outputs = False

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._order: list[Request] = []
        self._added = False
        self._built_at = 0.0

    def add(self, request: Request) -> None:
        """O(1); it takes its place when the order is made next."""
        self._requests[request.rid] = request
        self._added = True

    def remove(self, request: Request) -> None:
        """O(1)."""
        del self._requests[request.rid]

    def moved(self, request: Request, old_hint: int) -> None:
        """Makes no difference: the order comes from the prompts alone."""

    def ordered(self, now: float) -> Iterator[Request]:
        """Retracted ones, then those out of patience, then depth first."""
        waiting = list(self._requests.values())
        urgent = [r for r in waiting if r.retractions or now - r.arrival >= DEPTH_FIRST_PATIENCE_SECONDS]
        urgent.sort(key=lambda r: (r.retractions == 0, r.arrival, r.order))
        yield from urgent
        if self._added and (now - self._built_at >= DEPTH_FIRST_REBUILD_SECONDS or not self._order):
            self._order = depth_first(waiting)
            self._added = False
            self._built_at = now
        first = {request.rid for request in urgent}
        self._order = [request for request in self._order if request.rid in self._requests]
        yield from (request for request in list(self._order) if request.rid not in first)

    def charge(self, request: Request, computed_tokens: int, output_tokens: int) -> None:
        """Makes no difference."""

    def overtake_seconds(self, context_length: int) -> float:
        """Its patience."""
        return DEPTH_FIRST_PATIENCE_SECONDS

    def check(self) -> None:
        """Nothing is kept but the order, which may be out of date for a moment."""


class Fair:
    """The tenant that was served least goes next."""

    name = "fair"
    uses_matches = True
    charges_outputs = True

    def __init__(self) -> None:
        self._tenants: dict[str, Ranked] = {}
        self._served: dict[str, float] = {}

    def add(self, request: Request) -> None:
        """A tenant that comes back after a pause is given no credit for it: it starts level with the least served."""
        tenant = request.message.tenant
        if tenant not in self._tenants:
            least = min((self._served[name] for name in self._tenants), default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
            self._tenants[tenant] = Ranked(tenant, lpm_rank, True, LPM_TOKENS_PER_SECOND)
        self._tenants[tenant].add(request)

    def remove(self, request: Request) -> None:
        """O(log n)."""
        tenant = request.message.tenant
        self._tenants[tenant].remove(request)
        if not len(self._tenants[tenant]):
            del self._tenants[tenant]

    def moved(self, request: Request, old_hint: int) -> None:
        """O(log n)."""
        self._tenants[request.message.tenant].moved(request, old_hint)

    def ordered(self, now: float) -> Iterator[Request]:
        """What was admitted on the way has been charged when the next is chosen."""
        queues = {tenant: requests.ordered(now) for tenant, requests in self._tenants.items()}
        while queues:
            tenant = min(queues, key=lambda name: (self._served[name], name))
            request = next(queues[tenant], None)
            if request is None:
                del queues[tenant]
            else:
                yield request

    def charge(self, request: Request, computed_tokens: int, output_tokens: int) -> None:
        """O(1)."""
        tenant = request.message.tenant
        cost = computed_tokens + FAIR_COST_OF_OUTPUT * output_tokens
        self._served[tenant] = self._served.get(tenant, 0.0) + cost

    def overtake_seconds(self, context_length: int) -> float:
        """As in lpm, for requests of one tenant."""
        return context_length / LPM_TOKENS_PER_SECOND

    def check(self) -> None:
        """Every tenant's queue is in order, and none is empty."""
        for requests in self._tenants.values():
            assert len(requests), "a tenant without waiting requests"
            requests.check()


POLICIES: dict[str, Callable[[], Policy]] = {
    "lpm": lambda: Ranked("lpm", lpm_rank, True, LPM_TOKENS_PER_SECOND),
    "fcfs": lambda: Ranked("fcfs", fcfs_rank, False),
    "priority": lambda: Ranked("priority", priority_rank, False),
    "deadline": lambda: Ranked("deadline", deadline_rank, True, PREFILL_TOKENS_PER_SECOND, SLACK_SECONDS),
    "dfs-weight": DepthFirst,
    "fair": Fair,
}
