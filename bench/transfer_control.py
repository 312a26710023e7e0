"""What a hand-off costs beside its pages: bytes of frames, and time to decide and to describe.

    transfer.control.bytes    bytes of all frames between gen and ctx for each byte of pages
    transfer.control.share    seconds of building and coalescing descriptors for each second of the transfer
    transfer.control.cores    the same of everything that both protocol cores do for the hand-off

A prompt of 4096 tokens in 256 pages of 256 KiB (16 tokens, 8 layers), the pages scattered or, with the suffix
`.contiguous`, neighbours, over landing chunks. The cores run as in tests, in simulated time, with their calls timed;
descriptors are built as the transports build them; the transfer is that of the same pages over NIXL.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from typing import Any

from harness import ROOT, Options, Row, identity, interleaved
from transfer_pair import CHUNKS, CTX, KEY, Pair

from tailrace.transfer import frames
from tailrace.transfer.core_events import Tick
from tailrace.transfer.messages import Handoff, Landed, LandingGrant, PageDescriptor
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports.landing import Checksum

NAMES = tuple(f"transfer.control.{what}{kind}" for what in ("bytes", "share", "cores") for kind in ("", ".contiguous"))
PAGES, PAGE_BYTES, TOKENS = 256, 256 << 10, 4096
PER_CHUNK = CHUNKS.pages_per_chunk(PAGE_BYTES)


def simulate(scattered: bool) -> tuple[int, float]:
    """(bytes of frames and notifications, seconds in both cores) of one hand-off of 256 pages."""
    sys.path.insert(0, str(ROOT / "tests"))
    import handoff_sim as sim  # tests are no package

    sys.path.pop(0)
    world = sim.World(landing=True, ctx_pages=2 * PAGES + 2, gen_pages=2 * PAGES + 2)
    world.landing_chunks, world.units_per_grant, world.chunk_tokens = CHUNKS.landing_chunks, PER_CHUNK, 64
    if scattered:
        for worker in world.workers.values():
            every = worker.kv.allocate(2 * PAGES)
            worker.kv.release(random.Random(1).sample(every, len(every)))
    seconds = [0.0]
    for worker in world.workers.values():
        _timed(worker.core, seconds)
    landed: list[bytes] = []
    notify = world.notify

    def counted(gen: Any, event: Any) -> None:
        landed.append(frames.pack(event.landed))
        notify(gen, event)

    world.notify = counted
    request = world.submit("r", tuple(range(PAGES * sim.PAGE)))
    world.run(30)
    assert request.outcome == "finished", request.outcome
    nbytes = sum(len(frames.encode(frame)) for _, _, frame in world.frames) + sum(len(data) for data in landed)
    ids = sum(4 * (TOKENS - PAGES * sim.PAGE) for _, _, frame in world.frames if isinstance(frame, Handoff))
    return nbytes + ids, seconds[0]


def _timed(core: Any, seconds: list[float]) -> None:
    handle = core.handle

    def timed(event: Any, now: float) -> Any:
        began = time.thread_time()
        try:
            return handle(event, now)
        finally:
            if not isinstance(event, Tick):
                seconds[0] += time.thread_time() - began

    core.handle = timed


def describe(units: list[tuple[PageDescriptor, int]]) -> float:
    """Seconds to build what names these pages, at both sides: lists, pieces, notifications, checksums' seeds."""
    began = time.thread_time()
    for low in range(0, len(units), PER_CHUNK):
        part = units[low : low + PER_CHUNK]
        pages = PageList.of(tuple(descriptor for descriptor, _ in part))
        word = frames.pack(Landed(*KEY, 0, 1, len(part) * PAGE_BYTES, Checksum(pages).value, pages))
        landed = frames.unpack(word)
        assert UnitList.of(tuple(part)).src == landed.pages
        LandingGrant(0, 1, 0, len(part))
    return time.thread_time() - began


def share(name: str, scattered: bool, pairs: int) -> Row:
    pair = Pair("nixl", PAGE_BYTES, PAGES)
    try:
        units = list(pair.units)
        if not scattered:
            units = [(PageDescriptor(0, i, 1 + i, 1), 1 + i) for i in range(PAGES)]
        what = identity(pages=PAGES, page_bytes=PAGE_BYTES, transport="nixl", peer=CTX, chunk_bytes=CHUNKS.chunk_bytes)
        if not pair.is_right():
            return Row(name, None, "fraction", "lower", status="held", reason="bytes differ", identity=what)
        ours = (lambda: describe(units)) if ".share" in name else (lambda: simulate(scattered)[1])
        measures = {"ours": ours, "transfer": pair.move}
        samples = interleaved(measures, pairs, warm_ups=2)
        shares = [a / b for a, b in zip(samples["ours"], samples["transfer"], strict=True)]
        return Row(name, statistics.median(shares), "fraction", "lower", identity=what, samples={"ours": shares})
    finally:
        pair.close()


def rows(options: Options) -> list[Row]:
    """The rows of this module that are wanted."""
    made = []
    for name in NAMES:
        if not options.wants(name):
            continue
        scattered = not name.endswith(".contiguous")
        if name.startswith("transfer.control.bytes"):
            what = identity(pages=PAGES, page_bytes=PAGE_BYTES, tokens=TOKENS)
            nbytes = simulate(scattered)[0]
            made.append(Row(name, nbytes / (PAGES * PAGE_BYTES), "fraction", "lower", identity=what))
        else:
            made.append(share(name, scattered, options.pairs))
    return made
