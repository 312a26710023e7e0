"""The conformance suite of the transports: whatever happens to a transfer, no byte lands in a page of another owner."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from transport_peers import KEY, KINDS, ChildCtx, Gen, end_server, random_pages, stamp, units_for, wait_for

from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import PeerError
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.messages import LandingGrant, PageDescriptor
from tailrace.transfer.transports.base import ChunkCounts, PostJob, ReadDone

PROCESS_KINDS = ("shm", "nixl")
MakeGen = Callable[..., Gen]


@pytest.fixture(scope="module", autouse=True)
def server_ends() -> Iterator[None]:
    yield
    end_server()


@pytest.fixture
def make_gen() -> Iterator[MakeGen]:
    made: list[Gen] = []

    def make(kind: str, page_bytes: int = 16384, num_pages: int = 64, **options: Any) -> Gen:
        if kind == "nixl":
            pytest.importorskip("nixl", reason="the package nixl is not installed")
        made.append(Gen(kind, page_bytes, num_pages, **options))
        return made[-1]

    yield make
    for gen in made:
        gen.close()


def _assert_moved(gen: Gen, units: list[tuple[PageDescriptor, int]], owner: int) -> None:
    for descriptor, dst in units:
        wrong = np.flatnonzero(gen.arena.pages[dst] != stamp(owner, descriptor.page, gen.page_bytes))
        assert not len(wrong), f"page {dst} (ordinal {descriptor.ordinal}) differs from byte {wrong[:1]} on"


def _assert_untouched(gen: Gen, pages: set[int]) -> None:
    others = [p for p in range(gen.arena.num_pages) if p not in pages]
    assert (gen.arena.pages[others] == 0xEE).all(), "a page that nobody asked for was written"


def _assert_quiet(gen: Gen) -> None:
    counts = gen.transport.counts()
    assert counts == ChunkCounts(counts.total, 0, 0, counts.total)
    wait_for(lambda: [gen.step(), not gen.transport.busy()][1], "the transport to come to rest")


# --------------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(("page_bytes", "num_pages", "n"), [(96, 300, 200), (16384, 200, 150), (368_640, 24, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_pages_arrive_byte_for_byte_and_are_counted_once(kind, page_bytes, num_pages, n, child, make_gen):
    if kind == "in_process" and child:
        pytest.skip("in_process has no other process")
    rng = random.Random(f"{kind}{page_bytes}")
    gen = make_gen(kind, page_bytes, num_pages)
    ctx = gen.new_ctx("c7", num_pages, child=child)
    src, dst = random_pages(rng, n, num_pages), random_pages(rng, n, num_pages)
    units = units_for(src, ctx.write(src, owner=1), dst)
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert sorted(d.ordinal for d in move.ok) == list(range(n)) and not move.stale and not move.errors
    _assert_moved(gen, units, owner=1)
    _assert_untouched(gen, set(dst))
    _assert_quiet(gen)


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_from_two_peers_at_once_do_not_mix(kind, make_gen):
    rng = random.Random(5)
    gen = make_gen(kind, 4096, 400)
    ctxs = [gen.new_ctx(f"c{i}", 100, child=False) for i in range(2)]
    free = list(range(1, 400))
    rng.shuffle(free)
    moves, expected = [], []
    for i in range(10):
        ctx = ctxs[i % 2]
        src = list(range(1 + 9 * i, 10 + 9 * i))
        units = units_for(src, ctx.write(src, owner=i), [free.pop() for _ in src])
        moves.append(gen.start((f"r{i}", i), ctx, units))
        expected.append((units, i))
    gen.finish(*moves)
    for units, owner in expected:
        _assert_moved(gen, units, owner)
    _assert_quiet(gen)


def test_jobs_may_end_in_any_order(make_gen):
    gen = make_gen("in_process", 96, 100, shuffle=random.Random(3))
    ctx = gen.new_ctx("c1", 100, child=False)
    src = list(range(1, 91))
    units = units_for(src, ctx.write(src, owner=1), random_pages(random.Random(1), 90, 100))
    move = gen.start(KEY, ctx, [])
    for i in range(0, 90, 9):
        gen.read(move, units[i : i + 9])
    gen.finish(move)
    assert [d.ordinal for d in move.ok] != list(range(90)) and sorted(d.ordinal for d in move.ok) == list(range(90))
    _assert_moved(gen, units, owner=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_known_bytes_of_a_new_pair_come_over(kind, make_gen):
    gen = make_gen(kind)
    assert not gen.transport.probe("c1"), "a pair that is not there"
    ctx = gen.new_ctx("c1", 8, child=False)
    if kind == "nixl":
        gen.until(lambda: not gen.transport.busy(), "the probe")
    assert gen.transport.probe("c1")
    assert ctx.boot in gen.ctxs


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_another_size_are_refused_naming_both(kind, make_gen):
    gen, other = make_gen(kind, 16384), make_gen(kind, 8192)
    ctx = other.new_ctx("c1", 8, child=False, pair=False)
    gen.exchange.memories["c1"] = other.exchange.memories.get("c1")
    with pytest.raises(PeerError, match=r"(16384.*8192|8192.*16384)"):
        gen.transport.connect("c1", ctx.connect(gen.boot, gen.transport.info_for("c1")))
    ctx.close()


@pytest.mark.parametrize("info", [b"", b"\x00", b"garbage", b"\x93\xa1x\x01\x02", b"tailrace-a-b-nobody"])
@pytest.mark.parametrize("kind", KINDS)
def test_malformed_or_stale_info_of_a_peer_is_its_own_fault(kind, info, make_gen):
    gen = make_gen(kind)
    if kind == "nixl" and not info:
        gen.transport.connect("c1", info)  # says: I receive nothing
        return
    with pytest.raises(PeerError):
        gen.transport.connect("c1", info)


# ------------------------------------------------------------------------------------------------ what may go wrong


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_fails_is_told_and_can_be_asked_for_again(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 21))
    units = units_for(src, ctx.write(src, owner=1), random_pages(random.Random(2), 20, 64))
    gen.fail_at = {7}
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert move.errors == ["fault at page 7"]
    arrived = {d.ordinal for d in move.ok}
    assert 7 not in arrived
    _assert_untouched(gen, {dst for d, dst in units if d.ordinal in arrived})
    rest = [(d, dst) for d, dst in units if d.ordinal not in arrived]
    again = gen.start(KEY, ctx, rest)
    gen.finish(again)
    assert not again.errors
    _assert_moved(gen, units, owner=1)
    _assert_quiet(gen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_used_anew_before_it_was_copied_is_stale(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=kind == "nixl")
    src = list(range(1, 11))
    units = units_for(src, ctx.write(src, owner=1), list(range(30, 40)))
    gen.hold_from = 5
    ctx.set_hold(5)
    move = gen.start(KEY, ctx, units)
    for _ in range(20):
        gen.step()
        time.sleep(0.001)
    ctx.write([3, 8], owner=2)  # 3 has been copied by now, 8 has not
    gen.hold_from = None
    ctx.set_hold(None)
    gen.finish(move)
    if kind == "nixl":  # the whole chunk is not sent
        assert move.stale and not move.ok and gen.landed == []
        _assert_untouched(gen, set())
    else:
        assert sorted(d.page for d in move.stale) == [3, 8]
        assert len(move.ok) == 8
    _assert_quiet(gen)


@pytest.mark.parametrize("kind", ["in_process", "shm"])
def test_a_descriptor_of_an_earlier_use_is_stale_and_one_out_of_range_too(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 16, child=False)
    (old,) = ctx.write([4], owner=1)
    ctx.write([4], owner=2)
    units = [(PageDescriptor(0, 0, 4, old), 7), (PageDescriptor(0, 1, 16, 0), 8), (PageDescriptor(0, 2, 2**31, 0), 9)]
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert [d.ordinal for d in move.stale] == [0, 1, 2] and not move.ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_that_is_asked_for_twice_gives_the_same_bytes(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 11))
    units = units_for(src, ctx.write(src, owner=1), list(range(21, 31)))
    for _ in range(2):
        move = gen.start(KEY, ctx, units)
        gen.finish(move)
        assert len(move.ok) == 10
    _assert_moved(gen, units, owner=1)
    _assert_quiet(gen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_transfer_arrives_and_holds_up_no_other_for_good(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 21))
    generations = ctx.write(src, owner=1)
    gen.slow_s = 0.002
    slow = gen.start(("slow", 1), ctx, units_for(src[:10], generations[:10], list(range(1, 11))))
    other = gen.start(("other", 1), ctx, units_for(src[10:], generations[10:], list(range(21, 31))))
    began = time.monotonic()
    gen.finish(slow, other)
    assert time.monotonic() - began >= 0.04
    assert len(slow.ok) == len(other.ok) == 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_held_transfer_does_not_hold_up_another(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 21))
    generations = ctx.write(src, owner=1)
    gen.hold_from = 15
    held = gen.start(("held", 1), ctx, [(PageDescriptor(0, 19, 20, generations[19]), 60)])
    for _ in range(20):
        gen.step()
        time.sleep(0.001)
    other = gen.start(("other", 1), ctx, units_for(src[:10], generations[:10], list(range(21, 31))))
    gen.finish(other)
    assert len(other.ok) == 10 and not held.over and gen.transport.busy()
    gen.hold_from = None
    gen.finish(held)
    assert len(held.ok) == 1


def _manager(gen: Gen) -> KvManager:
    page = single_layout([StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 4), Field("v", 1, 4)))], 1, "float32")
    return KvManager(page, gen.arena.num_pages, 1, gen.arena.generations)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_an_aborted_request_stay_quarantined_until_the_copy_has_returned(kind, make_gen):
    """A1: the next owner of the pages must not be overwritten by a copy that was under way."""
    gen = make_gen(kind, num_pages=33, hook=True)
    kv = _manager(gen)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 21))
    reserved = kv.allocate(20)
    assert reserved is not None
    units = units_for(src, ctx.write(src, owner=1), reserved)
    gen.hold_from = 3
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: 2 in gen.hooked, "the copy to be under way")
    job = next(iter(move.jobs))
    gen.transport.abandon(ctx.boot, job)  # the abort
    kv.quarantine(reserved)
    gen.transport.disconnect(ctx.boot)  # not even this ends it early
    other = kv.allocate(12)
    assert other is not None and kv.allocate(1) is None, "12 of 32 pages are all that B can have"
    gen.arena.pages[other] = 0xBB
    for _ in range(50):
        gen.step()
        time.sleep(0.001)
        assert job in move.jobs, "the job was answered while its copy could still write"
    assert kv.counts().quarantined == 20
    gen.hold_from = None
    gen.until(lambda: not move.jobs, "the copy's return")
    kv.end_quarantine(reserved)
    again = kv.allocate(20)
    assert again is not None
    gen.arena.pages[again] = 0xBB
    for _ in range(30):
        gen.step()
        time.sleep(0.001)
    assert (gen.arena.pages[other + again] == 0xBB).all(), "something landed in a page of its next owner"
    kv.release(other + again)
    kv.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_has_not_begun_is_dropped_when_abandoned(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=False)
    gen.hold_from = 0
    move = gen.start(KEY, ctx, units_for([1, 2], ctx.write([1, 2], owner=1), [5, 6]))
    gen.until(lambda: move.jobs, "the job")
    gen.transport.abandon(ctx.boot, next(iter(move.jobs)))
    if kind == "nixl":
        gen.hold_from = None  # its chunk was already being looked at
    gen.until(lambda: not move.jobs, "the answer")
    if kind != "nixl":
        assert move.errors == ["abandoned"]
        _assert_untouched(gen, set())
    _assert_quiet(gen)


# ------------------------------------------------------------------------------------------------- peers that go away


def test_pages_of_a_dead_ctx_can_still_be_read_and_judged_over_shm(make_gen):
    gen = make_gen("shm", hook=True)
    ctx = gen.new_ctx("c1", 64, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 41))
    generations = ctx.write(src, owner=1)
    units = units_for(src, generations, list(range(20, 60)))
    gen.hold_from = 10
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: 9 in gen.hooked, "the middle of the transfer")
    ctx.kill()
    gen.hold_from = None
    gen.finish(move)
    assert len(move.ok) == 40
    _assert_moved(gen, units, owner=1)
    seen = list(zip(src, generations, strict=True))
    assert gen.transport.still_valid("c1", seen)
    assert not gen.transport.still_valid("c1", [*seen[1:], (1, generations[0] + 1)])
    gen.transport.disconnect("c1")
    assert not gen.transport.still_valid("c1", seen), "not mapped any more"


def test_a_generation_that_changed_after_the_read_is_seen_in_the_mapping(make_gen):
    gen = make_gen("shm")
    ctx = gen.new_ctx("c1", 16, child=False)
    seen = [(p, g) for p, g in zip([1, 2], ctx.write([1, 2], owner=1), strict=True)]
    assert gen.transport.still_valid("c1", seen)
    ctx.write([2], owner=2)
    assert not gen.transport.still_valid("c1", seen)
    assert gen.transport.still_valid("c1", seen[:1])


def test_a_stopped_ctx_can_be_read_over_shm_and_what_it_does_later_is_seen(make_gen):
    gen = make_gen("shm")
    ctx = gen.new_ctx("c1", 64, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 21))
    generations = ctx.write(src, owner=1)
    units = units_for(src, generations, src)
    ctx.stop()
    del gen.ctxs["c1"]  # it cannot be asked now
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert len(move.ok) == 20 and gen.transport.still_valid("c1", [(1, generations[0])])
    ctx.go_on()
    ctx.write([1], owner=2)
    _assert_moved(gen, units, owner=1)
    assert not gen.transport.still_valid("c1", [(1, generations[0])])
    ctx.close()


def test_nixl_knows_nothing_of_a_dead_peers_memory(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 16, child=False)
    (generation,) = ctx.write([1], owner=1)
    assert gen.transport.still_valid("c1", [(1, generation)]) is False


def test_chunks_of_a_killed_ctx_return_when_the_agent_that_receives_is_destroyed_and_not_before(make_gen):
    gen = make_gen("nixl", 65536, 200)
    ctx = gen.new_ctx("c1", 200, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 161))
    units = units_for(src, ctx.write(src, owner=1), src)
    ctx.set_hold(30)  # the second chunk is never packed
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: len(move.ok) == 16, "the first chunk")
    ctx.kill()
    del gen.ctxs["c1"]
    began = time.monotonic()
    while time.monotonic() - began < 0.3:
        gen.transport.poll()
        time.sleep(0.005)
    assert gen.transport.counts().granted == 2, "the death of its writer is no evidence"
    gen.transport.disconnect("c1")
    assert gen.transport.counts() == ChunkCounts(4, 0, 0, 4)
    gen.transport.check()
    _assert_moved(gen, units[:16], owner=1)
    _assert_untouched(gen, {dst for _, dst in units[:16]})
    ctx.close()


@pytest.mark.parametrize("kind", PROCESS_KINDS)
def test_a_ctx_that_comes_back_at_the_same_address_is_another_peer(kind, make_gen):
    """B10, B11: nothing of the old boot is taken for the new one's, and the new one just works."""
    gen = make_gen(kind)
    old = gen.new_ctx("boot1", 64, child=True)
    assert isinstance(old, ChildCtx)
    src = list(range(1, 11))
    units = units_for(src, old.write(src, owner=1), list(range(1, 11)))
    gen.finish(gen.start(("a", 1), old, units))
    old.kill()
    new = gen.new_ctx("boot2", 64, child=True)
    fresh = units_for(src, new.write(src, owner=2), list(range(11, 21)))
    move = gen.start(("a", 2), new, fresh)
    gen.finish(move)
    assert len(move.ok) == 10
    _assert_moved(gen, fresh, owner=2)
    _assert_moved(gen, units, owner=1)
    gen.transport.disconnect("boot1")
    late = gen.start(("a", 3), new, [])
    late.boot = "boot1"
    if kind == "shm":
        gen.read(late, units)
        gen.finish(late)
        assert not late.ok and late.errors == ["no memory of boot1 is mapped"]
    del gen.ctxs["boot1"]
    old.close()
    _assert_quiet(gen)


