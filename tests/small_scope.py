"""A ctx, a gen, an ingress and a router so small that every state they can reach can be looked at.

The cores, the page books and the landing book are the product's own; links, loops, copies and time are plain data. A
worker is a `Node`: what it is now, as one value, and a table of what became of it for each thing that happened to it.
A worker in a known state is never run twice on the same input, so a whole world costs little more than its bookkeeping.
tests/handoff_search.py follows everything that can happen in such a world.

Instants are kept as distances from now, and a step of time changes them all; it is as long as the shortest period of
the cores. A page's content is a label of each token whose state it holds; a copy writes when it ends, as late
as it can.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from zlib import crc32

from handoff_sim import NAMESPACE, PAGE, layout

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.kv_cache.pool import PagePool, PageState
from tailrace.model.errors import TailraceError
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer import core_events as ce
from tailrace.transfer.core_state import GIVEN, attributes, copied, install
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, FirstToken, PrefillResult
from tailrace.transfer.messages import Landed, Submit, pack_ids, unpack_ids
from tailrace.transfer.page_list import PageList
from tailrace.transfer.page_plan import unit_segments
from tailrace.transfer.transports.base import LandedIn, PostDone, ReadDone
from tailrace.transfer.transports.landing import LandingBook

Key = tuple[str, int]
STEP = ce.CoreConfig(pin_lease_s=2.0, request_lease_s=2.0, kv_transfer_timeout_s=3.0)  # repeats at each step
OLD = 4.0  # every duration of STEP has passed
FAULTS = ("drop", "duplicate", "late", "stop", "kill", "cancel")


class Broken(AssertionError):
    """A law is broken in this state."""


@dataclass(frozen=True)
class Scope:
    """How large a world is.

    Attributes:
        faults: how many may happen in one history, of the kinds named in `kinds`.
        landing: pages go through landing chunks, else gen reads.
        gen_page: tokens a page of gen; ctx's have 4.
        shared: the prompts have all but their last token in common.
        attempts: that an ingress makes of a request.
        linger: what a killed worker has sent may still arrive, also after what its successor sends. Without it that
            comes to the same as having been killed later, but for this order.
    """

    requests: int = 2
    pages: int = 3
    faults: int = 1
    kinds: tuple[str, ...] = FAULTS
    landing: bool = False
    gen_page: int = PAGE
    ctx_pages: int = 5
    gen_pages: int = 5
    landing_chunks: int = 2
    units_per_grant: int = 2
    shared: bool = False
    attempts: int = 2
    linger: bool = False
    chunk_tokens: int = 6  # a page of 4 spans two
    ctx_core: type[CtxCore] = CtxCore
    gen_core: type[GenCore] = GenCore

    def tokens(self, name: str) -> tuple[int, ...]:
        index = int(name[1:])
        family = 0 if self.shared else index
        return (*(family * 100 + i for i in range(self.pages * PAGE - 1)), 1000 + index)


@cache
def label(tokens: tuple[int, ...], at: int) -> int:
    """The state of one token, which depends on all before it."""
    return crc32(repr(tokens[: at + 1]).encode())


_HASHER = BlockHasher(b"secret", PAGE)


@cache
def submit_of(name: str, attempt: int, tokens: tuple[int, ...]) -> Submit:
    hashes = _HASHER.hash_blocks("s", tokens)
    params = SamplingParams(max_tokens=8)
    return Submit(name, attempt, "prefill", pack_ids(tokens), b"", params, 1, hashes, NAMESPACE, 0, 2.0, None, False)


# ------------------------------------------------------------------------------------------- what happens to a worker


@dataclass(frozen=True)
class Compute:
    """The loop runs the next chunk of the first prompt that fits."""


@dataclass(frozen=True)
class Pack:
    """A landing write is packed. `agent`: how many of gen's agents for this ctx were destroyed; None if it is dead."""

    job: int
    agent: int | None


@dataclass(frozen=True)
class Agent:
    """Ctx is paired: its writes go to this agent of gen's."""

    boot: str
    number: int


@dataclass(frozen=True)
class Air:
    """A landing write that was posted: nothing its sender does calls it back."""

    src: str
    dst: str
    agent: int
    landed: Landed
    content: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Posted:
    """A landing write is over: it has arrived, or its gen's agent is gone."""

    dst: str
    sequence: int
    lost: bool


