"""Choosing a token from logits by temperature, top-k, top-p and min-p.

Every filter is a threshold on the probability, so that tokens of equal probability share one fate and a row's
result hangs neither on the order of a sort nor on its neighbours:

    top-k    at least the k-th largest probability
    top-p    at least the probability of the token with which the largest ones, summed in falling order, reach
             top_p of what top-k left  (Holtzman et al., "The curious case of neural text degeneration", 2020)
    min-p    at least min_p times the largest probability  (Nguyen et al., "Turning up the heat", 2024)

What remains is drawn by inverting its distribution function, in the order of the ids, at one uniform number.
Softmax and sums go over all rows at once but work on one row at a time inside; thresholds are found row by row.
That, and not only the mathematics, makes a row's result independent of the batch to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from srt.plan import Int32Array

FloatArray = npt.NDArray[np.float32]

# Colder than this is greedy: the quotients of the logits would overflow, and nothing else could come out.
MIN_TEMPERATURE = 1e-5
# Up to so many probabilities are sorted; more are first narrowed down to those of one bucket.
SORTED_AT_ONCE = 1024
BLOCK = 128
WORK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Per row: temperature float32 [n]; top_k ints [n], the vocabulary's size or more when off; top_p [n], 1 when
    off; min_p [n], 0 when off; uniform float64 [n], the number in (0, 1) that decides."""

    temperature: torch.Tensor
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    uniform: torch.Tensor

    def rows(self, part: slice) -> DrawParams:
        """The settings of some of the rows."""
        return DrawParams(
            self.temperature[part], self.top_k[part], self.top_p[part], self.min_p[part], self.uniform[part]
        )


class Chooser(Protocol):
    """What picks tokens from float32 logits [n, vocab], which stay as they are: torch, or the native kernels."""

    def best(self, logits: torch.Tensor) -> Int32Array:
        """The id of the largest logit of each row, the lowest among equals; -1 where one is not finite: int32 [n]."""
        ...

    def greedy(self, logits: torch.Tensor, rows: list[int]) -> Int32Array:
        """The id of the largest logit of each of the `rows`, which may hold -inf; the lowest id among equals."""
        ...

    def draw(self, logits: torch.Tensor, rows: list[int], params: DrawParams) -> Int32Array:
        """One id for each of the `rows`, int32 [rows].  All their logits are finite or -inf, not all -inf."""
        ...


class TorchChooser:
    """Implements `Chooser`."""

    def best(self, logits: torch.Tensor) -> Int32Array:
        """See `Chooser.best`."""
        found = logits.argmax(dim=-1).int().numpy()
        # A sum is cheap, and not finite whenever a term is not; the converse is checked where it matters.
        suspects = (~logits.sum(dim=-1).isfinite()).nonzero().flatten().tolist()
        found[[row for row in suspects if not bool(logits[row].isfinite().all())]] = -1
        return found

    def greedy(self, logits: torch.Tensor, rows: list[int]) -> Int32Array:
        """See `Chooser.greedy`."""
        return _rows(logits, rows).argmax(dim=-1).int().numpy()

    def draw(self, logits: torch.Tensor, rows: list[int], params: DrawParams) -> Int32Array:
        """See `Chooser.draw`."""
        return draw(_rows(logits, rows), params).int().numpy()


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows, ascending; no copy when it is all of them."""
    return logits if len(rows) == len(logits) else logits.index_select(0, torch.tensor(rows))


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """One id for each row of float32 `logits` [n, vocab], int64 [n].  All logits are finite or -inf, not all -inf."""
    # A few rows at a time: what they take stays in the cache and is used again, where one large block would be
    # fresh memory from the system in every step.
    rows = max(1, WORK_BYTES // (4 * logits.shape[1]))
    chosen = []
    for low in range(0, len(logits), rows):
        part = slice(low, low + rows)
        probabilities = remaining_probabilities(logits[part], params.rows(part))
        chosen.append(_invert(probabilities, params.uniform[part]))
    return torch.cat(chosen)


def remaining_probabilities(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Probabilities float32 [n, vocab], zero where top-k, top-p or min-p put a token out; not normalised again."""
    # The largest logit becomes 0 before the division, which then cannot overflow upwards.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)).div_(params.temperature[:, None])
    probabilities = scaled.softmax(dim=-1)
    for row, values in enumerate(probabilities):
        floor = _floor(values, params.top_k[row], params.top_p[row], params.min_p[row])
        if floor > 0:
            below = np.nextafter(floor, np.float32(0))
            F.threshold(values, float(below), 0.0, inplace=True)
    return probabilities


def _floor(row: torch.Tensor, top_k: int, top_p: float, min_p: float) -> np.float32:
    """The smallest probability in float32 `row` [vocab] that passes all filters."""
    values = row.numpy()
    floor = np.float32(0)
    if top_k < len(values):
        floor = np.float32(row.topk(top_k, sorted=False).values.amin().item())
    if top_p < 1.0:
        floor = max(floor, _mass_floor(values if floor == 0 else values[values >= floor], top_p))
    if min_p > 0.0:
        floor = max(floor, np.float32(min_p) * values.max())
    return floor


def _mass_floor(values: FloatArray, top_p: float) -> np.float32:
    """The value at which the sum of float32 `values` [n], none negative, in falling order reaches `top_p` of it all."""
    if len(values) <= SORTED_AT_ONCE:
        needed = top_p * float(values.sum(dtype=np.float64))
    else:
        # The upper half of a positive float's bits orders buckets of like size, 128 to each power of two.
        buckets = values.view(np.int32) >> 16
        mass = np.bincount(buckets, weights=values)
        reached = np.cumsum(mass[::-1])[::-1]
        needed = top_p * float(reached[0])
        bucket = int(np.flatnonzero(reached >= needed)[-1])
        needed -= float(reached[bucket + 1 :][:1].sum())
        values = values[buckets == bucket]
    falling = np.sort(values)[::-1]
    place = np.searchsorted(np.cumsum(falling, dtype=np.float64), needed)
    # Rounding may leave the running sum a little short at its end.
    return np.float32(falling[min(int(place), len(falling) - 1)])


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first id at which the running sum of a row of `weights` exceeds `uniform` of the row's whole sum.

    Sums go by blocks: one pass finds the block, one the place in it.  An id of weight zero never comes out.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform * ends[:, -1]
    block = (ends <= target[:, None]).sum(dim=-1)
    rows = torch.arange(len(weights))
    before = torch.where(block > 0, ends[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block].cumsum(dim=-1, dtype=torch.float64)
    # The block's sum was rounded along another path than this running sum: stay below the end of the latter.
    rest = torch.minimum(target - before, inside[:, -1] * (1.0 - 2.0**-40))
    return block * BLOCK + (inside <= rest[:, None]).sum(dim=-1)
