"""A strict reader of the Prometheus text format, so that what /metrics sends is known to be what scrapers take.

Written after the format's description: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})(?:\{{({LABEL}(?:,{LABEL})*)\}})? (-?[0-9.]+(?:e[+-]?[0-9]+)?|[+-]Inf|NaN)")
Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class Scrape:
    """What one scrape says: the kind of each metric, and each sample by its name and labels."""

    kinds: dict[str, str] = field(default_factory=dict)
    samples: dict[Key, float] = field(default_factory=dict)

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with this name and (at least) these labels; 0 when there are none."""
        wanted = frozenset(labels.items())
        return sum(value for (found, has), value in self.samples.items() if found == name and wanted <= has)

    def counters(self) -> dict[Key, float]:
        """Every sample that must never fall."""
        falling = ("gauge",)
        return {
            key: value for key, value in self.samples.items() if self.kinds[_family(key[0], self.kinds)] not in falling
        }


def _family(name: str, kinds: dict[str, str]) -> str:
    if name in kinds:
        return name
    return re.sub(r"_(bucket|sum|count)$", "", name)


def parse(text: str) -> Scrape:
    """Read a scrape.  Raises AssertionError for everything that is not as the format has it."""
    assert text.endswith("\n")
    scrape = Scrape()
    helped: set[str] = set()
    family = ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            name, help_text = line[7:].split(" ", 1)
            assert name not in helped, f"{name} is described twice"
            assert help_text
            helped.add(name)
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name not in scrape.kinds, f"{name} has its type twice"
            assert name in helped
            assert kind in ("counter", "gauge", "histogram")
            assert kind != "counter" or name.endswith("_total"), name
            scrape.kinds[name] = kind
            family = name
        else:
            match = SAMPLE.fullmatch(line)
            assert match, f"not a sample: {line!r}"
            name, labels, value = match.groups()
            assert _family(name, scrape.kinds) == family, f"{name} is not below its type"
            pairs = [tuple(pair.split("=", 1)) for pair in re.findall(LABEL, labels or "")]
            assert len({label for label, _ in pairs}) == len(pairs), f"a label twice: {line!r}"
            key = (name, frozenset((label, content[1:-1]) for label, content in pairs))
            assert key not in scrape.samples, f"twice: {line!r}"
            scrape.samples[key] = float(value.replace("Inf", "inf"))
    _check_values(scrape)
    return scrape


def _check_values(scrape: Scrape) -> None:
    for (name, labels), value in scrape.samples.items():
        kind = scrape.kinds[_family(name, scrape.kinds)]
        assert math.isfinite(value), (name, labels, value)
        assert kind == "gauge" or value >= 0, (name, labels, value)
    for name, kind in scrape.kinds.items():
        if kind == "histogram":
            _check_histogram(scrape, name)


def _check_histogram(scrape: Scrape, name: str) -> None:
    buckets = [
        (float(dict(labels)["le"].replace("Inf", "inf")), value)
        for (found, labels), value in scrape.samples.items()
        if found == f"{name}_bucket"
    ]
    assert buckets == sorted(buckets), f"the buckets of {name} do not rise"
    assert buckets[-1][0] == math.inf
    assert buckets[-1][1] == scrape.value(f"{name}_count")
    if buckets[-1][1] == 0:
        assert scrape.value(f"{name}_sum") == 0
