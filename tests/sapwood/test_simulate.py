"""The simulator: times as computed by hand, the same figures every time, nothing lost under any policy."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.simulate.clients import Clients, Stalled
from sapwood.simulate.cost import Fitted, Scheduling
from sapwood.simulate.executor import Clock
from sapwood.simulate.report import Report, Targets, report
from sapwood.simulate.runner import Simulation, scheduler_config, simulate
from sapwood.simulate.trace import Space, Trace, TraceRequest, plain, prepare
from scheduler.policy import POLICIES

# Every step takes a second, whatever is in it.
SECOND = Fitted(tokens=[(1, 1.0)], pool_tokens=4096, context_length=1024)


def request(number: int, arrival: float = 0.0, prompt: int = 8, out: int = 3, **more: object) -> TraceRequest:
    """A request with a prompt of its own, whose limit is its length."""
    text, answer = plain(Space.PRIVATE, number, prompt), plain(Space.OUTPUT, number, out)
    made = TraceRequest(arrival, (text,), (answer,), max_new_tokens=out)
    return replace(made, **more)  # type: ignore[arg-type]


def run(requests: list[TraceRequest], profile: Fitted = SECOND, **knobs: int | float | str | bool | None) -> Simulation:
    return simulate(Trace("test", requests), profile, scheduler_config(profile, {"page_size": 4, **knobs}))


def same(one: Report, other: Report) -> bool:
    """Equal but for the real time they took."""
    return msgspec.structs.replace(one, wall=0.0, speed=0.0) == msgspec.structs.replace(other, wall=0.0, speed=0.0)


# ---- by hand -----------------------------------------------------------------------------------------------------


def test_a_lone_request_gets_a_token_at_the_end_of_each_step() -> None:
    (call,) = run([request(0)]).clients.calls
    assert (call.first, call.last, call.tokens) == (1.0, 3.0, 3)
    assert (call.time_to_first_token, call.time_per_token) == (1.0, 1.0)


def test_an_answer_that_ends_by_itself_takes_as_long_and_wastes_one_row_behind_it() -> None:
    known, unknown = run([request(0)]), run([request(0, max_new_tokens=None)])
    assert unknown.clients.calls[0] == replace(known.clients.calls[0], finish="stop")
    # The step in flight when the end was seen: planned at 2 s, before the token of that step was known.
    assert (known.executor.work.steps, unknown.executor.work.steps) == (3, 4)


def test_who_comes_while_a_step_runs_is_planned_behind_the_one_that_was_planned_already() -> None:
    # Steps 0 [0, 1] and 1 [1, 2] are planned at 0 s; at 1 s the newcomer is seen and gets into step 2 [2, 3].
    newcomer = run([request(0, out=9), request(1, arrival=0.5)]).clients.calls[1]
    assert newcomer.time_to_first_token == 2.5


def test_without_overlap_the_newcomer_is_in_the_very_next_step() -> None:
    newcomer = run([request(0, out=9), request(1, arrival=0.5)], overlap=False).clients.calls[1]
    assert newcomer.time_to_first_token == 1.5


def test_scheduling_is_hidden_behind_the_step_before_and_without_overlap_it_is_not() -> None:
    busy = msgspec.structs.replace(SECOND, scheduling=Scheduling(step=0.3, row=0.1))
    assert run([request(0)], busy).clients.calls[0].last == pytest.approx(0.4 + 3 * 1.0)
    assert run([request(0)], busy, overlap=False).clients.calls[0].last == pytest.approx(3 * (0.4 + 1.0))


def test_a_scheduler_that_is_slower_than_the_step_shows() -> None:
    # Plans take 2 s each: steps begin at 2, 4 and 6.
    slow = msgspec.structs.replace(SECOND, scheduling=Scheduling(step=2.0))
    assert run([request(0)], slow).clients.calls[0].last == pytest.approx(7.0)


def test_the_way_to_the_scheduler_and_back_is_counted() -> None:
    far = msgspec.structs.replace(SECOND, scheduling=Scheduling(request=0.25))
    call = run([request(0, arrival=5.0)], far).clients.calls[0]
    assert (call.sent, call.time_to_first_token) == (5.0, 1.25)


def test_a_long_prompt_is_computed_in_chunks() -> None:
    call = run([request(0, prompt=20)], max_step_tokens=8).clients.calls[0]
    assert call.time_to_first_token == 3.0


def test_a_full_batch_makes_others_wait_in_the_queue() -> None:
    calls = run([request(0), request(1)], max_running_requests=1).clients.calls
    # The first runs [0, 3]; its end is seen at 3 s, and then the second is admitted.
    assert (calls[1].waited, calls[1].time_to_first_token) == (3.0, 4.0)


def test_a_prompt_that_was_answered_before_is_cached_but_for_its_last_token() -> None:
    again = request(0, arrival=10.0)
    calls = run([request(0), again]).clients.calls
    assert [call.cached_tokens for call in calls] == [0, 7]


def test_a_later_turn_finds_the_answer_of_the_earlier_one_in_the_cache() -> None:
    first = request(0)
    turn = TraceRequest(2.0, (*first.prompt, *first.output, plain(Space.PRIVATE, 1, 5)), request(1).output, 3, after=0)
    calls = run([first, turn]).clients.calls
    assert calls[1].sent == calls[0].last + 2.0
    # Eight of the prompt and three of the answer, the last of which was never computed.
    assert calls[1].cached_tokens == 10


def test_nothing_is_cached_when_the_cache_is_off() -> None:
    calls = run([request(0), request(0, arrival=9.0)], disable_radix_cache=True).clients.calls
    assert [call.cached_tokens for call in calls] == [0, 0]


def test_what_is_refused_is_counted_and_those_after_it_are_sent_all_the_same() -> None:
    done = run([request(0, prompt=2000), request(1, after=0)])
    assert [call.finish for call in done.clients.calls] == ["context_length_exceeded", "length"]
    assert (report(done).served, report(done).refused) == (1, 1)


# ---- figures -----------------------------------------------------------------------------------------------------


def test_the_report_says_what_happened() -> None:
    figures = report(run([request(0), request(1, arrival=4.0, out=5)]), Targets(ttft=1.0, tpot=1.0))
    # The first runs [0, 3], the second [4, 9].
    assert (figures.seconds, figures.steps, figures.served) == (9.0, 8, 2)
    assert (figures.ttft.mean, figures.tpot.p99, figures.e2e.mean) == (1.0, 1.0, 4.0)
    assert figures.output_rate == 8 / 9
    assert figures.goodput == figures.request_rate == 2 / 9
    assert (figures.hit_rate, figures.retractions, figures.jain) == (0.0, 0, None)


def test_goodput_counts_only_those_that_met_both_targets() -> None:
    done = run([request(0), request(1), request(2, out=1)], max_running_requests=1)
    assert [call.time_to_first_token for call in done.clients.calls] == [1.0, 4.0, 7.0]
    assert report(done, Targets(ttft=4.0)).goodput == 2 / 7
    assert report(done, Targets(ttft=4.0, tpot=0.5)).goodput == 0.0


def test_a_pool_that_is_too_small_for_what_runs_shows_retractions() -> None:
    tight = msgspec.structs.replace(SECOND, pool_tokens=64)
    # Many short answers first: the scheduler learns from them, and then admits more long ones than there is room for.
    short = [request(n, prompt=4, out=2, max_new_tokens=None) for n in range(100)]
    long = [request(n, arrival=200.0, prompt=4, out=40, max_new_tokens=None) for n in range(100, 108)]
    figures = report(run(short + long, tight))
    assert figures.served == 108
    assert figures.retractions > 0
    assert figures.pool_used_most == 1.0


def test_tenants_served_alike_have_an_index_of_1_and_fcfs_gives_the_crowd_more() -> None:
    crowd = [request(n, prompt=60, out=4, tenant="crowd") for n in range(90)]
    few = [request(100 + n, arrival=0.01, prompt=60, out=4, tenant="few") for n in range(30)]
    quick = msgspec.structs.replace(SECOND, tokens=[(1, 0.5)])
    fair, unfair = (
        report(run(crowd + few, quick, max_running_requests=2, schedule_policy=policy)) for policy in ("fair", "fcfs")
    )
    assert fair.jain is not None
    assert unfair.jain is not None
    assert fair.jain > 0.99 > 0.6 > unfair.jain
    assert fair.service_difference is not None
    assert unfair.service_difference is not None
    # Two of the largest requests, as the policy states.
    assert fair.service_difference <= 2 * (60 + 2 * 4) < unfair.service_difference


# ---- always ------------------------------------------------------------------------------------------------------


def mix(seed: int, count: int = 60) -> list[TraceRequest]:
    """Heads that are shared, turns, tenants, answers of hidden length."""
    rng = random.Random(seed)
    made: list[TraceRequest] = []
    for number in range(count):
        prompt = (plain(Space.SHARED, rng.randrange(3), rng.randrange(1, 40)), plain(Space.PRIVATE, number, 6))
        after = rng.randrange(number) if number and rng.random() < 0.3 else None
        if after is not None:
            prompt = (*made[after].prompt[:1], prompt[1])
        made.append(
            TraceRequest(
                arrival=rng.random() * 20,
                prompt=prompt,
                output=(plain(Space.OUTPUT, number, rng.randrange(1, 20)),),
                after=after,
                tenant=f"t{rng.randrange(3)}",
                priority=rng.randrange(3),
            )
        )
    return made


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_two_runs_of_a_trace_are_equal(policy: str) -> None:
    one, two = (run(mix(7), schedule_policy=policy, max_running_requests=6) for _ in range(2))
    assert one.clients.calls == two.clients.calls
    assert same(report(one), report(two))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    policy=st.sampled_from(sorted(POLICIES)),
    pool=st.integers(80, 400),
    rows=st.integers(1, 9),
    chunk=st.integers(4, 64),
    overlap=st.booleans(),
)
def test_every_request_is_answered_in_full(
    seed: int, policy: str, pool: int, rows: int, chunk: int, overlap: bool
) -> None:
    requests = mix(seed, 25)
    profile = msgspec.structs.replace(SECOND, pool_tokens=pool, tokens=[(1, 0.1), (64, 1.0)])
    done = run(
        requests, profile, schedule_policy=policy, max_running_requests=rows, max_step_tokens=chunk, overlap=overlap
    )
    assert [call.finish for call in done.clients.calls] == ["stop"] * 25
    assert [call.tokens for call in done.clients.calls] == [r.output_tokens for r in requests]
    for call in done.clients.calls:
        assert call.sent <= call.sent + call.waited <= call.first <= call.last <= done.seconds
    assert done.executor.work.busy <= done.seconds + 1e-9


def test_a_scheduler_that_does_nothing_any_more_is_noticed() -> None:
    clients = Clients(Trace("test", [request(0)]), Clock())
    assert list(clients.drain())
    with pytest.raises(Stalled, match="1 requests have not ended"):
        clients.wait(None)


# ---- preparing ---------------------------------------------------------------------------------------------------


def test_a_higher_rate_brings_arrivals_closer_but_leaves_pauses() -> None:
    prepared = prepare(Trace("t", [request(0, arrival=8.0), request(1, arrival=3.0, after=0)]), rate=2.0)
    assert [r.arrival for r in prepared.requests] == [4.0, 3.0]


def test_who_waited_for_a_request_that_is_left_out_waits_for_the_one_before_it() -> None:
    turns = [request(0), request(1, arrival=1.0, prompt=500, after=0), request(2, arrival=2.0, after=1)]
    prepared = prepare(Trace("t", turns), context=100)
    assert prepared.dropped == 1
    assert [(r.after, r.arrival) for r in prepared.requests] == [(None, 0.0), (0, 3.0)]


def test_tenants_are_dealt_by_session_and_the_first_gets_most() -> None:
    turns = [request(0), request(1, after=0), request(2), request(3, after=1), request(4)]
    dealt = [r.tenant for r in prepare(Trace("t", turns), tenants=2).requests]
    assert dealt == ["tenant-0", "tenant-0", "tenant-0", "tenant-0", "tenant-1"]
    many = [r.tenant for r in prepare(Trace("t", [request(n) for n in range(1100)]), tenants=3).requests]
    assert [many.count(f"tenant-{k}") for k in range(3)] == [600, 300, 200]