@pytest.mark.parametrize("seed", range(2))
def test_what_a_stopped_ctx_had_posted_lands_nowhere_after_gen_has_given_up(seed, make_gen):
    """B17 over nixl: the chunks go to a new owner, whose stamp must stand whatever the old writer does later."""
    rng = random.Random(seed)
    gen = make_gen("nixl", 262_144, 130, chunk_bytes=4 << 20)
    ctx = gen.new_ctx("c1", 130, child=True)
    other = gen.new_ctx("c2", 130, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 121))
    units = units_for(src, ctx.write(src, owner=1), src)
    move = gen.start(KEY, ctx, units)
    gen.unpack = False  # what lands stays in its chunk
    gen.grant_and_post(move, limit=4)
    time.sleep(rng.random() * 0.012)
    ctx.stop()
    del gen.ctxs["c1"]
    for event in gen.transport.poll():
        gen.transport.drop_landed(event.boot, event.landed)
    gen.transport.disconnect("c1")
    assert gen.transport.counts() == ChunkCounts(4, 0, 0, 4)
    landing = gen.transport._gen._landing
    landing[:] = 0xBB  # the next owner
    ctx.go_on()
    began = time.monotonic()
    while time.monotonic() - began < 0.4:
        gen.transport.poll()
        time.sleep(0.002)
    assert (landing == 0xBB).all(), "a late write landed in a chunk with a new owner"
    wait_for(lambda: sum(done.lost for done in _collect(ctx, gen)) or not move.posts, "the end of its posts")
    gen.moves.clear()
    gen.unpack = True
    units = units_for(src[:40], other.write(src[:40], owner=2), src[:40])
    after = gen.start(("b", 1), other, units)
    gen.finish(after)
    _assert_moved(gen, units, owner=2)
    ctx.close()


