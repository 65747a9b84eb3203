"""The scheduler's core where pages are short: what fits, what ends, and who has to give way and comes back."""

from __future__ import annotations

import pytest

from tests.scheduler.bench import Bench, prompt_of
from tests.scheduler.oracle import generate


def test_a_full_pool_retracts_and_nothing_is_lost() -> None:
    for overlap in (True, False):
        bench = Bench(pages=24, page_size=4, rows=6, context=90, overlap=overlap)
        bench.core.growth.mean_tokens = 1.0
        for index in range(6):
            bench.send(f"r{index}", prompt_of(10, 100 * (index + 1)), 50)
        bench.run()
        assert bench.core.totals.retractions > 0
        for index in range(6):
            assert bench.streams[f"r{index}"].ids == generate(prompt_of(10, 100 * (index + 1)), 50)
        bench.assert_whole()


def test_ten_requests_of_nearly_the_pools_size_all_finish() -> None:
    bench = Bench(pages=15, page_size=4, rows=10, context=60)
    for index in range(10):
        bench.send(f"r{index}", prompt_of(25, 100 * (index + 1)), 24)
    bench.run()
    assert {stream.reason for stream in bench.streams.values()} == {"length"}
    bench.assert_whole()


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    bench = Bench(pages=10, page_size=4, context=500)
    bench.send("long", prompt_of(41))
    assert "41 tokens" in bench.rejected["long"].message
    assert "room for 40" in bench.rejected["long"].message
    bench = Bench(pages=100, page_size=4, context=50)
    bench.send("long", prompt_of(50))
    assert bench.rejected["long"].code == "context_length_exceeded"
    assert "50 tokens" in bench.rejected["long"].message
    assert "room for 49" in bench.rejected["long"].message
    bench.send("empty", [])
    assert bench.rejected["empty"].code == "empty_prompt"


@pytest.mark.parametrize("prompt_tokens", [1, 20, 37, 38, 39, 40])
def test_output_ends_by_length_at_the_wall_of_the_pool(prompt_tokens: int) -> None:
    bench = Bench(pages=10, page_size=4, context=500)
    bench.send("a", prompt_of(prompt_tokens), 300)
    bench.run()
    # The last sampled token needs no slot.
    assert bench.streams["a"].ids == generate(prompt_of(prompt_tokens), 41 - prompt_tokens)
    assert bench.streams["a"].reason == "length"
    bench.assert_whole()


def test_a_conversation_that_fills_the_pool_can_go_on() -> None:
    bench = Bench(pages=16, page_size=4, context=500)
    bench.send("a", prompt_of(30), 20)
    bench.run()
    history = [*prompt_of(30), *bench.streams["a"].ids, 1]
    bench.send("b", history, 500)
    bench.run()
    assert bench.streams["b"].ids == generate(history, 65 - len(history))
    bench.assert_whole()


def test_five_thousand_prompts_leave_no_trace_beyond_the_pool() -> None:
    bench = Bench(pages=100, page_size=16, rows=8, step_tokens=200, context=100)
    for index in range(0, 5000, 8):
        for offset in range(8):
            bench.send(f"r{index + offset}", prompt_of(20, 20 * (index + offset)), 1)
        while bench.step():
            pass
        bench.streams.clear()
        bench.oracle.plans.clear()
    assert bench.tree.num_nodes <= bench.pool.num_pages + 1
    bench.core.check()
    bench.assert_whole()


@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("swap_pages", [0, 5, 200])
@pytest.mark.parametrize("use_cache", [True, False])
def test_preempted_requests_come_back_with_the_same_ids(preemption: str, swap_pages: int, use_cache: bool) -> None:
    bench = Bench(
        pages=24, page_size=4, rows=6, context=90, preemption=preemption, swap_pages=swap_pages, use_cache=use_cache
    )  # type: ignore[arg-type]
    bench.core.growth.mean_tokens = 1.0
    for index in range(6):
        bench.send(f"r{index}", prompt_of(10, 100 * (index + 1)), 50)
    bench.run()
    assert bench.core.totals.retractions > 0
    assert (bench.core.totals.swaps > 0) == (swap_pages > 0 and preemption != "recompute")
    for index in range(6):
        assert bench.streams[f"r{index}"].ids == generate(prompt_of(10, 100 * (index + 1)), 50)
    if bench.swap is not None:
        assert bench.swap.used_pages == 0
    bench.assert_whole()


def test_what_was_swapped_is_not_computed_again() -> None:
    computed = {}
    for preemption in ("recompute", "swap"):
        # Without the cache a retracted request would start from nothing.
        bench = Bench(pages=24, page_size=4, rows=6, context=90, preemption=preemption, swap_pages=200, use_cache=False)  # type: ignore[arg-type]
        bench.core.growth.mean_tokens = 1.0
        for index in range(6):
            bench.send(f"r{index}", prompt_of(10, 100 * (index + 1)), 50)
        bench.run()
        computed[preemption] = bench.core.totals.computed_tokens
    # Prompt and outputs of six requests, but for the last token of each and one wasted row at most.
    assert computed["swap"] <= 6 * 60
    assert computed["recompute"] > computed["swap"]


def test_a_request_can_be_preempted_at_every_step_of_its_life_without_a_trace_in_its_output() -> None:
    for preemption in ("recompute", "swap"):
        for at in range(1, 24):
            bench = Bench(pages=64, page_size=4, step_tokens=8, preemption=preemption, swap_pages=64)  # type: ignore[arg-type]
            bench.send("a", prompt_of(30), 15, prompt_logprobs_from=3, logprobs=0)
            for _ in range(at):
                bench.step()
            while bench._flight:
                bench.commit_oldest()
            request = bench.core._requests.get("a")
            if request is None:
                break
            bench.core._running.retract(request)
            bench.core.check()
            bench.run()
            stream = bench.streams["a"]
            assert stream.ids == generate(prompt_of(30), 15)
            assert [entry.id for delta in stream.deltas for entry in delta.logprobs] == stream.ids
            assert [entry.id for entry in stream.deltas[0].prompt_logprobs] == prompt_of(30)[3:]
            bench.assert_whole()
        assert at > 15
