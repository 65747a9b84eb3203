"""Running totals of the scheduler, and the message that carries them to the front."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from scheduler.request import Request
from srt.stats import (
    SCHEDULING_SECONDS_BUCKETS,
    STEP_ROWS_BUCKETS,
    STEP_SECONDS_BUCKETS,
    STEP_TOKENS_BUCKETS,
    SchedulerStats,
)


class Totals:
    """Counts since the scheduler started.  They only grow."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.computed_tokens = 0
        self.output_tokens = 0
        self.retractions = 0
        self.swaps = 0
        self.aborts = 0
        self.steps = 0
        self.step_rows = 0
        self.step_seconds = 0.0
        self.step_tokens = 0
        self.plan_seconds = 0.0
        self.scheduling_seconds = 0.0
        self.step_histogram = [0] * (len(STEP_SECONDS_BUCKETS) + 1)
        self.rows_histogram = [0] * (len(STEP_ROWS_BUCKETS) + 1)
        self.tokens_histogram = [0] * (len(STEP_TOKENS_BUCKETS) + 1)
        self.scheduling_histogram = [0] * (len(SCHEDULING_SECONDS_BUCKETS) + 1)

    def prompt_lookups(self, request: Request) -> None:
        """A request was admitted for the first time: what it asked of the cache, and what it got."""
        if request.first_cached is None:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += request.computed

    def scheduled(self, cpu_seconds: float) -> None:
        """The loop took so much processor time from one launch to the next."""
        self.scheduling_seconds += cpu_seconds
        self.scheduling_histogram[bisect_left(SCHEDULING_SECONDS_BUCKETS, cpu_seconds)] += 1

    def step(self, seconds: float, rows: int, tokens: int) -> None:
        """A step was committed."""
        self.steps += 1
        self.step_rows += rows
        self.step_seconds += seconds
        self.step_tokens += tokens
        self.step_histogram[bisect_left(STEP_SECONDS_BUCKETS, seconds)] += 1
        self.rows_histogram[bisect_left(STEP_ROWS_BUCKETS, rows)] += 1
        self.tokens_histogram[bisect_left(STEP_TOKENS_BUCKETS, tokens)] += 1

    def stats(
        self,
        *,
        running: int,
        waiting: int,
        pages_total: int,
        pages_free: int,
        pages_cached: int,
        pages_evicted: int,
        page_size: int,
        oldest_wait_seconds: float,
        overtake_bound_seconds: float,
        others: dict[str, int],
    ) -> SchedulerStats:
        """The message for the front.  `others`: its fields that tell of pins and of the lower tier."""
        stats = SchedulerStats(
            running=running,
            waiting=waiting,
            pages_total=pages_total,
            pages_free=pages_free,
            pages_cached=pages_cached,
            pages_in_use=pages_total - pages_free - pages_cached,
            page_size=page_size,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.computed_tokens,
            output_tokens=self.output_tokens,
            evicted_tokens=pages_evicted * page_size,
            retractions=self.retractions,
            swaps=self.swaps,
            aborts=self.aborts,
            steps=self.steps,
            step_rows=self.step_rows,
            step_seconds=self.step_seconds,
            plan_seconds=self.plan_seconds,
            step_tokens=self.step_tokens,
            scheduling_seconds=self.scheduling_seconds,
            step_histogram=tuple(self.step_histogram),
            rows_histogram=tuple(self.rows_histogram),
            tokens_histogram=tuple(self.tokens_histogram),
            scheduling_histogram=tuple(self.scheduling_histogram),
            oldest_wait_seconds=oldest_wait_seconds,
            overtake_bound_seconds=overtake_bound_seconds,
        )
        return msgspec.structs.replace(stats, **others)
