"""What every simulated worker has, and the one that only prefills.

A worker takes as long as ServiceTimes says and tells the router what the product's tells it: heartbeats, progress,
cache events. Prompts are chosen by the product's own chunked prefill scheduler (or first come first served) and live in
a block cache of two tiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simulate_cache import BlockCache, Lease
from simulate_trace import BLOCK, hit_tokens
from simulate_world import NAMESPACE, Key, Outcome, World, compat

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.transfer.messages import CacheEvent, CacheQuery, Cancel, Heartbeat, Peers, Progress, Register

RATE_WEIGHT = 0.2
RATE_TOKENS = 8192


@dataclass(eq=False, slots=True)
class Prefill:
    """What the scheduler sees of a prompt."""

    outcome: Outcome
    order: int
    received: float
    names: list[bytes]
    priority: int = 0
    pages: tuple[int, ...] = ()
    num_computed: int = 0
    lease: Lease | None = None
    copy_s: float = 0.0  # of its blocks from the host, paid by its first pass
    decoder: Any = None

    @property
    def key(self) -> Key:
        return (str(self.outcome.number), 0)

    @property
    def tokens(self) -> int:
        return self.outcome.request.tokens

    @property
    def remaining(self) -> int:
        return self.tokens - self.num_computed

    @property
    def age(self) -> tuple[int, int]:
        return (self.order, 0)


@dataclass(slots=True)
class _Chunk:
    sequence: Prefill
    num_tokens: int


class Fifo:
    """First come, first served; the interface of PrefillScheduler that a simulated worker uses."""

    def __init__(self) -> None:
        self.tokens_per_s = 0.0
        self._waiting: dict[Prefill, None] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Prefill) -> None:
        self._waiting[sequence] = None

    def remove(self, sequence: Prefill) -> None:
        self._waiting.pop(sequence, None)

    @property
    def num_queued_tokens(self) -> int:
        return sum(s.remaining for s in self._waiting)

    def measure(self, num_tokens: int, seconds: float) -> None:
        if num_tokens and seconds > 0:
            rate = num_tokens / seconds
            self.tokens_per_s += (rate - self.tokens_per_s) * (RATE_WEIGHT if self.tokens_per_s else 1.0)

    def seconds_left(self, sequence: Prefill) -> float:
        return sequence.remaining / self.tokens_per_s if self.tokens_per_s else math.inf

    def select(self, budget: int, now: float, reserve: Callable[[Prefill], bool]) -> list[_Chunk]:
        for sequence in self._waiting:
            if sequence.pages or reserve(sequence):
                return [_Chunk(sequence, min(budget, sequence.remaining))]
            break
        return []


class Worker:
    """What all have: a name, a cache, prompts that wait, and a word for the router."""

    duty = ""

    def __init__(self, world: World, number: int) -> None:
        setup = world.setup
        self.world, self.times, self.boot = world, setup.times, f"{self.duty}-{number}"
        self.computed = 0
        self.cache = BlockCache(setup.device_blocks, setup.host_blocks)
        self.scheduler: Any = Fifo() if setup.order == "fifo" else PrefillScheduler(setup.budget)
        self.scheduler.measure(RATE_TOKENS, self.times.prefill_s([(RATE_TOKENS, 0)]))  # it has served before
        self.prefills: dict[Key, Prefill] = {}
        self.running = 0
        self.pairs: tuple[str, ...] = ()
        self._sequence = self._arrivals = 0
        self._busy_until = 0.0

    def register(self) -> Register:
        setup = self.world.setup
        nbytes = int(self.times.bytes_per_token * BLOCK)
        home = "gen" if self.duty == "gen" else "ctx"
        return Register(
            self.boot, self.boot, home, self.duty, "10.0.0.1", 1, self.all_blocks, BLOCK, setup.budget, 1 << 20,
            compat(nbytes), 0, "",
        )  # fmt: skip

    def beat(self) -> None:
        free, total = self.free_blocks, self.all_blocks
        beat = Heartbeat(
            worker=self.boot, boot=self.boot, phase="run", stamp_age_s=0.0, free_pages=free, used_pages=total - free,
            running=self.running, queued=len(self.prefills), queue_age_s=0.0,
            prefill_tokens_queued=self.scheduler.num_queued_tokens, prefill_tokens_per_s=self.scheduler.tokens_per_s,
            transfer_bytes_per_s=self.times.transfer_bytes_per_s, pairs=self.pairs, cache_sequence=self._sequence,
        )  # fmt: skip
        self.world.hear(self.boot, beat)

    @property
    def all_blocks(self) -> int:
        return self.cache.device

    @property
    def free_blocks(self) -> int:
        """Those that no request holds."""
        return self.cache.free

    def frame(self, frame: object) -> None:
        if isinstance(frame, Peers):
            self.pairs = tuple(peer.boot for peer in frame.peers)
        elif isinstance(frame, CacheQuery):
            self._tell_cache(cleared=True, stored=sorted(self.cache.names()), removed=())
        elif isinstance(frame, Cancel):
            self.cancel((frame.request, frame.attempt))

    def cancel(self, key: Key) -> None:
        prefill = self.prefills.pop(key, None)
        if prefill is not None:
            self.scheduler.remove(prefill)
            if prefill.lease is not None:
                self.cache.release(prefill.lease)

    def tell_cache(self) -> None:
        stored, removed = self.cache.take_events()
        if stored or removed:
            self._tell_cache(cleared=False, stored=stored, removed=removed)

    def _tell_cache(self, *, cleared: bool, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self._sequence += 1
        said = [((NAMESPACE, b"".join(names)),) if names else () for names in (stored, removed)]
        self.world.to_router(self.boot, CacheEvent(self.boot, self.boot, self._sequence, cleared, *said))

    def take(self, outcome: Outcome) -> Prefill:
        self._arrivals += 1
        names = [block.to_bytes(16, "big") for block in outcome.request.blocks]
        prefill = Prefill(outcome, self._arrivals, self.world.now, names)
        self.prefills[prefill.key] = prefill
        self.scheduler.add(prefill)
        return prefill

    def reserve(self, prefill: Prefill, more_tokens: int = 0) -> bool:
        """Blocks of the whole prompt and what it finds cached; False if they do not fit now."""
        request = prefill.outcome.request
        blocks = -(-(request.tokens + more_tokens) // BLOCK)
        lease = self.cache.reserve(prefill.names, blocks, (request.tokens - 1) // BLOCK)
        if lease is None:
            return False
        prefill.lease, prefill.pages = lease, (1,)
        prefill.num_computed = hit_tokens(request, lease.hits)
        prefill.outcome.cached = prefill.num_computed
        prefill.copy_s = self.times.host_copy_s(lease.from_host * BLOCK)
        return True

    def prefill_s(self, chunks: Sequence[Any]) -> float:
        """Of one pass, the copies from the host of those that begin in it included."""
        seconds = self.times.prefill_s((c.num_tokens, c.sequence.num_computed) for c in chunks)
        for chunk in chunks:
            seconds += chunk.sequence.copy_s
            chunk.sequence.copy_s = 0.0
        return seconds

    def advance(self, chunks: Sequence[Any], seconds: float) -> list[Prefill]:
        """A pass has completed; returns the prompts that it ended."""
        total = sum(chunk.num_tokens for chunk in chunks)
        self.computed += total
        self.scheduler.measure(total, seconds)
        ended = []
        for chunk in chunks:
            prefill = chunk.sequence
            if prefill.key not in self.prefills:
                continue  # cancelled meanwhile
            prefill.num_computed += chunk.num_tokens
            if not prefill.remaining:
                self.scheduler.remove(prefill)
                self.cache.publish(prefill.lease, prefill.names)
                ended.append(prefill)
        self.tell_cache()
        return ended


class Ctx(Worker):
    """Prefills; holds the pages until the gen has read them."""

    duty = "ctx"
    _running = False

    def submit(self, outcome: Outcome) -> None:
        self.take(outcome)
        if not self._running:
            self._pass()

    def _pass(self) -> None:
        chunks = self.scheduler.select(self.world.setup.budget, self.world.now, self.reserve)
        self._running = bool(chunks)
        if chunks:
            seconds = self.prefill_s(chunks)
            for chunk in chunks:
                if chunk.num_tokens == chunk.sequence.remaining:
                    self._progress(chunk.sequence, last=True)
            self.world.after(seconds, self._passed, chunks, seconds)
        self.tell_cache()

    def _passed(self, chunks: list[Any], seconds: float) -> None:
        world = self.world
        for prefill in self.advance(chunks, seconds):
            outcome = prefill.outcome
            self._progress(prefill, last=True)
            world.first_token(outcome)
            if outcome.request.output <= 1:
                self.read(prefill.key)
            elif prefill.decoder is not None:
                prefill.decoder.fetch(prefill)
        for chunk in chunks:
            if chunk.sequence.remaining:
                self._progress(chunk.sequence, last=False)
        self._pass()

    def _progress(self, prefill: Prefill, *, last: bool) -> None:
        if prefill.decoder is None:
            left = self.scheduler.seconds_left(prefill) if prefill.remaining else 0.0
            frame = Progress(*prefill.key, prefill.num_computed, prefill.tokens, min(left, 1e6), last)
            self.world.to_router(self.boot, frame)

    def read(self, key: Key) -> None:
        """Its gen has all of it, or needs none: the pages are kept for whoever comes next."""
        prefill = self.prefills.pop(key, None)
        if prefill is not None and prefill.lease is not None:
            self.cache.release(prefill.lease)
            self.tell_cache()
            if not self._running:
                self._pass()
