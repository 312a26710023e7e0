"""Two workers that move pages for a bench: gen here, ctx in a process of its own, by the product's transports.

The ctx is told which pages to post by a datagram a landing chunk, as short as the protocol's own frames; both sides are
polled at once after something came, else each millisecond or when a helper thread has news, as a worker's transfer
thread does. Naive peers of NIXL (a descriptor a page, one block) run between the same two processes.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.layout import PageLayout, single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.messages import Landed, LandingGrant, PageDescriptor
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports.base import LandedIn, PostJob, ReadDone, ReadJob, Transport, Wake
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.nixl_agents import Agent, memory
from tailrace.transfer.transports.shm import ShmTransport

TOTAL = 64 << 20
SMOLLM2_PAGE = 368_640  # 16 tokens, bf16
GRANTS = CoreConfig().max_grants_per_request
NAP_S = 0.001
_SCHED = 2  # Linux's clock of what a process computed, in the low bits of a clock's id
CHUNKS = ChunkConfig()
Key = tuple[str, int]
KEY: Key = ("bench", 1)
CTX, GEN = "c7", "9e"
_POST = struct.Struct("<QQQQQ")  # chunk, sequence, bytes; first and past-the-last place in the list of pages


def new_arena(role: str, page_bytes: int, num_pages: int) -> Arena:
    name = arena_name("bench", f"{os.getppid()}_{role}_{page_bytes}", f"{time.time_ns()}")
    arena = Arena.create(name, layout_of(page_bytes), num_pages)
    arena.pages[:] = 1  # every page is there before a clock runs
    return arena


def layout_of(page_bytes: int) -> PageLayout:
    fields = (Field("k", 1, page_bytes // 8), Field("v", 1, page_bytes // 8))
    return single_layout([StateGroup(GroupKind.HISTORY, (0,), fields)], 1, "float32")


def known_pages(page_bytes: int, num_pages: int) -> np.ndarray:
    """[num_pages, page_bytes] uint8: what stands in ctx's pool."""
    return np.random.default_rng(page_bytes).integers(0, 256, (num_pages, page_bytes), dtype=np.uint8)


def make_transport(kind: str, boot: str, arena: Arena, wake: Wake, *, receives: bool) -> Transport:
    if kind == "shm":
        return ShmTransport(arena, wake=wake)
    landing, staging = (CHUNKS.landing_chunks, 0) if receives else (0, CHUNKS.staging_chunks)
    chunks = ChunkConfig(landing, staging, CHUNKS.chunk_bytes)
    if kind in ("ucx", "ray"):
        from transfer_peers import make_peer  # it needs this module

        return make_peer(kind, boot, arena, chunks, wake)
    return NixlTransport(boot, arena, chunks, wake=wake)


class _Ctx:
    """The ctx's process: a pool of known bytes that gen reads, or that is posted as gen says."""

    def __init__(self, kind: str, page_bytes: int, num_pages: int, pipe: Connection, posts: socket.socket) -> None:
        self.pipe, self.posts, self.page_bytes = pipe, posts, page_bytes
        self.arena = new_arena("ctx", page_bytes, num_pages)
        self.arena.pages[:] = known_pages(page_bytes, num_pages)
        self.arena.generations[:] = 1
        self.news = os.eventfd(0)
        self.transport = make_transport(kind, CTX, self.arena, self.wake, receives=False)
        self.pages = PageList.of([])
        self.jobs = 0
        self.source = memory(TOTAL)
        self.block = Agent(f"block-{CTX}", [self.source, self.arena.pages.reshape(-1)])

    def wake(self) -> None:
        os.eventfd_write(self.news, 1)

    def run(self) -> None:
        while True:
            events = self.transport.poll()
            self._take_posts()
            while select.select([self.pipe], [], [], 0)[0]:
                name, *args = self.pipe.recv()
                if name == "close":
                    self.transport.close()
                    self.arena.unlink()
                    return
                getattr(self, name)(*args)
            if not events:
                nap = min(self.transport.busy(), NAP_S) or NAP_S
                if self.news in select.select([self.pipe, self.posts, self.news], [], [], nap)[0]:
                    os.eventfd_read(self.news)

    def _take_posts(self) -> None:
        while len(self.pages):  # a datagram may overtake what the pipe says of the pages
            try:
                chunk, sequence, nbytes, low, high = _POST.unpack(self.posts.recv(_POST.size))
            except BlockingIOError:
                return
            self.post(LandingGrant(chunk, sequence, nbytes, high - low), self.pages[low:high])

    def post(self, grant: LandingGrant, pages: Sequence[PageDescriptor]) -> None:
        self.jobs += 1
        self.transport.post(PostJob(self.jobs, KEY, GEN, pages, grant))

    def know(self, pages: Sequence[PageDescriptor]) -> None:
        self.pages = PageList.of(pages)

    def connect(self, boot: str, info: bytes) -> None:
        self.transport.connect(boot, info)
        self.pipe.send(self.transport.info_for(boot))

    def load(self, metadata: bytes, address: int) -> None:
        self.remote, self.address = self.block.load(metadata), address

    def one_block(self) -> None:
        self._until_done(self.block.write([self.source], self.remote, self.address, b"block"))

    def per_page(self) -> None:
        """A piece a page, each from where it stands, in one transfer: what a connector without packing does."""
        self._until_done(
            self.block.write([self.arena.pages[p] for p in self.pages.pages], self.remote, self.address, b"pages")
        )

    def _until_done(self, write: Any) -> None:
        while not self.block.is_done(write):
            time.sleep(0)
        self.block.release(write)
        for _ in range(100):
            self.block.notifications()


