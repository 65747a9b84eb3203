"""The tree as clients are shown it: the scheduler's answer to a question for it."""

from __future__ import annotations

from bisect import bisect_right

from radix import Outlined, RadixTree
from scheduler.misses import tenant_of
from srt.cache_messages import CacheNode, CacheTree, Call

# First tokens of a run that are shown.
HEAD_TOKENS = 16
# However much is asked for: the answer is made between two steps of the model, and is one frame.
MAX_NODES = 10_000
MAX_DEPTH = 100

AGE_RESOLUTION_SECONDS = 0.5
MAX_SAMPLES = 4096


class Ages:
    """Seconds since a node was used, from the tick that it was stamped with.

    The tree has no clock.  So the time is noted now and then beside the tree's tick; when there are too many notes,
    every other one of the older half is forgotten, which makes ages coarser the longer ago they began.
    """

    def __init__(self) -> None:
        self._ticks: list[int] = []
        self._times: list[float] = []

    def note(self, tick: int, now: float) -> None:
        """`tick` is the tree's now."""
        if self._times and (now - self._times[-1] < AGE_RESOLUTION_SECONDS or tick == self._ticks[-1]):
            return
        self._ticks.append(tick)
        self._times.append(now)
        if len(self._ticks) > MAX_SAMPLES:
            del self._ticks[1 : MAX_SAMPLES // 2 : 2]
            del self._times[1 : MAX_SAMPLES // 2 : 2]

    def age(self, tick: int, now: float) -> float:
        """At least how long ago the tree was at `tick`, exact to the distance of two notes."""
        # The first note from that tick on: the use was at that time or before it.
        place = bisect_right(self._ticks, tick - 1)
        return now - self._times[place] if place < len(self._times) else 0.0


class TreeInspection:
    """Answers calls for the tree."""

    def __init__(self, tree: RadixTree, page_size: int) -> None:
        self._tree = tree
        self._page_size = page_size
        self._ages = Ages()

    def note(self, now: float) -> None:
        """To be called now and then, so that ages are known."""
        self._ages.note(self._tree.tick, now)

    def answer(self, call: Call, now: float) -> CacheTree:
        """What the caller's tenant may see of the tree."""
        mine = [namespace for namespace in self._tree.namespaces() if tenant_of(namespace) == call.tenant]
        depth, most = min(call.depth, MAX_DEPTH), min(call.max_nodes, MAX_NODES)
        outlined, left_out = self._tree.outline(mine, depth, most, HEAD_TOKENS)
        nodes = tuple(self._node(node, now) for node in outlined)
        return CacheTree(call.call_id, nodes, self._page_size, left_out)

    def _node(self, node: Outlined, now: float) -> CacheNode:
        return CacheNode(
            namespace=node.namespace,
            parent=node.parent,
            tokens=node.tokens,
            pages=node.pages,
            head=node.head,
            users=node.locks - node.pins,
            pins=node.pins,
            hits=node.hits,
            age_seconds=self._ages.age(node.tick, now),
            children=node.children,
        )
