"""Which leaf goes next: the policies, and the sorted set of leaves that may go.

A policy gives a leaf a number; the lowest goes first, and among equals the one that was used longest ago.  The set
holds each leaf under the number it had when it came in or was looked at last.  Use makes leaves dearer, never
cheaper, so the number in the set is at most the true one, and it is enough to bring the cheapest up to date before
it is taken: a leaf that is used a thousand times between two evictions is moved once.
"""

from __future__ import annotations

from typing import Protocol

from sortedcontainers import SortedList

from radix.node import Node

Entry = tuple[float, int, Node]


class EvictionPolicy(Protocol):
    """The order in which leaves go."""

    @property
    def name(self) -> str:
        """The word by which users choose it."""
        ...

    def cost(self, node: Node) -> float:
        """What losing this leaf costs.  Must not fall when the leaf is used."""
        ...


class LRU:
    """The leaf that was used longest ago goes first."""

    name = "lru"

    def cost(self, node: Node) -> float:
        """The tick of the last use."""
        return node.tick


class LFU:
    """The leaf that fewest matches went through goes first."""

    name = "lfu"

    def cost(self, node: Node) -> float:
        """The number of matches."""
        return node.hits


def policy_by_name(name: str) -> EvictionPolicy:
    """The policy that users call `name`.  Raises ValueError with the known names."""
    policies: tuple[EvictionPolicy, ...] = (LRU(), LFU())
    for policy in policies:
        if policy.name == name:
            return policy
    raise ValueError(f"no eviction policy {name!r}; there are {', '.join(policy.name for policy in policies)}")


class LeafQueue:
    """The leaves that may be evicted, cheapest first.  Every operation is O(log n)."""

    __slots__ = ("_entries", "_policy")

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._entries = SortedList()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, node: Node) -> None:
        """A leaf that may be evicted from now on."""
        node.entry = entry = (self._policy.cost(node), node.tick, node)
        self._entries.add(entry)

    def discard(self, node: Node) -> None:
        """A node that may not be evicted any longer, if it is here."""
        if node.entry is not None:
            self._entries.remove(node.entry)
            node.entry = None

    def changed(self, node: Node) -> None:
        """The node, if it is here, has another length or start, which may have made it cheaper."""
        if node.entry is not None and self._policy.cost(node) < node.entry[0]:
            self.discard(node)
            self.add(node)

    def cheapest(self) -> Node | None:
        """The leaf to evict next, which stays here; None when there is none."""
        entries = self._entries
        while entries:
            entry: Entry = entries[0]
            node = entry[2]
            cost = self._policy.cost(node)
            if cost == entry[0] and node.tick == entry[1]:
                return node
            del entries[0]
            node.entry = entry = (cost, node.tick, node)
            entries.add(entry)
        return None

    def check(self, leaves: list[Node]) -> None:
        """The set holds exactly these leaves, in order, none under too high a number.  Raises AssertionError."""
        assert len(self._entries) == len(leaves), f"{len(self._entries)} evictable leaves, should be {len(leaves)}"
        assert {id(entry[2]) for entry in self._entries} == {id(leaf) for leaf in leaves}, "other leaves in the set"
        last: tuple[float, int] | None = None
        for cost, tick, node in self._entries:
            assert node.entry is not None, "a leaf in the set does not know its entry"
            assert node.entry == (cost, tick, node), "a leaf knows another entry than its own"
            assert last is None or last < (cost, tick), "the set is out of order, or two leaves share a tick"
            assert (cost, tick) <= (self._policy.cost(node), node.tick), "a leaf has become cheaper unnoticed"
            last = (cost, tick)
