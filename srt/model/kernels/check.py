"""Refuses the arrays of a step that would make the kernels read or write where they must not.

The kernels trust every index.  What is checked here: types, lengths, offsets that grow, ids and slots in range, and
that positions and slots are those that the page tables give.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from srt.model.interface import ForwardBatch
from srt.plan import Int32Array


def check_batch(batch: ForwardBatch, *, vocab_size: int, num_pages: int, page_size: int) -> None:
    """Raises ValueError, which names the array, unless the kernels can run this step."""
    if batch.page_size != page_size:
        raise ValueError(f"page_size is {batch.page_size}, the pool's is {page_size}")
    for name in ("token_ids", "positions", "out_slots", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"):
        _check_array(name, getattr(batch, name))
    tokens, rows = len(batch.token_ids), len(batch.kv_last_page_len)
    if rows == 0:
        raise ValueError("kv_last_page_len is empty: a step has at least one row")
    _check_length("positions", batch.positions, tokens)
    _check_length("out_slots", batch.out_slots, tokens)
    _check_offsets("qo_indptr", batch.qo_indptr, rows, tokens)
    _check_offsets("kv_indptr", batch.kv_indptr, rows, len(batch.kv_indices))
    _check_range("token_ids", batch.token_ids, 0, vocab_size)
    _check_range("kv_indices", batch.kv_indices, 0, num_pages)
    _check_range("kv_last_page_len", batch.kv_last_page_len, 1, page_size + 1)
    _check_positions_and_slots(batch)


def check_tokens(name: str, tokens: Int32Array, count: int) -> None:
    """Raises ValueError unless `tokens` are indices into `count` tokens."""
    _check_array(name, tokens)
    _check_range(name, tokens, 0, count)


def check_logits(logits: torch.Tensor, rows: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless `logits` is contiguous float32 [n, vocab_size] and `rows` are rows of it."""
    if logits.dtype != torch.float32 or logits.shape[1:] != (vocab_size,) or not logits.is_contiguous():
        raise ValueError(
            f"logits is {logits.dtype} {list(logits.shape)}, expected contiguous float32 [n, {vocab_size}]"
        )
    if rows and not 0 <= min(rows) <= max(rows) < len(logits):
        raise ValueError(f"rows has an entry outside 0 to {len(logits) - 1}")


def check_copies(copies: Int32Array, *, num_pages: int, page_size: int) -> None:
    """Raises ValueError unless `copies` is int32 [C,3] of (source page, destination page, rows) in range."""
    if copies.ndim != 2 or copies.shape[1] != 3 or copies.dtype != np.int32:
        raise ValueError(f"copies is {copies.dtype} {list(copies.shape)}, expected int32 [C, 3]")
    _check_range("copies", copies[:, :2], 0, num_pages)
    _check_range("copies (rows)", copies[:, 2], 0, page_size + 1)


def _check_array(name: str, array: npt.NDArray[np.generic]) -> None:
    if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected a contiguous int32 vector")


def _check_length(name: str, array: Int32Array, length: int) -> None:
    if len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries, expected {length}")


def _check_offsets(name: str, array: Int32Array, rows: int, end: int) -> None:
    _check_length(name, array, rows + 1)
    if array[0] != 0 or array[-1] != end:
        raise ValueError(f"{name} runs from {array[0]} to {array[-1]}, expected 0 to {end}")
    if (array[1:] <= array[:-1]).any():
        raise ValueError(f"{name} does not grow from row to row")


def _check_range(name: str, array: Int32Array, low: int, high: int) -> None:
    if array.size and (array.min() < low or array.max() >= high):
        raise ValueError(f"{name} has an entry outside {low} to {high - 1}")


def _check_positions_and_slots(batch: ForwardBatch) -> None:
    """The tokens of a row are the last ones of its page table, and go where the table says."""
    size = batch.page_size
    counts = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    starts = batch.kv_indptr[:-1]
    lengths = (batch.kv_indptr[1:].astype(np.int64) - starts - 1) * size + batch.kv_last_page_len
    if (counts > lengths).any():
        raise ValueError("qo_indptr gives a row more tokens than its page table holds")
    first = lengths - batch.qo_indptr[1:]
    expected = np.arange(len(batch.positions)) + np.repeat(first, counts)
    if (batch.positions != expected).any():
        raise ValueError("positions are not the last ones of the rows' page tables, one after another")
    page, offset = np.divmod(expected, size)
    slots = batch.kv_indices[page + np.repeat(starts, counts)].astype(np.int64) * size + offset
    if (batch.out_slots != slots).any():
        raise ValueError("out_slots are not the slots that the rows' page tables give to their positions")
    slots.sort()
    if (slots[1:] == slots[:-1]).any():
        raise ValueError("out_slots names a slot twice")
