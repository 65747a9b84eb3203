"""Matching: exact to the token, longest among siblings, a peek."""

from __future__ import annotations

import pytest

from tests.radix.trees import SIZES, fresh_tree, matched, packed, put, settle


@pytest.mark.parametrize("size", SIZES)
def test_reuse_is_exact_to_the_token_wherever_two_prompts_part(size: int) -> None:
    pool, tree = fresh_tree(200, size)
    length = 3 * size + size // 2
    run = list(range(100, 100 + length))
    put(pool, tree, run)
    for parting in range(length + 1):
        query = run[:parting] + [7] * (length + 5 - parting)
        match = tree.match("", packed(query), len(query))
        assert match.num_tokens == parting
        assert len(match.pages) == parting // size
        assert match.partial_rows == parting % size
        assert (match.partial_page is not None) == (parting % size > 0)
    settle(pool, tree)


@pytest.mark.parametrize("size", SIZES)
def test_match_never_passes_its_limit(size: int) -> None:
    pool, tree = fresh_tree(200, size)
    run = list(range(2 * size + 1))
    put(pool, tree, run)
    for limit in range(-1, len(run) + 3):
        assert matched(tree, run, limit=limit) == min(max(limit, 0), len(run))


@pytest.mark.parametrize(("length", "size", "expected"), [(64, 16, 63), (63, 16, 62), (65, 16, 64), (64, 1, 63)])
def test_a_whole_cached_prompt_leaves_one_token_to_compute_and_keeps_the_rest(
    length: int, size: int, expected: int
) -> None:
    pool, tree = fresh_tree(100, size)
    run = list(range(length))
    put(pool, tree, run)
    assert matched(tree, run, limit=length - 1) == expected


def test_match_is_a_peek() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, list(range(20)))
    version, drawing = tree.version, tree.dump()
    for length in range(20):
        tree.match("", packed([*range(length), 99]), 99, touch=False)
    assert tree.version == version
    assert tree.dump() == drawing


def test_first_token_equal_and_first_page_not_makes_siblings() -> None:
    pool, tree = fresh_tree(100, 4)
    put(pool, tree, [1, 2, 3, 4, 5])
    put(pool, tree, [1, 2, 9, 4, 5])
    assert tree.num_nodes == 2
    assert matched(tree, [1, 2, 3, 4]) == 4
    assert matched(tree, [1, 2, 9, 4]) == 4
    assert matched(tree, [1, 2, 8, 4]) == 2
    settle(pool, tree)


def test_parting_inside_the_first_page_of_a_node_does_not_split_it() -> None:
    pool, tree = fresh_tree(100, 16)
    put(pool, tree, list(range(32)))
    put(pool, tree, [*range(9), *range(50, 73)])
    assert tree.num_nodes == 2
    put(pool, tree, [*range(19), *range(80, 93)])
    assert tree.num_nodes == 4
    settle(pool, tree)


@pytest.mark.parametrize("count", [2, 5, 7, 40, 400])
def test_among_many_siblings_the_one_that_agrees_longest_is_found(count: int) -> None:
    pool, tree = fresh_tree(1000, 8)
    siblings = [[3, 1, index // 20, index % 20, 5, 5, 5, index] for index in range(count)]
    for tokens in siblings:
        put(pool, tree, tokens)
    for query in ([3, 1, 0, 0, 9], [3, 1, 0, 1, 5, 5, 4], [3, 1, 19, 3, 5, 5, 5, 9], [3, 2], [2], [9], [3, 1, 1, 30]):
        best = max(sum(query[: k + 1] == tokens[: k + 1] for k in range(len(query))) for tokens in siblings)
        assert matched(tree, query) == best
    tree.check()
    assert tree.evict(count // 2) == count // 2
    tree.check()
    assert [matched(tree, tokens) for tokens in siblings].count(8) == count - count // 2


def test_a_pair_that_differs_at_token_three_shares_three_tokens() -> None:
    pool, tree = fresh_tree(100, 16)
    run = list(range(64))
    put(pool, tree, run)
    other = [*run[:3], 999, *run[4:]]
    match = tree.match("", packed(other), 64)
    assert (match.num_tokens, list(match.pages), match.partial_rows) == (3, [], 3)


def test_nothing_known_gives_an_empty_match_that_can_be_locked() -> None:
    pool, tree = fresh_tree(10, 4)
    for tokens in ([], [1, 2, 3]):
        match = tree.match("nobody", packed(tokens), 10)
        assert (match.num_tokens, len(match.pages), match.partial_page, match.partial_rows) == (0, 0, None, 0)
        lock = tree.lock(match)
        tree.check([lock])
        tree.unlock(lock)
    assert tree.namespaces() == []
    settle(pool, tree)
