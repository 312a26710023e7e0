"""The one door to a worker's page pool: thread-safe, ledger and prefix index together.

The loop and the transfer thread both come here. One small lock guards the books; it is never held while `fill` (the
poisoning of freed pages, tests) runs. Knows no request and no tensor. Dies with its worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.kv_cache.block_hash import HASH_BYTES, lossy_namespace
from tailrace.kv_cache.changes import Changes, Hashes
from tailrace.kv_cache.index import Node, PrefixIndex
from tailrace.kv_cache.layout import SCRATCH_PAGE, Layout
from tailrace.kv_cache.pool import Idle, Journal, PageCounts, PagePool, PageState
from tailrace.model.errors import ConfigError

Fill = Callable[[Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How true a sequence's state is: tokens from `exact_tokens` on came through a lossy `step`, or are built on such.

    `exact_tokens`: None if all are exact; then there is no step.
    """

    exact_tokens: int | None = None
    step: str = ""

    @property
    def is_exact(self) -> bool:
        return self.exact_tokens is None

    @staticmethod
    def of(exact_tokens: int, steps: Sequence[str]) -> Fidelity:
        """`steps`: what the tokens behind the exact ones came through, the least lossy first; none: all is exact."""
        return Fidelity(exact_tokens, steps[-1]) if steps else Fidelity()


