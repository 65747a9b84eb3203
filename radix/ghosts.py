"""Leaves that were evicted and may be asked for again: what is remembered of them so as to learn from it.

A ghost is filed under the place and the tokens of the first page that went.  Two runs of one namespace that agree
there but not before it are taken for one: that costs a little accuracy of the statistics and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

# (namespace, pages before it, tokens of the page)
Place = tuple[str, int, bytes]
# However small the leaves are, no more of them are remembered.
MAX_GHOSTS = 4096


class Ghost(NamedTuple):
    """kind: of the leaf; tick: of its last use; pages: that went; uses: times the run had been used again."""

    kind: int
    tick: int
    pages: int
    uses: int


class Ghosts:
    """The ghosts of the last `max_pages` evicted pages."""

    __slots__ = ("_by_place", "_max_pages", "_pages")

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._pages = 0
        self._by_place: OrderedDict[Place, Ghost] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[Ghost]:
        return iter(self._by_place.values())

    def add(self, place: Place, ghost: Ghost) -> Iterable[Ghost]:
        """Remember one.  Returns those that are forgotten for it."""
        self.take(place)
        self._by_place[place] = ghost
        self._pages += ghost.pages
        forgotten = []
        while self._pages > self._max_pages or len(self._by_place) > MAX_GHOSTS:
            _, oldest = self._by_place.popitem(last=False)
            self._pages -= oldest.pages
            forgotten.append(oldest)
        return forgotten

    def take(self, place: Place) -> Ghost | None:
        """The ghost of a place, which is not kept."""
        ghost = self._by_place.pop(place, None)
        if ghost is not None:
            self._pages -= ghost.pages
        return ghost
