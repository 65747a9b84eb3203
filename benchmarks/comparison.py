"""What engines made of workloads side by side: every run or why there is none, and the tables of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.runs import Run

# The peers of a figure for one stream are those with weights of about the same size.
QUANTIZED = {"sapwood int8", "sapwood int4", "llama.cpp Q4_1"}


@dataclass
class Result:
    """All rounds of one engine in one workload.

    rounds    all in order; None where a request failed or its reply was short or empty
    failures  what went wrong in those rounds
    other     the share of a core that others used during each completed run
    """

    rounds: list[Run | None] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    other: list[float] = field(default_factory=list)

    def add(self, run: Run, other: float) -> None:
        """A round that was completed."""
        self.rounds.append(run)
        self.other.append(other)

    def fail(self, why: str) -> None:
        """A round that was not: it counts in no figure."""
        self.rounds.append(None)
        self.failures.append(why)

    @property
    def runs(self) -> list[Run]:
        """The completed ones."""
        return [run for run in self.rounds if run is not None]

    @property
    def wall(self) -> float:
        """Median seconds; there must be a completed run."""
        return self.median(lambda run: run.wall)

    def median(self, value: Callable[[Run], float]) -> float:
        """Median of a figure over the completed runs, of which there must be one."""
        return statistics.median(value(run) for run in self.runs)


# By workload and engine.
Results = dict[tuple[str, str], Result]


def table(results: Results, least: dict[str, float]) -> list[str]:
    """Lines: every engine in every workload, and the ratios to Sapwood.  `least`: seconds by workload, of the peaks."""
    lines = []
    for workload in dict.fromkeys(workload for workload, _ in results):
        rows = {name: result for (of, name), result in results.items() if of == workload}
        lines.append(f"\n{workload}: at least {least[workload]:.1f} s by the machine's peaks in bfloat16")
        for name, result in rows.items():
            lines += [_row(name, result, least[workload])] if result.runs else []
            if result.failures:
                failed = f"{len(result.failures)} of {len(result.rounds)} runs not completed"
                lines.append(f"  {name:16} {failed}: {result.failures[0]}")
        for ours in (name for name in rows if name.startswith("sapwood")):
            for peer in (name for name in rows if not name.startswith("sapwood")):
                lines += _ratio(ours, peer, rows)
    return lines


def _row(name: str, result: Result, least: float) -> str:
    tokens = result.median(lambda run: sum(r.completion_tokens for r in run.replies) / run.wall)
    return (
        f"  {name:16} {result.wall:6.2f} s  {result.median(lambda r: r.requests_per_second):6.2f} req/s  "
        f"{tokens:6.1f} out tok/s  cached {result.median(lambda r: r.hit_rate):5.1%}  "
        f"TTFT p50 {result.median(lambda r: r.first_token(0.5)) * 1e3:6.0f} p95 "
        f"{result.median(lambda r: r.first_token(0.95)) * 1e3:6.0f} ms  "
        f"TPOT p50 {result.median(lambda r: r.per_token(0.5)) * 1e3:5.1f} p95 "
        f"{result.median(lambda r: r.per_token(0.95)) * 1e3:5.1f} ms  "
        f"of peak {least / result.wall:4.0%}"
        f"  (runs {', '.join(f'{run.wall:.1f}' for run in result.runs)}; other {max(result.other):.2f})"
    )


def _ratio(ours: str, peer: str, rows: dict[str, Result]) -> list[str]:
    """One line, or none where no round was completed by both."""
    pairs = zip(rows[ours].rounds, rows[peer].rounds, strict=True)
    ratios = [theirs.wall / mine.wall for mine, theirs in pairs if mine is not None and theirs is not None]
    if not ratios:
        return []
    note = "" if (ours in QUANTIZED) == (peer in QUANTIZED) else "   (not the same number format)"
    return [f"  {ours} / {peer}: {statistics.median(ratios):.2f}x throughput{note}"]
