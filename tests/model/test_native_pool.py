"""The native KV pool: pages as bytes, copies of rows, memory that is taken only when used."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from srt.model.kernels.build import host_variants
from srt.model.native import NativeModel
from tests.model.families import save_family
from tests.model.native_kernels import FORMATS, all_kernels, load_native_model
from tests.model.paged_driver import PagedDriver, Sequence

TOKENS = random.Random(3).choices(range(269), k=130)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def next_logits(model: NativeModel, pages: list[int]) -> torch.Tensor:
    """The logits of the last token on top of KV that is in `pages` already."""
    return PagedDriver.with_pages(model, "ascending").step([(Sequence(TOKENS, pages, 129), 1)])[0]


@pytest.mark.parametrize("number_format", ["float32", "bfloat16", "kv8", "kv16-float32"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 24, 64])
def test_pages_written_back_elsewhere_serve_as_the_ones_they_were_read_from(
    tmp_path: Path, page_size: int, number_format: str
) -> None:
    folder = save_family("llama", tmp_path)
    for kernels in all_kernels(number_format):
        model = load_native_model(folder, kernels, 1024, page_size)
        driver = PagedDriver.with_pages(model, "shuffled")
        sequence = Sequence(TOKENS)
        driver.step([(sequence, 129)])
        expected = next_logits(model, list(sequence.pages) + ([driver.free[0]] if 129 % page_size == 0 else []))
        moved = driver.free[: len(sequence.pages)]
        for old, new in zip(sequence.pages, moved, strict=True):
            model.kv.write_page(new, model.kv.read_page(old))
            model.kv.write_page(old, bytes(model.kv.page_bytes))
        spare = [driver.free[len(moved)]] if 129 % page_size == 0 else []
        assert torch.equal(next_logits(model, moved + spare), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [1, 2, 16, 24, 64])
def test_copied_rows_arrive_in_order_and_the_others_stay(tmp_path: Path, page_size: int, dtype: str) -> None:
    folder = save_family("llama", tmp_path)
    for kernels in all_kernels(dtype)[:1]:
        model = load_native_model(folder, kernels, 8 * page_size, page_size)
        elements = model.kv.pages.view(np.uint16)
        for page in range(4):
            elements[page] = page + 1
        for rows in range(page_size + 1):
            elements[3] = 4
            model.kv.copy_rows(np.array([[0, 3, rows], [1, 3, rows // 2]], np.int32))
            values, counts = np.unique(elements[3], return_counts=True)
            share = elements.shape[1] // page_size
            found = dict(zip(values.tolist(), counts.tolist(), strict=True))
            expected = {2: rows // 2, 1: rows - rows // 2, 4: page_size - rows}
            assert found == {value: count * share for value, count in expected.items() if count}
        assert (elements[0] == 1).all()
        assert (elements[1] == 2).all()


@pytest.mark.parametrize("number_format", list(FORMATS))
def test_a_copied_prefix_of_a_page_serves_as_the_page_itself(tmp_path: Path, number_format: str) -> None:
    folder = save_family("llama", tmp_path)
    for kernels in all_kernels(number_format)[:1]:
        for page_size in (1, 24, 64):
            model = load_native_model(folder, kernels, 1024, page_size)
            driver = PagedDriver.with_pages(model, "shuffled")
            trunk = Sequence(TOKENS)
            whole = driver.step([(trunk, 130)])[0]
            for shared in (1, 40, 127):
                fork = driver.fork(trunk, shared, TOKENS[shared:])
                assert torch.equal(driver.step([(fork, 130 - shared)])[0], whole[shared:])


def test_kv_in_8_bits_takes_half_the_memory_and_another_layout(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    for full, half in zip(all_kernels("bfloat16"), all_kernels("kv8"), strict=True):
        pools = [load_native_model(folder, kernels).kv for kernels in (full, half)]
        # Heads of 16 numbers: 32 bytes in bfloat16; 16 and a scale in 8 bits.
        assert pools[1].page_bytes * 32 == pools[0].page_bytes * 20
        assert pools[0].layout != pools[1].layout


def test_a_large_pool_takes_no_memory_before_it_is_used(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folder, kernels, 64)
        before = resident_bytes()
        large = NativeModel(model.config, folder, torch.float32, 200_000, 16, 1, kernels=kernels)
        assert large.kv.pages.nbytes > 1 << 30
        assert resident_bytes() - before < 256 << 20


def test_the_variants_are_ordered_from_best_to_portable() -> None:
    assert host_variants()[-1].name == "portable"
