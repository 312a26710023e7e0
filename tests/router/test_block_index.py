"""The block index against a plain model, and its feed over a line that loses, doubles and swaps what is said."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.router.block_index import BlockIndex, split
from tailrace.router.cache_feed import ASK_AGAIN_S, CacheFeed
from tailrace.transfer.cache_report import EVENT_PERIOD_S, CacheReport
from tailrace.transfer.faults import FaultPlan, Faults
from tailrace.transfer.messages import CacheQuery

WORKERS = {"a": 1, "b": 1, "c": 2, "d": 4}  # -> blocks a granule
GROUP = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 4),))
SPACES = (b"x" * 16, b"y" * 16)


def chain(seed, length=24):
    """Packed hashes of one prompt; prompts share their first blocks with others of the same decade."""
    own = random.Random(f"own {seed}")
    common = random.Random(seed // 10)
    return b"".join((common if i < 6 else own).randbytes(16) for i in range(length))


CHAINS = [chain(seed) for seed in range(0, 40, 4)]


def steps(packed, step):
    return split(packed)[step - 1 :: step]


class IndexMachine(RuleBasedStateMachine):
    """The model: a worker's set of prefixes as {(namespace, hash)}, and requests on their way as a list."""

    def __init__(self):
        super().__init__()
        self.index = BlockIndex()
        self.held = {boot: set() for boot in WORKERS}
        self.coming = []
        for boot, step in WORKERS.items():
            self.index.join(boot, step)

    @rule(boot=st.sampled_from(list(WORKERS)), space=st.sampled_from(SPACES), which=st.integers(0, 9),
          blocks=st.integers(0, 24))  # fmt: skip
    def stored(self, boot, space, which, blocks):
        hashes = steps(CHAINS[which][: 16 * blocks], WORKERS[boot])
        self.held[boot].update((space, key) for key in hashes)
        self.index.change(boot, stored=[(space, b"".join(hashes))])

    @rule(boot=st.sampled_from(list(WORKERS)), space=st.sampled_from(SPACES), which=st.integers(0, 9),
          blocks=st.integers(0, 24))  # fmt: skip
    def removed_with_an_unknown_one_among_them(self, boot, space, which, blocks):
        """Everything behind `blocks`, as a worker that evicts would say, and below it all that hangs there."""
        below = {
            key
            for other in CHAINS
            for key in split(other)[blocks:]
            if split(other)[:blocks] == split(CHAINS[which])[:blocks]
        }
        gone = [key for key in below if key in {k for s, k in self.held[boot] if s == space}]
        self.held[boot] -= {(space, key) for key in gone}
        self.index.change(boot, removed=[(space, b"".join([bytes(16), *gone]))])

    @rule(boot=st.sampled_from(list(WORKERS)), space=st.sampled_from(SPACES), which=st.integers(0, 9))
    def expected(self, boot, space, which):
        self.coming.append((boot, space, CHAINS[which]))
        self.index.expect(boot, space, CHAINS[which])

    @rule(which=st.integers(0, 3))
    def arrived(self, which):
        if which < len(self.coming):
            self.index.unexpect(*self.coming.pop(which))

    @rule(boot=st.sampled_from(list(WORKERS)), space=st.sampled_from(SPACES), which=st.integers(0, 9))
    def says_its_whole_set(self, boot, space, which):
        hashes = steps(CHAINS[which], WORKERS[boot])
        self.held[boot] = {(space, key) for key in hashes}
        self.index.change(boot, stored=[(space, b"".join(hashes))], cleared=True)

    @rule(boot=st.sampled_from(list(WORKERS)))
    def dies_and_comes_back(self, boot):
        self.index.leave(boot)
        assert not self.index.mask(boot) and not self.index.held(boot)
        self.held[boot] = set()
        self.coming = [request for request in self.coming if request[0] != boot]
        self.index.join(boot, WORKERS[boot])

    def has(self, boot, space, packed):
        """Blocks of the longest prefix on a worker, by the model."""
        on_the_way = {key for who, where, hashes in self.coming if (who, where) == (boot, space)
                      for key in steps(hashes, WORKERS[boot])}  # fmt: skip
        blocks = 0
        for key in steps(packed, WORKERS[boot]):
            if (space, key) not in self.held[boot] and key not in on_the_way:
                break
            blocks += WORKERS[boot]
        return blocks

    @invariant()
    def every_prefix_is_found_to_its_full_length_and_nothing_else_is_kept(self):
        for space in SPACES:
            for packed in CHAINS:
                expected = {boot: n for boot in WORKERS if (n := self.has(boot, space, packed))}
                assert self.index.cached_blocks(space, packed, 10**6) == expected
                few = {
                    boot: n
                    for boot in WORKERS
                    if (n := min(self.has(boot, space, packed), 7 // WORKERS[boot] * WORKERS[boot]))
                }
                assert self.index.cached_blocks(space, packed, 7) == few
        for boot in WORKERS:
            said = {(space, key) for space, keys in self.index.held(boot).items() for key in keys}
            assert said == self.held[boot] and self.index.num_held(boot) == len(said)
        self.index.check()


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_nothing_is_left_of_workers_that_have_left():
    index = BlockIndex()
    for i in range(200):
        index.join(f"w{i}", 1 + i % 2)
        index.change(f"w{i}", stored=[(SPACES[i % 2], chain(i))])
        index.expect(f"w{i}", SPACES[0], chain(i + 1))
    for i in range(200):
        index.leave(f"w{i}")
    assert len(index) == 0 and not index.cached_blocks(SPACES[0], chain(5), 100)
    assert not any(vars(index).values()), vars(index)


def test_places_of_workers_that_have_left_are_used_again():
    index = BlockIndex()
    for i in range(1000):
        index.join("stays") if i == 0 else index.join(f"w{i}")
        index.leave(f"w{i}")
    assert index.mask("stays").bit_length() == 1


def test_namespaces_are_apart():
    index = BlockIndex()
    index.join("a")
    index.change("a", stored=[(SPACES[0], CHAINS[0])])
    assert index.cached_blocks(SPACES[0], CHAINS[0], 99) == {"a": 24}
    assert index.cached_blocks(SPACES[1], CHAINS[0], 99) == {}


# ------------------------------------------------------------------------------------------------------ feed and worker


class Line:
    """A worker's real page books and report, a line that loses, doubles and swaps events, and a router's feed."""

    def __init__(self, faults=None, pages=65, queries_lost=0, page=16, block=16):
        layout = single_layout([GROUP], page, "float32")
        self.kv = KvManager(layout, pages, block)
        self.now, self.queries_lost = 0.0, queries_lost
        self.faults = Faults(FaultPlan(cache_events=faults or {}))
        self.report = CacheReport(_Config(), self.kv, self.faults, lambda: self.now)
        self.counters, self.queries = Counter(), []
        self.index = BlockIndex()
        self.feed = CacheFeed(self.index, lambda boot, frame: self.queries.append(frame), self.counters)
        self.step = max(page, block) // block
        self.link()

    def link(self):
        self.report.new_link()
        self.feed.linked("w", self.step, self.now)
        self.carry()

    def carry(self):
        """What both have said arrives."""
        while self.queries:
            asked = self.queries.pop()
            assert isinstance(asked, CacheQuery)
            if self.queries_lost:
                self.queries_lost -= 1
            else:
                self.deliver(self.report.answer())

    def deliver(self, events):
        for event in events:
            self.feed.event("w", event, self.now)

    def pass_(self):
        self.now += EVENT_PERIOD_S
        self.deliver(self.report.changes())
        self.carry()

    def heartbeat(self):
        self.feed.heartbeat("w", self.report.sequence, self.now)
        self.carry()

    def turn(self, rng):
        """A random prompt is computed and published; older ones give way."""
        tokens = rng.randrange(1, 20) * 16
        hashes, space = chain(rng.randrange(60)), SPACES[rng.randrange(2)]
        hit = self.kv.match_prefix(space, hashes, tokens)
        size = self.kv.layout.tokens_per_page
        more = self.kv.allocate(-(-tokens // size) - len(hit.pages))
        if more is not None:
            self.kv.publish(space, hashes, hit.pages + more, tokens)
            self.kv.release(more)
        if hit.pages:
            self.kv.release(hit.pages)

    def real(self):
        found = defaultdict(set)
        for space, packed in self.kv.findable():
            found[space].update(split(packed))
        return {space: keys for space, keys in found.items() if keys}

    def believed(self):
        return {space: set(keys) for space, keys in self.index.held("w").items()}


class _Config:
    worker, boot = "w-0", "w"


@pytest.mark.parametrize(("page", "block"), [(16, 16), (8, 16), (32, 16)])
def test_the_index_is_the_workers_set_after_every_pass(page, block):
    line, rng = Line(page=page, block=block), random.Random(1)
    for _ in range(150):
        line.turn(rng)
        if rng.random() < 0.5:
            line.pass_()
    line.pass_()
    believed = line.believed()
    assert believed and believed == line.real()
    line.index.check()
    assert line.counters["cache_gaps"] == 0 and line.counters["cache_queries"] == 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), wrong=st.sampled_from(["drop", "dup", "swap", "all"]))
def test_c11_a_tenth_of_the_events_lost_doubled_or_swapped_leaves_the_index_right(seed, wrong):
    likely = dict.fromkeys(("drop", "dup", "swap") if wrong == "all" else (wrong,), 0.1)
    line, rng = Line(likely), random.Random(seed)
    line.faults._random.seed(seed)
    for _ in range(120):
        line.turn(rng)
        line.pass_()
        if rng.random() < 0.1:
            line.heartbeat()
    line.faults.set(FaultPlan())
    for _ in range(3):  # an answer that was lost is asked for again
        line.now += 4 * ASK_AGAIN_S
        line.feed.tick(line.now)
        line.carry()
        line.heartbeat()
    line.turn(rng)
    line.pass_()
    assert line.feed.follows("w")
    assert line.believed() == line.real()
    line.index.check()
    if wrong == "dup":
        assert line.counters["cache_gaps"] == 0


def test_one_gap_is_one_question_whatever_comes_before_the_answer():
    line, rng = Line(), random.Random(3)
    line.turn(rng)
    line.pass_()
    line.queries_lost = 1
    for _ in range(10):
        line.turn(rng)
        line.now += EVENT_PERIOD_S
        events = line.report.changes()
        line.deliver(events if line.report.sequence != 4 else [])
        line.carry()
    assert line.counters["cache_gaps"] == 1 and line.counters["cache_queries"] == 2
    line.now += ASK_AGAIN_S
    line.feed.tick(line.now)
    line.carry()
    assert line.counters["cache_gaps"] == 1 and line.counters["cache_queries"] == 3
    assert line.believed() == line.real()


def test_the_loss_of_the_last_event_is_found_by_the_next_heartbeat():
    line, rng = Line(), random.Random(4)
    line.turn(rng)
    line.now += EVENT_PERIOD_S
    assert line.report.changes()  # lost
    assert line.believed() != line.real()
    line.heartbeat()
    assert line.believed() == line.real() and line.counters["cache_gaps"] == 1


def test_an_answer_that_is_older_than_the_gap_is_no_answer():
    line, rng = Line(), random.Random(5)
    old = line.report.answer()
    for _ in range(3):
        line.turn(rng)
        line.now += EVENT_PERIOD_S
        lost = line.report.changes()
    line.queries_lost = 1
    line.turn(rng)
    line.now += EVENT_PERIOD_S
    line.deliver(line.report.changes())
    line.deliver(old)
    line.deliver(lost)
    assert not line.feed.follows("w")
    line.now += ASK_AGAIN_S
    line.feed.tick(line.now)
    line.carry()
    assert line.feed.follows("w") and line.believed() == line.real()


def test_a_worker_that_never_answers_is_asked_ever_more_rarely_and_only_while_it_is_linked():
    counters, sent = Counter(), []
    feed = CacheFeed(BlockIndex(), lambda boot, frame: sent.append(boot), counters)
    feed.linked("w", 1, 0.0)
    for tenth in range(1, 3000):
        feed.tick(tenth / 10)
    assert 5 <= len(sent) <= 16
    feed.link_down("w")
    before = len(sent)
    feed.tick(1e6)
    assert len(sent) == before
    feed.died("w")
    assert not feed._streams


def test_a_whole_set_too_long_for_one_event_comes_in_several(monkeypatch):
    monkeypatch.setattr("tailrace.transfer.cache_report.MOST_HASHES", 7)
    line, rng = Line(), random.Random(6)
    for _ in range(20):
        line.turn(rng)
    line.pass_()
    assert line.believed() == line.real()
    events = line.report.answer()
    assert len(events) > 3 and [e.cleared for e in events] == [True] + [False] * (len(events) - 1)
    line.deliver(events)
    assert line.believed() == line.real()


def test_without_a_router_changes_cancel_out_and_wait_in_bounded_memory():
    line, rng = Line(pages=33), random.Random(7)
    line.report.new_link()  # nobody asks
    for _ in range(500):
        line.turn(rng)
        assert line.report.changes() == []
    entered, left = line.kv.take_changes()
    assert sum(len(packed) for _, packed in entered + left) <= 2 * 32 * 16
    line.kv.drop_cache()
    line.kv.findable()
    assert line.kv.take_changes() == ((), ())
