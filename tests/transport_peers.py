"""Two workers that move pages, for the transports' conformance suite; the ctx in its own process where that matters.

Every page says who wrote it, by owner and position, so that a byte of another owner or place is seen where it lands.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import psutil
import pytest
from device_peers import DEVICE_KINDS, AnyArena, PoolArena, new_pool

from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.layout import PageLayout, single_layout
from tailrace.model.errors import PeerError
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.messages import Landed, LandingGrant, PageDescriptor
from tailrace.transfer.transports.base import (
    ChunkCounts,
    CopyFailed,
    HearsNotices,
    LandedIn,
    PageHook,
    PeerNotice,
    PostDone,
    PostJob,
    ReadDone,
    ReadJob,
    Transport,
)
from tailrace.transfer.transports.in_process import Exchange, InProcessTransport
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.peer import PeerTransport
from tailrace.transfer.transports.ray import RayTransport
from tailrace.transfer.transports.ray_objects import RayObjects
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.transports.shm import ShmTransport
from tailrace.transfer.transports.ucx import UcxTransport

MAPPING = ("shm", *DEVICE_KINDS)  # gen reads the memory of another process
READING = ("in_process", *MAPPING)
LANDING = ("nixl", "ucx", "ray")
ON_A_GPU = pytest.param("peer_cuda", marks=pytest.mark.gpu)
MAPPING_KINDS = ("shm", "peer", ON_A_GPU)
READING_KINDS = ("in_process", *MAPPING_KINDS)
KINDS = (*READING_KINDS, *LANDING)
PACKAGES = {"nixl": "nixl", "ucx": "ucxx", "ray": "ray"}
GEN = "9e4"
KEY = ("request", 1)
CHUNK_BYTES = 1 << 20
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["transport_peers", "nixl._api", "ucxx._lib.libucxx"])
_names = iter(range(10**9))


def layout(page_bytes: int) -> PageLayout:
    """One layer, K and V, 1-byte-aligned page size: page_bytes is a multiple of 8."""
    group = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, page_bytes // 8), Field("v", 1, page_bytes // 8)))
    return single_layout([group], 1, "float32")


def stamp(owner: int, page: int, page_bytes: int) -> np.ndarray:
    """[page_bytes] uint8: what `owner` writes into its page."""
    words = np.arange(page_bytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words + np.uint64(owner * 1_000_003 + page * 10_007)).view(np.uint8)


def worker_name(role: str) -> str:
    """Names this test process, so that what is left behind can be told apart, also what its children made."""
    return f"t{os.getpid()}_{role}{next(_names)}"


def new_arena(worker: str, boot: str, page_bytes: int, num_pages: int) -> Arena:
    return Arena.create(arena_name("test", worker, boot), layout(page_bytes), num_pages)


def wait_for(condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.0005)


def end_server() -> None:
    """End the process that ctx processes are forked from, and its companion; there is no public way to."""
    multiprocessing.forkserver._forkserver._stop()
    multiprocessing.resource_tracker._resource_tracker._stop()


def landing_transport(
    kind: str, boot: str, arena: Arena, chunks: ChunkConfig, hook: PageHook | None
) -> NixlTransport | UcxTransport | RayTransport:
    if kind == "nixl":
        return NixlTransport(boot, arena, chunks, hook=hook)
    if kind == "ucx":
        return UcxTransport("127.0.0.1", arena, chunks, hook=hook)
    return RayTransport(arena, RayObjects(os.environ["RAY_ADDRESS"]), chunks.landing_chunks, hook=hook)


def device_transport(
    kind: str, worker: str, boot: str, page_bytes: int, num_pages: int, **options: Any
) -> tuple[PoolArena, PeerTransport]:
    arena, reader = new_pool(kind, "test", worker, boot, layout(page_bytes), num_pages)
    return arena, PeerTransport(arena.pool, reader, **options)


class LocalCtx:
    """A ctx with its pages; in this process."""

    def __init__(
        self,
        kind: str,
        boot: str,
        page_bytes: int,
        num_pages: int,
        exchange: Exchange | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        worker: str | None = None,
    ) -> None:
        self.boot, self.page_bytes = boot, page_bytes
        worker = worker or worker_name("ctx")
        self.transport: Transport
        self.arena: AnyArena
        if kind in DEVICE_KINDS:
            self.arena, self.transport = device_transport(kind, worker, boot, page_bytes, num_pages)
        else:
            self.arena = arena = new_arena(worker, boot, page_bytes, num_pages)
            if kind == "shm":
                self.transport = ShmTransport(arena)
            elif kind == "in_process":
                memory = Mapped((arena.pages,), arena.generations)
                self.transport = InProcessTransport(exchange or Exchange(), boot, memory)
            else:
                chunks = ChunkConfig(landing_chunks=0, staging_chunks=4, chunk_bytes=chunk_bytes)
                self.transport = landing_transport(kind, boot, arena, chunks, self._hook)
        self.hold_from: int | None = None
        self.done: list[PostDone | PeerNotice] = []

    def _hook(self, key: object, descriptor: PageDescriptor) -> bool:
        return self.hold_from is None or descriptor.ordinal < self.hold_from

    def write(self, pages: Iterable[int], owner: int) -> list[int]:
        """Take pages anew, as their allocation and the forward do: generation first. Returns the generations."""
        numbers = list(pages)
        for page in numbers:
            self.arena.generations[page] += np.uint64(1)
        for page in numbers:
            self.arena.pages[page] = stamp(owner, page, self.page_bytes)
        return [int(self.arena.generations[page]) for page in numbers]

    def connect(self, boot: str, info: bytes) -> bytes:
        self.transport.connect(boot, info)
        return self.transport.info_for(boot)

    def post(self, job: PostJob) -> None:
        self.transport.post(job)

    def disconnect(self, boot: str) -> None:
        self.transport.disconnect(boot)

    def set_hold(self, ordinal: int | None) -> None:
        self.hold_from = ordinal

    def num_live(self, boot: str) -> int:
        """Writes posted to this gen and not done."""
        assert isinstance(self.transport, NixlTransport | UcxTransport)
        sender = self.transport._ctx._senders.get(boot)
        return len(sender.live) if sender is not None else 0

    def notice(self, boot: str, data: bytes) -> None:
        """What this gen's half of the transport says."""
        assert isinstance(self.transport, HearsNotices)
        self.transport.noticed(boot, data)

    def step(self) -> list[PostDone | PeerNotice]:
        """Poll once; returns what has ended since the last call, and what gen is to be told."""
        self.done += [event for event in self.transport.poll() if isinstance(event, PostDone | PeerNotice)]
        done, self.done = self.done, []
        return done

    def name(self) -> str:
        return self.arena.name

    def close(self) -> None:
        self.hold_from = None
        self.transport.close()
        self.arena.unlink()


