"""Drives a model as the scheduler does: page tables, slots and flat arrays, for sequences of the test's choosing."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from srt.model.config import read_model_config
from srt.model.interface import ForwardBatch, LanguageModel
from srt.model.kv_pool import TorchKVPool
from srt.model.llama import TorchModel
from srt.model.weights import load_weights


def load_torch_model(
    folder: Path,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
) -> TorchModel:
    """The torch backend on a folder's weights, with a pool full of NaN, so that a read of stale KV shows."""
    config = read_model_config(folder)
    pool = TorchKVPool(config, dtype, num_pages, page_size, kv_dtype)
    for tensor in pool.scales or (pool.k, pool.v):
        tensor.fill_(float("nan"))
    return TorchModel(config, load_weights(folder, config, dtype), pool)


@dataclass
class Sequence:
    """A sequence of known tokens whose first `computed` have their KV in `pages`."""

    ids: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass
class PagedDriver:
    """Hands out pages in a given order and runs steps over several sequences."""

    model: LanguageModel
    page_size: int
    free: list[int]

    @staticmethod
    def with_pages(model: LanguageModel, order: str, seed: int = 0) -> PagedDriver:
        """`order`: ascending, or shuffled."""
        pages = list(range(model.kv.num_pages))
        if order == "shuffled":
            random.Random(seed).shuffle(pages)
        return PagedDriver(model, model.kv.page_size, pages)

    def fork(self, source: Sequence, length: int, ids: list[int]) -> Sequence:
        """A sequence that shares the first `length` tokens of `source`, the last page by a copy of its rows."""
        whole, rows = divmod(length, self.page_size)
        pages = source.pages[:whole]
        if rows:
            pages.append(self.free.pop(0))
            self.model.kv.copy_rows(np.array([[source.pages[whole], pages[-1], rows]], np.int32))
        return Sequence(source.ids[:length] + ids, pages, length)

    def step(self, work: list[tuple[Sequence, int]]) -> list[torch.Tensor]:
        """Compute the next `count` tokens of each sequence in one step: logits [count, vocab] of each."""
        batch = self.batch(work)
        logits = self.model.forward(batch, np.arange(len(batch.token_ids), dtype=np.int32))
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([count for _, count in work]))

    def batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        """The arrays of the step, with pages allocated for the new tokens."""
        size = self.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        last: list[int] = []
        for sequence, count in work:
            end = sequence.computed + count
            while len(sequence.pages) * size < end:
                sequence.pages.append(self.free.pop(0))
            new = range(sequence.computed, end)
            tokens += sequence.ids[sequence.computed : end]
            positions += new
            slots += [sequence.pages[p // size] * size + p % size for p in new]
            tables.append(sequence.pages[: (end - 1) // size + 1])
            last.append((end - 1) % size + 1)
        return ForwardBatch(
            page_size=size,
            token_ids=np.array(tokens, np.int32),
            positions=np.array(positions, np.int32),
            out_slots=np.array(slots, np.int32),
            qo_indptr=np.cumsum([0] + [count for _, count in work]).astype(np.int32),
            kv_indptr=np.cumsum([0] + [len(table) for table in tables]).astype(np.int32),
            kv_indices=np.array([page for table in tables for page in table], np.int32),
            kv_last_page_len=np.array(last, np.int32),
        )
