"""What the scheduler's core computes once and uses again."""

from __future__ import annotations

from tests.scheduler.bench import Bench, prompt_of
from tests.scheduler.oracle import generate


def test_a_second_call_reuses_all_but_the_last_prompt_token() -> None:
    for page_size in (1, 4, 16):
        for length in (15, 16, 17, 33):
            bench = Bench(page_size=page_size)
            bench.send("a", prompt_of(length), 5)
            bench.run()
            bench.send("b", prompt_of(length), 5)
            bench.run()
            assert bench.streams["a"].cached_tokens == 0
            assert bench.streams["b"].cached_tokens == length - 1
            assert bench.streams["b"].ids == bench.streams["a"].ids
            bench.assert_whole()


def test_the_next_turn_reuses_prompt_and_answer_but_the_last_sampled_token() -> None:
    bench = Bench(page_size=16)
    bench.send("a", prompt_of(40), 9)
    bench.run()
    history = [*prompt_of(40), *bench.streams["a"].ids]
    bench.send("b", [*history, 1, 2, 3], 4)
    bench.run()
    # The token sampled last was never computed, so it has no KV.
    assert bench.streams["b"].cached_tokens == len(history) - 1
    assert bench.streams["b"].ids == generate([*history, 1, 2, 3], 4)
    bench.assert_whole()


def test_reuse_is_exact_to_the_token_at_every_offset_inside_a_page() -> None:
    for shared in range(1, 34):
        bench = Bench(page_size=16)
        bench.send("a", prompt_of(40), 3)
        bench.run()
        other = [*prompt_of(40)[:shared], *range(1, 20)]
        bench.send("b", other, 3)
        bench.run()
        assert bench.streams["b"].cached_tokens == shared
        assert bench.streams["b"].ids == generate(other, 3)
        bench.assert_whole()


def test_requests_that_share_an_uncomputed_prefix_compute_it_once() -> None:
    bench = Bench(pages=200, page_size=4, rows=8, step_tokens=32, context=400)
    head = prompt_of(100)
    for index in range(8):
        bench.send(f"r{index}", [*head, index + 1], 3)
    bench.run()
    cached = sorted(bench.streams[f"r{index}"].cached_tokens for index in range(8))
    assert cached == [0] + [100] * 7
    computed = sum(plan.num_tokens for plan in bench.oracle.plans)
    assert computed < 101 + 8 * 8
    bench.assert_whole()


def test_namespaces_do_not_share_and_a_request_may_stay_out_of_the_cache() -> None:
    bench = Bench()
    bench.send("a", prompt_of(20), 3, namespace="one")
    bench.run()
    bench.send("b", prompt_of(20), 3, namespace="two")
    bench.send("c", prompt_of(20), 3, namespace="one")
    bench.send("d", prompt_of(20), 3, namespace="one", use_cache=False)
    bench.run()
    assert [bench.streams[rid].cached_tokens for rid in "abcd"] == [0, 0, 19, 0]
    bench.assert_whole()
    off = Bench(use_cache=False)
    for rid in "ab":
        off.send(rid, prompt_of(20), 3)
        off.run()
    assert off.streams["b"].cached_tokens == 0
    assert off.pool.num_free == off.pool.num_pages


def test_flush_is_refused_while_something_runs() -> None:
    bench = Bench()
    bench.send("a", prompt_of(9), 5)
    bench.step()
    assert not bench.core.flush()
    bench.run()
    assert bench.core.flush()
    bench.send("b", prompt_of(9), 1)
    bench.run()
    assert bench.streams["b"].cached_tokens == 0


def test_a_hint_follows_publication_and_eviction() -> None:
    bench = Bench(rows=1, pages=30, page_size=4, context=120)
    bench.send("long", prompt_of(100), 2)
    bench.step()
    bench.send("waits", [*prompt_of(50), 1, 2, 3], 2)
    request = next(iter(bench.core._waiting))
    hints = []
    while request.slot is None and not request.is_terminal:
        bench.step()
        hints.append(request.hint_tokens)
        bench.core.check()
    assert hints == sorted(hints)
    assert hints[-1] == 50
    bench.run()
    assert bench.streams["waits"].cached_tokens == 50
