"""How many prefill tokens a step may take beside its decode rows, so that running streams keep their pace.

The seconds of a step are modelled as  base + per_row * decode rows + per_token * prefill tokens  and fitted as steps go
by: recursive least squares with forgetting (Ljung, System Identification, 2nd ed., 11.2), so that the model follows the
machine.  Until it has seen a few steps of both kinds, and where no target is set, there is no share to keep.
"""

from __future__ import annotations

import math

import numpy as np

# What a step of long ago counts is worth this to the power of the steps since.
FORGETTING = 0.98
# Prefill tokens and rows are of very different size; in these units the fit is well conditioned.
ROWS_UNIT, TOKENS_UNIT = 16.0, 256.0
STEPS_BEFORE_USE = 8


class Pace:
    """`target_seconds`: the time between two tokens of a stream to keep to; None for as fast as it goes."""

    def __init__(self, target_seconds: float | None) -> None:
        self.target_seconds = target_seconds
        self._weights = np.zeros(3)
        self._covariance = np.eye(3) * 100.0
        self._steps = 0

    def observe(self, seconds: float, decode_rows: int, prefill_tokens: int) -> None:
        """A step of this shape took so long."""
        shape = np.array([1.0, decode_rows / ROWS_UNIT, prefill_tokens / TOKENS_UNIT])
        gain = self._covariance @ shape / (FORGETTING + shape @ self._covariance @ shape)
        self._weights += gain * (seconds - shape @ self._weights)
        self._covariance = (self._covariance - np.outer(gain, shape @ self._covariance)) / FORGETTING
        # Without new evidence in one direction the covariance would grow there without bound.
        self._covariance *= min(1.0, 300.0 / float(np.trace(self._covariance)))
        self._steps += 1

    def predict(self, decode_rows: int, prefill_tokens: int) -> float:
        """Seconds that a step of this shape will probably take."""
        shape = np.array([1.0, decode_rows / ROWS_UNIT, prefill_tokens / TOKENS_UNIT])
        return float(shape @ np.maximum(self._weights, 0.0))

    def prefill_seconds(self, num_tokens: int) -> float:
        """What computing so many tokens of a prompt will probably take; infinite while nobody knows."""
        if self._steps < STEPS_BEFORE_USE:
            return math.inf
        return num_tokens * max(float(self._weights[2]), 0.0) / TOKENS_UNIT

    def prefill_tokens(self, decode_rows: int, most: int, least: int) -> int:
        """Prefill tokens for a step with so many decode rows: `least` to `most`.

        Without decode rows nobody's pace is at stake.  `least` keeps prompts moving where the target cannot be held.
        """
        if self.target_seconds is None or decode_rows == 0 or self._steps < STEPS_BEFORE_USE:
            return most
        spare = self.target_seconds - self.predict(decode_rows, 0)
        per_token = max(float(self._weights[2]) / TOKENS_UNIT, 1e-9)
        return max(min(most, least), min(most, int(spare / per_token)))
