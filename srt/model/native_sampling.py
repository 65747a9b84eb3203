"""Sampling in the native kernels: greedy and drawn tokens straight from the logits, several rows at a time."""

from __future__ import annotations

import numpy as np
import torch

from srt.model.draw import DrawParams
from srt.model.kernels.check import check_logits
from srt.model.native import NativeModel
from srt.plan import Int32Array

# `struct DrawRow` of kernels/sampling.h.
DRAW_ROW = np.dtype(
    [("row", "i4"), ("top_k", "i4"), ("temperature", "f4"), ("min_p", "f4"), ("top_p", "f8"), ("uniform", "f8")]
)


class NativeChooser:
    """Implements `srt.model.draw.Chooser` on the threads of a model.

    Raises ValueError for logits that are not of the model's shape, and for rows that are not there.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.vocab_size = model.config.vocab_size

    def broken(self, logits: torch.Tensor) -> list[int]:
        """See `Chooser.broken`."""
        check_logits(logits, (), self.vocab_size)
        finite = np.empty(len(logits), np.uint8)
        self._model.call("sapwood_finite", logits.data_ptr(), len(logits), finite.ctypes.data)
        return np.flatnonzero(finite == 0).tolist()

    def greedy(self, logits: torch.Tensor, rows: list[int]) -> Int32Array:
        """See `Chooser.greedy`."""
        check_logits(logits, rows, self.vocab_size)
        chosen = np.empty(len(rows), np.int32)
        named = np.array(rows, np.int32)
        self._model.call("sapwood_greedy", logits.data_ptr(), named.ctypes.data, len(rows), chosen.ctypes.data)
        return chosen

    def draw(self, logits: torch.Tensor, rows: list[int], params: DrawParams) -> Int32Array:
        """See `Chooser.draw`."""
        check_logits(logits, rows, self.vocab_size)
        settings = np.empty(len(rows), DRAW_ROW)
        settings["row"] = rows
        settings["top_k"] = np.minimum(params.top_k, self.vocab_size)
        settings["temperature"] = params.temperature.numpy()
        settings["min_p"] = params.min_p
        settings["top_p"] = params.top_p
        settings["uniform"] = params.uniform.numpy()
        chosen = np.empty(len(rows), np.int32)
        if self._model.call("sapwood_draw", logits.data_ptr(), settings.ctypes.data, len(rows), chosen.ctypes.data):
            raise MemoryError("not enough memory to sample")
        return chosen
