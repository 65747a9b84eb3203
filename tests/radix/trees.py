"""Small trees for tests: tokens as lists, pages looked after."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from radix import Insert, Lock, PagePool, RadixTree

SIZES = [1, 4, 16, 64]


def packed(tokens: Iterable[int]) -> bytes:
    return array("i", tokens).tobytes()


def fresh_tree(num_pages: int, page_size: int) -> tuple[PagePool, RadixTree]:
    pool = PagePool(num_pages, page_size)
    return pool, RadixTree(pool)


def put(pool: PagePool, tree: RadixTree, tokens: list[int], namespace: str = "", lock: Lock | None = None) -> Insert:
    """Insert a run in pages of its own and let go of them, so that the tree is their only owner."""
    pages = pool.alloc(-(-len(tokens) // pool.page_size))
    assert pages is not None, "the test's pool is too small"
    result = tree.insert(namespace, packed(tokens), pages, lock)
    pool.release(pages)
    return result


def matched(tree: RadixTree, tokens: list[int], namespace: str = "", limit: int | None = None) -> int:
    return tree.match(namespace, packed(tokens), len(tokens) if limit is None else limit).num_tokens


def settle(pool: PagePool, tree: RadixTree, locks: Iterable[Lock] = ()) -> None:
    """Everything adds up, and nobody but the tree owns a page."""
    tree.check(locks)
    pool.check(tree.owned())
    assert pool.num_free + tree.num_pages == pool.num_pages


def matched_quietly(tree: RadixTree, tokens: list[int]) -> int:
    return tree.match("", packed(tokens), len(tokens), touch=False).num_tokens
