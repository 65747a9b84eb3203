"""The requests that run: what they compute next, and who makes room when the pool is dry.

A request is only retracted when no step is in flight, so that it never has a token on its way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from scheduler.batch import Batch, Row, next_row
from scheduler.growth import GrowthEstimate
from scheduler.holdings import Holdings
from scheduler.limits import Limits
from scheduler.misses import Misses
from scheduler.pace import Pace
from scheduler.report import Totals
from scheduler.request import Request, Status
from scheduler.slots import Slots
from scheduler.waiting import WaitingQueue

Preemption = Literal["auto", "recompute", "swap"]


class Calm:
    """All that run decode on: what the plans from the next one on have to look at, for so long.

    decoding   the requests
    left       further plans before one of them may be at its limit
    """

    __slots__ = ("_by_place", "_plans", "decoding", "left")

    def __init__(self, decoding: list[Request], left: int, page_size: int) -> None:
        """As of a plan that has been decided on but not launched, in which `decoding` are all that there is."""
        self.decoding = decoding
        self.left = left
        self._plans = 0
        # By the place in a page of the token that the next plan computes.
        self._by_place: list[list[Request]] = [[] for _ in range(page_size)]
        for request in decoding:
            self._by_place[(request.planned + 1) % page_size].append(request)

    def at_page_border(self) -> list[Request]:
        """Those whose next token begins a page."""
        return self._by_place[-self._plans % len(self._by_place)]

    def planned(self) -> None:
        """One plan has been made."""
        self._plans += 1
        self.left -= 1

    def check(self, running: list[Request]) -> None:
        """Raises AssertionError where it is out of date."""
        assert self.decoding == running, "who decodes in a calm"
        for place, requests in enumerate(self._by_place):
            for request in requests:
                assert (request.planned - self._plans - place) % len(self._by_place) == 0, "place in a page"
        assert self.left < min(r.end_at - r.known - r.promised for r in running) + 1, "plans before a limit"


class Running:
    """Admitted requests, in order of admission.  `fail`: ends a request that cannot be served, with a sentence."""

    def __init__(
        self,
        limits: Limits,
        holdings: Holdings,
        slots: Slots,
        waiting: WaitingQueue,
        growth: GrowthEstimate,
        pace: Pace,
        totals: Totals,
        misses: Misses,
        preemption: Preemption,
        fail: Callable[[Request, str], None],
    ) -> None:
        self._limits = limits
        self._holdings = holdings
        self._slots = slots
        self._waiting = waiting
        self._growth = growth
        self._pace = pace
        self._totals = totals
        self._misses = misses
        self._preemption = preemption
        self._fail = fail
        self._requests: list[Request] = []
        # Plans since somebody came, went or was at a limit; from the second on the next ones may be taken for alike.
        self._alike = 0
        self._calm: Calm | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """The request runs from now on, in a slot of its own."""
        self._slots.take(request)
        self._requests.append(request)
        self._stir()

    def remove(self, request: Request) -> None:
        """It does not run any more; its pages are for the caller to release."""
        self._requests.remove(request)
        self._slots.give_back(request)
        self._stir()

    def _stir(self) -> None:
        self._alike = 0
        self._calm = None

    def check(self) -> None:
        """Raises AssertionError where a slot is lost or held twice."""
        self._slots.check(self._requests)
        if self._calm is not None:
            self._calm.check(self._requests)

    def batch(self, in_flight: bool) -> Batch | None:
        """What they compute next, those that sample with one token first.  None: wait for the step in flight.

        The same list of decoding requests as in the batch before means that each of them goes on by one token.
        """
        if self._calm is not None and self._calm_goes_on(self._calm, in_flight):
            return Batch(self._calm.decoding, [])
        self._calm = None
        page_size = self._holdings.page_size
        decoding, others = self._wanting()
        del decoding[self._limits.max_step_tokens :]
        stuck: list[Request] = []
        # Most have room in their last page.
        for request in [r for r in decoding if r.planned >= r.table.num_pages * page_size]:
            if not self._grows(request, request.planned + 1, in_flight):
                if in_flight:
                    return None
                stuck.append(request)
        budget = self._limits.max_step_tokens - len(decoding) + len(stuck)
        share = self.prefill_share(len(decoding) + sum(left == 1 for _, left in others))
        rows: list[Row] = []
        for request, left in sorted(others, key=lambda pair: pair[1] > 1):
            num_tokens = min(left, budget) if left == 1 else min(left, budget, share)
            if num_tokens == 0:
                break
            if not self._grows(request, request.planned + num_tokens, in_flight):
                if in_flight:
                    return None
                continue
            budget -= num_tokens
            share -= num_tokens if left > 1 else 0
            rows.append(next_row(request, num_tokens))
        # Some may have been retracted to make room for others behind them.
        decoding = [r for r in decoding if r.slot is not None and r not in stuck]
        if len(decoding) == len(self._requests) > 0:
            self._calm_down(decoding)
        else:
            self._alike = 0
        return Batch(decoding, [row for row in rows if row.request.slot is not None])

    def _calm_down(self, decoding: list[Request]) -> None:
        """All that run decode in the plan that is being made."""
        self._alike += 1
        left = min(r.end_at - len(r.tokens) - r.promised for r in decoding) - 1
        if self._alike > 1 and left > 0:
            self._calm = Calm(decoding, left, self._holdings.page_size)

    def _calm_goes_on(self, calm: Calm, in_flight: bool) -> bool:
        """Make the plan after the last one like it, if only pages are needed for that and can be had."""
        if calm.left <= 0:
            return False
        for request in calm.at_page_border():
            if not self._grows(request, request.planned + 1, in_flight):
                return False
        calm.planned()
        # Somebody may have been retracted for it.
        return self._calm is calm

    def _wanting(self) -> tuple[list[Request], list[tuple[Request, int]]]:
        """Running requests that decode, and the others with the tokens that they could compute."""
        decoding: list[Request] = []
        others: list[tuple[Request, int]] = []
        decodes = Status.DECODING
        for request in self._requests:
            # This is `request.to_plan`, written out: it is asked of every request in every step.
            known = len(request.tokens) + request.promised
            if request.promised and known >= request.end_at:
                continue
            if request.status is decodes:
                decoding.append(request)
            elif known > request.planned:
                others.append((request, known - request.planned))
        return decoding, others

    def prefill_share(self, decode_rows: int) -> int:
        """Prompt tokens that may go beside so many rows of one token."""
        return self._pace.prefill_tokens(decode_rows, self._limits.max_step_tokens, self._holdings.page_size)

    def _grows(self, request: Request, num_tokens: int, in_flight: bool) -> bool:
        """Make room, but for one that was retracted to make room for others before it."""
        return request.slot is not None and self._make_room(request, num_tokens, in_flight)

    def _make_room(self, request: Request, num_tokens: int, in_flight: bool) -> bool:
        """Grow the request's table, retracting others, or itself, when the pool is dry and nothing is in flight."""
        self._misses.pressure = (f"a running request grew to {num_tokens} tokens", request.message.tenant)
        while not self._holdings.grow(request, num_tokens):
            if in_flight or self._holdings.tier.gives_back():
                return False
            # What is only kept for later goes before anybody who runs has to.
            if self._holdings.pins.give_way():
                continue
            victim = self._victim()
            if victim is request and len(self._requests) == 1:
                # Arrival refuses what cannot fit alone, so this is a fault of ours: better one request than all.
                text = f"no room for {num_tokens} tokens though nothing else runs"
                self._fail(request, text)
                return False
            self.retract(victim)
            if victim is request:
                return False
        return True

    def _victim(self) -> Request:
        """Of the least priority the one admitted last: it loses least, and the oldest always gets on."""
        return min(reversed(self._requests), key=lambda r: r.message.priority)

    def retract(self, request: Request) -> None:
        """Send a request back to the queue; nothing may be in flight."""
        self._totals.retractions += 1
        self._growth.retracted()
        self.remove(request)
        if self._swap_pays(request) and self._holdings.swap_out(request):
            self._totals.swaps += 1
        request.scheduled_tokens += request.computed
        self._holdings.release(request, request.computed, None)
        request.move_to(Status.WAITING)
        request.retractions += 1
        request.times.retracted(self._misses.now)
        request.times_due = True
        request.key = request.tokens.tobytes()
        self._waiting.add(request)

    def _swap_pays(self, request: Request) -> bool:
        """Whether the request's pages go to swap space: as configured, or where copying takes less than computing."""
        if self._holdings.swap is None or self._preemption == "recompute":
            return False
        if self._preemption == "swap":
            return True
        copying = self._holdings.swap.seconds(self._holdings.pages_for(request.computed))
        return copying < self._pace.prefill_seconds(request.computed)
