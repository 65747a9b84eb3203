"""The native sampler: the ids of the torch sampler, whatever the settings and whoever else is in the batch."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from srt.messages import SamplingParams
from srt.model.draw import Chooser, DrawParams, TorchChooser
from srt.model.native_sampling import NativeChooser
from srt.model.sampler import NOT_FINITE, Sampler
from srt.model.uniform import uniforms
from srt.plan import SlotOpen
from tests.model.families import SIZES
from tests.model.native_kernels import all_kernels, load_native_model
from tests.model.sampling_settings import settings_of_all_kinds

VOCABULARIES = (269, 49_152)


@pytest.fixture(scope="module", params=VOCABULARIES)
def choosers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[NativeChooser]:
    """Of a model with a vocabulary of each size, on every variant; none where there is no compiler."""
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    sizes = {**SIZES, "vocab_size": request.param, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return [NativeChooser(load_native_model(folder, kernels)) for kernels in all_kernels("bfloat16")]


@cache
def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def opening(slot: int, sampling: SamplingParams) -> SlotOpen:
    nothing, prompt = np.array([], np.int32), np.array([slot, 5, 7], np.int32)
    return SlotOpen(slot=slot, sampling=sampling, seed=slot, prompt_ids=prompt, output_ids=nothing, stop_ids=(2, 5))


def sample(
    chooser: Chooser, openings: list[SlotOpen], steps: list[torch.Tensor], order: list[int]
) -> dict[int, list[int]]:
    """The ids of each slot over some steps, with the rows in the given order."""
    sampler = Sampler(steps[0].shape[1], chooser)
    for slot in order:
        sampler.open(openings[slot])
    found: dict[int, list[int]] = {slot: [] for slot in order}
    for number, logits in enumerate(steps):
        positions = np.array([len(openings[slot].prompt_ids) + number for slot in order], np.int32)
        result = sampler.sample(logits[order], order, positions)
        assert not result.errors
        for slot, token in zip(order, result.token_ids.tolist(), strict=True):
            found[slot].append(token)
    return found


def test_ids_are_those_of_the_torch_sampler_in_any_company(choosers: list[NativeChooser]) -> None:
    rng = random.Random(4)
    for chooser in choosers:
        vocab, rows, steps = chooser.vocab_size, 40, 4
        openings = [opening(slot, settings_of_all_kinds(rng, vocab)) for slot in range(rows)]
        logits = [random_logits(rows, vocab, seed) for seed in range(steps)]
        # Coarse logits: many equals.
        logits.append((logits[-1] * 2).round() / 2)
        expected = sample(TorchChooser(), openings, logits, list(range(rows)))
        assert sample(chooser, openings, logits, list(range(rows))) == expected
        some = rng.sample(range(rows), 11)
        assert sample(chooser, openings, logits, some) == {slot: expected[slot] for slot in some}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_found_at_any_place(choosers: list[NativeChooser], bad: float) -> None:
    for chooser in choosers:
        vocab = chooser.vocab_size
        for place in (0, 17, vocab // 2, vocab - 2, vocab - 1):
            logits = random_logits(5, vocab, 1).clone()
            logits[3, place] = bad
            assert (chooser.best(logits) < 0).tolist() == [row == 3 for row in range(5)]
        assert chooser.best(torch.full((2, vocab), 3e38)).tolist() == [0, 0]
        sampler = Sampler(vocab, chooser)
        for slot in range(5):
            sampler.open(opening(slot, SamplingParams()))
        result = sampler.sample(logits, list(range(5)), np.ones(5, np.int32))
        assert result.errors == {3: NOT_FINITE}


def test_greedy_takes_the_lowest_id_among_equals(choosers: list[NativeChooser]) -> None:
    for chooser in choosers:
        vocab = chooser.vocab_size
        for places in ((0, 5), (7, 9, vocab - 1), (vocab - 1,), (vocab - 3, vocab - 1)):
            logits = torch.full((3, vocab), float("-inf"))
            logits[1] = -2.0
            logits[:, list(places)] = 4.0
            assert chooser.greedy(logits, [0, 1, 2]).tolist() == [places[0]] * 3
            assert chooser.greedy(logits, [2]).tolist() == [places[0]]
            assert chooser.best(logits).tolist() == [-1, places[0], -1]


def params(count: int, temperature: float, uniform: float, top_k: int = 10**6) -> DrawParams:
    numbers = torch.full((count,), uniform, dtype=torch.float64)
    return DrawParams(torch.full((count,), temperature), [top_k] * count, [1.0] * count, [0.0] * count, numbers)


def test_an_id_of_probability_zero_never_comes_out_at_either_end(choosers: list[NativeChooser]) -> None:
    for chooser in choosers:
        logits = torch.full((1, chooser.vocab_size), -1e9)
        logits[:, 150] = 0.0
        for uniform in (2.0**-49, 1 - 2.0**-49):
            for temperature in (1.0, 1e-5):
                assert chooser.draw(logits, [0], params(1, temperature, uniform)).tolist() == [150]


@pytest.mark.parametrize("top_k", [10**6, 3, 128, 129])
def test_draws_from_equals_are_spread_evenly_in_the_order_of_ids(choosers: list[NativeChooser], top_k: int) -> None:
    for chooser in choosers:
        vocab = chooser.vocab_size
        logits = torch.zeros((1, vocab))
        for uniform in (2.0**-49, 0.25, 0.5, 0.999, 1 - 2.0**-49):
            # Equals share one fate: top-k leaves them all.
            found = int(chooser.draw(logits, [0], params(1, 1.0, uniform, top_k))[0])
            assert found == int(uniform * vocab)


def test_many_draws_are_the_torch_sampler_s(choosers: list[NativeChooser]) -> None:
    for chooser in choosers[:1]:
        vocab, count = chooser.vocab_size, 400
        logits = random_logits(8, vocab, 3)
        rows = [row for row in range(8) for _ in range(count // 8)]
        wanted = params(count, 0.9, 0.5)
        wanted.uniform.copy_(torch.from_numpy(uniforms(range(count), np.arange(count))))
        expected = TorchChooser().draw(logits[rows], list(range(count)), wanted)
        assert chooser.draw(logits, rows, wanted).tolist() == expected.tolist()


def test_logits_of_another_shape_and_rows_that_are_not_there_are_refused(choosers: list[NativeChooser]) -> None:
    for chooser in choosers[:1]:
        vocab = chooser.vocab_size
        logits = torch.zeros((2, vocab))
        for wrong in (logits[:, 1:], logits.double(), torch.zeros((vocab, 2)).T, torch.zeros(vocab)):
            with pytest.raises(ValueError, match="logits"):
                chooser.best(wrong)
        for rows in ([2], [-1], [0, 5]):
            with pytest.raises(ValueError, match="rows"):
                chooser.greedy(logits, rows)
            with pytest.raises(ValueError, match="rows"):
                chooser.draw(logits, rows, params(len(rows), 1.0, 0.5))
