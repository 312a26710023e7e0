"""The conformance suite of the transports: whatever happens, no byte lands in a page of another owner."""

from __future__ import annotations

import random
import time

import pytest
from transport_abilities import needs
from transport_peers import (
    KEY,
    KINDS,
    LANDING,
    MAPPING,
    MAPPING_KINDS,
    READING_KINDS,
    ChildCtx,
    Gen,
    assert_moved,
    assert_quiet,
    assert_untouched,
    random_pages,
    units_for,
)

from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import PeerError
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.messages import PageDescriptor
from tailrace.transfer.transports.base import ChunkCounts, ReadDone

PROCESS_KINDS = (*MAPPING_KINDS, *LANDING)


# --------------------------------------------------------------------------------------------------------- what it does


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize(("page_bytes", "num_pages", "n"), [(96, 300, 200), (16384, 200, 150), (368_640, 24, 20)])
@pytest.mark.parametrize("kind", KINDS)
def test_random_pages_arrive_byte_for_byte_and_are_counted_once(kind, page_bytes, num_pages, n, child, make_gen):
    if child:
        needs(kind, "another process")
    rng = random.Random(f"{kind}{page_bytes}")
    gen = make_gen(kind, page_bytes, num_pages)
    ctx = gen.new_ctx("c7", num_pages, child=child)
    src, dst = random_pages(rng, n, num_pages), random_pages(rng, n, num_pages)
    units = units_for(src, ctx.write(src, owner=1), dst)
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert sorted(d.ordinal for d in move.ok) == list(range(n)) and not move.stale and not move.errors
    assert_moved(gen, units, owner=1)
    assert_untouched(gen, set(dst))
    assert_quiet(gen)


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
        assert_moved(gen, units, owner)
    assert_quiet(gen)


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
    assert_moved(gen, units, owner=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_known_bytes_of_a_new_pair_come_over(kind, make_gen):
    gen = make_gen(kind)
    assert not gen.transport.probe("c1"), "a pair that is not there"
    ctx = gen.new_ctx("c1", 8, child=False)
    if kind in LANDING:
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
    if kind in LANDING and not info:
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
    assert_untouched(gen, {dst for d, dst in units if d.ordinal in arrived})
    rest = [(d, dst) for d, dst in units if d.ordinal not in arrived]
    again = gen.start(KEY, ctx, rest)
    gen.finish(again)
    assert not again.errors
    assert_moved(gen, units, owner=1)
    assert_quiet(gen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_used_anew_before_it_was_copied_is_stale(kind, make_gen):
    gen = make_gen(kind, hook=True)
    ctx = gen.new_ctx("c1", 64, child=kind in LANDING)
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
    if kind in LANDING:  # the whole chunk is not sent
        assert move.stale and not move.ok and gen.landed == []
        assert_untouched(gen, set())
    else:
        assert sorted(d.page for d in move.stale) == [3, 8]
        assert len(move.ok) == 8
    assert_quiet(gen)


@pytest.mark.parametrize("kind", READING_KINDS)
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
    assert_moved(gen, units, owner=1)
    assert_quiet(gen)


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
    if kind in LANDING:
        gen.hold_from = None  # its chunk was already being looked at
    gen.until(lambda: not move.jobs, "the answer")
    if kind not in LANDING:
        assert move.errors == ["abandoned"]
        assert_untouched(gen, set())
    assert_quiet(gen)


# ------------------------------------------------------------------------------------------------- peers that go away


@pytest.mark.parametrize("kind", MAPPING_KINDS)
def test_pages_of_a_dead_ctx_can_still_be_read_and_judged(kind, make_gen):
    gen = make_gen(kind, hook=True)
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
    assert_moved(gen, units, owner=1)
    seen = list(zip(src, generations, strict=True))
    assert gen.transport.still_valid("c1", seen)
    assert not gen.transport.still_valid("c1", [*seen[1:], (1, generations[0] + 1)])
    gen.transport.disconnect("c1")
    assert not gen.transport.still_valid("c1", seen), "not mapped any more"


@pytest.mark.parametrize("kind", MAPPING_KINDS)
def test_a_generation_that_changed_after_the_read_is_seen_in_the_mapping(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 16, child=False)
    seen = [(p, g) for p, g in zip([1, 2], ctx.write([1, 2], owner=1), strict=True)]
    assert gen.transport.still_valid("c1", seen)
    ctx.write([2], owner=2)
    assert not gen.transport.still_valid("c1", seen)
    assert gen.transport.still_valid("c1", seen[:1])


@pytest.mark.parametrize("kind", MAPPING_KINDS)
def test_a_stopped_ctx_can_be_read_and_what_it_does_later_is_seen(kind, make_gen):
    gen = make_gen(kind)
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
    assert_moved(gen, units, owner=1)
    assert not gen.transport.still_valid("c1", [(1, generations[0])])
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
    assert_moved(gen, fresh, owner=2)
    assert_moved(gen, units, owner=1)
    gen.transport.disconnect("boot1")
    late = gen.start(("a", 3), new, [])
    late.boot = "boot1"
    if kind in MAPPING:
        gen.read(late, units)
        gen.finish(late)
        assert not late.ok and late.errors == ["no memory of boot1 is mapped"]
    del gen.ctxs["boot1"]
    old.close()
    assert_quiet(gen)


@pytest.mark.parametrize("kind", READING_KINDS)
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
