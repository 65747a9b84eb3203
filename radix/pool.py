"""The page pool: which pages are free, and how many owners each of the others has.

    free      a stack of page ids; runs go in backwards, so that they come out ascending again
    refcount  number of owners: the tree is one owner of each of its pages, and each request that has the
              page in its table is one

A page with one owner may be written by that owner; a page with more is read-only for all of them.

Runs of page ids are `array("q")`: they are cut and joined by copying memory, and numpy indexes with them as they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

# Below this many pages a loop is quicker than numpy.
FEW_PAGES = 24


class PageError(ValueError):
    """A page was used against its refcount: freed twice, shared while free, or no page of this pool."""


def page_run(pages: Sequence[int]) -> array[int]:
    """Page ids as an `array("q")`, which they may be already."""
    return pages if isinstance(pages, array) and pages.typecode == "q" else array("q", pages)


class PagePool:
    """`num_pages` pages of `page_size` token slots each, numbered from 0.  Every page starts free.

    Where a method takes several pages, none of them may be named twice.
    """

    __slots__ = ("_free", "_numbers", "_places", "_refs", "_view", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ValueError when a number is below 1 or when token slots would not fit in int32."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of at least one token, not {num_pages} of {page_size}")
        if num_pages * page_size >= 2**31:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: token slots must stay below 2**31")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = array("q", range(num_pages - 1, -1, -1))
        # Twice as long as there are pages: a negative id indexes the second half, which stays zero, and so is
        # caught by the same comparison as a free page instead of costing one of its own.
        self._refs = array("i", bytes(2 * num_pages * 4))
        # The same memory for numpy.
        self._view: npt.NDArray[np.int32] = np.frombuffer(self._refs, dtype=np.int32)
        # Scratch memory to find out whether a page is named twice.
        self._places: npt.NDArray[np.int32] = np.empty(num_pages, dtype=np.int32)
        self._numbers: npt.NDArray[np.int32] = np.arange(num_pages, dtype=np.int32)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free)

    def alloc(self, n: int) -> array[int] | None:
        """`n` free pages, each with one owner from now on, or None when fewer than `n` are free.

        Pages that were released together come back together and in their order.
        """
        free = self._free
        if n <= 0:
            if n < 0:
                raise ValueError(f"cannot allocate {n} pages")
            return array("q")
        if n > len(free):
            return None
        pages = free[-n:]
        pages.reverse()
        del free[-n:]
        if n < FEW_PAGES:
            refs = self._refs
            for page in pages:
                refs[page] = 1
        else:
            self._view[np.frombuffer(pages, dtype=np.int64)] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each page.  Raises PageError, changing nothing, when one of them is free or unknown."""
        if len(pages) >= FEW_PAGES:
            index = _index(pages)
            self._view[index] = self._owned(index) + 1
            return
        refs = self._refs
        done = 0
        try:
            for page in pages:
                count = refs[page]
                if not count:
                    raise PageError(f"page {page} is free: it cannot get another owner")
                refs[page] = count + 1
                done += 1
        except (PageError, IndexError) as error:
            for page in pages[:done]:
                refs[page] -= 1
            raise self._as_page_error(error, pages[done]) from None

    def release(self, pages: Sequence[int]) -> int:
        """One owner less for each page; those without an owner become free.  Returns how many became free.

        Raises PageError, changing nothing, when one of them is free already or unknown.
        """
        if len(pages) >= FEW_PAGES:
            return self._release_many(_index(pages))
        refs = self._refs
        freed = array("q")
        done = 0
        try:
            for page in pages:
                count = refs[page]
                if count == 1:
                    freed.append(page)
                elif not count:
                    raise PageError(f"page {page} is free: it cannot be released again")
                refs[page] = count - 1
                done += 1
        except (PageError, IndexError) as error:
            for page in pages[:done]:
                refs[page] += 1
            raise self._as_page_error(error, pages[done]) from None
        freed.reverse()
        self._free += freed
        return len(freed)

    def _release_many(self, index: npt.NDArray[np.int64]) -> int:
        left = self._owned(index) - 1
        kept = np.count_nonzero(left)
        if kept == len(left):
            self._view[index] = left
            return 0
        last = index[left == 0] if kept else index
        # A place that is written twice holds the later number.
        order = self._numbers[: len(last)]
        self._places[last] = order
        twice = self._places[last] != order
        if np.count_nonzero(twice):
            raise PageError(f"page {last[twice][0]} is released twice at once")
        self._view[index] = left
        self._free.frombytes(last[::-1].tobytes())
        return len(last)

    def _owned(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The refcounts of pages that all have owners."""
        try:
            counts = self._view[index]
        except IndexError:
            raise self._unknown(int(index.max())) from None
        if np.count_nonzero(counts) < len(counts):
            raise PageError(f"page {index[counts == 0][0]} is free, or not in a pool of {self.num_pages} pages")
        return counts

    def _as_page_error(self, error: PageError | IndexError, page: int) -> PageError:
        return error if isinstance(error, PageError) else self._unknown(page)

    def _unknown(self, page: int) -> PageError:
        return PageError(f"page {page} is not in a pool of {self.num_pages} pages")

    def refcount(self, page: int) -> int:
        """Number of owners of a page.  Raises PageError when it is not in this pool."""
        if not 0 <= page < self.num_pages:
            raise self._unknown(page)
        return self._refs[page]

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Recompute every refcount from what the owners hold.  Raises AssertionError at the first difference.

        `owners`: the pages of each owner; an owner's pages may come in several lists.
        """
        counts = [0] * self.num_pages
        for pages in owners:
            for page in pages:
                assert 0 <= page < self.num_pages, f"an owner holds page {page}, which is not in the pool"
                counts[page] += 1
        for page, count in enumerate(counts):
            assert self._refs[page] == count, f"page {page}: refcount {self._refs[page]}, but {count} owners"
        assert not any(self._refs[self.num_pages :]), "a page id outside the pool has a refcount"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is in the free list twice"
        assert free == {page for page, count in enumerate(counts) if not count}, "free list and refcounts disagree"


def _index(pages: Sequence[int]) -> npt.NDArray[np.int64]:
    """The pages for numpy to index with; without a copy when they are an `array("q")`."""
    if isinstance(pages, array) and pages.typecode == "q":
        return np.frombuffer(pages, dtype=np.int64)
    return np.asarray(pages, dtype=np.int64)
