"""The sampler: equal to transformers' processors and to slow references, and deaf to neighbours to the last bit."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from srt.messages import SamplingParams
from srt.model.adjust import Adjustments, adjust
from srt.model.draw import SORTED_AT_ONCE, DrawParams, draw, remaining_probabilities
from srt.model.sampler import NOT_FINITE, NOTHING_LEFT, Sampled, Sampler
from srt.model.uniform import uniforms
from srt.plan import SlotOpen
from tests.model.sampling_settings import settings_of_all_kinds

VOCAB = 269


def ids(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def draw_params(
    rows: int,
    temperature: float = 1.0,
    top_k: int = 10**6,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniform: float = 0.5,
) -> DrawParams:
    return DrawParams(
        temperature=torch.full((rows,), temperature),
        top_k=[top_k] * rows,
        top_p=[top_p] * rows,
        min_p=[min_p] * rows,
        uniform=torch.full((rows,), uniform, dtype=torch.float64),
    )


def opening(slot: int = 0, sampling: SamplingParams | None = None, **values: Any) -> SlotOpen:
    fields: dict[str, Any] = {"seed": 0, "prompt_ids": ids([1, 2, 3]), "output_ids": ids([]), **values}
    return SlotOpen(slot=slot, sampling=sampling or SamplingParams(), **fields)


# Filters


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [VOCAB, 1, 5, 60, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.9])
def test_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = random_logits(16)
    chain = LogitsProcessorList([TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k)])
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chain.append(MinPLogitsWarper(min_p))
    expected = chain(torch.zeros((16, 1), dtype=torch.long), logits.clone()).softmax(dim=-1)
    found = remaining_probabilities(logits, draw_params(16, temperature, top_k, top_p, min_p))
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found / found.sum(dim=-1, keepdim=True), expected)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0])
def test_the_top_p_of_a_large_vocabulary_is_exact(scale: float, top_p: float) -> None:
    vocab = 5 * SORTED_AT_ONCE
    logits = random_logits(6, vocab, scale=scale)
    found = remaining_probabilities(logits, draw_params(6, top_p=top_p))
    for row, probabilities in zip(found, logits.double().softmax(dim=-1), strict=True):
        falling = probabilities.sort(descending=True).values
        least = falling[(falling.cumsum(0) < top_p).sum()]
        # In exact arithmetic; what lies within float32 rounding of the edge may go either way.
        assert bool((row > 0)[probabilities > least * (1 + 1e-5)].all())
        assert not bool((row > 0)[probabilities < least * (1 - 1e-5)].any())


def test_equals_at_the_edge_of_a_filter_share_one_fate() -> None:
    logits = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    kept = remaining_probabilities(logits, draw_params(1, top_k=2)) > 0
    assert kept.tolist() == [[True, True, True, True, False]]
    kept = remaining_probabilities(logits, draw_params(1, top_p=0.6)) > 0
    assert kept.tolist() == [[True, True, True, True, False]]


# Drawing


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.sampled_from([2, 3, 127, 128, 129, 269, 1000]),
    temperature=st.sampled_from([0.01, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([10**6, 1, 2, 7, 500]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
)
def test_a_draw_inverts_the_distribution_function_in_the_order_of_ids(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(1, vocab, seed)
    uniform = float(uniforms([seed], ids([4]))[0])
    chosen = int(draw(logits, draw_params(1, temperature, top_k, top_p, min_p, uniform))[0])
    # The slow reference: sort, cut, walk.
    order = sorted(range(vocab), key=lambda token: -logits[0, token].item())[:top_k]
    top = logits[0, order[0]].item()
    weights = {token: math.exp((logits[0, token].item() - top) / temperature) for token in order}
    total, mass, kept = sum(weights.values()), 0.0, set()
    for token in order:
        if mass / total < top_p and weights[token] >= min_p:
            kept.add(token)
        mass += weights[token]
    remaining = uniform * sum(weights[token] for token in kept)
    for token in sorted(kept):
        remaining -= weights[token]
        if remaining <= 1e-5 * total:
            break
    assert chosen in kept
    near = abs(remaining) <= 1e-4 * total
    assert chosen == token or near


@pytest.mark.parametrize("over", ["seeds", "positions"])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_draws_follow_the_distribution_over_seeds_and_over_positions(over: str, top_p: float) -> None:
    count, vocab = 20_000, 20
    logits = random_logits(1, vocab, seed=3, scale=1.5)
    seeds, positions = (range(count), np.full(count, 17)) if over == "seeds" else ([5] * count, np.arange(count))
    params = draw_params(count, top_p=top_p)
    params.uniform.copy_(torch.from_numpy(uniforms(seeds, positions)))
    chosen = draw(logits.expand(count, -1).contiguous(), params)
    found = torch.bincount(chosen, minlength=vocab).double()
    probabilities = remaining_probabilities(logits, draw_params(1, top_p=top_p))[0].double()
    expected = probabilities / probabilities.sum() * count
    possible = expected > 0
    assert not bool(found[~possible].any())
    chi_square = ((found - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    # Far beyond what chance would give (about six standard deviations).
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom)


def test_uniforms_are_inside_the_open_interval_and_take_any_seed() -> None:
    seeds = [0, -1, 2**63, 2**64, 2**64 - 1, 12345]
    numbers = uniforms(seeds, np.zeros(6, np.int64))
    assert np.all((numbers > 0) & (numbers < 1))
    assert numbers[0] == numbers[3]
    assert numbers[1] == numbers[4]
    assert len(set(uniforms([7] * 10_000, np.arange(10_000)).tolist())) == 10_000


def test_an_id_of_probability_zero_never_comes_out_at_either_end() -> None:
    logits = torch.full((2, 300), -1e9)
    logits[:, 150] = 0.0
    for uniform in (2.0**-49, 1 - 2.0**-49):
        assert draw(logits, draw_params(2, uniform=uniform)).tolist() == [150, 150]


def test_the_coldest_temperature_that_is_drawn_does_not_overflow() -> None:
    logits = torch.tensor([[1e4, -1e4, 1e4 - 1.0]])
    assert draw(logits, draw_params(1, temperature=1e-5)).tolist() == [0]


# Adjustments


def adjusted(logits: torch.Tensor, sampling: SamplingParams, prompt: list[int], outputs: list[int]) -> torch.Tensor:
    changed = logits.clone()
    state = Adjustments(sampling, ids(prompt), ids(outputs[: len(outputs) // 2]), (2, 7))
    for token in outputs[len(outputs) // 2 :]:
        if state.seen is not None:
            state.seen.add(token)
    adjust(changed, {0: state}, {0: len(prompt) + len(outputs)})
    return changed


def test_repetition_penalty_sees_prompt_and_output_as_in_transformers() -> None:
    logits = random_logits(1)
    prompt, outputs = [5, 5, 9, 200], [9, 17, 17, 30]
    processor = RepetitionPenaltyLogitsProcessor(1.5)
    expected = processor(torch.tensor([prompt + outputs]), logits.clone())
    found = adjusted(logits, SamplingParams(repetition_penalty=1.5), prompt, outputs)
    assert torch.equal(found, expected)


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    logits = random_logits(1)
    found = adjusted(
        logits, SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25), [5, 9, 9], [9, 17, 17, 17, 8]
    )
    expected = logits.clone()
    for token, count in {9: 1, 17: 3, 8: 1}.items():
        expected[0, token] -= 0.5 * count - 0.25
    torch.testing.assert_close(found, expected)


def test_the_order_is_repetition_then_counts_then_bias() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, 17] = 2.0
    sampling = SamplingParams(
        repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5, logit_bias={17: 10.0, 4: -3.0}
    )
    found = adjusted(logits, sampling, [1], [17, 17])
    assert found[0, 17].item() == 2.0 / 2.0 - 2.0 - 0.5 + 10.0
    assert found[0, 4].item() == -3.0


def test_stop_ids_are_excluded_until_the_output_is_long_enough() -> None:
    sampling = SamplingParams(min_new_tokens=3)
    for outputs in range(6):
        found = adjusted(random_logits(1), sampling, [1, 2], list(range(10, 10 + outputs)))
        assert [token for token in range(VOCAB) if found[0, token] == -math.inf] == ([2, 7] if outputs < 3 else [])


def test_a_long_output_keeps_its_counts() -> None:
    rng = random.Random(2)
    prompt, outputs = rng.choices(range(VOCAB), k=40), rng.choices(range(VOCAB), k=600)
    found = adjusted(torch.zeros((1, VOCAB)), SamplingParams(frequency_penalty=1.0), prompt, outputs)
    assert found[0].tolist() == [-float(outputs.count(token)) for token in range(VOCAB)]


# The whole sampler


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    for rows in (1, 3, 16):
        for vocab in (10, VOCAB, 49_152):
            logits = torch.zeros((rows, vocab))
            logits[:, 7] = logits[:, 9] = logits[:, vocab - 1] = 4.0
            sampler = Sampler(vocab)
            for slot in range(rows):
                sampler.open(opening(slot, SamplingParams(temperature=0.0)))
            result = sampler.sample(logits, list(range(rows)), ids([3] * rows))
            assert result.token_ids.tolist() == [7] * rows


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=1e-9), SamplingParams(temperature=2.0, top_k=1)])
def test_what_can_only_be_greedy_is_greedy(sampling: SamplingParams) -> None:
    logits = random_logits(1)
    sampler = Sampler(VOCAB)
    sampler.open(opening(0, sampling))
    assert sampler.sample(logits, [0], ids([3])).token_ids.tolist() == [int(logits.argmax())]


def run_steps(
    openings: list[SlotOpen], logits: list[torch.Tensor], vocab: int
) -> tuple[list[list[int]], list[list[bytes]]]:
    """Sample `len(logits)` tokens for all openings together: their ids and the bits of their logprobs."""
    sampler = Sampler(vocab)
    for one in openings:
        sampler.open(one)
    found: list[list[int]] = [[] for _ in openings]
    bits: list[list[bytes]] = [[] for _ in openings]
    for step, all_rows in enumerate(logits):
        rows = torch.stack([all_rows[one.seed] for one in openings])
        positions = ids([len(one.prompt_ids) + len(one.output_ids) + step for one in openings])
        result = sampler.sample(rows, [one.slot for one in openings], positions)
        assert not result.errors
        for i in range(len(openings)):
            found[i].append(int(result.token_ids[i]))
            if i in result.logprobs:
                row = result.logprobs[i]
                bits[i].append(row.logprobs.tobytes() + row.top_ids.tobytes() + row.top_logprobs.tobytes())
    return found, bits


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("vocab", "rows", "steps"), [(VOCAB, 24, 6), (49_152, 9, 2)])
def test_a_row_is_the_same_to_the_bit_alone_in_company_and_in_any_order(vocab: int, rows: int, steps: int) -> None:
    rng = random.Random(9)
    openings = [
        opening(
            slot,
            settings_of_all_kinds(rng, vocab),
            seed=slot,
            prompt_ids=ids(rng.choices(range(vocab), k=rng.randint(1, 30))),
            logprobs=rng.choice([None, 0, 1, 5, 20]),
            stop_ids=(2, 5),
        )
        for slot in range(rows)
    ]
    logits = [random_logits(rows, vocab, seed=step) for step in range(steps)]
    # Coarse logits: many equals, whose order a sort may choose.
    logits[-1] = (logits[-1] * 2).round() / 2
    together = run_steps(openings, logits, vocab)
    order = rng.sample(range(rows), rows)
    shuffled = run_steps([openings[i] for i in order], logits, vocab)
    for i, one in enumerate(openings):
        alone = run_steps([one], logits, vocab)
        assert alone[0][0] == together[0][i] == shuffled[0][order.index(i)]
        assert alone[1][0] == together[1][i] == shuffled[1][order.index(i)]


def test_a_request_resumed_after_some_tokens_goes_on_as_if_never_interrupted() -> None:
    rng = random.Random(4)
    logits = [random_logits(12, seed=step) for step in range(8)]
    for slot in range(12):
        whole = opening(0, settings_of_all_kinds(rng, VOCAB), seed=slot, stop_ids=(2, 5))
        expected = run_steps([whole], logits, VOCAB)[0][0]
        for cut in (1, 5):
            resumed = opening(3, whole.sampling, seed=slot, output_ids=ids(expected[:cut]), stop_ids=(2, 5))
            assert run_steps([resumed], logits[cut:], VOCAB)[0][0] == expected[cut:]


def test_seeds_and_positions_decide_and_nothing_else() -> None:
    logits = random_logits(1, scale=0.1).expand(50, -1).contiguous()

    def tokens(seed: int, first: int) -> list[int]:
        sampler = Sampler(VOCAB)
        for slot in range(50):
            sampler.open(opening(slot, SamplingParams(), seed=seed))
        return sampler.sample(logits, list(range(50)), ids(list(range(first, first + 50)))).token_ids.tolist()

    assert tokens(1, 10) == tokens(1, 10)
    assert tokens(1, 10)[1:] == tokens(1, 11)[:-1]
    assert tokens(1, 10) != tokens(2, 10)
    assert len(set(tokens(1, 10))) > 20


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_logits_that_are_not_finite_fails_alone(poison: float, temperature: float) -> None:
    logits = random_logits(3)
    expected = [int(token) for token in logits.argmax(dim=-1)]
    logits[1, 100] = poison
    sampler = Sampler(VOCAB)
    for slot in range(3):
        sampler.open(opening(slot, SamplingParams(temperature=temperature if slot == 1 else 0.0), logprobs=2))
    result = sampler.sample(logits, [0, 1, 2], ids([3, 3, 3]))
    assert result.token_ids.tolist() == [expected[0], -1, expected[2]]
    assert result.errors == {1: NOT_FINITE}
    assert sorted(result.logprobs) == [0, 2]


def test_finite_logits_whose_sum_overflows_are_sampled() -> None:
    sampler = Sampler(4)
    sampler.open(opening(0, SamplingParams(temperature=0.0)))
    result = sampler.sample(torch.tensor([[3e38, 3e38, 3.1e38, 0.0]]), [0], ids([3]))
    assert (result.token_ids.tolist(), result.errors) == ([2], {})


def test_a_row_with_nothing_left_to_sample_fails_alone() -> None:
    sampler = Sampler(3)
    sampler.open(opening(0, SamplingParams(min_new_tokens=5), stop_ids=(0, 1, 2), prompt_ids=ids([0])))
    sampler.open(opening(1, SamplingParams(temperature=0.0)))
    result = sampler.sample(torch.tensor([[1.0, 2.0, 3.0]] * 2), [0, 1], ids([1, 3]))
    assert result.token_ids.tolist() == [-1, 2]
    assert result.errors == {0: NOTHING_LEFT}


def test_a_bias_for_an_id_beyond_the_vocabulary_fails_its_own_row() -> None:
    sampler = Sampler(VOCAB)
    sampler.open(opening(0, SamplingParams(logit_bias={VOCAB: 1.0})))
    sampler.open(opening(1, SamplingParams(temperature=0.0)))
    logits = random_logits(2)
    result = sampler.sample(logits, [0, 1], ids([3, 3]))
    assert result.token_ids.tolist() == [-1, int(logits[1].argmax())]
    assert f"token {VOCAB}" in result.errors[0]


def sample_with_logprobs(logits: torch.Tensor, top: int, sampling: SamplingParams) -> Sampled:
    sampler = Sampler(logits.shape[1])
    sampler.open(opening(0, sampling, logprobs=top))
    return sampler.sample(logits, [0], ids([3]))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(1)
    sampling = SamplingParams(temperature=0.0, logit_bias={11: 100.0}, repetition_penalty=1.4)
    result = sample_with_logprobs(logits, 5, sampling)
    expected = logits.log_softmax(dim=-1)[0]
    found = result.logprobs[0]
    assert result.token_ids.tolist() == [11]
    assert found.logprobs.tolist() == [expected[11].item()]
    best = expected.topk(5)
    assert found.top_ids.tolist() == [best.indices.tolist()]
    assert found.top_logprobs.tolist() == [best.values.tolist()]


@pytest.mark.parametrize(
    ("top", "expected"), [(0, []), (1, [2]), (3, [2, 0, 3]), (4, [2, 0, 3, 4]), (99, [2, 0, 3, 4, 1])]
)
def test_the_likeliest_stand_best_first_and_equals_by_id(top: int, expected: list[int]) -> None:
    result = sample_with_logprobs(torch.tensor([[1.0, -1.0, 2.0, 1.0, 1.0]]), top, SamplingParams(temperature=0.0))
    assert result.logprobs[0].top_ids.tolist() == [expected]