@dataclass(frozen=True)
class Land:
    """It arrives; its notification does, so often."""

    air: Air
    notices: int = 1


@dataclass(frozen=True)
class Copy:
    """A copy ends. `source`: the peer's page and generation of each unit, as they are now; empty if it unpacks."""

    job: int
    source: tuple[tuple[tuple[int, ...], int], ...] = ()


@dataclass(frozen=True)
class Decoded:
    key: Key


@dataclass(frozen=True)
class Mapped:
    """What stands in a dead peer's memory for ever."""

    boot: str
    generations: tuple[int, ...]


@dataclass(frozen=True)
class Passed:
    """A step of time."""


@dataclass(frozen=True)
class Disconnected:
    """Said by gen: its agent for this boot is destroyed. `reset`: to be paired with anew."""

    boot: str
    reset: bool


class Part:
    """One worker process: its core, its books, its memory, its loop."""

    core: Any

    def __init__(self, boot: str, pages: int, tokens_per_page: int) -> None:
        self.boot = boot
        self.kv = KvManager(layout(tokens_per_page), pages + 1, PAGE)
        self.blank = (0,) * tokens_per_page
        self.memory: list[tuple[int, ...]] = [self.blank] * (pages + 1)
        self.out: list[Any] = []
        self.kv.set_poison(self.poison)

    def poison(self, freed: Any) -> None:
        for page in freed:
            self.memory[page] = self.blank

    def copy_into(self, new: Any) -> Any:
        """Everything that happening changes, into a part just made."""
        new.kv._pool, new.kv._index = _pool_copy(self.kv._pool), copied(self.kv._index, {})
        new.memory = self.memory[:]
        install(new.core, {name: value for name, value in vars(self.core).items() if name not in GIVEN})
        return new

    def feed(self, event: Any) -> None:
        """One event, its actions, and then what the loop answers to them."""
        answers: list[Any] = []
        for action in self.core.handle(event, 0.0):
            match action:
                case ce.ToLoop():
                    answers += self.on_loop(action.event)
                case ce.ToPeer() | ce.ToRouter() | ce.ToIngress():
                    self.out.append(action)
                case _:
                    self.on_transport(action)
        for answer in answers:
            self.feed(answer)

    def apply(self, item: Any) -> None:
        if isinstance(item, Passed):
            _shift(vars(self.core), set())
        else:
            self.feed(item)

    def on_loop(self, event: Any) -> list[Any]:
        raise NotImplementedError

    def on_transport(self, action: Any) -> None:
        raise NotImplementedError

    def moves(self) -> Iterator[Any]:
        """What this worker may do of itself."""
        raise NotImplementedError

    def clone(self, scope: Scope) -> Any:
        raise NotImplementedError

    def check(self) -> None:
        self.kv.check()

    @property
    def quiet(self) -> bool:
        return bool(self.core.idle) and not self.kv.counts().used

    def identity(self) -> tuple[Any, ...]:
        """What this worker's future depends on."""
        core = tuple([(n, plain(v)) for n, v in vars(self.core).items() if n not in GIVEN and type(v) is not int])
        return (self.boot, core, _books(self.kv), tuple(self.memory))


@dataclass
class Prefill:
    key: Key
    tokens: tuple[int, ...]
    hashes: bytes
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    pinned: int = 0


