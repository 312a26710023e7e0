"""The conformance suite, nixl's part: landing chunks, lost posts, agents that are destroyed, peers that stop."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from transport_peers import (
    KEY,
    ChildCtx,
    Gen,
    assert_moved,
    assert_quiet,
    assert_untouched,
    units_for,
    wait_for,
)

from tailrace.transfer import frames
from tailrace.transfer.messages import LandingGrant, PageDescriptor
from tailrace.transfer.transports.base import ChunkCounts, PostJob


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
    assert_moved(gen, units[:16], owner=1)
    assert_untouched(gen, {dst for _, dst in units[:16]})
    ctx.close()


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
    assert_moved(gen, units, owner=2)
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
    gen.grant_and_post(move, limit=4)  # gen does not poll, so none of them can be done; three find staging
    wait_for(lambda: ctx.num_live(gen.boot) == 3, "three posted writes")
    if who == "ctx ends it":
        ctx.disconnect(gen.boot)
    else:
        gen.transport._gen._receivers["c1"].agent.destroy()
        gen.transport._gen._receivers.clear()
    done: list[Any] = []
    wait_for(lambda: [done.extend(ctx.step()), len(done) == 4][1], "four answers")
    assert sorted(d.lost for d in done) == [False, True, True, True]
    assert all(d.error and not d.stale for d in done)
    gen.moves.clear()
    ctx.post(PostJob(99, KEY, gen.boot, (PageDescriptor(0, 0, 1, 1),), LandingGrant(0, 1, 4 << 20, 8)))
    wait_for(lambda: [done.extend(ctx.step()), len(done) == 5][1], "an answer without a pair")
    assert not done[-1].lost


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
    assert_quiet(gen)


def gen_pack(landed: Any) -> bytes:
    return frames.pack(landed)
