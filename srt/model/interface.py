"""What the forward worker asks of a model and of a KV pool, whichever backend computes.

Two backends implement it on a CPU: plain torch, and the native kernels where there is a compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from srt.model.config import ModelConfig
from srt.plan import Int32Array


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The arrays of a `srt.plan.Plan` that the layers need, with every token id known (none below zero)."""

    page_size: int
    token_ids: Int32Array
    positions: Int32Array
    out_slots: Int32Array
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array


class KVPool(Protocol):
    """K and V of every page, for all layers.  How a page is laid out inside is the backend's own matter."""

    num_pages: int
    page_size: int
    page_bytes: int
    # See srt.plan.PageMemory, which every pool is too.
    layout: str

    def copy_rows(self, copies: Int32Array) -> None:
        """`copies` int32 [C,3]: (source page, destination page, rows), carried out in order."""
        ...

    def read_page(self, page: int) -> bytes:
        """The exact bytes of a page, all layers, K and V."""
        ...

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_page`.  Raises ValueError when the length is not a page's."""
        ...


class LanguageModel(Protocol):
    """A decoder-only model with its weights and its KV pool."""

    @property
    def config(self) -> ModelConfig:
        """What the model is."""
        ...

    @property
    def kv(self) -> KVPool:
        """Where its KV lives."""
        ...

    def forward(self, batch: ForwardBatch, logit_tokens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """Write the KV of every token of the batch, attend, and return the logits of the tokens asked for.

        `logit_tokens` int32 [L]: indices into the batch's tokens.  Returns float32 [L, vocab]: `out` where it is given.
        """
        ...

    def forward_hidden(self, batch: ForwardBatch, tokens: Int32Array) -> torch.Tensor:
        """The same step, but return the final hidden states (after the last norm) of `tokens`: [L, hidden].

        For logprobs of long prompts, whose logits would not fit in memory at once: `project` takes them in slices.
        """
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [L, vocab], of hidden states [L, hidden] that `forward_hidden` returned."""
        ...
