"""`sapwood profile`: run designed steps on the real executor, and fit the step times that `simulate` needs.

Steps of three kinds, each at several context lengths: batches that decode, chunks of one prompt, and both mixed.  The
model is read as the server reads it; the pages hold whatever they hold, since no step time depends on what.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from sapwood.pull import resolve_model
from sapwood.simulate.cost import Fitted, Load, Profile, Scheduling, load_of, write_profile
from sapwood.simulate.fit import Fit, Point, fit
from sapwood.simulate.runner import scheduler_config, simulate
from sapwood.simulate.trace import Space, Trace, TraceRequest, plain
from srt.child import Phases, StartError
from srt.config import SchedulerConfig, ServerConfig
from srt.messages import SamplingParams
from srt.plan import Executor, Plan, SlotOpen
from srt.resolve import Resolved, resolve

DEFAULT_CONTEXT = 4096
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CHUNKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Contexts of a design, as shares of the longest.
SHARES = (1 / 64, 1 / 4, 1.0)


@dataclass(frozen=True)
class Row:
    """A request in a step: tokens [start, start + new) of its text, and whether the next is sampled."""

    start: int
    new: int
    samples: bool = True


Step = tuple[Row, ...]


def design(max_tokens: int, max_rows: int, context: int, pool_tokens: int, page_size: int) -> list[Step]:
    """The steps to measure, none of which exceeds a limit."""
    steps: list[Step] = []
    contexts = [max(1, int(context * share)) for share in SHARES]
    batches = [rows for rows in BATCHES if rows <= min(max_rows, max_tokens)]
    chunks = [tokens for tokens in CHUNKS if tokens < max_tokens] + [max_tokens]
    for length in contexts:
        steps += [(Row(length - 1, 1),) * rows for rows in batches]
        steps += [(Row(length - new, new),) for new in chunks if new <= length]
    steps += [(Row(0, new),) for new in chunks if new <= context]
    # Chunks that are not the last of their prompts: the output layer has nothing to do for them.
    steps += [(Row(0, new, samples=False),) for new in chunks[::2] if new <= context]
    steps += [(Row(0, 2, samples=False),) * rows for rows in batches if 2 * rows <= max_tokens and context > 1]
    for rows in batches[2::2]:
        for new in chunks[2::2]:
            if new + rows <= max_tokens and new <= context:
                steps.append((*(Row(contexts[1] - 1, 1),) * rows, Row(0, new)))
    # Several prompts begin in one step, as in a burst of short ones.
    for rows in batches[1:4]:
        if max_tokens // rows >= 2:
            steps.append((Row(0, min(max_tokens // rows, context)),) * rows)

    def fits(step: Step) -> bool:
        pages = sum(-(-(row.start + row.new) // page_size) for row in step)
        return len(step) <= max_rows and pages * page_size <= pool_tokens

    return list(dict.fromkeys(filter(fits, steps)))


def plan_of(number: int, step: Step, page_size: int, vocab_size: int, opened: tuple[SlotOpen, ...] = ()) -> Plan:
    """The plan of a step: each row on pages of its own, from the first of the pool on."""
    rng = np.random.default_rng(number)
    ends = [row.start + row.new for row in step]
    pages = [-(-end // page_size) for end in ends]
    kv_indptr = np.concatenate([[0], np.cumsum(pages)]).astype(np.int32)
    positions = [np.arange(row.start, end, dtype=np.int32) for row, end in zip(step, ends, strict=True)]
    out_slots = [(int(first) * page_size + place) for first, place in zip(kv_indptr, positions, strict=False)]
    news = [row.new for row in step]
    return Plan(
        step=number,
        page_size=page_size,
        slots=np.arange(len(step), dtype=np.int32),
        token_ids=rng.integers(0, vocab_size, sum(news)).astype(np.int32),
        positions=np.concatenate(positions),
        out_slots=np.concatenate(out_slots).astype(np.int32),
        qo_indptr=np.concatenate([[0], np.cumsum(news)]).astype(np.int32),
        kv_indptr=kv_indptr,
        kv_indices=np.arange(kv_indptr[-1], dtype=np.int32),
        kv_last_page_len=np.array([(end - 1) % page_size + 1 for end in ends], dtype=np.int32),
        samples=np.array([row.samples for row in step], dtype=np.bool_),
        copies=np.empty((0, 3), dtype=np.int32),
        prompt_logprobs=np.full(len(step), -1, dtype=np.int32),
        prompt_next=np.full(len(step), -1, dtype=np.int32),
        opened=opened,
    )


def measure(
    executor: Executor, steps: Sequence[Step], page_size: int, vocab_size: int, slots: int, repeats: int
) -> list[Point]:
    """Median seconds of each step.  The steps come in another order each time, so that a disturbance hits many once."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    empty = np.empty(0, dtype=np.int32)
    opened = tuple(SlotOpen(slot, sampling, 0, np.zeros(1, dtype=np.int32), empty) for slot in range(slots))
    number = 0
    executor.launch(plan_of(number, steps[0] * 1, page_size, vocab_size, opened)).wait()
    loads: dict[Step, Load] = {}
    taken: dict[Step, list[float]] = {step: [] for step in steps}
    order = list(steps)
    for _ in range(repeats):
        random.Random(number).shuffle(order)
        for step in order:
            number += 1
            plan = plan_of(number, step, page_size, vocab_size)
            loads[step] = load_of(plan)
            taken[step].append(executor.launch(plan).wait().seconds)
    return [Point(loads[step], statistics.median(taken[step])) for step in steps]