def test_what_a_stopped_ctx_posts_only_after_gen_has_given_up_lands_nowhere_either(make_gen):
    """It still has the old grants and addresses, and has not yet looked whether its peer is there."""
    gen = make_gen("nixl", 65536, 130)
    ctx = gen.new_ctx("c1", 130, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 65))
    units = units_for(src, ctx.write(src, owner=1), src)
    ctx.set_hold(16)  # only the first of four chunks is posted
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.grant_and_post(move, limit=4)
    gen.until(lambda: gen.landed, "the first chunk")
    ctx.stop()
    ctx.tell("set_hold", None)  # the first thing it will do
    del gen.ctxs["c1"]
    gen.transport.drop_landed("c1", gen.landed[0].landed)
    gen.transport.disconnect("c1")
    assert gen.transport.counts() == ChunkCounts(4, 0, 0, 4)
    landing = gen.transport._gen._landing
    landing[:] = 0xBB
    ctx.go_on()
    ctx.hear()
    wait_for(lambda: [_collect(ctx, gen), not move.posts][1], "the end of its posts")
    assert (landing == 0xBB).all(), "a late write landed in a chunk with a new owner"
    assert len(move.errors) == 3
    ctx.close()


def _collect(ctx: ChildCtx, gen: Gen) -> list[Any]:
    found = ctx.step()
    for done in found:
        gen._post_done(done)
    return found + gen.lost


