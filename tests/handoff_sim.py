"""Ctx and gen workers, ingress and router in simulated time: the real protocol cores and page books, all else faked.

A page's content is a hash of the tokens whose state it holds, so a page that was read too late, freed too early or
written by a copy that nobody waited for shows as a wrong content. Copies write their destination when they run,
whatever became of their request, as real ones do.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE, Layout, PageLayout, RowLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.kv_cache.pool import PageState
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer import core_events as ce
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.law import disagreement
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, FirstToken, PrefillResult
from tailrace.transfer.messages import (
    Bind,
    Bound,
    Cancel,
    Deaths,
    Delta,
    Handoff,
    Landed,
    LandingGrant,
    NotNow,
    PeerAddress,
    Progress,
    Ready,
    Release,
    Renew,
    Submit,
    Want,
    handed_tokens,
    pack_ids,
    unpack_ids,
)
from tailrace.transfer.transports.base import LandedIn, PostDone, ReadDone
from tailrace.transfer.transports.landing import ChunkState, LandingBook

PAGE = 4
NAMESPACE = b"n" * 16
KINDS = {"ready": Ready, "handoff": Handoff, "release": Release, "landed": LandedIn, "want": Want}
PASSING = ("pages", "headroom", "pair", "draining", "decoding")  # why a gen says no that may say yes later
CONFIG = ce.CoreConfig(pin_lease_s=3.0, request_lease_s=2.0, kv_transfer_timeout_s=4.0)


def layout(page: int = PAGE) -> PageLayout:
    group = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 2), Field("v", 1, 2)))
    return PageLayout(group, page, "float32")


PLAIN = layout()


def row_layout() -> RowLayout:
    """Pages of the same tokens and three state pages, of which the last has nothing in it after an even length."""
    groups = (
        RowGroup(GroupKind.HISTORY, (0,), (RowField("h", 4, "f"),), tokens_per_row=2),
        RowGroup(GroupKind.WINDOW, (0, 1), (RowField("w", 4, "f"),), rows=2),
        RowGroup(GroupKind.TAIL, (0,), (RowField("t", 8, "f"),), rows=1, period=2),
    )
    return RowLayout(groups, PAGE, "float32")


def state_of(tokens: tuple[int, ...], ordinal: int) -> int:
    """Content of the page of this ordinal once the state of all `tokens` is computed."""
    return hash(("state", tokens[: (ordinal + 1) * PAGE]))


@dataclass
class Request:
    """The ingress's view. `outcome`: None until it ends."""

    name: str
    tokens: tuple[int, ...]
    params: SamplingParams
    samples: int = 1
    attempt: int = 0
    ctx: str = ""
    gen: str = ""
    outcome: str | None = None
    reason: str = ""
    firsts: int = 0
    decoding: bool = False
    ended_at: float = 0.0
    left: int = 0  # tokens left to gen

    @property
    def key(self) -> tuple[str, int]:
        return (self.name, self.attempt)

    @property
    def handed(self) -> tuple[int, ...]:
        return self.tokens[: handed_tokens(len(self.tokens), self.left)]


