"""Back-flow at ctx: pages of finished turns that gen offers are read, so that the next turn's prompt finds them here.

    Offer       gen says which published pages it has: generation numbers, hashes, namespace
    advance     the oldest offer is begun, if no other is and no hand-off of ours is being read, or it has waited enough
    ReadDone    generations unchanged: published; what changed is dropped, with what follows it

It never takes a page that anybody holds, and leaves a quarter of the pool to prompts: an offer that does not fit then
is dropped, and so is one that waited too long. Nothing waits for it and nothing is lost with it: gen keeps no page for
it, because generation numbers say whether what was read is what was offered. Only pairs whose pages keep every bit,
over a transport that reads, are used.

Page ownership: from a read's start to its ReadDone one hold of every page of it, those found here included, is ours.
Pure; dies with its worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.core_events import Action, Measure, Metric, StartRead
from tailrace.transfer.messages import Offer, PageDescriptor
from tailrace.transfer.page_plan import Destination, overlapping
from tailrace.transfer.transports.base import ReadDone, ReadJob

MAX_OFFERS = 32  # that wait; the oldest goes
PATIENCE_S = 0.5  # hand-offs come first, but not for ever
OFFER_LIFE_S = 10.0
KEPT_FOR_PROMPTS = 4  # one page in so many stays available


@dataclass(frozen=True, slots=True)
class _Waiting:
    boot: str
    unit_tokens: int
    offer: Offer
    at: float


@dataclass(frozen=True, slots=True)
class _Reading:
    job: int
    waiting: _Waiting
    pages: tuple[int, ...]
    into: Destination


class Backflow:
    """See the module. Its jobs have negative numbers, so that nobody takes them for a hand-off's."""

    def __init__(self, kv: KvManager) -> None:
        self._kv = kv
        self._waiting: deque[_Waiting] = deque()
        self._reading: _Reading | None = None
        self._num_jobs = 0

    @property
    def idle(self) -> bool:
        """Nothing is being read: no page is held for it."""
        return self._reading is None

    def offered(self, boot: str, unit_tokens: int, offer: Offer, now: float) -> list[Action]:
        """Gen has pages of `unit_tokens` tokens each."""
        if any(page.ordinal != i for i, page in enumerate(offer.pages)):
            return [Measure(Metric.STALE_FRAMES)]
        dropped: list[Action] = []
        if len(self._waiting) == MAX_OFFERS:
            self._waiting.popleft()
            dropped.append(result("crowded"))
        self._waiting.append(_Waiting(boot, unit_tokens, offer, now))
        return dropped

    def advance(self, now: float, busy: bool) -> list[Action]:
        """Time has passed. `busy`: a hand-off of this ctx is being read."""
        actions: list[Action] = []
        while self._reading is None and self._waiting:
            waiting = self._waiting[0]
            waited = now - waiting.at
            if busy and waited < PATIENCE_S:
                break
            self._waiting.popleft()
            actions += [result("late")] if waited > OFFER_LIFE_S else self._begin(waiting)
        return actions

    def gone(self, boot: str) -> None:
        """A gen is dead. A read from it comes to its end by itself."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting.boot != boot)

    def done(self, done: ReadDone) -> list[Action]:
        """Publish the run of good pages from the start on."""
        reading = self._reading
        if reading is None or reading.job != done.job:
            return []
        self._reading = None
        offer, into = reading.waiting.offer, reading.into
        good = {page.ordinal for page in done.units_ok}
        end = into.num_tokens
        for ordinal in overlapping(reading.waiting.unit_tokens, into.first_token, into.num_tokens):
            if ordinal not in good:
                end = ordinal * reading.waiting.unit_tokens
                break
        size = self._kv.granule_tokens
        end = end // size * size
        if end > into.first_token:
            self._kv.publish(offer.namespace, offer.hashes, reading.pages, end)
        self._kv.release(list(reading.pages))
        tokens = max(0, end - into.first_token)
        return [
            result("read" if end == into.num_tokens else "stale"),
            Measure(Metric.BACKFLOW_TOKENS, tokens),
        ]

    def _begin(self, waiting: _Waiting) -> list[Action]:
        """Start the read of what is not here, or say why not."""
        offer, kv, size = waiting.offer, self._kv, self._kv.granule_tokens
        num_tokens = min(offer.num_tokens, len(offer.pages) * waiting.unit_tokens) // size * size
        hit = kv.match_prefix(offer.namespace, offer.hashes, num_tokens, whole=True)
        needed = kv.layout.num_pages(num_tokens) - len(hit.pages)
        why = "known" if needed <= 0 else None
        if why is None and kv.available() - needed < kv.counts().total // KEPT_FOR_PROMPTS:
            why = "no_room"
        new = kv.allocate(needed) if why is None else None
        if new is None:
            kv.release(hit.pages)
            return [result(why or "no_room")]
        pages = (*hit.pages, *new)
        into = Destination(pages, hit.num_tokens, num_tokens)
        self._num_jobs += 1
        self._reading = _Reading(-self._num_jobs, waiting, pages, into)
        wanted = overlapping(waiting.unit_tokens, hit.num_tokens, num_tokens)
        units = tuple(
            (page, pages[self._first_page(page, waiting, into)]) for page in offer.pages[wanted.start : wanted.stop]
        )
        key = (offer.request, offer.attempt)
        return [StartRead(ReadJob(-self._num_jobs, key, waiting.boot, units, None, into))]

    def _first_page(self, page: PageDescriptor, waiting: _Waiting, into: Destination) -> int:
        """Ordinal of the first of our pages that a unit reaches into."""
        return max(into.first_token, page.ordinal * waiting.unit_tokens) // self._kv.layout.tokens_per_page


def result(name: str) -> Measure:
    """An offer's end, counted."""
    return Measure(Metric.BACKFLOW_OFFERS, 1, {"result": name})
