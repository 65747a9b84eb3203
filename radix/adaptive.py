"""The default eviction policy: the leaf goes that is least likely to be used again for the room that it takes.

Leaves are sorted into a few kinds: by how often their run was used again, by the length of the reply that ends it,
and by what is known of them beyond that (`radix.node.Hint`).  How soon leaves of each kind are used again is learned
from the requests (`radix.reuse`), evicted ones included (`radix.ghosts`).

    kind 0   [ oldest ........ youngest ]    Within a kind the leaf that was used longest ago goes first; between the
    kind 1   [ oldest .. youngest ]          kinds, the index of reuse decides.  So only the oldest leaf of each kind
    ...                                      is looked at.

A leaf whose branch is known to be done goes before all others.  While nothing has been learned, a leaf that was
used more often may rest longer before it goes.
"""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedList

from radix.eviction import Leaves, Reuse
from radix.ghosts import Ghost, Ghosts, Place
from radix.node import Hint, Node
from radix.reuse import BUCKETS, ReuseTable, count_ages

MAX_USES = 3
# A reply of more tokens than this is long.  Questions with short answers tend to come in numbers about one text.
SHORT_REPLY = 64
PASSED = 2 * (MAX_USES + 1)
WAITING = PASSED + 1
DONE = WAITING + 1
# Kinds by uses and reply, then PASSED and WAITING; see ReuseTable.
WEIGHTS = (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 2.5, 2.5, 0.5, 4.0)
# Evicted pages that are remembered, as a multiple of the pool.
GHOST_POOLS = 4
# Estimates are renewed after so many events, or a quarter of what there is to look at, if that is more.
MIN_EVENTS = 64
# So many leaves of a kind, evenly spread over their ages, stand for all of them.
SAMPLE = 512

Entry = tuple[int, int, Node]


def kind_of(node: Node) -> int:
    """The kind of a leaf: its row in the table of reuse, or DONE."""
    hint = node.hint
    if hint is Hint.NONE:
        uses = max(node.uses, node.hits)
        return 2 * min(uses, MAX_USES) + (node.reply > SHORT_REPLY)
    return DONE if hint is Hint.DONE else WAITING if hint is Hint.WAITING else PASSED


