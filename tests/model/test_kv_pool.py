"""The torch KV pool: rows copied in order, and pages that come back byte for byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from srt.model.config import kv_bytes_per_token, read_model_config
from srt.model.kv_pool import TorchKVPool


def make_pool(tiny_model: Path, dtype: torch.dtype) -> TorchKVPool:
    pool = TorchKVPool(read_model_config(tiny_model), dtype, num_pages=5, page_size=4)
    for tensor in (pool.k, pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_read_and_written_elsewhere_is_the_same_to_the_bit(tiny_model: Path, dtype: torch.dtype) -> None:
    pool = make_pool(tiny_model, dtype)
    pool.k[0, 2, 0, 0, 0] = float("nan")
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


def test_copies_take_the_first_rows_and_go_in_order(tiny_model: Path) -> None:
    pool = make_pool(tiny_model, torch.float32)
    k, v = pool.k.clone(), pool.v.clone()
    pool.copy_rows(np.array([[0, 1, 3], [1, 2, 2]], np.int32))
    for tensor, before in ((pool.k, k), (pool.v, v)):
        assert torch.equal(tensor[:, 1, :3], before[:, 0, :3])
        assert torch.equal(tensor[:, 1, 3:], before[:, 1, 3:])
        assert torch.equal(tensor[:, 2, :2], before[:, 0, :2])
        assert torch.equal(tensor[:, 2, 2:], before[:, 2, 2:])
