"""What scheduling costs a step, and how much of it the step does not hide.

    python -m benchmarks.scheduler_overhead                       batches of 1, 16, 64 and 256, steps of 5 and 10 ms
    python -m benchmarks.scheduler_overhead --no-overlap          the same without overlap, for contrast

The real loop runs the real core in real time; 2,000 requests wait, and for each that ends another comes.  Only the
device is simulated: its steps take a fixed time and follow one another, each beginning when the one before has ended
and it has been launched.  Messages are decoded from frames and encoded to frames as at the sockets of the server.

    cpu        processor time of the loop for a step: messages, planning, commit, sending
    exposed    time in which the device had nothing to do since the next step had not been launched: what is not hidden
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from scheduler.garbage import few_collections
from scheduler.process import Loop, build_core
from srt.config import ModelFacts, SchedulerConfig
from srt.ipc import Decoder
from srt.messages import Generate, SamplingParams, SchedulerInbox, Shutdown, StepOutput, pack_ids
from srt.plan import Plan, StepResult

HEADS = 8
HEAD_TOKENS = 256
OWN_TOKENS = 64
OUTPUT_TOKENS = 64
VOCABULARY = 32_000
WARM_UP_STEPS = 60


@dataclass
class Step:
    """Done at a moment of the real clock."""

    end: float
    result: StepResult

    def wait(self) -> StepResult:
        """Sleep until then."""
        time.sleep(max(0.0, self.end - time.perf_counter()))
        return self.result


@dataclass
class Device:
    """Implements `srt.plan.Executor`: steps of a fixed time, one after another."""

    step_seconds: float
    free_at: float = 0.0
    # For each step but the first: how long the device waited for it, its rows, and the loop's processor time so far.
    exposed: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def launch(self, plan: Plan) -> Step:
        """Queue a step."""
        now = time.perf_counter()
        self.cpu.append(time.thread_time())
        if self.free_at:
            self.exposed.append(max(0.0, now - self.free_at))
        self.rows.append(plan.num_rows)
        self.free_at = max(now, self.free_at) + self.step_seconds
        return Step(self.free_at, StepResult(plan.step, plan.slots, seconds=self.step_seconds))

    def close(self) -> None:
        """Nothing to give back."""


class Front:
    """Feeds the loop and takes what it sends.  As many requests are there at any time as `population` says."""

    def __init__(self, population: int, batch: int, steps: int, device: Device) -> None:
        rng = random.Random(1)
        self._heads = [rng.choices(range(VOCABULARY), k=HEAD_TOKENS) for _ in range(HEADS)]
        self._rng = rng
        self._decode: Decoder[SchedulerInbox] = Decoder(SchedulerInbox, "benchmark")
        self._encode = msgspec.msgpack.Encoder().encode
        self._made = 0
        self._steps = steps
        self._device = device
        # Made beforehand: the client's work is not the scheduler's.
        spare = 50 + 2 * steps * batch // OUTPUT_TOKENS
        self._frames = [self._frame() for _ in range(population)]
        self._spare = [self._frame() for _ in range(spare)]

    def _frame(self) -> bytes:
        self._made += 1
        prompt = self._heads[self._made % HEADS] + self._rng.choices(range(VOCABULARY), k=OWN_TOKENS)
        # Lengths differ, so that requests end one by one.
        sampling = SamplingParams(max_new_tokens=self._rng.randint(1, 2 * OUTPUT_TOKENS), ignore_eos=True)
        rid = str(self._made)
        return self._encode(Generate(rid, rid, pack_ids(prompt), sampling, seed=self._made))

    def drain(self) -> Iterator[SchedulerInbox]:
        """What has come."""
        frames, self._frames = self._frames, []
        for frame in frames:
            message = self._decode(frame)
            assert message is not None
            yield message
        if len(self._device.rows) >= self._steps:
            yield Shutdown()

    def wait(self, timeout: float | None) -> bool:
        """There is always something to do."""
        raise AssertionError("the loop rests though requests wait")

    def send(self, message: msgspec.Struct) -> None:
        """Encode; for each request that ended another comes."""
        self._encode(message)
        if isinstance(message, StepOutput):
            self._frames += [self._spare.pop() for delta in message.deltas if delta.finish is not None]

    def flush(self) -> bool:
        """Nothing waits."""
        return True


@dataclass(frozen=True)
class Overhead:
    """Milliseconds a step, processor time and exposed time; `rows`: mean batch."""

    rows: float
    cpu: float
    exposed: float
    exposed_p50: float
    exposed_p99: float


def run(batch: int, waiting: int, step_seconds: float, steps: int, policy: str, overlap: bool) -> Overhead:
    """One steady state."""
    page_size = 16
    request_pages = -(-(HEAD_TOKENS + OWN_TOKENS + 2 * OUTPUT_TOKENS) // page_size)
    config = SchedulerConfig(
        run_dir="",
        model=ModelFacts(path="", name="", model_type="", vocab_size=VOCABULARY, context_length=4096, eos_token_ids=()),
        device="",
        dtype="",
        threads=1,
        attention_backend="",
        page_size=page_size,
        num_pages=(batch + 8) * request_pages * 2,
        disable_radix_cache=False,
        schedule_policy=policy,
        max_step_tokens=2048,
        max_running_requests=batch,
        max_queued_requests=None,
        overlap=overlap,
        log_level="warning",
    )
    device = Device(step_seconds)
    front = Front(batch + waiting, batch, WARM_UP_STEPS + steps, device)
    socket = cast(Any, front)
    loop = Loop(build_core(config), device, socket, socket, socket, overlap)
    with few_collections():
        loop.run()
    exposed = sorted(device.exposed[WARM_UP_STEPS:])
    cpu = (device.cpu[-1] - device.cpu[WARM_UP_STEPS]) / (len(device.cpu) - 1 - WARM_UP_STEPS)
    return Overhead(
        rows=statistics.mean(device.rows[WARM_UP_STEPS:]),
        cpu=1000 * cpu,
        exposed=1000 * statistics.mean(exposed),
        exposed_p50=1000 * statistics.median(exposed),
        exposed_p99=1000 * exposed[int(0.99 * len(exposed))],
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[5.0, 10.0])
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--schedule-policy", default="lpm")
    parser.add_argument("--no-overlap", action="store_true")
    arguments = parser.parse_args()
    print(f"{arguments.waiting} waiting, policy {arguments.schedule_policy}, overlap {not arguments.no_overlap}")
    print("batch  step ms   rows   cpu ms a step   exposed ms:   mean     p50     p99   mean share of the step")
    for batch in arguments.batch:
        for step_ms in arguments.step_ms:
            found = run(
                batch,
                arguments.waiting,
                step_ms / 1000,
                arguments.steps,
                arguments.schedule_policy,
                not arguments.no_overlap,
            )
            print(
                f"{batch:5} {step_ms:8g} {found.rows:6.1f} {found.cpu:15.3f} {found.exposed:20.3f} "
                f"{found.exposed_p50:7.3f} {found.exposed_p99:7.3f} {100 * found.exposed / step_ms:22.2f} %",
                flush=True,
            )


if __name__ == "__main__":
    main()
