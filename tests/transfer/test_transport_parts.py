"""Parts of the transports by themselves: the ledger of landing chunks, what lands, copies and helper threads."""

from __future__ import annotations

import mmap
import random
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tailrace.model.errors import ConfigError, LedgerError, PeerError
from tailrace.transfer.messages import Landed, LandingGrant, PageDescriptor
from tailrace.transfer.page_list import PageList
from tailrace.transfer.transports import copying
from tailrace.transfer.transports.base import ChunkCounts
from tailrace.transfer.transports.copying import Helper, Job, SplitCopier, copy_pages, runs
from tailrace.transfer.transports.landing import HEADER_BYTES, Checksum, ChunkState, LandingBook, is_sound, seal
from tailrace.transfer.transports.nixl import ChunkConfig
from tailrace.transfer.transports.nixl_agents import check_environment
from tailrace.transfer.transports.nixl_receive import Target

KEYS = [("a", 1), ("a", 2), ("b", 1)]
BOOTS = ["x", "y"]


def _landed(key: tuple[str, int], grant: LandingGrant, nbytes: int = 64) -> Landed:
    return Landed(*key, grant.chunk, grant.sequence, nbytes, 0, ())


# ------------------------------------------------------------------------------------------------------ landing ledger


def test_a_chunk_goes_from_grant_to_unpacking_and_is_free_again():
    book = LandingBook(2, 1000)
    (grant,) = book.grant(KEYS[0], "x", 1)
    assert book.counts() == ChunkCounts(1, 1, 0, 2) and book.has_out("x") and not book.has_out("y")
    landed = _landed(KEYS[0], grant)
    assert book.announce("x", landed)
    assert book.counts() == ChunkCounts(1, 0, 1, 2) and not book.has_out("x")
    assert book.begin_unpack(landed)
    book.end_unpack(landed)
    assert book.counts() == ChunkCounts(2, 0, 0, 2)


@pytest.mark.parametrize(
    ("boot", "change"),
    [
        ("y", {}), ("x", {"chunk": 1}), ("x", {"chunk": 7}), ("x", {"chunk": -1}), ("x", {"sequence": 99}),
        ("x", {"request": "b"}), ("x", {"attempt": 2}), ("x", {"nbytes": 1001}),
    ],
)  # fmt: skip
def test_a_notification_that_does_not_name_the_grant_is_no_evidence(boot, change):
    book = LandingBook(2, 1000)
    (grant,) = book.grant(("a", 1), "x", 1)
    fields = {"request": "a", "attempt": 1, "chunk": grant.chunk, "sequence": grant.sequence, "nbytes": 64}
    landed = Landed(**{**fields, **change}, checksum=0, pages=())
    assert not book.announce(boot, landed)
    assert book.counts().granted == 1


def test_a_notification_counts_once():
    book = LandingBook(1, 1000)
    (grant,) = book.grant(KEYS[0], "x", 1)
    landed = _landed(KEYS[0], grant)
    assert book.announce("x", landed) and not book.announce("x", landed)
    assert book.begin_unpack(landed) and not book.begin_unpack(landed)
    book.drop(landed)
    assert book.counts().unpacking == 1, "a chunk that is being unpacked is not dropped"
    book.end_unpack(landed)
    with pytest.raises(LedgerError, match="was not being unpacked"):
        book.end_unpack(landed)


def test_a_late_notification_of_an_earlier_grant_is_recognized():
    book = LandingBook(1, 1000)
    (first,) = book.grant(KEYS[0], "x", 1)
    book.reclaim(KEYS[0], "x")
    (second,) = book.grant(KEYS[0], "x", 1)
    assert second.chunk == first.chunk and second.sequence != first.sequence
    assert not book.announce("x", _landed(KEYS[0], first))
    assert book.announce("x", _landed(KEYS[0], second))


def test_the_chunk_that_rested_longest_is_granted_first():
    book = LandingBook(3, 1000)
    chunks = [book.grant(KEYS[0], "x", 1)[0].chunk for _ in range(3)]
    assert chunks == [0, 1, 2] and book.grant(KEYS[0], "x", 1) == ()
    book.reclaim(KEYS[0], "x")
    assert book.grant(KEYS[1], "x", 1)[0].chunk == 0


