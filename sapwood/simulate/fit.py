"""Fits step times to measured steps: non-negative least squares over what `Load` counts.

Seconds by the number of tokens are a line through points at the knots, which is linear in the seconds at the knots: a
step between two knots takes its share of each.  So the whole model is one linear system.  Its rows are divided by the
measured seconds, so that it is relative errors that are made small: a decode step counts as much as a long prefill.

On a machine that others use too, some steps take a multiple of their time.  So a step that is missed by much more than
most are counts by its miss, not by the square of it (Huber 1964, by reweighting): a few bad steps move the fit no more
than they would if they were a little off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sapwood.simulate.cost import Fitted, Load

Floats = npt.NDArray[np.float64]

MAX_ITERATIONS = 1000
# Misses of so many standard deviations, as the median miss tells them, count in full.
HUBER = 1.345
REWEIGHTINGS = 20


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step."""

    load: Load
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The profile, and by which share of the measured seconds it misses them."""

    profile: Fitted
    points: list[Point]
    median_error: float
    p90_error: float
    worst_error: float


def fit(points: Sequence[Point]) -> Fit:
    """Fit step times.  Raises ValueError when there is nothing to fit."""
    if not points or any(point.seconds <= 0 for point in points):
        raise ValueError("a fit needs points, and every step must have taken some time")
    knots = _knots([point.load.tokens for point in points])
    loads = [point.load for point in points]
    rows = np.array([[*_hats(knots, p.tokens), p.rows, p.sampled, p.pairs, p.context] for p in loads], dtype=np.float64)
    seconds = np.array([point.seconds for point in points])
    solution = _robust(rows / seconds[:, None])
    tokens, (row, sampled, pair, context) = solution[: len(knots)], solution[len(knots) :].tolist()
    profile = Fitted(
        tokens=list(zip(knots, np.maximum.accumulate(tokens).tolist(), strict=True)),
        row=row,
        sampled=sampled,
        pair=pair,
        context=context,
        points=[
            (p.load.rows, p.load.sampled, p.load.tokens, p.load.context, p.load.pairs, round(p.seconds, 7))
            for p in points
        ],
    )
    errors = np.array([abs(profile.seconds(p.load) / p.seconds - 1) for p in points])
    return Fit(profile, list(points), float(np.median(errors)), float(np.percentile(errors, 90)), float(errors.max()))


def _robust(a: Floats) -> Floats:
    """The x >= 0 that brings a x near to 1, with few outliers left out of account.  a float64 [m,n]."""
    ones = np.ones(len(a))
    solution = nonnegative_least_squares(a, ones)
    for _ in range(REWEIGHTINGS):
        misses = np.abs(a @ solution - 1.0)
        bound = HUBER * 1.4826 * float(np.median(misses))
        if bound < 1e-9:
            break
        # The squares are weighted by bound / miss where the miss is larger, the rows by the root of that.
        weights = np.sqrt(np.minimum(1.0, bound / np.maximum(misses, 1e-300)))
        previous, solution = solution, nonnegative_least_squares(a * weights[:, None], weights)
        if np.allclose(previous, solution, rtol=1e-4, atol=0.0):
            break
    return solution


def _knots(counts: Sequence[int]) -> list[int]:
    """The smallest and largest number of tokens, and between them what lies a factor of 1.4 or more apart."""
    ordered = sorted(set(counts))
    knots = [ordered[0]]
    for count in ordered[1:-1]:
        if count >= 1.4 * knots[-1] and count * 1.2 <= ordered[-1]:
            knots.append(count)
    return knots if ordered[-1] == knots[-1] else [*knots, ordered[-1]]


def _hats(knots: Sequence[int], count: int) -> list[float]:
    """The share of each knot in a step of so many tokens."""
    shares = [0.0] * len(knots)
    for index in range(len(knots) - 1):
        low, high = knots[index], knots[index + 1]
        if low <= count <= high:
            shares[index + 1] = (count - low) / (high - low)
            shares[index] = 1.0 - shares[index + 1]
            return shares
    shares[-1] = 1.0
    return shares


def nonnegative_least_squares(a: Floats, b: Floats) -> Floats:
    """The x >= 0 with the least |a x - b|: the active set method of Lawson and Hanson (1974), on scaled columns.

    a float64 [m,n], b float64 [m]; returns float64 [n].
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0.0] = 1.0
    a = a / scale
    count = a.shape[1]
    x: Floats = np.zeros(count)
    passive = np.zeros(count, dtype=np.bool_)
    tolerance = 1e-10 * float(np.abs(a.T @ b).max(initial=0.0))
    for _ in range(MAX_ITERATIONS):
        gradient = a.T @ (b - a @ x)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        while True:
            trial = np.zeros(count)
            trial[passive] = np.linalg.lstsq(a[:, passive], b, rcond=None)[0]
            negative = passive & (trial <= 0.0)
            if not negative.any():
                x = trial
                break
            # Go as far towards the trial as all stay positive; what arrives at zero leaves.
            step = float((x[negative] / (x[negative] - trial[negative])).min())
            x = x + step * (trial - x)
            passive &= x > 1e-15
            x[~passive] = 0.0
    result: Floats = x / scale
    return result
