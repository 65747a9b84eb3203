"""The page pool: which pages are free, and how many owners each of the others has.

    free      a stack of page ids; runs go in backwards, so that they come out ascending again
    refcount  number of owners: the tree is one owner of each of its pages, and each request that has the
              page in its table is one

A page with one owner may be written by that owner; a page with more is read-only for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PageError(ValueError):
    """A page was used against its refcount: freed twice, shared while free, or no page of this pool."""


class PagePool:
    """`num_pages` pages of `page_size` token slots each, numbered from 0.  Every page starts free."""

    __slots__ = ("_free", "_refs", "num_pages", "page_size")

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ValueError when a number is below 1 or when token slots would not fit in int32."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least one page of at least one token, not {num_pages} of {page_size}")
        if num_pages * page_size >= 2**31:
            raise ValueError(f"{num_pages} pages of {page_size} tokens: token slots must stay below 2**31")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        # Twice as long as there are pages: a negative id indexes the second half, which stays zero, and so is
        # caught by the same comparison as a free page instead of costing one of its own.
        self._refs = [0] * (2 * num_pages)

    @property
    def num_free(self) -> int:
        """Pages that `alloc` can hand out now."""
        return len(self._free)

    def alloc(self, n: int) -> list[int] | None:
        """`n` free pages, each with one owner from now on, or None when fewer than `n` are free.

        Pages that were released together come back together and in their order.
        """
        if n <= 0:
            if n < 0:
                raise ValueError(f"cannot allocate {n} pages")
            return []
        free = self._free
        if n > len(free):
            return None
        pages = free[-n:]
        pages.reverse()
        del free[-n:]
        refs = self._refs
        for page in pages:
            refs[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more owner for each page.  Raises PageError, changing nothing, when one of them is free or unknown."""
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
            if isinstance(error, IndexError):
                raise PageError(f"page {pages[done]} is not in a pool of {self.num_pages} pages") from None
            raise

    def release(self, pages: Sequence[int]) -> int:
        """One owner less for each page; those without an owner become free.  Returns how many became free.

        Raises PageError, changing nothing, when one of them is free already or unknown.
        """
        refs = self._refs
        freed: list[int] = []
        done = 0
        try:
            for page in pages:
                count = refs[page]
                if count > 1:
                    refs[page] = count - 1
                elif count:
                    refs[page] = 0
                    freed.append(page)
                else:
                    raise PageError(f"page {page} is free: it cannot be released again")
                done += 1
        except (PageError, IndexError) as error:
            for page in pages[:done]:
                refs[page] += 1
            if isinstance(error, IndexError):
                raise PageError(f"page {pages[done]} is not in a pool of {self.num_pages} pages") from None
            raise
        freed.reverse()
        self._free += freed
        return len(freed)

    def refcount(self, page: int) -> int:
        """Number of owners of a page.  Raises PageError when it is not in this pool."""
        if not 0 <= page < self.num_pages:
            raise PageError(f"page {page} is not in a pool of {self.num_pages} pages")
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
