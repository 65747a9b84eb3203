"""What the policies promise, seen in the simulator: the order that reuses most, and bounds on waiting."""

from __future__ import annotations

import random

import pytest

from benchmarks.policies import HEAD_TOKENS, HEADS, bound_seconds, few_shot, overtaking, run_order

# While a request waits for a prefix that another one computes, others pass: two chunks of 512 tokens at most per 0.1 s.
PASSING_SECONDS = 1.0


def hits(policy: str, each: int) -> float:
    """Hit tokens of interleaved heads, as a share of those of the depth-first order."""
    requests = [few_shot(number, number % HEADS, 0.0) for number in range(HEADS * each)]
    run = run_order(requests, policy)
    assert all(call.served for call in run.clients.calls)
    return sum(call.cached_tokens for call in run.clients.calls) / ((len(requests) - HEADS) * HEAD_TOKENS)


def test_longest_prefix_match_finds_the_depth_first_order_and_arrival_order_thrashes() -> None:
    assert hits("lpm", each=12) >= 0.98
    assert hits("fcfs", each=12) < 0.1


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority", "deadline", "dfs-weight"])
def test_nobody_is_overtaken_by_one_that_came_later_than_the_policy_allows(policy: str) -> None:
    rng = random.Random(5)
    moment = 0.0
    stream = []
    for number in range(250):
        moment += rng.expovariate(18.0)
        stream.append(few_shot(number, None if number % 20 == 19 else rng.randrange(HEADS), moment))
    run = run_order(stream, policy)
    bound = bound_seconds(policy)
    assert bound is not None
    assert run.totals.retractions == 0
    assert overtaking(run.clients.calls) <= bound + PASSING_SECONDS
    assert all(call.served for call in run.clients.calls)