def test_the_end_of_one_pair_touches_no_other_and_nothing_that_has_landed():
    book = LandingBook(4, 1000)
    (mine, waiting) = book.grant(KEYS[0], "x", 2)
    book.grant(KEYS[1], "y", 2)
    landed = _landed(KEYS[0], mine)
    assert book.announce("x", landed)
    book.disconnect("x")
    assert book.counts() == ChunkCounts(1, 2, 1, 4)
    assert not book.announce("x", _landed(KEYS[0], waiting))
    assert book.begin_unpack(landed)


class LandingMachine(RuleBasedStateMachine):
    """Whoever may still write or read a chunk, by a plain model: nobody else is ever granted it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LandingBook(3, 1000)
        self.out: dict[int, tuple[str, tuple[str, int], LandingGrant, str]] = {}  # chunk -> boot, key, grant, state
        self.old: list[tuple[str, tuple[str, int], LandingGrant]] = []
        self.sequences: set[int] = set()

    @rule(key=st.sampled_from(KEYS), boot=st.sampled_from(BOOTS), n=st.integers(0, 4))
    def grant(self, key, boot, n):
        grants = self.book.grant(key, boot, n)
        assert len(grants) == min(n, 3 - len(self.out))
        for grant in grants:
            assert grant.chunk not in self.out and grant.sequence not in self.sequences
            self.sequences.add(grant.sequence)
            self.out[grant.chunk] = (boot, key, grant, "granted")

    def _move(self, chunk, state):
        boot, key, grant, _ = self.out[chunk]
        if state is None:
            self.old.append((boot, key, grant))
            del self.out[chunk]
        else:
            self.out[chunk] = (boot, key, grant, state)

    @rule(chunk=st.integers(0, 2), action=st.sampled_from(["announce", "begin_unpack", "drop", "end_unpack"]))
    def act(self, chunk, action):
        if chunk not in self.out:
            return
        boot, key, grant, state = self.out[chunk]
        landed = _landed(key, grant)
        if action == "announce":
            assert self.book.announce(boot, landed) == (state == "granted")
            if state == "granted":
                self._move(chunk, "landed")
        elif action == "begin_unpack":
            assert self.book.begin_unpack(landed) == (state == "landed")
            if state == "landed":
                self._move(chunk, "unpacking")
        elif action == "drop":
            self.book.drop(landed)
            if state == "landed":
                self._move(chunk, None)
        elif state == "unpacking":
            self.book.end_unpack(landed)
            self._move(chunk, None)

    @rule(index=st.integers(0, 50), action=st.sampled_from(["announce", "begin_unpack", "drop"]))
    def late(self, index, action):
        """What names an earlier grant changes nothing."""
        if not self.old:
            return
        boot, key, grant = self.old[index % len(self.old)]
        before = self.book.counts()
        answer = self.book.announce(boot, _landed(key, grant)) if action == "announce" else None
        if action == "begin_unpack":
            answer = self.book.begin_unpack(_landed(key, grant))
        elif action == "drop":
            self.book.drop(_landed(key, grant))
        assert not answer and self.book.counts() == before

    @rule(key=st.sampled_from(KEYS), boot=st.sampled_from(BOOTS))
    def reclaim(self, key, boot):
        self.book.reclaim(key, boot)
        for chunk, (b, k, _, state) in list(self.out.items()):
            if (b, k) == (boot, key) and state != "unpacking":
                self._move(chunk, None)

    @rule(boot=st.sampled_from(BOOTS))
    def disconnect(self, boot):
        self.book.disconnect(boot)
        for chunk, (b, _, _, state) in list(self.out.items()):
            if b == boot and state == "granted":
                self._move(chunk, None)

    @invariant()
    def the_law_holds(self):
        self.book.check()
        counts = self.book.counts()
        states = [state for _, _, _, state in self.out.values()]
        assert counts.free + counts.granted + counts.unpacking == counts.total == 3
        assert (counts.granted, counts.free) == (states.count("granted"), 3 - len(states))


TestLandingMachine = LandingMachine.TestCase
TestLandingMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_the_check_finds_a_chunk_that_is_free_and_granted():
    book = LandingBook(2, 10)
    book._chunks[0].state = ChunkState.GRANTED
    with pytest.raises(LedgerError, match=r"\[1\] are free.*\[0, 1\]"):
        book.check()


# ------------------------------------------------------------------------------------------------------ what lands


def _packed() -> tuple[np.ndarray, Landed]:
    chunk = np.zeros(HEADER_BYTES + 512, np.uint8)
    chunk[HEADER_BYTES:] = np.arange(512) % 251
    pages = PageList.of([PageDescriptor(0, i, 5 + i, 9) for i in range(3)])
    checksum = Checksum(pages)
    for low in range(0, 384, 100):
        checksum.feed(chunk[HEADER_BYTES:][low : min(low + 100, 384)])
    return chunk, seal(chunk, ("r", 1), LandingGrant(2, 77, 512, 4), pages, 384, checksum.value)


def test_a_sealed_chunk_is_what_its_notification_says():
    chunk, landed = _packed()
    assert (landed.chunk, landed.sequence, landed.nbytes) == (2, 77, 384)
    assert is_sound(chunk, landed)
    chunk[HEADER_BYTES + 384 :] ^= 1
    assert is_sound(chunk, landed), "bytes beyond its length are not its own"


@pytest.mark.parametrize("at", [0, 8, 24, 32, 40, HEADER_BYTES, HEADER_BYTES + 383])
def test_a_flipped_byte_is_found_wherever_it_stands(at):
    chunk, landed = _packed()
    chunk[at] ^= 1
    assert not is_sound(chunk, landed)


@pytest.mark.parametrize(
    "change",
    [
        {"request": "s"}, {"attempt": 2}, {"sequence": 78}, {"nbytes": 383}, {"nbytes": 10_000}, {"checksum": 1},
        {"pages": (PageDescriptor(0, 0, 5, 9),)},
        {"pages": tuple(PageDescriptor(0, i, 5 + i, 10) for i in range(3))},
        {"pages": tuple(PageDescriptor(0, 2 - i, 5 + i, 9) for i in range(3))},
    ],
)  # fmt: skip
def test_a_notification_that_tells_something_else_is_found(change):
    chunk, landed = _packed()
    fields = {name: getattr(landed, name) for name in Landed.__slots__}
    assert not is_sound(chunk, Landed(**{**fields, **change}))


def test_a_target_survives_its_encoding_and_nothing_else_is_taken_for_one():
    target = Target("agent", b"meta", 2**40, 5, 4, 1, 2, 3)
    assert Target.decode(target.encode()) == target
    assert Target.decode(b"") is None
    with pytest.raises(PeerError, match="malformed"):
        Target.decode(Target("agent", b"meta", -1, 5, 4, 1, 2, 3).encode())


# ------------------------------------------------------------------------------------------------------------- copies


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 10_000), st.integers(1, 7))
def test_copies_are_grouped_without_losing_or_inventing_one(n, seed, max_pages):
    rng = random.Random(seed)
    dst, src = sorted(rng.sample(range(60), n)), [rng.randrange(60) for _ in range(n)]
    if rng.random() < 0.5:
        src = [d + 3 for d in dst]
    covered = []
    for start, end, adjacent in runs(np.array(dst), np.array(src), max_pages):
        assert 1 <= end - start <= max_pages
        assert dst[start:end] == list(range(dst[start], dst[start] + end - start))
        assert adjacent == (src[start:end] == list(range(src[start], src[start] + end - start)))
        covered += range(start, end)
    assert covered == list(range(n))


def test_neighbours_are_copied_in_one_call():
    assert runs(np.array([3, 4, 5, 9, 10]), np.array([7, 8, 9, 2, 1]), 100) == [(0, 3, True), (3, 5, False)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_bytes", [96, 16384, 1 << 20])
def test_a_big_copy_is_the_same_with_one_thread_and_two(threads, page_bytes):
    rng = np.random.default_rng(1)
    n = max(4, (24 << 20) // page_bytes) if page_bytes > 96 else 5000
    src = rng.integers(0, 256, (n + 5, page_bytes), dtype=np.uint8)
    dst = np.full((n + 5, page_bytes), 0xEE, np.uint8)
    to, at = rng.permutation(n + 5)[:n].tolist(), rng.permutation(n + 5)[:n].tolist()
    copier = SplitCopier("test", threads)
    copier.copy(dst, to, src, at)
    assert (dst[to] == src[at]).all()
    rest = sorted(set(range(n + 5)) - set(to))
    assert (dst[rest] == 0xEE).all()
    copier.close()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.sampled_from([8, 4096, 65536]), st.integers(0, 3), st.integers(0, 10_000))
def test_a_copy_is_the_same_wherever_neighbours_stand(n, page_bytes, neighbours, seed):
    """Gather, scatter, both, neither: each has its own way."""
    rng = np.random.default_rng(seed)
    n = min(n, (4 << 20) // page_bytes)
    to = np.arange(3, 3 + n) if neighbours & 1 else rng.permutation(2 * n)[:n]
    at = np.arange(2, 2 + n) if neighbours & 2 else rng.permutation(2 * n)[:n]
    src = rng.integers(0, 256, (2 * n + 3, page_bytes), dtype=np.uint8)
    dst = np.full((2 * n + 3, page_bytes), 0xEE, np.uint8)
    expected = dst.copy()
    expected[to] = src[at]
    copy_pages(dst, to, src, at)
    assert np.array_equal(dst, expected)


def test_the_buffer_between_two_copies_is_aligned_as_pages_are():
    """16 bytes behind a border of memory pages, where malloc puts it, each copy into it takes five times as long."""
    starts: list[int] = []
    threads = [threading.Thread(target=lambda: starts.append(copying._scratch.memory.ctypes.data)) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert [start % mmap.PAGESIZE for start in starts] == [0, 0, 0]


def test_copying_nothing_is_nothing():
    copy_pages(np.zeros((2, 8), np.uint8), [], np.ones((2, 8), np.uint8), [])


class _Say(Job[str]):
    def __init__(self, word: str, held: threading.Event | None = None) -> None:
        self.word, self.held = word, held

    def steps(self) -> Iterator[bool]:
        while self.held is not None and not self.held.is_set():
            yield False
        if self.word == "fail":
            raise RuntimeError("a fault of ours")
        yield True

    def result(self) -> str:
        return self.word


def _drain(helper: Helper[str], n: int) -> list[str]:
    found: list[str] = []
    end = time.monotonic() + 10
    while len(found) < n and time.monotonic() < end:
        found += helper.drain()
        time.sleep(0.001)
    return found


def test_jobs_run_in_order_and_each_end_wakes_the_transfer_thread():
    woken = threading.Semaphore(0)
    helper: Helper[str] = Helper("test", woken.release)
    for word in "abc":
        helper.submit(_Say(word))
    assert all(woken.acquire(timeout=10) for _ in range(3))
    assert _drain(helper, 3) == ["a", "b", "c"]
    helper.close()


def test_a_held_job_lets_others_pass_and_ends_when_it_may():
    helper: Helper[str] = Helper("test")
    let = threading.Event()
    helper.submit(_Say("held", let))
    helper.submit(_Say("next"))
    assert _drain(helper, 1) == ["next"]
    let.set()
    assert _drain(helper, 1) == ["held"]
    helper.close()


def test_a_fault_of_ours_in_a_helper_is_raised_in_the_transfer_thread(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    helper: Helper[str] = Helper("test")
    helper.submit(_Say("fail"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        _drain(helper, 1)


def test_closing_waits_for_what_was_submitted_but_not_for_what_is_held():
    helper: Helper[str] = Helper("test")
    helper.submit(_Say("held", threading.Event()))
    helper.submit(_Say("done"))
    helper.close()
    assert helper.drain() == ["done"]


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("value", ["all", "tcp,cma", "sm,tcp", "^tcp", "shm", "^posix,sysv"])
def test_a_ucx_setting_that_allows_writing_past_the_receiver_is_refused(value):
    with pytest.raises(ConfigError, match="cma"):
        check_environment({"UCX_TLS": value})


@pytest.mark.parametrize("value", [None, "tcp", "rc,tcp,self", "^cma", "^sm", "^cma,xpmem"])
def test_a_ucx_setting_without_it_is_taken(value):
    check_environment({} if value is None else {"UCX_TLS": value})


def test_a_chunk_takes_whole_pages_and_at_least_one():
    config = ChunkConfig(chunk_bytes=4 << 20)
    assert [config.pages_per_chunk(b) for b in (16384, 368_640, 4 << 20, 5 << 20)] == [256, 11, 1, 1]
    with pytest.raises(ConfigError):
        ChunkConfig(landing_chunks=-1)
