"""What moves beside the pages and when (F6, F9), and how big pages go: written from where they stand."""

import json
import time

import numpy as np
import pytest
from handoff_sim import PAGE, World
from handoff_sim import layout as handoff_layout
from node_rig import event, finish, submit
from transport_peers import KEY, LocalCtx, assert_moved, assert_quiet, units_for, wait_for

from tailrace.transfer import frames
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.loop_events import Admitted, Arrived, FaultsSet
from tailrace.transfer.messages import Landed, LandingGrant, PageDescriptor, SetFaults
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports.base import LandedIn, PostDone, PostJob
from tailrace.transfer.transports.landing import HEADER_BYTES, Checksum
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.packing import DIRECT_PAGE_BYTES, PackJob
from tailrace.transfer.transports.reading import Mapped

pytestmark = pytest.mark.alone  # costs are shares of measured times

F6_PAGES, F6_PAGE_BYTES = 256, 16 * 8 * 2 * 8 * 64 * 2  # 4096 tokens; 16 tokens, 8 layers, K and V, 8 heads of 64, bf16


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("landing", [False, True])
def test_f6_control_bytes_are_under_one_percent_of_the_pages(landing, scattered):
    config = CoreConfig(pin_lease_s=3.0, request_lease_s=2.0, kv_transfer_timeout_s=4.0)
    world = World(landing=landing, ctx_pages=2 * F6_PAGES + 2, gen_pages=2 * F6_PAGES + 2, config=config)
    world.landing_chunks, world.units_per_grant, world.chunk_tokens = 16, 16, 128
    if scattered:
        for worker in world.workers.values():
            pages = worker.kv.allocate(2 * F6_PAGES)
            worker.kv.release(pages[::2])
            worker.kv.release(pages[1::2])
    notified: list[int] = []
    notify = world.notify
    world.notify = lambda gen, event: [notified.append(len(frames.pack(event.landed))), notify(gen, event)][1]
    request = world.submit("r", tuple(range(F6_PAGES * PAGE)))
    world.run(20)
    assert request.outcome == "finished"
    told = sum(len(frames.encode(frame)) for _, _, frame in world.frames) + sum(notified)
    assert bool(notified) == landing
    per_page = told / F6_PAGES - PAGE * 4  # the prompt's ids are in the record, whatever a page's size
    assert per_page < 0.01 * 16384, f"{per_page} bytes a page"
    assert told + 4096 * 4 < 0.01 * F6_PAGES * F6_PAGE_BYTES


@pytest.mark.parametrize("scattered", [False, True])
def test_f6_describing_pages_takes_a_fifth_of_their_transfer_at_most(scattered, make_gen):
    """CPU seconds of both sides, so that other work on the machine does not count; the best of three."""
    rng = np.random.default_rng(1)
    src, dst = (rng.permutation(np.arange(1, F6_PAGES + 1)) if scattered else np.arange(1, F6_PAGES + 1) for _ in "ab")
    gen = make_gen("nixl", F6_PAGE_BYTES, F6_PAGES + 1, chunk_bytes=4 << 20)
    ctx = gen.new_ctx("c1", F6_PAGES + 1, child=False)
    units = units_for(src.tolist(), ctx.write(src.tolist(), owner=1), dst.tolist())
    shares = []
    for attempt in range(3):
        began = time.process_time()
        move = gen.start(("r", attempt), ctx, units)
        gen.finish(move)
        moving = time.process_time() - began
        assert len(move.ok) == F6_PAGES
        began = time.thread_time()
        for low in range(0, F6_PAGES, gen.transport.units_per_grant):
            part = tuple(units[low : low + gen.transport.units_per_grant])
            pages = PageList.of([descriptor for descriptor, _ in part])
            landed = frames.unpack(frames.pack(Landed(*KEY, 0, 1, 5, Checksum(pages).value, pages)))
            assert UnitList.of(part).src == landed.pages
        shares.append((time.thread_time() - began) / moving)
    assert min(shares) < 0.2, shares


def test_neighbouring_big_pages_are_one_piece_of_a_write():
    own = Mapped((np.ones((9, DIRECT_PAGE_BYTES), np.uint8),), np.ones(9, np.uint64))
    chunk = np.zeros(HEADER_BYTES + 8 * DIRECT_PAGE_BYTES, np.uint8)

    def pieces(numbers: list[int]) -> list[int]:
        pages = [PageDescriptor(0, i, page, 1) for i, page in enumerate(numbers)]
        job = PackJob(PostJob(1, KEY, "g", pages, LandingGrant(0, 1, 1 << 22, 8)), 0, chunk, own, None, direct=True)
        assert all(job.steps()) and job.landed is not None
        return [source.nbytes for source in job.sources]

    assert pieces([1, 2, 3, 4]) == [HEADER_BYTES, 4 * DIRECT_PAGE_BYTES]
    assert pieces([4, 5, 2, 8, 7]) == [HEADER_BYTES, 2 * DIRECT_PAGE_BYTES, *[DIRECT_PAGE_BYTES] * 3]


