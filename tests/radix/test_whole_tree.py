"""The tree as a whole: namespaces, flush, size, depth, check."""

from __future__ import annotations

import pytest

from radix import Lock, StaleLock
from tests.radix.trees import SIZES, fresh_tree, matched, packed, put, settle


def test_namespaces_share_nothing() -> None:
    pool, tree = fresh_tree(100, 4)
    run = list(range(10))
    for name in ("", "a", "b"):
        assert matched(tree, run, name) == 0
        assert put(pool, tree, run, name).new_tokens == 10
        assert matched(tree, run, name) == 10
    assert tree.num_pages == 9
    assert tree.flush("a")
    assert [matched(tree, run, name) for name in ("", "a", "b")] == [10, 0, 10]
    settle(pool, tree)


def test_an_empty_namespace_leaves_nothing_behind() -> None:
    pool, tree = fresh_tree(10, 4)
    for number in range(100):
        name = f"tenant {number}"
        assert matched(tree, [1, 2, 3], name) == 0
        lock = tree.lock(tree.match(name, packed([1, 2, 3]), 3))
        result = put(pool, tree, [1, 2, 3], name, lock)
        assert result.lock is not None
        tree.unlock(result.lock)
        assert tree.evict(1) == 1
    assert tree.namespaces() == []
    settle(pool, tree)


def test_flush_refuses_while_anything_is_locked() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(8)), "a")
    put(pool, tree, list(range(8)), "b")
    for match in (tree.match("a", packed(range(8)), 8), tree.match("a", packed([99]), 1)):
        lock = tree.lock(match)
        assert not tree.flush()
        assert not tree.flush("a")
        tree.check([lock])
        tree.unlock(lock)
    lock = tree.lock(tree.match("a", packed(range(8)), 8))
    assert tree.flush("b")
    assert tree.namespaces() == ["a"]
    tree.unlock(lock)
    version = tree.version
    assert tree.flush()
    assert tree.version > version
    assert tree.flush("never seen")
    settle(pool, tree)
    assert pool.num_free == pool.num_pages


def test_a_receipt_from_before_a_flush_cannot_bring_its_run_back() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(8)))
    lock = tree.lock(tree.match("", packed(range(8)), 8))
    tree.unlock(lock)
    assert tree.flush()
    pages = pool.alloc(2)
    assert pages is not None
    with pytest.raises(StaleLock):
        tree.insert("", packed(range(8)), pages, lock)
    assert tree.num_pages == 0


@pytest.mark.parametrize("size", SIZES)
def test_five_thousand_unique_prompts_leave_no_more_nodes_than_pages(size: int) -> None:
    pool, tree = fresh_tree(max(2000 // size, 8), size)
    for number in range(5000):
        tokens = [number % 50, *range(number, number + 19)]
        lock = tree.lock(tree.match("", packed(tokens), 19))
        count = -(-len(tokens) // size)
        short = count - pool.num_free
        if short > 0:
            assert tree.evict(short) >= short
        result = put(pool, tree, tokens, lock=lock)
        assert result.lock is not None
        tree.unlock(result.lock)
        assert tree.num_nodes <= tree.num_pages <= pool.num_pages
    settle(pool, tree)
    assert tree.flush()
    assert pool.num_free == pool.num_pages


def test_a_path_of_thousands_of_nodes_is_walked_without_recursion() -> None:
    pool, tree = fresh_tree(10_000, 1)
    run = list(range(4000))
    locks: list[Lock] = []
    for length in range(1, 4001):
        # A receipt at every length makes every token a node of its own.
        put(pool, tree, run[:length])
        if length % 2:
            locks.append(tree.lock(tree.match("", packed(run[:length]), length)))
    assert tree.num_nodes > 1000
    assert matched(tree, run) == 4000
    tree.check(locks)
    assert "pages 0..0" in tree.dump()
    for lock in locks:
        tree.unlock(lock)
    assert tree.evict(4000) == 4000
    settle(pool, tree)


def test_check_tells_what_is_wrong_and_draws_the_tree() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(10)))
    lock = tree.lock(tree.match("", packed(range(10)), 10))
    with pytest.raises(AssertionError, match=r"(?s)locks.*receipts.*namespace ''.*pages 0\.\.2"):
        tree.check([])
    tree.check([lock])
    drawing = tree.dump()
    assert "1 nodes, 3 pages of 4 tokens, 3 pages locked" in drawing
    assert "ids [0-2] tokens 10: 0 1 2 3 4 5 ... | locks 1" in drawing
