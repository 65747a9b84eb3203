"""Turns the rows that a step will compute into the flat arrays of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler.holdings import Copy
from scheduler.request import Request
from srt.plan import Int32Array, Plan, SlotOpen


@dataclass(slots=True)
class Row:
    """Tokens `[start, end)` of a request in one step.  `samples`: the row ends at the last token there is."""

    request: Request
    start: int
    end: int
    samples: bool


def build_plan(
    step: int,
    page_size: int,
    rows: list[Row],
    copies: list[Copy],
    opened: list[SlotOpen],
    closed: list[int],
) -> Plan:
    """The plan of a step; its arrays are copies, so that later changes of the requests cannot reach it."""
    # One number for a row that computes one token, an array for a longer one: np.concatenate wants arrays, and making
    # one for each decode row would cost more than everything else here.
    token_ids, positions, out_slots = _Column(), _Column(), _Column()
    kv_indices = []
    qo_indptr, kv_indptr, last_page_len = [0], [0], []
    logprob_from, logprob_next = [], []
    for row in rows:
        request, start, end = row.request, row.start, row.end
        num_pages = -(-end // page_size)
        pages = request.table.pages[:num_pages]
        if end - start == 1:
            assert request.slot is not None
            token_ids.add(request.tokens[start] if end <= request.known else -(request.slot + 1))
            positions.add(start)
            out_slots.add(int(pages[-1]) * page_size + start % page_size)
        else:
            position = np.arange(start, end, dtype=np.int32)
            token_ids.add_array(_row_ids(row))
            positions.add_array(position)
            out_slots.add_array(pages[position // page_size] * page_size + position % page_size)
        kv_indices.append(pages)
        qo_indptr.append(qo_indptr[-1] + end - start)
        kv_indptr.append(kv_indptr[-1] + num_pages)
        last_page_len.append((end - 1) % page_size + 1)
        first, following = _prompt_logprob_range(row)
        logprob_from.append(first)
        logprob_next.append(following)
    return Plan(
        step=step,
        page_size=page_size,
        slots=np.array([row.request.slot for row in rows], dtype=np.int32),
        token_ids=token_ids.array(),
        positions=positions.array(),
        out_slots=out_slots.array(),
        qo_indptr=np.array(qo_indptr, dtype=np.int32),
        kv_indptr=np.array(kv_indptr, dtype=np.int32),
        kv_indices=np.concatenate(kv_indices),
        kv_last_page_len=np.array(last_page_len, dtype=np.int32),
        samples=np.array([row.samples for row in rows], dtype=np.bool_),
        copies=np.array(copies, dtype=np.int32).reshape(-1, 3),
        prompt_logprobs=np.array(logprob_from, dtype=np.int32),
        prompt_next=np.array(logprob_next, dtype=np.int32),
        opened=tuple(opened),
        closed=tuple(closed),
    )


class _Column:
    """An int32 array in the making, from numbers and arrays in order."""

    __slots__ = ("_arrays", "_numbers")

    def __init__(self) -> None:
        self._arrays: list[Int32Array] = []
        self._numbers: list[int] = []

    def add(self, number: int) -> None:
        self._numbers.append(number)

    def add_array(self, array: Int32Array) -> None:
        self._flush()
        self._arrays.append(array)

    def array(self) -> Int32Array:
        self._flush()
        return np.concatenate(self._arrays)

    def _flush(self) -> None:
        if self._numbers:
            self._arrays.append(np.array(self._numbers, dtype=np.int32))
            self._numbers = []


def _row_ids(row: Row) -> Int32Array:
    request = row.request
    ids = np.array(request.tokens[row.start : row.end], dtype=np.int32)
    if row.end > request.known:
        # The last token of the row was sampled by a step in flight: the executor knows it by its slot.
        assert request.slot is not None
        ids = np.append(ids, np.int32(-(request.slot + 1)))
    return ids


def _prompt_logprob_range(row: Row) -> tuple[int, int]:
    """`prompt_logprobs` and `prompt_next` of a row, see `srt.plan.Plan`."""
    request = row.request
    start = request.message.prompt_logprobs_from
    if start is None:
        return -1, -1
    # The logits at position q speak of token q + 1.
    first = max(start - 1, 0)
    if row.start >= request.prompt_tokens - 1 or row.end <= first:
        return -1, -1
    following = request.tokens[row.end] if row.end < request.prompt_tokens else -1
    return first, following
