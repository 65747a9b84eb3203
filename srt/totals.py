"""Running totals of the scheduler that never fall, though the process that counts them may be started again."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import msgspec

from srt.stats import SchedulerStats

# What a new process starts to count from zero.
_TOTALS = (
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "output_tokens",
    "evicted_tokens",
    "retractions",
    "swaps",
    "aborts",
    "steps",
    "step_rows",
    "step_seconds",
    "step_tokens",
    "plan_seconds",
    "scheduling_seconds",
    "disk_hits",
    "disk_tokens",
    "disk_read_bytes",
    "disk_writes",
    "disk_written_bytes",
    "disk_dropped",
    "disk_errors",
    "disk_late",
    "pins_yielded",
)

_HISTOGRAMS = ("step_histogram", "rows_histogram", "tokens_histogram", "scheduling_histogram")


class RunningTotals:
    """The sum over all processes that have filled the scheduler's place; `stats` is None before the first report."""

    def __init__(self) -> None:
        self.stats: SchedulerStats | None = None
        self._before: SchedulerStats | None = None

    def report(self, stats: SchedulerStats) -> None:
        """Take in what the present process says."""
        self.stats = stats if self._before is None else _add(self._before, stats)

    def process_died(self) -> None:
        """Keep the totals of the process that is gone; what it had running, waiting and cached is gone with it."""
        if self.stats is None:
            return
        self.stats = msgspec.structs.replace(
            self.stats,
            running=0,
            waiting=0,
            pages_free=self.stats.pages_total,
            pages_cached=0,
            pages_in_use=0,
            oldest_wait_seconds=0.0,
            disk_loading=0,
            pins=0,
            pages_pinned=0,
        )
        self._before = self.stats


def _add(before: SchedulerStats, now: SchedulerStats) -> SchedulerStats:
    sums: dict[str, Any] = {name: getattr(before, name) + getattr(now, name) for name in _TOTALS}
    for name in _HISTOGRAMS:
        pairs = zip_longest(getattr(before, name), getattr(now, name), fillvalue=0)
        sums[name] = tuple(old + new for old, new in pairs)
    return msgspec.structs.replace(now, **sums)
