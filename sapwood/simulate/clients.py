"""Everybody who sends requests and reads answers: both ends of the scheduler's sockets, under the virtual clock."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import msgspec

from sapwood.simulate.executor import Clock
from sapwood.simulate.trace import EOS, Trace, token_ids
from srt.messages import Generate, Rejected, SamplingParams, SchedulerInbox, Shutdown, StepOutput, TokenDelta
from srt.stats import SchedulerStats

# After so many waits in which nothing happened nothing ever will.
MAX_IDLE_WAITS = 100_000
# Service of tenants is added up over slices of this many seconds.
SLICE_SECONDS = 0.25
# What a tenant is charged for an output token, in computed prompt tokens; as in the policy `fair`.
OUTPUT_COST = 2.0


class Stalled(Exception):
    """Requests are left, but the scheduler does nothing any more: a fault of the scheduler."""


@dataclass(slots=True)
class Call:
    """One request as its client saw it.  Times in seconds since the start; `waited`: seconds until admission."""

    tenant: str
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    waited: float = 0.0
    finish: str | None = None

    @property
    def served(self) -> bool:
        """It was answered to the end."""
        return self.finish in ("stop", "length")

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.first - self.sent

    @property
    def time_per_token(self) -> float:
        """Mean seconds between two tokens; 0 where there is only one."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass
class Clients:
    """Sends the requests of a trace when they are due, and keeps what comes back.

    Stands in for the scheduler's inbox (`drain`, `wait`) and for its two outboxes (`send`, `flush`).  `latency`:
    seconds from a client to the scheduler and back, all of them before a request arrives.
    """

    trace: Trace
    clock: Clock
    latency: float = 0.0
    calls: list[Call] = field(default_factory=list)
    # Seconds between two tokens of one stream.
    gaps: array[float] = field(default_factory=lambda: array("d"))
    # (moment, report), as often as the scheduler sends them.
    stats: list[tuple[float, SchedulerStats]] = field(default_factory=list)
    # Slice of time -> tenant -> service.
    service: dict[int, dict[str, float]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(float)))

    def __post_init__(self) -> None:
        self.calls = [Call(request.tenant) for request in self.trace.requests]
        self._by_rid = {str(number): call for number, call in enumerate(self.calls)}
        self._left = len(self.calls)
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._due: list[tuple[float, int]] = []
        self._idle_waits = 0
        for number, request in enumerate(self.trace.requests):
            if request.after is None:
                self._due.append((request.arrival + self.latency, number))
            else:
                self._followers[request.after].append(number)
        heapify(self._due)

    def answer(self, number: int) -> list[int]:
        """What request `number` is answered.  An answer that ends by itself has the end-of-sequence token last."""
        request = self.trace.requests[number]
        ids: list[int] = token_ids(request.output).tolist()
        if request.max_new_tokens is None:
            ids[-1] = EOS
        return ids

    # The scheduler's inbox --------------------------------------------------------------------------------------

    def drain(self) -> Iterator[SchedulerInbox]:
        """Requests that have arrived by now, and the end when all have been answered."""
        due, now = self._due, self.clock.now
        while due and due[0][0] <= now:
            moment, number = heappop(due)
            self.calls[number].sent = moment - self.latency
            yield self._generate(number)
        if not self._left:
            yield Shutdown()

    def wait(self, timeout: float | None) -> bool:
        """Time passes until a request arrives, or until `timeout`.  Raises Stalled when nothing can come any more."""
        now = self.clock.now
        self._idle_waits += 1
        if not self._left:
            return True
        if self._due and (timeout is None or self._due[0][0] <= now + timeout):
            self.clock.reach(self._due[0][0])
            return True
        if timeout is None or self._idle_waits > MAX_IDLE_WAITS:
            raise Stalled(f"after {now:.3f} s: {self._left} requests have not ended, and nothing happens any more")
        self.clock.advance(timeout)
        return False

    def _generate(self, number: int) -> Generate:
        request = self.trace.requests[number]
        rid = str(number)
        return Generate(
            rid=rid,
            group=rid,
            prompt_ids=token_ids(request.prompt).tobytes(),
            sampling=SamplingParams(max_new_tokens=request.max_new_tokens, temperature=0.0),
            seed=number,
            tenant=request.tenant,
            priority=request.priority,
        )

    # Its outboxes -----------------------------------------------------------------------------------------------

    def send(self, message: msgspec.Struct) -> None:
        """Take what the scheduler sends."""
        if isinstance(message, StepOutput):
            self._idle_waits = 0
            slice_service = self.service[int(self.clock.now / SLICE_SECONDS)]
            self._take_tokens(message.rids, slice_service)
            for delta in message.deltas:
                self._take(delta, slice_service)
        elif isinstance(message, SchedulerStats):
            self.stats.append((self.clock.now, message))
        elif isinstance(message, Rejected):
            for rid in message.rids:
                self._end(int(rid), message.code or str(message.status))

    def flush(self) -> bool:
        """Nothing is ever left to send."""
        return True

    def _take_tokens(self, rids: tuple[str, ...], service: dict[str, float]) -> None:
        """Each of these got one more token."""
        by_rid, gaps, now = self._by_rid, self.gaps, self.clock.now
        for rid in rids:
            call = by_rid[rid]
            gaps.append(now - call.last)
            call.last = now
            call.tokens += 1
            service[call.tenant] += OUTPUT_COST

    def _take(self, delta: TokenDelta, service: dict[str, float]) -> None:
        number, now = int(delta.rid), self.clock.now
        call = self.calls[number]
        tokens = len(delta.ids) // 4
        if delta.open is not None:
            call.first = now
            call.prompt_tokens = delta.prompt_tokens
            call.cached_tokens = delta.cached_tokens
            call.waited = 0.0 if delta.times is None else delta.times.queue
            service[call.tenant] += delta.prompt_tokens - delta.cached_tokens
        elif tokens:
            self.gaps.append(now - call.last)
        if tokens:
            service[call.tenant] += OUTPUT_COST * tokens
            call.tokens += tokens
            call.last = now
        if delta.finish is not None:
            self._end(number, delta.finish.reason)

    def _end(self, number: int, finish: str) -> None:
        """A request has ended; those that come after it are sent when their pause is over."""
        self.calls[number].finish = finish
        self._left -= 1
        for follower in self._followers.pop(number, ()):
            moment = self.clock.now + self.trace.requests[follower].arrival
            heappush(self._due, (moment + self.latency, follower))
