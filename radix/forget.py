"""Forgetting on demand: the runs of a namespace that begin with given tokens, as far as nobody holds them.

    forget "A B"        root --[A]--+--[B]--+--[C]      B, C and D go.  A stays if anything else goes on from it (E
                                    |       +--[D]      does); where nothing does, it goes too: who wants a prefix
                                    +--[E]              forgotten means all of it.

What lies in a public head is everybody's, and stays.
"""

from __future__ import annotations

from typing import NamedTuple

from radix.forest import Forest
from radix.node import Node


class Forgotten(NamedTuple):
    """Pages that left the tree, and pages that begin with the prefix and had to stay, since they are held."""

    pages: int
    kept: int


def forget(forest: Forest, namespace: str, tokens: bytes) -> Forgotten:
    """Take out what begins with `tokens` (packed int32) and is not locked; empty: all of the namespace."""
    gone = kept = 0
    for top in forest.tops(namespace):
        head = top.path_tokens()
        if not (tokens.startswith(head) or head.startswith(tokens)):
            continue
        pages, held = _forget_below(forest, top, tokens[len(head) :])
        gone += pages
        kept += held
    return Forgotten(gone, kept)


def _forget_below(forest: Forest, top: Node, tokens: bytes) -> Forgotten:
    runs, above = beginning_with(top, tokens, forest.page_bytes)
    gone = kept = 0
    for run in runs:
        order = [run]
        for node in order:
            order.extend(node.children.values())
        for node in reversed(order):
            if node.locks:
                kept += len(node.pages)
            else:
                gone += len(node.pages)
                forest.remove(node)
    while above is not top and above.ends and not above.locks:
        parent = above.parent
        assert parent is not None, "only a top has no parent"
        gone += len(above.pages)
        forest.remove(above)
        above = parent
    if above is top:
        forest.prune(top)
    return Forgotten(gone, kept)


def beginning_with(top: Node, tokens: bytes, page_bytes: int) -> tuple[list[Node], Node]:
    """The highest nodes that all paths with these first tokens go through, and the last node before them."""
    node, pos = top, 0
    while True:
        chunk = tokens[pos : pos + page_bytes]
        if len(chunk) < page_bytes:
            return [child for name, child in node.children.items() if name.startswith(chunk)], node
        child = node.children.get(chunk)
        if child is None:
            return [], node
        rest = tokens[pos : pos + len(child.key)]
        if not child.key.startswith(rest):
            return [], node
        pos += len(child.key)
        if pos >= len(tokens):
            return [child], node
        node = child
