"""Page sums at ctx: taken when a page becomes final, kept while its generation stands, sent to the reader that asks.

    chunk done       StartSums over pages that became final, if the configuration says so; else only once asked for
    WantSums         the reader is owed sums; Sums goes to it as they are known
    SumsDone         kept by page; pages that changed meanwhile are left out

A page that several prompts share is summed once, so what happens to it between two of them is found. The sums of a page
whose first rows a reader has already are another entry. Decides only; the core carries out. Dies with its worker.
"""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.kv_cache.layout import Layout
from tailrace.transfer.attempt import Attempt
from tailrace.transfer.core_events import Action, StartSums, SumJob, SumPart, SumsDone, ToPeer
from tailrace.transfer.messages import PageDescriptor, Sums

Rows = tuple[int, int]
"""First and past-the-last row (token) of a page."""


class SourceSums:
    """The book of sums of one worker's pages.

    Args:
        layout: of these pages; opaque ones are summed as one row each.
        eager: sum every page when it becomes final.
    """

    def __init__(self, layout: Layout, eager: bool) -> None:
        self._tokens_per_page, self._is_opaque, self._eager = layout.tokens_per_page, layout.is_opaque, eager
        self._book: dict[int, tuple[int, dict[Rows, bytes]]] = {}  # page -> (generation, sums by rows)
        self._jobs: dict[int, tuple[tuple[PageDescriptor, Rows], ...]] = {}
        self._under_way: set[tuple[int, int, Rows]] = set()  # (page, generation, rows)
        self._num_jobs = 0

    def became_final(self, attempt: Attempt, ordinals: Iterable[int]) -> list[Action]:
        """Sum new pages now if that is wished; then what the reader is owed."""
        actions: list[Action] = []
        if self._eager:
            pages = [attempt.pages[o] for o in ordinals if o in attempt.pages]
            actions += self._start([(page, self._rows(attempt, page.ordinal, 0)) for page in pages])
        return actions + self.pay(attempt)

    def owe(self, attempt: Attempt, first_token: int, ordinals: Iterable[tuple[int, int, int]]) -> list[Action]:
        """The bound reader asks; asking again for what was sent sends it again."""
        reader = attempt.reader
        assert reader is not None
        reader.sums_from = first_token
        reader.owed.update(o for group, first, end in ordinals if group == 0 for o in range(first, min(end, 1 << 20)))
        return self.pay(attempt)

    def pay(self, attempt: Attempt) -> list[Action]:
        """One frame with all sums that are owed and known; jobs for those that nobody has taken."""
        reader = attempt.reader
        if reader is None or not reader.owed:
            return []
        pages: list[PageDescriptor] = []
        found: list[bytes] = []
        unknown: list[tuple[PageDescriptor, Rows]] = []
        for ordinal in sorted(reader.owed & attempt.pages.keys()):
            page, rows = attempt.pages[ordinal], self._rows(attempt, ordinal, reader.sums_from)
            sums = self._known(page, rows)
            if sums is None:
                unknown.append((page, rows))
            else:
                pages.append(page)
                found.append(sums)
                reader.owed.discard(ordinal)
        actions = self._start(unknown)
        if pages:
            actions.append(ToPeer(reader.boot, Sums(*attempt.key, tuple(pages), b"".join(found))))
        return actions

    def done(self, event: SumsDone) -> None:
        """Keep what was found; the core then pays every reader."""
        for (page, rows), sums in zip(self._jobs.pop(event.job, ()), event.sums, strict=False):
            self._under_way.discard((page.page, page.generation, rows))
            if not sums:
                continue
            generation, known = self._book.get(page.page, (-1, {}))
            if generation > page.generation:
                continue
            if generation != page.generation:
                known = {}
            known[rows] = sums
            self._book[page.page] = (page.generation, known)

    def forget(self, pages: Iterable[PageDescriptor]) -> None:
        """Nobody shall trust what was summed of these."""
        for page in pages:
            self._book.pop(page.page, None)

    # --------------------------------------------------------------------------------------------------------- inside

    def _rows(self, attempt: Attempt, ordinal: int, first_token: int) -> Rows:
        if self._is_opaque:
            return 0, 1
        start = ordinal * self._tokens_per_page
        end = min(self._tokens_per_page, attempt.num_tokens - start)
        return max(0, min(end, first_token - start)), end

    def _known(self, page: PageDescriptor, rows: Rows) -> bytes | None:
        generation, known = self._book.get(page.page, (-1, {}))
        return known.get(rows) if generation == page.generation else None

    def _start(self, wanted: list[tuple[PageDescriptor, Rows]]) -> list[Action]:
        new = [
            (page, rows)
            for page, rows in wanted
            if (page.page, page.generation, rows) not in self._under_way and self._known(page, rows) is None
        ]
        if not new:
            return []
        self._num_jobs += 1
        self._jobs[self._num_jobs] = tuple(new)
        self._under_way.update((page.page, page.generation, rows) for page, rows in new)
        parts = tuple((SumPart(page.page, low, high - low, low),) for page, (low, high) in new)
        return [StartSums(SumJob(self._num_jobs, parts, generations=tuple(page.generation for page, _ in new)))]
