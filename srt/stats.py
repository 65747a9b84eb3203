"""What the scheduler tells of itself: gauges of a moment, totals and histograms since its start."""

from __future__ import annotations

import msgspec

STEP_SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
STEP_ROWS_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
STEP_TOKENS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SCHEDULING_SECONDS_BUCKETS = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005),
    *(0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5),
)


class SchedulerStats(msgspec.Struct, frozen=True, tag="stats"):
    """scheduler -> front: gauges and running totals since the scheduler started, at most a few times a second.

    Pages: free + cached + in use = total, where cached pages are those that no request holds: eviction could free them
    at once, but for those that pins keep.  `pages_pinned` are those of the `pins` pins, in use or not; `pins_yielded`
    pins were let go before their time to make room.
    `prompt_tokens` and `cached_tokens` count every request once, when it is first admitted.  `step_histogram` has
    one count for each bound of STEP_SECONDS_BUCKETS (steps that took at most so long and longer than the bound
    before), and one more for the longer ones; `rows_histogram`, `tokens_histogram` and `scheduling_histogram` are the
    same for the bounds of STEP_ROWS_BUCKETS, STEP_TOKENS_BUCKETS and SCHEDULING_SECONDS_BUCKETS.
    `scheduling_seconds` is processor time of the scheduler's loop: messages, planning, commit, sending.

    Disk: `disk_hits` requests got `disk_tokens` tokens from it, as their first admission's reports say; `disk_dropped`
    blocks were not written since the writer was behind or failing; `disk_errors` reads and writes failed; `disk_late`
    loads were not waited for to the end; there are `disk_blocks` files that can be used, and files of `disk_used_bytes`
    in all; `disk_loading` loads are under way.
    """

    running: int
    waiting: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_in_use: int
    page_size: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    evicted_tokens: int
    retractions: int
    aborts: int
    steps: int
    step_rows: int
    step_seconds: float
    plan_seconds: float
    step_tokens: int = 0
    scheduling_seconds: float = 0.0
    step_histogram: tuple[int, ...] = ()
    rows_histogram: tuple[int, ...] = ()
    tokens_histogram: tuple[int, ...] = ()
    scheduling_histogram: tuple[int, ...] = ()
    oldest_wait_seconds: float = 0.0
    # Nobody of the same priority and tenant who comes more than so many seconds later is admitted first.
    overtake_bound_seconds: float = 0.0
    # Retractions whose pages went to swap space.
    swaps: int = 0
    disk_hits: int = 0
    disk_tokens: int = 0
    disk_read_bytes: int = 0
    disk_writes: int = 0
    disk_written_bytes: int = 0
    disk_dropped: int = 0
    disk_errors: int = 0
    disk_late: int = 0
    disk_blocks: int = 0
    disk_used_bytes: int = 0
    disk_loading: int = 0
    pins: int = 0
    pages_pinned: int = 0
    pins_yielded: int = 0
