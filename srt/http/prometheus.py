"""A small metrics registry that writes the Prometheus text format (version 0.0.4).

Three kinds: counters that only rise, gauges, and histograms with fixed bounds.  A counter refuses to fall: a
negative increment is a fault of the caller, and one falling sample would make every rate computed from it wrong.

Format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


def _escape(text: str, quotes: bool) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{_escape(text, quotes=True)}"' for key, text in labels)
    return f"{name}{{{inside}}} {_number(value)}" if inside else f"{name} {_number(value)}"


class Counter:
    """A total that never falls, one for every value of its labels."""

    kind = "counter"

    def __init__(self, name: str, help_text: str) -> None:
        self.name, self.help_text = name, help_text
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Raise the total by `amount`.  Raises ValueError when it is negative or no number."""
        if not amount >= 0:
            raise ValueError(f"{self.name} cannot rise by {amount}")
        key = tuple(sorted(labels.items()))
        self._values[key] = self._values.get(key, 0) + amount

    def value(self, **labels: str) -> float:
        """The total so far."""
        return self._values.get(tuple(sorted(labels.items())), 0)

    def lines(self, base: Labels) -> Iterator[str]:
        """The samples in text form."""
        for labels, value in self._values.items():
            yield _sample(self.name, base + labels, value)


class Gauge:
    """A value that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, help_text: str) -> None:
        self.name, self.help_text = name, help_text
        self._value = 0.0

    def set(self, value: float) -> None:
        """The value from now on."""
        self._value = value

    def lines(self, base: Labels) -> Iterator[str]:
        """The sample in text form."""
        yield _sample(self.name, base, self._value)


class Histogram:
    """How many observations were at most each bound, with their sum."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of {name} do not rise")
        self.name, self.help_text, self.bounds = name, help_text, tuple(bounds)
        # One more than the bounds: the last is for what lies beyond all of them.
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value; below zero (a clock that was set back) counts as zero."""
        value = max(0.0, value)
        self._counts[bisect_left(self.bounds, value)] += times
        self._sum += value * times

    def add_counts(self, counts: Sequence[int], total: float) -> None:
        """Add observations that were already sorted into these bounds.  Raises ValueError when they do not fit."""
        if len(counts) != len(self._counts) or min(counts) < 0 or not total >= 0:
            raise ValueError(f"{self.name} cannot take the counts {counts} with sum {total}")
        self._counts = [mine + new for mine, new in zip(self._counts, counts, strict=True)]
        self._sum += total

    def lines(self, base: Labels) -> Iterator[str]:
        """The cumulative buckets, the sum and the count in text form."""
        below = 0
        for bound, count in zip((*map(_number, self.bounds), "+Inf"), self._counts, strict=True):
            below += count
            yield _sample(f"{self.name}_bucket", (*base, ("le", bound)), below)
        yield _sample(f"{self.name}_sum", base, self._sum)
        yield _sample(f"{self.name}_count", base, below)


Metric = Counter | Gauge | Histogram


def render(metrics: Sequence[Metric], base: dict[str, str]) -> bytes:
    """All metrics in text form, every sample with the labels of `base` too."""
    labels = tuple(base.items())
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {_escape(metric.help_text, quotes=False)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines.extend(metric.lines(labels))
    return ("\n".join(lines) + "\n").encode()
