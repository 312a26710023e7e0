"""State pages: where they stand in a table, and prefixes that are found only where a copy of them is kept."""

from __future__ import annotations

import pytest

from tailrace.kv_cache.block_hash import HASH_BYTES, BlockHasher
from tailrace.kv_cache.layout import RowLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ConfigError, LedgerError
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import GroupKind

GROUPS = (
    RowGroup(GroupKind.HISTORY, (0,), (RowField("h", 4, "f"),), tokens_per_row=2),
    RowGroup(GroupKind.WINDOW, (0, 1), (RowField("w", 4, "f"),), rows=2),
    RowGroup(GroupKind.TAIL, (0,), (RowField("t", 8, "f"),), rows=1, period=2),
)
LAYOUT = RowLayout(GROUPS, 4, "float32")  # 8 bytes a page: two of windows, one of the tail
NS = b"n" * 16
HASHER = BlockHasher(b"s", 4)
A = list(range(100, 121))


def test_a_table_is_history_then_state_and_an_empty_tail_does_not_move():
    assert (LAYOUT.bytes_per_page, LAYOUT.num_state_pages) == (8, 3)
    assert [LAYOUT.num_pages(n) for n in (0, 1, 4, 5, 8)] == [3, 4, 4, 5, 5]
    assert [LAYOUT.moved_pages(n) for n in (1, 2, 3, 4, 5)] == [4, 3, 4, 3, 5]
    assert [LAYOUT.full_pages(n) for n in (1, 3, 4, 9)] == [0, 0, 1, 2]
    assert LAYOUT.first_needed_page(100) == 0 and LAYOUT.is_opaque
    assert RowLayout(GROUPS, 4, "float32") == LAYOUT
    with pytest.raises(ConfigError, match="tokens_per_page is 3"):
        RowLayout(GROUPS, 3, "float32")


class Worker:
    """A manager, and what a loop does with it."""

    def __init__(self, num_pages: int = 40) -> None:
        self.kv = KvManager(LAYOUT, num_pages, 4)

    def prefill(self, ids: list[int], *, keep: bool = True) -> None:
        kv, hashes = self.kv, HASHER.hash_blocks("x", ids)
        pages = kv.allocate(LAYOUT.num_pages(len(ids)))
        assert pages is not None
        if keep and (end := kv.snapshot_tokens(NS, hashes, len(ids))):
            kv.publish(NS, hashes, pages, end)
            copy = kv.allocate(3)
            assert copy is not None
            kv.publish_snapshot(NS, hashes, end, copy)
            kv.release(copy)
        kv.publish(NS, hashes, pages, len(ids))
        kv.release(pages)
        kv.check()

    def known(self, ids: list[int], *, whole: bool = False) -> int:
        hit = self.kv.match_prefix(NS, HASHER.hash_blocks("x", ids), len(ids), whole=whole)
        assert len(hit.snapshot) == (3 if hit.num_tokens and not whole else 0)
        self.kv.release([*hit.pages, *hit.snapshot])
        self.kv.check()
        return hit.num_tokens


def test_history_alone_is_no_hit_except_for_a_gen_that_is_sent_the_state():
    worker = Worker()
    worker.prefill(A, keep=False)
    assert worker.known(A) == 0
    assert worker.known(A, whole=True) == 20


def test_a_prefix_ends_at_the_longest_snapshot():
    worker = Worker()
    worker.prefill(A[:9])
    assert worker.known(A) == 8
    assert worker.known(A[:8]) == 0, "at least one token must be computed, and before that nothing is kept"
    worker.prefill(A)
    assert worker.known(A) == 20
    assert worker.known(A[:14]) == 8
    assert worker.known([*A[:9], 7, 7, 7, 7, 7]) == 8


def test_where_a_prefill_keeps_its_state():
    kv = Worker().kv
    hashes = HASHER.hash_blocks("x", A)
    assert [kv.snapshot_tokens(NS, hashes, n) for n in (1, 4, 5, 8, 9, 21)] == [0, 0, 4, 4, 8, 20]
    assert kv.snapshot_tokens(NS, hashes[: 2 * HASH_BYTES], 21) == 8, "what has no hash cannot be found"
    assert kv.snapshot_tokens(NS, b"", 21) == 0


