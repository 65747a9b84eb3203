"""How well the simulator foretells this machine: a real run and a simulated one of the same requests, side by side.

    python -m benchmarks.simulator_validation --model smollm2

In each round: measure designed steps on the real executor, then run a mix (few-shot, conversations, unique prompts)
that arrives faster than it can be served through the real processes.  Then fit one profile to the steps of all rounds,
which are other data than the mixes, and simulate each mix with it.  Printed are throughput and mean time to first token
of both, for each round and as medians of the ratios, and how many times as fast as the real run the simulation was.

Steps and mixes alternate, since a machine that others use too has good and bad minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sapwood.engine import Engine
from sapwood.profile import design, measure, measure_scheduling
from sapwood.pull import resolve_model
from sapwood.simulate.cost import Fitted, Load
from sapwood.simulate.fit import Point, fit
from sapwood.simulate.readers import RecordedRow, read_trace, write_recording
from sapwood.simulate.report import Report, report
from sapwood.simulate.runner import scheduler_config, simulate
from srt.child import Phases
from srt.config import SchedulerConfig, ServerConfig
from srt.resolve import Resolved, resolve

CONTEXT = 2048
ROWS = 24
POOL_TOKENS = 32_768
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Outcome:
    """One run of a mix: tokens in and out per second from the first arrival to the last end, and mean TTFT.

    `steps`, `in_steps`: how many there were, and the seconds spent in them.
    """

    throughput: float
    ttft: float
    seconds: float
    steps: int
    in_steps: float
    hit_rate: float


def mix(span: float, seed: int) -> list[RecordedRow]:
    """Few-shot, conversations and unique prompts that arrive within `span` seconds."""
    rng = random.Random(seed)
    rows = [RecordedRow(rng.random() * span, [("head", 900), (f"few {number}", 80)], 16, 16) for number in range(16)]
    for number in range(8):
        length = rng.randrange(300, 1200)
        rows.append(RecordedRow(rng.random() * span, [(f"unique {number}", length)], 24, 24))
    for number in range(4):
        prompt = [("system", 400)]
        after = None
        for turn in range(3):
            prompt = [*prompt, (f"user {number}.{turn}", 150)]
            arrival = rng.random() * span * 0.5 if after is None else 0.05 * span
            rows.append(RecordedRow(arrival, prompt, 24, 24, after=after))
            after = len(rows) - 1
            prompt = [*prompt, (f"output:{after}", 24)]
    return rows


async def run_real(engine: Engine, rows: list[RecordedRow], seed: int) -> Outcome:
    """The rows through the real processes, each when it is due."""
    rng = random.Random(seed)
    texts: dict[str, list[int]] = {}
    outputs: list[list[int]] = [[] for _ in rows]
    ended = [asyncio.Event() for _ in rows]
    firsts: list[float] = []
    last = 0.0
    begin = time.perf_counter()

    def ids(name: str, length: int) -> list[int]:
        if name.startswith("output:"):
            return outputs[int(name.removeprefix("output:"))][:length]
        known = texts.setdefault(name, [])
        known += [rng.randrange(1000, engine.facts.vocab_size) for _ in range(length - len(known))]
        return known[:length]

    async def one(number: int, row: RecordedRow) -> None:
        nonlocal last
        if row.after is not None:
            await ended[row.after].wait()
            await asyncio.sleep(row.arrival)
        else:
            await asyncio.sleep(max(0.0, begin + row.arrival - time.perf_counter()))
        prompt = [token for name, length in row.prompt for token in ids(name, length)]
        sent = time.perf_counter()
        first = None
        stream = await engine.generate_async(
            input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": row.output_tokens}, stream=True
        )
        async for reply in stream:
            first = first or time.perf_counter()
            outputs[number] = reply["output_ids"]
        assert first is not None
        assert len(outputs[number]) == row.output_tokens, "an output has another length than the simulated one"
        firsts.append(first - sent)
        last = time.perf_counter()
        ended[number].set()

    before = engine.stats()
    await asyncio.gather(*(one(number, row) for number, row in enumerate(rows)))
    after = engine.stats()
    assert before is not None
    assert after is not None
    return outcome(
        rows,
        statistics.mean(firsts),
        last - begin - first_arrival(rows),
        after.steps - before.steps,
        after.step_seconds - before.step_seconds,
        (after.cached_tokens - before.cached_tokens) / (after.prompt_tokens - before.prompt_tokens),
    )


def first_arrival(rows: list[RecordedRow]) -> float:
    """Seconds until anything is sent."""
    return min(row.arrival for row in rows if row.after is None)


def outcome(
    rows: list[RecordedRow], ttft: float, seconds: float, steps: int, in_steps: float, hit_rate: float
) -> Outcome:
    """With the tokens of all rows."""
    tokens = sum(row.output_tokens + sum(length for _, length in row.prompt) for row in rows)
    return Outcome(tokens / seconds, ttft, seconds, steps, in_steps, hit_rate)


def run_simulated(rows: list[RecordedRow], profile: Fitted, resolved: Resolved) -> tuple[Outcome, Report]:
    """The rows in the simulator, written down and read back as a user would have it."""
    with tempfile.TemporaryDirectory() as folder:
        write_recording(Path(folder) / "mix.jsonl", rows)
        trace = read_trace(Path(folder) / "mix.jsonl")
    config = scheduler_config(
        profile,
        {
            "page_size": resolved.config.page_size,
            "max_step_tokens": resolved.max_step_tokens,
            "max_running_requests": resolved.config.max_running_requests,
            "schedule_policy": resolved.config.schedule_policy,
        },
        pool_tokens=resolved.pool_tokens,
        context_length=resolved.facts.context_length,
    )
    figures = report(simulate(trace, profile, config))
    in_steps = figures.busy * figures.seconds
    return outcome(rows, figures.ttft.mean, figures.seconds, figures.steps, in_steps, figures.hit_rate), figures


async def request_seconds(engine: Engine, profile: Fitted, count: int = 15) -> float:
    """What a lone short request takes beyond its step: HTTP left out, since the Engine has none."""
    taken = []
    for _ in range(count):
        begin = time.perf_counter()
        prompt = [random.randrange(1000, engine.facts.vocab_size) for _ in range(8)]
        await engine.generate_async(input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": 1})
        taken.append(time.perf_counter() - begin)
    step = profile.seconds(Load(1, 1, 8, 8, 36)) + profile.scheduling.seconds(1)
    return max(0.0, statistics.median(taken) - step)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    config = ServerConfig(
        model=arguments.model,
        context_length=CONTEXT,
        max_running_requests=ROWS,
        max_total_tokens=POOL_TOKENS,
        log_level="warning",
    )
    resolved = resolve(config, Path(resolve_model(config.model)))
    settings = next(c for _, _, c in resolved.role_configs("") if isinstance(c, SchedulerConfig))
    steps = design(settings.max_step_tokens, ROWS, CONTEXT, POOL_TOKENS, settings.page_size)
    from srt.model.worker import build_executor

    executor = build_executor(settings, Phases())
    points: list[Point] = []
    real: list[tuple[list[RecordedRow], Outcome]] = []
    span = 0.0
    latency = 0.0
    with Engine.from_resolved(resolved) as engine:
        for number in range(arguments.rounds):
            begin = time.perf_counter()
            points += measure(executor, steps, settings.page_size, settings.model.vocab_size, ROWS, 1)
            measured = time.perf_counter() - begin
            if not span:
                # Arrivals in seven tenths of the time that the work takes: there is always a queue.
                span = 0.7 * run_simulated(mix(0.0, 0), fit(points).profile, resolved)[0].seconds
                latency = asyncio.run(request_seconds(engine, fit(points).profile))
            rows = mix(span, number)
            engine.flush_cache()
            real.append((rows, asyncio.run(run_real(engine, rows, number))))
            print(f"round {number}: {measured:.1f} s for {len(steps)} steps, {real[-1][1].seconds:.1f} s for the mix")
    executor.close()
    found = fit(points)
    scheduling = measure_scheduling(found.profile, ROWS, CONTEXT)
    profile = msgspec.structs.replace(found.profile, scheduling=msgspec.structs.replace(scheduling, request=latency))
    print(
        f"fit over {len(points)} steps: misses {100 * found.median_error:.1f} % (median); scheduling "
        f"{1e6 * scheduling.step:.0f} us a step and {1e6 * scheduling.row:.1f} us a row; request {1e3 * latency:.1f} ms"
    )
    ratios = []
    for number, (rows, was) in enumerate(real):
        simulated, figures = run_simulated(rows, profile, resolved)
        ratios.append((simulated.throughput / was.throughput, simulated.ttft / was.ttft, was.seconds / figures.wall))
        print(
            f"round {number}   {'tokens/s':>10} {'TTFT s':>8} {'seconds':>8} {'steps':>6} {'in steps s':>10} {'hit':>6}"
        )
        for name, o in (("real", was), ("simulated", simulated)):
            print(
                f"{name:<9} {o.throughput:10.0f} {o.ttft:8.3f} {o.seconds:8.2f} {o.steps:6d} {o.in_steps:10.2f} "
                f"{o.hit_rate:6.3f}"
            )
        print(
            f"ratio     {ratios[-1][0]:10.3f} {ratios[-1][1]:8.3f}    simulated in {figures.wall:.4f} s, "
            f"{ratios[-1][2]:.0f} times as fast"
        )
    throughput, ttft, speed = (statistics.median(values) for values in zip(*ratios, strict=True))
    print(
        f"simulated / real, median of {arguments.rounds}: throughput {throughput:.3f}, mean TTFT {ttft:.3f}; "
        f"the simulation took 1/{speed:.0f} of the real time"
    )


if __name__ == "__main__":
    main()