def _serve(
    kind: str, boot: str, page_bytes: int, num_pages: int, chunk_bytes: int, worker: str, pipe: Connection
) -> None:
    """The process of a ChildCtx: polls, and does what it is told."""
    ctx = LocalCtx(kind, boot, page_bytes, num_pages, chunk_bytes=chunk_bytes, worker=worker)
    done: list[PostDone | PeerNotice] = []
    pipe.send("ready")
    while True:
        done += ctx.step()
        while pipe.poll(0 if ctx.transport.busy() else 0.001):
            try:
                name, args = pipe.recv()
            except EOFError:
                name, args = "close", ()
            if name == "step":
                pipe.send(done)
                done = []
                continue
            try:
                answer = getattr(ctx, name)(*args)
            except PeerError as error:
                answer = error  # raised by who asked
            pipe.send(answer)
            if name == "close":
                return
        time.sleep(0.0002)


class ChildCtx:
    """The same in a process of its own, which can be killed and stopped."""

    def __init__(
        self, kind: str, boot: str, page_bytes: int, num_pages: int, chunk_bytes: int, worker: str | None = None
    ) -> None:
        self.boot, self.page_bytes = boot, page_bytes
        self._pipe, theirs = _SERVER.Pipe()
        args = (kind, boot, page_bytes, num_pages, chunk_bytes, worker or worker_name("ctx"), theirs)
        self.process = _SERVER.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"
        self._arena_name = self._ask("name")

    def _ask(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        assert self._pipe.poll(20), f"ctx does not answer {name}"
        answer = self._pipe.recv()
        if isinstance(answer, PeerError):
            raise answer
        return answer

    def tell(self, name: str, *args: Any) -> None:
        """Ask without waiting, also of a stopped one; `hear` takes the answer."""
        self._pipe.send((name, args))

    def hear(self) -> Any:
        assert self._pipe.poll(20), "ctx does not answer"
        return self._pipe.recv()

    def write(self, pages: Iterable[int], owner: int) -> list[int]:
        return self._ask("write", list(pages), owner)

    def connect(self, boot: str, info: bytes) -> bytes:
        return self._ask("connect", boot, info)

    def post(self, job: PostJob) -> None:
        self._ask("post", job)

    def disconnect(self, boot: str) -> None:
        self._ask("disconnect", boot)

    def set_hold(self, ordinal: int | None) -> None:
        self._ask("set_hold", ordinal)

    def num_live(self, boot: str) -> int:
        return self._ask("num_live", boot)

    def notice(self, boot: str, data: bytes) -> None:
        if self.process.is_alive():
            self._ask("notice", boot, data)

    def step(self) -> list[PostDone | PeerNotice]:
        return self._ask("step") if self.process.is_alive() else []

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        pid = self.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop")

    def go_on(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.is_alive():
            self.go_on()
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                self._ask("close")
            self.process.join(10)
        if self.process.is_alive():
            self.kill()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"/dev/shm/{self._arena_name}")


@dataclass
class Move:
    """One request's transfer as gen's core would drive it: which units are wanted, where to, what has arrived."""

    key: tuple[str, int]
    boot: str
    todo: list[tuple[PageDescriptor, int]]
    ok: list[PageDescriptor] = field(default_factory=list)
    stale: list[PageDescriptor] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    jobs: set[int] = field(default_factory=set)
    num_jobs: int = 0
    posts: int = 0
    granted: int = 0

    @property
    def over(self) -> bool:
        return not self.todo and not self.jobs and not self.posts and not self.granted


class Gen:
    """A gen with its pages and transport, driving transfers in the way the cores do, without their state machines."""

    def __init__(self, kind: str, page_bytes: int, num_pages: int, boot: str = GEN, **options: Any) -> None:
        self.kind, self.boot, self.page_bytes = kind, boot, page_bytes
        self.exchange = Exchange()
        self.chunk_bytes: int = options.pop("chunk_bytes", CHUNK_BYTES)
        self.hold_from: int | None = None
        self.fail_at: set[int] = set()
        self.slow_s = 0.0
        self.hooked: list[int] = []
        hook: PageHook | None = self._hook if options.pop("hook", False) else None
        self.transport: Any
        self.arena: AnyArena
        worker = worker_name("gen")
        if kind in DEVICE_KINDS:
            self.arena, self.transport = device_transport(
                kind, worker, boot, page_bytes, num_pages, hook=hook, **options
            )
        else:
            self.arena = arena = new_arena(worker, boot, page_bytes, num_pages)
            if kind == "shm":
                self.transport = ShmTransport(arena, hook=hook, **options)
            elif kind == "in_process":
                memory = Mapped((arena.pages,), arena.generations)
                self.transport = InProcessTransport(self.exchange, boot, memory, hook=hook, **options)
            else:
                chunks = ChunkConfig(landing_chunks=4, staging_chunks=0, chunk_bytes=self.chunk_bytes)
                self.transport = landing_transport(kind, boot, arena, chunks, hook)
        self.arena.pages[:] = 0xEE
        self.ctxs: dict[str, LocalCtx | ChildCtx] = {}
        self.moves: dict[tuple[str, int], Move] = {}
        self.job_owner: dict[int, Move] = {}
        self.post_owner: dict[int, Move] = {}
        self.wanted: dict[tuple[tuple[str, int], PageDescriptor], int] = {}
        self.landed: list[LandedIn] = []
        self.lost: list[PostDone] = []
        self.unpack = True
        self._next_job = 0

    def _hook(self, key: object, descriptor: PageDescriptor) -> bool:
        if self.hold_from is not None and descriptor.ordinal >= self.hold_from:
            return False
        if descriptor.ordinal in self.fail_at:
            self.fail_at.discard(descriptor.ordinal)
            raise CopyFailed(f"fault at page {descriptor.ordinal}")
        if self.slow_s:
            time.sleep(self.slow_s)
        self.hooked.append(descriptor.ordinal)
        return True

    # --------------------------------------------------------------------------------------------------------- pairing

    def new_ctx(
        self, boot: str, num_pages: int, *, child: bool, pair: bool = True, worker: str | None = None
    ) -> LocalCtx | ChildCtx:
        ctx: LocalCtx | ChildCtx
        if child or self.kind == "peer_cuda":  # a process cannot map its own memory
            ctx = ChildCtx(self.kind, boot, self.page_bytes, num_pages, self.chunk_bytes, worker)
        else:
            ctx = LocalCtx(self.kind, boot, self.page_bytes, num_pages, self.exchange, self.chunk_bytes, worker)
        if pair:
            self.pair(ctx)
        return ctx

    def pair(self, ctx: LocalCtx | ChildCtx) -> None:
        self.ctxs[ctx.boot] = ctx
        info = ctx.connect(self.boot, self.transport.info_for(ctx.boot))
        self.transport.connect(ctx.boot, info)

    # ------------------------------------------------------------------------------------------------------- transfers

    def start(
        self, key: tuple[str, int], ctx: LocalCtx | ChildCtx, units: Sequence[tuple[PageDescriptor, int]]
    ) -> Move:
        move = Move(key, ctx.boot, list(units))
        self.moves[key] = move
        if self.kind in READING:
            self.read(move, move.todo)
            move.todo = []
        return move

    def read(self, move: Move, units: Sequence[tuple[PageDescriptor, int]], landed: Any = None) -> int:
        self._next_job += 1
        self.job_owner[self._next_job] = move
        move.jobs.add(self._next_job)
        move.num_jobs += 1
        self.transport.read(ReadJob(self._next_job, move.key, move.boot, tuple(units), landed))
        return self._next_job

    def grant_and_post(self, move: Move, limit: int = 2) -> None:
        per_chunk = self.transport.units_per_grant
        while move.todo and move.granted < limit:
            grants: tuple[LandingGrant, ...] = self.transport.grants(move.key, move.boot, 1)
            if not grants:
                return
            move.granted += 1
            pages = tuple(descriptor for descriptor, _ in move.todo[:per_chunk])
            self.wanted.update({(move.key, d): dst for d, dst in move.todo[:per_chunk]})
            del move.todo[:per_chunk]
            self.post(move, grants[0], pages)

    def post(self, move: Move, grant: LandingGrant, pages: tuple[PageDescriptor, ...]) -> None:
        self._next_job += 1
        self.post_owner[self._next_job] = move
        move.posts += 1
        self.ctxs[move.boot].post(PostJob(self._next_job, move.key, self.boot, pages, grant))

    def step(self) -> None:
        for ctx in self.ctxs.values():
            for done in ctx.step():
                if isinstance(done, PostDone):
                    self._post_done(done)
                elif done.boot == self.boot:
                    self.transport.noticed(ctx.boot, done.data)
        for event in self.transport.poll():
            if isinstance(event, LandedIn):
                self.landed.append(event)
                if self.unpack:
                    self.take(event)
            elif isinstance(event, ReadDone):
                move = self.job_owner[event.job]
                assert event.job in move.jobs, "a job is answered once"
                move.jobs.discard(event.job)
                move.ok += event.units_ok
                move.stale += event.units_stale
                move.errors += [event.error] if event.error else []
            elif isinstance(event, PeerNotice) and event.boot in self.ctxs:
                self.ctxs[event.boot].notice(self.boot, event.data)
        if self.kind in LANDING:
            for move in self.moves.values():
                self.grant_and_post(move)

    def take(self, event: LandedIn) -> int | None:
        landed = event.landed
        move = self.moves.get((landed.request, landed.attempt))
        if move is None:
            self.transport.drop_landed(event.boot, landed)
            return None
        move.granted -= 1
        return self.read(move, [(d, self.wanted[move.key, d]) for d in landed.pages], landed)

    def _post_done(self, done: PostDone) -> None:
        move = self.post_owner[done.job]
        move.posts -= 1
        if done.error is None:
            return
        move.errors.append(done.error)
        if done.lost:
            self.lost.append(done)
            return
        move.granted -= 1
        self.transport.reclaim(move.key, move.boot)
        if done.stale:
            move.stale.append(PageDescriptor(0, -1, 0, 0))

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = 20.0) -> None:
        def once() -> object:
            self.step()
            return condition()

        wait_for(once, what, timeout_s)

    def finish(self, *moves: Move) -> None:
        self.until(lambda: all(move.over for move in moves), f"the end of {[m.key for m in moves]}")

    def close(self) -> None:
        self.hold_from = None
        for ctx in self.ctxs.values():
            ctx.close()
        self.transport.close()
        if isinstance(self.arena, PoolArena):
            self.arena.close()
        else:
            self.arena.unlink()