EXACT = Fidelity()


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Pages of a known prefix, held once for the caller, and the tokens they cover (a multiple of the granule).

    `snapshot`: the state pages as they were after these tokens, held once, too, to be copied; nobody may write them.
    `known_tokens`: how far history is known; longer than `num_tokens` where no snapshot is kept at its end.
    """

    pages: list[int]
    num_tokens: int
    fidelity: Fidelity = EXACT
    snapshot: tuple[int, ...] = ()
    known_tokens: int = 0


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
        self, layout: Layout, num_pages: int, block_tokens: int, generations: np.ndarray | None = None
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
        self._distrusted: set[int] = set()  # until their next owner takes them

    @property
    def granule_tokens(self) -> int:
        """Tokens of one entry of the prefix index: the larger of page and block."""
        return self._index.granule_tokens

    # ---------------------------------------------------------------------------------------------------- prefix reuse

    def match_prefix(
        self, namespace: bytes, hashes: bytes, num_tokens: int, *, whole: bool = False, steps: Sequence[str] = ()
    ) -> PrefixHit:
        """The longest cached prefix of a sequence of `num_tokens` tokens, its pages held for the caller.

        It ends at least one token before the sequence's end, because prefill must compute the last token's logits;
        with `whole` (a gen at bind: it only reads state) it may cover every full block. Where a sequence has state
        pages, a prefix ends at a snapshot of them, since nothing can go on from history alone; with `whole` it need
        not: gen is sent the state.

        Args:
            namespace: of the request's exact pages.
            steps: lossy steps whose pages and snapshots will do too, the least lossy first; exact ones are taken where
                there are any.
        """
        limit = num_tokens if whole else num_tokens - 1
        spaces = [namespace, *(lossy_namespace(namespace, step) for step in steps)]
        with self._lock:
            nodes = self._index.match_among(spaces, hashes, limit)
            known, snapshot = len(nodes), ()
            if self.layout.num_state_pages and not whole:
                nodes, snapshot = self._up_to_snapshot(nodes, spaces[1:])
            pages = [page for node in nodes for page in node.pages]
            self._index.wake(self._pool.hold([*pages, *snapshot]))
        size = self._index.granule_tokens
        levels = [spaces.index(node.namespace) for node in nodes]
        exact = next((i for i, level in enumerate(levels) if level), len(levels))
        used = [steps[level - 1] for level in sorted(set(levels)) if level]
        return PrefixHit(pages, len(nodes) * size, Fidelity.of(exact * size, used), snapshot, known * size)

    def _up_to_snapshot(self, nodes: list[Node], others: Sequence[bytes]) -> tuple[list[Node], tuple[int, ...]]:
        for end in range(len(nodes), 0, -1):
            found = self._index.snapshot(nodes[end - 1], others)
            if found is not None:
                return nodes[:end], found.pages
        return [], ()

    def publish(
        self, namespace: bytes, hashes: bytes, pages: Sequence[int], num_tokens: int, fidelity: Fidelity = EXACT
    ) -> None:
        """Make the full granules of the first `num_tokens` tokens findable; nobody writes their pages any more.

        The first publisher of a prefix wins: pages of a granule that is already known stay private to their holder.

        Args:
            hashes: packed block hashes from the sequence's start.
            pages: page of each ordinal from the sequence's start; each is held or pinned.
            fidelity: what of it is exact; the rest is found only by those who take the step it came through.
        """
        lossy = None
        if fidelity.exact_tokens is not None:
            lossy = (fidelity.exact_tokens, lossy_namespace(namespace, fidelity.step))
        with self._lock:
            if self._distrusted:
                pages = [SCRATCH_PAGE if page in self._distrusted else page for page in pages]
            self._pool.publish(self._index.insert(namespace, hashes, pages, num_tokens, lossy))

    def snapshot_tokens(self, namespace: bytes, hashes: bytes, num_tokens: int, step: str = "") -> int:
        """Where a prefill of so many tokens should leave a snapshot of its state pages: after the last full granule
        that ends before its end. 0: nowhere, or there is one already. `step`: as publish_snapshot has it."""
        if not self.layout.num_state_pages:
            return 0
        granules = min((num_tokens - 1) // self.granule_tokens, len(hashes) // self._key_step)
        spaces = [namespace, *([lossy_namespace(namespace, step)] if step else ())]
        with self._lock:
            known = granules < 1 or any(self._index.has_snapshot(s, self._key(hashes, granules)) for s in spaces)
        return 0 if known else granules * self.granule_tokens

    def publish_snapshot(
        self, namespace: bytes, hashes: bytes, num_tokens: int, pages: Sequence[int], step: str = ""
    ) -> None:
        """Make a copy of the state pages findable, together with the prefix of `num_tokens` (a multiple of the granule)
        tokens, which is published. Nobody writes it any more. The first publisher wins.

        Args:
            pages: [num_state_pages], held by the caller.
            step: what the state, unlike the history, has lost; found by those alone who take that step.
        """
        with self._lock:
            key = self._key(hashes, num_tokens // self.granule_tokens)
            own = lossy_namespace(namespace, step) if step else None
            self._pool.publish(self._index.insert_snapshot(namespace, key, pages, own))

    def retract(self, pages: Sequence[int]) -> None:
        """Nobody shall find these pages any more, nor a longer prefix: what is in them is not to be trusted.

        Those in use become private to their holders, the others are freed. Until they are allocated anew nobody can
        publish them. Each is in use or published.
        """
        with self._lock:
            self._distrusted.update(pages)
            freed = self._retire(self._pool.unpublish(self._index.take_out(pages)))
        self._poison_and_restock(freed)

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
                return self._take(n)
            pages = self._take(self._pool.in_stock) or []
        self._fill_now(to_poison)
        with self._lock:
            self._pool.restock(to_poison)
            more = self._take(n - len(pages))
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

    @property
    def generations(self) -> np.ndarray:
        """[num_pages] uint64, as peers see them."""
        return self._pool.generations

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

    def keep_changes(self) -> None:
        """From now on `take_changes` says what became findable, and what no longer is."""
        with self._lock:
            self._index.changes = self._index.changes or Changes()

    @property
    def has_changes(self) -> bool:
        return bool(self._index.changes)

    def take_changes(self) -> tuple[Hashes, Hashes]:
        """(entered, left) since this or `findable` was called last."""
        with self._lock:
            return self._index.changes.take() if self._index.changes is not None else ((), ())

    def findable(self) -> Hashes:
        """Everything that a prefix can be found by; `take_changes` goes on from here. About 0.1 us a granule."""
        with self._lock:
            if self._index.changes is not None:
                self._index.changes.forget()
            return self._index.keys()

    def keep_journal(self, journal: Journal | None) -> None:
        """From now on every change of the pool is told to `journal`, by whatever thread makes it."""
        with self._lock:
            self._pool.journal = journal

    def snapshot(self, take: Callable[[dict[str, list[int]]], None]) -> None:
        """Give the pool's columns (PagePool.columns) to `take`, between two changes: it must be quick."""
        with self._lock:
            take(self._pool.columns())

    def set_poison(self, fill: Fill | None) -> None:
        """Tests: `fill` is called, without the lock, for pages that became free, before they can be allocated again.

        Their generations are raised first, so a reader that copied poison sees that it is stale.
        """
        with self._lock:
            self._fill = fill

    # --------------------------------------------------------------------------------------------------------- inside

    @property
    def _key_step(self) -> int:
        """Bytes of packed hashes a granule."""
        return self.granule_tokens // self.block_tokens * HASH_BYTES

    def _key(self, hashes: bytes, granules: int) -> bytes:
        end = granules * self._key_step
        return hashes[end - HASH_BYTES : end]

    def _available(self) -> int:
        counts = self._pool.counts()
        return counts.free + counts.cached

    def _take(self, n: int) -> list[int] | None:
        pages = self._pool.take(n)
        if self._distrusted and pages:
            self._distrusted.difference_update(pages)
        return pages

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