def test_a_stopped_ctx_that_goes_on_in_time_loses_nothing(make_gen):
    gen = make_gen("nixl", 65536, 200)
    ctx = gen.new_ctx("c1", 200, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 161))
    units = units_for(src, ctx.write(src, owner=1), src)
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: len(move.ok) >= 16, "the first chunk")
    ctx.stop()
    for _ in range(50):
        gen.transport.counts()
        time.sleep(0.002)
    ctx.go_on()
    gen.finish(move)
    assert len(move.ok) == 160
    _assert_moved(gen, units, owner=1)


def test_a_pair_whose_gen_gave_up_is_made_anew_from_its_hello_on(make_gen):
    gen = make_gen("nixl", 65536, 200)
    ctx = gen.new_ctx("c1", 200, child=True)
    src = list(range(1, 101))
    units = units_for(src, ctx.write(src, owner=1), src)
    ctx.set_hold(0)
    move = gen.start(KEY, ctx, units)
    gen.step()
    gen.transport.disconnect("c1")
    del gen.moves[KEY]
    gen.pair(ctx)
    ctx.set_hold(None)
    gen.until(lambda: not move.posts, "the answers to what was never posted")
    assert not gen.lost and move.errors, "packed for the old pair, posted to nobody"
    again = gen.start(("again", 1), ctx, units)
    gen.finish(again)
    assert len(again.ok) == 100
    _assert_moved(gen, units, owner=1)
    _assert_quiet(gen)