def _direct_pair(make_gen, num_pages: int):
    """A gen and a ctx, in this process, whose pages go from where they stand."""
    gen = make_gen("nixl", 368_640, num_pages)
    ctx = gen.new_ctx("c1", num_pages, child=False, pair=False)
    assert isinstance(ctx, LocalCtx)
    ctx.transport.close()
    ctx.transport = NixlTransport(ctx.boot, ctx.arena, ChunkConfig(0, 4, gen.chunk_bytes))
    gen.pair(ctx)
    return gen, ctx


def test_big_pages_arrive_from_where_they_stand(make_gen):
    gen, ctx = _direct_pair(make_gen, 40)
    numbers = [3, 4, 5, 9, 2, 30, 31, 12, 39, 1]
    units = units_for(numbers, ctx.write(numbers, owner=1), list(range(20, 30)))
    move = gen.start(KEY, ctx, units)
    gen.finish(move)
    assert len(move.ok) == 10 and not move.errors
    assert_moved(gen, units, owner=1)
    assert not ctx.transport._ctx._staging[HEADER_BYTES : 2 * HEADER_BYTES].any(), "the pages were staged"
    assert_quiet(gen)


def test_a_big_page_that_is_used_anew_while_it_is_sent_is_told_to_nobody(make_gen):
    gen, ctx = _direct_pair(make_gen, 40)
    gen.until(lambda: not gen.transport.busy(), "the probe")
    numbers = [3, 4]
    generations = ctx.write(numbers, owner=1)
    (grant,) = gen.transport.grants(KEY, "c1", 1)
    pages = [PageDescriptor(0, i, p, g) for i, (p, g) in enumerate(zip(numbers, generations, strict=True))]
    ctx.post(PostJob(1, KEY, gen.boot, pages, grant))
    done: list[PostDone] = []
    wait_for(lambda: [done.extend(ctx.step()), ctx.num_live(gen.boot)][1], "the write")
    ctx.write([4], owner=2)
    events = []
    wait_for(lambda: [done.extend(ctx.step()), events.extend(gen.transport.poll()), done][2], "the end of the post")
    assert done[0].stale and not done[0].lost and "used anew" in str(done[0].error)
    for _ in range(50):
        ctx.step()
        events += gen.transport.poll()
    assert not any(isinstance(event, LandedIn) for event in events)
    gen.transport.reclaim(KEY, "c1")
    assert_quiet(gen)


def _handed_off_s(rig, key, chunk_s: float, chunks: int) -> float:
    """Seconds from submit to admission of a prompt of so many chunks of a page, bound after its first."""
    tokens = chunks * PAGE
    began = time.monotonic()
    rig.ingress.send("c0", submit(tokens, key=key))
    event(rig.ctx, Arrived)
    pages = rig.ctx.kv.allocate(chunks)
    for end in range(PAGE, tokens + 1, PAGE):
        rig.ctx.chunk_launched(key, end == tokens, (tokens - end) / PAGE * chunk_s)
        time.sleep(chunk_s)
        rig.ctx.chunk_done(key, pages, end, (tokens - end) / PAGE * chunk_s)
        if end == PAGE:
            rig.bind(tokens, key=key)
    finish(rig, tokens, pages, key=key)
    admitted = event(rig.gen, Admitted)
    took = time.monotonic() - began
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(key, "finished")
    return took


@pytest.mark.parametrize("kind", ["shm", "nixl"])
def test_f9_a_slow_transfer_runs_while_its_prompt_is_computed(kind, one_rig):
    """Prefill and transfer of eight chunks take as long as each other: together at most 1.3 of one; best of three."""
    chunk_s, chunks = 0.06, 8
    slow = {"ctx" if kind == "nixl" else "gen": {"faults": True}}
    rig = one_rig(kind, **slow)
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    node, name = (rig.ctx, "c0") if kind == "nixl" else (rig.gen, "g0")
    rig.router.send(name, SetFaults(json.dumps({"slow_bytes_per_s": handoff_layout().bytes_per_page / chunk_s})))
    event(node, FaultsSet)
    took = []
    for attempt in range(3):
        took.append(_handed_off_s(rig, ("a" * 32, attempt), chunk_s, chunks))
        if took[-1] <= 1.3 * chunk_s * chunks:
            break
    assert chunk_s * chunks < min(took) <= 1.3 * chunk_s * chunks, took
