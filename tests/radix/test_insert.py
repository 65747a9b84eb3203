"""Insertion: duplicates, moving locks, growing leaves, tails."""

from __future__ import annotations

import pytest

from radix import PageError, StaleLock
from tests.radix.trees import SIZES, fresh_tree, matched, packed, put, settle


@pytest.mark.parametrize("size", SIZES)
def test_duplicates_stay_with_the_caller_and_the_trees_pages_are_named(size: int) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(4 * size))
    first = put(pool, tree, run[: 2 * size])
    assert first.new_tokens == 2 * size
    mine = pool.alloc(4)
    assert mine is not None
    second = tree.insert("", packed(run), mine)
    assert list(second.pages) == [*first.pages, *mine[2:]]
    assert second.new_tokens == 2 * size
    assert [pool.refcount(page) for page in mine] == [1, 1, 2, 2]
    again = tree.insert("", packed(run), mine)
    assert again.pages == second.pages
    assert again.new_tokens == 0
    pool.release(mine)
    settle(pool, tree)


def test_the_tree_keeps_no_reference_to_the_callers_lists() -> None:
    pool, tree = fresh_tree(100, 4)
    pages = pool.alloc(3)
    assert pages is not None
    given = list(pages)
    result = tree.insert("", packed(range(12)), given)
    given.clear()
    del result.pages[:]
    match = tree.match("", packed(range(12)), 12)
    del match.pages[:]
    assert tree.match("", packed(range(12)), 12).pages == pages
    pool.release(pages)
    settle(pool, tree)


def test_the_lock_moves_to_the_new_end_and_nothing_shared_is_free_in_between() -> None:
    pool, tree = fresh_tree(100, 4)
    head = list(range(8))
    put(pool, tree, head)
    lock = tree.lock(tree.match("", packed(head), 8))
    result = put(pool, tree, [*head, *range(50, 58)], lock=lock)
    assert result.lock is not None
    assert tree.locked_pages == 4
    assert tree.evict(100) == 0
    tree.check([result.lock])
    with pytest.raises(StaleLock):
        tree.unlock(lock)
    tree.unlock(result.lock)
    settle(pool, tree)


def test_the_lock_leaves_the_page_that_rows_were_copied_from() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8])
    lock = tree.lock(tree.match("", packed([1, 2, 3, 4, 5, 9]), 6))
    result = put(pool, tree, [1, 2, 3, 4, 5, 9, 9, 9], lock=lock)
    assert result.lock is not None
    tree.check([result.lock])
    assert tree.locked_pages == 2
    assert tree.evict(100) == 1
    tree.unlock(result.lock)
    settle(pool, tree)


def test_a_conversation_stays_one_node_however_often_it_grows() -> None:
    pool, tree = fresh_tree(2000, 4)
    tokens: list[int] = []
    lock = tree.lock(tree.match("", b"", 0))
    for turn in range(300):
        tokens += [turn, turn + 1, turn + 2, turn + 3, turn + 4]
        whole = len(tokens) // 4 * 4
        result = put(pool, tree, tokens[:whole], lock=lock)
        assert result.lock is not None
        lock = result.lock
    assert tree.num_nodes == 1
    tree.check([lock])
    tree.unlock(lock)


def test_a_leaf_that_another_receipt_holds_does_not_grow_under_it() -> None:
    pool, tree = fresh_tree(100, 4)
    head = list(range(8))
    put(pool, tree, head)
    other = tree.lock(tree.match("", packed(head), 8))
    mine = tree.lock(tree.match("", packed(head), 8))
    result = put(pool, tree, [*head, *range(50, 58)], lock=mine)
    assert result.lock is not None
    tree.unlock(result.lock)
    assert tree.locked_pages == 2
    assert tree.evict(100) == 2
    tree.unlock(other)
    settle(pool, tree)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_a_tail_gives_way_to_what_it_is_the_beginning_of(size: int) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(3 * size))
    for length in range(1, 3 * size + 1):
        put(pool, tree, run[:length])
        assert tree.num_nodes == 1
        assert tree.num_pages == -(-length // size)
        assert matched(tree, run) == length
    for length in range(1, 3 * size):
        assert put(pool, tree, run[:length]).new_tokens == 0
    settle(pool, tree)


def test_a_tail_that_somebody_holds_stays_until_it_is_evicted() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1, 2, 3, 4, 5, 6])
    lock = tree.lock(tree.match("", packed([1, 2, 3, 4, 5, 6]), 6))
    tail = tree.match("", packed([1, 2, 3, 4, 5, 6]), 6).partial_page
    assert tail is not None
    put(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.refcount(tail) == 1
    assert tree.num_pages == 3
    assert matched(tree, [1, 2, 3, 4, 5, 6, 7, 8]) == 8
    tree.check([lock])
    tree.unlock(lock)
    settle(pool, tree)
    assert tree.evict(100) == 3


def test_the_request_that_holds_a_tail_may_replace_it() -> None:
    for tokens in ([1, 2], [1, 2, 3, 4, 5, 6]):
        pool, tree = fresh_tree(100, 4)
        put(pool, tree, tokens)
        lock = tree.lock(tree.match("", packed(tokens), len(tokens)))
        longer = [*tokens, *range(50, 58)]
        result = put(pool, tree, longer, lock=lock)
        assert result.lock is not None
        tree.check([result.lock])
        assert tree.num_nodes == 1
        assert tree.num_pages == tree.locked_pages == -(-len(longer) // 4)
        tree.unlock(result.lock)
        settle(pool, tree)


def test_several_tails_under_one_node_all_give_way() -> None:
    pool, tree = fresh_tree(100, 8)
    put(pool, tree, [1, 2, 3])
    short = tree.lock(tree.match("", packed([1, 2, 3]), 3))
    put(pool, tree, [1, 2, 3, 4, 5])
    put(pool, tree, [1, 2, 7])
    tree.unlock(short)
    assert tree.num_nodes == 3
    put(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8])
    assert tree.num_nodes == 2, "the tails [1, 2, 3] and [1, 2, 3, 4, 5] have gone, [1, 2, 7] has not"
    assert matched(tree, [1, 2, 7]) == 3
    settle(pool, tree)


def test_page_size_one_has_no_tails() -> None:
    pool, tree = fresh_tree(100, 1)
    for length in range(1, 30):
        put(pool, tree, list(range(length)))
    match = tree.match("", packed([*range(20), 99]), 30)
    assert (match.num_tokens, match.partial_page) == (20, None)
    settle(pool, tree)


@pytest.mark.parametrize(("tokens", "pages"), [(4, 0), (4, 2), (5, 1), (0, 1)])
def test_pages_that_do_not_fit_the_tokens_are_refused(tokens: int, pages: int) -> None:
    pool, tree = fresh_tree(10, 4)
    given = pool.alloc(pages)
    assert given is not None
    with pytest.raises(ValueError):
        tree.insert("", packed(range(tokens)), given)
    with pytest.raises(ValueError):
        tree.insert("", b"abc", [0])


def test_a_free_page_cannot_be_inserted_and_nothing_changes() -> None:
    pool, tree = fresh_tree(10, 4)
    put(pool, tree, list(range(8)))
    drawing = tree.dump()
    pages = pool.alloc(1)
    assert pages is not None
    with pytest.raises(PageError):
        tree.insert("", packed([*range(4), 9, 9, 9, 9, 8]), [*pages, 9, 8])
    with pytest.raises(PageError):
        tree.insert("elsewhere", packed(range(4)), [9])
    assert tree.dump() == drawing
    pool.release(pages)
    settle(pool, tree)