def test_the_same_hello_again_changes_nothing(make_gen):
    """A link that broke and was dialled again does not end the transfers of its pair."""
    gen = make_gen("nixl", 65536, 200, hook=True)
    ctx = gen.new_ctx("c1", 200, child=True)
    src = list(range(1, 101))
    units = units_for(src, ctx.write(src, owner=1), src)
    gen.hold_from = 8
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: 7 in gen.hooked, "the middle of the transfer")
    gen.pair(ctx)
    gen.hold_from = None
    gen.finish(move)
    assert len(move.ok) == 100 and not move.errors
    _assert_moved(gen, units, owner=1)


def test_a_gen_that_does_not_take_its_bytes_leaves_staging_for_another(make_gen):
    stalled, busy = (make_gen("nixl", 262_144, 130, boot=boot, chunk_bytes=4 << 20) for boot in ("91", "92"))
    ctx = stalled.new_ctx("c1", 130, child=True)
    busy.pair(ctx)
    src = list(range(1, 121))
    generations = ctx.write(src, owner=1)
    stuck = stalled.start(("stuck", 1), ctx, units_for(src, generations, src))
    stalled.grant_and_post(stuck, limit=4)  # and never polls
    del stalled.ctxs["c1"]
    move = busy.start(("free", 1), ctx, units_for(src, generations, src))
    busy.post_owner |= stalled.post_owner
    busy.finish(move)
    assert len(move.ok) == 120 and stuck.posts


