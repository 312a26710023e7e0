"""A router, an ingress, one ctx node and one gen node in one process, over real sockets and transports.

Tests play the two loops: `prefill` fills pages with known bytes, chunk by chunk.
"""

import asyncio
import queue
import secrets
import threading
import time
from dataclasses import replace

from device_peers import new_pool
from handoff_sim import NAMESPACE, PAGE, layout

from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.manager import KvManager
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.links import Identity, dial, listen
from tailrace.transfer.loop_events import FirstToken, PrefillResult
from tailrace.transfer.messages import (
    Bind,
    CompatRecord,
    Epoch,
    GroupRecord,
    Holding,
    PeerAddress,
    Peers,
    Register,
    Submit,
    pack_ids,
)
from tailrace.transfer.node import Node
from tailrace.transfer.switchboard import NodeConfig
from tailrace.transfer.transports.in_process import Exchange, InProcessTransport
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.peer import PeerTransport
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.transports.shm import ShmTransport

SECRET = b"test secret"
GROUP = GroupRecord(
    "history", None, tuple((n, "k, v") for n in layout().group.layers), len(layout().group.fields),
    layout().group.fields[0].kv_heads, layout().group.fields[0].dim,
)  # fmt: skip
COMPAT = CompatRecord(1, "m", "float32", PAGE, PAGE, (GROUP,), (layout().bytes_per_page,), 1, ("raw",))
CORE = CoreConfig(pin_lease_s=2.0, request_lease_s=5.0, kv_transfer_timeout_s=5.0)
PAGES = 17
KEY = ("a" * 32, 0)


class Hub:
    """A router, or an ingress, as far as a node sees it: an event loop in a thread that records frames."""

    def __init__(self, role, boot):
        self.me = Identity(role, role, boot)
        self.frames = queue.Queue()
        self.links = {}
        self.kept = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.listener = None

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(5)

    def listen(self, port=0):
        async def go():
            return await listen(
                "127.0.0.1", port, self.me, SECRET, on_link=lambda link: self.links.update({link.peer.process: link}),
                on_frame=self.on_frame, on_close=lambda link, reason: self.links.pop(link.peer.process, None),
            )  # fmt: skip

        self.listener = self.call(go())
        return self.listener.port

    def dial(self, node):
        async def go():
            link = await dial(
                *node.address, self.me, SECRET, on_frame=self.on_frame, on_close=lambda link, reason: None
            )
            self.links[node.config.worker] = link

        self.call(go())

    def on_frame(self, link, frame):
        self.frames.put((link.peer.process, frame))

    def send(self, worker, *frames):
        link = self.links[worker]
        self.loop.call_soon_threadsafe(lambda: [link.send(frame) for frame in frames])

    def expect(self, kind, timeout_s=5.0):
        """The next frame of this kind; others are kept for later calls."""
        end = time.monotonic() + timeout_s
        for pair in self.kept:
            if isinstance(pair[1], kind):
                self.kept.remove(pair)
                return pair[1]
        while True:
            pair = self.frames.get(timeout=max(0.001, end - time.monotonic()))
            if isinstance(pair[1], kind):
                return pair[1]
            self.kept.append(pair)

    def forget(self):
        self.kept.clear()
        while not self.frames.empty():
            self.frames.get()

    def close(self):
        async def go():
            if self.listener is not None:
                self.listener.close()
            for link in list(self.links.values()):
                link.close()
            await asyncio.sleep(0.05)

        self.call(go())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        self.loop.close()


