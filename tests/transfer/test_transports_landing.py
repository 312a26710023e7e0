"""The conformance suite of the landing transports: grants, lost posts, pairs that end and are made anew."""

from __future__ import annotations

import time

import pytest
from transport_abilities import needs
from transport_peers import (
    KEY,
    LANDING,
    ChildCtx,
    assert_moved,
    assert_quiet,
    assert_untouched,
    landed_chunk,
    units_for,
)

from tailrace.transfer.messages import PageDescriptor
from tailrace.transfer.transports.base import ChunkCounts, PostDone, PostJob


@pytest.mark.parametrize("kind", LANDING)
def test_landing_transports_know_nothing_of_a_dead_peers_memory(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 16, child=False)
    (generation,) = ctx.write([1], owner=1)
    assert gen.transport.still_valid("c1", [(1, generation)]) is False


@pytest.mark.parametrize("kind", LANDING)
def test_a_stopped_ctx_that_goes_on_in_time_loses_nothing(kind, make_gen):
    gen = make_gen(kind, 65536, 200)
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
    assert_moved(gen, units, owner=1)


@pytest.mark.parametrize("kind", LANDING)
def test_a_pair_whose_gen_gave_up_is_made_anew_from_its_hello_on(kind, make_gen):
    gen = make_gen(kind, 65536, 200)
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
    assert_moved(gen, units, owner=1)
    assert_quiet(gen)


@pytest.mark.parametrize("kind", LANDING)
def test_the_same_hello_again_changes_nothing(kind, make_gen):
    """A link that broke and was dialled again does not end the transfers of its pair."""
    gen = make_gen(kind, 65536, 200, hook=True)
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
    assert_moved(gen, units, owner=1)


@pytest.mark.parametrize("kind", LANDING)
def test_a_flipped_byte_in_a_landed_chunk_is_found_and_the_chunk_is_free_again(kind, make_gen):
    needs(kind, "bytes at rest")
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 64, child=False)
    src = list(range(1, 11))
    units = units_for(src, ctx.write(src, owner=1), src)
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    event = gen.landed[0]
    landed_chunk(gen, event.landed)[4096 + 5 * 16384 + 77] ^= 1
    gen.take(event)
    gen.until(lambda: not move.jobs, "the check")
    assert move.errors == ["corrupt"] and not move.ok and gen.transport.corrupt_chunks == 1
    assert_untouched(gen, set())
    assert_quiet(gen)


@pytest.mark.parametrize("kind", LANDING)
def test_what_landed_can_be_unpacked_once(kind, make_gen):
    gen = make_gen(kind)
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
    assert_quiet(gen)


@pytest.mark.parametrize("kind", LANDING)
def test_what_landed_before_the_pair_ended_can_still_be_unpacked(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 64, child=False)
    units = units_for([1, 2], ctx.write([1, 2], owner=1), [8, 9])
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    gen.transport.disconnect("c1")
    assert gen.transport.counts().unpacking == 1
    gen.take(gen.landed[0])
    gen.until(lambda: not move.jobs, "the unpacking")
    assert_moved(gen, units, owner=1)
    assert gen.transport.counts() == ChunkCounts(4, 0, 0, 4)


@pytest.mark.parametrize("kind", LANDING)
def test_chunks_return_when_ctx_says_that_it_posts_no_more(kind, make_gen):
    gen = make_gen(kind)
    gen.new_ctx("c1", 64, child=False)
    one = gen.transport.grants(("one", 1), "c1", 3)
    two = gen.transport.grants(("two", 1), "c1", 3)
    assert len(one) == 3 and len(two) == 1
    assert len({(g.chunk, g.sequence) for g in one + two}) == 4
    gen.transport.reclaim(("one", 1), "c1")
    assert gen.transport.counts() == ChunkCounts(3, 1, 0, 4)
    gen.transport.reclaim(("two", 1), "c9")
    assert gen.transport.counts().granted == 1, "another boot's word is nothing"


@pytest.mark.parametrize("kind", LANDING)
def test_a_job_without_a_pair_or_over_its_chunk_is_not_posted(kind, make_gen):
    gen = make_gen(kind)
    ctx = gen.new_ctx("c1", 200, child=False)
    (grant,) = gen.transport.grants(KEY, "c1", 1)
    pages = tuple(PageDescriptor(0, i, i, 0) for i in range(1, 66))  # 64 fit
    ctx.post(PostJob(1, KEY, "nobody", pages[:1], grant))
    done = [event for event in ctx.step() if isinstance(event, PostDone)]
    assert [(d.job, d.lost, d.error) for d in done] == [(1, False, "there is no pair with nobody")]
    needs(kind, "bounded chunks")
    ctx.post(PostJob(2, KEY, gen.boot, pages, grant))
    (done,) = ctx.step()
    assert (done.job, done.lost, done.error) == (2, False, "65 pages do not fit landing chunk 0")
