"""What the scheduler tells of its tree, and how long ago things were used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.inspection import AGE_RESOLUTION_SECONDS, MAX_SAMPLES, Ages, TreeInspection
from srt.cache_messages import Call
from srt.messages import unpack_ids
from tests.radix.trees import fresh_tree, matched, put


def ask(tenant: str = "", depth: int = 10, most: int = 100) -> Call:
    return Call("call", "cache_tree", tenant=tenant, depth=depth, max_nodes=most)


def test_a_tenant_sees_its_own_namespaces_and_nobody_elses() -> None:
    pool, tree = fresh_tree(64, 4)
    for namespace in ("", "\x1fsalt:a", "alice", "alice\x1fsalt:a", "alices"):
        put(pool, tree, [1, 2, 3, 4, 5], namespace=namespace)
    inspection = TreeInspection(tree, 4)
    for tenant, seen in (("", {"", "\x1fsalt:a"}), ("alice", {"alice", "alice\x1fsalt:a"}), ("nobody", set())):
        answer = inspection.answer(ask(tenant), 0.0)
        assert {node.namespace for node in answer.nodes} == seen
        assert answer.left_out == 0
        assert all(unpack_ids(node.head) == [1, 2, 3, 4, 5] and node.pages == 2 for node in answer.nodes)


def test_ages_are_those_of_the_last_use() -> None:
    pool, tree = fresh_tree(64, 4)
    inspection = TreeInspection(tree, 4)
    put(pool, tree, [1, 2, 3, 4])
    inspection.note(10.0)
    put(pool, tree, [5, 6, 7, 8])
    inspection.note(20.0)
    ages = {unpack_ids(node.head)[0]: node.age_seconds for node in inspection.answer(ask(), 30.0).nodes}
    assert ages == {1: 20.0, 5: 10.0}
    matched(tree, [1, 2, 3, 4])
    ages = {unpack_ids(node.head)[0]: node.age_seconds for node in inspection.answer(ask(), 30.0).nodes}
    assert ages == {1: 0.0, 5: 10.0}


def test_the_number_of_nodes_and_levels_is_bounded() -> None:
    pool, tree = fresh_tree(600, 1)
    for first in range(500):
        put(pool, tree, [first])
    answer = TreeInspection(tree, 1).answer(ask(most=7), 0.0)
    assert len(answer.nodes) == 7
    assert answer.left_out == 493
    assert TreeInspection(tree, 1).answer(ask(most=10**9, depth=10**9), 0.0).left_out == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.01, 5.0)), min_size=1, max_size=60))
def test_an_age_is_never_too_long_and_short_by_one_note_at_most(steps: list[tuple[int, float]]) -> None:
    ages, tick, now = Ages(), 0, 0.0
    used: dict[int, float] = {}
    for more, seconds in steps:
        for _ in range(more):
            tick += 1
            used[tick] = now
        now += seconds
        ages.note(tick, now)
    for at, when in used.items():
        slack = max(seconds for _, seconds in steps) + AGE_RESOLUTION_SECONDS
        assert now - when - 2 * slack <= ages.age(at, now) <= now - when + 1e-9


def test_long_ago_is_remembered_coarsely_in_bounded_memory() -> None:
    ages = Ages()
    for tick in range(1, 10 * MAX_SAMPLES):
        ages.note(tick, float(tick))
    now = 10.0 * MAX_SAMPLES
    assert len(ages._ticks) <= MAX_SAMPLES
    assert abs(ages.age(10 * MAX_SAMPLES - 20, now) - 20) <= 2
    assert now / 2 < ages.age(1, now) <= now
