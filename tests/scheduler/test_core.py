"""The scheduler's core, one behaviour at a time."""

from __future__ import annotations

import pytest

from scheduler.policy import POLICIES
from scheduler.request import IllegalTransition, Request, Status
from srt.cache_messages import CacheReport
from srt.messages import pack_ids, unpack_ids
from srt.plan import Plan
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate, message


def prompt_of(length: int, first: int = 100) -> list[int]:
    """Distinct tokens."""
    return list(range(first, first + length))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_lone_request_gets_its_tokens(page_size: int, overlap: bool) -> None:
    bench = Bench(page_size=page_size, overlap=overlap)
    bench.send("a", prompt_of(21), 9)
    bench.run()
    assert bench.streams["a"].ids == generate(prompt_of(21), 9)
    assert bench.streams["a"].reason == "length"
    bench.assert_whole()


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


def test_decode_rows_come_first_and_a_long_prompt_is_cut_into_chunks() -> None:
    bench = Bench(pages=200, step_tokens=16, context=400)
    bench.send("chat", prompt_of(8), 40)
    for _ in range(4):
        bench.step()
    bench.send("long", prompt_of(150, 1000), 2)
    before = len(bench.oracle.plans)
    bench.run()
    chunked = [plan for plan in bench.oracle.plans[before:] if plan.num_tokens > 2]
    assert len(chunked) >= 150 // 15
    for plan in chunked[:-1]:
        assert plan.qo_indptr[1] == 1, "the stream's row is there, and first"
    assert bench.streams["long"].ids == generate(prompt_of(150, 1000), 2)


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


def test_a_cold_request_is_not_starved_by_warm_ones() -> None:
    bench = Bench(pages=200, page_size=4, rows=2, context=400)
    head = prompt_of(100)
    bench.send("warm", head, 1)
    bench.run()
    bench.send("cold", prompt_of(40, 5000), 1)
    for index in range(400):
        bench.send(f"w{index}", [*head, index + 1], 2)
        bench.step()
        if bench.streams["cold"].ends:
            break
    # 100 tokens of a head weigh less than half a second of waiting, which is 50 steps of this clock.
    assert index < 60
    bench.run()


def test_fcfs_admits_in_order_of_arrival_and_priority_counts() -> None:
    bench = Bench(policy="fcfs", rows=1)
    for index in range(4):
        bench.send(f"r{index}", prompt_of(8, 100 * index + 100), 2)
    bench.send("urgent", prompt_of(8, 900), 2, priority=1)
    bench.run()
    assert list(bench.streams) == ["urgent", "r0", "r1", "r2", "r3"]


def test_lpm_serves_what_is_cached_before_what_is_not() -> None:
    bench = Bench(pages=200, rows=1, context=400)
    bench.send("a", prompt_of(60), 1)
    bench.run()
    bench.send("cold", prompt_of(60, 900), 1)
    bench.send("warm", [*prompt_of(60), 1], 1)
    bench.run()
    order = list(bench.streams)
    assert order.index("warm") < order.index("cold")


def test_a_full_queue_refuses_with_429() -> None:
    bench = Bench(rows=1, max_queued=2)
    for index in range(5):
        bench.send(f"r{index}", prompt_of(5), 2)
    bench.run()
    assert len(bench.rejected) == 3
    assert {rejection.status for rejection in bench.rejected.values()} == {429}
    assert len(bench.streams) == 2


def test_the_life_cycle_refuses_edges_it_does_not_have() -> None:
    request = Request(message("a", [1], 1), 0.0, 0, 1, frozenset())
    with pytest.raises(IllegalTransition):
        request.move_to(Status.DECODING)
    assert request.status is Status.WAITING
    request.move_to(Status.CANCELLED)
    for status in Status:
        with pytest.raises(IllegalTransition):
            request.move_to(status)


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