class Worker:
    """What ctx and gen share: books, memory, a core whose actions are carried out here."""

    core: Any

    def __init__(self, world: World, name: str, boot: str, pages: int) -> None:
        self.world, self.name, self.boot, self.alive = world, name, boot, True
        self.kv = KvManager(world.layout, pages + 1, PAGE)
        self.memory: dict[int, Any] = {}
        self.kv.set_poison(lambda freed: self.memory.update(dict.fromkeys(freed, "poison")))
        self.measures: dict[str, float] = defaultdict(float)
        self.stopped = False  # like SIGSTOP
        self.waiting: list[Any] = []

    def resume(self, *, ticks_first: bool) -> None:
        """Everything that waits comes at once; whether before or after its own clock is chance."""
        self.stopped = False
        waiting, self.waiting = [event for event in self.waiting if not isinstance(event, ce.Tick)], []
        for event in (ce.Tick(), *waiting) if ticks_first else (*waiting, ce.Tick()):
            self.feed(event)

    def feed(self, event: Any) -> None:
        if self.alive and self.stopped:
            self.waiting.append(event)  # at its door; its clock goes on, and nobody looks at it
        elif self.alive:
            for action in self.core.handle(event, self.world.now):
                self.act(action)

    def act(self, action: Any) -> None:
        world = self.world
        match action:
            case ce.ToPeer():
                world.send(self, action.boot, action.frame)
            case ce.ToRouter():
                world.later(world.wire_s, lambda: world.router(self, action.frame))
            case ce.ToIngress():
                world.later(world.wire_s, lambda: world.ingress(self, action.item))
            case ce.ToLoop():
                self.on_loop(action.event)
            case ce.Measure():
                self.measures[action.metric] += action.value
            case ce.StartSums():
                world.later(world.sum_s, lambda: self.sum(action.job))
            case _:
                self.on_transport(action)

    def sum(self, job: ce.SumJob) -> None:
        """What the helper thread does; a content's sum is its checksum."""
        found = tuple(
            b"".join(crc32(repr((self.memory.get(p.page), p.row, p.n)).encode()).to_bytes(8, "little") for p in parts)
            for parts in job.parts
        )
        if job.expected:
            self.feed(ce.SumsDone(job.job, equal=tuple(a == b for a, b in zip(found, job.expected, strict=True))))
            return
        stands = [
            self.kv.descriptor_generation(p[0].page) == g for p, g in zip(job.parts, job.generations, strict=True)
        ]
        self.feed(ce.SumsDone(job.job, tuple(s if ok else b"" for s, ok in zip(found, stands, strict=True))))

    def on_loop(self, event: Any) -> None:
        raise NotImplementedError

    def on_transport(self, action: Any) -> None:
        raise NotImplementedError

    @property
    def used(self) -> int:
        return self.kv.counts().used


@dataclass
class Prefill:
    submit: Submit
    tokens: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    pinned: list[int] = field(default_factory=list)


