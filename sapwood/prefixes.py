"""What a cache that never forgets would reuse of a row of prompts, and beside which earlier prompt each one parts."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sortedcontainers import SortedList


@dataclass(frozen=True)
class Reuse:
    """What one prompt finds.  `shared` tokens are those of `earlier` (the index of an earlier prompt), of which
    `reused` could be taken from the cache: the last token of a prompt is always computed."""

    tokens: int
    shared: int
    reused: int
    earlier: int | None


def infinite_cache(prompts: Sequence[Sequence[int]]) -> list[Reuse]:
    """For each prompt, in order, the most that an earlier one has in common with it.

    In sorted order the two neighbours of a prompt share most with it.
    """
    order: SortedList[tuple[bytes, int]] = SortedList()
    reuses = []
    for index, ids in enumerate(prompts):
        key = sort_key(ids)
        place = order.bisect_left((key, index))
        shared, earlier = 0, None
        for neighbour in order[max(0, place - 1) : place + 1]:
            common = common_tokens(neighbour[0], key)
            if common > shared or (common == shared and common and neighbour[1] > (earlier or 0)):
                shared, earlier = common, neighbour[1]
        order.add((key, index))
        reuses.append(Reuse(len(ids), shared, min(shared, max(0, len(ids) - 1)), earlier))
    return reuses


def sort_key(ids: Sequence[int]) -> bytes:
    """Bytes that sort as the ids do."""
    packed = array("I", ids)
    packed.byteswap()
    return packed.tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """Leading tokens that two keys share, by bisection over memory compares."""
    low, high = 0, min(len(one), len(other)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if one[4 * low : 4 * middle] == other[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