class AdaptiveLeaves:
    """The leaves that may be evicted, a sorted set for each kind.  Every operation is O(log n).

    An entry is (tick, kind, leaf) as they were when the leaf came in or was looked at last; use only makes a leaf
    younger, so it is enough to bring the oldest of each kind up to date.
    """

    __slots__ = ("_count", "_events", "_ghosts", "_now", "_queues", "_table")

    def __init__(self, num_pages: int) -> None:
        self._queues = [SortedList() for _ in range(DONE + 1)]
        self._count = 0
        self._ghosts = Ghosts(GHOST_POOLS * num_pages)
        self._table = ReuseTable(WEIGHTS)
        self._events = 0
        self._now = 0

    def __len__(self) -> int:
        return self._count

    # The set --------------------------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """A leaf that may be evicted from now on."""
        kind = kind_of(node)
        node.entry = entry = (node.tick, kind, node)
        self._queues[kind].add(entry)
        self._count += 1
        self._events += 1

    def discard(self, node: Node) -> None:
        """A node that may not be evicted any longer, if it is here."""
        if node.entry is not None:
            self._queues[node.entry[1]].remove(node.entry)
            node.entry = None
            self._count -= 1

    def changed(self, node: Node) -> None:
        """The node, if it is here, has another length, start or hint."""
        if node.entry is not None and kind_of(node) != node.entry[1]:
            self.discard(node)
            self.add(node)

    def cheapest(self, now: int) -> Node | None:
        """The leaf to evict next, which stays here; None when there is none."""
        self._now = now
        if self._events >= max(MIN_EVENTS, (min(self._count, SAMPLE) + len(self._ghosts)) // 4):
            self._estimate()
        done = self._oldest(DONE)
        if done is not None:
            return done[2]
        best: tuple[float, int] | None = None
        chosen: Node | None = None
        index = self._table.index
        for kind in range(DONE):
            oldest = self._oldest(kind) if self._queues[kind] else None
            if oldest is None:
                continue
            worth = (index(kind, now - oldest[0]), oldest[0])
            if best is None or worth < best:
                best, chosen = worth, oldest[2]
        return chosen

    def _oldest(self, kind: int) -> Entry | None:
        queue = self._queues[kind]
        while queue:
            entry: Entry = queue[0]
            node = entry[2]
            if entry[0] == node.tick:
                return entry
            self.discard(node)
            self.add(node)
        return None

    def check(self, leaves: list[Node]) -> None:
        """The set holds exactly these leaves, in order, none as younger than it is.  Raises AssertionError."""
        entries = [entry for queue in self._queues for entry in queue]
        assert len(entries) == len(leaves) == self._count, f"{len(entries)} evictable leaves, should be {len(leaves)}"
        assert {id(entry[2]) for entry in entries} == {id(leaf) for leaf in leaves}, "other leaves in the set"
        for kind, queue in enumerate(self._queues):
            last = -1
            for entry in queue:
                tick, filed, node = entry
                assert node.entry == entry, "a leaf knows another entry than its own"
                assert filed == kind, "a leaf is filed under another kind"
                assert last < tick <= node.tick, "a kind is out of order, or a leaf looks younger than it is"
                last = tick

    # Learning -------------------------------------------------------------------------------------------------------

    def reuse(self, node: Node, pages: int, now: int) -> Reuse | None:
        """A request is about to use the first pages of this node: what is to be learned of it, if it stays at that."""
        if node.entry is None or node.entry[1] == DONE:
            return None
        tick, kind, _ = node.entry
        return kind, now - tick, pages / len(node.pages)

    def learn(self, reuse: Reuse) -> None:
        """A request did use what it was about to use."""
        self._table.reused(*reuse)
        self._events += 1

    def leaves_pages(self, leaf: Node, kept: int, page_bytes: int) -> None:
        """All but the first `kept` pages of a leaf are about to be evicted."""
        kind = kind_of(leaf)
        if kind == DONE:
            return
        pages = len(leaf.pages) - kept
        if leaf.ghost is not None:
            # More of a leaf that went in part: one ghost for all of it.
            before = self._ghosts.take(leaf.ghost)
            pages += 0 if before is None else before.pages
        first = leaf.key[kept * page_bytes : (kept + 1) * page_bytes]
        leaf.ghost = (leaf.namespace, leaf.start + kept, first)
        for ghost in self._ghosts.add(leaf.ghost, Ghost(kind, leaf.tick, pages, max(leaf.uses, leaf.hits))):
            self._table.given_up(ghost.kind, self._now - ghost.tick, 1.0)
            self._events += 1

    def returns(self, namespace: str, tokens: bytes, known: int, page_bytes: int, now: int) -> int:
        """A run comes in of which the first `known` pages are here already.

        Returns how often what is new was used before, this time included; 0: nothing is remembered of it.
        """
        ghosts, table = self._ghosts, self._table
        end = len(tokens) // page_bytes
        uses, at = 0, known
        while at < end and len(ghosts):
            place: Place = (namespace, at, tokens[at * page_bytes : (at + 1) * page_bytes])
            ghost = ghosts.take(place)
            if ghost is None:
                break
            share = min(1.0, (end - at) / ghost.pages)
            table.reused(ghost.kind, now - ghost.tick, share)
            table.given_up(ghost.kind, now - ghost.tick, 1.0 - share)
            self._events += 1
            uses = max(uses, ghost.uses + 1)
            at += ghost.pages
        return uses

    def _estimate(self) -> None:
        self._events = 0
        ticks: list[list[int]] = [[] for _ in range(DONE)]
        for ghost in self._ghosts:
            ticks[ghost.kind].append(ghost.tick)
        open_spells = np.zeros((DONE, BUCKETS))
        for kind in range(DONE):
            open_spells[kind] = count_ages(self._now, ticks[kind])
            queue = self._queues[kind]
            step = -(-len(queue) // SAMPLE) or 1
            sample = [queue[place][2].tick for place in range(0, len(queue), step)]
            open_spells[kind] += step * count_ages(self._now, sample)
        self._table.estimate(open_spells)


class Adaptive:
    """See the head of this file."""

    name = "adaptive"

    def leaves(self, num_pages: int) -> Leaves:
        """An empty set that has learned nothing yet."""
        return AdaptiveLeaves(num_pages)
