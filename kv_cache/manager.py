"""The one door to a worker's page pool: thread-safe, ledger and prefix index together.

The loop and the transfer thread both come here. One small lock guards the books; it is never held while `fill` (the
poisoning of freed pages, tests) runs. Knows no request and no tensor. Dies with its worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.kv_cache.index import PrefixIndex
from tailrace.kv_cache.layout import PageLayout
from tailrace.kv_cache.pool import Idle, PageCounts, PagePool, PageState
from tailrace.model.errors import ConfigError

Fill = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages of a known prefix, held once for the caller, and the tokens they cover (a multiple of the granule)."""

    pages: list[int]
    num_tokens: int


class KvManager:
    """Allocation, holds, pins, quarantine and prefix reuse of one pool.

    Args:
        layout: geometry of the pool's pages.
        num_pages: pages of the arena, the scratch page 0 included.
        block_tokens: tokens a block; divides layout.tokens_per_page or is a multiple of it.
        generations: [num_pages] uint64 in the arena; private memory if None (no peer can read it then).

    Raises:
        ConfigError: sizes that do not fit together.

    Every method that changes a page raises LedgerError, naming page, state and change, if the table of pool.py forbids
    the change.
    """

    def __init__(
        self, layout: PageLayout, num_pages: int, block_tokens: int, generations: np.ndarray | None = None
    ) -> None:
        if num_pages < 2:
            raise ConfigError(f"the page pool has {num_pages} pages; it needs the scratch page and at least one other")
        larger, smaller = max(layout.tokens_per_page, block_tokens), min(layout.tokens_per_page, block_tokens)
        if smaller < 1 or larger % smaller:
            raise ConfigError(
                f"tokens_per_page {layout.tokens_per_page} neither divides block_tokens {block_tokens} nor is a "
                "multiple of it"
            )
        self.layout = layout
        self.block_tokens = block_tokens
        self._lock = threading.Lock()
        self._pool = PagePool(num_pages, np.zeros(num_pages, np.uint64) if generations is None else generations)
        self._index = PrefixIndex(layout.tokens_per_page, block_tokens)
        self._fill: Fill | None = None

    @property
    def granule_tokens(self) -> int:
        """Tokens of one entry of the prefix index: the larger of page and block."""
        return self._index.granule_tokens

    # ---------------------------------------------------------------------------------------------------- prefix reuse

    def match_prefix(self, namespace: bytes, hashes: bytes, num_tokens: int, *, whole: bool = False) -> PrefixHit:
        """The longest cached prefix of a sequence of `num_tokens` tokens, its pages held for the caller.

        It ends at least one token before the sequence's end, because prefill must compute the last token's logits;
        with `whole` (a gen at bind: it only reads state) it may cover every full block.
        """
        limit = num_tokens if whole else num_tokens - 1
        with self._lock:
            pages = self._index.match(namespace, hashes, limit)
            self._index.wake(self._pool.hold(pages))
        return PrefixHit(pages, len(pages) * self.layout.tokens_per_page)

    def publish(self, namespace: bytes, hashes: bytes, pages: Sequence[int], num_tokens: int) -> None:
        """Make the full granules of the first `num_tokens` tokens findable; nobody writes their pages any more.

        The first publisher of a prefix wins: pages of a granule that is already known stay private to their holder.

        Args:
            hashes: packed block hashes from the sequence's start.
            pages: page of each ordinal from the sequence's start; each is held or pinned.
        """
        with self._lock:
            self._pool.publish(self._index.insert(namespace, hashes, pages, num_tokens))

    def drop_cache(self) -> None:
        """Forget every prefix: cached pages are freed, those in use become private to their holders."""
        with self._lock:
            freed = self._retire(self._pool.unpublish(self._index.clear()))
        self._poison_and_restock(freed)

    # ------------------------------------------------------------------------------------------------------- ownership

    def allocate(self, n: int) -> list[int] | None:
        """n pages that nobody else uses, held by the caller; None if they do not fit now (then nothing is evicted).

        Evicts cached pages, least recently used leaves first. Raises each page's generation.
        """
        with self._lock:
            if n > self._available():
                return None
            missing = n - self._pool.in_stock
            evicted: list[int] = []
            while len(evicted) < missing:
                entries = self._index.evict() or self._index.evict_around_busy()
                if not entries:  # the rest is being poisoned by another thread: it will fit, but not now
                    break
                evicted += self._pool.unpublish(entries)
            to_poison = self._retire(evicted)
            if not to_poison:
                return self._pool.take(n)
            pages = self._pool.take(self._pool.in_stock) or []
        self._fill_now(to_poison)
        with self._lock:
            self._pool.restock(to_poison)
            more = self._pool.take(n - len(pages))
        if more is None:
            self.release(pages)
            return None
        return sorted(pages + more)

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder for each page, which must be in use or cached."""
        with self._lock:
            self._index.wake(self._pool.hold(pages))

    def release(self, pages: Sequence[int]) -> None:
        """One holder less; a page with no user left is cached if published, else free."""
        with self._lock:
            freed = self._settle(self._pool.release(pages))
        self._poison_and_restock(freed)

    def pin(self, pages: Sequence[int]) -> None:
        """One more pin for each page, which must be in use or cached: a peer may read it."""
        with self._lock:
            self._index.wake(self._pool.pin(pages))

    def unpin(self, pages: Sequence[int]) -> None:
        with self._lock:
            freed = self._settle(self._pool.unpin(pages))
        self._poison_and_restock(freed)

    def quarantine(self, pages: Sequence[int]) -> None:
        """Take over the caller's hold of pages that a copy of our own may still write."""
        with self._lock:
            self._pool.quarantine(pages)

    def end_quarantine(self, pages: Sequence[int]) -> None:
        """The copy has returned: the pages are free again, unless somebody still holds or pins them."""
        with self._lock:
            freed = self._settle(self._pool.end_quarantine(pages))
        self._poison_and_restock(freed)

    # ------------------------------------------------------------------------------------------------------- questions

    def descriptor_generation(self, page: int) -> int:
        """The generation number to put into a descriptor of this page; valid as long as the page is held or pinned."""
        return int(self._pool.generations[page])

    def counts(self) -> PageCounts:
        with self._lock:
            return self._pool.counts()

    def available(self) -> int:
        """Pages that `allocate` could give: free + cached."""
        with self._lock:
            return self._available()

    def check(self) -> None:
        """Recount; raises LedgerError if the law of pool.py or the index is broken."""
        with self._lock:
            self._pool.check()
            published = [p for p in range(1, self._pool.num_pages) if self._pool.is_published(p)]
            for page in published:
                if page not in self._index:
                    raise self._pool.stray(page)
            self._index.check(p for p in published if self._pool.state(p) is not PageState.CACHED)

    def set_poison(self, fill: Fill | None) -> None:
        """Tests: `fill` is called, without the lock, for pages that became free, before they can be allocated again.

        Their generations are raised first, so a reader that copied poison sees that it is stale.
        """
        with self._lock:
            self._fill = fill

    # --------------------------------------------------------------------------------------------------------- inside

    def _available(self) -> int:
        counts = self._pool.counts()
        return counts.free + counts.cached

    def _settle(self, idle: Idle) -> list[int]:
        self._index.rest(idle.cached)
        return self._retire(idle.freed)

    def _retire(self, freed: list[int]) -> list[int]:
        """Restock freed pages at once, or return them if they must be poisoned first. Under the lock."""
        if not freed:
            return freed
        if self._fill is None:
            self._pool.restock(freed)
            return []
        self._pool.raise_generations(freed)
        return freed

    def _poison_and_restock(self, freed: list[int]) -> None:
        if not freed:
            return
        self._fill_now(freed)
        with self._lock:
            self._pool.restock(freed)

    def _fill_now(self, freed: list[int]) -> None:
        fill = self._fill
        if fill is not None:
            fill(freed)
