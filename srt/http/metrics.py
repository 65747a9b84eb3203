"""What /metrics says: requests as they end, and the scheduler's last report.

Requests are counted when they end, whichever way: requests and tokens are the sums of what clients were told in
their replies, aborted and failed requests included with what they had got.  A request whose fault was found before
it reached the runtime (a wrong type, a value out of range) never began and is not counted.

The scheduler's totals go on where they were when its process is started again, so no counter ever falls.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from srt.front import Front, RequestEnd
from srt.http.prometheus import Counter, Gauge, Histogram, Metric, render
from srt.stats import (
    SCHEDULING_SECONDS_BUCKETS,
    STEP_ROWS_BUCKETS,
    STEP_SECONDS_BUCKETS,
    STEP_TOKENS_BUCKETS,
    SchedulerStats,
)

# Bounds in seconds.
LATENCY_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
GAP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# The hit rate and the throughput are those of the requests that ended in the last minute.
WINDOW_SECONDS = 60.0


class Metrics:
    """Counts what a front does; a `Metrics` is one of the front's observers from its creation on."""

    def __init__(self, front: Front, model_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._front = front
        self._labels = {"model_name": model_name}
        self._clock = clock
        # (when it ended, prompt tokens, cached tokens, output tokens)
        self._recent: deque[tuple[float, int, int, int]] = deque()
        counter, histogram = Counter, Histogram
        self.requests = counter("sapwood_num_requests_total", "Samples that have ended, by finish reason.")
        self.aborted = counter("sapwood_num_aborted_requests_total", "Samples that were aborted.")
        self.failed = counter("sapwood_num_failed_requests_total", "Requests refused or failed, by HTTP status.")
        self.prompt_tokens = counter("sapwood_prompt_tokens_total", "Prompt tokens of the requests that have ended.")
        self.cached_tokens = counter("sapwood_cached_tokens_total", "Of these, tokens found in the prefix cache.")
        self.lookups = counter("sapwood_cache_lookups_total", "Requests by why their reuse of the cache stopped.")
        self.generation_tokens = counter("sapwood_generation_tokens_total", "Output tokens of ended requests.")
        self.ttft = histogram(
            "sapwood_time_to_first_token_seconds", "From the request to its first token.", LATENCY_BOUNDS
        )
        self.gap = histogram(
            "sapwood_inter_token_latency_seconds", "Between the tokens of a sample; tokens that came together share.",
            GAP_BOUNDS,
        )  # fmt: skip
        self.e2e = histogram(
            "sapwood_e2e_request_latency_seconds", "From a request that did not fail to its end.", LATENCY_BOUNDS
        )
        self.queue = histogram("sapwood_queue_time_seconds", "From the request to its admission.", LATENCY_BOUNDS)
        self.prefill = histogram(
            "sapwood_prefill_time_seconds", "Of a sample, from its admission to its first token.", LATENCY_BOUNDS
        )
        self.decode = histogram(
            "sapwood_decode_time_seconds", "Of a sample, from its first token to its last.", LATENCY_BOUNDS
        )
        self.preempted = histogram(
            "sapwood_preempted_time_seconds",
            "Of a sample that was retracted, from retraction to readmission.",
            LATENCY_BOUNDS,
        )
        self.tpot = histogram(
            "sapwood_time_per_output_token_seconds", "Of a sample, the mean from token to token.", GAP_BOUNDS
        )
        self.scheduled = histogram(
            "sapwood_scheduled_tokens_histogram", "Tokens run through the model by sample.", TOKEN_BOUNDS
        )
        self.served = counter(
            "sapwood_num_served_requests_total",
            "Requests that were served to the end, by which of their targets they met; goodput is the rate of both.",
        )
        self.prompt_length = histogram("sapwood_prompt_tokens_histogram", "Prompt tokens by request.", TOKEN_BOUNDS)
        self.output_length = histogram("sapwood_generation_tokens_histogram", "Output tokens by request.", TOKEN_BOUNDS)
        front.observers.append(self.observe)

    def observe(self, end: RequestEnd) -> None:
        """Count a request that has ended."""
        refused = end.failure is not None and end.failure.status < 500
        for reason in end.finish_reasons:
            self.requests.add(finish_reason="refused" if refused and reason == "error" else reason)
            if reason == "abort":
                self.aborted.add()
        if end.failure is None:
            self.e2e.observe(end.e2e_seconds)
        else:
            self.failed.add(status=str(end.failure.status))
        self.prompt_tokens.add(end.prompt_tokens)
        self.cached_tokens.add(end.cached_tokens)
        if end.cache_reason is not None:
            self.lookups.add(reason=end.cache_reason)
        self.generation_tokens.add(end.completion_tokens)
        if end.ttft is not None:
            self.ttft.observe(end.ttft)
            self.queue.observe(end.queue_seconds)
            self._observe_samples(end)
            self.prompt_length.observe(end.prompt_tokens)
            self.output_length.observe(end.completion_tokens)
        for seconds, tokens in end.gaps:
            self.gap.observe(seconds / tokens, tokens)
        self._recent.append((self._clock(), end.prompt_tokens, end.cached_tokens, end.completion_tokens))
        self._forget()

    def _observe_samples(self, end: RequestEnd) -> None:
        for sample in end.samples:
            if sample.ttft is None:
                continue
            self.prefill.observe(sample.prefill)
            self.decode.observe(sample.decode)
            self.scheduled.observe(sample.scheduled_tokens)
            if sample.retractions:
                self.preempted.observe(sample.preempted)
            if sample.tpot is not None:
                self.tpot.observe(sample.tpot)
        if all(reason in ("stop", "length") for reason in end.finish_reasons):
            self.served.add(met=self._met(end))

    def _met(self, end: RequestEnd) -> str:
        """The targets that a request met: its own, or else the server's; what nobody set is met."""
        config = self._front.config
        ttft = _target(end.ttft_target, config.ttft_target_ms)
        tpot = _target(end.tpot_target, config.tpot_target_ms)
        # Of several samples each has to be in time.
        in_time = all(sample.ttft is None or sample.ttft <= ttft for sample in end.samples)
        at_pace = all(sample.tpot is None or sample.tpot <= tpot for sample in end.samples)
        return {(True, True): "both", (True, False): "ttft", (False, True): "tpot"}.get((in_time, at_pace), "none")

    def _forget(self) -> None:
        while self._recent and self._recent[0][0] < self._clock() - WINDOW_SECONDS:
            self._recent.popleft()

    def text(self) -> bytes:
        """Everything in the Prometheus text format."""
        self._forget()
        counted: list[Metric] = [
            self.requests,
            self.aborted,
            self.failed,
            self.prompt_tokens,
            self.cached_tokens,
            self.lookups,
            self.generation_tokens,
            self.ttft,
            self.gap,
            self.e2e,
            self.queue,
            self.prefill,
            self.decode,
            self.preempted,
            self.tpot,
            self.scheduled,
            self.served,
            self.prompt_length,
            self.output_length,
        ]
        return render([*counted, *self._rates(), *self._of_scheduler()], self._labels)

    def _rates(self) -> list[Metric]:
        prompt = sum(tokens for _, tokens, _, _ in self._recent)
        cached = sum(tokens for _, _, tokens, _ in self._recent)
        output = sum(tokens for _, _, _, tokens in self._recent)
        rate, throughput = cached / (prompt or 1), output / WINDOW_SECONDS
        return [
            _gauge("sapwood_cache_hit_rate", "Cached share of the prompt tokens of the last minute.", rate),
            _gauge("sapwood_gen_throughput", "Output tokens a second over the last minute.", throughput),
            _gauge("sapwood_num_open_requests", "Requests that have not ended.", self._front.status().requests),
        ]

    def _of_scheduler(self) -> list[Metric]:
        stats = self._front.stats
        return [] if stats is None else [*_pool(stats), *_totals(stats), *_disk(stats)]


def _target(seconds: float | None, default_ms: float | None) -> float:
    if seconds is not None:
        return seconds
    return math.inf if default_ms is None else default_ms / 1000


def _gauge(name: str, help_text: str, value: float) -> Gauge:
    gauge = Gauge(name, help_text)
    gauge.set(value)
    return gauge


def _counter(name: str, help_text: str, value: float) -> Counter:
    counter = Counter(name, help_text)
    counter.add(value)
    return counter


def _pool(stats: SchedulerStats) -> list[Metric]:
    """Queue and pool as they were at the last report."""
    used = stats.pages_in_use
    return [
        _gauge("sapwood_num_running_reqs", "Samples being computed.", stats.running),
        _gauge("sapwood_num_queue_reqs", "Samples waiting for admission.", stats.waiting),
        _gauge("sapwood_oldest_wait_seconds", "How long the longest waiting sample waits.", stats.oldest_wait_seconds),
        _gauge(
            "sapwood_overtake_bound_seconds",
            "No sample of the same priority and tenant that comes more than so much later is admitted first.",
            stats.overtake_bound_seconds,
        ),
        _gauge("sapwood_page_size", "Tokens of a page.", stats.page_size),
        _gauge("sapwood_max_total_num_tokens", "Tokens the page pool holds.", stats.pages_total * stats.page_size),
        _gauge("sapwood_num_used_tokens", "Tokens in pages that requests hold.", used * stats.page_size),
        _gauge("sapwood_token_usage", "Share of the pages that requests hold.", used / (stats.pages_total or 1)),
        _gauge("sapwood_pages_total", "Pages of the pool: free + cached + in use.", stats.pages_total),
        _gauge("sapwood_pages_free", "Pages that hold nothing.", stats.pages_free),
        _gauge("sapwood_pages_cached", "Pages that hold cached prefixes only.", stats.pages_cached),
        _gauge("sapwood_pages_pinned", "Pages that pins keep, in use or not.", stats.pages_pinned),
        _gauge("sapwood_pins", "Pinned prefixes.", stats.pins),
        _gauge("sapwood_pages_in_use", "Pages that requests hold, cached prefixes included.", used),
    ]


def _totals(stats: SchedulerStats) -> list[Metric]:
    """The scheduler's totals over all its processes."""
    return [
        _counter("sapwood_computed_tokens_total", "Tokens run through the model.", stats.computed_tokens),
        _counter("sapwood_evicted_tokens_total", "Cached tokens dropped to make room.", stats.evicted_tokens),
        _counter("sapwood_num_retractions_total", "Running samples sent back to the queue.", stats.retractions),
        _counter("sapwood_num_swaps_total", "Of those, the ones whose KV went to swap space.", stats.swaps),
        _counter("sapwood_pins_yielded_total", "Pins let go before their time to make room.", stats.pins_yielded),
        _counter("sapwood_plan_seconds_total", "Seconds spent on planning steps.", stats.plan_seconds),
        *_steps(stats),
    ]


def _steps(stats: SchedulerStats) -> list[Metric]:
    """The steps of all the scheduler's processes, by several measures."""
    histograms: list[Metric] = []
    for name, help_text, bounds, counts, total in (
        ("seconds", "Wall time of a step.", STEP_SECONDS_BUCKETS, stats.step_histogram, stats.step_seconds),
        ("rows", "Samples scheduled in a step.", STEP_ROWS_BUCKETS, stats.rows_histogram, stats.step_rows),
        ("tokens", "Tokens scheduled in a step.", STEP_TOKENS_BUCKETS, stats.tokens_histogram, stats.step_tokens),
        (
            "scheduling_seconds",
            "Processor time of the scheduler for a step: messages, planning, commit, sending.",
            SCHEDULING_SECONDS_BUCKETS,
            stats.scheduling_histogram,
            stats.scheduling_seconds,
        ),
    ):
        histogram = Histogram(f"sapwood_step_{name}", help_text, bounds)
        if counts:
            histogram.add_counts(counts, total)
        histograms.append(histogram)
    return histograms


def _disk(stats: SchedulerStats) -> list[Metric]:
    """The disk tier; all zero where there is none."""
    return [
        _counter("sapwood_disk_hits_total", "Requests that got tokens from disk.", stats.disk_hits),
        _counter("sapwood_disk_cached_tokens_total", "Cached tokens that came from disk.", stats.disk_tokens),
        _counter("sapwood_disk_read_bytes_total", "Bytes read from page files.", stats.disk_read_bytes),
        _counter("sapwood_disk_writes_total", "Page files written.", stats.disk_writes),
        _counter("sapwood_disk_written_bytes_total", "Bytes of page files written.", stats.disk_written_bytes),
        _counter("sapwood_disk_dropped_total", "Page files that could not be written in time.", stats.disk_dropped),
        _counter("sapwood_disk_errors_total", "Page files that could not be read, used or written.", stats.disk_errors),
        _counter("sapwood_disk_late_loads_total", "Loads that were not waited for to the end.", stats.disk_late),
        _gauge("sapwood_disk_blocks", "Page files that can be used.", stats.disk_blocks),
        _gauge("sapwood_disk_used_bytes", "Bytes of all page files in the folder.", stats.disk_used_bytes),
        _gauge("sapwood_disk_loads", "Loads under way.", stats.disk_loading),
    ]
