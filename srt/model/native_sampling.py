"""Sampling in the native kernels: greedy and drawn tokens straight from the logits, several rows at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from srt.model.draw import DrawParams
from srt.model.kernels.check import check_drawable, check_draws, check_logits
from srt.model.native import NativeModel
from srt.plan import Int32Array

# `struct DrawRow` of kernels/sampling.h.
DRAW_ROW = np.dtype(
    [("row", "i4"), ("top_k", "i4"), ("temperature", "f4"), ("min_p", "f4"), ("top_p", "f8"), ("uniform", "f8")]
)


class NativeChooser:
    """Implements `srt.model.draw.Chooser` on the threads of a model.

    Raises ValueError, which names what is wrong, for logits that are not of the model's shape, for rows that are not
    there, and in `draw` for rows without a greatest logit and for settings that are not `DrawParams`.
    """

    def __init__(self, model: NativeModel) -> None:
        self._model = model
        self.vocab_size = model.config.vocab_size

    def best(self, logits: torch.Tensor) -> Int32Array:
        """See `Chooser.best`."""
        check_logits("logits", logits, (), self.vocab_size)
        found = np.empty(len(logits), np.int32)
        self._model.call("sapwood_best", logits.data_ptr(), len(logits), found.ctypes.data)
        return found

    def greedy(self, logits: torch.Tensor, rows: list[int]) -> Int32Array:
        """See `Chooser.greedy`."""
        check_logits("logits", logits, rows, self.vocab_size)
        chosen = np.empty(len(rows), np.int32)
        named = np.array(rows, np.int32)
        self._model.call("sapwood_greedy", logits.data_ptr(), named.ctypes.data, len(rows), chosen.ctypes.data)
        return chosen

    def draw(self, logits: torch.Tensor, rows: list[int], params: DrawParams) -> Int32Array:
        """See `Chooser.draw`."""
        check_logits("logits", logits, rows, self.vocab_size)
        check_drawable(logits, rows)
        settings = self._settings(rows, params)
        check_draws(settings)
        chosen = np.empty(len(rows), np.int32)
        if self._model.call("sapwood_draw", logits.data_ptr(), settings.ctypes.data, len(rows), chosen.ctypes.data):
            raise MemoryError("not enough memory to sample")
        return chosen

    def _settings(self, rows: list[int], params: DrawParams) -> npt.NDArray[np.void]:
        """DRAW_ROW [rows].  Raises ValueError when a setting is not given for each row."""
        columns: dict[str, npt.NDArray[np.generic]] = {
            "top_k": np.clip(params.top_k, 0, self.vocab_size),
            "temperature": params.temperature.numpy(),
            "min_p": np.array(params.min_p),
            "top_p": np.array(params.top_p),
            "uniform": params.uniform.numpy(),
        }
        settings = np.empty(len(rows), DRAW_ROW)
        settings["row"] = rows
        for name, values in columns.items():
            # Assignment would stretch a single value over all rows.
            if len(values) != len(rows):
                raise ValueError(f"{name} has {len(values)} entries, expected {len(rows)}, one for each row")
            settings[name] = values
        return settings
