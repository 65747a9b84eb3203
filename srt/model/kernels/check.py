"""Refuses the arrays of a step that would make the kernels read or write where they must not.

The kernels trust every index.  What is checked here: types, lengths, offsets that grow, ids and slots in range, that
positions and slots are those that the page tables give, and that no row reads what another one writes.  A message
names every array that has a say in what is wrong, since any of them may be the broken one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from srt.model.interface import ForwardBatch
from srt.plan import Int32Array

# In the order of `struct StepArrays` of attention_plan.h.
STEP_ARRAYS = ("token_ids", "positions", "out_slots", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
# Of ndarray.flags.num: C_CONTIGUOUS and ALIGNED, asked for at once because it is asked for in every step.
READABLE = 0x1 | 0x100


def check_batch(batch: ForwardBatch, *, vocab_size: int, num_pages: int, page_size: int) -> None:
    """Raises ValueError, which names the array, unless the kernels can run this step."""
    if batch.page_size != page_size:
        raise ValueError(f"page_size is {batch.page_size}, the pool's is {page_size}")
    for name in STEP_ARRAYS:
        _check_array(name, getattr(batch, name))
    tokens, rows = len(batch.token_ids), len(batch.kv_last_page_len)
    if rows == 0:
        raise ValueError("kv_last_page_len is empty: a step has at least one row")
    for name in ("positions", "out_slots"):
        if len(getattr(batch, name)) != tokens:
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries, token_ids has {tokens}")
    _check_offsets("qo_indptr", batch.qo_indptr, rows, "token_ids", tokens)
    _check_offsets("kv_indptr", batch.kv_indptr, rows, "kv_indices", len(batch.kv_indices))
    _check_indices("token_ids", batch.token_ids, vocab_size)
    _check_indices("kv_indices", batch.kv_indices, num_pages)
    if batch.kv_last_page_len.min() < 1 or batch.kv_last_page_len.max() > page_size:
        raise ValueError(f"kv_last_page_len has an entry outside 1 to {page_size}")
    _check_tables(batch, num_pages)


def check_tokens(name: str, tokens: Int32Array, count: int) -> None:
    """Raises ValueError unless `tokens` are indices into `count` tokens; any order, and one twice, is right."""
    _check_array(name, tokens)
    _check_indices(name, tokens, count)


def check_logits(name: str, logits: torch.Tensor, rows: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError unless `logits` is contiguous float32 [n, vocab_size] and `rows` are rows of it."""
    if logits.dtype != torch.float32 or logits.shape[1:] != (vocab_size,) or not logits.is_contiguous():
        raise ValueError(
            f"{name} is {logits.dtype} {list(logits.shape)}, expected contiguous float32 [n, {vocab_size}]"
        )
    if rows and not 0 <= min(rows) <= max(rows) < len(logits):
        raise ValueError(f"rows has an entry outside 0 to {len(logits) - 1}")


def check_drawable(logits: torch.Tensor, rows: Sequence[int]) -> None:
    """Raises ValueError unless the greatest logit of each of the `rows` is finite, and none is not a number."""
    if rows and not logits.amax(dim=-1)[list(rows)].isfinite().all():
        raise ValueError("logits has a row to draw from that is not finite, or all -inf")


def check_draws(settings: npt.NDArray[np.void]) -> None:
    """Raises ValueError unless every row of `settings` (DRAW_ROW [n]) can be drawn by.

    Outside these bounds chances are not numbers, or beyond 1, and lead the kernel out of its tables.
    """
    top_k, top_p, min_p = settings["top_k"], settings["top_p"], settings["min_p"]
    temperature, uniform = settings["temperature"], settings["uniform"]
    # What is not a number is inside of nothing.
    for name, inside, expected in (
        ("top_k", top_k >= 1, "at least 1"),
        ("top_p", (top_p > 0) & (top_p <= 1), "above 0 and at most 1"),
        ("min_p", (min_p >= 0) & (min_p <= 1), "0 to 1"),
        ("temperature", (temperature > 0) & (temperature < np.inf), "above 0 and finite"),
        ("uniform", (uniform > 0) & (uniform < 1), "above 0 and below 1"),
    ):
        if not inside.all():
            raise ValueError(f"{name} has an entry {settings[name][~inside][0]}, expected {expected}")


def check_copies(copies: Int32Array, *, num_pages: int, page_size: int) -> None:
    """Raises ValueError unless `copies` is int32 [C,3] of (source page, another page as destination, rows) in range."""
    if not isinstance(copies, np.ndarray):
        raise ValueError(f"copies is a {type(copies).__name__}, expected an array")
    if copies.ndim != 2 or copies.shape[1] != 3 or copies.dtype != np.int32:
        raise ValueError(f"copies is {copies.dtype} {list(copies.shape)}, expected int32 [C, 3]")
    _check_indices("copies", copies[:, :2], num_pages)
    _check_indices("copies (rows)", copies[:, 2], page_size + 1)
    if (copies[:, 0] == copies[:, 1]).any():
        raise ValueError("copies has a page that is to be copied onto itself")


def _check_array(name: str, array: npt.NDArray[np.generic]) -> None:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is a {type(array).__name__}, expected a contiguous int32 vector")
    if array.dtype != np.int32 or array.ndim != 1 or array.flags.num & READABLE != READABLE:
        raise ValueError(f"{name} is {array.dtype} {list(array.shape)}, expected a contiguous int32 vector")


def _check_offsets(name: str, array: Int32Array, rows: int, into: str, end: int) -> None:
    if len(array) != rows + 1:
        raise ValueError(f"{name} has {len(array)} entries, expected one more than kv_last_page_len, which has {rows}")
    if array[0] != 0 or array[-1] != end:
        raise ValueError(f"{name} runs from {array[0]} to {array[-1]}, expected 0 to {end}, the length of {into}")
    if (array[1:] <= array[:-1]).any():
        raise ValueError(f"{name} does not grow from row to row")


def _check_indices(name: str, array: Int32Array, count: int) -> None:
    # As unsigned numbers those below zero are the greatest: one look finds both.
    if array.size and array.view(np.uint32).max() >= count:
        raise ValueError(f"{name} has an entry outside 0 to {count - 1}")


def _check_tables(batch: ForwardBatch, num_pages: int) -> None:
    """The tokens of a row are the last ones of its page table, go where it says, and no other row has these pages."""
    size = batch.page_size
    counts = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    starts = batch.kv_indptr[:-1]
    lengths = (batch.kv_indptr[1:].astype(np.int64) - starts - 1) * size + batch.kv_last_page_len
    if (counts > lengths).any():
        raise ValueError("qo_indptr gives a row more tokens than kv_indptr and kv_last_page_len have room for")
    first = lengths - batch.qo_indptr[1:]
    expected = np.arange(len(batch.positions)) + np.repeat(first, counts)
    if (batch.positions != expected).any():
        raise ValueError(
            "positions are not the last ones that qo_indptr, kv_indptr and kv_last_page_len give to a row, in order"
        )
    place, offset = np.divmod(expected, size)
    pages = batch.kv_indices[place + np.repeat(starts, counts)]
    if (batch.out_slots != pages.astype(np.int64) * size + offset).any():
        raise ValueError("out_slots are not the slots that kv_indices gives to the rows' positions")
    written = np.zeros(num_pages, np.bool_)
    written[pages] = True
    if np.count_nonzero(written.take(batch.kv_indices)) != np.count_nonzero(written):
        raise ValueError("kv_indices has a page more than once that the step writes")
