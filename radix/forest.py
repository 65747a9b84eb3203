"""The nodes of all namespaces and what is counted over them.  Every change of structure or of locks is made here.

Counters are kept for speed and can be recomputed from the nodes (`radix.audit`).  A node is in `leaves` exactly when
it is neither a root nor empty, and has no children, no branches and no locks.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from radix.eviction import EvictionPolicy, Leaves
from radix.node import TOKEN_BYTES, Node
from radix.pool import PagePool


class Forest:
    """One root for each namespace that has pages or locks.

    num_pages     pages of all nodes; each is shared from the pool once, here
    locked_pages  pages of nodes with locks
    pinned_pages  of these, for each namespace, the pages of its nodes with pins
    num_nodes     nodes but for the roots and the empty ones that begin branches
    branches      for each namespace the empty nodes that begin its branches, under the nodes they hang from
    version       grows with every change of structure
    leaves        the nodes that may be evicted
    """

    __slots__ = (
        "branches",
        "leaves",
        "locked_pages",
        "num_nodes",
        "num_pages",
        "page_bytes",
        "page_size",
        "pinned_pages",
        "pool",
        "roots",
        "version",
    )

    def __init__(self, pool: PagePool, policy: EvictionPolicy) -> None:
        self.pool = pool
        self.page_size = pool.page_size
        self.page_bytes = pool.page_size * TOKEN_BYTES
        self.roots: dict[str, Node] = {}
        self.branches: dict[str, dict[int, Node]] = {}
        self.leaves: Leaves = policy.leaves(pool.num_pages)
        self.num_pages = 0
        self.locked_pages = 0
        self.pinned_pages: Counter[str] = Counter()
        self.num_nodes = 0
        self.version = 0

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots and those that begin branches, parents before children."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            children = node.children.values()
            yield from children
            stack.extend(children)
            stack.extend((node.branches or {}).values())

    def tops(self, namespace: str) -> list[Node]:
        """What the runs of a namespace hang from: its root and the beginnings of its branches, as far as they are."""
        root = self.roots.get(namespace)
        return [*([] if root is None else [root]), *self.branches.get(namespace, {}).values()]

    def root(self, namespace: str) -> Node:
        """The root of a namespace, made when there is none; `lock_path` or `attach` must follow."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, b"", array("q"), 0, None)
        return root

    # Locks --------------------------------------------------------------------------------------------------------

    def lock_path(self, node: Node, above: Node | None = None) -> None:
        """One lock more on each node from here up to, and without, `above` (None: all the way, the root included)."""
        at: Node | None = node
        while at is not above and at is not None:
            if not at.locks:
                self.locked_pages += len(at.pages)
                if at.entry is not None:
                    self.leaves.discard(at)
            at.locks += 1
            at = at.parent

    def unlock_path(self, node: Node) -> None:
        """One lock less on each node from here to the root."""
        at: Node | None = node
        while at is not None:
            above = at.parent
            at.locks -= 1
            if not at.locks:
                self.locked_pages -= len(at.pages)
                if not at.children and at.branches is None:
                    self._childless(at)
            at = above

    def pin_path(self, node: Node) -> None:
        """One lock more on each node from here to the root, which is a pin."""
        self.lock_path(node)
        at: Node | None = node
        while at is not None:
            if not at.pins and at.pages:
                self.pinned_pages[at.namespace] += len(at.pages)
            at.pins += 1
            at = at.parent

    def unpin_path(self, node: Node) -> None:
        """The inverse of `pin_path`."""
        at: Node | None = node
        while at is not None:
            at.pins -= 1
            if not at.pins and at.pages:
                self.pinned_pages[at.namespace] -= len(at.pages)
                if not self.pinned_pages[at.namespace]:
                    del self.pinned_pages[at.namespace]
            at = at.parent
        self.unlock_path(node)

    def _childless(self, node: Node) -> None:
        """Nothing follows a node, and it has no locks: it may be evicted from now on, or nobody needs it any more."""
        if node.parent is None:
            del self.roots[node.namespace]
        elif node.pages:
            self.leaves.add(node)
        else:
            self._end_branch(node)

    # Branches ---------------------------------------------------------------------------------------------------------

    def branch(self, node: Node, namespace: str) -> Node:
        """The beginning of a namespace's branch under `node`, made when there is none; `attach` must follow."""
        branches = node.branches or {}
        found = branches.get(namespace)
        if found is None:
            if node.entry is not None:
                self.leaves.discard(node)
            found = Node(namespace, b"", array("q"), node.start + len(node.pages), node)
            branches[namespace] = found
            node.branches = branches
            self.branches.setdefault(namespace, {})[id(found)] = found
        return found

    def _end_branch(self, node: Node) -> None:
        """Take an empty node without children and locks out."""
        above = node.parent
        assert above is not None, "a branch hangs from a node"
        assert above.branches is not None, "a branch hangs from a node"
        del above.branches[node.namespace]
        self._unlist(node)
        node.parent = None
        node.generation += 1
        if not above.branches:
            above.branches = None
            self.prune(above)

    def _unlist(self, node: Node) -> None:
        mine = self.branches[node.namespace]
        del mine[id(node)]
        if not mine:
            del self.branches[node.namespace]

    # Growth.  The caller has shared the pages. ------------------------------------------------------------------------

    def attach(self, parent: Node, key: bytes, pages: array[int]) -> Node:
        """A new leaf under `parent`, which is no evictable leaf itself.  It joins `leaves` when its caller says so."""
        leaf = Node(parent.namespace, key, pages, parent.start + len(parent.pages), parent)
        parent.add_child(key[: self.page_bytes], leaf, self.page_bytes)
        self.num_nodes += 1
        self.num_pages += len(pages)
        self.version += 1
        return leaf

    def extend(self, leaf: Node, key: bytes, pages: array[int], whole: int) -> None:
        """Let a leaf go on with `pages` behind its first `whole` ones; what it has behind them is its tail page.

        A tail page that goes makes matches from before stale.
        """
        replaced = leaf.pages[whole:]
        if replaced:
            leaf.key = leaf.key[: whole * self.page_bytes] + key
            leaf.pages[whole:] = pages
            leaf.generation += 1
            self.pool.release(replaced)
        else:
            leaf.key += key
            leaf.pages += pages
        more = len(pages) - len(replaced)
        self.num_pages += more
        if leaf.locks:
            self.locked_pages += more
        self.leaves.changed(leaf)
        self.version += 1

    def split(self, node: Node, whole: int) -> Node:
        """Part a node behind its first `whole` pages.  Returns the upper part, which is new.

        The node itself stays the lower part, so that whoever holds it still names the full path, and its locks go
        for both parts: each of them came, and will leave, through both.
        """
        parent = node.parent
        assert parent is not None, "a root cannot be split"
        assert 0 < whole < len(node.pages), "a split needs pages on both sides"
        cut = whole * self.page_bytes
        upper = Node(node.namespace, node.key[:cut], node.pages[:whole], node.start, parent)
        upper.locks = node.locks
        upper.pins = node.pins
        upper.tick = node.tick
        upper.hits = node.hits
        upper.uses = node.uses
        upper.reply = node.reply
        parent.children[upper.key[: self.page_bytes]] = upper
        node.key = node.key[cut:]
        del node.pages[:whole]
        node.start += whole
        node.parent = upper
        upper.add_child(node.key[: self.page_bytes], node, self.page_bytes)
        self.leaves.changed(node)
        self.num_nodes += 1
        self.version += 1
        return upper

    # Shrinking -------------------------------------------------------------------------------------------------------

    def remove(self, leaf: Node) -> int:
        """Take an unlocked leaf out.  Returns how many of its pages became free.

        The parent, when this was its last child, may be the next; `prune` sees to that.
        """
        parent = leaf.parent
        assert parent is not None, "a root does not go this way"
        assert not leaf.locks, "a locked node must not go"
        assert leaf.ends, "only leaves can go"
        self.leaves.discard(leaf)
        parent.remove_child(leaf.key[: self.page_bytes], self.page_bytes)
        leaf.parent = None
        leaf.generation += 1
        self.num_nodes -= 1
        self.num_pages -= len(leaf.pages)
        self.version += 1
        return self.pool.release(leaf.pages)

    def prune(self, node: Node) -> None:
        """After what followed `node` went: with nothing and no lock left it becomes evictable, a root goes."""
        if node.ends and not node.locks:
            self._childless(node)

    def trim(self, leaf: Node, whole: int) -> int:
        """Leave an unlocked leaf its first `whole` pages.  Returns how many of the others became free."""
        going = leaf.pages[whole:]
        leaf.key = leaf.key[: whole * self.page_bytes]
        del leaf.pages[whole:]
        leaf.generation += 1
        self.leaves.changed(leaf)
        self.num_pages -= len(going)
        self.version += 1
        return self.pool.release(going)

    def clear(self, top: Node) -> None:
        """Take an unlocked root, or an unlocked beginning of a branch, out with everything that follows."""
        stack = list(top.children.values())
        top.children = {}
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            for branch in (node.branches or {}).values():
                stack.extend(branch.children.values())
                self._unlist(branch)
                branch.parent = None
                branch.generation += 1
            self.leaves.discard(node)
            node.parent = None
            node.generation += 1
            self.num_nodes -= 1
            self.num_pages -= len(node.pages)
            self.pool.release(node.pages)
        self._childless(top)
        self.version += 1
