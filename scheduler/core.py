"""The scheduler's core: messages and results in, plans and events out.  No sockets, no threads, no clock.

    accept(message)   a new request, an abort, a found stop string
    plan(now)         what the next step does: running rows first, then prefill chunks, then new admissions
    commit(result, now)    the sampled tokens enter the requests, the tree and the streams
    take_events()     what clients are to be told

`plan` may be called while the step before is still in flight; that step's tokens are then promises, known to the
executor alone.  A request that turns out to have ended in it has one wasted row in the next step.  Retraction is
only decided when nothing is in flight, so a retracted request never has a token on its way.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from radix import PagePool, Pins, RadixTree
from scheduler.batch import Batch, Planner, Row, next_row
from scheduler.door import Door
from scheduler.early_aborts import EarlyAborts
from scheduler.events import Event, Outgoing, add_prompt_logprobs, token_logprob
from scheduler.growth import GrowthEstimate
from scheduler.holdings import Copy, Holdings
from scheduler.limits import Limits
from scheduler.misses import Misses
from scheduler.pace import Pace
from scheduler.policy import Policy
from scheduler.report import Totals
from scheduler.request import Request, Status
from scheduler.running import Running
from scheduler.sessions import Sessions
from scheduler.slots import Slots
from scheduler.swap import SwapSpace
from scheduler.tier import DiskTier
from scheduler.waiting import WaitingQueue
from srt.messages import Abort, Finish, Generate, Rejected, StopFound
from srt.plan import Plan, StepResult
from srt.stats import SchedulerStats


@dataclass(slots=True)
class InFlight:
    """A launched step: its rows as they were then."""

    step: int
    batch: Batch


class Scheduler:
    """Decides; see the head of the file.  `policy`, `pool` and `tree` are passed in; time is an argument."""

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        tree: RadixTree,
        policy: Policy,
        use_cache: bool = True,
        stream_interval: int = 1,
        pace: Pace | None = None,
        tier: DiskTier | None = None,
        swap: SwapSpace | None = None,
        preemption: Literal["auto", "recompute", "swap"] = "auto",
        pins: Pins | None = None,
    ) -> None:
        self.limits = limits
        self._outgoing = Outgoing(stream_interval)
        self.holdings = Holdings(pool, tree, use_cache, tier, swap, pins)
        self.growth = GrowthEstimate()
        self.pace = pace or Pace(None)
        self.totals = Totals()
        self._requests: dict[str, Request] = {}
        self.policy = policy
        self._misses = Misses(tree, pool.page_size)
        self.holdings.on_evict.append(self._misses.evicted)
        self.sessions = Sessions(tree)
        self._waiting = WaitingQueue(self.holdings, policy)
        self._in_flight: deque[InFlight] = deque()
        self._slots = Slots(limits.max_running_requests)
        self._running = Running(
            limits,
            self.holdings,
            self._slots,
            self._waiting,
            self.growth,
            self.pace,
            self.totals,
            self._misses,
            preemption,
            self._fail,
        )
        self._door = Door(limits, self._waiting)
        self._early_aborts = EarlyAborts()
        self._planner = Planner(pool.page_size)
        self._next_step = 0
        self._arrivals = 0

    # ---- what is there -------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Admitted requests."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or retracted."""
        return len(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not (self._waiting or self._running or self._in_flight)

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order; a request's last event has its finish."""
        return self._outgoing.take()

    def stats(self, now: float) -> SchedulerStats:
        """Gauges of this moment and totals since the start."""
        pool = self.holdings.pool
        return self.totals.stats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_cached=self.holdings.tree.evictable_pages + self.holdings.pins.idle_pages(),
            pages_evicted=self.holdings.evicted_pages,
            page_size=pool.page_size,
            oldest_wait_seconds=self._waiting.oldest_wait(now),
            overtake_bound_seconds=self.policy.overtake_seconds(self.limits.context_length),
            others={**self.holdings.tier.stats(), **self.holdings.pin_stats()},
        )

    # ---- messages ------------------------------------------------------------------------------------------

    def accept(self, message: Generate | Abort | StopFound, now: float) -> None:
        """Take one message.  What cannot be served is answered at once, by an event."""
        self._misses.now = now
        if isinstance(message, Generate):
            self._arrive(message, now)
        elif isinstance(message, Abort):
            self._abort(message.rid)
        else:
            self._stop_found(message)

    def flush(self) -> bool:
        """Forget every cached prefix, pinned ones too.  False, unchanged, while a request holds one."""
        if self._running or self._in_flight or not self.holdings.flush():
            return False
        self._waiting.forget_matches()
        return True

    def _arrive(self, message: Generate, now: float) -> None:
        self._arrivals += 1
        prompt_tokens = len(message.prompt_ids) // 4
        room = min(self.limits.context_length, self.holdings.pool.num_pages * self.holdings.page_size + 1)
        refusal = self._door.refusal(message, room, known=message.rid in self._requests)
        if refusal is not None:
            gives_way, rejected = refusal
            if gives_way is None:
                self._outgoing.rejected(rejected)
                return
            self._refuse(gives_way, rejected)
        # The last sampled token needs no slot in the pool, hence the one more above.
        most = room - prompt_tokens
        wanted = message.sampling.max_new_tokens
        stop_ids = frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        request = Request(message, now, self._arrivals, most if wanted is None else min(wanted, most), stop_ids)
        self._requests[message.rid] = request
        self._waiting.add(request)
        self.sessions.began(request, now)
        self._door.entered(request, now)
        if self._early_aborts.take(message.rid):
            self._abort(message.rid)

    def _refuse(self, request: Request, rejected: Rejected) -> None:
        """End a request that has never been admitted; nobody has heard of it yet."""
        self._end(request, Status.FAILED, None, 0)
        self._outgoing.rejected(rejected)

    def _expire(self, now: float) -> None:
        """End those whose time is up, and refuse those that have waited too long for their first admission."""
        for request, word in self._door.expired(now):
            if isinstance(word, Rejected):
                self._refuse(request, word)
            else:
                self._end(request, Status.CANCELLED, word, request.computed)

    def _abort(self, rid: str) -> None:
        request = self._requests.get(rid)
        if request is None:
            self._early_aborts.note(rid)
            return
        self.totals.aborts += 1
        self._end(request, Status.CANCELLED, Finish("abort", message="the request was aborted"), request.computed)

    def _stop_found(self, message: StopFound) -> None:
        request = self._requests.get(message.rid)
        if request is None:
            return
        self.growth.finished(message.output_tokens)
        kept = min(request.computed, request.prompt_tokens + message.output_tokens)
        self._end(request, Status.FINISHED, None, kept)

    # ---- planning ------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """The next step, or None when there is nothing to do, or nothing before the step in flight is committed."""
        self._misses.now = now
        self.holdings.tier.poll(now)
        self.holdings.pins.expire(now)
        self._expire(now)
        retractions = self.totals.retractions
        batch = self._running.batch(bool(self._in_flight))
        if batch is None:
            return None
        copies: list[Copy] = []
        if self.totals.retractions == retractions:
            copies = self._admit_waiting(batch, now)
        if not batch:
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        plan = self._planner.plan(step, batch, copies, *self._slots.changes())
        batch.launched()
        self._in_flight.append(InFlight(step, batch))
        return plan

    # ---- admission -----------------------------------------------------------------------------------------

    def _admit_waiting(self, batch: Batch, now: float) -> list[Copy]:
        """Admit in the policy's order while budgets last; adds the first rows of those admitted."""
        copies: list[Copy] = []
        if not self._waiting or not self._slots.any_free:
            return copies
        share = self._running.prefill_share(batch.decode_rows) - batch.prefill_tokens
        budget = min(self.limits.max_step_tokens - batch.num_tokens, share)
        if budget <= 0:
            return copies
        reserve = self.growth.pages(self._running, self.holdings.page_size)
        prefilling = [request for request in self._running if request.status is Status.PREFILLING]
        for request in self._waiting.ordered(now):
            if budget <= 0 or not self._slots.any_free:
                break
            if self._waiting.awaits_shared_prefix(request, prefilling):
                continue
            self._misses.pressure = (f"a request of {request.known} tokens was admitted", request.message.tenant)
            # What runs alone may use the whole pool: its limit was set so that it fits.
            growth = self.holdings.pages_for(self.growth.tokens(request, self.holdings.page_size))
            kept_free = reserve + growth if self._running else 0
            if self.holdings.tier.holds(request, kept_free):
                continue
            own_copies = self.holdings.admit(request, kept_free)
            # Where nothing runs nobody will make room, so pins do.
            while own_copies is None and self._stuck and self.holdings.pins.give_way():
                own_copies = self.holdings.admit(request, kept_free)
            if own_copies is None:
                break
            num_tokens = min(request.to_plan, budget)
            if not self.holdings.grow(request, request.planned + num_tokens):
                self.holdings.release(request, request.computed if not own_copies else request.cached, None)
                break
            copies += own_copies
            budget -= num_tokens
            self._start(request, now)
            self._waiting.remove(request)
            batch.add(next_row(request, num_tokens))
            prefilling.append(request)
            reserve += self.growth.pages((request,), self.holdings.page_size)
        return copies

    @property
    def _stuck(self) -> bool:
        """Nothing is under way that could give pages back."""
        return not (self._running or self._in_flight)

    def _start(self, request: Request, now: float) -> None:
        request.move_to(Status.PREFILLING)
        if self.holdings.swap is not None:
            self.holdings.swap.drop(request.rid)
        self._running.add(request)
        self.totals.prompt_lookups(request)
        self.holdings.tier.admitted(request)
        if request.first_cached is None:
            request.cache_report = self._misses.report(request, self.holdings.caches(request), self.holdings.use_cache)
            # What a retraction makes the server compute again is not the tenant's fault.
            self.policy.charge(request, request.prompt_tokens - request.computed, 0)
            request.first_cached = request.computed
        request.times.admitted(now)
        request.scheduled_tokens -= request.computed

    # ---- commit --------------------------------------------------------------------------------------------

    def commit(self, result: StepResult, now: float) -> None:
        """Take in what the oldest step in flight brought."""
        flight = self._take_flight(result.step)
        batch = flight.batch
        self.totals.step(result.seconds, len(batch), batch.num_tokens)
        self.pace.observe(result.seconds, batch.decode_rows, batch.prefill_tokens)
        self.holdings.tier.observe_step(result.seconds, batch.prefill_tokens)
        tokens = result.token_ids.tolist()
        computed = self._commit_decoding(batch.decoding, tokens, result)
        for index, row in enumerate(batch.rows, len(batch.decoding)):
            if index in result.errors:
                self._fail(row.request, result.errors[index])
            elif not row.request.is_terminal:
                computed += row.end - row.start
                self._commit_row(row, index, tokens[index], result, now)
        self.totals.computed_tokens += computed
        self.holdings.settle(flight.step)

    def _commit_decoding(self, requests: list[Request], tokens: list[int], result: StepResult) -> int:
        """One more token for each of `requests`; returns how many got it.  `tokens`: theirs, and maybe more."""
        special = {*result.errors, *result.logprobs}
        decoding, tell = Status.DECODING, self._outgoing.token
        computed = 0
        for index, (request, token) in enumerate(zip(requests, tokens, strict=False)):
            # The others have ended since.
            if request.status is not decoding:
                continue
            if special and index in special:
                if index in result.errors:
                    self._fail(request, result.errors[index])
                    continue
                request.unsent_logprobs.append(token_logprob(token, result.logprobs[index], 0))
            computed += 1
            request.computed += 1
            # This is `_add_token`, written out: it is done for nearly every row of every step.
            request.promised -= 1
            request.tokens.append(token)
            if token in request.stop_ids or len(request.tokens) >= request.end_at:
                self._finish(request, token)
            else:
                tell(request, token)
        self.totals.output_tokens += computed
        if self.policy.charges_outputs:
            for request in requests:
                self.policy.charge(request, 0, 1)
        return computed

    def _commit_row(self, row: Row, index: int, token: int, result: StepResult, now: float) -> None:
        request = row.request
        request.computed = row.end
        if index in result.prompt_logprobs:
            add_prompt_logprobs(request, row.start, result.prompt_logprobs[index])
        in_prompt = min(request.computed, len(request.key) // 4)
        last = self._in_flight[-1].step if self._in_flight else None
        self.holdings.publish(request, in_prompt, last)
        if row.samples:
            if request.status is Status.PREFILLING:
                request.move_to(Status.DECODING)
                request.times.first_token(now)
            if index in result.logprobs:
                request.unsent_logprobs.append(token_logprob(token, result.logprobs[index], 0))
            self.totals.output_tokens += 1
            self.policy.charge(request, 0, 1)
            self._add_token(request, token)
        elif request.computed >= request.prompt_tokens and request.max_new_tokens == 0:
            self._end(request, Status.FINISHED, Finish("length"), request.computed)

    def commit_failure(self, step: int, message: str) -> None:
        """The oldest step in flight failed as a whole: exactly its requests fail."""
        flight = self._take_flight(step)
        for request in (*flight.batch.decoding, *(row.request for row in flight.batch.rows)):
            self._fail(request, message)
        self.holdings.settle(step)

    def _fail(self, request: Request, message: str) -> None:
        """The model could not compute a request's row; nothing happens to one that has ended already."""
        if not request.is_terminal:
            self._end(request, Status.FAILED, Finish("error", message=message, status=500), 0)

    def _take_flight(self, step: int) -> InFlight:
        flight = self._in_flight.popleft()
        if flight.step != step:
            raise ValueError(f"step {step} was committed, step {flight.step} is due")
        return flight

    def _add_token(self, request: Request, token: int) -> None:
        request.promised -= 1
        request.tokens.append(token)
        if token in request.stop_ids or len(request.tokens) >= request.end_at:
            self._finish(request, token)
        else:
            self._outgoing.token(request, token)

    def _finish(self, request: Request, token: int) -> None:
        """`token`, which the request has already, is its last."""
        finish = Finish("stop", matched=token) if token in request.stop_ids else Finish("length")
        request.unsent.append(token)
        self.growth.finished(request.num_outputs)
        self._end(request, Status.FINISHED, finish, request.computed)

    # ---- endings -------------------------------------------------------------------------------------------

    def _end(self, request: Request, status: Status, finish: Finish | None, keep_tokens: int) -> None:
        """The one way out: state, pages, slot and the client's last event change together.

        `keep_tokens`: computed tokens that the tree may have.  Without `finish` the client knows already.
        """
        was_waiting = request.status is Status.WAITING
        request.move_to(status)
        request.finish = finish
        del self._requests[request.rid]
        if self.holdings.swap is not None:
            self.holdings.swap.drop(request.rid)
        if finish is None:
            self._outgoing.forget(request)
        else:
            self._outgoing.ended(request)
        if was_waiting:
            self._waiting.remove(request)
            self.sessions.ended(request, 0, finish, self._misses.now)
            return
        self._running.remove(request)
        in_flight = request.planned > request.computed and bool(self._in_flight)
        self.holdings.release(request, keep_tokens, self._in_flight[-1].step if in_flight else None)
        self.sessions.ended(request, keep_tokens if self.holdings.stores(request) else 0, finish, self._misses.now)

    # ---- invariants ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Recompute what is kept for speed and compare.  Raises AssertionError."""
        everybody = [*self._waiting, *self._running]
        assert sorted(self._requests) == sorted(r.rid for r in everybody), "requests = waiting + running"
        self._running.check()
        for request in everybody:
            assert not request.is_terminal, "who is here has not ended"
            assert request.cached <= request.computed <= request.planned <= request.known + request.promised
            if request.status is Status.DECODING:
                assert request.planned == request.known + request.promised - 1, "all but the last token is planned"
            assert self.holdings.pages_for(request.planned) <= request.table.num_pages, "planned tokens have pages"
        for request in self._waiting:
            assert request.table.num_pages == 0, "who waits owns no page"
            assert request.lock is None, "who waits holds no lock"
        self._waiting.check()
        self.sessions.check()
        self.holdings.check(everybody)