class Ctx(Part):
    def __init__(self, boot: str, scope: Scope) -> None:
        super().__init__(boot, scope.ctx_pages, PAGE)
        self.scope = scope
        self.core = scope.ctx_core(self.kv, STEP)
        self.jobs: list[Prefill] = []
        self.posts: dict[int, tuple[Any, int]] = {}
        self.packed: set[int] = set()  # jobs whose write is in the air
        self.agents: dict[str, int] = {}  # gen -> which of its agents we write to

    def clone(self, scope: Scope) -> Ctx:
        new = self.copy_into(Ctx(self.boot, scope))
        new.jobs = [copied(job, {}) for job in self.jobs]
        new.posts, new.packed, new.agents = dict(self.posts), set(self.packed), dict(self.agents)
        return new

    def identity(self) -> tuple[Any, ...]:
        jobs = tuple((j.key, tuple(j.pages), j.computed, j.pinned) for j in self.jobs)
        posts = tuple(sorted(repr((plain(job), number in self.packed)) for number, job in self.posts.items()))
        return (*super().identity(), jobs, posts, tuple(sorted(self.agents.items())))

    def apply(self, item: Any) -> None:
        if isinstance(item, Compute):
            self.compute()
        elif isinstance(item, Pack):
            self.pack(item)
        elif isinstance(item, Posted):
            self.posted(item)
        elif isinstance(item, Agent):
            self.agents[item.boot] = item.number
        else:
            super().apply(item)

    def moves(self) -> Iterator[Any]:
        if self.runnable() is not None:
            yield Compute()
        yield from (number for number in self.posts if number not in self.packed)

    def runnable(self) -> Prefill | None:
        return next((j for j in self.jobs if j.pages or self.kv.available() >= self.scope.pages), None)

    def on_loop(self, event: Any) -> list[Any]:
        if isinstance(event, Arrived):
            submit = event.submit
            self.jobs.append(Prefill(event.key, tuple(unpack_ids(submit.prompt_ids)), submit.hashes))
        elif isinstance(event, Cancelled):
            job = next((j for j in self.jobs if j.key == event.key), None)
            if job is not None:
                self.jobs.remove(job)
                self.kv.release(job.pages)
                return [ce.LoopEnded(event.key, "cancelled")]
        return []

    def on_transport(self, action: Any) -> None:
        if isinstance(action, ce.StartPost):
            self.posts[action.job.job] = (action.job, self.agents.get(action.job.boot, 0))

    def compute(self) -> None:
        job = self.runnable()
        assert job is not None
        if not job.pages:
            hit = self.kv.match_prefix(NAMESPACE, job.hashes, len(job.tokens))
            new = self.kv.allocate(self.kv.layout.num_pages(len(job.tokens)) - len(hit.pages))
            assert new is not None
            job.pages, job.computed = hit.pages + new, hit.num_tokens
        end = min(len(job.tokens), job.computed + self.scope.chunk_tokens)
        self.feed(ce.ChunkLaunched(job.key, end == len(job.tokens), 1.0))
        for at in range(job.computed, end):
            page = job.pages[at // PAGE]
            row = list(self.memory[page])
            row[at % PAGE] = label(job.tokens, at)
            self.memory[page] = tuple(row)
        job.computed, reach = end, -(-end // PAGE)
        new_pins = tuple((o, job.pages[o]) for o in range(job.pinned, reach))
        self.kv.pin([page for _, page in new_pins])
        job.pinned = reach
        self.feed(ce.ChunkDone(job.key, new_pins, end, 1.0))
        if end == len(job.tokens):
            self.feed(ce.PrefillDone(job.key, PrefillResult((FirstToken(7),), end)))
            self.kv.publish(NAMESPACE, job.hashes, job.pages, end)
            self.jobs.remove(job)
            self.kv.release(job.pages)

    def pack(self, item: Pack) -> None:
        """Pack, compare the generations, hand the write to the network."""
        job, agent = self.posts[item.job]
        if any(self.kv.descriptor_generation(d.page) != d.generation for d in job.pages):
            del self.posts[item.job]
            self.feed(PostDone(item.job, job.key, "stale", stale=True))
        elif item.agent != agent:
            del self.posts[item.job]
            self.feed(PostDone(item.job, job.key, "the pair was reset", lost=True))
        else:
            self.packed.add(item.job)
            pages = PageList.of(job.pages)
            landed = Landed(*job.key, job.grant.chunk, job.grant.sequence, job.grant.nbytes, 0, pages)
            self.out.append((job.boot, landed, tuple(self.memory[d.page] for d in job.pages)))

    def posted(self, item: Posted) -> None:
        number = next(
            n
            for n in self.packed
            if (self.posts[n][0].boot, self.posts[n][0].grant.sequence) == (item.dst, item.sequence)
        )
        self.packed.discard(number)
        job, _ = self.posts.pop(number)
        self.feed(PostDone(number, job.key, "the pair was reset" if item.lost else None, lost=item.lost))


class Gen(Part):
    def __init__(self, boot: str, scope: Scope) -> None:
        super().__init__(boot, scope.gen_pages, scope.gen_page)
        self.scope = scope
        self.core = scope.gen_core(self.kv, self, STEP, lambda: 0)
        units = scope.units_per_grant
        self.book = LandingBook(scope.landing_chunks if scope.landing else 0, units * layout().bytes_per_page)
        self.chunks: dict[int, tuple[tuple[int, ...], ...]] = {}  # chunk -> the pages that landed there
        self.mapped: dict[str, tuple[int, ...]] = {}  # dead ctx -> its generations
        self.reads: dict[int, Any] = {}
        self.running: list[Admitted] = []

    def clone(self, scope: Scope) -> Gen:
        new = self.copy_into(Gen(self.boot, scope))
        new.book, new.chunks, new.mapped = copied(self.book, {}), dict(self.chunks), dict(self.mapped)
        new.reads, new.running = dict(self.reads), list(self.running)
        return new

    def identity(self) -> tuple[Any, ...]:
        reads = tuple(sorted(repr(plain(job)) for job in self.reads.values()))
        running = tuple((a.key, a.pages) for a in self.running)
        landing = (plain(self.book._chunks), tuple(self.book._free), tuple(sorted(self.chunks.items())))
        return (*super().identity(), reads, running, landing, tuple(sorted(self.mapped.items())))

    # Wire
    def grants(self, key: Key, boot: str, n: int) -> tuple[Any, ...]:
        return self.book.grant(key, boot, n, self.scope.units_per_grant)

    def reclaim(self, key: Key, boot: str) -> None:
        self.book.reclaim(key, boot)

    def still_valid(self, boot: str, seen: tuple[tuple[int, int], ...]) -> bool:
        return all(self.mapped[boot][page] == generation for page, generation in seen)

    def apply(self, item: Any) -> None:
        if isinstance(item, Copy):
            self.copy(item)
        elif isinstance(item, Land):
            self.land(item)
        elif isinstance(item, LandedIn):
            self.notified(item)
        elif isinstance(item, Decoded):
            self.decoded(item.key)
        elif isinstance(item, Mapped):
            self.mapped[item.boot] = item.generations
        else:
            super().apply(item)

    def moves(self) -> Iterator[Any]:
        yield from self.reads
        yield from (Decoded(admitted.key) for admitted in self.running)

    def on_loop(self, event: Any) -> list[Any]:
        if isinstance(event, Admitted):
            self.running.append(event)
            self.check_content(event)
            self.out.append(event.key)
        elif isinstance(event, Cancelled):
            admitted = next((a for a in self.running if a.key == event.key), None)
            if admitted is not None:
                self.let_go(admitted)
                return [ce.LoopEnded(event.key, "cancelled")]
        return []

    def on_transport(self, action: Any) -> None:
        match action:
            case ce.StartRead():
                if action.job.landed is not None:
                    assert self.book.begin_unpack(action.job.landed)
                self.reads[action.job.job] = action.job
            case ce.DropLanded():
                self.book.drop(action.landed)
            case ce.ClosePair() | ce.ResetPair():
                if not self.scope.landing and any(job.boot == action.boot for job in self.reads.values()):
                    raise Broken(f"the mapping of {action.boot} is closed under a copy")
                self.book.disconnect(action.boot)
                self.out.append(Disconnected(action.boot, isinstance(action, ce.ResetPair)))

    def land(self, item: Land) -> None:
        """The write itself, into a chunk that must still be granted under its number."""
        landed = item.air.landed
        chunk = self.book._chunks[landed.chunk]
        if chunk.sequence != landed.sequence or chunk.state.value != "granted":
            raise Broken(f"a write of {item.air.src} lands in chunk {landed.chunk}, which is another's")
        self.chunks[landed.chunk] = item.air.content
        for _ in range(item.notices):
            self.notified(LandedIn(item.air.src, landed))

    def notified(self, event: LandedIn) -> None:
        if self.book.announce(event.boot, event.landed):
            self.feed(event)

    def copy(self, item: Copy) -> None:
        """A copy of ours ends: it has written its tokens, whatever became of its request."""
        job = self.reads.pop(item.job)
        ok, stale = [], []
        landed = () if job.landed is None else job.landed.pages
        for at, (descriptor, _) in enumerate(job.units):
            if job.landed is None:
                content, generation = item.source[at]
            else:
                where = [d.ordinal for d in landed].index(descriptor.ordinal)
                content, generation = self.chunks[job.landed.chunk][where], descriptor.generation
            for s in unit_segments(PAGE, self.scope.gen_page, descriptor.ordinal, job.into):
                page = job.into.pages[s.dst_ordinal]
                self.check_writable(page, job.key)
                row = list(self.memory[page])
                row[s.dst_token : s.dst_token + s.n] = content[s.src_token : s.src_token + s.n]
                self.memory[page] = tuple(row)
            (ok if generation == descriptor.generation else stale).append(descriptor)
        if job.landed is not None:
            self.book.end_unpack(job.landed)
            del self.chunks[job.landed.chunk]
        self.feed(ReadDone(item.job, job.key, tuple(ok), tuple(stale)))

    def check_writable(self, page: int, key: Key) -> None:
        used = any(page in admitted.pages for admitted in self.running)
        if used or self.kv._pool.state(page) in (PageState.FREE, PageState.CACHED):
            raise Broken(f"a copy for {key} writes into page {page}, which was given back")

    def check_content(self, admitted: Admitted) -> None:
        tokens = self.scope.tokens(admitted.key[0])
        state = [value for page in admitted.pages for value in self.memory[page]][: len(tokens)]
        if state != [label(tokens, at) for at in range(len(tokens))]:
            raise Broken(f"{admitted.key} decodes pages whose content is another's")

    def decoded(self, key: Key) -> None:
        admitted = next(a for a in self.running if a.key == key)
        self.check_content(admitted)
        record = admitted.handoff
        self.kv.publish(record.namespace, record.hashes, admitted.pages, record.num_tokens)
        self.let_go(admitted)
        self.out.append(Decoded(key))
        self.feed(ce.LoopEnded(key, "finished"))

    def let_go(self, admitted: Admitted) -> None:
        self.running.remove(admitted)
        self.kv.release([page for page in admitted.pages if page != SCRATCH_PAGE])

    def check(self) -> None:
        super().check()
        self.book.check()
        counts = self.book.counts()
        if counts.free + counts.granted + counts.unpacking != counts.total:
            raise Broken(f"landing chunks of {self.boot}: {counts}")

    @property
    def quiet(self) -> bool:
        counts = self.book.counts()
        return super().quiet and counts.free == counts.total


# ---------------------------------------------------------------------------------------------------- states as values


class Node:
    """A worker in one state. `after`: input -> (state, what it said); `part` never changes once it is here."""

    __slots__ = ("after", "keys", "moves", "number", "part", "quiet")

    def __init__(self, number: int, part: Part) -> None:
        self.number, self.part = number, part
        self.after: dict[int, tuple[Node, tuple[int, ...]]] = {}
        self.moves = tuple(part.moves())
        self.quiet = part.quiet


class Known:
    """All states of workers, and all things that happen, by number; equal ones have one number."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.nodes: dict[bytes, Node] = {}
        self.listed: list[Node] = []
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self.runs = 0  # of a core on an input that was new

    def number(self, item: Any) -> int:
        """Of a frame, an event, an input."""
        key = plain(item)
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = len(self.items)
            self.items.append(item)
        return known

    def node(self, part: Part) -> Node:
        key = marshal.dumps(part.identity(), 2)
        node = self.nodes.get(key)
        if node is None:
            part.check()
            node = self.nodes[key] = Node(len(self.listed), part)
            self.listed.append(node)
        return node

    def after(self, node: Node, item: int) -> tuple[Node, tuple[int, ...]]:
        """The worker once this has happened to it.

        Raises:
            Broken: it broke a law by it.
        """
        known = node.after.get(item)
        if known is None:
            self.runs += 1
            part = node.part.clone(self.scope)
            try:
                part.apply(self.items[item])
                new = self.node(part)
            except (TailraceError, AssertionError, LookupError) as error:
                raise Broken(f"{part.boot}: {type(error).__name__}: {error}") from error
            known = node.after[item] = (new, tuple(self.number(said) for said in part.out))
        return known


_TIMES = frozenset({"pin_until", "deadline", "handoff_sent", "progress_at", "asked_at", "bound_at", "final_at"})
# What is only measured with, or names a thing without any other meaning.
_IDLE = frozenset({"bound_at", "job", "seq", "submit", "bind", "_num_jobs", "_sequence"})
_BY_REQUEST = frozenset({"Submit", "Handoff"})  # wholly determined by request and attempt
_BY_CONTENT = frozenset({"ReadUnderWay", "SumJob"})  # their numbers mean nothing


def _shift(value: Any, seen: set[int]) -> None:
    """A step later: every instant in a core's state is that much longer ago."""
    if id(value) in seen:
        return
    seen.add(id(value))
    name = type(value).__name__
    if name == "Leases":
        value._until = {key: max(-OLD, until - 1) for key, until in value._until.items()}
    elif name == "Orphans":
        value._out = {key: (n, max(-OLD, since - 1)) for key, (n, since) in value._out.items()}
    elif isinstance(value, dict):
        for key, item in value.items():
            if key not in GIVEN:
                _shift(item, seen)
    elif not isinstance(value, int | float | str | bytes | tuple | frozenset | set | None):
        for attribute, item in attributes(value):
            if attribute in _TIMES and item is not None:
                setattr(value, attribute, max(-OLD, item - 1))
            elif not isinstance(item, int | float | str | bytes | tuple | None):
                _shift(item, seen)


def plain(value: Any) -> Any:
    """Nested tuples of plain values, equal if the values are alike in all that matters."""
    kind = type(value)
    if kind is int or kind is str or kind is bytes or kind is bool or kind is float or value is None:
        return value
    if kind is list or isinstance(value, tuple):
        return tuple([plain(v) for v in value])
    name = kind.__name__
    if name == "dict" or name == "OrderedDict":
        return _plain_dict(value)
    if name == "set" or name == "frozenset":
        return tuple(sorted([plain(v) for v in value]))
    if name == "deque" or name == "PageList":
        return tuple([plain(v) for v in value])
    if name in _BY_REQUEST:
        return (name, value.request, value.attempt)
    if isinstance(value, str):  # an enum
        return str(value)
    if hasattr(value, "value") and not hasattr(value, "__dataclass_fields__"):
        return value.value
    if name == "Runs":  # shares the leases and the memory of its core
        return _plain_dict(value._runs)
    out: list[Any] = [name]
    mine = name in ("Pack", "Copy")  # here the number does name
    for attribute, item in attributes(value):
        if attribute == "final_at":  # only whether matters
            out.append(item is None)
        elif (attribute not in _IDLE or mine) and not (attribute == "jobs" and name == "Hand"):  # the core has those
            out.append(plain(item))
    return tuple(out)


def _plain_dict(value: dict[Any, Any]) -> tuple[Any, ...]:
    items = list(value.items())
    if items and type(items[0][0]) is int and (kind := type(items[0][1]).__name__) and (
        kind in _BY_CONTENT or kind == "tuple"
    ):  # fmt: skip
        return tuple(sorted([repr(plain(v)) for _, v in items]))
    if len(items) == 1:
        return ((plain(items[0][0]), plain(items[0][1])),)
    return tuple(sorted([(plain(k), plain(v)) for k, v in items], key=repr))


def _pool_copy(pool: PagePool) -> PagePool:
    new = PagePool(pool.num_pages, pool.generations.copy())
    for name, value in vars(pool).items():
        if name != "generations":
            setattr(new, name, value[:] if isinstance(value, list | bytearray) else value)
    return new


def _books(kv: KvManager) -> tuple[Any, ...]:
    pool, index = kv._pool, kv._index
    nodes = sorted(set(index._node_of.values()), key=lambda node: (node.last_used, node.key))
    order = tuple((node.key, node.pages, node.busy) for node in nodes)  # eviction goes by last use
    return (
        tuple(pool._holders), tuple(pool._pins), tuple(pool._quarantines), bytes(pool._published),
        tuple(sorted(pool._stock)), pool.generations.tolist(), order,
    )  # fmt: skip
