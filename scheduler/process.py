"""The scheduler's rim: sockets, the clock, the executor, and the loop that joins them to the core."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from radix import PagePool, Pins, PublicHeads, RadixTree, policy_by_name
from scheduler import cache_calls, garbage
from scheduler.core import Scheduler
from scheduler.events import Tokens
from scheduler.inspection import TreeInspection
from scheduler.limits import Limits
from scheduler.pace import Pace
from scheduler.policy import POLICIES
from scheduler.swap import SwapSpace
from scheduler.tier import DiskTier
from scheduler.tier_setup import OpenTier, open_tier
from srt.cache_messages import Call, CallReply
from srt.child import Phases, StartError, configure_logging
from srt.config import SchedulerConfig, inbox_path, read_scheduler_config
from srt.ipc import Inbox, Outbox
from srt.messages import Rejected, SchedulerInbox, Shutdown, StepOutput, TokenDelta
from srt.namespaces import PUBLIC
from srt.plan import Executor, PageMemory, Plan, StepHandle

log = logging.getLogger("sapwood.scheduler")

STATS_SECONDS = 0.25
LOG_SECONDS = 10.0
# How long to wait for messages when something is left to do that no step in flight will bring about.
STALLED_WAIT_SECONDS = 0.02
# With nothing to do for so long, there is time for a garbage collection.
PAUSE_SECONDS = 0.5
# The same while all that is to come is the end of a pin, which may be far off.
LONGEST_WAIT_SECONDS = 60.0


def build_core(config: SchedulerConfig, tier: DiskTier | None = None, memory: PageMemory | None = None) -> Scheduler:
    """The core as configured, over a lower tier; with `memory` it may swap.  Raises StartError: unknown policy."""
    if config.schedule_policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise StartError(f"--schedule-policy {config.schedule_policy}: unknown, choose one of {known}")
    try:
        eviction = policy_by_name(config.radix_eviction_policy)
    except ValueError as error:
        raise StartError(f"--radix-eviction-policy: {error}") from None
    pool = PagePool(config.num_pages, config.page_size)
    tree = RadixTree(pool, eviction, heads=PublicHeads(PUBLIC, config.public_heads, config.page_size))
    limits = Limits(
        context_length=config.model.context_length,
        max_step_tokens=config.max_step_tokens,
        max_running_requests=config.max_running_requests,
        max_queued_requests=config.max_queued_requests,
        max_queued_per_tenant=config.max_queued_per_tenant,
        queue_timeout=config.queue_timeout,
        eos_token_ids=frozenset(config.model.eos_token_ids),
    )
    return Scheduler(
        limits,
        pool,
        tree,
        POLICIES[config.schedule_policy](),
        use_cache=not config.disable_radix_cache,
        stream_interval=config.stream_interval,
        pace=Pace(None if config.tpot_target_ms is None else config.tpot_target_ms / 1000),
        tier=tier,
        swap=None if memory is None or not config.swap_bytes else SwapSpace(memory, config.swap_bytes),
        preemption=config.preemption_mode,
        pins=Pins(tree, config.num_pages, config.page_size, config.max_pinned_share),
    )


class Loop:
    """Runs the core until told to shut down; with `overlap` a step is planned while the one before runs.

    `wake`: a file descriptor that becomes readable when the core has something to take in that is no message.
    """

    def __init__(
        self,
        core: Scheduler,
        executor: Executor,
        inbox: Inbox[SchedulerInbox],
        detokenizer: Outbox,
        front: Outbox,
        overlap: bool,
        clock: Callable[[], float] = time.monotonic,
        wake: int | None = None,
    ) -> None:
        self._core = core
        self._wake = wake
        self._executor = executor
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._front = front
        self._overlap = overlap
        self._clock = clock
        self._inspection = TreeInspection(core.holdings.tree, core.holdings.page_size)
        self._stopping = False
        self._stats_sent = 0.0
        # Processor time of this thread at the last launch.
        self._cpu = 0.0
        self._logged = clock()
        self._logged_tokens = (0, 0, 0)

    def run(self) -> None:
        """Return after Shutdown."""
        running: tuple[Plan, StepHandle] | None = None
        self._cpu = time.thread_time()
        while True:
            self._receive()
            if self._stopping:
                break
            launched = self._launch()
            # A commit may have made room for those that wait: then there is something to plan at once.
            stepped = launched is not None or running is not None
            if running is not None:
                self._commit(*running)
            running = launched
            if running is not None and not self._overlap:
                self._commit(*running)
                running = None
            self._send()
            if not stepped:
                self._rest()
        if running is not None:
            self._commit(*running)
        self._executor.close()

    def _receive(self) -> None:
        now = self._clock()
        for message in self._inbox.drain():
            if isinstance(message, Shutdown):
                self._stopping = True
            elif isinstance(message, Call):
                self._answer(message)
            else:
                self._core.accept(message, now)

    def _answer(self, call: Call) -> None:
        if call.what == "cache_tree":
            # By way of the detokenizer, which knows the text of tokens.
            self._detokenizer.send(self._inspection.answer(call, self._clock()))
            return
        if call.what == "cache_pins":
            self._detokenizer.send(cache_calls.list_pins(self._core.holdings, call, self._clock()))
            return
        if call.what == "unpin":
            self._front.send(cache_calls.unpin(self._core.holdings, call, self._clock()))
        if call.what == "forget":
            self._front.send(cache_calls.forget(self._core.holdings, self._core.sessions, call, self._clock()))
        if call.what in ("sessions", "session_state"):
            self._front.send(self._core.sessions.answer(call, self._clock()))
            return
        if call.what == "flush_cache":
            done = self._core.flush()
            why = "" if done else f"{self._core.num_running} requests are running; try again when none is"
            self._front.send(CallReply(call.call_id, done, why))
        if call.what == "check":
            fault = fault_of(self._core)
            self._front.send(CallReply(call.call_id, not fault, fault))
            return
        self._send_stats()
        if call.what == "stats":
            self._front.send(CallReply(call.call_id, True))

    def _launch(self) -> tuple[Plan, StepHandle] | None:
        begin = self._clock()
        plan = self._core.plan(begin)
        if plan is None:
            return None
        self._core.totals.plan_seconds += self._clock() - begin
        handle = self._executor.launch(plan)
        spent, self._cpu = self._cpu, time.thread_time()
        self._core.totals.scheduled(self._cpu - spent)
        return plan, handle

    def _commit(self, plan: Plan, handle: StepHandle) -> None:
        try:
            result = handle.wait()
        except Exception as error:
            log.exception("step %d failed; its %d requests end with an error", plan.step, plan.num_rows)
            self._core.commit_failure(plan.step, f"the forward pass failed: {error}")
            return
        self._core.commit(result, self._clock())

    def _send(self) -> None:
        deltas: list[TokenDelta] = []
        rids: tuple[str, ...] = ()
        ids = b""
        for event in self._core.take_events():
            if isinstance(event, Tokens):
                rids, ids = tuple(event.rids), event.ids.tobytes()
            elif isinstance(event, Rejected):
                self._front.send(event)
            else:
                deltas.append(event)
        if deltas or rids:
            self._detokenizer.send(StepOutput(tuple(deltas), rids, ids))
        now = self._clock()
        if now - self._stats_sent >= STATS_SECONDS or self._core.idle:
            self._send_stats()
        if now - self._logged >= LOG_SECONDS:
            self._log(now)

    def _send_stats(self) -> None:
        self._stats_sent = self._clock()
        self._inspection.note(self._stats_sent)
        self._front.send(self._core.stats(self._stats_sent))

    def _log(self, now: float) -> None:
        totals = self._core.totals
        tokens = (totals.prompt_tokens, totals.cached_tokens, totals.output_tokens)
        prompt, cached, output = (new - old for new, old in zip(tokens, self._logged_tokens, strict=True))
        seconds, self._logged, self._logged_tokens = now - self._logged, now, tokens
        if prompt or output:
            log.info(
                "running %d, waiting %d; cached %d of %d prompt tokens (%.0f%%), %.1f output tok/s, pool %.0f%% used",
                self._core.num_running,
                self._core.num_waiting,
                cached,
                prompt,
                100 * cached / prompt if prompt else 0,
                output / seconds,
                100 * (1 - self._core.holdings.available / self._core.holdings.pool.num_pages),
            )

    def _rest(self) -> None:
        """Nothing runs: sleep until a message comes or a pin's time is up, or shortly where something is left to do."""
        unsent = not (self._detokenizer.flush() and self._front.flush())
        seconds = self._seconds_to_rest(unsent)
        if seconds is None and garbage.due():
            if self._wait(PAUSE_SECONDS):
                return
            garbage.collect()
        self._wait(seconds)

    def _seconds_to_rest(self, unsent: bool) -> float | None:
        """None: until there is something to do."""
        if unsent or not self._core.idle:
            return STALLED_WAIT_SECONDS
        expiry = self._core.holdings.pins.next_expiry
        return None if expiry is None else min(max(0.0, expiry - self._clock()), LONGEST_WAIT_SECONDS)

    def _wait(self, seconds: float | None) -> bool:
        """Until a message comes or the core is woken.  False when the time was up first."""
        if self._wake is None:
            return self._inbox.wait(seconds)
        return self._inbox.wait(seconds, self._wake)


