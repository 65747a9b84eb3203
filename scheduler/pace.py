"""How many prefill tokens a step may take beside its decode rows, so that running streams keep their pace.

The seconds of a step are modelled as  base + per_row * decode rows + per_token * prefill tokens  and fitted as steps go
by: recursive least squares with forgetting (Ljung, System Identification, 2nd ed., 11.2), so that the model follows the
machine.  Until it has seen a few steps of both kinds, and where no target is set, there is no share to keep.
"""

from __future__ import annotations

import math

# What a step of long ago counts is worth this to the power of the steps since.
FORGETTING = 0.98
# Prefill tokens and rows are of very different size; in these units the fit is well conditioned.
ROWS_UNIT, TOKENS_UNIT = 16.0, 256.0
STEPS_BEFORE_USE = 8


class Pace:
    """`target_seconds`: the time between two tokens of a stream to keep to; None for as fast as it goes."""

    def __init__(self, target_seconds: float | None) -> None:
        self.target_seconds = target_seconds
        # Plain numbers, written out: with three of them numpy's calls take longer than the arithmetic, in every step.
        self._weights = (0.0, 0.0, 0.0)
        # The upper triangle of the symmetric covariance, row by row.
        self._covariance = (100.0, 0.0, 0.0, 100.0, 0.0, 100.0)
        self._steps = 0

    def observe(self, seconds: float, decode_rows: int, prefill_tokens: int) -> None:
        """A step of this shape took so long."""
        x, y = decode_rows / ROWS_UNIT, prefill_tokens / TOKENS_UNIT
        w0, w1, w2 = self._weights
        c00, c01, c02, c11, c12, c22 = self._covariance
        # The covariance times the shape (1, x, y), and the gain along it.
        s0, s1, s2 = c00 + c01 * x + c02 * y, c01 + c11 * x + c12 * y, c02 + c12 * x + c22 * y
        scale = FORGETTING + s0 + s1 * x + s2 * y
        g0, g1, g2 = s0 / scale, s1 / scale, s2 / scale
        error = seconds - (w0 + w1 * x + w2 * y)
        self._weights = (w0 + g0 * error, w1 + g1 * error, w2 + g2 * error)
        c00, c11, c22 = c00 - g0 * s0, c11 - g1 * s1, c22 - g2 * s2
        # Without new evidence in one direction the covariance would grow there without bound.
        f = min(1.0 / FORGETTING, 300.0 / (c00 + c11 + c22))
        c01, c02, c12 = c01 - g0 * s1, c02 - g0 * s2, c12 - g1 * s2
        self._covariance = (c00 * f, c01 * f, c02 * f, c11 * f, c12 * f, c22 * f)
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
