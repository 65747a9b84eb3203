"""Paged attention over plan arrays, in torch on the CPU: mixed rows, no padding, KV read where it lies.

A step's rows become a few kernel calls, decided once per step and used by every layer:

    page tables           row 0:  [ 4 5 6 7 | 20 21 ]          runs of neighbouring pages are views of the pool
                          row 1:  [ 4 5 6 7 | 9 ]
    calls                 tokens of rows 0 and 1 x pages 4..7  a run that several rows share is read once for all
                          tokens of row 0        x pages 20..21
                          tokens of row 1        x page 9
    a prompt chunk        its tokens x its own fresh K and V   causal, needs no pages at all

Each call returns the attention over its keys alone and the log of its softmax sum; the calls that concern a
token are then weighed against each other in float32 (the merge of FlashAttention / "cascade" inference, Dao et
al. 2022).  Only pages that lie scattered in short runs are gathered into a copy, and the memory of that copy
is bounded by the row that needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from srt.model.config import ModelConfig
from srt.model.interface import ForwardBatch
from srt.model.kv_pool import TorchKVPool

IndexArray = npt.NDArray[np.int64]

# Below this many tokens a run costs more as a call of its own than as part of a gathered copy.
MIN_RUN_TOKENS = 32
# At most this many runs of a row are calls of their own; the shorter ones are gathered.
MAX_RUNS_PER_ROW = 8
# Queries of a windowed prompt chunk go in blocks of this size, each against the keys that it can see.
WINDOW_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one row whose KV lies in neighbouring slots [start, stop)."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call.

    `queries`: the batch's tokens that attend, as a slice or int64 indices.  `keys`: the pool slots attended to, as
    a slice or indices, or None for the queries' own fresh K and V under a causal mask.  `bias`: [queries, keys] in
    the model's dtype, 0 where attention is allowed and -inf elsewhere; None when every query sees every key.
    """

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor | None
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Merge:
    """How the results of all calls, one below the other ([parts]), become those of the tokens.

    first: int64 [T], a part of each token.   tokens: int64 [M], those with more than one part.
    parts: int64 [M, S], the parts of these tokens, padded.   padding: bool [M, S].
    """

    first: torch.Tensor
    tokens: torch.Tensor
    parts: torch.Tensor
    padding: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What one step's attention does in every layer of one window size.  `merge` is None when the results of the
    calls, in order, are those of the tokens."""

    calls: tuple[Call, ...]
    merge: Merge | None


def plan_attention(batch: ForwardBatch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """Decide the calls for a step.  `window`: the number of tokens that a token sees, itself included; None: all.

    `dtype` is that of the queries.  Raises ValueError when a row's pages do not end with its last token.

    The KV of the batch's tokens is in the pool by the time the calls run.
    """
    rows = [_Row.of(batch, row, window, dtype) for row in range(len(batch.qo_indptr) - 1)]
    shared, private = _share([row.runs for row in rows])
    calls: list[Call] = []
    for run, owners in shared.items():
        queries = np.concatenate([np.arange(rows[i].first, rows[i].stop) for i in owners])
        calls.append(Call(torch.from_numpy(queries), slice(run.start, run.stop)))
    for row, runs in zip(rows, private, strict=True):
        calls.extend(Call(slice(row.first, row.stop), slice(run.start, run.stop)) for run in runs)
        calls.extend(row.other_calls)
    return AttentionPlan(tuple(calls), _plan_merge(calls, len(batch.token_ids)))


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: its tokens [first, stop) in the batch, the runs that all of them attend to, and its other calls."""

    first: int
    stop: int
    runs: tuple[Run, ...]
    other_calls: tuple[Call, ...]

    @staticmethod
    def of(batch: ForwardBatch, row: int, window: int | None, dtype: torch.dtype) -> _Row:
        first, stop = int(batch.qo_indptr[row]), int(batch.qo_indptr[row + 1])
        pages = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]].astype(np.int64)
        begin = int(batch.positions[first])
        end = begin + stop - first
        length = (len(pages) - 1) * batch.page_size + int(batch.kv_last_page_len[row])
        if length != end:
            raise ValueError(f"row {row}: pages hold {length} tokens, its last token is number {end}")
        table = _PageTable(pages, batch.page_size)
        if stop - first == 1:
            low = 0 if window is None else max(0, end - window)
            return _Row(first, stop, *table.attend_all(slice(first, stop), low, end))
        if window is not None and end > window:
            return _Row(first, stop, (), tuple(_window_calls(table, first, begin, end, window, dtype)))
        runs, calls = table.attend_all(slice(first, stop), 0, begin)
        return _Row(first, stop, runs, (*calls, Call(slice(first, stop), None)))


