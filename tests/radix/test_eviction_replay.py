"""The replay of traces: the optimum is one, and the figures of the trace's description come out again."""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.block_traces import BlockRequest, BlockTrace, load
from benchmarks.offline_optimum import infinite_hits, next_uses, optimal_hits
from benchmarks.trace_replay import replay

paths = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=2, max_size=7)


def trace_of(runs: list[list[int]]) -> BlockTrace:
    """Blocks named by their whole path, one token each."""
    requests = []
    for run in runs:
        blocks = array("i", (int("1" + "".join(map(str, run[: end + 1])), 2) for end in range(len(run))))
        requests.append(BlockRequest(blocks, len(blocks), 1, None, None, 0.0))
    return BlockTrace("made up", 1, requests)


def best_by_trial(trace: BlockTrace, capacity: int) -> int:
    """Try everything that could be kept after each request, beginnings of paths only."""
    requests = [tuple(request.blocks) for request in trace.requests]

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(requests):
            return 0
        path = requests[number]
        hits = sum(block in held for block in path)
        if len(path) > capacity:
            return hits + best(number + 1, held)
        return hits + max(best(number + 1, kept) for kept in choices(held - set(path), capacity - len(path), path))

    def choices(others: frozenset[int], room: int, path: tuple[int, ...]) -> set[frozenset[int]]:
        found = {others}
        while any(len(kept) > room for kept in found):
            found = {
                kept if len(kept) <= room else kept - {leaf}
                for kept in found
                for leaf in kept
                if len(kept) <= room or not any(block >> 1 == leaf for block in kept)
            } | {kept for kept in found if len(kept) <= room}
        return {kept | set(path) for kept in found}

    return best(0, frozenset())


@settings(max_examples=150, deadline=None)
@given(runs=paths, capacity=st.integers(2, 8))
def test_no_choice_of_what_to_keep_hits_more_than_the_optimum(runs: list[list[int]], capacity: int) -> None:
    trace = trace_of(runs)
    found, best = optimal_hits(trace, next_uses(trace), capacity), best_by_trial(trace, capacity)
    assert found <= best
    if all(len(run) <= capacity for run in runs):
        assert found == best


def test_requests_that_do_not_fit_may_hide_the_optimum() -> None:
    trace = trace_of([[0], [1, 0], [1, 1], [0], [1, 0, 0, 0], [1, 0]])
    assert (optimal_hits(trace, next_uses(trace), 3), best_by_trial(trace, 3)) == (4, 5)


@settings(max_examples=100, deadline=None)
@given(runs=paths, capacity=st.integers(4, 12), policy=st.sampled_from(["lru", "lfu", "adaptive"]))
def test_no_policy_hits_more_than_the_optimum_and_a_large_cache_hits_all(
    runs: list[list[int]], capacity: int, policy: str
) -> None:
    trace = trace_of(runs)
    assert replay(trace, capacity, policy) * trace.tokens <= optimal_hits(trace, next_uses(trace), capacity) + 1e-6
    assert replay(trace, 100, policy) * trace.tokens == pytest.approx(infinite_hits(trace))


def test_known_hit_rates_come_out_again(shared_data: Path | None) -> None:
    # Two paths of two blocks under one head, in a cache of five blocks: by hand.
    trace = trace_of([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1, 0]])
    assert replay(trace, 5, "lru") * 12 == pytest.approx(7)
    assert replay(trace, 3, "lru") * 12 == pytest.approx(3)
    published = (("mooncake_conversation", 10000, 0.2142), ("mooncake_synthetic", 5000, 0.1569))
    for name, capacity, rate in published if shared_data is not None else ():
        assert shared_data is not None
        assert replay(load(shared_data / "traces", name), capacity, "lru") == pytest.approx(rate, abs=5e-5)
