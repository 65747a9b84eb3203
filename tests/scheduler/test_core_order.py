"""In which order the scheduler's core admits who waits, by policy."""

from __future__ import annotations

import pytest

from scheduler.policy import POLICIES
from tests.scheduler.bench import Bench, prompt_of


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