class _PageTable:
    """Where the tokens of one row lie in the pool."""

    def __init__(self, pages: IndexArray, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size

    def slots(self, low: int, high: int) -> IndexArray:
        """The slot of every position in [low, high)."""
        positions = np.arange(low, high)
        return self.pages[positions // self.page_size] * self.page_size + positions % self.page_size

    def runs(self, low: int, high: int) -> tuple[IndexArray, IndexArray]:
        """Positions [low, high) as maximal runs of neighbouring slots: their first positions and their ends."""
        size = self.page_size
        first_page, last_page = low // size, (high - 1) // size + 1
        breaks = np.flatnonzero(np.diff(self.pages[first_page:last_page]) != 1) + first_page + 1
        borders = breaks * size
        return np.concatenate([[low], borders]), np.concatenate([borders, [high]])

    def attend_all(self, queries: slice, low: int, high: int) -> tuple[tuple[Run, ...], tuple[Call, ...]]:
        """Attention without a mask over positions [low, high): the long runs, and a call that gathers the short."""
        if high <= low:
            return (), ()
        starts, stops = self.runs(low, high)
        lengths = stops - starts
        longest = np.argsort(-lengths, kind="stable")[:MAX_RUNS_PER_ROW]
        long = np.zeros(len(starts), dtype=bool)
        long[longest] = lengths[longest] >= MIN_RUN_TOKENS
        if np.count_nonzero(~long) == 1:
            long[:] = True
        first_slots = self.pages[starts[long] // self.page_size] * self.page_size + starts[long] % self.page_size
        runs = tuple(
            Run(start, start + n) for start, n in zip(first_slots.tolist(), lengths[long].tolist(), strict=True)
        )
        if long.all():
            return runs, ()
        is_short = np.repeat(~long, lengths)
        return runs, (Call(queries, torch.from_numpy(self.slots(low, high)[is_short])),)

    def keys(self, low: int, high: int) -> slice | torch.Tensor:
        """Positions [low, high) as a view where they lie in one run, else as slots to gather."""
        starts, _ = self.runs(low, high)
        slots = self.slots(low, high)
        return slice(int(slots[0]), int(slots[-1]) + 1) if len(starts) == 1 else torch.from_numpy(slots)


def _window_calls(table: _PageTable, first: int, begin: int, end: int, window: int, dtype: torch.dtype) -> list[Call]:
    """A prompt chunk at positions [begin, end) some of whose keys are out of sight: blocks of queries with a mask."""
    calls = []
    for block in range(begin, end, WINDOW_BLOCK):
        block_end = min(block + WINDOW_BLOCK, end)
        low = max(0, block - window + 1)
        queries, keys = torch.arange(block, block_end)[:, None], torch.arange(low, block_end)[None, :]
        hidden = (keys > queries) | (keys <= queries - window)
        bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        tokens = slice(first + block - begin, first + block_end - begin)
        calls.append(Call(tokens, table.keys(low, block_end), bias))
    return calls


def _share(rows: list[tuple[Run, ...]]) -> tuple[dict[Run, list[int]], list[list[Run]]]:
    """Find the runs that several rows attend to: (shared run -> its rows, what remains to each row alone).

    A longer run is cut where another row's run begins or ends, and joined again where nobody shares the piece.
    """
    borders = np.unique(np.array([border for runs in rows for run in runs for border in (run.start, run.stop)]))
    owners: dict[Run, list[int]] = {}
    pieces: list[list[Run]] = []
    for row, runs in enumerate(rows):
        pieces.append([piece for run in runs for piece in _cut(run, borders)])
        for piece in pieces[-1]:
            owners.setdefault(piece, []).append(row)
    shared = {
        run: sharing for run, sharing in owners.items() if len(sharing) > 1 and run.stop - run.start >= MIN_RUN_TOKENS
    }
    return shared, [_join([piece for piece in mine if piece not in shared]) for mine in pieces]


def _cut(run: Run, borders: IndexArray) -> list[Run]:
    low, high = np.searchsorted(borders, (run.start, run.stop))
    cuts = borders[low : high + 1].tolist()
    return [Run(start, stop) for start, stop in pairwise(cuts)]


def _join(runs: list[Run]) -> list[Run]:
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = Run(joined[-1].start, run.stop)
        else:
            joined.append(run)
    return joined


def _plan_merge(calls: list[Call], num_tokens: int) -> Merge | None:
    all_tokens = np.arange(num_tokens)
    queries = [all_tokens[call.queries] if isinstance(call.queries, slice) else call.queries.numpy() for call in calls]
    token_of_part = np.concatenate(queries)
    if np.array_equal(token_of_part, all_tokens):
        return None
    by_token = np.argsort(token_of_part, kind="stable")
    counts = np.bincount(token_of_part, minlength=num_tokens)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    tokens = np.flatnonzero(counts > 1)
    columns = np.arange(int(counts.max()))
    padding = columns[None, :] >= counts[tokens][:, None]
    parts = by_token[np.where(padding, starts[tokens][:, None], starts[tokens][:, None] + columns)]
    return Merge(*(torch.from_numpy(array) for array in (by_token[starts], tokens, parts, padding)))


class TorchAttention:
    """Attention of one model on the pool that holds its KV."""

    def __init__(self, config: ModelConfig, pool: TorchKVPool) -> None:
        self._config = config
        self._pool = pool
        self._groups = config.num_heads // config.num_kv_heads
        self._scale = config.attention_scale
        self._cap = config.attention_softcap

    def plan(self, batch: ForwardBatch) -> dict[int | None, AttentionPlan]:
        """The step's plan for every window size that a layer of the model has."""
        windows, dtype = dict.fromkeys(self._config.sliding_windows), self._pool.dtype
        return {window: plan_attention(batch, window, dtype) for window in windows}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, plan: AttentionPlan
    ) -> torch.Tensor:
        """Attend in one layer.

        `q` [T, heads, head_dim]; `k`, `v` [T, kv_heads, head_dim]: those of the batch's tokens, which are in the
        pool already, as they are there.  Returns [T, heads * head_dim] in the dtype of `q`; sums and softmax are in
        float32.
        """
        grouped = q.view(len(q), self._config.num_kv_heads, self._groups, self._config.head_dim)
        results = []
        for call in plan.calls:
            queries = grouped[call.queries]
            if call.keys is None:
                results.append(self._masked(queries, k[call.queries], v[call.queries], None))
                continue
            pool_k, pool_v = self._pool.read(layer, call.keys)
            if call.bias is None:
                results.append(self._unmasked(queries, pool_k, pool_v))
            else:
                results.append(self._masked(queries, pool_k, pool_v, call.bias))
        merged = results[0][0] if len(results) == 1 else torch.cat([out for out, _ in results])
        if plan.merge is not None:
            merged = _merge(merged, torch.cat([log_sum for _, log_sum in results]), plan.merge)
        return merged.flatten(1)

    def _unmasked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every query sees every key: the queries of a KV head stand in one matrix, so that K and V are read once."""
        n, kv_heads, groups, head_dim = q.shape
        folded = q.transpose(0, 1).reshape(1, kv_heads, n * groups, head_dim)
        out, log_sum = self._kernel(folded, k.transpose(0, 1)[None], v.transpose(0, 1)[None], False, None)
        return (
            out.reshape(kv_heads, n, groups, head_dim).transpose(0, 1),
            log_sum.reshape(kv_heads, n, groups).transpose(0, 1),
        )

    def _masked(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention under `bias`, or causal where it is None.  A KV head serves its queries by a stride of zero."""
        spread = (-1, self._groups, -1, -1)
        out, log_sum = self._kernel(
            q.permute(1, 2, 0, 3),
            k.transpose(0, 1)[:, None].expand(spread),
            v.transpose(0, 1)[:, None].expand(spread),
            bias is None,
            bias,
        )
        return out.permute(2, 0, 1, 3), log_sum.permute(2, 0, 1)

    def _kernel(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cap is not None:
            return _capped_kernel(q, k, v, causal, bias, self._scale, self._cap)
        return _fused_kernel(q, k, v, causal, bias, self._scale)


def _fused_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's fused CPU attention, which takes strided views and also returns the log of the softmax sums.

    q [batch, heads, n, head_dim], k and v [batch, heads, keys, head_dim], bias [n, keys].  Returns the same shape
    as q, and float32 [batch, heads, n].  The public function computes the same but keeps the second result to
    itself.
    """
    out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=scale
    )
    return out, log_sum


def _capped_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, bias: torch.Tensor | None, scale: float, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_fused_kernel`, with a soft cap on the scores, which the fused one does not have: all scores at once."""
    scores = torch.tanh(q.float() @ k.float().transpose(-1, -2) * (scale / cap)) * cap
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    if bias is not None:
        scores += bias
    return (scores.softmax(dim=-1) @ v.float()).to(q.dtype), scores.logsumexp(dim=-1)


def _merge(parts: torch.Tensor, log_sums: torch.Tensor, merge: Merge) -> torch.Tensor:
    """`parts` [P, kv_heads, groups, head_dim], `log_sums` float32 [P, kv_heads, groups] -> the same shape for T."""
    merged = parts[merge.first]
    if len(merge.tokens):
        weights = log_sums[merge.parts].masked_fill_(merge.padding[:, :, None, None], float("-inf")).softmax(dim=1)
        merged[merge.tokens] = (parts[merge.parts].float() * weights[..., None]).sum(dim=1).to(parts.dtype)
    return merged
