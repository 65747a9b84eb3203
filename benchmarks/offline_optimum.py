"""The most that a prefix cache of a given size can hit, when the whole future is known.

Belady's rule on the pages of the prefix tree, leaves only: when room is needed, the page goes whose next use is
furthest away, and of a path's pages the deepest.  A page is never used without those above it, so the furthest next
use is always found on a leaf, and what is left of a path is always its beginning.

That makes the state small.  All pages that the cache holds of the path of request `r`, just before `r`, have `r` as
their next use; so it is enough to know, for each request to come, how many of its leading pages are held.  A request
finds that number, and leaves each page of its path with the request that uses it next.

Each use to the next is an interval that is either kept, for one hit, or not; what is kept at any time must fit beside
the path of the request that is being served, as in the real cache.  For intervals of equal worth the rule is optimal;
here all pages but the last of an input are worth the same.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from benchmarks.block_traces import BlockTrace

NEVER = 1 << 60


def next_uses(trace: BlockTrace) -> list[list[tuple[int, int]]]:
    """For each request, from the root on: (number of the request that uses these pages next, how many pages)."""
    last: dict[int, int] = {}
    uses: list[list[tuple[int, int]]] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        following = [last.get(block, NEVER) for block in blocks]
        uses.append([(use, len(list(group))) for use, group in groupby(following)])
        for block in blocks:
            last[block] = number
    uses.reverse()
    return uses


def optimal_hits(trace: BlockTrace, uses: Sequence[Sequence[tuple[int, int]]], capacity: int) -> int:
    """Tokens hit with room for `capacity` blocks.

    A request that is larger than the cache is served without bringing anything in.  What goes before it is then lost
    for what comes after it too, so where there are such requests the optimum may be higher than what this finds.
    """
    held: dict[int, int] = {}
    # The requests that `held` names, in order; the furthest is the last.
    order: list[int] = []
    total = hits = 0
    for number, request in enumerate(trace.requests):
        found = held.pop(number, 0)
        hits += min(found * trace.block_size, request.tokens)
        if found:
            total -= found
            order.pop(0)
        size = len(request.blocks)
        if size > capacity:
            # What was held of it stays; nothing is added.
            size = found
        while total + size > capacity:
            furthest = order[-1]
            going = min(held[furthest], total + size - capacity)
            total -= going
            held[furthest] -= going
            if not held[furthest]:
                del held[furthest]
                order.pop()
        total += size
        for use, count in uses[number]:
            if not size:
                break
            if use not in held:
                held[use] = 0
                insort(order, use)
            kept = min(count, size)
            held[use] += kept
            size -= kept
    return hits


def infinite_hits(trace: BlockTrace) -> int:
    """Tokens hit when nothing is ever evicted."""
    seen: set[int] = set()
    hits = 0
    for request in trace.requests:
        found = np.fromiter((block in seen for block in request.blocks), bool, len(request.blocks))
        hits += min((len(found) if found.all() else int(found.argmin())) * trace.block_size, request.tokens)
        seen.update(request.blocks)
    return hits