def test_a_snapshot_goes_before_the_prefix_it_ends_and_with_it():
    worker = Worker(num_pages=14)
    worker.prefill(A[:9])  # 2 granules, 3 pages of state
    kv = worker.kv
    assert kv.counts().cached == 5
    taken = kv.allocate(kv.available() - 4)  # one page more than is free
    assert taken is not None and worker.known(A, whole=True) == 8 and worker.known(A) == 0
    kv.release(taken)
    worker.prefill(A[:9])  # the same history: only the state is kept anew
    assert worker.known(A) == 8
    hit = kv.match_prefix(NS, HASHER.hash_blocks("x", A), len(A))
    kv.retract(hit.pages[1:])
    kv.release([*hit.pages, *hit.snapshot])
    assert worker.known(A) == 0 and kv.counts().cached == 1
    kv.check()


def test_a_snapshot_in_use_stays_whole():
    worker = Worker(num_pages=14)
    worker.prefill(A[:9])
    kv = worker.kv
    hit = kv.match_prefix(NS, HASHER.hash_blocks("x", A), len(A))
    taken = kv.allocate(kv.available())
    assert taken is not None and not set(taken) & {*hit.pages, *hit.snapshot}
    kv.release(taken)
    kv.release([*hit.pages, *hit.snapshot])
    kv.check()


def test_a_second_snapshot_of_a_prefix_stays_private():
    worker = Worker()
    worker.prefill(A[:9])
    kv, hashes = worker.kv, HASHER.hash_blocks("x", A[:9])
    copy = kv.allocate(3)
    assert copy is not None
    kv.publish_snapshot(NS, hashes, 8, copy)
    kv.release(copy)
    assert kv.counts().cached == 5
    kv.check()


def test_without_its_prefix_a_snapshot_is_not_entered():
    kv = Worker().kv
    copy = kv.allocate(3)
    assert copy is not None
    kv.publish_snapshot(NS, HASHER.hash_blocks("x", A), 8, copy)
    kv.release(copy)
    assert kv.counts().cached == 0


def test_nobody_outside_hears_of_snapshots():
    worker = Worker()
    worker.kv.keep_changes()
    worker.prefill(A[:9])
    ((space, keys),) = worker.kv.take_changes()[0]
    assert space == NS and keys == HASHER.hash_blocks("x", A[:8])
    worker.kv.drop_cache()
    assert len(worker.kv.take_changes()[1][0][1]) == 2 * HASH_BYTES
    assert worker.kv.counts().cached == 0
    worker.kv.check()


def test_books_that_have_lost_a_snapshot_are_found():
    worker = Worker()
    worker.prefill(A[:9])
    worker.kv._index._snapshots.clear()
    with pytest.raises(LedgerError, match="not in the tree"):
        worker.kv.check()


def test_state_that_lacks_something_has_a_class_of_its_own_below_the_same_history():
    worker = Worker()
    kv, hashes = worker.kv, HASHER.hash_blocks("x", A)
    worker.prefill(A, keep=False)

    def keep(step: str) -> tuple[int, ...]:
        copy = kv.allocate(3)
        assert copy is not None
        kv.publish_snapshot(NS, hashes, 20, copy, step)
        kv.release(copy)
        kv.check()
        return tuple(copy)

    def found(*steps: str) -> tuple[int, ...]:
        hit = kv.match_prefix(NS, hashes, 21, steps=steps)
        assert hit.fidelity.is_exact, "the history is"
        kv.release([*hit.pages, *hit.snapshot])
        return hit.snapshot

    assert kv.snapshot_tokens(NS, hashes, 21, "half") == kv.snapshot_tokens(NS, hashes, 21) == 20
    half = keep("half")
    assert found() == found("third") == () and found("half") == half
    assert kv.snapshot_tokens(NS, hashes, 21, "half") == 0 and kv.snapshot_tokens(NS, hashes, 21) == 20
    whole = keep("")
    assert found() == found("third") == found("half") == whole, "what lacks nothing will do for everybody"
    assert kv.snapshot_tokens(NS, hashes, 21, "third") == 0
    taken = kv.allocate(kv.available())  # both go with the history they end
    assert taken is not None and not kv.counts().cached
    kv.release(taken)
    kv.check()
