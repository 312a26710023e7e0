"""The ledger: what is allowed, what is forbidden, and what a page counts as."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.kv_cache.pool import PageCounts, PagePool, PageState
from tailrace.model.errors import LedgerError


def _pool(num_pages: int = 8) -> PagePool:
    return PagePool(num_pages, np.zeros(num_pages, np.uint64))


def _take(pool: PagePool, n: int) -> list[int]:
    pages = pool.take(n)
    assert pages is not None
    return pages


def test_the_scratch_page_is_never_given_out_and_not_counted():
    pool = _pool(5)
    assert _take(pool, 4) == [1, 2, 3, 4]
    assert pool.take(1) is None
    assert pool.counts() == PageCounts(0, 0, 4, 0, 0, total=4)


def test_what_does_not_fit_takes_nothing():
    pool = _pool(5)
    assert pool.take(5) is None
    assert pool.counts().free == 4


def test_taking_a_page_raises_its_generation():
    pool = _pool()
    first = _take(pool, 2)
    pool.restock(pool.release(first).freed)
    before = pool.generations.copy()
    assert before[first].tolist() == [1, 1]
    assert _take(pool, 2) == first
    assert pool.generations[first].tolist() == [2, 2]


def test_a_page_counts_as_the_first_that_applies():
    pool = _pool()
    (page,) = _take(pool, 1)
    assert pool.state(page) is PageState.HELD
    pool.pin([page])
    assert pool.state(page) is PageState.PINNED
    pool.hold([page])
    pool.quarantine([page])
    assert pool.state(page) is PageState.QUARANTINED
    assert pool.counts() == PageCounts(6, 0, 0, 0, 1, total=7)
    assert pool.end_quarantine([page]) == ([], [])
    assert pool.state(page) is PageState.PINNED
    assert pool.unpin([page]) == ([], [])
    assert pool.state(page) is PageState.HELD
    assert pool.release([page]) == ([], [page])
    assert pool.state(page) is PageState.FREE


def test_a_published_page_is_cached_at_its_end_and_free_only_when_unpublished():
    pool = _pool()
    (page,) = _take(pool, 1)
    pool.publish([page])
    assert pool.release([page]) == ([page], [])
    assert pool.state(page) is PageState.CACHED
    assert pool.hold([page]) == [page]
    assert pool.unpublish([page]) == []
    assert pool.release([page]) == ([], [page])


def test_a_freed_page_is_not_taken_before_it_is_restocked():
    pool = _pool(3)
    pages = _take(pool, 2)
    freed = pool.release(pages).freed
    assert pool.counts().free == 2 and pool.take(1) is None
    pool.check()
    pool.restock(freed)
    assert pool.take(2) == pages


def test_low_pages_go_first_so_that_neighbours_stay_neighbours():
    pool = _pool(9)
    pages = _take(pool, 8)
    pool.restock(pool.release([7, 2, 5, 3]).freed)
    assert _take(pool, 3) == [2, 3, 5]
    assert pages == list(range(1, 9))


FORBIDDEN = [
    ("hold", "free"), ("pin", "free"), ("release", "free"), ("unpin", "free"), ("quarantine", "free"),
    ("end_quarantine", "free"), ("publish", "free"), ("unpublish", "free"),
    ("unpin", "held"), ("end_quarantine", "held"), ("unpublish", "held"), ("restock", "held"),
    ("release", "cached"), ("unpin", "cached"), ("quarantine", "cached"), ("publish", "cached"),
    ("quarantine", "published"), ("publish", "published"),
    ("hold", "quarantined"), ("pin", "quarantined"), ("release", "quarantined"), ("quarantine", "quarantined"),
    ("publish", "quarantined"),
    ("release", "pinned"), ("quarantine", "pinned"), ("end_quarantine", "pinned"),
]  # fmt: skip


def _bring_to(pool: PagePool, state: str) -> int:
    if state == "free":
        return 3
    (page,) = _take(pool, 1)
    if state == "pinned":
        pool.pin([page])
        pool.release([page])
    elif state == "quarantined":
        pool.quarantine([page])
    elif state in ("cached", "published"):
        pool.publish([page])
        if state == "cached":
            pool.release([page])
    return page


@pytest.mark.parametrize(("change", "state"), FORBIDDEN)
def test_a_forbidden_change_names_page_and_state_and_changes_nothing(change, state):
    pool = _pool()
    page = _bring_to(pool, state)
    before = pool.counts()
    shown = "held" if state == "published" else state
    with pytest.raises(LedgerError, match=rf"page {page} is {shown}: nobody may {change.replace('_', '.*')}"):
        getattr(pool, change)([page])
    assert pool.counts() == before
    pool.check()


@pytest.mark.parametrize("change", ["hold", "pin", "release", "unpin", "quarantine", "end_quarantine", "publish"])
@pytest.mark.parametrize("page", [0, -1, 8, 1000])
def test_nobody_may_touch_the_scratch_page_or_one_that_is_not_there(change, page):
    pool = _pool()
    with pytest.raises(LedgerError, match=f"page {page} is"):
        getattr(pool, change)([page])


def test_more_releases_than_holds_are_found_within_one_call():
    pool = _pool()
    (page,) = _take(pool, 1)
    with pytest.raises(LedgerError, match=f"page {page} is free"):
        pool.release([page, page])


@pytest.mark.parametrize("damage", ["_holders", "_pins", "_quarantines"])
def test_the_check_finds_books_that_were_changed_behind_its_back(damage):
    pool = _pool()
    _take(pool, 2)
    pool.check()
    getattr(pool, damage)[5] += 1
    with pytest.raises(LedgerError):
        pool.check()


def test_the_check_finds_a_page_that_is_free_twice():
    pool = _pool()
    pool._stock.append(pool._stock[0])
    with pytest.raises(LedgerError, match="twice"):
        pool.check()


def test_used_is_what_is_neither_free_nor_cached():
    counts = PageCounts(free=1, cached=2, held=3, pinned=4, quarantined=5, total=15)
    assert counts.used == 12
