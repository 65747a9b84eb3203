"""The page pool: refcounts, order, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix import PageError, PagePool


def test_pages_are_handed_out_in_ascending_runs() -> None:
    pool = PagePool(8, 16)
    assert list(pool.alloc(3) or ()) == [0, 1, 2]
    assert list(pool.alloc(2) or ()) == [3, 4]
    assert pool.num_free == 3


def test_pages_released_together_come_back_together_and_in_order() -> None:
    pool = PagePool(8, 16)
    first, second = pool.alloc(4), pool.alloc(4)
    assert first is not None
    assert second is not None
    pool.release(second)
    pool.release(first)
    assert pool.alloc(4) == first
    assert pool.alloc(4) == second


def test_alloc_beyond_what_is_free_changes_nothing() -> None:
    pool = PagePool(4, 1)
    pool.alloc(3)
    assert pool.alloc(2) is None
    assert pool.num_free == 1
    assert len(pool.alloc(0) or ()) == 0


def test_a_page_is_free_when_its_last_owner_lets_go() -> None:
    pool = PagePool(4, 1)
    pages = pool.alloc(2)
    assert pages is not None
    pool.share(pages)
    assert pool.release(pages) == 0
    assert pool.num_free == 2
    assert pool.release(pages) == 2
    assert pool.num_free == 4


@pytest.mark.parametrize("bad", [0, -1, 4, 7, 100, -100])
def test_free_and_unknown_pages_are_refused_and_nothing_changes(bad: int) -> None:
    pool = PagePool(4, 1)
    pages = pool.alloc(4)
    assert pages is not None
    pool.release([0])
    for change in (pool.share, pool.release):
        with pytest.raises(PageError):
            change([1, 2, bad, 3])
        pool.check([[1, 2, 3]])


def test_a_page_released_twice_in_one_call_is_refused() -> None:
    pool = PagePool(4, 1)
    pages = pool.alloc(2)
    assert pages is not None
    with pytest.raises(PageError):
        pool.release([0, 1, 0])
    pool.check([pages])


def test_refcount_of_an_unknown_page_is_refused() -> None:
    pool = PagePool(4, 1)
    assert pool.refcount(3) == 0
    for page in (-1, 4):
        with pytest.raises(PageError):
            pool.refcount(page)


@pytest.mark.parametrize(("pages", "size"), [(0, 1), (1, 0), (-1, 16), (2**27, 16)])
def test_impossible_pools_are_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError):
        PagePool(pages, size)


def test_a_negative_number_of_pages_is_refused() -> None:
    with pytest.raises(ValueError):
        PagePool(4, 1).alloc(-1)


def test_check_finds_an_owner_that_nobody_counted() -> None:
    pool = PagePool(4, 1)
    pages = pool.alloc(2)
    assert pages is not None
    pool.check([pages])
    for owners in ([], [pages, pages], [[0]], [[0, 1, 2]], [[0, 1, 9]]):
        with pytest.raises(AssertionError):
            pool.check(owners)


@given(st.data())
def test_free_pages_and_owned_pages_are_always_all_pages(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 20)), 1)
    owners: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 30))):
        kind = data.draw(st.sampled_from(["alloc", "share", "release"]))
        if kind == "alloc":
            count = data.draw(st.integers(0, 8))
            enough = count <= pool.num_free
            pages = pool.alloc(count)
            assert (pages is not None) == enough
            owners.append(list(pages or ()))
        elif owners:
            index = data.draw(st.integers(0, len(owners) - 1))
            if kind == "share":
                pool.share(owners[index])
                owners.append(list(owners[index]))
            else:
                pool.release(owners.pop(index))
        pool.check(owners)
        assert pool.num_free + len({page for pages in owners for page in pages}) == pool.num_pages
