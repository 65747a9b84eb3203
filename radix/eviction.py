"""Which leaf goes next: what a policy is, and the two policies that give each leaf a number.

The lowest number goes first, and among equals the leaf that was used longest ago.  The sorted set holds each leaf
under the number it had when it came in or was looked at last.  Use makes leaves dearer, never cheaper, so the number
in the set is at most the true one, and it is enough to bring the cheapest up to date before it is taken: a leaf that
is used a thousand times between two evictions is moved once.
"""

from __future__ import annotations

from typing import Protocol

from sortedcontainers import SortedList

from radix.node import Hint, Node

Entry = tuple[float, int, Node]


# (kind of leaf, ticks since its last use, share of it that is used again), as the policy that made it understands it.
Reuse = tuple[int, int, float]


class Leaves(Protocol):
    """The leaves that may be evicted, in the order of a policy.  `now`: the tree's tick.

    What has no use for what it is told does nothing with it; `reuse` answers None then.
    """

    def __len__(self) -> int: ...

    def add(self, node: Node) -> None:
        """A leaf that may be evicted from now on."""
        ...

    def discard(self, node: Node) -> None:
        """A node that may not be evicted any longer, if it is here."""
        ...

    def changed(self, node: Node) -> None:
        """The node, if it is here, has another length, start or hint, which may have made it cheaper."""
        ...

    def cheapest(self, now: int) -> Node | None:
        """The leaf to evict next, which stays here; None when there is none."""
        ...

    def check(self, leaves: list[Node]) -> None:
        """These are exactly the leaves that are here.  Raises AssertionError."""
        ...

    def reuse(self, node: Node, pages: int, now: int) -> Reuse | None:
        """A request is about to use the first `pages` pages of a node: what there is to `learn` if it does."""
        ...

    def learn(self, reuse: Reuse) -> None:
        """The request did."""
        ...

    def leaves_pages(self, leaf: Node, kept: int, page_bytes: int) -> None:
        """All but the first `kept` pages of a leaf are about to be evicted."""
        ...

    def returns(self, namespace: str, tokens: bytes, known: int, page_bytes: int, now: int) -> int:
        """A run comes in, new from page `known` on.  Returns how often the new part was used before, if remembered."""
        ...


class EvictionPolicy(Protocol):
    """The order in which leaves go."""

    @property
    def name(self) -> str:
        """The word by which users choose it."""
        ...

    def leaves(self, num_pages: int) -> Leaves:
        """An empty set of leaves in this order, for a pool of `num_pages` pages."""
        ...


class Cost(Protocol):
    """A number for each leaf.  Must not fall when the leaf is used."""

    def __call__(self, node: Node) -> float: ...


# What waits for a tool counts as used so many uses of the cache later.  On coding sessions, 17 at a time, anything from
# 10 to 80 does as well (docs/eviction.md); being bounded, it keeps no page for ever that nobody comes back for.
WAITING_HEAD_START = 40


class LRU:
    """The leaf that was used longest ago goes first, but for what clients have said of it."""

    name = "lru"

    def leaves(self, num_pages: int) -> Leaves:
        """Sorted by the tick of the last use: what is done with before everything, what waits for a tool later."""
        return LeafQueue(_recency)


def _recency(node: Node) -> float:
    if node.hint is Hint.DONE:
        return -1
    return node.tick + WAITING_HEAD_START if node.hint is Hint.WAITING else node.tick


class LFU:
    """The leaf that fewest matches went through goes first."""

    name = "lfu"

    def leaves(self, num_pages: int) -> Leaves:
        """Sorted by the number of matches."""
        return LeafQueue(lambda node: node.hits)


class LeafQueue:
    """The leaves that may be evicted, the one with the lowest cost first.  Every operation is O(log n)."""

    __slots__ = ("_cost", "_entries")

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._entries = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node) -> None:
        """A leaf that may be evicted from now on."""
        node.entry = entry = (self._cost(node), node.tick, node)
        self._entries.add(entry)

    def discard(self, node: Node) -> None:
        """A node that may not be evicted any longer, if it is here."""
        if node.entry is not None:
            self._entries.remove(node.entry)
            node.entry = None

    def changed(self, node: Node) -> None:
        """The node, if it is here, has another length or start, which may have made it cheaper."""
        if node.entry is not None and self._cost(node) < node.entry[0]:
            self.discard(node)
            self.add(node)

    def cheapest(self, now: int) -> Node | None:
        """The leaf to evict next, which stays here; None when there is none."""
        entries = self._entries
        while entries:
            entry: Entry = entries[0]
            node = entry[2]
            cost = self._cost(node)
            if cost == entry[0] and node.tick == entry[1]:
                return node
            del entries[0]
            node.entry = entry = (cost, node.tick, node)
            entries.add(entry)
        return None

    def reuse(self, node: Node, pages: int, now: int) -> Reuse | None:
        """Nothing is learned."""
        return None

    def learn(self, reuse: Reuse) -> None:
        """Nothing is learned."""

    def leaves_pages(self, leaf: Node, kept: int, page_bytes: int) -> None:
        """Nothing is remembered."""

    def returns(self, namespace: str, tokens: bytes, known: int, page_bytes: int, now: int) -> int:
        """Nothing is remembered."""
        return 0

    def check(self, leaves: list[Node]) -> None:
        """The set holds exactly these leaves, in order, none under too high a number.  Raises AssertionError."""
        assert len(self._entries) == len(leaves), f"{len(self._entries)} evictable leaves, should be {len(leaves)}"
        assert {id(entry[2]) for entry in self._entries} == {id(leaf) for leaf in leaves}, "other leaves in the set"
        last: tuple[float, int] | None = None
        for cost, tick, node in self._entries:
            assert node.entry is not None, "a leaf in the set does not know its entry"
            assert node.entry == (cost, tick, node), "a leaf knows another entry than its own"
            assert last is None or last < (cost, tick), "the set is out of order, or two leaves share a tick"
            assert (cost, tick) <= (self._cost(node), node.tick), "a leaf has become cheaper unnoticed"
            last = (cost, tick)