def fault_of(core: Scheduler) -> str:
    """What is wrong with the core's books, recounted page by page; empty when nothing is."""
    try:
        core.check()
    except AssertionError as error:
        log.exception("the scheduler's books do not agree")
        return str(error) or "an invariant does not hold; the scheduler's log says where"
    return ""


def serve(
    settings_path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """Run the scheduler process; see `srt.child.run_worker`."""
    config = read_scheduler_config(settings_path)
    configure_logging(config.log_level, "scheduler")
    inbox: Inbox[SchedulerInbox] = Inbox(context, inbox_path(config.run_dir, "scheduler"), SchedulerInbox)
    # Threads that spin while they wait take the core from whoever has something to do: the kernels' own threads, the
    # other processes.  It must be set before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with phases("import torch"):
        from srt.model.worker import build_executor
    executor = build_executor(config, phases)
    opened: OpenTier | None = None
    if config.disk_cache_dir is not None:
        with phases("disk cache"):
            opened = open_tier(config, executor.memory)
    core = build_core(config, None if opened is None else opened.tier, executor.memory)
    detokenizer = Outbox(context, inbox_path(config.run_dir, "detokenizer"))
    ready(0, page_size=config.page_size, pages=config.num_pages, policy=config.schedule_policy)
    wake = None if opened is None else opened.wake.fd
    with garbage.few_collections():
        Loop(core, executor, inbox, detokenizer, front, config.overlap, wake=wake).run()
    if opened is not None:
        opened.close()
    for socket in (inbox, detokenizer):
        socket.close()
