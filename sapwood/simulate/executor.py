"""The clocked executor: takes as long as a profile says, and answers what the trace says.

It keeps time as a device does that runs steps one after another: a step begins when it has been launched and the one
before it is done.  Waiting for a step moves the clock to its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sapwood.simulate.cost import Load, Profile, load_of
from sapwood.simulate.trace import EOS
from srt.plan import Plan, StepResult


class Clock:
    """Seconds since the start of the simulation; whoever waits moves it."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """That much time passes."""
        self.now += seconds

    def reach(self, moment: float) -> None:
        """Wait until then; no time passes when it is past."""
        if moment > self.now:
            self.now = moment


@dataclass(slots=True)
class ClockedStep:
    """Implements `srt.plan.StepHandle`."""

    clock: Clock
    end: float
    result: StepResult

    def wait(self) -> StepResult:
        """The result, at the end of the step."""
        self.clock.reach(self.end)
        return self.result


@dataclass(slots=True)
class Work:
    """Sums over all steps.  `busy`: seconds in which a step ran; `most_rows`: of one step."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    busy: float = 0.0
    most_rows: int = 0

    def add(self, load: Load, seconds: float) -> None:
        """One more step."""
        self.steps += 1
        self.rows += load.rows
        self.tokens += load.tokens
        self.busy += seconds
        self.most_rows = max(self.most_rows, load.rows)


@dataclass
class ClockedExecutor:
    """Implements `srt.plan.Executor`.  `answer(seed)`: all ids that the request with that seed will be answered."""

    clock: Clock
    profile: Profile
    answer: Callable[[int], list[int]]
    work: Work = field(default_factory=Work)

    def __post_init__(self) -> None:
        self._free_at = 0.0
        # By slot: the answer, and how much of it has been sampled.
        self._answers: dict[int, list[int]] = {}
        self._sampled: dict[int, int] = {}

    def launch(self, plan: Plan) -> ClockedStep:
        """Queue a step.  The time that planning took is charged here, since it is over now."""
        for opened in plan.opened:
            self._answers[opened.slot] = self.answer(opened.seed)
            self._sampled[opened.slot] = len(opened.output_ids)
        load = load_of(plan)
        self.clock.advance(self.profile.scheduling.seconds(load.rows))
        seconds = self.profile.seconds(load)
        end = max(self.clock.now, self._free_at) + seconds
        self._free_at = end
        self.work.add(load, seconds)
        return ClockedStep(self.clock, end, StepResult(plan.step, self._sample(plan), seconds=seconds))

    def _sample(self, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        answers, sampled = self._answers, self._sampled
        tokens = []
        for slot, samples in zip(plan.slots.tolist(), plan.samples.tolist(), strict=True):
            if not samples:
                tokens.append(-1)
                continue
            answer, place = answers[slot], sampled[slot]
            # A request that ended in the step before may have one row more.
            tokens.append(answer[place] if place < len(answer) else EOS)
            sampled[slot] = place + 1
        return np.array(tokens, dtype=np.int32)

    def close(self) -> None:
        """Nothing to give back."""
