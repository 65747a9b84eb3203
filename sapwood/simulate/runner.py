"""Runs a trace: the real loop over the real core, with clients, clock and executor that are none.

What is simulated is the world around the scheduler; the scheduler's own code is the server's.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from sapwood.simulate.clients import Clients
from sapwood.simulate.cost import Profile
from sapwood.simulate.executor import Clock, ClockedExecutor
from sapwood.simulate.trace import EOS, VOCABULARY, Trace
from scheduler.process import Loop, build_core
from scheduler.report import Totals
from srt.config import ModelFacts, SchedulerConfig

DEFAULT_POOL_TOKENS = 131_072
DEFAULT_PAGE_SIZE = 16
Knob = int | float | str | bool | None


@dataclass(frozen=True)
class Simulation:
    """What a run brought.  `wall`, `cpu`: real seconds that it took, and processor time."""

    config: SchedulerConfig
    trace: Trace
    clients: Clients
    executor: ClockedExecutor
    totals: Totals
    seconds: float
    wall: float
    cpu: float


def scheduler_config(
    profile: Profile, knobs: dict[str, Knob], pool_tokens: int | None = None, context_length: int | None = None
) -> SchedulerConfig:
    """The scheduler's settings.  `knobs`: fields of SchedulerConfig; the other two: None for what the profile says."""
    page_size = int(knobs.get("page_size") or DEFAULT_PAGE_SIZE)
    tokens = pool_tokens or profile.pool_tokens or DEFAULT_POOL_TOKENS
    base = SchedulerConfig(
        run_dir="",
        model=ModelFacts(
            path="",
            name="simulated",
            model_type="",
            vocab_size=VOCABULARY + 1,
            context_length=context_length or profile.context_length,
            eos_token_ids=(EOS,),
        ),
        device="simulated",
        dtype="",
        threads=0,
        attention_backend="",
        page_size=page_size,
        num_pages=max(1, tokens // page_size),
        disable_radix_cache=False,
        schedule_policy="lpm",
        max_step_tokens=512,
        max_running_requests=64,
        max_queued_requests=None,
        overlap=True,
    )
    return msgspec.structs.replace(base, **knobs)


def simulate(trace: Trace, profile: Profile, config: SchedulerConfig) -> Simulation:
    """Run a trace to its end.  Raises StartError for a setting that is unknown, Stalled when the scheduler hangs."""
    clock = Clock()
    clients = Clients(trace, clock, profile.scheduling.request)
    executor = ClockedExecutor(clock, profile, clients.answer)
    core = build_core(config)
    # The loop is written for sockets; what it asks of them is what Clients has.
    socket = cast(Any, clients)
    loop = Loop(core, executor, socket, socket, socket, config.overlap, clock)
    begin, cpu = time.perf_counter(), time.process_time()
    with _quietly():
        loop.run()
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Simulation(config, trace, clients, executor, core.totals, clock.now, wall, cpu)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without garbage collection, which would walk the whole tree again and again, and without the loop's log."""
    log = logging.getLogger("sapwood.scheduler")
    level, collecting = log.level, gc.isenabled()
    log.setLevel(logging.WARNING)
    gc.disable()
    try:
        yield
    finally:
        log.setLevel(level)
        if collecting:
            gc.enable()