def measure_scheduling(profile: Profile, rows: int, context: int) -> Scheduling:
    """Processor seconds of the scheduler for a step, and for each row of it, on this machine.

    A simulation runs the scheduler's own code at full speed: the processor time it takes is the scheduler's (and a
    little more, for clients and clock, as sockets take in the server).
    """

    def per_step(batch: int) -> float:
        out = min(200, context // 2)
        requests = [
            TraceRequest(0.0, (plain(Space.PRIVATE, number, 8),), (plain(Space.OUTPUT, number, out),), out)
            for number in range(batch)
        ]
        config = scheduler_config(profile, {"max_running_requests": batch, "max_step_tokens": 8 * batch + 8}, 65_536)
        run = simulate(Trace("scheduling", requests), profile, config)
        return run.cpu / run.executor.work.steps

    one, many = (statistics.median(per_step(batch) for _ in range(5)) for batch in (1, rows))
    row = max(0.0, (many - one) / max(1, rows - 1))
    return Scheduling(step=max(0.0, one - row), row=row, request=REQUEST_SECONDS)


# What a request takes outside the scheduler and the executor, on an idle machine; see docs/simulator.md.
REQUEST_SECONDS = 0.004


def profile_model(resolved: Resolved, context: int, repeats: int) -> tuple[Fitted, Fit]:
    """Measure and fit.  Raises StartError when the model cannot be loaded."""
    config = next(c for _, _, c in resolved.role_configs("") if isinstance(c, SchedulerConfig))
    from srt.model.worker import build_executor

    executor = build_executor(config, Phases())
    try:
        steps = design(
            config.max_step_tokens, config.max_running_requests, context, resolved.pool_tokens, config.page_size
        )
        points = measure(
            executor, steps, config.page_size, config.model.vocab_size, config.max_running_requests, repeats
        )
    finally:
        executor.close()
    found = fit(points)
    profile = msgspec.structs.replace(
        found.profile,
        context_length=config.model.context_length,
        pool_tokens=resolved.pool_tokens,
        facts={
            "model": config.model.name,
            "device": config.device,
            "dtype": config.dtype,
            "threads": config.threads,
            "page_size": config.page_size,
            "median_error": round(found.median_error, 4),
            "p90_error": round(found.p90_error, 4),
        },
    )
    scheduling = measure_scheduling(profile, min(64, config.max_running_requests), config.model.context_length)
    return msgspec.structs.replace(profile, scheduling=scheduling), found


def run(arguments: argparse.Namespace) -> int:
    """The whole command; the exit code.  Raises StartError."""
    if arguments.repeats < 1:
        raise StartError(f"--repeats {arguments.repeats}: must be at least 1")
    path: Path = arguments.output
    if not path.absolute().parent.is_dir():
        raise StartError(f"--output {path}: no such folder")
    config = ServerConfig(
        model=arguments.model,
        chunked_prefill_size=arguments.chunked_prefill_size,
        max_running_requests=arguments.max_running_requests,
        context_length=arguments.context_length,
        dtype=arguments.dtype,
        threads=arguments.threads,
        attention_backend=arguments.attention_backend,
    )
    resolved = resolve(config, Path(resolve_model(config.model)))
    longest = resolved.facts.context_length
    context = longest if arguments.context_length is not None else min(longest, DEFAULT_CONTEXT)
    begin = time.perf_counter()
    profile, found = profile_model(resolved, context, arguments.repeats)
    write_profile(path, profile)
    print("\n".join(summary(profile, found)))
    print(f"written to {path} after {time.perf_counter() - begin:.0f} s")
    return 0


def summary(profile: Fitted, found: Fit) -> Iterator[str]:
    """What was found, for people."""
    facts = profile.facts
    where = f"{facts['device']}, {facts['dtype']}, {facts['threads']} threads"
    yield f"{facts['model']} on {where}: {len(found.points)} steps"
    yield "tokens in a step: " + ", ".join(f"{count} {1000 * seconds:.1f} ms" for count, seconds in profile.tokens)
    yield (
        f"for each row {1e6 * profile.row:.1f} us, sampled {1e6 * profile.sampled:.1f} us more, "
        f"for each 1,000 cached tokens read {1e6 * 1000 * profile.context:.1f} us, "
        f"for each million query-key pairs {1e3 * 1e6 * profile.pair:.1f} ms"
    )
    scheduling = profile.scheduling
    yield f"scheduling: {1e6 * scheduling.step:.0f} us a step and {1e6 * scheduling.row:.1f} us a row"
    yield (
        f"the fit misses a step's time by {100 * found.median_error:.1f} % (median), {100 * found.p90_error:.1f} % "
        f"(nine of ten), {100 * found.worst_error:.1f} % (worst)"
    )
