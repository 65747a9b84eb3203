"""Swap space: where a retracted request's pages wait outside the pool, so that they need not be computed again.

A retracted request leaves what it has computed in the tree too, as long as there is room; swap space is for what is
evicted from there before the request comes back.  Pages are copied out when nothing is in flight, and back into freshly
allocated pages, which no step knows: so both copies are made at once, without a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from srt.plan import PageMemory

# How fast pages are copied out and in, for the choice between the two ways of preemption.  Computing a page takes
# hundreds of times as long on a CPU, tens of times on a GPU, so the figure need not be exact.
COPY_BYTES_PER_SECOND = 2e9


@dataclass(frozen=True, slots=True)
class Swapped:
    """The first `num_tokens` tokens of a request, page by page."""

    num_tokens: int
    pages: list[bytes]


class SwapSpace:
    """Pages of retracted requests, `capacity_bytes` of them at most, over the memory that the page ids stand for."""

    def __init__(self, memory: PageMemory, capacity_bytes: int) -> None:
        self._memory = memory
        self._capacity_pages = capacity_bytes // memory.page_bytes
        self._swapped: dict[str, Swapped] = {}
        self.used_pages = 0

    def seconds(self, num_pages: int) -> float:
        """What moving so many pages out and in will take, roughly."""
        return 2 * num_pages * self._memory.page_bytes / COPY_BYTES_PER_SECOND

    def store(self, rid: str, pages: Sequence[int], num_tokens: int) -> bool:
        """Copy a request's pages out.  False, and nothing is kept, when they do not fit."""
        if not pages or self.used_pages + len(pages) > self._capacity_pages:
            return False
        self._swapped[rid] = Swapped(num_tokens, [self._memory.read_page(page) for page in pages])
        self.used_pages += len(pages)
        return True

    def num_tokens(self, rid: str) -> int:
        """Computed tokens that are kept of a request; 0 when it is not here."""
        swapped = self._swapped.get(rid)
        return 0 if swapped is None else swapped.num_tokens

    def restore(self, rid: str, first: int, pages: Sequence[int]) -> None:
        """Copy the request's pages from number `first` on into `pages`."""
        swapped = self._swapped[rid]
        for data, page in zip(swapped.pages[first:], pages, strict=True):
            self._memory.write_page(page, data)

    def drop(self, rid: str) -> None:
        """Forget a request, if it is here."""
        swapped = self._swapped.pop(rid, None)
        if swapped is not None:
            self.used_pages -= len(swapped.pages)

    def check(self, waiting: set[str]) -> None:
        """Only requests that wait are here, and no more than fit.  Raises AssertionError."""
        assert set(self._swapped) <= waiting, "swapped pages of requests that do not wait"
        assert self.used_pages == sum(len(swapped.pages) for swapped in self._swapped.values()) <= self._capacity_pages
