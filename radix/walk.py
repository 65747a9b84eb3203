"""The one walker: how far a run of tokens is known, and where it stops.  Match and insert act on the answer.

stops at a border     the run ends, or goes on differently, behind `node`          inside None
stops in a page       no child begins with the next page, but `inside` is the       inside set, whole == 0
                      child that agrees with it longest, for `rows` tokens
stops in a node       `inside` agrees for `whole` pages and `rows` tokens more      inside set, whole >= 1
                      (a tail that agrees to its end counts here: it is no border)
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from radix.node import TOKEN_BYTES, Node, common_tokens


class Stop(NamedTuple):
    """Where a walk stopped.  `pages`: the pages that agree whole, those of `inside` included."""

    node: Node
    inside: Node | None
    whole: int
    rows: int
    pages: array[int]


def walk(root: Node, key: bytes, page_size: int, closest: bool = True) -> Stop:
    """Follow `key` (packed tokens) down from `root`.  Changes nothing.

    Without `closest`, no child is looked for that agrees with part of a page, unless `key` ends in that page.
    """
    page_bytes = page_size * TOKEN_BYTES
    node = root
    pages = array("q")
    pos = 0
    while True:
        chunk = key[pos : pos + page_bytes]
        child = node.children.get(chunk)
        if child is None:
            if chunk and page_size > 1 and node.children and (closest or len(chunk) < page_bytes):
                inside, rows = node.closest(chunk)
                return Stop(node, inside, 0, rows, pages)
            return Stop(node, None, 0, 0, pages)
        run = child.key
        length = len(run)
        if key.startswith(run, pos):
            if not length % page_bytes:
                pages += child.pages
                pos += length
                node = child
                continue
            tokens = length // TOKEN_BYTES
        else:
            tokens = common_tokens(run, key, pos, min(length, page_bytes) // TOKEN_BYTES)
        whole = tokens // page_size
        pages += child.pages[:whole]
        return Stop(node, child, whole, tokens - whole * page_size, pages)


def walk_public(root: Node | None, namespace: str, key: bytes, page_size: int, public: int) -> Stop | None:
    """As `walk`, for a run whose first `public` pages are a head's: down the head and on in the namespace's branch.

    `root`: that of the heads.  None when there is none.
    """
    if root is None:
        return None
    cut = public * page_size * TOKEN_BYTES
    # One page more may begin like the head's next one; copying from there is as good as from anywhere.
    stop = walk(root, key[: cut + page_size * TOKEN_BYTES], page_size)
    end = stop.node
    branch = None
    if len(stop.pages) == public and not stop.whole and end.branches is not None:
        branch = end.branches.get(namespace)
    if branch is None:
        return stop
    mine = walk(branch, key[cut:], page_size)
    if mine.rows < stop.rows and not mine.pages:
        return stop
    return mine._replace(pages=stop.pages + mine.pages)
