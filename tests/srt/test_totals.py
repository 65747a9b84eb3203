"""Running totals over several scheduler processes."""

from __future__ import annotations

from typing import Any

from srt.stats import SchedulerStats
from srt.totals import RunningTotals


def report(**values: Any) -> SchedulerStats:
    zeros = {name: 0 for name in SchedulerStats.__struct_fields__ if not name.endswith("_histogram")}
    return SchedulerStats(**{**zeros, "pages_total": 10, "page_size": 16, **values})


def test_totals_go_on_where_the_last_process_left_them() -> None:
    totals = RunningTotals()
    totals.process_died()
    assert totals.stats is None
    totals.report(report(output_tokens=5, step_seconds=1.5, step_histogram=(1, 2), running=3, pages_in_use=10))
    totals.process_died()
    assert totals.stats is not None
    assert (totals.stats.running, totals.stats.pages_in_use, totals.stats.pages_free) == (0, 0, 10)
    totals.process_died()
    totals.report(report(output_tokens=2, step_seconds=0.25, step_histogram=(0, 1, 4), running=1, pages_free=9))
    assert totals.stats.output_tokens == 7
    assert totals.stats.step_seconds == 1.75
    assert totals.stats.step_histogram == (1, 3, 4)
    assert (totals.stats.running, totals.stats.pages_free, totals.stats.pages_total) == (1, 9, 10)


def test_every_field_that_only_grows_is_summed() -> None:
    gauges = {"running", "waiting", "oldest_wait_seconds", "overtake_bound_seconds", "page_size"}
    gauges |= {name for name in SchedulerStats.__struct_fields__ if name.endswith("_histogram")}
    gauges |= {"disk_blocks", "disk_used_bytes", "disk_loading", "pins"}
    gauges |= {name for name in SchedulerStats.__struct_fields__ if name.startswith("pages_")}
    counters = [name for name in SchedulerStats.__struct_fields__ if name not in gauges]
    totals = RunningTotals()
    totals.report(report(**dict.fromkeys(counters, 1)))
    totals.process_died()
    totals.report(report(**dict.fromkeys(counters, 2)))
    assert {name: getattr(totals.stats, name) for name in counters} == dict.fromkeys(counters, 3)
