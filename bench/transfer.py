"""Pages from one process's pool into another's on this machine by the product's transports, in GB/s of page bytes.

    transfer.shm.<page>       64 MiB of pages in random order       against copy (one memory copy of the same bytes)
    transfer.nixl.<page>      the same over NIXL and UCX's tcp      against copy, nixl_one_block (one write of 64 MiB)
    transfer.shm.handoff      1000 tokens of SmolLM2, ms            against copy
    transfer.nixl.handoff

Source pages are drawn at random, destinations are what a pool gives that has seen some use. The peer is a process of
its own; both sides are polled each millisecond, or when a helper thread has news, as a worker's transfer thread does.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from harness import MIN_PAIRS, Row, arguments, finish, identity, interleaved, row_of

from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.messages import LandingGrant, PageDescriptor
from tailrace.transfer.transports.base import LandedIn, PostJob, ReadDone, ReadJob, Transport
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.nixl_agents import Agent, memory
from tailrace.transfer.transports.shm import ShmTransport

TOTAL = 64 << 20
SMOLLM2_PAGE = 368_640  # 16 tokens, bf16
HANDOFF_PAGES = 63  # 1000 tokens
SIZES = {"4k": 4096, "16k": 16384, "64k": 65536, "1m": 1 << 20, "smollm2": SMOLLM2_PAGE}
KINDS = ("shm", "nixl")
NAMES = tuple(f"transfer.{kind}.{size}" for kind in KINDS for size in (*SIZES, "handoff"))
GRANTS = 4
NAP_S = 0.001
Key = tuple[str, int]
KEY: Key = ("bench", 1)
Units = list[tuple[PageDescriptor, int]]


def new_arena(role: str, page_bytes: int, num_pages: int) -> Arena:
    group = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, page_bytes // 8), Field("v", 1, page_bytes // 8)))
    layout = single_layout([group], 1, "float32")
    arena = Arena.create(
        arena_name("bench", f"{os.getppid()}_{role}_{page_bytes}", f"{time.time_ns()}"), layout, num_pages
    )
    arena.pages[:] = 1  # every page is there before a clock runs
    return arena


def make_transport(kind: str, boot: str, arena: Arena, news: threading.Event, *, receives: bool) -> Transport:
    if kind == "shm":
        return ShmTransport(arena, wake=news.set)
    chunks = ChunkConfig(landing_chunks=8 if receives else 0, staging_chunks=0 if receives else 4)
    return NixlTransport(boot, arena, chunks, wake=news.set)


def serve(kind: str, page_bytes: int, num_pages: int, pipe: Connection) -> None:
    """The ctx: a pool of random bytes that gen reads, or that is posted as gen says."""
    arena = new_arena("ctx", page_bytes, num_pages)
    arena.pages[:] = np.random.default_rng(page_bytes).integers(0, 256, arena.pages.shape, dtype=np.uint8)
    arena.generations[:] = 1
    news = threading.Event()
    transport = make_transport(kind, "c7", arena, news, receives=False)
    block = Agent("block-c7", [source := memory(TOTAL)])
    pipe.send("ready")
    jobs = 0
    while True:
        transport.poll()
        while pipe.poll():
            name, *args = pipe.recv()
            if name == "connect":
                transport.connect(*args)
                pipe.send(transport.info_for(args[0]))
            elif name == "post":
                jobs += 1
                transport.post(PostJob(jobs, KEY, "9e", args[1], args[0]))
            elif name == "load":
                remote, address = block.load(args[0]), args[1]
            elif name == "block":
                write = block.write(source, remote, address, b"block")
                while not block.is_done(write):
                    time.sleep(0)
                block.release(write)
                for _ in range(100):
                    block.notifications()
            else:
                transport.close()
                arena.unlink()
                return
        if transport.busy():
            news.wait(NAP_S)
            news.clear()
        else:
            pipe.poll(NAP_S)


class Pair:
    """Gen here, ctx in a process of its own, and the pages to be moved."""

    def __init__(self, kind: str, page_bytes: int, n: int) -> None:
        self.kind, self.n = kind, n
        num_pages = 2 * n + 2
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(kind, page_bytes, num_pages, theirs), daemon=True)
        self.process.start()
        assert self.pipe.recv() == "ready"
        self.arena = new_arena("gen", page_bytes, num_pages)
        self.news = threading.Event()
        self.transport = make_transport(kind, "9e", self.arena, self.news, receives=True)
        self.pipe.send(("connect", "9e", self.transport.info_for("c7")))
        self.transport.connect("c7", self.pipe.recv())
        self._jobs = 0
        self.units = self._draw(num_pages)
        self.mine = memory(n * page_bytes).reshape(n, page_bytes)
        self.other = memory(n * page_bytes).reshape(n, page_bytes)
        self.mine[:], self.other[:] = 1, 2
        if kind == "nixl":
            self.block = memory(TOTAL)
            self.agent = Agent("block-9e", [self.block])
            self.pipe.send(("load", self.agent.metadata, self.block.ctypes.data))

    def _draw(self, num_pages: int) -> Units:
        """Sources in random order; destinations from a pool in which every fifth page is taken."""
        kv = KvManager(self.arena_layout(), num_pages, 1)
        used = kv.allocate(num_pages - 1)
        assert used is not None
        kv.release([page for page in used if page % 5])
        pages = kv.allocate(self.n)
        assert pages is not None
        sources = random.Random(1).sample(range(1, num_pages), self.n)
        return [(PageDescriptor(0, i, src, 1), dst) for i, (src, dst) in enumerate(zip(sources, pages, strict=True))]

    @staticmethod
    def arena_layout() -> Any:
        return single_layout([StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 1), Field("v", 1, 1)))], 1, "float32")

    def move(self) -> float:
        """Seconds until every page stands in gen's pool."""
        began = time.perf_counter()
        todo, arrived = list(self.units), 0
        if self.kind == "shm":
            self._read(todo, None)
            todo = []
        granted = 0
        while arrived < self.n:
            while todo and granted < GRANTS:
                grants: Sequence[LandingGrant] = self.transport.grants(KEY, "c7", 1)
                if not grants:
                    break
                granted += 1
                part, todo = todo[: self.transport.units_per_grant], todo[self.transport.units_per_grant :]
                self.pipe.send(("post", grants[0], tuple(d for d, _ in part)))
            events = self.transport.poll()
            for event in events:
                if isinstance(event, LandedIn):
                    granted -= 1
                    where = dict(self.units[event.landed.pages[0].ordinal :][: len(event.landed.pages)])
                    self._read([(d, where[d]) for d in event.landed.pages], event.landed)
                elif isinstance(event, ReadDone):
                    assert event.error is None and not event.units_stale, event.error
                    arrived += len(event.units_ok)
            if not events:
                self.news.wait(NAP_S)
                self.news.clear()
        return time.perf_counter() - began

    def _read(self, units: Units, landed: Any) -> None:
        self._jobs += 1
        self.transport.read(ReadJob(self._jobs, KEY, "c7", tuple(units), landed))

    def copy(self) -> float:
        """Seconds of one memory copy of as many bytes, in one thread."""
        began = time.perf_counter()
        np.copyto(self.mine, self.other)
        return time.perf_counter() - began

    def one_block(self) -> float:
        """Seconds per page byte volume of one NIXL write of 64 MiB, scaled to the bytes of `move`."""
        began = time.perf_counter()
        self.pipe.send(("block",))
        while not self.agent.notifications():
            time.sleep(0)
        return (time.perf_counter() - began) * self.mine.nbytes / TOTAL

    def is_right(self) -> bool:
        """Gate: every page is ctx's, byte for byte."""
        shape = (self.arena.num_pages, self.arena.bytes_per_page)
        theirs = np.random.default_rng(self.arena.bytes_per_page).integers(0, 256, shape, dtype=np.uint8)
        return all((self.arena.pages[dst] == theirs[d.page]).all() for d, dst in self.units)

    def close(self) -> None:
        self.pipe.send(("close",))
        self.process.join(20)
        self.transport.close()
        self.arena.unlink()


