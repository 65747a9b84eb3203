"""Paged attention in torch: equal to plain attention for any page table, and reading KV where it lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.model.attention import MAX_RUNS_PER_ROW, MIN_RUN_TOKENS, AttentionPlan, TorchAttention, plan_attention
from srt.model.config import ModelConfig, RopeConfig
from srt.model.interface import ForwardBatch
from srt.model.kv_pool import TorchKVPool

NUM_PAGES = 1024
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


def config_with_window(window: int | None) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        vocab_size=16,
        hidden_size=48,
        intermediate_size=16,
        num_layers=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        rope=RopeConfig(10000.0),
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_windows=(window,),
        dtype="float32",
    )


def make_batch(tables: list[list[int]], begins: list[int], ends: list[int], page_size: int) -> ForwardBatch:
    """Rows that compute positions [begin, end) of sequences that lie in the given pages."""
    positions = [np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)]
    tables = [table[: (end - 1) // page_size + 1] for table, end in zip(tables, ends, strict=True)]
    slots = [np.array(t)[p // page_size] * page_size + p % page_size for t, p in zip(tables, positions, strict=True)]
    return ForwardBatch(
        page_size=page_size,
        token_ids=np.zeros(sum(len(p) for p in positions), np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        out_slots=np.concatenate(slots).astype(np.int32),
        qo_indptr=np.cumsum([0] + [len(p) for p in positions]).astype(np.int32),
        kv_indptr=np.cumsum([0] + [len(t) for t in tables]).astype(np.int32),
        kv_indices=np.concatenate(tables).astype(np.int32),
        kv_last_page_len=np.array([(end - 1) % page_size + 1 for end in ends], np.int32),
    )


def plain_attention(q: torch.Tensor, pool: TorchKVPool, batch: ForwardBatch, window: int | None) -> torch.Tensor:
    """One token and one head at a time, in float64."""
    k, v = (tensor.double() for tensor in pool.slots(0))
    size = batch.page_size
    rows = []
    for row in range(len(batch.kv_last_page_len)):
        table = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]].astype(np.int64)
        for token in range(batch.qo_indptr[row], batch.qo_indptr[row + 1]):
            position = int(batch.positions[token])
            seen = np.arange(0 if window is None else max(0, position - window + 1), position + 1)
            slots = torch.from_numpy(table[seen // size] * size + seen % size)
            heads = []
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                weights = (k[slots, kv_head] @ q[token, head].double() / HEAD_DIM**0.5).softmax(dim=0)
                heads.append(weights @ v[slots, kv_head])
            rows.append(torch.cat(heads))
    return torch.stack(rows)


def run(batch: ForwardBatch, window: int | None) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
    """(found, expected, plan) on a pool that is NaN wherever the batch has no business."""
    generator = torch.Generator().manual_seed(5)
    pool = TorchKVPool(config_with_window(window), torch.float32, NUM_PAGES, batch.page_size)
    k, v = pool.slots(0)
    for tensor in (k, v):
        tensor.fill_(float("nan"))
        for row, last in enumerate(batch.kv_last_page_len.tolist()):
            table = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
            for i, page in enumerate(table.tolist()):
                rows = last if i == len(table) - 1 else batch.page_size
                at = slice(page * batch.page_size, page * batch.page_size + rows)
                if tensor[at].isnan().any():
                    tensor[at] = torch.randn(tensor[at].shape, generator=generator)
    q = torch.randn((len(batch.token_ids), HEADS, HEAD_DIM), generator=generator)
    slots = torch.from_numpy(batch.out_slots).long()
    plan = plan_attention(batch, window, torch.float32)
    found = TorchAttention(config_with_window(window), pool).forward(q, k[slots], v[slots], 0, plan)
    return found, plain_attention(q, pool, batch, window), plan


@st.composite
def batches(draw: st.DrawFn) -> ForwardBatch:
    """Rows whose tables begin with pages of an earlier row, followed by pages of their own, in runs of all lengths."""
    page_size = draw(st.sampled_from([1, 3, 16, 32]))
    count = draw(st.integers(1, 5))
    free = list(range(NUM_PAGES))
    tables: list[list[int]] = []
    begins, ends = [], []
    for _ in range(count):
        table: list[int] = []
        shared = 0
        if tables and draw(st.booleans()):
            source = draw(st.integers(0, len(tables) - 1))
            # Only whole pages that the source had computed before this step can be shared.
            shared = draw(st.integers(0, begins[source] // page_size))
            table = tables[source][:shared]
        own = draw(st.integers(1, min(6, 160 // page_size + 1)))
        for _ in range(own):
            run_length = draw(st.integers(1, max(1, min(64 // page_size, 20))))
            at = draw(st.integers(0, max(0, len(free) - run_length)))
            table = table + free[at : at + run_length]
            del free[at : at + run_length]
        low, high = shared * page_size, len(table) * page_size
        end = draw(st.integers(low + 1, high))
        begin = draw(st.one_of(st.just(end - 1), st.integers(low, end - 1)))
        tables.append(table)
        begins.append(begin)
        ends.append(end)
    return make_batch(tables, begins, ends, page_size)


@settings(max_examples=120, deadline=None)
@given(batch=batches(), window=st.sampled_from([None, None, 1, 20, 100]))
def test_any_mixture_of_rows_and_pages_equals_plain_attention(batch: ForwardBatch, window: int | None) -> None:
    found, expected, _ = run(batch, window)
    assert (found - expected).abs().max().item() < 1e-5


def test_rows_that_share_pages_read_them_once() -> None:
    trunk = list(range(10))
    tables = [[*trunk, 10, 11], [*trunk, 50], [*trunk[:6], 70, 71, 72], [80]]
    found, expected, plan = run(make_batch(tables, [180, 170, 120, 4], [181, 171, 144, 5], 16), None)
    assert (found - expected).abs().max().item() < 1e-5
    reads = [(call.keys.start, call.keys.stop) for call in plan.calls if isinstance(call.keys, slice)]
    assert sorted(reads) == [(0, 96), (96, 160), (160, 181), (800, 811), (1120, 1144), (1280, 1285)]
    of_trunk = [call.queries.tolist() for call in plan.calls if isinstance(call.queries, torch.Tensor)]
    assert sorted(of_trunk) == [[0, 1], [0, 1, *range(2, 26)]]


@pytest.mark.parametrize(("begin", "end"), [(799, 800), (0, 800), (500, 800)])
def test_a_row_in_neighbouring_pages_is_never_copied(begin: int, end: int) -> None:
    plan = plan_attention(make_batch([list(range(7, 57))], [begin], [end], 16), None, torch.float32)
    assert all(call.keys is None or isinstance(call.keys, slice) for call in plan.calls)
    assert len(plan.calls) <= 2


def test_scattered_pages_are_gathered_in_one_call_beside_the_long_runs() -> None:
    scattered = [2 * page for page in range(40)]
    table = [*range(100, 120), *scattered, *range(130, 150)]
    batch = make_batch([table], [len(table) * 4 - 1], [len(table) * 4], 4)
    found, expected, plan = run(batch, None)
    assert (found - expected).abs().max().item() < 1e-5
    gathered = [call.keys for call in plan.calls if isinstance(call.keys, torch.Tensor)]
    assert [len(keys) for keys in gathered] == [40 * 4]
    assert len(plan.calls) == 3


def test_the_number_of_calls_stays_bounded_however_a_table_is_cut() -> None:
    runs = 30
    table = [start * 8 + offset for start in range(runs) for offset in range(MIN_RUN_TOKENS // 8)]
    plan = plan_attention(make_batch([table], [len(table) * 8 - 1], [len(table) * 8], 8), None, torch.float32)
    assert len(plan.calls) == MAX_RUNS_PER_ROW + 1


def test_a_decoding_row_under_a_window_reads_the_window_alone() -> None:
    plan = plan_attention(make_batch([list(range(50))], [799], [800], 16), 100, torch.float32)
    assert [call.keys for call in plan.calls] == [slice(700, 800)]


def test_pages_that_do_not_end_with_the_rows_last_token_are_refused() -> None:
    batch = make_batch([[0, 1]], [20], [21], 16)
    batch.kv_last_page_len[0] = 6
    with pytest.raises(ValueError, match="row 0: pages hold 22 tokens, its last token is number 21"):
        plan_attention(batch, None, torch.float32)
