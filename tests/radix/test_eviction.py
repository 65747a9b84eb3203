"""Eviction: what goes, in which order, how much, and who is told."""

from __future__ import annotations

from array import array

import pytest

from radix import LFU, Hint, PagePool, RadixTree, policy_by_name
from radix.eviction import WAITING_HEAD_START
from tests.radix.trees import SIZES, fresh_tree, matched, matched_quietly, packed, put, settle


@pytest.mark.parametrize("size", SIZES)
def test_needing_one_page_takes_one_page(size: int) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(50 * size))
    put(pool, tree, run)
    for left in range(49, -1, -1):
        assert tree.evict(1) == 1
        assert matched(tree, run) == left * size
        tree.check()
    assert tree.evict(1) == 0
    settle(pool, tree)


def test_a_prefix_never_goes_before_what_follows_it() -> None:
    pool, tree = fresh_tree(100, 4)
    head = list(range(12))
    put(pool, tree, head)
    for branch in range(5):
        put(pool, tree, [*head, *[50 + branch] * 8])
    for _ in range(10):
        assert tree.evict(1) == 1
        assert matched(tree, head) == 12
    assert tree.evict(3) == 3
    assert matched(tree, head) == 0


def test_a_parent_whose_last_child_went_can_go_too() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(8)))
    put(pool, tree, [*range(4), *[9] * 4])
    assert tree.evictable_pages == 3
    assert tree.evict(100) == 3
    assert tree.namespaces() == []
    settle(pool, tree)


def test_what_was_used_longest_ago_goes_first() -> None:
    pool, tree = fresh_tree(100, 4)
    runs = [[branch] * 8 for branch in range(5)]
    for run in runs:
        put(pool, tree, run)
    matched(tree, runs[0])
    matched(tree, runs[2])
    tree.match("", packed(runs[1]), 8, touch=False)
    for gone in (1, 3, 4, 0, 2):
        assert matched_quietly(tree, runs[gone]) == 8
        tree.evict(2)
        assert matched_quietly(tree, runs[gone]) == 0
        tree.check()


def test_lfu_keeps_what_is_used_often() -> None:
    pool = PagePool(100, 4)
    tree = RadixTree(pool, LFU())
    often, seldom = [1] * 8, [2] * 8
    put(pool, tree, often)
    for _ in range(5):
        matched(tree, often)
    put(pool, tree, seldom)
    matched(tree, seldom)
    tree.evict(2)
    assert matched_quietly(tree, often) == 8
    assert matched_quietly(tree, seldom) == 0


def test_policies_are_found_by_name_and_unknown_ones_are_refused() -> None:
    assert policy_by_name("lru").name == "lru"
    assert policy_by_name("lfu").name == "lfu"
    with pytest.raises(ValueError, match="lru, lfu"):
        policy_by_name("mru")


def test_a_page_that_somebody_still_owns_is_not_counted_as_freed() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1] * 8)
    held = tree.match("", packed([1] * 8), 8).pages
    pool.share(held)
    put(pool, tree, [2] * 8)
    assert tree.evict(1) == 1
    assert tree.num_pages == 1
    assert pool.num_free == 97
    pool.release(held)
    settle(pool, tree)


def test_the_hot_head_survives_any_pressure_on_cold_leaves() -> None:
    pool, tree = fresh_tree(40, 4)
    head = list(range(32))
    put(pool, tree, head)
    for number in range(500):
        assert matched(tree, head) == 32
        cold = [1000 + number] * 12
        short = 3 - pool.num_free
        if short > 0:
            assert tree.evict(short) == short
        put(pool, tree, cold)
    settle(pool, tree)


def test_evictions_are_told_with_the_whole_prefix() -> None:
    pool = PagePool(100, 4)
    told: list[tuple[str, list[int], list[int]]] = []
    tree = RadixTree(pool, on_evict=lambda name, prefix, pages: told.append((name, list(array("i", prefix)), [*pages])))
    pages = put(pool, tree, list(range(12)), "a").pages
    put(pool, tree, [*range(8), 50, 51], "a")
    tree.match("a", packed(range(12)), 12)
    assert tree.evict(3) == 3
    assert told[0][:2] == ("a", [*range(8), 50, 51])
    assert told[1] == ("a", list(range(12)), [pages[2]])
    assert told[2] == ("a", list(range(8)), [pages[1]])


def test_a_lock_that_splits_a_node_gives_it_a_use_of_its_own() -> None:
    pool, tree = fresh_tree(100, 4)
    run = [1] * 12
    put(pool, tree, run)
    match = tree.match("", packed(run), 8, touch=False)
    put(pool, tree, [2] * 8)
    # The upper part becomes a leaf with the root's last use, were it not touched: two leaves, one tick.
    lock = tree.lock(match)
    tree.evict(1)
    tree.unlock(lock)
    tree.check()
    tree.evict(2)
    assert matched_quietly(tree, run) == 8, "the other run was used before the lock"


@pytest.mark.parametrize("name", ["lru", "adaptive"])
def test_what_is_done_goes_first_and_what_waits_goes_last(name: str) -> None:
    pool = PagePool(100, 4)
    tree = RadixTree(pool, policy_by_name(name))
    for run in range(5):
        put(pool, tree, [run] * 8)
    assert tree.hint("", packed([0] * 8), Hint.WAITING)
    assert tree.hint("", packed([3] * 8), Hint.DONE)
    for gone in (3, 1, 2, 4, 0):
        assert matched_quietly(tree, [gone] * 8) == 8
        tree.evict(2)
        assert matched_quietly(tree, [gone] * 8) == 0
        tree.check()


def test_lru_does_not_wait_for_ever_for_a_conversation_that_waits() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1] * 8)
    put(pool, tree, [2] * 8)
    assert tree.hint("", packed([1] * 8), Hint.WAITING)
    for _ in range(WAITING_HEAD_START + 1):
        matched(tree, [2] * 8)
    tree.evict(2)
    assert (matched_quietly(tree, [1] * 8), matched_quietly(tree, [2] * 8)) == (0, 8)
