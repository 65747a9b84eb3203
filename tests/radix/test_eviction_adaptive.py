"""The adaptive policy: what it does before it knows anything, what it learns, and what hints do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix import Adaptive, Hint, PagePool, RadixTree
from radix.ghosts import MAX_GHOSTS, Ghost, Ghosts
from radix.reuse import BUCKETS, ReuseTable, bucket, count_ages
from tests.radix.trees import matched, matched_quietly, packed, put, settle


def adaptive_tree(num_pages: int, page_size: int = 4) -> tuple[PagePool, RadixTree]:
    pool = PagePool(num_pages, page_size)
    return pool, RadixTree(pool, Adaptive())


def serve(pool: PagePool, tree: RadixTree, tokens: list[int], reply: int = 0) -> int:
    """One request, from match to unlock.  Tokens hit."""
    match = tree.match("", packed(tokens), len(tokens))
    lock = tree.lock(match)
    needed = -(-len(tokens) // pool.page_size) - len(match.pages)
    if needed > pool.num_free:
        tree.evict(needed - pool.num_free)
    fresh = pool.alloc(needed)
    assert fresh is not None
    inserted = tree.insert("", packed(tokens), [*match.pages, *fresh], lock, reply)
    assert inserted.lock is not None
    tree.unlock(inserted.lock)
    pool.release(fresh)
    return match.num_tokens


def test_before_anything_is_learned_the_leaf_used_longest_ago_goes_first() -> None:
    pool, tree = adaptive_tree(100)
    for run in range(6):
        put(pool, tree, [run] * 8)
    for gone in range(6):
        tree.evict(2)
        assert [matched_quietly(tree, [run] * 8) for run in range(6)] == [0] * (gone + 1) + [8] * (5 - gone)
        tree.check()
    settle(pool, tree)


def test_a_conversation_that_went_on_often_outlives_younger_ones_that_never_did() -> None:
    pool, tree = adaptive_tree(200)
    chat = [1] * 4
    for turn in range(4):
        chat = [*chat, *[2 + turn] * 4]
        serve(pool, tree, chat)
    for run in range(3):
        serve(pool, tree, [50 + run] * 4)
    tree.evict(3)
    assert matched_quietly(tree, chat) == len(chat)
    assert [matched_quietly(tree, [50 + run] * 4) for run in range(3)] == [0, 0, 0]


def test_a_hint_holds_until_the_run_is_used_again() -> None:
    pool, tree = adaptive_tree(100)
    serve(pool, tree, [1] * 8)
    serve(pool, tree, [2] * 8)
    assert tree.hint("", packed([2] * 8), Hint.DONE)
    serve(pool, tree, [*[2] * 8, *[3] * 4])
    tree.evict(2)
    assert matched_quietly(tree, [1] * 8) == 0
    assert matched_quietly(tree, [2] * 8) == 8


def test_a_hint_is_refused_for_what_is_not_here_or_is_needed_by_others() -> None:
    pool, tree = adaptive_tree(100)
    put(pool, tree, [*[1] * 8, 2, 2])
    put(pool, tree, [*[1] * 4, *[3] * 4])
    assert not tree.hint("other", packed([1] * 8), Hint.DONE)
    assert not tree.hint("", packed([9] * 8), Hint.DONE)
    assert not tree.hint("", packed([1] * 4), Hint.DONE)
    assert not tree.hint("", packed([*[1] * 8, *[2] * 4]), Hint.DONE)
    assert tree.hint("", packed([*[1] * 8, 2, 2]), Hint.DONE)
    tree.evict(2)
    assert matched_quietly(tree, [*[1] * 8, 2, 2]) == 4
    settle(pool, tree)


def test_a_hint_reaches_a_leaf_that_is_locked_when_it_is_told() -> None:
    pool, tree = adaptive_tree(100)
    put(pool, tree, [1] * 8)
    put(pool, tree, [2] * 8)
    lock = tree.lock(tree.match("", packed([2] * 8), 8))
    assert tree.hint("", packed([2] * 8), Hint.DONE)
    tree.unlock(lock)
    tree.evict(2)
    assert matched_quietly(tree, [2] * 8) == 0


def test_it_learns_which_replies_are_followed_by_more_about_the_same_text() -> None:
    pool, tree = adaptive_tree(160)
    # Texts with short replies are asked about again after 12 other requests, those with long replies never are.
    hits = 0
    for number in range(600):
        again = number % 2 == 0
        text = [number // 48 * 24 + number % 24 if again else 10_000 + number] * 40
        hit = serve(pool, tree, [*text, 20_000 + number, 0, 0, 0], 4 if again else 300)
        hits += hit if number >= 300 else 0
        tree.check()
    lru_pool = PagePool(160, 4)
    lru_tree = RadixTree(lru_pool)
    lru_hits = 0
    for number in range(600):
        again = number % 2 == 0
        text = [number // 48 * 24 + number % 24 if again else 10_000 + number] * 40
        hit = serve(lru_pool, lru_tree, [*text, 20_000 + number, 0, 0, 0])
        lru_hits += hit if number >= 300 else 0
    assert hits > lru_hits + 1000


def test_an_evicted_conversation_that_comes_back_is_known_to_have_been_used() -> None:
    pool, tree = adaptive_tree(100)
    serve(pool, tree, [1] * 8)
    tree.evict(2)
    serve(pool, tree, [1] * 8)
    serve(pool, tree, [2] * 8)
    tree.evict(2)
    assert matched_quietly(tree, [1] * 8) == 8
    assert matched_quietly(tree, [2] * 8) == 0


def test_a_request_that_only_tries_to_get_in_teaches_nothing() -> None:
    pool, tree = adaptive_tree(100)
    put(pool, tree, [1] * 8)
    put(pool, tree, [2] * 8)
    for _ in range(1000):
        tree.unlock(tree.lock(tree.match("", packed([1] * 8), 8, touch=False)))
    matched(tree, [2] * 8)
    for _ in range(2):
        tree.evict(2)
        tree.check()
    settle(pool, tree)


@given(st.integers(0, 2**40))
def test_buckets_cover_all_ages_and_both_ways_to_count_agree(age: int) -> None:
    counts = count_ages(age, [0])
    assert counts.sum() == (1 if age < 2**30 else counts.sum())
    if counts.sum():
        assert counts[bucket(age)] == 1
    assert 0 <= bucket(age) <= bucket(age + 1) < BUCKETS


def test_the_index_prefers_what_was_seen_to_come_back_sooner() -> None:
    table = ReuseTable((1.0, 1.0))
    for _ in range(500):
        table.reused(0, 10, 1.0)
        table.given_up(1, 10_000, 1.0)
    table.estimate(count_ages(0, [0])[None, :].repeat(2, 0) * 0)
    assert table.index(0, 5) > 10 * table.index(1, 5)
    assert table.index(0, 5) > table.index(0, 100)


def test_ghosts_are_forgotten_oldest_first_and_never_more_than_fit() -> None:
    ghosts = Ghosts(10)
    assert not list(ghosts.add(("", 0, b"a"), Ghost(0, 1, 6, 0)))
    assert [ghost.tick for ghost in ghosts.add(("", 0, b"b"), Ghost(0, 2, 6, 0))] == [1]
    assert ghosts.take(("", 0, b"a")) is None
    assert ghosts.take(("", 0, b"b")) == Ghost(0, 2, 6, 0)
    assert len(ghosts) == 0
    many = Ghosts(10**9)
    for place in range(MAX_GHOSTS + 5):
        many.add(("", place, b""), Ghost(0, 0, 1, 0))
    assert len(many) == MAX_GHOSTS


@pytest.mark.parametrize("seed", [1, 2])
def test_ghosts_of_a_leaf_that_went_bit_by_bit_are_one(seed: int) -> None:
    pool, tree = adaptive_tree(100)
    put(pool, tree, [seed] * 40)
    for _ in range(10):
        assert tree.evict(1) == 1
        tree.check()
    serve(pool, tree, [seed] * 40)
    put(pool, tree, [9] * 40)
    tree.evict(10)
    assert matched_quietly(tree, [seed] * 40) == 40, "it came back, so it counts as used"
