"""Workers without a model: ctx and gen fakes that speak the product's worker protocol, for benches of the router.

    python bench/fake_workers.py --ctx 4 --gen 2 --prefill-rate 200000 --cache-blocks 8000      (or --directory DIR)
    stdin    {"secret": .., "host": .., "port": .., "boot": ..}   the router; not with --directory, where it is found
             {"do": "counts"}   {"do": "reset"}   {"do": "pace", "token_s": 0.02}   {"do": "stop"}
    stdout   {"ready": [{"worker": .., "boot": .., "host": .., "port": ..}], "secret": ..}, then one line an answer

One process and one event loop hold all of them, so a hand-off from ctx to gen is a method call; every frame to and from
the router and the ingresses is real. A ctx serves its prompts first in, first out, at a rate, and has an LRU cache of
blocks; a gen gives each of its streams one token a pass. Output is a cycle of fixed ids up to max_tokens; nobody stops
earlier. Knows nothing of HTTP, pages' bytes or leases: what an ingress leaves behind goes with its link. No torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import secrets
import sys
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from tailrace.cluster.discovery import ROUTER, FileDirectory, shared_secret
from tailrace.transfer.links import Identity, Link, Listener, listen
from tailrace.transfer.messages import (
    HASH_BYTES,
    ID_BYTES,
    PROTOCOL_VERSION,
    Bind,
    Bound,
    CacheEvent,
    CacheQuery,
    Cancel,
    CompatRecord,
    Delta,
    Heartbeat,
    Held,
    Holding,
    NotNow,
    Peers,
    Progress,
    Register,
    Renew,
    Stats,
    Submit,
    pack_ids,
)
from tailrace.transfer.outbox import Outbox
from tailrace.transfer.router_session import RouterSession

Key = tuple[str, int]

TOKENS_PER_PAGE = 16
PAGE_BYTES = 16_000
TOTAL_PAGES = 1 << 22
MAX_REQUEST_TOKENS = 1 << 20
AT_ONCE_RATE = 1e7  # tokens/s that a ctx which serves at once reports
FULL_LINK_BYTES = 1 << 18  # a pass waits while a link holds back more
HELD_BACK_S = 0.0005
KEEP_S = 10.0
OUTPUT = pack_ids(list(range(1000, 1064)))


@dataclass(frozen=True, slots=True)
class Service:
    """How fast the fakes are.

    Attributes:
        prefill_tokens_per_s: of uncached tokens, at each ctx; None: at once.
        token_s: seconds between the passes of a gen; 0: as fast as the links take them; None: all tokens in one pass.
        cache_blocks: blocks that the LRU of each ctx holds.
        block_tokens: as the cluster's.
    """

    prefill_tokens_per_s: float | None = None
    token_s: float | None = None
    cache_blocks: int = 0
    block_tokens: int = 64


class BlockCache:
    """An LRU of block hashes. A prompt's hashes name its full blocks, each with all that is before it."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: bytes) -> bool:
        return block in self._blocks

    def match(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks that are here."""
        found = 0
        while found < len(hashes) and hashes[found] in self._blocks:
            found += 1
        return found

    def use(self, hashes: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """They are used now, and here from now on; (those that are new, those that went). The end of a prompt goes
        before its beginning."""
        new = [block for block in hashes if block not in self._blocks] if self._capacity else []
        for block in reversed(hashes if self._capacity else ()):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._capacity)]
        return new, gone


def blocks_of(hashes: bytes) -> list[bytes]:
    """Packed hashes apart."""
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


@dataclass(slots=True)
class Counts:
    """What a worker has done since the last reset, in requests and tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Job:
    """A leg at the worker that computes its prompt. `ends`: of its service, on the loop's clock; None before it."""

    submit: Submit
    num_tokens: int
    arrived: float
    started: float = 0.0
    cached: int = 0
    ends: float | None = None


@dataclass(slots=True)
class _Stream:
    """What a gen decodes: `sent` tokens of each of the request's samples are out."""

    submit: Submit
    sent: int


class FakeWorker:
    """What both kinds share: links, the router's session, tokens on their way out."""

    def __init__(self, pool: FakePool, role: str, name: str) -> None:
        self.pool, self.role, self.name, self.boot = pool, role, name, secrets.token_hex(8)
        self.me = Identity(role, name, self.boot)
        self.counts = Counts()
        self.jobs: dict[Key, _Job] = {}  # prompts that wait or are computed
        self.streams: dict[Key, _Stream] = {}
        self.peers: tuple[str, ...] = ()
        self._cache = BlockCache(pool.service.cache_blocks)
        self._cache_namespace: dict[bytes, bytes] = {}  # of each block that is here
        self._cache_sequence = 0  # of the last CacheEvent
        self._cache_asked = False  # the router on this link has asked for the whole set
        self._waiting: deque[Key] = deque()
        self._running: Key | None = None
        self._outbox = Outbox(KEEP_S)
        self._links: set[Link] = set()
        self._of_link: dict[Link, set[Key]] = {}
        self._held: dict[Key, int] = {}  # pages
        self._used = 0
        self._seen = 0
        self._passing: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._listener: Listener | None = None
        self.session = RouterSession(self.me, pool.secret, self, heartbeat_s=0.25, report_s=1.0)

    # ------------------------------------------------------------------------------------------------------ life cycle

    async def start(self, router: tuple[str, int, str]) -> None:
        self._listener = await listen(
            "127.0.0.1", 0, self.me, self.pool.secret,
            on_link=self._links.add, on_frame=self._frame, on_close=self._closed,
        )  # fmt: skip
        self.session.set_address(*router)
        self._session = asyncio.create_task(self.session.run())

    @property
    def address(self) -> dict[str, Any]:
        """Where it listens."""
        assert self._listener is not None
        return {"worker": self.name, "boot": self.boot, "host": "127.0.0.1", "port": self._listener.port}

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        self._session.cancel()
        if self._passing is not None:
            self._passing.cancel()
        for link in tuple(self._links):
            link.close("the fake ends")
        await asyncio.wait([self._session])

    # ----------------------------------------------------------------------------------- what the router's session asks

    def register(self, epoch: int, router_boot: str) -> Register:
        assert self._listener is not None
        return Register(
            worker=self.name, boot=self.boot, home=self.role, duty=self.role, host="127.0.0.1",
            port=self._listener.port, total_pages=TOTAL_PAGES, tokens_per_page=TOKENS_PER_PAGE, max_num_tokens=8192,
            max_request_tokens=MAX_REQUEST_TOKENS, compat=self.pool.compat, epoch=epoch, router_boot=router_boot,
        )  # fmt: skip

    def heartbeat(self) -> Heartbeat:
        queued = sum(job.num_tokens for job in self.jobs.values())
        return Heartbeat(
            worker=self.name, boot=self.boot, phase="run", stamp_age_s=0.0, free_pages=TOTAL_PAGES - self._used,
            used_pages=self._used, running=len(self.streams), queued=len(self._waiting), queue_age_s=0.0,
            prefill_tokens_queued=queued, prefill_tokens_per_s=self.pool.service.prefill_tokens_per_s or AT_ONCE_RATE,
            transfer_bytes_per_s=1e10, pairs=self.peers, cache_sequence=self._cache_sequence,
        )  # fmt: skip

    def whole_set(self) -> Holding:
        now = self._loop.time()
        held = [self._held_job(key, job, now) for key, job in self.jobs.items()]
        held += [Held(*key, self._held.get(key, 0), 0, "decode", None) for key in self._held if key not in self.jobs]
        return Holding(self.name, self.boot, self._seen, tuple(held))

    def _held_job(self, key: Key, job: _Job, now: float) -> Held:
        left = None if job.ends is None else max(0.0, job.ends - now)
        needs = 0 if self.pool.reader(key) else job.num_tokens
        return Held(*key, self._held.get(key, 0), needs, job.submit.leg, left)

    def stats(self) -> Stats:
        return Stats(self.role, self.name, ())

    def router_up(self) -> None:
        self._cache_asked = False

    def stale_frame(self) -> None: ...

    def router_frame(self, frame: Any) -> None:
        if isinstance(frame, Peers):
            self.peers = tuple(peer.boot for peer in frame.peers)
            self.session.send(self.heartbeat())
        elif isinstance(frame, Bind):
            self._seen = frame.seq
            self._bind(frame)
        elif isinstance(frame, Cancel):
            self._forget((frame.request, frame.attempt))
        elif isinstance(frame, CacheQuery):
            self._cache_asked = True
            self._say_cached(list(self._cache_namespace), [], cleared=True)

    def _use(self, hashes: Sequence[bytes], namespace: bytes) -> None:
        """A prompt's blocks are here from now on; the router is told what came and what went."""
        new, gone = self._cache.use(hashes)
        came = [block for block in new if block in self._cache]
        went = [block for block in gone if block in self._cache_namespace]
        self._cache_namespace.update(dict.fromkeys(came, namespace))
        if self._cache_asked and (came or went):
            self._say_cached(came, went, cleared=False)
        for block in went:
            del self._cache_namespace[block]

    def _say_cached(self, stored: Sequence[bytes], removed: Sequence[bytes], *, cleared: bool) -> None:
        self._cache_sequence += 1
        spaces = (self._by_namespace(stored), self._by_namespace(removed))
        self.session.send(CacheEvent(self.name, self.boot, self._cache_sequence, cleared, *spaces))

    def _by_namespace(self, blocks: Sequence[bytes]) -> tuple[tuple[bytes, bytes], ...]:
        found: dict[bytes, list[bytes]] = {}
        for block in blocks:
            found.setdefault(self._cache_namespace[block], []).append(block)
        return tuple((namespace, b"".join(of_it)) for namespace, of_it in found.items())

    def _bind(self, frame: Bind) -> None:
        self.session.send(NotNow(frame.request, frame.attempt, "ended", 0, 0, 1.0))

    # ------------------------------------------------------------------------------------------------------- ingresses

    def _frame(self, link: Link, frame: object) -> None:
        if isinstance(frame, Submit):
            key = (frame.request, frame.attempt)
            self._attach(key, link)
            self._submitted(key, frame)
        elif isinstance(frame, Renew):
            for key in frame.keys:
                if key in self.streams or key in self._held or key in self.jobs:
                    self._attach(key, link)
                else:
                    self._outbox.reattach(key, link)  # it ended, and what is left of it waits for this
            self._flush()
        elif isinstance(frame, Cancel):
            self._forget((frame.request, frame.attempt))

    def _attach(self, key: Key, link: Link) -> None:
        self._outbox.attach(key, link)
        self._of_link.setdefault(link, set()).add(key)

    def _closed(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        for key in self._of_link.pop(link, ()):
            self._forget(key)

    def _forget(self, key: Key) -> None:
        """It was cancelled, or nobody is left who could read it."""
        job = self.jobs.pop(key, None)
        if job is not None:
            if key == self._running:
                self._next()
            elif key in self._waiting:
                self._waiting.remove(key)
        self.streams.pop(key, None)
        self._release(key)
        self._outbox.drop(key)
        self.pool.forget(key)

    def _release(self, key: Key) -> None:
        self._used -= self._held.pop(key, 0)

    def _hold(self, key: Key, num_tokens: int) -> int:
        pages = -(-num_tokens // TOKENS_PER_PAGE)
        self._used += pages - self._held.get(key, 0)
        self._held[key] = pages
        return pages

    def _flush(self) -> None:
        for link, frame in self._outbox.flush(lambda link: not link.closed):
            link.send(frame)

    # --------------------------------------------------------------------------------------------------------- prefill

    def _submitted(self, key: Key, submit: Submit) -> None:
        num_tokens = (len(submit.prompt_ids) + len(submit.output_ids)) // ID_BYTES
        self.jobs[key] = _Job(submit, num_tokens, self._loop.time())
        if submit.leg == "local":
            self._hold(key, num_tokens + 1)
        self._waiting.append(key)
        if self._running is None:
            self._next()

    def _next(self) -> None:
        """The head of the queue begins; at once is in this very call."""
        self._running = None
        rate = self.pool.service.prefill_tokens_per_s
        while self._waiting and self._running is None:
            key = self._waiting.popleft()
            job = self.jobs[key]
            job.started = self._loop.time()
            hashes = blocks_of(job.submit.hashes)
            if not job.submit.no_cache:
                job.cached = min(self._cache.match(hashes) * self.pool.service.block_tokens, job.num_tokens - 1)
            self._use(hashes, job.submit.namespace)
            seconds = 0.0 if rate is None else (job.num_tokens - job.cached) / rate
            job.ends = job.started + seconds
            if rate is None:
                self._computed(key, job)
            else:
                self._running = key
                self._say_progress(key, job, 0, seconds)
                self._loop.call_at(job.ends, self._service_over, key, job)

    def _service_over(self, key: Key, job: _Job) -> None:
        if self.jobs.get(key) is job and self._running == key:
            self._computed(key, job)
            self._next()

    def _say_progress(self, key: Key, job: _Job, ready: int, seconds_left: float) -> None:
        if job.submit.leg == "prefill" and job.submit.params.max_tokens > 1:
            self.session.send(Progress(*key, ready, job.num_tokens, seconds_left, True))

    def _computed(self, key: Key, job: _Job) -> None:
        """The first token of each sample goes straight to the ingress; the rest is a gen's."""
        submit, counts = job.submit, self.counts
        counts.requests += 1
        counts.prompt_tokens += job.num_tokens
        counts.cached_tokens += job.cached
        before = len(submit.output_ids) // ID_BYTES
        stamps = {"queue": job.started - job.arrived, "prefill": self._loop.time() - job.started}
        self._put(key, submit, before, before + 1, cached=job.cached, stamps=stamps)
        last = submit.params.max_tokens <= before + 1
        if submit.leg == "local":
            del self.jobs[key]
            self._decode(key, submit, before + 1)
        elif last:
            del self.jobs[key]
        else:
            self._say_progress(key, job, job.num_tokens, 0.0)
            self.pool.computed(key, self)
        if last:
            self._outbox.end(key, self._loop.time())
        self._flush()

    def handed_over(self, key: Key) -> Submit:
        """A gen has it all."""
        submit = self.jobs.pop(key).submit
        self._outbox.end(key, self._loop.time())
        return submit

    # ---------------------------------------------------------------------------------------------------------- decode

    def _decode(self, key: Key, submit: Submit, sent: int) -> None:
        if submit.params.max_tokens <= sent:
            self._release(key)
            return
        self.streams[key] = _Stream(submit, sent)
        if self._passing is None or self._passing.done():
            self._passing = asyncio.create_task(self._passes())

    async def _passes(self) -> None:
        token_s, at = self.pool.service.token_s, self._loop.time()
        while self.streams:
            if token_s:
                at = max(at + token_s, self._loop.time() - token_s)
                await asyncio.sleep(max(0.0, at - self._loop.time()))
            else:
                while any(link.buffered > FULL_LINK_BYTES for link in self._links):
                    await asyncio.sleep(HELD_BACK_S)
                await asyncio.sleep(0)
            self._pass(math.inf if token_s is None else 1)

    def _pass(self, tokens: float) -> None:
        for key, stream in list(self.streams.items()):
            end = int(min(stream.sent + tokens, stream.submit.params.max_tokens))
            self._put(key, stream.submit, stream.sent, end)
            stream.sent = end
            if end == stream.submit.params.max_tokens:
                del self.streams[key]
                self._release(key)
                self._outbox.end(key, self._loop.time())
        self._flush()

    def _put(
        self, key: Key, submit: Submit, start: int, end: int, *, cached: int = 0, stamps: dict[str, float] | None = None
    ) -> None:
        finish = "length" if end >= submit.params.max_tokens else None
        for sample in range(submit.samples):
            self.counts.output_tokens += end - start
            self._outbox.put(
                key, Delta(*key, sample, start, _output(start, end), (), finish, None, (), cached, stamps or {})
            )


def _output(start: int, end: int) -> bytes:
    first, count = start % (len(OUTPUT) // ID_BYTES), end - start
    repeats = -(-(first + count) * ID_BYTES // len(OUTPUT))
    return (OUTPUT * repeats)[first * ID_BYTES : (first + count) * ID_BYTES]


class FakeCtx(FakeWorker):
    """Computes prompts. What is computed waits until a gen has it."""


class FakeGen(FakeWorker):
    """Binds at once, decodes what was handed over."""

    def _bind(self, frame: Bind) -> None:
        key = (frame.request, frame.attempt)
        pages = self._hold(key, frame.num_tokens + 1)
        self.session.send(Bound(*key, pages))
        self.pool.bound(key, self)

    def take(self, key: Key, submit: Submit) -> None:
        self._decode(key, submit, len(submit.output_ids) // ID_BYTES + 1)


class FakePool:
    """All fakes of one process, and what of a request stands between two of them."""

    def __init__(self, secret: bytes, service: Service, *, num_ctx: int, num_gen: int) -> None:
        self.secret, self.service = secret, service
        self.compat = CompatRecord(
            PROTOCOL_VERSION, "fake", "float32", TOKENS_PER_PAGE, service.block_tokens, (), (PAGE_BYTES,), 1, ("raw",)
        )
        self.ctxs = [FakeCtx(self, "ctx", f"ctx-{i}") for i in range(num_ctx)]
        self.gens = [FakeGen(self, "gen", f"gen-{i}") for i in range(num_gen)]
        self._computed: dict[Key, FakeWorker] = {}  # at a ctx, for a gen
        self._readers: dict[Key, FakeGen] = {}

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.ctxs, *self.gens]

    async def start(self, host: str, port: int, boot: str) -> None:
        """Listen, and link to that router."""
        for worker in self.workers:
            await worker.start((host, port, boot))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()

    def reset(self) -> None:
        """Count anew. Caches stay."""
        for worker in self.workers:
            worker.counts = Counts()

    def counts(self) -> dict[str, dict[str, int]]:
        """Worker name -> what it has done since the last reset."""
        return {
            worker.name: {name: getattr(worker.counts, name) for name in Counts.__slots__} for worker in self.workers
        }

    # ------------------------------------------------------------------------------------------------ between two fakes

    def reader(self, key: Key) -> bool:
        return key in self._readers

    def computed(self, key: Key, ctx: FakeWorker) -> None:
        self._computed[key] = ctx
        self._meet(key)

    def bound(self, key: Key, gen: FakeGen) -> None:
        self._readers[key] = gen
        self._meet(key)

    def _meet(self, key: Key) -> None:
        if key in self._computed and key in self._readers:
            self._readers.pop(key).take(key, self._computed.pop(key).handed_over(key))

    def forget(self, key: Key) -> None:
        self._computed.pop(key, None)
        self._readers.pop(key, None)


# ------------------------------------------------------------------------------------------------------------- process


@dataclass(slots=True)
class _Lines:
    """JSON lines of stdin, on the event loop."""

    reader: asyncio.StreamReader = field(default_factory=asyncio.StreamReader)

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.reader), sys.stdin)

    async def next(self) -> dict[str, Any] | None:
        line = await self.reader.readline()
        return json.loads(line) if line else None


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def run(options: argparse.Namespace) -> None:
    lines = _Lines()
    await lines.open()
    if options.directory is not None:
        directory = FileDirectory(options.directory)
        secret, found = shared_secret(directory, None), directory.lookup(ROUTER)
    else:
        found = await lines.next()
        secret = b"" if found is None else found["secret"].encode()
    if found is None:
        raise SystemExit("no router to link to")
    service = Service(options.prefill_rate, options.token_s, options.cache_blocks, options.block_tokens)
    pool = FakePool(secret, service, num_ctx=options.ctx, num_gen=options.gen)
    await pool.start(found["host"], found["port"], found["boot"])
    say(ready=[worker.address for worker in pool.workers], secret=secret.decode())
    while (told := await lines.next()) is not None and told["do"] != "stop":
        if told["do"] == "reset":
            pool.reset()
        elif told["do"] == "pace":
            pool.service = replace(pool.service, token_s=told["token_s"])
        say(**pool.counts())
    await pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, help="the application's, to find the router in")
    parser.add_argument("--ctx", type=int, default=1)
    parser.add_argument("--gen", type=int, default=1)
    parser.add_argument("--prefill-rate", type=float, help="tokens/s of a ctx; default: at once")
    parser.add_argument("--token-s", type=float, help="seconds a pass of a gen; default: all tokens in one")
    parser.add_argument("--cache-blocks", type=int, default=0)
    parser.add_argument("--block-tokens", type=int, default=64)
    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
