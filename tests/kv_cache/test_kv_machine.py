"""Pool, index and manager against a model that counts in the plainest way, under any sequence of operations."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from tailrace.kv_cache.block_hash import BlockHasher, namespace
from tailrace.kv_cache.layout import Layout, RowLayout, single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import LedgerError
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import Field, GroupKind, StateGroup

GROUP = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 2), Field("v", 1, 2)))
NUM_PAGES = 14
SPACES = [namespace(t, "f") for t in "xy"]
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(lambda bits: [b for b in bits for _ in range(4)])


class KvMachine(RuleBasedStateMachine):
    """`content[page]` is what the model thinks stands in the page, as (space, token ids); a published page keeps it.

    Pages are 2 tokens, blocks 4, so that a granule has two pages.
    """

    layout: Layout = single_layout([GROUP], 2, "float32")
    owned = Bundle("owned")  # (space, ids, pages): held once by us
    pinned = Bundle("pinned")
    quarantined = Bundle("quarantined")

    def __init__(self) -> None:
        super().__init__()
        self.generations = np.zeros(NUM_PAGES, np.uint64)
        self.kv = KvManager(self.layout, NUM_PAGES, 4, self.generations)
        self.hasher = BlockHasher(b"s", 4)
        self.holds: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.quarantines: Counter[int] = Counter()
        self.content: dict[int, tuple[bytes, tuple[int, ...]]] = {}
        self.seen_generations = self.generations.copy()
        self.poison = False

    def _in_use(self) -> set[int]:
        return {p for book in (self.holds, self.pins, self.quarantines) for p, n in book.items() if n}

    @rule(target=owned, ids=prompts, space=st.sampled_from(SPACES), whole=st.booleans())
    def start(self, ids, space, whole):
        """Match a prefix and allocate the rest, all or nothing."""
        hashes = self.hasher.hash_blocks("s", ids)
        hit = self.kv.match_prefix(space, hashes, len(ids), whole=whole)
        assert hit.num_tokens == 2 * len(hit.pages) and hit.num_tokens % 4 == 0
        assert hit.num_tokens <= (len(ids) if whole else len(ids) - 1)
        for i, page in enumerate(hit.pages):
            assert self.content[page] == (space, tuple(ids[: 2 * i + 2])), "a match gives the state of this very prefix"
        self._look_at_snapshot(hit, space, ids, whole)
        self.holds.update(hit.pages)
        before = self._in_use()
        available = self.kv.available()
        need = len(ids) // 2 - len(hit.pages)
        more = self.kv.allocate(need)
        assert (more is not None) == (need <= available), "what is available can be allocated, nothing else can"
        if more is None:
            self.kv.release(hit.pages)
            self.holds.subtract(hit.pages)
            return multiple()
        assert len(set(more)) == need and not set(more) & before, "a page in use is never given out"
        self.holds.update(more)
        pages = hit.pages + more
        for i, page in enumerate(more, start=len(hit.pages)):
            self.content[page] = (space, tuple(ids[: 2 * i + 2]))
        return (space, ids, pages)

    def _look_at_snapshot(self, hit, space, ids, whole):
        assert hit.snapshot == (), "there are no state pages"

    @rule(sequence=owned)
    def publish(self, sequence):
        space, ids, pages = sequence
        if any(self.quarantines[page] for page in pages):
            return  # forbidden: something may still write it
        self.kv.publish(space, self.hasher.hash_blocks("s", ids), pages, len(ids))

    @rule(sequence=consumes(owned))
    def release(self, sequence):
        self.kv.release(sequence[2])
        self.holds.subtract(sequence[2])

    @rule(target=owned, sequence=owned)
    def fork(self, sequence):
        self.kv.hold(sequence[2])
        self.holds.update(sequence[2])
        return sequence

    @rule(target=pinned, sequence=owned)
    def pin(self, sequence):
        self.kv.pin(sequence[2])
        self.pins.update(sequence[2])
        return sequence[2]

    @rule(pages=consumes(pinned))
    def unpin(self, pages):
        self.kv.unpin(pages)
        self.pins.subtract(pages)

    @rule(target=quarantined, sequence=consumes(owned))
    def abort(self, sequence):
        """Private pages that are ours alone go into quarantine; the others are released."""
        pages = sequence[2]
        private = [p for p in pages if not self.kv._pool.is_published(p)]
        self.kv.quarantine(private)
        self.kv.release([p for p in pages if p not in private])
        self.holds.subtract(pages)
        self.quarantines.update(private)
        return private

    @rule(pages=consumes(quarantined))
    def quiesce(self, pages):
        self.kv.end_quarantine(pages)
        self.quarantines.subtract(pages)

    @rule()
    def drop_cache(self):
        self.kv.drop_cache()

    @rule(on=st.booleans())
    def set_poison(self, on):
        self.kv.set_poison(self._fill if on else None)
        self.poison = on

    def _fill(self, pages):
        assert not set(pages) & self._in_use_after_release(pages)
        for page in pages:
            assert self.generations[page] > self.seen_generations[page], "poison before the generation was raised"
            self.content.pop(page, None)

    def _in_use_after_release(self, pages):
        return {p for p in pages if self.kv._pool.state(p).name != "FREE"}

    @rule(
        page=st.integers(-1, NUM_PAGES), change=st.sampled_from(["release", "unpin", "end_quarantine", "hold", "pin"])
    )
    def forbidden(self, page, change):
        """A change that the model forbids raises and changes nothing."""
        books = {"release": self.holds, "unpin": self.pins, "end_quarantine": self.quarantines}
        if change in books:
            allowed = books[change][page] > 0
        else:
            known = 0 < page < NUM_PAGES
            allowed = known and (self.holds[page] > 0 or self.pins[page] > 0 or self.kv._pool.is_published(page))
        if allowed:
            return
        before = self.kv.counts()
        with pytest.raises(LedgerError, match=f"page {page} "):
            getattr(self.kv, change)([page])
        assert self.kv.counts() == before

    @precondition(lambda self: self._in_use())
    @rule()
    def generations_of_used_pages_stand(self):
        used = sorted(self._in_use())
        held = [self.kv.descriptor_generation(p) for p in used]
        more = self.kv.allocate(self.kv.available())
        assert more is not None and self.kv.allocate(1) is None
        assert [self.kv.descriptor_generation(p) for p in used] == held
        for page in more:
            self.content.pop(page, None)
        self.kv.release(more)

    @invariant()
    def the_law_holds(self):
        self.kv.check()
        counts = self.kv.counts()
        quarantined = {p for p, n in self.quarantines.items() if n}
        pinned = {p for p, n in self.pins.items() if n} - quarantined
        held = {p for p, n in self.holds.items() if n} - quarantined - pinned
        assert (counts.quarantined, counts.pinned, counts.held) == (len(quarantined), len(pinned), len(held))
        assert counts.free + counts.cached + counts.used == counts.total == NUM_PAGES - 1
        assert (self.generations >= self.seen_generations).all(), "a generation never falls"
        self.seen_generations = self.generations.copy()

    def teardown(self):
        for book, undo in (
            (self.holds, self.kv.release),
            (self.pins, self.kv.unpin),
            (self.quarantines, self.kv.end_quarantine),
        ):
            undo(list(book.elements()))
        self.kv.check()
        assert self.kv.counts().used == 0
        self.kv.drop_cache()
        assert self.kv.counts().free == NUM_PAGES - 1


class RowMachine(KvMachine):
    """The same with two state pages a sequence, of which copies are kept at the ends of granules."""

    layout = RowLayout(
        (
            RowGroup(GroupKind.HISTORY, (0,), (RowField("h", 4, "f"),), tokens_per_row=2),
            RowGroup(GroupKind.WINDOW, (0,), (RowField("w", 4, "f"),), rows=2),
        ),
        2,
        "float32",
    )

    def _look_at_snapshot(self, hit, space, ids, whole):
        if whole:
            assert not hit.snapshot
            return
        assert len(hit.snapshot) == (2 if hit.pages else 0), "history alone is no hit"
        for page in hit.snapshot:
            assert self.content[page] == (space, ("state", *ids[: hit.num_tokens])), "a snapshot of this very prefix"
        self.kv.release(hit.snapshot)

    @rule(sequence=KvMachine.owned, cut=st.integers(0, 5))
    def keep(self, sequence, cut):
        """What a prefill does when it has come to a granule's end."""
        space, ids, pages = sequence
        end = (len(ids) - cut) // 4 * 4
        if any(self.quarantines[page] for page in pages) or end < 4:
            return
        hashes = self.hasher.hash_blocks("s", ids)
        if self.kv.snapshot_tokens(space, hashes, end + 1) != end:
            return
        copy = self.kv.allocate(2)
        if copy is None:
            return
        for page in copy:
            self.content[page] = (space, ("state", *ids[:end]))
        self.kv.publish(space, hashes, pages, end)
        self.kv.publish_snapshot(space, hashes, end, copy)
        self.kv.release(copy)
        assert self.kv.snapshot_tokens(space, hashes, end + 1) == 0


TestKvMachine = KvMachine.TestCase
TestKvMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestRowMachine = RowMachine.TestCase
TestRowMachine.settings = settings(TestKvMachine.settings, max_examples=70)
