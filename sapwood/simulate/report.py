"""What a simulation came to: the figures, and how they are printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sapwood.simulate.clients import Call
from sapwood.simulate.fairness import fairness
from sapwood.simulate.runner import Simulation

PERCENTILES = (50, 95, 99)


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles of some times, in seconds."""

    mean: float
    p50: float
    p95: float
    p99: float


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count for goodput: seconds to the first token, and from token to token."""

    ttft: float | None = None
    tpot: float | None = None

    def met(self, call: Call) -> bool:
        """Whether a call that was served kept them."""
        return (self.ttft is None or call.time_to_first_token <= self.ttft) and (
            self.tpot is None or call.time_per_token <= self.tpot
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Times in simulated seconds, rates per simulated second, but `wall` and `speed`: real seconds, and how many
    simulated ones each of them brought.

    hit_rate     cached tokens of all prompt tokens
    gap          seconds between two tokens of one stream
    waited       from arrival to admission
    pool_used, pool_cached   share of the pages that requests hold, and that the cache alone holds: mean over time;
                 `pool_used_most`: the highest
    goodput      requests a second that met the targets
    """

    requests: int
    served: int
    refused: int
    dropped: int
    seconds: float
    hit_rate: float
    request_rate: float
    prompt_rate: float
    output_rate: float
    ttft: Spread
    tpot: Spread
    gap: Spread
    e2e: Spread
    waited: Spread
    worst_wait: float
    goodput: float
    steps: int
    rows_per_step: float
    most_rows: int
    tokens_per_step: float
    busy: float
    pool_used: float
    pool_used_most: float
    pool_cached: float
    evicted_tokens: int
    retractions: int
    jain: float | None
    service_difference: float | None
    wall: float
    speed: float

    def flat(self) -> dict[str, float | int | None]:
        """Every figure under a name of its own, for a table."""
        result: dict[str, float | int | None] = {}
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Spread):
                result |= {f"{name}_{part}": getattr(value, part) for part in value.__struct_fields__}
            else:
                result[name] = value
        return result


def spread(values: Sequence[float]) -> Spread:
    """Of no values: zeros."""
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0)
    array = np.asarray(values, dtype=np.float64)
    return Spread(float(array.mean()), *(float(value) for value in np.percentile(array, PERCENTILES)))


def report(run: Simulation, targets: Targets | None = None) -> Report:
    """The figures of a finished run."""
    clients, work, totals = run.clients, run.executor.work, run.totals
    served = [call for call in clients.calls if call.served]
    seconds = run.seconds - min((call.sent for call in clients.calls), default=0.0) or 1e-9
    waits = [call.waited for call in served]
    good = sum((targets or Targets()).met(call) for call in served)
    in_use, cached = _pool_shares(run)
    prompt_tokens = sum(call.prompt_tokens for call in served)
    even = fairness(clients)
    return Report(
        requests=len(clients.calls),
        served=len(served),
        refused=len(clients.calls) - len(served),
        dropped=run.trace.dropped,
        seconds=seconds,
        hit_rate=sum(call.cached_tokens for call in served) / max(1, prompt_tokens),
        request_rate=len(served) / seconds,
        prompt_rate=prompt_tokens / seconds,
        output_rate=sum(call.tokens for call in served) / seconds,
        ttft=spread([call.time_to_first_token for call in served]),
        tpot=spread([call.time_per_token for call in served if call.tokens > 1]),
        gap=spread(clients.gaps),
        e2e=spread([call.last - call.sent for call in served]),
        waited=spread(waits),
        worst_wait=max(waits, default=0.0),
        goodput=good / seconds,
        steps=work.steps,
        rows_per_step=work.rows / max(1, work.steps),
        most_rows=work.most_rows,
        tokens_per_step=work.tokens / max(1, work.steps),
        busy=work.busy / seconds,
        pool_used=in_use.mean,
        pool_used_most=in_use.most,
        pool_cached=cached.mean,
        evicted_tokens=clients.stats[-1][1].evicted_tokens if clients.stats else 0,
        retractions=totals.retractions,
        jain=even.jain,
        service_difference=even.difference,
        wall=run.wall,
        speed=run.seconds / run.wall,
    )


@dataclass(frozen=True)
class _Share:
    """Of the pool: over time, and at most."""

    mean: float
    most: float