def serve(kind: str, page_bytes: int, num_pages: int, pipe: Connection, posts: socket.socket) -> None:
    posts.setblocking(False)
    ctx = _Ctx(kind, page_bytes, num_pages, pipe, posts)
    pipe.send("ready")
    ctx.run()


class Pair:
    """Gen here, ctx in a process of its own, and the pages to be moved.

    Attributes:
        units: sources in random order; destinations as a pool gives them in which every fifth page is taken.
    """

    def __init__(self, kind: str, page_bytes: int, n: int) -> None:
        self.kind, self.n = kind, n
        num_pages = 2 * n + 2
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.posts, their_posts = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        args = (kind, page_bytes, num_pages, theirs, their_posts)
        self.process = context.Process(target=serve, args=args, daemon=True)
        self.process.start()
        assert self.pipe.recv() == "ready"
        self.arena = new_arena("gen", page_bytes, num_pages)
        self.news = threading.Event()
        self.transport = make_transport(kind, GEN, self.arena, self.news.set, receives=True)
        self.pipe.send(("connect", GEN, self.transport.info_for(CTX)))
        self.transport.connect(CTX, self.pipe.recv())
        self._jobs = 0
        self.units = self._draw(num_pages)
        self.pipe.send(("know", list(self.units.src)))
        self.mine = memory(n * page_bytes).reshape(n, page_bytes)
        self.other = memory(n * page_bytes).reshape(n, page_bytes)
        self.mine[:], self.other[:] = 1, 2
        if kind == "nixl":
            self.block = memory(max(TOTAL, n * page_bytes))
            self.block[:] = 1
            self.agent = Agent(f"block-{GEN}", [self.block])
            self.pipe.send(("load", self.agent.metadata, self.block.ctypes.data))

    def _draw(self, num_pages: int) -> UnitList:
        kv = KvManager(layout_of(8), num_pages, 1)
        used = kv.allocate(num_pages - 1)
        assert used is not None
        kv.release([page for page in used if page % 5])
        pages = kv.allocate(self.n)
        assert pages is not None
        sources = random.Random(1).sample(range(1, num_pages), self.n)
        descriptors = [PageDescriptor(0, i, page, 1) for i, page in enumerate(sources)]
        return UnitList(PageList.of(descriptors), np.array(pages, np.int64))

    def move(self) -> float:
        """Seconds until every page stands in gen's pool."""
        began = time.perf_counter()
        asked, arrived, granted = 0, 0, 0
        if self.kind == "shm":
            self._read(self.units, None)
            asked = self.n
        step = self.transport.units_per_grant
        while arrived < self.n:
            while asked < self.n and granted < GRANTS:
                grants: Sequence[LandingGrant] = self.transport.grants(KEY, CTX, 1)
                if not grants:
                    break
                (grant,) = grants
                granted += 1
                high = min(asked + step, self.n)
                self.posts.send(_POST.pack(grant.chunk, grant.sequence, grant.nbytes, asked, high))
                asked = high
            events = self.transport.poll()
            for event in events:
                if isinstance(event, LandedIn):
                    granted -= 1
                    landed = event.landed.pages
                    first = int(landed.ordinals[0])
                    self._read(UnitList(landed, self.units.dst[first : first + len(landed)]), event.landed)
                elif isinstance(event, ReadDone):
                    assert event.error is None and not event.units_stale, event.error
                    arrived += len(event.units_ok)
            if not events:
                self.news.wait(min(self.transport.busy(), NAP_S))
                self.news.clear()
        return time.perf_counter() - began

    def _read(self, units: Sequence[tuple[PageDescriptor, int]], landed: Landed | None) -> None:
        self._jobs += 1
        self.transport.read(ReadJob(self._jobs, KEY, CTX, units, landed))

    def copy(self) -> float:
        """Seconds of one memory copy of as many bytes, in one thread."""
        began = time.perf_counter()
        np.copyto(self.mine, self.other)
        return time.perf_counter() - began

    def one_block(self) -> float:
        """Seconds of one NIXL write of 64 MiB, scaled to the bytes of `move`."""
        return self._naive("one_block") * self.mine.nbytes / TOTAL

    def per_page(self) -> float:
        """Seconds of one NIXL transfer of the same pages with a piece each."""
        return self._naive("per_page")

    def _naive(self, name: str) -> float:
        began = time.perf_counter()
        self.pipe.send((name,))
        while not self.agent.notifications():
            time.sleep(0)
        return time.perf_counter() - began

    def cpu_s(self) -> float:
        """Seconds that both processes have computed, in all their threads."""
        return time.process_time() + time.clock_gettime((~self.process_id << 3) | _SCHED)

    @property
    def process_id(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def is_right(self) -> bool:
        """Gate: moved again into cleared pages, every page is ctx's, byte for byte, and no other was touched."""
        self.arena.pages[:] = 0xEE
        self.move()
        theirs = known_pages(self.arena.bytes_per_page, self.arena.num_pages)
        right = bool((self.arena.pages[self.units.dst] == theirs[self.units.src.pages]).all())
        others = np.ones(self.arena.num_pages, bool)
        others[self.units.dst] = False
        return right and bool((self.arena.pages[others] == 0xEE).all())

    def close(self) -> None:
        self.pipe.send(("close",))
        self.process.join(20)
        self.transport.close()
        self.posts.close()
        self.arena.unlink()