def measure(kind: str, size: str, pairs: int) -> Row:
    name = f"transfer.{kind}.{size}"
    handoff = size == "handoff"
    page_bytes = SMOLLM2_PAGE if handoff else SIZES[size]
    pair = Pair(kind, page_bytes, HANDOFF_PAGES if handoff else TOTAL // page_bytes)
    try:
        what = identity(transport=kind, page_bytes=page_bytes, pages=pair.n, grants=GRANTS)
        pair.move()
        if not pair.is_right():
            return Row(name, None, "GB/s", "higher", status="held", reason="bytes differ", identity=what)
        nbytes = pair.n * page_bytes

        def rate(seconds: Callable[[], float]) -> Callable[[], float]:
            return lambda: seconds() * 1e3 if handoff else nbytes / seconds() / 1e9

        measures = {"ours": rate(pair.move), "copy": rate(pair.copy)}
        if kind == "nixl":
            measures["nixl_one_block"] = rate(pair.one_block)
        samples = interleaved(measures, pairs, warm_ups=2)
        return row_of(name, "ms" if handoff else "GB/s", "lower" if handoff else "higher", samples, what)
    finally:
        pair.close()


def main() -> None:
    args = arguments(__doc__ or "", NAMES)
    pairs = MIN_PAIRS if args.quick else 3 * MIN_PAIRS
    rows = []
    for name in args.names:
        _, kind, size = name.split(".")
        rows.append(measure(kind, size, pairs))
    finish(rows, args)


if __name__ == "__main__":
    main()