def landed_chunk(gen: Gen, landed: Landed) -> np.ndarray:
    """[header and pages] uint8 of what has landed and is not yet unpacked, where it lies."""
    side = gen.transport._gen
    if gen.kind == "nixl":
        return side._landing[landed.chunk * side._stride :][: side._stride]
    return side._arrived[landed.sequence][2]


def units_for(pages: Sequence[int], generations: Sequence[int], dst: Sequence[int]) -> list[tuple[PageDescriptor, int]]:
    """Ordinal i of a sequence stands in ctx's pages[i] and shall stand in gen's dst[i]."""
    return [
        (PageDescriptor(0, i, page, generation), to)
        for i, (page, generation, to) in enumerate(zip(pages, generations, dst, strict=True))
    ]


def random_pages(rng: random.Random, n: int, num_pages: int) -> list[int]:
    return rng.sample(range(1, num_pages), n)


def assert_moved(gen: Gen, units: list[tuple[PageDescriptor, int]], owner: int) -> None:
    for descriptor, dst in units:
        wrong = np.flatnonzero(gen.arena.pages[dst] != stamp(owner, descriptor.page, gen.page_bytes))
        assert not len(wrong), f"page {dst} (ordinal {descriptor.ordinal}) differs from byte {wrong[:1]} on"


def assert_untouched(gen: Gen, pages: set[int]) -> None:
    others = [p for p in range(gen.arena.num_pages) if p not in pages]
    assert (gen.arena.pages[others] == 0xEE).all(), "a page that nobody asked for was written"


def assert_quiet(gen: Gen) -> None:
    counts = gen.transport.counts()
    assert counts == ChunkCounts(counts.total, 0, 0, counts.total)
    wait_for(lambda: [gen.step(), not gen.transport.busy()][1], "the transport to come to rest")
