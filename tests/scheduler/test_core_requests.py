"""The life of a request in the scheduler's core: from its first token to whatever ends it."""

from __future__ import annotations

import pytest

from scheduler.request import IllegalTransition, Request, Status
from tests.scheduler.bench import Bench, prompt_of
from tests.scheduler.oracle import generate, message


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_lone_request_gets_its_tokens(page_size: int, overlap: bool) -> None:
    bench = Bench(page_size=page_size, overlap=overlap)
    bench.send("a", prompt_of(21), 9)
    bench.run()
    assert bench.streams["a"].ids == generate(prompt_of(21), 9)
    assert bench.streams["a"].reason == "length"
    bench.assert_whole()


def test_eos_and_stop_ids_end_a_request_and_are_marked() -> None:
    output = generate(prompt_of(6), 30)
    stop = output[10]
    expected = output[: output.index(stop) + 1]
    for fields in ({"eos": frozenset({stop})}, {}):
        bench = Bench(**fields)  # type: ignore[arg-type]
        bench.send("a", prompt_of(6), 30, stop_ids=() if fields else (stop,))
        bench.run()
        last = bench.streams["a"].deltas[-1]
        assert bench.streams["a"].ids == expected
        assert last.trailing_stop
        assert last.finish is not None
        assert last.finish.matched == stop
        bench.assert_whole()


def test_an_abort_in_every_state_ends_once_and_frees_everything() -> None:
    for steps in range(12):
        for overlap in (True, False):
            bench = Bench(step_tokens=8, overlap=overlap)
            bench.send("a", prompt_of(30), 20)
            bench.send("b", prompt_of(30, 300), 5)
            for _ in range(steps):
                bench.step()
            bench.abort("a")
            bench.core.check()
            bench.run()
            assert bench.streams["a"].ends == 1
            assert bench.streams["a"].reason == "abort"
            assert bench.streams["b"].ids == generate(prompt_of(30, 300), 5)
            bench.assert_whole()


def test_aborts_match_exactly_and_may_overtake_their_request() -> None:
    bench = Bench()
    bench.abort("1")
    bench.send("10", prompt_of(5), 3)
    bench.send("1", prompt_of(5), 3)
    bench.run()
    assert bench.streams["10"].reason == "length"
    assert bench.streams["1"].reason == "abort"
    aborts = bench.core.totals.aborts
    bench.abort("10")
    assert bench.core.totals.aborts == aborts, "after the end an abort is nothing"
    bench.assert_whole()


def test_pages_of_an_aborted_request_are_not_reused_while_a_step_still_writes_them() -> None:
    canary = prompt_of(20, 500)
    for after in range(1, 8):
        bench = Bench(pages=10, page_size=4, context=60)
        bench.send("a", prompt_of(20), 15)
        for _ in range(after):
            bench.step()
        bench.abort("a")
        bench.send("c", canary, 12)
        bench.run()
        assert bench.streams["c"].ids == generate(canary, 12)
        bench.assert_whole()


def test_a_found_stop_string_keeps_nothing_beyond_it() -> None:
    bench = Bench(page_size=1, pages=100)
    bench.send("a", prompt_of(10), 30)
    while len(bench.streams["a"].ids) < 8:
        bench.step()
    bench.stop_found("a", 5)
    bench.run()
    assert bench.streams["a"].ends == 0, "the detokenizer has told the client"
    output = bench.streams["a"].ids
    bench.send("b", [*prompt_of(10), *output, 1], 1)
    bench.run()
    assert bench.streams["b"].cached_tokens == 15
    bench.assert_whole()


def test_a_failed_row_fails_alone_and_a_failed_step_fails_exactly_its_requests() -> None:
    bench = Bench()
    bench.oracle.fail_rows = lambda plan: {0: "logits are not finite"} if plan.step == 3 else {}
    bench.send("a", prompt_of(5), 10)
    bench.send("b", prompt_of(5, 200), 10)
    bench.run()
    assert bench.streams["a"].reason == "error"
    assert bench.streams["b"].ids == generate(prompt_of(5, 200), 10)
    bench.assert_whole()
    bench.send("c", prompt_of(5, 300), 10)
    plan = bench.core.plan(bench.now)
    assert plan is not None
    bench.send("d", prompt_of(5, 400), 3)
    bench.core.commit_failure(plan.step, "boom")
    bench.run()
    assert bench.streams["c"].reason == "error"
    assert bench.streams["d"].reason == "length"


@pytest.mark.parametrize("start", [0, 1, 7, 15, 16])
@pytest.mark.parametrize("step_tokens", [3, 32])
def test_prompt_logprobs_come_once_for_every_token_asked_for(start: int, step_tokens: int) -> None:
    bench = Bench(step_tokens=step_tokens)
    prompt = prompt_of(17)
    for rid in ("cold", "warm"):
        bench.send(rid, prompt, 2, prompt_logprobs_from=start, logprobs=0)
        bench.run()
        entries = bench.streams[rid].deltas[0].prompt_logprobs
        assert [entry.id for entry in entries] == prompt[start:]
        expected = [None if position == 0 else -float(prompt[position]) for position in range(start, 17)]
        assert [entry.logprob for entry in entries] == expected
        tokens = [entry.id for delta in bench.streams[rid].deltas for entry in delta.logprobs]
        assert tokens == generate(prompt, 2)
    assert bench.streams["warm"].cached_tokens == max(0, start - 1)


def test_no_new_tokens_computes_the_prompt_and_samples_nothing() -> None:
    bench = Bench()
    bench.send("a", prompt_of(20), 0)
    bench.run()
    assert bench.streams["a"].ids == []
    assert bench.streams["a"].reason == "length"
    bench.send("b", prompt_of(20), 1)
    bench.run()
    assert bench.streams["b"].cached_tokens == 19
    assert bench.streams["b"].ids == generate(prompt_of(20), 1)


def test_the_life_cycle_refuses_edges_it_does_not_have() -> None:
    request = Request(message("a", [1], 1), 0.0, 0, 1, frozenset())
    with pytest.raises(IllegalTransition):
        request.move_to(Status.DECODING)
    assert request.status is Status.WAITING
    request.move_to(Status.CANCELLED)
    for status in Status:
        with pytest.raises(IllegalTransition):
            request.move_to(status)


def test_a_timeout_ends_a_request_in_every_state_with_what_it_has() -> None:
    bench = Bench(rows=1)
    bench.send("runs", prompt_of(8), 100, timeout=0.2)
    bench.send("waits", prompt_of(8, 300), 5, timeout=0.1)
    bench.send("done", prompt_of(8, 500), 1, timeout=50)
    bench.run()
    ended = bench.streams["runs"].deltas[-1].finish
    assert ended is not None
    assert ended.reason == "abort"
    assert "0.2 s" in (ended.message or "")
    assert 0 < len(bench.streams["runs"].ids) < 100
    assert bench.rejected["waits"].status == 504
    assert bench.streams["done"].reason == "length"
    bench.now += 100
    bench.step()
    bench.assert_whole()
