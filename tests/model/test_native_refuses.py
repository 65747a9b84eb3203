"""Arrays that would lead the native kernels astray are refused in Python, with the name of the array."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt.model.interface import ForwardBatch
from srt.model.kernels.check import check_batch, check_copies, check_tokens
from tests.model.families import save_family
from tests.model.native_kernels import all_kernels, load_native_model

VOCAB, PAGES, PAGE = 269, 32, 16


def array(*values: int | list[int]) -> Any:
    return np.array(values, np.int32)


def sound_batch() -> ForwardBatch:
    """Row 0: tokens 30..32 of pages 4, 9, 2; row 1: token 0 of page 7."""
    return ForwardBatch(
        page_size=PAGE,
        token_ids=array(1, 2, 3, 268),
        positions=array(30, 31, 32, 0),
        out_slots=array(9 * 16 + 14, 9 * 16 + 15, 2 * 16, 7 * 16),
        qo_indptr=array(0, 3, 4),
        kv_indptr=array(0, 3, 4),
        kv_indices=array(4, 9, 2, 7),
        kv_last_page_len=array(1, 1),
    )


def check(batch: ForwardBatch) -> None:
    check_batch(batch, vocab_size=VOCAB, num_pages=PAGES, page_size=PAGE)


def test_a_sound_batch_passes() -> None:
    check(sound_batch())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 8),
        ("token_ids", array(1, 2, 3, 269)),
        ("token_ids", array(1, 2, -1, 0)),
        ("token_ids", np.array([1, 2, 3, 4], np.int64)),
        ("token_ids", array(1, 2, 3, 4, 5, 6, 7, 8)[::2]),
        ("positions", array(30, 31, 32)),
        ("positions", array(30, 31, 33, 0)),
        ("positions", array(29, 30, 31, 0)),
        ("out_slots", array(9 * 16 + 14, 9 * 16 + 15, 2 * 16, PAGES * PAGE)),
        ("out_slots", array(9 * 16 + 14, 9 * 16 + 15, 2 * 16, -1)),
        ("out_slots", array(9 * 16 + 14, 9 * 16 + 15, 2 * 16, 7 * 16 + 1)),
        ("qo_indptr", array(0, 4)),
        ("qo_indptr", array(0, 3, 5)),
        ("qo_indptr", array(1, 3, 4)),
        ("qo_indptr", array(0, 4, 4)),
        ("qo_indptr", array(0, 5, 4)),
        ("qo_indptr", np.zeros((0,), np.int32)),
        ("kv_indptr", array(0, 3, 3)),
        ("kv_indptr", array(0, -1, 4)),
        ("kv_indptr", array(0, 3, 9)),
        ("kv_indices", array(4, 9, 2, PAGES)),
        ("kv_indices", array(4, -9, 2, 7)),
        ("kv_indices", array(4, 9, 2)),
        ("kv_indices", array(4, 9, 2, 7).reshape(2, 2)),
        ("kv_last_page_len", array(0, 1)),
        ("kv_last_page_len", array(1, 17)),
        ("kv_last_page_len", array(1)),
        ("kv_last_page_len", np.zeros((0,), np.int32)),
    ],
)
def test_a_broken_array_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match="positions" if name == "positions" else r"\w+ .*"):
        check(dataclasses.replace(sound_batch(), **{name: value}))


def test_two_rows_that_write_one_slot_are_refused() -> None:
    batch = dataclasses.replace(
        sound_batch(), kv_indices=array(4, 9, 2, 2), out_slots=array(9 * 16 + 14, 9 * 16 + 15, 2 * 16, 2 * 16)
    )
    with pytest.raises(ValueError, match="kv_indices has a page more than once"):
        check(batch)


ARRAYS = [field.name for field in dataclasses.fields(ForwardBatch) if field.name != "page_size"]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_passes_the_check_stays_in_bounds(data: st.DataObject) -> None:
    batch = sound_batch()
    for name in data.draw(st.lists(st.sampled_from(ARRAYS), min_size=1, max_size=3)):
        values = getattr(batch, name).copy()
        index = data.draw(st.integers(0, len(values) - 1))
        values[index] = data.draw(st.one_of(st.integers(-3, 40), st.sampled_from([-(2**31), 2**31 - 1, 512, 511])))
        batch = dataclasses.replace(batch, **{name: values})
    try:
        check(batch)
    except ValueError:
        return
    for row in range(len(batch.kv_last_page_len)):
        pages = batch.kv_indices[batch.kv_indptr[row] : batch.kv_indptr[row + 1]]
        assert len(pages)
        assert all(0 <= page < PAGES for page in pages)
        length = (len(pages) - 1) * PAGE + int(batch.kv_last_page_len[row])
        tokens = range(batch.qo_indptr[row], batch.qo_indptr[row + 1])
        assert [int(batch.positions[t]) for t in tokens] == list(range(length - len(tokens), length))
        assert all(0 <= batch.token_ids[t] < VOCAB for t in tokens)
    assert all(0 <= slot < PAGES * PAGE for slot in batch.out_slots)


@pytest.mark.parametrize("tokens", [array(4), array(-1), np.array([0], np.int64), array(0, 1).reshape(1, 2)])
def test_logits_of_tokens_that_are_not_there_are_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="logit_tokens"):
        check_tokens("logit_tokens", tokens, 4)


@pytest.mark.parametrize("copies", [array(1, 2, 3), array([0, PAGES, 1]), array([-1, 0, 1]), array([0, 1, 17])])
def test_copies_out_of_range_are_refused(copies: Any) -> None:
    with pytest.raises(ValueError, match="copies"):
        check_copies(copies, num_pages=PAGES, page_size=PAGE)


def test_the_model_refuses_before_anything_is_written(tmp_path: Path) -> None:
    folder = save_family("llama", tmp_path)
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folder, kernels, PAGES * PAGE)
        before = model.kv.pages.copy()
        batch = dataclasses.replace(sound_batch(), kv_indices=array(4, 9, PAGES, 7))
        with pytest.raises(ValueError, match="kv_indices"):
            model.forward(batch, array(0))
        with pytest.raises(ValueError, match="logit_tokens"):
            model.forward(sound_batch(), array(9))
        vocab = model.config.vocab_size
        for wrong in (torch.zeros(2, vocab), torch.zeros(1, vocab + 1), torch.zeros(1, vocab).double()):
            with pytest.raises(ValueError, match="out"):
                model.forward(sound_batch(), array(0), wrong)
        with pytest.raises(ValueError, match="hidden"):
            model.project(torch.zeros(1, 63))
        with pytest.raises(ValueError, match="page"):
            model.kv.read_page(PAGES)
        with pytest.raises(ValueError, match="page"):
            model.kv.write_page(0, b"short")
        assert np.array_equal(model.kv.pages, before)
