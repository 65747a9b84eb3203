"""Turns the rows that a step will compute into the flat arrays of a plan."""

from __future__ import annotations

from array import array
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


def next_row(request: Request, num_tokens: int) -> Row:
    """The row of the next `num_tokens` tokens that the request has to compute."""
    end = request.planned + num_tokens
    return Row(request, request.planned, end, end == request.known + request.promised and request.max_new_tokens > 0)


class Batch:
    """What one step computes: one more token for each of `decoding`, in that order, and behind them `rows`.

    Nearly every row of a busy server belongs to a request whose status is DECODING, computes the last token there is
    and samples the next.  That is all that is to be said of such a row, so nothing is made for it.
    """

    __slots__ = ("decode_rows", "decoding", "prefill_tokens", "rows")

    def __init__(self, decoding: list[Request], rows: list[Row]) -> None:
        self.decoding = decoding
        self.rows = rows
        # Rows of one token, and the tokens of the others.
        self.decode_rows = len(decoding)
        self.prefill_tokens = 0
        for row in rows:
            self._count(row)

    def add(self, row: Row) -> None:
        """One more row."""
        self.rows.append(row)
        self._count(row)

    def _count(self, row: Row) -> None:
        if row.end - row.start == 1:
            self.decode_rows += 1
        else:
            self.prefill_tokens += row.end - row.start

    def __len__(self) -> int:
        return len(self.decoding) + len(self.rows)

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return self.decode_rows + self.prefill_tokens

    def launched(self) -> None:
        """The step is on its way: its tokens are planned, and what it samples is promised."""
        for request in self.decoding:
            request.planned += 1
            request.promised += 1
        for row in self.rows:
            row.request.planned = row.end
            row.request.promised += row.samples