@pytest.mark.parametrize("who", ["ctx ends it", "gen dies"])
def test_what_was_posted_when_a_pair_ends_is_lost_and_the_rest_was_never_posted(who, make_gen):
    gen = make_gen("nixl", 262_144, 130, chunk_bytes=4 << 20)
    ctx = gen.new_ctx("c1", 130, child=True)
    src = list(range(1, 65))
    move = gen.start(KEY, ctx, units_for(src, ctx.write(src, owner=1), src))
    gen.grant_and_post(move, limit=4)  # gen does not poll, so none of them can be done; two of them find staging
    wait_for(lambda: ctx.num_live(gen.boot) == 2, "two posted writes")
    if who == "ctx ends it":
        ctx.disconnect(gen.boot)
    else:
        gen.transport._gen._receivers["c1"].agent.destroy()
        gen.transport._gen._receivers.clear()
    done: list[Any] = []
    wait_for(lambda: [done.extend(ctx.step()), len(done) == 4][1], "four answers")
    assert sorted(d.lost for d in done) == [False, False, True, True]
    assert all(d.error and not d.stale for d in done)
    gen.moves.clear()
    ctx.post(PostJob(99, KEY, gen.boot, (PageDescriptor(0, 0, 1, 1),), LandingGrant(0, 1, 4 << 20)))
    wait_for(lambda: [done.extend(ctx.step()), len(done) == 5][1], "an answer without a pair")
    assert not done[-1].lost


# ------------------------------------------------------------------------------------------------ nixl's own evidence


def test_a_flipped_byte_in_a_landed_chunk_is_found_and_the_chunk_is_free_again(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 11))
    units = units_for(src, ctx.write(src, owner=1), src)
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    event = gen.landed[0]
    transport = gen.transport
    start = event.landed.chunk * transport._gen._stride
    transport._gen._landing[start + 4096 + 5 * 16384 + 77] ^= 1
    gen.take(event)
    gen.until(lambda: not move.jobs, "the check")
    assert move.errors == ["corrupt"] and not move.ok and transport.corrupt_chunks == 1
    _assert_untouched(gen, set())
    _assert_quiet(gen)


