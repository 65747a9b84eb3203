"""What stands where a match stopped, what has been evicted, and what there is: the reasons of a miss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import nlargest
from operator import attrgetter
from typing import NamedTuple

from radix.node import TOKEN_BYTES, Node
from radix.walk import Stop


def following(stop: Stop, page_size: int, count: int) -> tuple[int, bytes]:
    """How many leading tokens are known where a walk stopped, and up to `count` tokens that the cache has after them.

    Where several runs go on from there, the one used last is taken.
    """
    node, inside, whole, rows, pages = stop
    matched = len(pages) * page_size + rows
    if inside is not None:
        known = inside.key[(whole * page_size + rows) * TOKEN_BYTES :]
        node = inside
    else:
        known = b""
    while len(known) < count * TOKEN_BYTES and node.children:
        node = max(node.children.values(), key=attrgetter("tick"))
        known += node.key
    return matched, known[: count * TOKEN_BYTES]


class Outlined(NamedTuple):
    """One node as an outline tells of it.

    parent  its parent's place in the outline; -1 below a root
    head    its first tokens, packed; tokens and pages count all of them
    locks   receipts that keep it, and how many of them are pins
    tick    of its last use; `children` counts those that are left out of the outline too
    """

    namespace: str
    parent: int
    head: bytes
    tokens: int
    pages: int
    locks: int
    pins: int
    hits: int
    tick: int
    children: int


def outline(roots: Sequence[Node], depth: int, max_nodes: int, head_tokens: int) -> tuple[list[Outlined], int]:
    """The nodes of the first `depth` levels, `max_nodes` at most, level by level, and among siblings the last used
    first.  With them the number of nodes right below a root, or below one that is told of, that are left out.
    """
    told: list[Outlined] = []
    left_out = 0
    level = [(-1, root) for root in roots]
    for _ in range(depth):
        children = [(place, child) for place, node in level for child in node.children.values()]
        # Parents are told in the order of use, and a child is never younger: a level is sorted as a whole.
        chosen = nlargest(max_nodes - len(told), children, key=lambda entry: entry[1].tick)
        left_out += len(children) - len(chosen)
        level = []
        for place, node in chosen:
            level.append((len(told), node))
            told.append(_outlined(node, place, head_tokens))
    return told, left_out + sum(len(node.children) for _, node in level)


def _outlined(node: Node, parent: int, head_tokens: int) -> Outlined:
    return Outlined(
        namespace=node.namespace,
        parent=parent,
        head=node.key[: head_tokens * TOKEN_BYTES],
        tokens=len(node.key) // TOKEN_BYTES,
        pages=len(node.pages),
        locks=node.locks,
        pins=node.pins,
        hits=node.hits,
        tick=node.tick,
        children=len(node.children),
    )


@dataclass(frozen=True, slots=True)
class Eviction:
    """When a page left, by the clock of whoever keeps the log, why, and for whom."""

    at: float
    reason: str
    whom: str = ""


class EvictionLog:
    """The last evicted runs, each under a digest of all tokens up to the end of its first page.

    A request that stops short at a page border asks for the digest up to the end of the page that it would need
    next.  128-bit digests: a wrong answer, which would be a wrong explanation and nothing more, is out of reach.
    """

    def __init__(self, page_size: int, capacity: int = 16384) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._capacity = capacity
        self._entries: OrderedDict[bytes, Eviction] = OrderedDict()

    def add(self, namespace: str, tokens: bytes, start: int, eviction: Eviction) -> None:
        """Tokens `[start, end)` of a run have left; `start` is on a page border."""
        self._entries[self._digest(namespace, tokens, start)] = eviction
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, namespace: str, tokens: bytes, matched: int) -> Eviction | None:
        """The eviction, if one is remembered, of the page behind the full pages among `matched` tokens."""
        return self._entries.get(self._digest(namespace, tokens, matched))

    def _digest(self, namespace: str, tokens: bytes, start: int) -> bytes:
        end = start * TOKEN_BYTES // self._page_bytes * self._page_bytes + self._page_bytes
        return blake2b(tokens[:end], digest_size=16, key=blake2b(namespace.encode()).digest()).digest()
