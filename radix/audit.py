"""Looking at the tree from outside: recompute everything that is counted, and draw it."""

from __future__ import annotations

from array import array
from collections import Counter

from radix.forest import Forest
from radix.node import TOKEN_BYTES, Node

SHOWN_TOKENS = 6


def check_forest(forest: Forest, holders: list[Node] | None) -> None:
    """Recompute counters, links, lock counts, order and page ownership.  Raises AssertionError at the first fault.

    `holders`: the node of each receipt that is out; None: not known, so lock counts are only checked for order.
    """
    nodes = list(forest.nodes())
    branches = [branch for node in nodes for branch in (node.branches or {}).values()]
    pages = [page for node in nodes for page in node.pages]
    assert len(set(pages)) == len(pages), "a page is in two places"
    assert all(forest.pool.refcount(page) > 0 for page in pages), "a page of the tree is free"
    assert forest.num_pages == len(pages), f"num_pages {forest.num_pages}, should be {len(pages)}"
    assert forest.num_nodes == len(nodes), f"num_nodes {forest.num_nodes}, should be {len(nodes)}"
    locked = sum(len(node.pages) for node in nodes if node.locks)
    assert forest.locked_pages == locked, f"locked_pages {forest.locked_pages}, should be {locked}"
    pinned: Counter[str] = Counter()
    for node in nodes:
        pinned[node.namespace] += len(node.pages) if node.pins else 0
    assert forest.pinned_pages == +pinned, f"pinned_pages {forest.pinned_pages}, should be {+pinned}"
    for name, root in forest.roots.items():
        assert root.namespace == name, f"the root of {root.namespace!r} stands under {name!r}"
        assert not root.pages, "a root has pages"
        assert root.parent is None, "a root has a parent"
        assert root.children or root.locks, f"namespace {name!r} is empty and held by nobody"
        _check_children(forest, root)
    for node in nodes:
        _check_node(forest, node)
        _check_children(forest, node)
        for name, branch in (node.branches or {}).items():
            _check_branch(node, name, branch)
            _check_children(forest, branch)
    listed = [branch for mine in forest.branches.values() for branch in mine.values()]
    assert {id(branch) for branch in branches} == {id(branch) for branch in listed}, "other branches than are listed"
    assert all(forest.branches.values()), "a namespace without branches is listed"
    forest.leaves.check([node for node in nodes if node.ends and not node.locks])
    if holders is not None:
        _check_locks(forest, [*branches, *nodes], holders)


def _check_node(forest: Forest, node: Node) -> None:
    parent = node.parent
    assert parent is not None, "a node without a parent"
    assert node.namespace == parent.namespace, "a node under another namespace"
    assert node.key, "a node without tokens"
    assert len(node.key) % TOKEN_BYTES == 0, "a node with part of a token"
    assert len(node.pages) == -(-len(node.key) // forest.page_bytes), f"{len(node.pages)} pages for its tokens"
    assert len(node.key) % forest.page_bytes == 0 or node.ends, "something follows a tail"
    assert node.branches is None or node.branches, "an empty dict of branches"
    assert node.start == parent.start + len(parent.pages), f"start {node.start} does not follow its parent"
    assert parent.locks >= node.locks >= 0, f"{node.locks} locks under {parent.locks}"
    assert parent.pins >= node.pins >= 0, f"{node.pins} pins under {parent.pins}"
    assert node.locks >= node.pins, f"{node.pins} pins among {node.locks} locks"
    assert parent.tick >= node.tick, "a node looks younger than its parent"
    assert parent.hits >= node.hits, "a node has more hits than its parent"


def _check_branch(node: Node, name: str, branch: Node) -> None:
    assert branch.parent is node, "a branch names another node than the one it hangs from"
    assert branch.namespace == name != node.namespace, "a branch stands under another name"
    assert not branch.pages, "the beginning of a branch has pages"
    assert not branch.key, "the beginning of a branch has tokens"
    assert branch.branches is None, "a branch begins with branches"
    assert branch.children or branch.locks, f"a branch of {name!r} is empty and held by nobody"
    assert branch.start == node.start + len(node.pages), "a branch does not follow its node"
    assert node.locks >= branch.locks >= 0, f"{branch.locks} locks under {node.locks}"
    assert node.pins >= branch.pins >= 0, f"{branch.pins} pins under {node.pins}"
    assert node.tick >= branch.tick, "a branch looks younger than its node"
    assert node.hits >= branch.hits, "a branch has more hits than its node"


def _check_children(forest: Forest, node: Node) -> None:
    for name, child in node.children.items():
        assert child.parent is node, "a child names another parent"
        assert child.key[: forest.page_bytes] == name, "a child stands under another page than its first"
    tails = sum(len(name) < forest.page_bytes for name in node.children)
    assert node.num_tails == tails, f"num_tails {node.num_tails}, should be {tails}"
    assert node.order is None or list(node.order) == sorted(node.children), "the order of the children is out of date"


def _check_locks(forest: Forest, nodes: list[Node], holders: list[Node]) -> None:
    counts: dict[int, int] = {}
    for holder in holders:
        at: Node | None = holder
        while at is not None:
            counts[id(at)] = counts.get(id(at), 0) + 1
            at = at.parent
    for node in [*forest.roots.values(), *nodes]:
        held = counts.pop(id(node), 0)
        assert node.locks == held, f"a node has {node.locks} locks, but {held} receipts go through it"
    assert not counts, "a receipt names a node that is not in the tree"


def draw_forest(forest: Forest) -> str:
    """One line for each node: pages, tokens, first tokens, locks, hits, last use; indented as it hangs."""
    total = f"{forest.num_nodes} nodes, {forest.num_pages} pages of {forest.page_size} tokens"
    lines = [f"{total}, {forest.locked_pages} pages locked"]
    for name, root in forest.roots.items():
        lines.append(f"namespace {name!r}, locks {root.locks}")
        stack = [("", child) for child in reversed(root.children.values())]
        while stack:
            indent, node = stack.pop()
            lines.append(f"{indent}+- {_describe(node)}")
            stack.extend((f"{indent}|  ", child) for child in reversed(node.children.values()))
            stack.extend((f"{indent}:  ", branch) for branch in (node.branches or {}).values())
    return "\n".join(lines)


def _describe(node: Node) -> str:
    if not node.pages:
        return f"branch of {node.namespace!r}, locks {node.locks}"
    tokens = array("i", node.key)
    shown = " ".join(map(str, tokens[:SHOWN_TOKENS])) + (" ..." if len(tokens) > SHOWN_TOKENS else "")
    where = f"pages {node.start}..{node.start + len(node.pages) - 1} ids {_runs(node.pages)}"
    use = f"locks {node.locks} pins {node.pins} hits {node.hits} tick {node.tick}"
    return f"{where} tokens {len(tokens)}: {shown} | {use}"


def _runs(pages: array[int]) -> str:
    """Page ids, with consecutive ones as first-last."""
    parts: list[list[int]] = []
    for page in pages:
        if parts and parts[-1][1] == page - 1:
            parts[-1][1] = page
        else:
            parts.append([page, page])
    return "[" + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts) + "]"