class Planner:
    """Makes one plan after another.  Where the same requests decode on, most of a plan is that of the one before."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._decoding: list[Request] = []
        self._last: Plan | None = None

    def plan(self, step: int, batch: Batch, copies: list[Copy], opened: list[SlotOpen], closed: list[int]) -> Plan:
        """The plan of a step; its arrays are copies, so that later changes of the requests cannot reach it.

        A list of requests that comes again says that each of them has one token more than in the step before.
        """
        if self._last is not None and batch.decoding is self._decoding and not batch.rows:
            plan = next_plan(step, self._last, self._decoding)
        else:
            plan = build_plan(step, self._page_size, batch, copies, opened, closed)
        self._last, self._decoding = plan, batch.decoding
        return plan


def next_plan(step: int, last: Plan, decoding: list[Request]) -> Plan:
    """The plan behind `last` when the same requests decode and there is nothing else to do."""
    one = np.int32(1)
    positions = last.positions + one
    kv_indptr, kv_indices = last.kv_indptr, last.kv_indices
    last_page_len: Int32Array = last.kv_last_page_len + one
    if last_page_len.max() <= last.page_size:
        # Nobody begins a page.
        out_slots: Int32Array = last.out_slots + one
    else:
        page_size = np.int32(last.page_size)
        rows = positions % page_size
        last_page_len = rows + one
        kv_indptr, kv_indices = _tables(decoding, positions // page_size + one)
        out_slots = kv_indices[kv_indptr[1:] - 1] * page_size + rows
    if decoding[0].promised:
        token_ids = ~last.slots
    else:
        token_ids = np.array([request.tokens[-1] for request in decoding], dtype=np.int32)
    return Plan(
        step=step,
        page_size=last.page_size,
        slots=last.slots,
        token_ids=token_ids,
        positions=positions,
        out_slots=out_slots,
        qo_indptr=last.qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=last_page_len,
        samples=last.samples,
        copies=last.copies[:0],
        prompt_logprobs=last.prompt_logprobs,
        prompt_next=last.prompt_next,
    )


def _tables(requests: list[Request], num_pages: Int32Array) -> tuple[Int32Array, Int32Array]:
    """`kv_indptr` and `kv_indices` of the first so many pages of each."""
    firsts = [request.table.buffer[:count] for request, count in zip(requests, num_pages.tolist(), strict=True)]
    return _indptr(num_pages), np.concatenate(firsts)


def build_plan(
    step: int, page_size: int, batch: Batch, copies: list[Copy], opened: list[SlotOpen], closed: list[int]
) -> Plan:
    """Any plan.

    Whatever can be computed for all rows at once is: with hundreds of rows, what is done for each of them is what a
    plan costs.
    """
    decoding, rows = batch.decoding, batch.rows
    requests = decoding + [row.request for row in rows]
    starts = np.array([r.planned for r in decoding] + [row.start for row in rows], dtype=np.int32)
    ends = starts + np.int32(1)
    ends[len(decoding) :] = [row.end for row in rows]
    last_pages: Int32Array = (ends - np.int32(1)) // np.int32(page_size)
    kv_indptr, kv_indices = _tables(requests, last_pages + np.int32(1))
    slots = np.array([request.slot for request in requests], dtype=np.int32)
    last_page_len: Int32Array = ends - last_pages * np.int32(page_size)
    out_slots: Int32Array
    if batch.num_tokens == len(requests):
        qo_indptr, positions = np.arange(len(requests) + 1, dtype=np.int32), starts
        out_slots = kv_indices[kv_indptr[1:] - 1] * np.int32(page_size) + (last_page_len - np.int32(1))
    else:
        qo_indptr = _indptr(ends - starts)
        row_of = np.repeat(np.arange(len(requests)), ends - starts)
        positions = np.arange(batch.num_tokens, dtype=np.int32) - (qo_indptr[:-1] - starts)[row_of]
        pages = kv_indices[kv_indptr[row_of] + positions // page_size]
        out_slots = pages * np.int32(page_size) + positions % page_size
    samples = np.ones(len(requests), dtype=np.bool_)
    samples[len(decoding) :] = [row.samples for row in rows]
    prompt_logprobs, prompt_next = _prompt_logprobs(len(decoding), rows)
    return Plan(
        step=step,
        page_size=page_size,
        slots=slots,
        token_ids=_token_ids(batch, slots),
        positions=positions,
        out_slots=out_slots,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=last_page_len,
        samples=samples,
        copies=np.array(copies, dtype=np.int32).reshape(-1, 3),
        prompt_logprobs=prompt_logprobs,
        prompt_next=prompt_next,
        opened=tuple(opened),
        closed=tuple(closed),
    )


def _indptr(counts: Int32Array) -> Int32Array:
    """Where each row begins, and where the last ends."""
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.add.accumulate(counts, out=indptr[1:])
    return indptr


def _promise(request: Request) -> int:
    """What stands for a token that a step in flight samples: the executor knows it by its slot."""
    assert request.slot is not None
    return -(request.slot + 1)


def _token_ids(batch: Batch, slots: Int32Array) -> Int32Array:
    if not batch.rows and 0 not in [request.promised for request in batch.decoding]:
        # The promise of every row, -(slot + 1), in one go.
        return ~slots
    ids = array("i", [_promise(r) if r.promised else r.tokens[-1] for r in batch.decoding])
    for row in batch.rows:
        tokens = row.request.tokens
        ids += tokens[row.start : row.end]
        if row.end > len(tokens):
            ids.append(_promise(row.request))
    return np.frombuffer(ids, dtype=np.int32)


def _prompt_logprobs(decoding: int, rows: list[Row]) -> tuple[Int32Array, Int32Array]:
    """`prompt_logprobs` and `prompt_next` of all rows; those that decode have left the prompt behind."""
    first, following = np.full((2, decoding + len(rows)), -1, dtype=np.int32)
    for index, row in enumerate(rows, decoding):
        if row.request.message.prompt_logprobs_from is not None:
            first[index], following[index] = _prompt_logprob_range(row)
    return first, following


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
