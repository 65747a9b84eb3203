"""A hit gives the very ids that a miss gives, whatever state the cache is in.

A few short histories here; `python -m benchmarks.hit_equals_miss` is the same for 200 of the real model's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.histories import read_histories
from benchmarks.hit_equals_miss import PAGE_SIZE, Reply, State, Trial, cut_of, differences

# Enough for each offset in a page.
COUNT = 17


def go_through_all_states(model: Path, data: Path, tokens: int, new_tokens: int) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    histories = read_histories(data / "histories.jsonl", tokenizer, COUNT, tokens)
    states = {state.name: state for state in Trial(model, histories, new_tokens, threads=1).run(lambda state: None)}
    assert list(states) == ["cold", "branches", "warm", "copy on write", "disk", "partly evicted"]
    for state in states.values():
        assert all(len(reply.ids) == new_tokens for reply in state.replies)
        assert state.different == [], f"{state.name}: other ids than without a cache"
    lengths = [len(history.whole) for history in histories]
    # The states are what they are called.
    assert cached(states["cold"]) == [0] * COUNT
    assert all(0 < count < length for count, length in zip(cached(states["branches"]), lengths, strict=True))
    assert cached(states["warm"]) == [length - 1 for length in lengths]
    cuts = [cut_of(place, history.whole) for place, history in enumerate(histories)]
    assert cached(states["copy on write"]) == cuts
    assert {cut % PAGE_SIZE for cut in cuts} == set(range(PAGE_SIZE))
    assert all(reply.disk > 0 for reply in states["disk"].replies)
    assert 0 < sum(cached(states["partly evicted"])) < sum(lengths) - COUNT


def cached(state: State) -> list[int]:
    return [reply.cached for reply in state.replies]


def test_the_tiny_model_says_the_same_in_every_state(tiny_model: Path, test_data: Path) -> None:
    go_through_all_states(tiny_model, test_data, tokens=160, new_tokens=8)


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_real_model_says_the_same_in_every_state(real_model: Path, test_data: Path) -> None:
    go_through_all_states(real_model, test_data, tokens=80, new_tokens=4)


def test_a_difference_is_seen() -> None:
    cold = [Reply([1, 2], 0, 0), Reply([3, 4], 0, 0)]
    assert differences(cold, [replace(cold[0], cached=7), Reply([3, 5], 0, 0)]) == [1]


def test_fewer_histories_than_are_asked_for_are_told_of(tiny_model: Path, test_data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    with pytest.raises(ValueError, match="and 500 are asked for"):
        read_histories(test_data / "histories.jsonl", tokenizer, 500, 100)
