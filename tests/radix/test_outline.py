"""The outline of a tree: its upper levels, as many nodes as asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from radix import Outlined, RadixTree
from tests.radix.trees import fresh_tree, packed, put


def outline(tree: RadixTree, depth: int = 100, most: int = 1000) -> tuple[list[Outlined], int]:
    return tree.outline(tree.namespaces(), depth, most, 3)


def test_every_node_tells_its_run_its_users_and_its_parent() -> None:
    pool, tree = fresh_tree(64, 4)
    put(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    put(pool, tree, [1, 2, 3, 4, 50, 60, 70, 80], namespace="other")
    put(pool, tree, [1, 2, 3, 4, 9, 9, 9, 9])
    lock = tree.lock(tree.match("", packed([1, 2, 3, 4, 9, 9, 9, 9]), 8))
    told, left_out = outline(tree)
    assert left_out == 0
    by_run = {(node.namespace, tuple(packed_ids(node.head)), node.tokens): node for node in told}
    head = by_run["", (1, 2, 3), 4]
    assert (head.parent, head.pages, head.locks, head.children) == (-1, 1, 1, 2)
    used, unused = by_run["", (9, 9, 9), 4], by_run["", (5, 6, 7), 5]
    assert (used.locks, used.pages, unused.locks, unused.pages) == (1, 1, 0, 2)
    assert told[used.parent] is head
    assert told[unused.parent] is head
    assert used.tick > unused.tick
    assert used.hits == head.hits == 1
    assert by_run["other", (1, 2, 3), 8].parent == -1
    assert len(told) == 4
    tree.unlock(lock)


def packed_ids(head: bytes) -> list[int]:
    return memoryview(head).cast("i").tolist()


def test_namespaces_that_are_not_asked_for_are_not_told_of() -> None:
    pool, tree = fresh_tree(64, 4)
    put(pool, tree, [1, 2, 3, 4], namespace="mine")
    put(pool, tree, [5, 6, 7, 8], namespace="yours")
    told, left_out = tree.outline(["mine", "never seen"], 5, 10, 4)
    assert [(node.namespace, packed_ids(node.head)) for node in told] == [("mine", [1, 2, 3, 4])]
    assert left_out == 0


def test_the_levels_and_nodes_beyond_the_bounds_are_counted() -> None:
    pool, tree = fresh_tree(2000, 1)
    for branch in range(20):
        put(pool, tree, [1, 2, branch + 10, 7])
        put(pool, tree, [1, 2, branch + 10, 8])
    told, left_out = outline(tree, depth=2)
    assert [node.tokens for node in told] == [2, *[1] * 20]
    assert left_out == 40
    told, left_out = outline(tree, depth=3, most=25)
    assert len(told) == 25
    assert left_out == 36
    assert [packed_ids(node.head) for node in told[1:3]] == [[29], [28]], "the last used come first"
    assert outline(tree, depth=5, most=1) == (told[:1], 20)
    assert outline(tree, depth=0) == ([], 1)


def test_a_deep_tree_needs_no_deep_stack() -> None:
    pool, tree = fresh_tree(8000, 1)
    tokens: list[int] = []
    for depth in range(2500):
        tokens.append(depth)
        put(pool, tree, [*tokens, -1])
    told, left_out = outline(tree, depth=10_000, most=10_000)
    assert len(told) == tree.num_nodes > 2500
    assert left_out == 0


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=12), st.integers(0, 5), st.integers(1, 9)
)
def test_an_outline_is_a_part_of_the_tree_that_has_its_parents(runs: list[list[int]], depth: int, most: int) -> None:
    pool, tree = fresh_tree(400, 2)
    for run in runs:
        put(pool, tree, run)
    everything, none_left_out = outline(tree)
    assert none_left_out == 0
    assert len(everything) == tree.num_nodes
    assert sum(node.pages for node in everything) == tree.num_pages
    told, left_out = outline(tree, depth, most)
    assert len(told) <= most
    assert all(node.parent < place for place, node in enumerate(told))
    top = sum(node.parent == -1 for node in everything)
    assert left_out == top + sum(node.children for node in told) - len(told)
