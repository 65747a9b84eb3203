"""Pictures of simulations.  Needs matplotlib, which is the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapwood.simulate.report import Report
from sapwood.simulate.runner import Simulation
from srt.child import StartError


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files.  Raises StartError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise StartError("--plot: matplotlib is not installed; pip install 'sapwood[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_run(path: Path, run: Simulation, title: str) -> None:
    """One run: queue and pool over time, and how TTFT, e2e and gaps are spread."""
    figure, ((queue, pool), (first, gaps)) = pyplot().subplots(2, 2, figsize=(12, 7), layout="constrained")
    figure.suptitle(title)
    stats = run.clients.stats
    moments = [moment for moment, _ in stats]
    # What was reported holds until the next report.
    queue.plot(moments, [s.running for _, s in stats], drawstyle="steps-post", label="running")
    queue.plot(moments, [s.waiting for _, s in stats], drawstyle="steps-post", label="waiting")
    queue.set(xlabel="seconds", ylabel="requests")
    queue.legend()
    in_use = np.array([s.pages_in_use / s.pages_total for _, s in stats])
    cached = np.array([s.pages_cached / s.pages_total for _, s in stats])
    pool.stackplot(moments, in_use, cached, step="post", labels=["held by requests", "held by the cache alone"])
    pool.set(xlabel="seconds", ylabel="share of the pool", ylim=(0, 1))
    pool.legend(loc="lower right")
    served = [call for call in run.clients.calls if call.served]
    for axes, series in (
        (first, {"TTFT": [c.time_to_first_token for c in served], "e2e": [c.last - c.sent for c in served]}),
        (gaps, {"gap between tokens": run.clients.gaps, "TPOT": [c.time_per_token for c in served if c.tokens > 1]}),
    ):
        for name, values in series.items():
            if len(values):
                axes.ecdf(np.asarray(values), label=name)
        axes.set(xlabel="seconds", ylabel="share of requests" if axes is first else "share of tokens")
        axes.legend()
    _save(figure, path)


def plot_sweep(path: Path, runs: Sequence[tuple[dict[str, str], Report]], title: str) -> None:
    """Several runs: the main figures along what was varied last, a line for each combination of the others."""
    names = list(runs[0][0])
    along, others = names[-1], names[:-1]
    series: dict[str, list[tuple[str, Report]]] = {}
    for varied, figures in runs:
        label = ", ".join(f"{name} {varied[name]}" for name in others)
        series.setdefault(label, []).append((varied[along], figures))
    panels = (
        ("hit_rate", "hit rate"),
        ("request_rate", "requests/s"),
        ("goodput", "goodput, requests/s"),
        ("ttft_mean", "mean TTFT, s"),
        ("ttft_p99", "p99 TTFT, s"),
        ("worst_wait", "worst wait, s"),
    )
    figure, axes = pyplot().subplots(2, 3, figsize=(14, 7), layout="constrained")
    figure.suptitle(title)
    for panel, (field, text) in zip(axes.flat, panels, strict=True):
        for label, points in series.items():
            panel.plot([x for x, _ in points], [r.flat()[field] for _, r in points], marker="o", label=label or None)
        panel.margins(y=0.1)
        panel.set(xlabel=along, ylabel=text, ylim=(0, None))
    if others:
        axes.flat[0].legend()
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise StartError(f"--plot {path}: {error}") from None