class Rig:
    """A router, an ingress, one ctx node and one gen node with their pages."""

    def __init__(self, kind, monkey=None, **changes):
        self.kind, self.closers, self.nodes, self.memory, self.arenas = kind, [], {}, {}, {}
        self.made = []  # every arena, also of nodes that did not start or were replaced
        self.exchange = Exchange()
        self.router, self.ingress = Hub("router", "router-1"), Hub("ingress", "ingress-1")
        self.port = self.router.listen()
        self.ctx = self.node("ctx", "c0", **changes.get("ctx", {}))
        self.gen = self.node("gen", "g0", **changes.get("gen", {}))

    def node(self, home, worker, *, faults=False, compat=COMPAT, **changes):
        boot = secrets.token_hex(4)
        if self.kind == "peer":
            arena, reader = new_pool("peer", "nodetest", worker, boot, layout(), PAGES)
        else:
            arena, reader = Arena.create(arena_name("nodetest", worker, boot), layout(), PAGES), None
        self.made.append(arena)
        kv = KvManager(layout(), PAGES, PAGE, arena.generations)
        config = NodeConfig(
            worker=worker, boot=boot, home=home, duty=home, host="127.0.0.1", secret=SECRET, compat=compat,
            max_num_tokens=64, max_request_tokens=64, core=CORE, heartbeat_s=0.05, report_s=0.1, faults=faults,
        )  # fmt: skip

        def make(wake, hook):
            if self.kind == "shm":
                return [ShmTransport(arena, wake=wake, hook=hook)]
            if self.kind == "peer":
                return [PeerTransport(arena.pool, reader, hook=hook)]
            if self.kind == "nixl":
                chunks = ChunkConfig(landing_chunks=4, staging_chunks=2, chunk_bytes=2 * layout().bytes_per_page)
                return [NixlTransport(boot, arena, chunks, wake=wake, hook=hook)]
            return [InProcessTransport(self.exchange, boot, Mapped((arena.pages,), arena.generations), hook=hook)]

        pages = [] if self.kind == "peer" else [arena.pages]  # sums are taken of host memory
        node = Node(replace(config, **changes), kv, make, pages=pages)
        node.address = node.start()
        self.nodes[worker], self.memory[worker], self.arenas[worker] = node, arena.pages, arena
        return node

    def follow(self, *nodes):
        """Let the nodes find the router and obey it."""
        for node in nodes:
            node.set_router("127.0.0.1", self.port)
            self.router.expect(Register)
            self.router.send(node.config.worker, Epoch(1, "router-1"))
            self.router.expect(Holding)

    def pair(self):
        self.router.send("g0", Peers((self.peer(self.ctx),)))
        until(lambda: self.gen.ready_pairs)

    def peer(self, node):
        return PeerAddress(node.config.worker, node.config.boot, *node.address)

    def bind(self, num_tokens, seq=1, key=KEY):
        self.router.send("g0", Bind(seq, *key, self.peer(self.ctx), num_tokens, 8, 1, b"", NAMESPACE))

    def close(self):
        for node in self.nodes.values():
            node.stop()
        self.router.close()
        self.ingress.close()
        for arena in self.made:
            arena.close()
            arena.unlink()
        self.made.clear()


def until(condition, timeout_s=5.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


def submit(num_tokens, leg="prefill", key=KEY, **changes):
    ids = pack_ids(tuple(range(num_tokens)))
    frame = Submit(
        *key, leg, ids, b"", SamplingParams(max_tokens=8), 1, b"", NAMESPACE, 0, 5.0, None, False
    )  # fmt: skip
    return replace(frame, **changes)


def event(node, kind, timeout_s=5.0):
    """The next loop event, which must be of this kind."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        node.wait(0.05)
        for found in node.poll_events():
            assert isinstance(found, kind), found
            return found
    raise AssertionError(f"no {kind.__name__}")


def prefill(rig, num_tokens, chunk=8, key=KEY):
    """Play the ctx loop: fill pages with known bytes, chunk by chunk. Returns the pages."""
    pages = rig.ctx.kv.allocate(-(-num_tokens // PAGE))
    for end in [*range(chunk, num_tokens, chunk), num_tokens]:
        rig.ctx.chunk_launched(key, end == num_tokens, 0.1)
        for ordinal in range(-(-end // PAGE)):
            rig.memory["c0"][pages[ordinal]] = (ordinal * 7 + min(end - ordinal * PAGE, PAGE)) % 251
        rig.ctx.chunk_done(key, pages, end, 0.1)
    return pages


def finish(rig, num_tokens, pages, key=KEY):
    rig.ctx.prefill_done(key, PrefillResult((FirstToken(3),), num_tokens, stamps={"prefill": 0.1}))
    rig.ctx.kv.release(pages)
