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
    token_ids, positions, out_slots, kv_indices = [], [], [], []
    qo_indptr, kv_indptr, last_page_len = [0], [0], []
    logprob_from, logprob_next = [], []
    for row in rows:
        request, start, end = row.request, row.start, row.end
        pages = request.table.pages
        position = np.arange(start, end, dtype=np.int32)
        token_ids.append(_row_ids(row))
        positions.append(position)
        out_slots.append(pages[position // page_size] * page_size + position % page_size)
        num_pages = -(-end // page_size)
        kv_indices.append(pages[:num_pages])
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
        token_ids=np.concatenate(token_ids),
        positions=np.concatenate(positions),
        out_slots=np.concatenate(out_slots),
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
