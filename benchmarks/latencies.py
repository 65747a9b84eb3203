"""Percentiles and goodput, as the benchmarks print them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

PERCENTILES = (50, 95, 99)


@dataclass
class Latencies:
    """Times of requests that were served, in seconds.  Targets: None for what nobody asked for.

    ttft    from sending to the first token
    tpot    mean from token to token, of requests with two tokens or more
    e2e     to the end
    """

    ttft_target: float | None = None
    tpot_target: float | None = None
    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    good: int = 0

    def add(self, ttft: float, tpot: float | None, e2e: float) -> None:
        """One request that was served to its end; `tpot` None where it had one token."""
        self.ttft.append(ttft)
        self.e2e.append(e2e)
        if tpot is not None:
            self.tpot.append(tpot)
        in_time = self.ttft_target is None or ttft <= self.ttft_target
        at_pace = self.tpot_target is None or tpot is None or tpot <= self.tpot_target
        self.good += in_time and at_pace

    def lines(self, seconds: float) -> list[str]:
        """For people; `seconds`: how long the load was on."""
        lines = [f"{'ms':<6} {'mean':>10} " + " ".join(f"{f'p{p}':>10}" for p in PERCENTILES)]
        for name, values in (("TTFT", self.ttft), ("TPOT", self.tpot), ("e2e", self.e2e)):
            if values:
                figures = [float(np.mean(values)), *np.percentile(values, PERCENTILES).tolist()]
                lines.append(f"{name:<6} " + " ".join(f"{1e3 * figure:10.2f}" for figure in figures))
        served = len(self.e2e)
        lines.append(
            f"goodput {self.good / seconds:.2f} requests/s of {served / seconds:.2f} met their targets "
            f"({100 * self.good / max(1, served):.1f} %)"
        )
        return lines


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """The value that `share` of the observations of a histogram do not exceed, on the line between two bounds.

    `counts` has one entry for each bound and one for what lies beyond the last, of which only the bound is known.
    """
    total = sum(counts)
    if not total:
        return 0.0
    below = list(accumulate(counts))
    place = bisect_left(below, share * total)
    if place >= len(bounds):
        return float(bounds[-1])
    low = 0.0 if place == 0 else float(bounds[place - 1])
    before = 0 if place == 0 else below[place - 1]
    return low + (bounds[place] - low) * (share * total - before) / counts[place]