def test_priority_goes_first_but_only_for_so_long() -> None:
    bench = Bench(policy="priority", rows=1)
    bench.send("running", prompt_of(8), 2)
    bench.step()
    bench.send("old", prompt_of(8, 200), 2)
    bench.now += 61
    bench.send("late and urgent", prompt_of(8, 300), 2, priority=1)
    bench.now += 30
    bench.send("low", prompt_of(8, 400), 2)
    bench.send("high", prompt_of(8, 500), 2, priority=1)
    bench.run()
    assert list(bench.streams) == ["running", "old", "late and urgent", "high", "low"]


def test_deadline_serves_the_least_slack_first() -> None:
    bench = Bench(policy="deadline", rows=1, pages=200, context=400)
    bench.send("running", prompt_of(8), 2)
    bench.step()
    bench.send("relaxed", prompt_of(8, 200), 2, ttft_target=5.0)
    bench.send("default", prompt_of(8, 300), 2)
    bench.send("tight", prompt_of(8, 400), 2, ttft_target=0.2)
    bench.send("tight and long", prompt_of(350, 1000), 2, ttft_target=0.2)
    bench.run()
    assert list(bench.streams) == ["running", "tight and long", "tight", "relaxed", "default"]


def test_deadline_lets_the_longest_match_go_first_among_those_whose_slack_is_alike() -> None:
    bench = Bench(policy="deadline", rows=1, pages=400, context=400)
    head = prompt_of(200, 5000)
    bench.send("warm-up", head, 1)
    bench.run()
    bench.now = 10.0
    bench.send("running", prompt_of(8), 2)
    bench.step()
    bench.send("cold", prompt_of(200, 1000), 2, ttft_target=3.0)
    bench.send("warm", [*head[:100], *prompt_of(100, 2000)], 2, ttft_target=3.0)
    bench.send("hot", [*head, 1], 2, ttft_target=3.0)
    bench.send("urgent", prompt_of(200, 3000), 2, ttft_target=1.0)
    bench.run()
    assert list(bench.streams) == ["warm-up", "running", "urgent", "hot", "warm", "cold"]


def test_dfs_weight_walks_the_heaviest_branch_first_and_keeps_prefixes_together() -> None:
    bench = Bench(policy="dfs-weight", rows=1, pages=200, context=400)
    bench.send("running", prompt_of(8), 2)
    bench.step()
    a, b = prompt_of(40, 1000), prompt_of(40, 2000)
    for index in range(3):
        bench.send(f"b{index}", [*b, index + 1], 2)
        bench.send(f"a{index}", [*a, index + 1], 2)
    bench.send("a3", [*a, 9], 2)
    bench.send("lone", prompt_of(40, 3000), 2)
    bench.run()
    assert list(bench.streams) == ["running", "a0", "a1", "a2", "a3", "b0", "b1", "b2", "lone"]


def test_dfs_weight_lets_nobody_wait_beyond_its_patience() -> None:
    bench = Bench(policy="dfs-weight", rows=1, pages=200, context=400)
    bench.send("running", prompt_of(8), 2)
    bench.step()
    bench.send("lone", prompt_of(40, 3000), 2)
    bench.now += 11
    for index in range(4):
        bench.send(f"a{index}", [*prompt_of(40, 1000), index + 1], 2)
    bench.run()
    assert list(bench.streams)[1] == "lone"


def test_fair_serves_tenants_alike_whoever_sends_more() -> None:
    bench = Bench(policy="fair", rows=2, pages=400, context=400)
    for index in range(40):
        bench.send(f"heavy{index}", prompt_of(20, 100 * index + 100), 5, tenant="heavy")
    for index in range(10):
        bench.send(f"light{index}", prompt_of(20, 100 * index + 10_000), 5, tenant="light")
    bench.run()
    order = list(bench.streams)
    # Both get a turn each time until the light tenant has nothing left.
    assert sum(rid.startswith("light") for rid in order[:20]) >= 9


