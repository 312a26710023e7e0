"""The ownership ledger of a page pool: who may use which page, and the law that proves it.

    free + cached + held + pinned + quarantined == total

A page counts once, by the first that applies of quarantined, pinned, held, cached; page 0 (scratch) counts nowhere.

    free --take--> held --release--> free            not published
                    |  \\--release--> cached           published; `hold` or `pin` wakes it, `unpublish` frees it
                    |--pin / unpin (any number, beside the holds)
                    \\--quarantine--> quarantined --end--> whatever the remaining pins, holds and publication say

Any other change raises LedgerError naming page, state and change. Not thread-safe; knows nothing of hashes, requests,
tensors or time. Dies with its worker: nothing in it is worth saving, because pages are written by their worker alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.errors import LedgerError


class PageState(IntEnum):
    """In falling order of precedence after FREE: a page counts as the first that applies."""

    FREE = 0
    QUARANTINED = 1
    PINNED = 2
    HELD = 3
    CACHED = 4


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages by state; `total` leaves out the scratch page."""

    free: int
    cached: int
    held: int
    pinned: int
    quarantined: int
    total: int

    @property
    def used(self) -> int:
        return self.held + self.pinned + self.quarantined


class Idle(NamedTuple):
    """Pages that lost their last user: `cached` stay published, `freed` are out of the ledger's use until restocked."""

    cached: list[int]
    freed: list[int]


class Journal(Protocol):
    """Is told of every change, before it is made, under the lock of the books."""

    def changed(self, change: str, what: Sequence[int] | int) -> None:
        """`change`: the method of PagePool that is about to run on these pages; `take`: on so many."""
        ...

    def idle(self, pages: Sequence[int]) -> None:
        """These have lost their last user: free, or cached."""
        ...

    def refused(self, reason: str) -> None:
        """The change that was told last is forbidden; LedgerError follows."""
        ...


