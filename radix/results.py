"""What the tree answers: matches, lock receipts, insertions, and the errors of using them too late."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from radix.eviction import Reuse
from radix.node import Node


class StaleMatch(LookupError):
    """The pages of this match have left the tree since: match again."""


class StaleLock(ValueError):
    """This receipt has been given back already, or is for another namespace."""


class Match(NamedTuple):
    """The longest known prefix, to the token.  A hint until it is locked.

    num_tokens    full pages and the rows of the partial page together
    pages         the pages that match whole, in order; the caller may keep the array
    partial_page  the page whose first `partial_rows` rows match too (1..page_size-1), to be copied into a page of
                  one's own before anything is written behind them; None when the match ends on a page border
    namespace, node, generation   where it was found, for `lock`; node is None when nothing matched
    """

    num_tokens: int
    pages: array[int]
    partial_page: int | None
    partial_rows: int
    namespace: str
    node: Node | None
    generation: int

    @property
    def num_pages(self) -> int:
        """Pages that match whole, and the partial one."""
        return len(self.pages) + (self.partial_page is not None)

    @property
    def last_whole(self) -> Node:
        """The last node of which every page is of use; there must be a match, and of this moment."""
        assert self.node is not None, "nothing matched"
        parent = self.node.parent
        return self.node if parent is None or self.num_pages >= self.node.start + len(self.node.pages) else parent

    def kept_by_locks(self) -> int:
        """How many of the matched pages, the first ones, are locked by somebody already."""
        at = self.node
        while at is not None and not at.locks:
            at = at.parent
        return 0 if at is None else min(at.start + len(at.pages), self.num_pages)

    def kept_by_pins(self) -> int:
        """How many of the matched pages, the first ones, are pinned."""
        at = self.node
        while at is not None and not at.pins:
            at = at.parent
        return 0 if at is None else min(at.start + len(at.pages), self.num_pages)


class Lock:
    """A receipt: the path from `node` to the root is locked until the receipt is given back.

    A node that is split keeps its identity as the lower part, so the receipt goes on naming the whole path.

    namespace  whose request it is for; the node may be a public head's

    uses   how often the run that was matched has been used now, if what is inserted with the receipt continues it
    reuse  what the policy learns when something is inserted with the receipt: that the match was put to use
    """

    __slots__ = ("held", "namespace", "node", "reuse", "uses")

    def __init__(self, node: Node, uses: int = 0, reuse: Reuse | None = None, namespace: str | None = None) -> None:
        self.node = node
        self.namespace = node.namespace if namespace is None else namespace
        self.uses = uses
        self.reuse = reuse
        self.held = True


class Insert(NamedTuple):
    """What became of an inserted run.

    pages       for each full page of the run, the tree's page: the given one where the tree took it, else the one
                that the tree had already.  The caller points its table at these and releases its duplicates.
    new_tokens  tokens in the pages that the tree took, its tail page included; 0 when it held the whole run
    lock        the receipt for the whole inserted path, when one was handed in
    """

    pages: array[int]
    new_tokens: int
    lock: Lock | None
