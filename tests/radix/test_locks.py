"""Locks: splits keep them, receipts name them, stale matches are refused."""

from __future__ import annotations

import pytest

from radix import StaleLock, StaleMatch
from tests.radix.trees import SIZES, fresh_tree, matched, packed, put, settle


@pytest.mark.parametrize("size", SIZES)
def test_splitting_a_locked_node_keeps_every_lock_on_both_parts(size: int) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(4 * size))
    put(pool, tree, run)
    locks = [tree.lock(tree.match("", packed(run), len(run))) for _ in range(3)]
    before = (tree.locked_pages, tree.evictable_pages)
    assert before == (4, 0)
    put(pool, tree, [*run[: 2 * size], *[7] * size])
    assert (tree.locked_pages, tree.evictable_pages) == (4, 1)
    tree.check(locks)
    assert tree.evict(100) == 1
    for lock in locks:
        tree.unlock(lock)
    settle(pool, tree)
    assert tree.evict(100) == 4


@pytest.mark.parametrize("size", SIZES)
def test_a_receipt_names_its_whole_path_after_a_split(size: int) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(4 * size))
    put(pool, tree, run)
    lock = tree.lock(tree.match("", packed(run), len(run)))
    for cut in (1, 2, 3):
        put(pool, tree, [*run[: cut * size], *[7] * size])
    assert tree.evict(100) == 3
    assert matched(tree, run) == len(run)
    tree.check([lock])
    tree.unlock(lock)
    settle(pool, tree)


def test_locking_a_match_whose_node_was_split_since_locks_the_matched_part() -> None:
    pool, tree = fresh_tree(100, 4)
    run = list(range(16))
    put(pool, tree, run)
    match = tree.match("", packed(run[:8]), 8)
    put(pool, tree, [*run[:12], 70, 71, 72, 73])
    lock = tree.lock(match)
    assert tree.locked_pages == 2
    tree.check([lock])
    tree.evict(100)
    assert matched(tree, run) == 8
    tree.unlock(lock)
    settle(pool, tree)


def test_a_lock_keeps_no_more_than_what_matched() -> None:
    pool, tree = fresh_tree(100, 4)
    run = list(range(40))
    put(pool, tree, run)
    lock = tree.lock(tree.match("", packed([*run[:10], 99]), 11))
    assert tree.locked_pages == 3, "two full pages and the one to copy rows from"
    assert tree.evict(100) == 7
    tree.check([lock])
    tree.unlock(lock)
    settle(pool, tree)


def test_the_page_that_rows_are_copied_from_is_locked_too() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1, 2, 3, 4, 5, 6])
    match = tree.match("", packed([1, 2, 3, 4, 5, 9]), 6)
    assert (match.num_tokens, match.partial_rows) == (5, 1)
    lock = tree.lock(match)
    assert tree.evict(100) == 0
    tree.unlock(lock)
    assert tree.evict(100) == 2


@pytest.mark.parametrize("how", ["evicted", "trimmed", "flushed", "tail replaced", "evicted and back"])
def test_a_match_whose_pages_have_gone_cannot_be_locked(how: str) -> None:
    pool, tree = fresh_tree(100, 4)
    run = list(range(14))
    put(pool, tree, run)
    match = tree.match("", packed(run), 14)
    if how == "evicted":
        tree.evict(4)
    elif how == "trimmed":
        tree.evict(1)
    elif how == "flushed":
        assert tree.flush()
    elif how == "tail replaced":
        put(pool, tree, [*run, 14, 15, 16, 17])
    else:
        tree.evict(4)
        put(pool, tree, run)
    with pytest.raises(StaleMatch):
        tree.lock(match)
    settle(pool, tree)
    assert tree.locked_pages == 0


def test_a_trimmed_leaf_that_grew_differently_is_no_longer_what_matched() -> None:
    pool, tree = fresh_tree(100, 4)
    run = list(range(16))
    put(pool, tree, run)
    match = tree.match("", packed(run), 16)
    tree.evict(2)
    put(pool, tree, [*run[:8], *[7] * 8])
    with pytest.raises(StaleMatch):
        tree.lock(match)


def test_a_receipt_is_taken_back_once() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(8)))
    lock = tree.lock(tree.match("", packed(range(8)), 8))
    tree.unlock(lock)
    with pytest.raises(StaleLock):
        tree.unlock(lock)
    pages = pool.alloc(2)
    assert pages is not None
    with pytest.raises(StaleLock):
        tree.insert("", packed(range(8)), pages, lock)
    pool.release(pages)
    settle(pool, tree)


def test_a_receipt_of_another_namespace_is_refused() -> None:
    pool, tree = fresh_tree(100, 4)
    lock = tree.lock(tree.match("a", b"", 0))
    pages = pool.alloc(1)
    assert pages is not None
    with pytest.raises(StaleLock):
        tree.insert("b", packed(range(4)), pages, lock)
    assert tree.namespaces() == ["a"]
    tree.unlock(lock)
    assert tree.namespaces() == []
