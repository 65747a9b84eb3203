"""How many prefill tokens a step may take beside its decode rows, so that running streams keep their pace.

The seconds of a step are modelled as  base + per_row * decode rows + per_token * prefill tokens  and fitted as steps go
by: recursive least squares with forgetting (Ljung, System Identification, 2nd ed., 11.2), so that the model follows the
machine.  Until it has seen a few steps of both kinds, and where no target is set, there is no share to keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# What a step of long ago counts is worth this to the power of the steps since.
FORGETTING = 0.98
# Prefill tokens and rows are of very different size; in these units the fit is well conditioned.
ROWS_UNIT, TOKENS_UNIT = 16.0, 256.0
STEPS_BEFORE_USE = 8


class Pace:
    """`target_seconds`: the time between two tokens of a stream to keep to; None for as fast as it goes."""

    def __init__(self, target_seconds: float | None) -> None:
        self.target_seconds = target_seconds
        # Plain numbers: for three of them numpy's calls take longer than the arithmetic, in every step.
        self._weights = [0.0, 0.0, 0.0]
        self._covariance = [[100.0, 0.0, 0.0], [0.0, 100.0, 0.0], [0.0, 0.0, 100.0]]
        self._steps = 0

    def observe(self, seconds: float, decode_rows: int, prefill_tokens: int) -> None:
        """A step of this shape took so long."""
        shape = (1.0, decode_rows / ROWS_UNIT, prefill_tokens / TOKENS_UNIT)
        covariance = self._covariance
        spread = [_dot(row, shape) for row in covariance]
        scale = FORGETTING + _dot(shape, spread)
        error = seconds - _dot(self._weights, shape)
        self._weights = [weight + s / scale * error for weight, s in zip(self._weights, spread, strict=True)]
        # Symmetric, so that a row times the shape is a column times it.
        covariance = [
            [(cell - left / scale * right) / FORGETTING for cell, right in zip(row, spread, strict=True)]
            for row, left in zip(covariance, spread, strict=True)
        ]
        # Without new evidence in one direction the covariance would grow there without bound.
        trace = covariance[0][0] + covariance[1][1] + covariance[2][2]
        if trace > 300.0:
            covariance = [[cell * (300.0 / trace) for cell in row] for row in covariance]
        self._covariance = covariance
        self._steps += 1

    def predict(self, decode_rows: int, prefill_tokens: int) -> float:
        """Seconds that a step of this shape will probably take."""
        base, per_row, per_token = (max(weight, 0.0) for weight in self._weights)
        return base + per_row * decode_rows / ROWS_UNIT + per_token * prefill_tokens / TOKENS_UNIT

    def prefill_seconds(self, num_tokens: int) -> float:
        """What computing so many tokens of a prompt will probably take; infinite while nobody knows."""
        if self._steps < STEPS_BEFORE_USE:
            return math.inf
        return num_tokens * max(self._weights[2], 0.0) / TOKENS_UNIT

    def prefill_tokens(self, decode_rows: int, most: int, least: int) -> int:
        """Prefill tokens for a step with so many decode rows: `least` to `most`.

        Without decode rows nobody's pace is at stake.  `least` keeps prompts moving where the target cannot be held.
        """
        if self.target_seconds is None or decode_rows == 0 or self._steps < STEPS_BEFORE_USE:
            return most
        spare = self.target_seconds - self.predict(decode_rows, 0)
        per_token = max(self._weights[2] / TOKENS_UNIT, 1e-9)
        return max(min(most, least), min(most, int(spare / per_token)))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]
