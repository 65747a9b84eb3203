"""A node of the tree: a run of pages, the runs that follow it, and who needs it.

    namespace whose tree this is
    key       the run's tokens, packed int32; whole pages, but for the tail of a leaf
    pages     the run's page ids, the last one partly filled when the key has a tail
    start     pages on the path above, so that the run covers pages [start, start + len(pages))
    children  the runs that follow, under the bytes of their first page (a run shorter than a page: its own bytes).
              Two runs that differ anywhere in their first page are siblings.
    branches  what goes on from here in other namespaces, each under an empty node (`radix.heads`); None: nothing
    order     the keys of `children`, sorted, once there are many of them and somebody asked for the closest
    num_tails children that are shorter than a page
    locks     receipts whose path goes through here; a node's count is never below a child's
    pins      how many of them are pins, which hold for a time and not for a request
    tick      when it was last used, by the tree's counter of walks; never below a child's
    hits      how many matches went through it
    uses      how often requests have used this run and gone on from it, as far as that can be told
    reply     tokens of the reply that its run ends with; 0: not told
    hint      what is known of its future
    generation  grows when pages leave the node, so that matches from before are known to be stale
    entry     its place among the leaves that may be evicted, or None
    ghost     under which place its evicted part is remembered, or None

A root has no key, no pages and no parent; an empty node that begins a branch has no key and no pages.  A node that has
left the tree has no parent either.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from enum import Enum
from typing import Any

from sortedcontainers import SortedList

TOKEN_BYTES = 4
# Up to this many children are compared one by one, which is quicker than keeping their order.
FEW_CHILDREN = 6


class Hint(Enum):
    """What is known of the future of a run.

    NONE     nothing
    WAITING  it is a conversation that goes on when a tool has answered
    DONE     its branch is closed, or superseded by another one
    PASSED   it is the small rest of a run from which a request parted near its end; the tree finds that out itself
    """

    NONE = "none"
    WAITING = "waiting"
    DONE = "done"
    PASSED = "passed"


class Node:
    """See the head of this file."""

    __slots__ = (
        "branches",
        "children",
        "entry",
        "generation",
        "ghost",
        "hint",
        "hits",
        "key",
        "locks",
        "namespace",
        "num_tails",
        "order",
        "pages",
        "parent",
        "pins",
        "reply",
        "start",
        "tick",
        "uses",
    )

    def __init__(self, namespace: str, key: bytes, pages: array[int], start: int, parent: Node | None) -> None:
        self.namespace = namespace
        self.key = key
        self.pages = pages
        self.start = start
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.branches: dict[str, Node] | None = None
        self.order: Any = None
        self.num_tails = 0
        self.locks = 0
        self.pins = 0
        self.tick = 0
        self.hits = 0
        self.generation = 0
        self.entry: Any = None
        self.uses = 0
        self.reply = 0
        self.hint = Hint.NONE
        self.ghost: tuple[str, int, bytes] | None = None

    @property
    def ends(self) -> bool:
        """Whether nothing follows it, in any namespace."""
        return not self.children and self.branches is None

    def add_child(self, name: bytes, child: Node, page_bytes: int) -> None:
        """Put a run under this node.  `name`: its first page, or all of it when it is shorter."""
        self.children[name] = child
        if len(name) < page_bytes:
            self.num_tails += 1
        if self.order is not None:
            self.order.add(name)

    def remove_child(self, name: bytes, page_bytes: int) -> None:
        """Take a run away from this node."""
        del self.children[name]
        if len(name) < page_bytes:
            self.num_tails -= 1
        if self.order is not None:
            if self.children:
                self.order.remove(name)
            else:
                self.order = None

    def path_tokens(self) -> bytes:
        """All tokens, packed, of the path from the root to the end of this node."""
        runs = []
        at: Node | None = self
        while at is not None:
            runs.append(at.key)
            at = at.parent
        return b"".join(reversed(runs))

    def closest(self, chunk: bytes) -> tuple[Node | None, int]:
        """The child whose first page agrees with `chunk` for the most tokens, and for how many.

        In sorted order no key agrees with `chunk` for longer than one of the two between which it would stand.
        """
        names: Iterable[bytes] = self.children
        if len(self.children) > FEW_CHILDREN:
            order = self.order
            if order is None:
                order = self.order = SortedList(self.children)
            place = order.bisect_left(chunk)
            below = order[place - 1] if place else b""
            names = (below, order[place] if place < len(self.children) else b"")
        first = chunk[:TOKEN_BYTES]
        best: bytes | None = None
        rows = 0
        for name in names:
            if name.startswith(first):
                agreed = common_tokens(name, chunk, 0, 1)
                if agreed > rows:
                    best, rows = name, agreed
        return (None, 0) if best is None else (self.children[best], rows)


def common_tokens(run: bytes, key: bytes, pos: int, known: int) -> int:
    """For how many tokens `run` and `key[pos:]` agree, when they do for the first `known`.

    Bisection over memory compares: the Python steps grow with the logarithm of the length.
    """
    low = known
    high = min(len(run), len(key) - pos) // TOKEN_BYTES
    if run[low * TOKEN_BYTES : high * TOKEN_BYTES] == key[pos + low * TOKEN_BYTES : pos + high * TOKEN_BYTES]:
        return high
    high -= 1
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if run[begin:end] == key[pos + begin : pos + end]:
            low = middle
        else:
            high = middle - 1
    return low