def test_fair_charges_a_prefix_hit_only_for_what_was_computed() -> None:
    bench = Bench(policy="fair", rows=1, pages=400, context=400)
    head = prompt_of(100, 5000)
    bench.send("warmup", head, 1, tenant="hits")
    bench.send("other", prompt_of(100, 7000), 1, tenant="misses")
    bench.run()
    for index in range(10):
        bench.send(f"miss{index}", prompt_of(100, 200 * index + 10_000), 1, tenant="misses")
        bench.send(f"hit{index}", [*head, index + 1], 1, tenant="hits")
    bench.run()
    order = [rid for rid in bench.streams if rid.startswith(("hit", "miss"))]
    assert sum(rid.startswith("hit") for rid in order[:11]) == 10


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


def report_of(bench: Bench, rid: str) -> CacheReport:
    opened = bench.streams[rid].deltas[0].open
    assert opened is not None
    assert opened.cache_report is not None
    return opened.cache_report


def test_every_first_output_says_why_reuse_stopped() -> None:
    bench = Bench(pages=32, page_size=4, rows=1, context=300)
    a = prompt_of(40, 1000)

    def ask(rid: str, prompt: list[int], **changes: object) -> CacheReport:
        bench.send(rid, prompt, 1, **changes)
        bench.run()
        report = report_of(bench, rid)
        assert report.cached_tokens == bench.streams[rid].cached_tokens
        assert report.cached_tokens + report.computed_tokens == len(prompt)
        return report

    assert ask("first", a).reason == "first_seen"
    assert ask("again", a).reason == "all_cached"
    assert ask("longer", [*a, 1, 2, 3, 4]).reason == "extended"
    diverged = ask("other", [*a[:21], 5, 6, 7])
    assert (diverged.reason, diverged.position) == ("diverged", 21)
    assert unpack_ids(diverged.cached_next) == a[21:29]
    assert unpack_ids(diverged.prompt_next) == [5, 6, 7]
    assert unpack_ids(diverged.before) == a[13:21]
    assert ask("logprobs", a, prompt_logprobs_from=11).reason == "logprobs"
    assert ask("bypass", a, use_cache=False).reason == "bypassed"
    assert ask("salted", a, namespace="me\x1fsalt").reason == "first_seen"
    assert ask("salted otherwise", a, namespace="me\x1fpepper").reason == "other_namespace"
    ask("big", prompt_of(120, 5000))
    evicted = ask("evicted", a)
    assert evicted.reason == "evicted"
    assert "request" in evicted.detail
    assert evicted.evicted_seconds_ago is not None
    assert evicted.evicted_seconds_ago >= 0


def test_reports_name_the_message_in_which_reuse_stopped() -> None:
    bench = Bench(pages=64, page_size=4, rows=1, context=300)
    prompt = prompt_of(40, 1000)
    bench.send("first", prompt, 1)
    bench.run()
    starts = pack_ids([0, 10, 25, 36])
    for rid, kept, where in (
        ("a", 0, ("messages[0]", 0)),
        ("b", 9, ("messages[0]", 9)),
        ("c", 10, ("messages[1]", 0)),
        ("d", 35, ("messages[2]", 10)),
        ("e", 36, ("generation_prompt", 0)),
    ):
        bench.send(rid, [*prompt[:kept], *prompt_of(10, 7 + kept)], 1, message_starts=starts)
        bench.run()
        report = report_of(bench, rid)
        assert report.position == kept
        assert (report.message, report.message_offset) == where
    bench.send("no chat", prompt_of(10, 3000), 1)
    bench.run()
    assert report_of(bench, "no chat").message == ""


def test_reports_tell_no_tenant_of_another() -> None:
    bench = Bench(pages=64)
    bench.send("a", prompt_of(40), 1, namespace="alice")
    bench.run()
    bench.send("b", prompt_of(40), 1, namespace="bob")
    bench.run()
    assert report_of(bench, "b").reason == "first_seen"
    assert report_of(bench, "b").cached_next == b""


def test_a_full_queue_lets_the_least_urgent_and_newest_give_way() -> None:
    bench = Bench(rows=1, max_queued=2)
    bench.send("running", prompt_of(5), 3)
    bench.step()
    bench.send("old", prompt_of(5, 200), 2)
    bench.send("new", prompt_of(5, 300), 2)
    bench.send("urgent", prompt_of(5, 400), 2, priority=1)
    assert bench.rejected["new"].code == "shed"
    bench.send("as old", prompt_of(5, 500), 2)
    assert bench.rejected["as old"].code == "queue_full"
    bench.run()
    assert list(bench.streams) == ["running", "urgent", "old"]
    bench.assert_whole()