def test_notifications_that_name_no_grant_are_dropped_and_counted(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 64, child=False)
    src = [1, 2, 3]
    units = units_for(src, ctx.write(src, owner=1), src)
    gen.finish(gen.start(KEY, ctx, units))
    (event,) = gen.landed
    sender = ctx.transport._ctx._senders[gen.boot]
    for message in (b"nonsense", b"", bytes(gen_pack(event.landed))):
        sender.agent._agent.send_notif(sender.remote, message)
    gen.until(lambda: [ctx.transport.poll(), gen.transport.stale_notifications == 3][1], "three notifications")
    assert gen.landed == [event]
    _assert_quiet(gen)


def gen_pack(landed: Any) -> bytes:
    from tailrace.transfer import frames

    return frames.pack(landed)


def test_what_landed_can_be_unpacked_once(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 64, child=False)
    units = units_for([1], ctx.write([1], owner=1), [9])
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    gen.take(gen.landed[0])
    move.granted += 1
    gen.take(gen.landed[0])
    gen.until(lambda: not move.jobs, "both answers")
    assert len(move.ok) == 1 and move.errors == ["nothing of this grant has landed"]
    _assert_quiet(gen)


def test_what_landed_before_the_pair_ended_can_still_be_unpacked(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 64, child=False)
    units = units_for([1, 2], ctx.write([1, 2], owner=1), [8, 9])
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    gen.transport.disconnect("c1")
    assert gen.transport.counts().unpacking == 1
    gen.take(gen.landed[0])
    gen.until(lambda: not move.jobs, "the unpacking")
    _assert_moved(gen, units, owner=1)
    assert gen.transport.counts() == ChunkCounts(4, 0, 0, 4)


def test_chunks_return_when_ctx_says_that_it_posts_no_more(make_gen):
    gen = make_gen("nixl")
    gen.new_ctx("c1", 64, child=False)
    one = gen.transport.grants(("one", 1), "c1", 3)
    two = gen.transport.grants(("two", 1), "c1", 3)
    assert len(one) == 3 and len(two) == 1
    assert len({(g.chunk, g.sequence) for g in one + two}) == 4
    gen.transport.reclaim(("one", 1), "c1")
    assert gen.transport.counts() == ChunkCounts(3, 1, 0, 4)
    gen.transport.reclaim(("two", 1), "c9")
    assert gen.transport.counts().granted == 1, "another boot's word is nothing"


def test_a_job_without_a_pair_or_over_its_chunk_is_not_posted(make_gen):
    gen = make_gen("nixl")
    ctx = gen.new_ctx("c1", 200, child=False)
    (grant,) = gen.transport.grants(KEY, "c1", 1)
    pages = tuple(PageDescriptor(0, i, i, 0) for i in range(1, 66))  # 64 fit
    ctx.post(PostJob(1, KEY, "nobody", pages[:1], grant))
    ctx.post(PostJob(2, KEY, gen.boot, pages, grant))
    done = ctx.step()
    assert [(d.job, d.lost) for d in done] == [(1, False), (2, False)]
    assert done[0].error == "there is no pair with nobody" and done[1].error == "65 pages do not fit landing chunk 0"


@pytest.mark.parametrize("kind", ["in_process", "shm"])
def test_a_reading_transport_has_no_chunks(kind, make_gen):
    gen = make_gen(kind)
    assert gen.transport.grants(KEY, "c1", 4) == ()
    assert gen.transport.counts() == ChunkCounts()
    gen.transport.reclaim(KEY, "c1")
    move = gen.start(KEY, gen.new_ctx("c1", 8, child=False), [])
    move.boot = "nobody"
    gen.read(move, [(PageDescriptor(0, 0, 1, 1), 1)])
    gen.finish(move)
    assert not move.ok and move.errors
    assert isinstance(ReadDone(1, KEY, ()), ReadDone)