class PagePool:
    """Counts holders, pins and quarantines of every page.

    Args:
        num_pages: pages of the arena, the scratch page included.
        generations: [num_pages] uint64, in memory that peers may read; raised before a page can be written again.
    """

    def __init__(self, num_pages: int, generations: np.ndarray) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs a scratch page and at least one other, not {num_pages} pages")
        if generations.shape != (num_pages,) or generations.dtype != np.uint64:
            raise ValueError(f"generations must be [{num_pages}] uint64, not {generations.shape} {generations.dtype}")
        self.num_pages = num_pages
        self.generations = generations
        self._holders = [0] * num_pages
        self._pins = [0] * num_pages
        self._quarantines = [0] * num_pages
        self._published = bytearray(num_pages)
        self._stock = list(range(1, num_pages))  # a heap: low pages first, so that neighbours stay neighbours
        self._out_of_stock = 0  # free, but not yet restocked
        self._count = [0] * len(PageState)
        self._count[PageState.FREE] = num_pages - 1
        self.journal: Journal | None = None

    def columns(self) -> dict[str, list[int]]:
        """A copy of the books, for `restore`."""
        return {
            "holders": self._holders[:],
            "pins": self._pins[:],
            "quarantines": self._quarantines[:],
            "published": list(self._published),
            "stock": self._stock[:],
            "generations": self.generations.tolist(),
        }

    def restore(self, columns: dict[str, list[int]]) -> None:
        """Become what `columns` was taken from; it had as many pages."""
        self._holders, self._pins = columns["holders"][:], columns["pins"][:]
        self._quarantines, self._published = columns["quarantines"][:], bytearray(columns["published"])
        self._stock, self.generations[:] = columns["stock"][:], columns["generations"]
        states = [self.state(page) for page in range(1, self.num_pages)]
        self._count = [states.count(state) for state in PageState]
        self._out_of_stock = self._count[PageState.FREE] - len(self._stock)

    # ------------------------------------------------------------------------------------------------------- questions

    def state(self, page: int) -> PageState:
        if self._quarantines[page]:
            return PageState.QUARANTINED
        if self._pins[page]:
            return PageState.PINNED
        if self._holders[page]:
            return PageState.HELD
        return PageState.CACHED if self._published[page] else PageState.FREE

    def is_published(self, page: int) -> bool:
        return bool(self._published[page])

    def counts(self) -> PageCounts:
        count = self._count
        return PageCounts(
            free=count[PageState.FREE],
            cached=count[PageState.CACHED],
            held=count[PageState.HELD],
            pinned=count[PageState.PINNED],
            quarantined=count[PageState.QUARANTINED],
            total=self.num_pages - 1,
        )

    @property
    def in_stock(self) -> int:
        """Free pages that `take` can give now."""
        return len(self._stock)

    # --------------------------------------------------------------------------------------------------------- changes

    def take(self, n: int) -> list[int] | None:
        """n free pages, now held once, each with its generation raised; None if the stock is smaller."""
        if n > len(self._stock):
            return None
        self._note("take", n)
        pages = [heapq.heappop(self._stock) for _ in range(n)]
        for page in pages:
            if self.state(page) is not PageState.FREE:
                raise self._forbidden(page, "take from the free list")
            self._holders[page] = 1
        self.raise_generations(pages)
        self._count[PageState.FREE] -= n
        self._count[PageState.HELD] += n
        return pages

    def restock(self, pages: Sequence[int]) -> None:
        """Make freed pages takeable again."""
        self._note("restock", pages)
        for page in pages:
            if self.state(page) is not PageState.FREE or self._out_of_stock == 0:
                raise self._forbidden(page, "restock")
            self._out_of_stock -= 1
            heapq.heappush(self._stock, page)

    def raise_generations(self, pages: Sequence[int]) -> None:
        """Invalidate every descriptor of these pages; comes before the first write that their next owner makes."""
        self.generations[pages] += np.uint64(1)

    def hold(self, pages: Sequence[int]) -> list[int]:
        """One more holder each; returns those that were cached until now."""
        self._note("hold", pages)
        return self._add(self._holders, pages, "hold")

    def pin(self, pages: Sequence[int]) -> list[int]:
        """One more pin each; returns those that were cached until now."""
        self._note("pin", pages)
        return self._add(self._pins, pages, "pin")

    def release(self, pages: Sequence[int]) -> Idle:
        self._note("release", pages)
        return self._subtract(self._holders, pages, "release")

    def unpin(self, pages: Sequence[int]) -> Idle:
        self._note("unpin", pages)
        return self._subtract(self._pins, pages, "unpin")

    def quarantine(self, pages: Sequence[int]) -> None:
        """Turn one hold of each page into a quarantine: something may still write it."""
        self._note("quarantine", pages)
        for page in pages:
            before = self._known(page, "quarantine")
            if not self._holders[page] or self._published[page]:
                raise self._forbidden(page, "quarantine")
            self._holders[page] -= 1
            self._quarantines[page] += 1
            self._recount(before, page)

    def end_quarantine(self, pages: Sequence[int]) -> Idle:
        self._note("end_quarantine", pages)
        return self._subtract(self._quarantines, pages, "end the quarantine of")

    def publish(self, pages: Sequence[int]) -> None:
        """Mark pages as found by the prefix index; from here on nobody writes them."""
        self._note("publish", pages)
        for page in pages:
            before = self._known(page, "publish")
            if before not in (PageState.HELD, PageState.PINNED) or self._published[page]:
                raise self._forbidden(page, "publish")
            self._published[page] = 1

    def unpublish(self, pages: Sequence[int]) -> list[int]:
        """Take pages out of the index; returns those that nobody used, which are freed."""
        freed = []
        self._note("unpublish", pages)
        for page in pages:
            before = self._known(page, "unpublish")
            if not self._published[page]:
                raise self._forbidden(page, "unpublish")
            self._published[page] = 0
            if before is PageState.CACHED:
                freed.append(page)
                self._out_of_stock += 1
            self._recount(before, page)
        return freed

    # ------------------------------------------------------------------------------------------------------------- law

    def check(self) -> None:
        """Recount everything; raises LedgerError if the books are wrong."""
        for column in (self._holders, self._pins, self._quarantines):
            if min(column) < 0:
                raise self._forbidden(column.index(min(column)), "count below zero")
        states = [self.state(page) for page in range(1, self.num_pages)]
        count = [states.count(state) for state in PageState]
        if count != self._count or sum(count) != self.num_pages - 1:
            raise LedgerError(f"pages by state are {self._named(count)}, the books say {self._named(self._count)}")
        if len(set(self._stock)) != len(self._stock):
            raise LedgerError("a page stands in the free list twice")
        for page in self._stock:
            if page == SCRATCH_PAGE or self.state(page) is not PageState.FREE:
                raise self._forbidden(page, "stand in the free list")
        if len(self._stock) + self._out_of_stock != count[PageState.FREE]:
            raise LedgerError(
                f"{count[PageState.FREE]} pages are free, but {len(self._stock)} are in stock and "
                f"{self._out_of_stock} on their way there"
            )

    def stray(self, page: int) -> LedgerError:
        return LedgerError(f"page {page} is {self.state(page).name.lower()} and published, but in no index")

    # --------------------------------------------------------------------------------------------------------- inside

    def _add(self, column: list[int], pages: Iterable[int], change: str) -> list[int]:
        woken = []
        for page in pages:
            before = self._known(page, change)
            if not (self._holders[page] or self._pins[page] or self._published[page]):
                raise self._forbidden(page, change)
            if before is PageState.CACHED:
                woken.append(page)
            column[page] += 1
            self._recount(before, page)
        return woken

    def _subtract(self, column: list[int], pages: Iterable[int], change: str) -> Idle:
        idle = Idle([], [])
        for page in pages:
            before = self._known(page, change)
            if not column[page]:
                raise self._forbidden(page, change)
            column[page] -= 1
            after = self._recount(before, page)
            if after is PageState.CACHED:
                idle.cached.append(page)
            elif after is PageState.FREE:
                self._out_of_stock += 1
                idle.freed.append(page)
        if self.journal is not None and (idle.freed or idle.cached):
            self.journal.idle(idle.freed + idle.cached)
        return idle

    def _note(self, change: str, what: Sequence[int] | int) -> None:
        if self.journal is not None:
            self.journal.changed(change, what)

    def _recount(self, before: PageState, page: int) -> PageState:
        after = self.state(page)
        if after is not before:
            self._count[before] -= 1
            self._count[after] += 1
        return after

    def _known(self, page: int, change: str) -> PageState:
        if not 0 < page < self.num_pages:
            what = "the scratch page" if page == SCRATCH_PAGE else f"not one of 1..{self.num_pages - 1}"
            raise LedgerError(f"page {page} is {what}: nobody may {change} it")
        return self.state(page)

    def _forbidden(self, page: int, change: str) -> LedgerError:
        reason = (
            f"page {page} is {self.state(page).name.lower()}: nobody may {change} it now (holders "
            f"{self._holders[page]}, pins {self._pins[page]}, quarantines {self._quarantines[page]}, "
            f"published {bool(self._published[page])})"
        )
        if self.journal is not None:
            self.journal.refused(reason)
        return LedgerError(reason)

    @staticmethod
    def _named(count: list[int]) -> str:
        return ", ".join(f"{state.name.lower()} {count[state]}" for state in PageState)