def _pool_shares(run: Simulation) -> tuple[_Share, _Share]:
    """Pages that requests hold, and that the cache alone holds.  What was reported holds until the next report."""
    stats = run.clients.stats
    if not stats:
        return _Share(0.0, 0.0), _Share(0.0, 0.0)
    holds = np.diff([moment for moment, _ in stats], append=run.seconds)
    total = stats[0][1].pages_total
    shares = []
    for pages in ([s.pages_in_use for _, s in stats], [s.pages_cached for _, s in stats]):
        mean = np.average(pages, weights=holds) if holds.sum() > 0 else np.mean(pages)
        shares.append(_Share(float(mean) / total, max(pages) / total))
    return shares[0], shares[1]


def lines(figures: Report, targets: Targets) -> list[str]:
    """One run, for people."""
    r = figures
    lines = [
        f"requests    {r.served} of {r.requests} served in {r.seconds:.1f} s"
        + (f", {r.refused} refused" if r.refused else "")
        + (f"; {r.dropped} left out, longer than the context" if r.dropped else ""),
        f"hit rate    {100 * r.hit_rate:.1f} % of the prompt tokens came from the cache",
        f"throughput  {r.request_rate:.3f} requests/s, {r.prompt_rate:.0f} prompt tokens/s, "
        f"{r.output_rate:.0f} output tokens/s",
        f"            {'mean':>10} {'p50':>10} {'p95':>10} {'p99':>10}   seconds",
    ]
    for name, values in (("TTFT", r.ttft), ("TPOT", r.tpot), ("gap", r.gap), ("e2e", r.e2e), ("queue", r.waited)):
        lines.append(f"{name:<11} {values.mean:10.4f} {values.p50:10.4f} {values.p95:10.4f} {values.p99:10.4f}")
    lines.append(f"worst wait  {r.worst_wait:.2f} s in the queue")
    if targets.ttft is not None or targets.tpot is not None:
        share = 100 * r.goodput / r.request_rate if r.request_rate else 0.0
        lines.append(f"goodput     {r.goodput:.3f} requests/s met the targets, {share:.1f} % of those served")
    lines += [
        f"steps       {r.steps}, {r.rows_per_step:.1f} rows (at most {r.most_rows}) and {r.tokens_per_step:.1f} tokens "
        f"each; a step ran {100 * r.busy:.0f} % of the time",
        f"pool        {100 * r.pool_used:.0f} % held by requests (at most {100 * r.pool_used_most:.0f} %), "
        f"{100 * r.pool_cached:.0f} % by the cache alone; {r.evicted_tokens} tokens evicted, "
        f"{r.retractions} retractions",
    ]
    if r.jain is not None and r.service_difference is not None:
        lines.append(
            f"fairness    Jain index {r.jain:.4f}; service of two tenants differed by {r.service_difference:.0f} tokens"
        )
    lines.append(f"simulated   in {r.wall:.2f} s, {r.speed:.0f} times as fast as it would have run")
    return lines


TABLE = (
    ("hit_rate", "hit", 6, ".3f"),
    ("request_rate", "req/s", 8, ".3f"),
    ("output_rate", "out tok/s", 10, ".1f"),
    ("ttft_mean", "TTFT mean", 10, ".3f"),
    ("ttft_p99", "p99", 9, ".3f"),
    ("tpot_mean", "TPOT mean", 10, ".4f"),
    ("tpot_p99", "p99", 8, ".4f"),
    ("worst_wait", "worst wait", 11, ".2f"),
    ("goodput", "goodput", 8, ".3f"),
    ("pool_used_most", "pool max", 9, ".2f"),
    ("retractions", "retract", 8, "d"),
    ("jain", "Jain", 7, ".4f"),
)


def table(runs: Sequence[tuple[dict[str, str], Report]]) -> list[str]:
    """Several runs, for people: what was varied, and the main figures, a row for each."""
    names = list(runs[0][0])
    widths = [max(len(name), *(len(varied[name]) for varied, _ in runs)) for name in names]
    head = " ".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))
    result = [head + " " + " ".join(f"{title:>{width}}" for _, title, width, _ in TABLE)]
    for varied, figures in runs:
        flat = figures.flat()
        cells = [f"{varied[name]:<{width}}" for name, width in zip(names, widths, strict=True)]
        for field, _, width, form in TABLE:
            value = flat[field]
            cells.append(f"{'-' if value is None else format(value, form):>{width}}")
        result.append(" ".join(cells))
    return result
