"""Choosing a token from logits by temperature, top-k, top-p and min-p, row by row and all rows at once.

Every filter is a threshold on the probability, so that tokens of equal probability share one fate and a row's
result hangs neither on the order of a sort nor on its neighbours:

    top-k    at least the k-th largest probability
    top-p    at least the probability of the token with which the largest ones, summed in falling order, reach
             top_p of what top-k left  (Holtzman et al., "The curious case of neural text degeneration", 2020)
    min-p    at least min_p times the largest probability  (Nguyen et al., "Turning up the heat", 2024)

What remains is drawn by inverting its distribution function, in the order of the ids, at one uniform number.
All operations work on one row at a time inside (softmax, top-k, sums of fixed blocks): that, and not only their
mathematics, makes a row's result independent of the batch to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

# Colder than this is greedy: the quotients of the logits would overflow, and nothing else could come out.
MIN_TEMPERATURE = 1e-5
# Candidates looked at before a row whose top-p set is larger is sorted as a whole.
NUCLEUS_GUESS = 512
BLOCK = 128


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Per row: float32 [n] temperature and min_p, int64 [n] top_k (the vocabulary's size when off), float64 [n] top_p
    (1 when off) and uniform (the number in (0, 1) that decides)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The id of the largest logit of each row of [n, vocab], the lowest id among equals: int64 [n]."""
    return logits.argmax(dim=-1)


def draw(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """One id for each row of float32 `logits` [n, vocab], int64 [n].  A row must have a finite maximum."""
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / params.temperature[:, None]
    probabilities = filtered(scaled, params)
    return _invert(probabilities, params.uniform)


def filtered(scaled: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """Probabilities [n, vocab] after top-k, top-p and min-p, zero where a token is out; not normalised again.

    `scaled`: logits divided by the temperature, each row's maximum at 0.
    """
    limited = (params.top_k < scaled.shape[1]).nonzero().flatten()
    if len(limited):
        floor = _kth_largest(scaled[limited], params.top_k[limited])
        scaled[limited] = scaled[limited].masked_fill_(scaled[limited] < floor[:, None], float("-inf"))
    probabilities = scaled.softmax(dim=-1)
    floor = params.min_p * probabilities.amax(dim=-1)
    nucleus = (params.top_p < 1.0).nonzero().flatten()
    if len(nucleus):
        least = _nucleus_floor(probabilities[nucleus], params.top_p[nucleus])
        floor[nucleus] = torch.maximum(floor[nucleus], least)
    if bool((floor > 0).any()):
        probabilities.masked_fill_(probabilities < floor[:, None], 0.0)
    return probabilities


def _kth_largest(values: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The k[i]-th largest of row i: float32 [n].  Rows of like k go together, so that one large k costs only itself."""
    result = torch.empty(len(values))
    sizes = [1 << (size - 1).bit_length() for size in k.tolist()]
    for size in sorted(set(sizes)):
        rows = torch.tensor([row for row, mine in enumerate(sizes) if mine == size])
        top = values[rows].topk(min(size, values.shape[1]), dim=-1).values
        result[rows] = top.gather(1, k[rows, None] - 1).flatten()
    return result


def _nucleus_floor(probabilities: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The smallest probability inside each row's top-p set: float32 [n]."""
    head = probabilities.topk(min(NUCLEUS_GUESS, probabilities.shape[1]), dim=-1).values
    floor, reached = _where_mass_reaches(head, top_p)
    rest = (~reached).nonzero().flatten()
    if len(rest):
        # Values alone suffice, and numpy sorts those several times faster than torch sorts values with indices.
        ordered = np.sort(probabilities[rest].numpy(), axis=-1)[:, ::-1].copy()
        whole, reached = _where_mass_reaches(torch.from_numpy(ordered), top_p[rest])
        # Rounding may leave the sum of everything short of top_p: then nothing is out.
        floor[rest] = torch.where(reached, whole, 0.0)
    return floor


def _where_mass_reaches(falling: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The value at which the sum of each row of `falling` reaches top_p, and whether it does."""
    enough = falling.cumsum(dim=-1, dtype=torch.float64) >= top_p[:, None]
    first = enough.int().argmax(dim=-1)
    return falling.gather(1, first[:, None]).flatten(), enough[:, -1]


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