def test_a_tenant_may_fill_only_its_share_of_the_queue() -> None:
    bench = Bench(rows=1, max_queued_per_tenant=2)
    for index in range(4):
        bench.send(f"a{index}", prompt_of(5), 2, tenant="a")
    bench.send("b", prompt_of(5), 2, tenant="b")
    bench.run()
    assert sorted(bench.rejected) == ["a2", "a3"]
    assert "2 may" in bench.rejected["a2"].message
    bench.send("a4", prompt_of(5), 2, tenant="a")
    bench.run()
    assert bench.streams["a4"].reason == "length"


def test_who_waits_beyond_the_queue_timeout_is_refused_but_not_who_was_admitted_once() -> None:
    bench = Bench(rows=1, queue_timeout=5.0)
    bench.send("running", prompt_of(5), 50)
    bench.step()
    bench.send("waits", prompt_of(5, 200), 2)
    bench.step()
    bench.now += 4
    bench.send("later", prompt_of(5, 300), 2)
    bench.now += 2
    bench.step()
    assert bench.rejected["waits"].status == 503
    assert "queue timeout is 5 s" in bench.rejected["waits"].message
    bench.run()
    assert bench.streams["later"].reason == "length"
    bench.assert_whole()


def test_prefill_leaves_room_for_the_pace_of_running_streams() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.010

    def seconds(plan: Plan) -> float:
        return 0.004 + 0.0001 * plan.num_tokens

    bench.oracle.seconds = seconds
    bench.send("stream", prompt_of(8), 300)
    bench.send("warm-up", prompt_of(100, 500), 20)
    for _ in range(20):
        bench.step()
    before = len(bench.oracle.plans)
    bench.send("long", prompt_of(600, 2000), 2)
    bench.run()
    mixed = [plan for plan in bench.oracle.plans[before:] if plan.num_tokens > plan.num_rows]
    assert max(seconds(plan) for plan in mixed) < 0.0115
    assert 10 <= len(mixed) <= 20, "the target is used up, not undercut"


def test_without_a_stream_to_protect_prefill_takes_the_whole_step() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.001
    bench.send("warm-up", prompt_of(10, 500), 20)
    bench.run()
    bench.send("long", prompt_of(600, 2000), 2)
    before = len(bench.oracle.plans)
    bench.run()
    assert [plan.num_tokens for plan in bench.oracle.plans[before:]][:4] == [128] * 4


def test_a_pace_that_cannot_be_held_still_lets_prompts_advance() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.0001
    bench.send("stream", prompt_of(8), 200)
    for _ in range(12):
        bench.step()
    bench.send("long", prompt_of(300, 2000), 2)
    bench.run()
    assert bench.streams["long"].reason == "length"


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


def test_every_policy_states_by_how_much_a_request_may_be_overtaken() -> None:
    bounds = {name: make().overtake_seconds(8192) for name, make in POLICIES.items()}
    assert bounds == {"lpm": 32.0, "fcfs": 0.0, "priority": 0.0, "deadline": 8.692, "dfs-weight": 10.0, "fair": 32.0}


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "priority", "deadline", "fair"])
def test_nobody_who_comes_later_than_the_bound_gets_ahead(policy: str) -> None:
    head = prompt_of(150)
    bench = Bench(policy=policy, rows=1, pages=200, context=256)
    bench.send("warm-up", head, 1)
    bench.run()
    bench.send("running", prompt_of(8, 900), 3)
    bench.step()
    bench.send("cold", prompt_of(100, 5000), 1)
    bench.now += POLICIES[policy]().overtake_seconds(256) + 0.001
    for index in range(5):
        bench.send(f"late{index}", [*head, index + 1], 1)
    bench.run()
    order = [rid for rid in bench.streams if rid == "cold" or rid.startswith("late")]
    assert order[0] == "cold"
