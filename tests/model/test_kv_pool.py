"""The torch KV pool: rows copied in order, and pages that come back byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from srt.model.config import kv_bytes_per_token, read_model_config
from srt.model.kv_pool import TorchKVPool


def make_pool(tiny_model: Path, dtype: torch.dtype) -> TorchKVPool:
    """`dtype`: that of the pool; the model's is float32 where the pool's is int8."""
    compute = torch.float32 if dtype == torch.int8 else dtype
    pool = TorchKVPool(read_model_config(tiny_model), compute, num_pages=5, page_size=4, kv_dtype=dtype)
    slots = torch.arange(5 * 4)
    for layer in range(pool.k.shape[0]):
        k, v = (torch.randn(20, *pool.k.shape[3:], dtype=compute) for _ in range(2))
        pool.write(layer, slots, k, v)
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_page_read_and_written_elsewhere_is_the_same_to_the_bit(tiny_model: Path, dtype: torch.dtype) -> None:
    pool = make_pool(tiny_model, dtype)
    (pool.scales or (pool.k,))[0][0, 2, 0, 0] = float("nan")
    data = pool.read_page(2)
    name = str(dtype).removeprefix("torch.")
    assert len(data) == 4 * kv_bytes_per_token(read_model_config(tiny_model), name)
    others = [pool.read_page(page) for page in (0, 1, 3)]
    pool.write_page(4, data)
    assert pool.read_page(4) == data
    assert [pool.read_page(page) for page in (0, 1, 3)] == others


def test_a_page_of_the_wrong_length_is_refused(tiny_model: Path) -> None:
    pool = make_pool(tiny_model, torch.float32)
    with pytest.raises(ValueError, match="a page holds"):
        pool.write_page(0, pool.read_page(0)[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_copies_take_the_first_rows_and_go_in_order(tiny_model: Path, dtype: torch.dtype) -> None:
    pool = make_pool(tiny_model, dtype)
    tensors = (pool.k, pool.v, *pool.scales)
    copies = [tensor.clone() for tensor in tensors]
    pool.copy_rows(np.array([[0, 1, 3], [1, 2, 2]], np.int32))
    for tensor, before in zip(tensors, copies, strict=True):
        assert torch.equal(tensor[:, 1, :3], before[:, 0, :3])
        assert torch.equal(tensor[:, 1, 3:], before[:, 1, 3:])
        assert torch.equal(tensor[:, 2, :2], before[:, 0, :2])
        assert torch.equal(tensor[:, 2, 2:], before[:, 2, 2:])


def test_vectors_in_8_bits_come_back_within_half_a_step_of_their_own_scale(tiny_model: Path) -> None:
    config = read_model_config(tiny_model)
    pool = TorchKVPool(config, torch.float32, num_pages=5, page_size=4, kv_dtype=torch.int8)
    k = torch.randn(3, config.num_kv_heads, config.head_dim) * torch.tensor([1e-3, 1.0, 1e4])[:, None, None]
    v = torch.zeros_like(k)
    v[1, 0, 0] = float("inf")
    slots = torch.tensor([7, 0, 19])
    kept_k, kept_v = pool.write(0, slots, k, v)
    read_k, read_v = pool.read(0, slots)
    assert torch.equal(read_k, kept_k)
    assert (read_k - k).abs().amax(-1).le(k.abs().amax(-1) / 254 * 1.001).all()
    assert torch.equal(read_v.isnan(), kept_v.isnan())
    assert read_v[1, 0].isnan().all()
    assert read_v.isnan().sum() == config.head_dim
    assert (read_v.nan_to_num(0.0) == 0).all()
