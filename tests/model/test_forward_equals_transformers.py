"""Logits of the torch model against transformers, for every family and every way a sequence can be cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.model.families import CASES, EVERY_FAMILY, HEAD_DIMS, reference_logits, save_family
from tests.model.paged_driver import PagedDriver, Sequence, load_torch_model

TOLERANCE = 1e-4
LENGTH = 150
WINDOWED_AND_NOT = ["llama", "mistral-window", "gemma2", "gemma3"]


def ids(length: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(269), k=length)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {case: save_family(case, root / case) for case in CASES}


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    worst = (found - expected).abs().max().item()
    assert worst < TOLERANCE, f"logits differ by {worst}"


@pytest.mark.parametrize("case", CASES)
def test_every_family_gives_transformers_logits_whole_and_token_by_token(folders: dict[str, Path], case: str) -> None:
    tokens = ids(LENGTH)
    expected = reference_logits(folders[case], tokens)
    driver = PagedDriver.with_pages(load_torch_model(folders[case], 64, 16), "ascending")
    assert_close(driver.step([(Sequence(tokens), LENGTH)])[0], expected)
    sequence = Sequence(tokens)
    assert_close(driver.step([(sequence, 100)])[0], expected[:100])
    for position in range(100, LENGTH):
        assert_close(driver.step([(sequence, 1)])[0], expected[position : position + 1])


@pytest.mark.parametrize("case", EVERY_FAMILY)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_family_with_every_head_size_gives_transformers_logits(tmp_path: Path, case: str, head_dim: int) -> None:
    folder = save_family(case, tmp_path, head_dim=head_dim)
    tokens = ids(LENGTH)
    driver = PagedDriver.with_pages(load_torch_model(folder, 64, 16), "shuffled")
    sequence = Sequence(tokens)
    found = torch.cat([driver.step([(sequence, count)])[0] for count in (109, 1, 40)])
    assert_close(found, reference_logits(folder, tokens))


@pytest.mark.parametrize("case", WINDOWED_AND_NOT)
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_chunks_of_any_length_give_the_logits_of_the_whole(
    folders: dict[str, Path], case: str, order: str, page_size: int
) -> None:
    tokens = ids(LENGTH)
    expected = reference_logits(folders[case], tokens)
    driver = PagedDriver.with_pages(load_torch_model(folders[case], 512 // page_size, page_size), order)
    sequence = Sequence(tokens)
    for count in (37, 1, 1, 50, 3, 1, 40, 17):
        start = sequence.computed
        assert_close(driver.step([(sequence, count)])[0], expected[start : start + count])
    assert sequence.computed == LENGTH


@pytest.mark.parametrize("case", WINDOWED_AND_NOT)
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_a_prefix_shared_by_copy_on_write_gives_the_logits_of_a_cold_run(
    folders: dict[str, Path], case: str, order: str, page_size: int
) -> None:
    driver = PagedDriver.with_pages(load_torch_model(folders[case], 1024 // page_size, page_size), order)
    first = Sequence(ids(LENGTH))
    driver.step([(first, LENGTH)])
    for shared in (1, page_size, 70, 130):
        fork = driver.fork(first, shared, ids(30, seed=shared))
        expected = reference_logits(folders[case], fork.ids)
        assert_close(driver.step([(fork, 29)])[0], expected[shared : shared + 29])
        assert_close(driver.step([(fork, 1)])[0], expected[shared + 29 :])
    again = Sequence([*first.ids, 5], first.pages[: LENGTH // page_size], LENGTH // page_size * page_size)
    expected = reference_logits(folders[case], again.ids)
    assert_close(driver.step([(again, len(again.ids) - again.computed)])[0][-1:], expected[-1:])


@pytest.mark.parametrize("case", WINDOWED_AND_NOT)
@pytest.mark.parametrize("order", ["ascending", "shuffled"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_rows_that_share_prefixes_of_several_depths_do_not_disturb_one_another(
    folders: dict[str, Path], case: str, order: str, page_size: int
) -> None:
    driver = PagedDriver.with_pages(load_torch_model(folders[case], 4096 // page_size, page_size), order)
    trunk = Sequence(ids(LENGTH))
    driver.step([(trunk, LENGTH)])
    branch = driver.fork(trunk, 100, ids(60, seed=2))
    driver.step([(branch, 60)])
    sequences = [driver.fork(trunk, 33 + 13 * i, ids(40, seed=10 + i)) for i in range(8)]
    sequences += [driver.fork(branch, 101 + 7 * i, ids(40, seed=30 + i)) for i in range(6)]
    sequences += [Sequence(ids(40, seed=50 + i)) for i in range(4)]
    expected = [reference_logits(folders[case], sequence.ids) for sequence in sequences]
    chooser = random.Random(3)
    while any(sequence.computed < len(sequence.ids) for sequence in sequences):
        work = []
        for sequence in chooser.sample(sequences, chooser.randint(1, len(sequences))):
            left = len(sequence.ids) - sequence.computed
            if left:
                work.append((sequence, min(left, chooser.choice([1, 1, 1, 2, 7, 20]))))
        starts = [sequence.computed for sequence, _ in work]
        if not work:
            continue
        for (sequence, count), start, found in zip(work, starts, driver.step(work), strict=True):
            want = expected[sequences.index(sequence)][start : start + count]
            assert_close(found, want)


def test_bfloat16_stays_near_float32(folders: dict[str, Path]) -> None:
    tokens = ids(LENGTH)
    expected = reference_logits(folders["llama"], tokens)
    driver = PagedDriver.with_pages(load_torch_model(folders["llama"], 64, 16, torch.bfloat16), "shuffled")
    sequence = Sequence(tokens)
    found = torch.cat([driver.step([(sequence, count)])[0] for count in (100, 1, 49)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize(("kv_dtype", "share"), [(torch.bfloat16, 0.01), (torch.int8, 0.02)])
@pytest.mark.parametrize("case", WINDOWED_AND_NOT)
def test_kv_in_fewer_bits_stays_near_float32_and_is_read_as_the_step_that_wrote_it_took_it(
    folders: dict[str, Path], case: str, kv_dtype: torch.dtype, share: float
) -> None:
    tokens = ids(LENGTH)
    expected = reference_logits(folders[case], tokens)
    driver = PagedDriver.with_pages(load_torch_model(folders[case], 64, 16, kv_dtype=kv_dtype), "shuffled")
    whole = driver.step([(Sequence(tokens), LENGTH)])[0]
    assert (whole - expected).abs().mean() < share * expected.std()
    sequence = Sequence(tokens)
    parts = torch.cat([driver.step([(sequence, count)])[0] for count in (60, 1, 1, 88)])
    assert (parts - whole).abs().max() < 0.01 * expected.std()
