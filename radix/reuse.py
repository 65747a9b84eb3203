"""What is known of reuse: after how long leaves of each kind are used again, and what to expect of one of some age.

Ages are counted in ticks of the tree and sorted into buckets that grow by half an octave.  For each kind of leaf the
table counts, by age, the spells that ended with a reuse and those that were given up; together with the spells that
are still under way (a sample, taken by the caller) they give the share of the leaves of an age that is used again
before they are a bucket older: the Kaplan-Meier estimate, with part of the spells still open.

From these shares follows what a leaf is worth: the best ratio, over all times to stop waiting, of the chance that it
is used until then to the time that it takes room until then.  That is the index of J. C. Gittins (1979), and of two
leaves the one with the lower index should go.  N. Beckmann, H. Chen and A. Cidon (LHD, NSDI 2018) rank by a related
ratio; unlike there, what is learned of an age does not depend on how long the cache happens to keep leaves, since
the spells of evicted leaves go on (`radix.adaptive`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BUCKETS = 60
# So much evidence, in spells, does the belief about all kinds together count for in the estimate of one.
PRIOR_SPELLS = 60.0
# What is counted weighs this much less after each estimate.
MEMORY = 0.95
# Before anything is known: the chance that a leaf outlives age t falls like t to the power of minus this.
PRIOR_DECAY = 0.3


def bucket(age: int) -> int:
    """The bucket of an age in ticks: [0, 2), [2, 3), [3, 4), [4, 6), [6, 8), [8, 12), ..."""
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    return min(2 * octave + (age >> (octave - 1) & 1) - 1, BUCKETS - 1)


def count_ages(now: int, ticks: Sequence[int]) -> Floats:
    """How many of these ticks lie back in each bucket of age."""
    ages = now - np.array(ticks, dtype=np.int64)
    return np.bincount(np.searchsorted(_EDGES, ages, side="right") - 1, minlength=BUCKETS)[:BUCKETS].astype(np.float64)


def _edges() -> Floats:
    octaves, halves = np.divmod(np.arange(1, BUCKETS + 1), 2)
    later = np.where(halves, 2.0 ** (octaves + 1), 1.5 * 2.0**octaves)
    return np.concatenate([[0.0], later])


_EDGES = _edges()


class ReuseTable:
    """`weights`: for each kind, how much likelier than others it is to be used again, before it is known better."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = np.array(weights)
        # Plain lists: they are read one number at a time.
        self._edges: list[float] = _EDGES.tolist()
        low, high = np.maximum(_EDGES[:-1], 1.0), np.maximum(_EDGES[1:], 2.0)
        self._prior = 1.0 - (low / high) ** PRIOR_DECAY
        kinds = len(weights)
        self._reused: Floats = np.zeros((kinds, BUCKETS))
        self._given_up: Floats = np.zeros((kinds, BUCKETS))
        self._index: list[list[float]] = []
        self.estimate(np.zeros((kinds, BUCKETS)))

    def reused(self, kind: int, age: int, share: float) -> None:
        """A spell of a leaf of this kind ended at this age: `share` of it (0 to 1) was used again."""
        self._reused[kind, bucket(age)] += share

    def given_up(self, kind: int, age: int, share: float) -> None:
        """Of a leaf of this kind, `share` is not watched any longer."""
        self._given_up[kind, bucket(age)] += share

    def index(self, kind: int, age: int) -> float:
        """What a leaf of this kind is worth at this age, per tick.  Continuous in the age."""
        row, at = self._index[kind], bucket(age)
        edges = self._edges
        place = (age - edges[at]) / (edges[at + 1] - edges[at]) - 0.5
        other = min(at + 1, BUCKETS - 1) if place > 0 else max(at - 1, 0)
        return row[at] + (row[other] - row[at]) * abs(place)

    def estimate(self, open_spells: Floats) -> None:
        """Take in what was counted.  `open_spells`, [kinds, BUCKETS]: spells that are under way, by their age."""
        ended = self._reused + self._given_up + open_spells
        together = self._reused.sum(0)
        believed = _shares(together, ended.sum(0), self._prior)
        spells = ended.sum(1)
        mean_weight = float(spells @ self._weights) / float(spells.sum()) if spells.any() else 1.0
        # The weights tell which leaves come back.  They tell nothing of the few that come back when nearly all that
        # ever do have done so, and fade accordingly.
        to_come = 1.0 - np.cumsum(together) / together.sum() if together.any() else np.ones(BUCKETS)
        self._index = []
        for kind, weight in enumerate(self._weights):
            prior = np.minimum(believed * (1.0 + (weight / mean_weight - 1.0) * to_come), 0.9)
            self._index.append(self._worth(_shares(self._reused[kind], ended[kind], prior)).tolist())
        self._reused *= MEMORY
        self._given_up *= MEMORY

    def _worth(self, shares: Floats) -> Floats:
        """The index by bucket, from the share of leaves that is used again within each bucket."""
        alive = np.concatenate([[1.0], np.cumprod(1.0 - np.minimum(shares, 0.999))])
        spent = np.concatenate([[0.0], np.cumsum(np.diff(_EDGES) * (alive[:-1] + alive[1:]) / 2)])
        gain = alive[:-1, None] - alive[None, 1:]
        time = spent[None, 1:] - spent[:-1, None]
        ratios = np.divide(gain, time, out=np.zeros_like(gain), where=time > 0)
        return np.asarray(ratios.max(1), dtype=np.float64)


def _shares(reused: Floats, ended: Floats, prior: Floats) -> Floats:
    """Of the spells that reached a bucket, the share that ended in it with a reuse."""
    reached = np.cumsum(ended[::-1])[::-1]
    return (reused + PRIOR_SPELLS * prior) / (reached + PRIOR_SPELLS)