class Ctx(Worker):
    """One prefill at a time, in chunks. `paused`: the loop computes nothing (a long chunk)."""

    def __init__(self, world: World, name: str, boot: str, pages: int) -> None:
        super().__init__(world, name, boot, pages)
        self.core = world.ctx_core(self.kv, world.config)
        self.jobs: dict[tuple[str, int], Prefill] = {}
        self.paused = False
        self.order: list[str] = []  # what happened, for tests of order
        self.idle = False  # with nothing to compute nobody asks it again and again
        world.later(0.0, self.step)

    def on_loop(self, event: Any) -> None:
        if isinstance(event, Arrived):
            submit = event.submit
            tokens = tuple(unpack_ids(submit.prompt_ids + submit.output_ids))
            self.jobs[event.key] = Prefill(submit, tokens[: handed_tokens(len(tokens), submit.left_to_gen)])
            if self.idle:
                self.idle = False
                self.world.later(self.world.chunk_s / 2, self.step)
        elif isinstance(event, Cancelled) and event.key in self.jobs:
            self.forget(event.key)
            self.feed(ce.LoopEnded(event.key, "cancelled"))

    def forget(self, key: tuple[str, int]) -> None:
        self.kv.release(self.jobs.pop(key).pages)

    def step(self) -> None:
        if not self.alive:
            return
        if self.stopped:
            self.world.later(0.01, self.step)
            return
        if not self.jobs:
            self.idle = True
            return
        key = next((k for k, job in self.jobs.items() if self.reserve(job)), None)
        if key is None or self.paused:
            self.world.later(self.world.chunk_s / 2, self.step)
            return
        job = self.jobs[key]
        end = min(len(job.tokens), job.computed + self.world.chunk_tokens)
        last = end == len(job.tokens)
        self.feed(ce.ChunkLaunched(key, last, (len(job.tokens) - job.computed) * 0.01))
        self.world.later(self.world.chunk_s, lambda: self.chunk_end(key, job, end))

    def reserve(self, job: Prefill) -> bool:
        if job.pages:
            return True
        hit = self.kv.match_prefix(NAMESPACE, job.submit.hashes, len(job.tokens))
        new = self.kv.allocate(self.kv.layout.num_pages(len(job.tokens)) - len(hit.pages))
        if new is None:
            self.kv.release(hit.pages)
            return False
        job.pages, job.computed = hit.pages + new, hit.num_tokens
        return True

    def chunk_end(self, key: tuple[str, int], job: Prefill, end: int) -> None:
        if self.stopped:
            self.world.later(0.01, lambda: self.chunk_end(key, job, end))
            return
        if self.alive and self.jobs.get(key) is job:
            layout = self.kv.layout
            for ordinal in range(job.computed // PAGE, -(-end // PAGE)):
                self.memory[job.pages[ordinal]] = state_of(job.tokens[:end], ordinal)
            for i in range(layout.num_state_pages):
                self.memory[job.pages[i - layout.num_state_pages]] = ("rows", job.tokens[:end], i)
            job.computed = end
            self.order.append(f"computed {end}")
            reach = job.pages if layout.num_pages(end) == len(job.pages) else job.pages[: -(-end // PAGE)]
            new = tuple((o, p) for o, p in enumerate(reach) if o >= len(job.pinned))
            self.kv.pin([page for _, page in new])
            job.pinned = list(reach)
            self.feed(ce.ChunkDone(key, new, end, (len(job.tokens) - end) * 0.01))
            if end == len(job.tokens):
                self.finish(key, job)
        self.step()

    def finish(self, key: tuple[str, int], job: Prefill) -> None:
        done = job.submit.params.max_tokens == 1
        first = FirstToken(7, finish="length" if done else None)
        firsts = () if job.submit.left_to_gen else (first,) * job.submit.samples
        self.feed(ce.PrefillDone(key, PrefillResult(firsts, len(job.tokens))))
        self.kv.publish(NAMESPACE, job.submit.hashes, job.pages, len(job.tokens))
        self.forget(key)

    def on_transport(self, action: Any) -> None:
        assert isinstance(action, ce.StartPost)
        self.world.post(self, action.job)


class Gen(Worker):
    """Decodes each admitted request for `decode_s`, then ends it."""

    def __init__(self, world: World, name: str, boot: str, pages: int) -> None:
        super().__init__(world, name, boot, pages)
        self.headroom = 0
        self.core = world.gen_core(self.kv, self, world.config, lambda: self.headroom)
        self.running: dict[tuple[str, int], Admitted] = {}
        self.reads: dict[int, tuple[str, bool]] = {}  # job -> (boot, begun)
        self.book = LandingBook(world.landing_chunks, world.units_per_grant * self.kv.layout.bytes_per_page)
        self.closed: list[str] = []
        self.resets: list[str] = []
        self.admitted: list[Admitted] = []

    def agents(self, boot: str) -> int:
        """How many agents have received from this peer: each reset or close destroys one."""
        return self.resets.count(boot) + self.closed.count(boot)

    # Wire
    def grants(self, key: Any, boot: str, n: int) -> tuple[LandingGrant, ...]:
        return self.book.grant(key, boot, n, self.world.units_per_grant)

    def reclaim(self, key: Any, boot: str) -> None:
        self.book.reclaim(key, boot)

    @property
    def chunks(self) -> int:
        """Landing chunks that are out or being unpacked."""
        counts = self.book.counts()
        assert counts.free + counts.granted + counts.unpacking == counts.total
        return counts.granted + counts.unpacking

    def still_valid(self, boot: str, seen: tuple[tuple[int, int], ...]) -> bool:
        peer = self.world.boots[boot]
        assert boot not in self.closed
        return all(peer.kv.descriptor_generation(page) == generation for page, generation in seen)

    # the loop
    def on_loop(self, event: Any) -> None:
        if isinstance(event, Admitted):
            self.admitted.append(event)
            request = self.world.requests[event.key[0]]
            request.decoding = request.decoding or request.key == event.key
            self.running[event.key] = event
            self.check(event)
            self.world.later(self.world.decode_s, lambda: self.end(event))
        elif isinstance(event, Cancelled) and event.key in self.running:
            self.let_go(self.running[event.key])
            self.feed(ce.LoopEnded(event.key, "cancelled"))

    def check(self, event: Admitted) -> None:
        request = self.world.requests[event.key[0]]
        tokens, layout = request.handed, self.kv.layout
        assert event.handoff.num_tokens == len(tokens)
        history = -(-len(tokens) // PAGE)
        assert len(event.pages) == layout.num_pages(len(request.tokens))
        assert len(set(event.pages)) == len(event.pages) and SCRATCH_PAGE not in event.pages
        state = event.pages[len(event.pages) - layout.num_state_pages :]
        moved = (*event.pages[:history], *state[: layout.moved_pages(len(tokens)) - history])
        for ordinal, page in enumerate(moved):
            right = state_of(tokens, ordinal) if ordinal < history else ("rows", tokens, ordinal - history)
            assert self.memory.get(page) == right, f"wrong state in page {page} of {event.key}"

    def let_go(self, event: Admitted) -> None:
        del self.running[event.key]
        self.kv.release([page for page in event.pages if page != SCRATCH_PAGE])

    def end(self, event: Admitted) -> None:
        if self.stopped:
            self.world.later(0.01, lambda: self.end(event))
        elif self.alive and self.running.get(event.key) is event:
            self.check(event)
            handoff = event.handoff
            self.kv.publish(handoff.namespace, handoff.hashes, event.pages, handoff.num_tokens)
            self.let_go(event)
            self.world.later(self.world.wire_s, lambda: self.world.ingress(self, delta(event.key, "length")))
            self.feed(ce.LoopEnded(event.key, "finished"))

    # transports
    def on_transport(self, action: Any) -> None:
        match action:
            case ce.StartRead():
                if action.job.landed is not None:
                    assert self.book.begin_unpack(action.job.landed)
                self.reads[action.job.job] = (action.job.boot, False)
                self.world.later(self.world.read_s, lambda: self.read(action.job))
            case ce.AbandonRead():
                pass
            case ce.DropLanded():
                self.book.drop(action.landed)
            case ce.ClosePair() | ce.ResetPair():
                if not self.world.landing:
                    assert not any(boot == action.boot for boot, _ in self.reads.values()), "closed under a read"
                self.book.disconnect(action.boot)
                (self.closed if isinstance(action, ce.ClosePair) else self.resets).append(action.boot)
                if isinstance(action, ce.ResetPair):
                    self.world.later(0.3, lambda: self.world.pair(action.boot, self))

    def read(self, job: Any) -> None:
        """The copy itself: writes its destinations, whatever became of the request."""
        if not self.alive:
            return
        held = self.world.held and not (job.boot in self.world.dead and job.key not in self.core)
        if held or self.stopped:
            self.world.later(0.01, lambda: self.read(job))
            return
        peer, ok, stale = self.world.boots[job.boot], [], []
        for descriptor, page in job.units:
            decoding = any(page in admitted.pages for admitted in self.running.values())
            idle = self.kv._pool.state(page) in (PageState.FREE, PageState.CACHED)
            assert not decoding and not idle, f"a copy for {job.key} writes into page {page} of another owner"
            if job.landed is not None:
                self.memory[page] = self.world.in_chunks[self.boot, job.landed.chunk][descriptor.ordinal]
                self.world.spoil(self, descriptor.ordinal, page)
                ok.append(descriptor)
                continue
            self.memory[page] = peer.memory.get(descriptor.page)
            self.world.spoil(self, descriptor.ordinal, page)
            unchanged = peer.kv.descriptor_generation(descriptor.page) == descriptor.generation
            (ok if unchanged else stale).append(descriptor)
        del self.reads[job.job]
        if job.landed is not None:
            self.book.end_unpack(job.landed)
        error = self.world.read_errors.pop() if self.world.read_errors else None
        nbytes = len(ok) * self.kv.layout.bytes_per_page
        self.feed(ReadDone(job.job, job.key, () if error else tuple(ok), tuple(stale), error, nbytes, nbytes))


def delta(key: tuple[str, int], finish: str | None) -> Delta:
    return Delta(*key, 0, 1, b"", (), finish, None, (), 0, {})


class World:
    """Everything, and simulated time. `landing`: pages go through landing chunks, as over nixl."""

    def __init__(
        self,
        *,
        ctx_pages: int = 32,
        gen_pages: int = 32,
        num_ctx: int = 1,
        num_gen: int = 1,
        landing: bool = False,
        config: ce.CoreConfig = CONFIG,
        ctx_core: Callable[..., CtxCore] = CtxCore,
        gen_core: Callable[..., GenCore] = GenCore,
        retries: int = 3,
        layout: Layout | None = None,
    ) -> None:
        self.layout = layout or PLAIN
        self.config, self.landing, self.ctx_core, self.gen_core = config, landing, ctx_core, gen_core
        self.ctx_pages, self.gen_pages, self.retries = ctx_pages, gen_pages, retries
        self.chunk_tokens, self.chunk_s, self.read_s, self.wire_s, self.decode_s = 8, 0.05, 0.02, 0.001, 0.3
        self.landing_chunks, self.units_per_grant = 3, 2
        self.sum_s = 0.004  # of the thread that sums pages
        self.spoil: Callable[[Any, int, int], None] = lambda worker, ordinal, page: None  # after each copied page
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self.boots: dict[str, Any] = {}
        self.dead: set[str] = set()
        self.held = False
        self.renewing = True
        self.binding = True
        self.announce_deaths = True
        self.read_errors: list[str] = []
        self.post_errors: list[str] = []
        self.faults: dict[str, list[str]] = defaultdict(list)
        self.down: set[tuple[str, str]] = set()
        self.in_chunks: dict[tuple[str, int], dict[int, Any]] = {}
        self.known_agents: dict[tuple[str, str], int] = {}  # (ctx, gen) -> which of gen's agents ctx writes to
        self.requests: dict[str, Request] = {}
        self.binds = itertools.count(1)
        self.pending: dict[tuple[str, int], str] = {}  # key -> the gen that was asked last
        self.missing: set[tuple[str, int]] = set()  # bound, and not in the gen's whole set of a second ago
        self.epoch = 1
        self.ticks = 0
        self.unbound: dict[tuple[str, int], str] = {}  # key -> ctx boot, while no gen is bound
        self.frames: list[tuple[str, str, Any]] = []
        self.hasher = BlockHasher(b"secret", PAGE)
        self.workers: dict[str, Worker] = {}
        self.boot_numbers: dict[str, int] = defaultdict(int)
        for i in range(num_ctx):
            self.start("ctx", f"c{i}")
        for i in range(num_gen):
            self.start("gen", f"g{i}")
        self.tick()

    # ------------------------------------------------------------------------------------------------------------- time

    def later(self, delay: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._count), call))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        self.now = until

    def tick(self) -> None:
        for worker in list(self.workers.values()):
            worker.feed(ce.Tick())
            if worker.alive and self.ticks % 10 == 0:
                worker.kv.check()
        if self.ticks % 10 == 0:
            self.reconcile()
        self.ticks += 1
        if self.renewing and int(self.now * 10) % 5 == 0:
            self.renew()
        self.later(0.1, self.tick)

    # ---------------------------------------------------------------------------------------------------------- workers

    def check_laws(self) -> None:
        """Of each worker's books, of its landing chunks, and between its core and its books."""
        for worker in self.workers.values():
            if not worker.alive:
                continue
            worker.kv.check()
            if isinstance(worker.core, CtxCore | GenCore):
                wrong = disagreement(worker.core, worker.kv._pool)
                assert wrong is None, f"{worker.boot}: {wrong}"
            if isinstance(worker, Gen):
                worker.book.check()
                assert worker.chunks >= 0

    def reconcile(self) -> None:
        """The router hears from the whole sets that a gen has dropped a request which its ctx still has."""
        missing = set()
        for request in self.requests.values():
            ctx, gen = self.boots.get(request.ctx), self.boots.get(request.gen)
            if request.outcome is not None or ctx is None or gen is None or not gen.alive or gen.stopped:
                continue
            if request.key not in gen.core and ctx.alive and request.key in ctx.core:
                missing.add(request.key)
                if request.key in self.missing:
                    request.gen = ""
                    self.unbound[request.key] = request.ctx
                    self.bind(request.key)
        self.missing = missing

    def stop(self, name: str) -> None:
        self.workers[name].stopped = True

    def resume(self, name: str, *, ticks_first: bool) -> None:
        if self.workers[name].stopped:
            self.workers[name].resume(ticks_first=ticks_first)

    def new_router(self) -> None:
        """Another router takes office: it knows nothing, and counts its frames anew."""
        self.epoch += 1
        self.binds = itertools.count(1)
        self.unbound.clear()
        for worker in self.workers.values():
            worker.feed(ce.RouterUp(f"router.{self.epoch}"))

    def start(self, role: str, name: str) -> Worker:
        self.boot_numbers[name] += 1
        boot = f"{name}.{self.boot_numbers[name]}"
        cls, pages = (Ctx, self.ctx_pages) if role == "ctx" else (Gen, self.gen_pages)
        worker = cls(self, name, boot, pages)
        self.workers[name] = worker
        self.boots[boot] = worker
        for other in self.workers.values():
            if isinstance(other, Gen) and role == "ctx":
                self.pair(boot, other)
            elif isinstance(other, Ctx) and role == "gen":
                self.pair(other.boot, worker)
        return worker

    def pair(self, boot: str, gen: Any) -> None:
        if gen.alive and self.boots[boot].alive and (boot, gen.boot) not in self.down:
            self.known_agents[boot, gen.boot] = gen.agents(boot)
            units = self.units_per_grant if self.landing else 0
            gen.feed(ce.PairUp(boot, "nixl" if self.landing else "shm", self.landing, not self.landing, units))

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if not worker.alive:
            return
        worker.alive = False
        self.dead.add(worker.boot)
        for gen in self.gens():
            gen.feed(ce.PairDown(worker.boot))
        if self.announce_deaths:
            self.later(0.5, lambda: self.announce(worker.boot))

    def announce(self, boot: str) -> None:
        for worker in self.workers.values():
            worker.feed(ce.FromRouter(Deaths((boot,))))
        for request in self.requests.values():
            if request.outcome is None and boot == request.gen:
                request.gen = ""
                if request.decoding:
                    self.again(request, "lost")
                elif request.ctx not in self.dead:
                    self.unbound[request.key] = request.ctx
                    self.later(0.05, lambda key=request.key: self.bind(key))
                else:
                    self.again(request, "lost")
            elif request.outcome is None and boot == request.ctx and not request.gen:
                self.again(request, "lost")
            elif request.outcome is None and not request.gen and self.pending.get(request.key) == boot:
                self.later(0.05, lambda key=request.key: self.bind(key))  # it was asked, and never answered

    def gens(self) -> list[Any]:
        return [w for w in self.workers.values() if isinstance(w, Gen) and w.alive]

    def ctxs(self) -> list[Any]:
        return [w for w in self.workers.values() if isinstance(w, Ctx) and w.alive]

    # ----------------------------------------------------------------------------------------------------------- frames

    def send(self, src: Worker, boot: str, frame: Any) -> None:
        self.frames.append((src.boot, boot, frame))
        kind = next((k for k, cls in KINDS.items() if isinstance(frame, cls)), "")
        todo = self.faults[kind].pop(0) if self.faults[kind] else ""
        if todo == "drop" or {(src.boot, boot), (boot, src.boot)} & self.down:
            return
        delay = self.wire_s + (1.0 if todo == "late" else 0.0)
        for _ in range(2 if todo == "dup" else 1):
            self.later(delay, lambda: self.deliver(src, boot, frame))

    def deliver(self, src: Worker, boot: str, frame: Any) -> None:
        if not {(src.boot, boot), (boot, src.boot)} & self.down:
            self.boots[boot].feed(ce.FromPeer(src.boot, frame))

    def break_link(self, ctx_boot: str, gen: Any, seconds: float) -> None:
        self.down.add((ctx_boot, gen.boot))
        gen.feed(ce.PairDown(ctx_boot))

        def mend() -> None:
            self.down.discard((ctx_boot, gen.boot))
            self.pair(ctx_boot, gen)

        self.later(seconds, mend)

    def post(self, ctx: Any, job: Any) -> None:
        """A landing write: packs, checks generations, writes into the chunk, notifies."""

        gen = self.boots[job.boot]
        agent = self.known_agents.get((ctx.boot, gen.boot), 0)

        def run() -> None:
            if not ctx.alive:
                return
            if self.held or ctx.stopped:
                self.later(0.01, run)
                return
            stale = any(ctx.kv.descriptor_generation(d.page) != d.generation for d in job.pages)
            content = {d.ordinal: ctx.memory.get(d.page) for d in job.pages}
            error = self.post_errors.pop() if self.post_errors else ("stale" if stale else None)
            lost = error == "lost" or gen.agents(ctx.boot) != agent
            if error is None:
                self.land(ctx, gen, agent, job, content)
            elif error == "lost":  # it may arrive all the same, long after
                self.later(1.0, lambda: self.land(ctx, gen, agent, job, content))
            ctx.feed(PostDone(job.job, job.key, "the pair was reset" if lost else error, stale, lost))

        self.later(self.read_s, run)

    def land(self, ctx: Any, gen: Any, agent: int, job: Any, content: dict[int, Any]) -> None:
        """The write itself: into memory of the agent that it was addressed to, if that still exists."""
        grant = job.grant
        if not gen.alive or gen.agents(ctx.boot) != agent:
            return
        chunk = gen.book._chunks[grant.chunk]
        right = chunk.state is ChunkState.GRANTED and chunk.sequence == grant.sequence
        assert right, "wrote into another's chunk"
        self.in_chunks[gen.boot, grant.chunk] = content
        landed = Landed(*job.key, grant.chunk, grant.sequence, grant.nbytes, 0, job.pages)
        self.notify(gen, LandedIn(ctx.boot, landed))

    def notify(self, gen: Any, event: LandedIn) -> None:
        todo = self.faults["landed"].pop(0) if self.faults["landed"] else ""
        if todo == "drop":
            return
        landed = event.landed

        def run() -> None:
            if not gen.alive or not gen.book.announce(event.boot, landed):
                return  # what the transport itself refuses: an old sequence number
            gen.feed(event)

        for _ in range(2 if todo == "dup" else 1):
            self.later(self.wire_s + (1.0 if todo == "late" else 0.0), run)

    # ----------------------------------------------------------------------------------------------- router and ingress

    def router(self, worker: Worker, frame: Any) -> None:
        if isinstance(frame, Progress) and (frame.request, frame.attempt) not in self.unbound:
            self.unbound[frame.request, frame.attempt] = worker.boot
            self.bind((frame.request, frame.attempt))
        elif isinstance(frame, NotNow):
            key = (frame.request, frame.attempt)
            request = self.requests[frame.request]
            if key in self.unbound and frame.why in PASSING:
                self.later(frame.retry_s, lambda: self.bind(key))
            elif key in self.unbound and request.key == key and request.outcome is None:
                del self.unbound[key]
                self.again(request, "bind_failed")
        elif isinstance(frame, Bound):
            key = (frame.request, frame.attempt)
            request = self.requests[frame.request]
            self.unbound.pop(key, None)
            if request.key == key and request.outcome is None:
                request.gen = worker.boot
                self.later(self.wire_s, lambda: worker.feed(ce.FromIngress(Renew((key,), 2.0))))

    def bind(self, key: tuple[str, int], gen: Any = None) -> None:
        request = self.requests[key[0]]
        boot = self.unbound.get(key)
        if boot is None or request.key != key or request.outcome is not None:
            self.unbound.pop(key, None)
            return
        gens = [g for g in self.gens() if g.boot not in self.dead]
        if not gens or not self.binding:
            self.later(0.1, lambda: self.bind(key))
            return
        gen = gen or gens[crc32(key[0].encode()) % len(gens)]
        hashes = self.hasher.hash_blocks("s", request.tokens)
        ctx = PeerAddress("c", boot, "h", 1)
        args = (len(request.tokens), request.params.max_tokens, 1, hashes, NAMESPACE, request.left)
        bind = Bind(next(self.binds), *key, ctx, *args)
        self.later(self.wire_s, lambda: gen.feed(ce.FromRouter(bind)))
        self.pending[key] = gen.boot
        self.later(1.0, lambda: None if gen.alive else self.bind(key))  # the bind died with it

    def submit(
        self, name: str, tokens: tuple[int, ...], max_tokens: int = 8, samples: int = 1, left: int = 0
    ) -> Request:
        request = Request(name, tokens, SamplingParams(max_tokens=max_tokens), samples, left=left)
        self.requests[name] = request
        self.place(request)
        return request

    def place(self, request: Request) -> None:
        ctxs = self.ctxs()
        if request.outcome is not None:
            return
        if not ctxs:
            self.later(0.2, lambda: self.place(request))
            return
        ctx = ctxs[crc32(request.name.encode()) % len(ctxs)]
        request.ctx, request.gen, request.decoding = ctx.boot, "", False
        hashes = self.hasher.hash_blocks("s", request.tokens)
        submit = Submit(
            *request.key, "prefill", pack_ids(request.tokens), b"", request.params, request.samples, hashes, NAMESPACE,
            0, 2.0, None, False, left_to_gen=request.left,
        )  # fmt: skip
        self.later(self.wire_s, lambda: ctx.feed(ce.FromIngress(submit)))

    def renew(self) -> None:
        for request in self.requests.values():
            if request.outcome is None:
                for boot in (request.ctx, request.gen):
                    if boot:
                        self.boots[boot].feed(ce.FromIngress(Renew((request.key,), 2.0)))

    def ingress(self, worker: Worker, item: Any) -> None:
        request = self.requests[item.request]
        if not self.renewing:  # it is dead
            return
        if request.key != (item.request, item.attempt) or request.outcome is not None:
            return
        if isinstance(item, Delta):
            request.firsts += item.start == 0
            if item.finish is not None:
                self.over(request, "finished", item.finish)
        elif item.retryable:
            self.again(request, item.code)
        else:
            self.cancel_everywhere(request, item.code)
            self.over(request, "failed", item.code)

    def again(self, request: Request, code: str) -> None:
        self.cancel_everywhere(request, code)
        if request.attempt + 1 >= self.retries:
            self.over(request, "failed", code)
            return
        request.attempt += 1
        request.reason = code
        self.place(request)

    def cancel(self, name: str) -> None:
        request = self.requests[name]
        if request.outcome is None:
            self.cancel_everywhere(request, "client")
            self.over(request, "cancelled", "client")

    def cancel_everywhere(self, request: Request, reason: str) -> None:
        key = request.key
        for boot in {request.ctx, request.gen} - {""}:
            self.later(self.wire_s, lambda b=boot: self.boots[b].feed(ce.FromIngress(Cancel(*key, reason))))
        if not request.gen:  # the router tells a gen that is just being bound
            for gen in self.gens():
                self.later(2 * self.wire_s, lambda g=gen: g.feed(ce.FromRouter(Cancel(*key, reason))))

    def over(self, request: Request, outcome: str, reason: str) -> None:
        request.outcome, request.reason, request.ended_at = outcome, reason, self.now

    # ----------------------------------------------------------------------------------------------------------- checks

    def assert_quiet(self) -> None:
        """No entry, no page in use, no landing chunk out, in any living worker."""
        for worker in self.workers.values():
            if not worker.alive:
                continue
            worker.kv.check()
            assert worker.core.idle, f"{worker.boot} still has entries"
            assert worker.used == 0, f"{worker.boot}: {worker.kv.counts()}"
            if isinstance(worker, Gen):
                worker.book.check()
                assert not worker.chunks, f"{worker.boot}: landing chunks out {worker.book.counts()}"


def prompt(family: int, length: int, salt: int = 0) -> tuple[int, ...]:
    """Prompts of one family share all but their last token."""
    return tuple(family * 1000 + i for i in range(length - 1)) + (5000 + salt,)
