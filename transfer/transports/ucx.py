"""UCX between hosts: ctx packs pages and sends them as one message, gen takes it and unpacks.

    gen   grants -> Want                            [UCX: receive] -> LandedIn -> read -> [helper: check, unpack]
    ctx   post -> [helper: pack, look at generations, seal] -> [UCX: send] -> PostDone

The receiver places what comes, into memory that it makes for each message, and gen's helper copies from there into
gen's pages. So a landing chunk is no memory, only the right to send one message of a bounded size under a sequence
number that is never used again. Nothing that a peer sends late, or twice, or after its death was noticed, can touch a
page or another peer's message: it is dropped by its number. A pair has a UCX worker of its own at each side
(ucx_thread.py): a peer that dies, stalls or breaks is ended by closing it, and other pairs go on. If a peer is stopped
its messages wait in the kernel's sockets, and come when it goes on, or never.

UCX listens on ports of its own, on all addresses of the host, and does not prove who dials: it trusts the cluster
network. A message is taken only with its pair's tag and token, which cross on the authenticated link alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tailrace.kv_cache.arena import Arena, ArenaGroup
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant
from tailrace.transfer.transports.base import (
    ChunkCounts,
    LandedIn,
    PageHook,
    PostDone,
    PostJob,
    ReadDone,
    ReadJob,
    Wake,
)
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.copying import Helper
from tailrace.transfer.transports.nixl import ChunkConfig
from tailrace.transfer.transports.packing import PackJob
from tailrace.transfer.transports.reading import Mapped
from tailrace.transfer.transports.ucx_receive import LandingSide, Target
from tailrace.transfer.transports.ucx_send import PostingSide
from tailrace.transfer.transports.ucx_thread import Arrived, Sent, UcxThread


class UcxTransport:
    """Both sides of every ucx pair of a worker.

    Args:
        host: the address under which peers reach this one.
        arena: our pages, or those of all our ranks, which we alone write.
        chunks: messages that may be out at once, and memory to pack into; allocated when the first pair needs it.
        wake: called when `poll` has something new.
        hook: tests only.

    Raises:
        ConfigError: ucxx is not installed.
    """

    name = "ucx"
    reads_survive_death = False

    def __init__(
        self,
        host: str,
        arena: Arena | ArenaGroup,
        chunks: ChunkConfig | None = None,
        *,
        wake: Wake | None = None,
        hook: PageHook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        chunks = chunks or ChunkConfig()
        ranks = arena if isinstance(arena, ArenaGroup) else ArenaGroup([arena])
        own, page_bytes = Mapped(ranks.pages, ranks.generations), sum(ranks.bytes_per_page)
        per_chunk, room = chunks.pages_per_chunk(page_bytes), chunks.staging_room(page_bytes)
        self.units_per_grant = per_chunk
        self._clock = clock
        self._thread = UcxThread(wake)
        self._helper: Helper[ReadDone | PackJob] = Helper("ucx-pack", wake)
        self._gen = LandingSide(self._thread, host, own.pages, chunks.landing_chunks, per_chunk, self._helper, hook)
        self._ctx = PostingSide(self._thread, own, chunks.staging_chunks, room, self._helper, hook)

    @property
    def stale_notifications(self) -> int:
        """Messages that named no chunk granted to their sender, or had no token; dropped."""
        return self._gen.stale_messages

    @property
    def corrupt_chunks(self) -> int:
        return self._gen.corrupt_chunks

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str) -> bytes:
        return self._gen.info_for(boot, self._clock())

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        target = Target.decode(info)
        self._gen.connect(boot, conversion)
        if target is not None:
            self._ctx.connect(boot, target, info, conversion)

    def units_in_grant(self, boot: str) -> int:
        return self._gen.units_in_grant(boot)

    def probe(self, boot: str) -> bool:
        """Blocks for at most 5 s while the transfer thread polls: call it from another thread."""
        return self._gen.probe(boot)

    def disconnect(self, boot: str) -> None:
        self._gen.disconnect(boot)
        self._ctx.disconnect(boot)

    # ------------------------------------------------------------------------------------------------------------- gen

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        return self._gen.grants(key, boot, n)

    def read(self, job: ReadJob) -> None:
        self._gen.read(job)

    def abandon(self, boot: str, job: int) -> None:
        self._gen.abandon(job)

    def drop_landed(self, boot: str, landed: Landed) -> None:
        self._gen.drop(landed)

    def reclaim(self, key: Key, boot: str) -> None:
        self._gen.reclaim(key, boot)

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        """The memory of a dead peer cannot be seen from another host."""
        return False

    # ------------------------------------------------------------------------------------------------------------- ctx

    def post(self, job: PostJob) -> None:
        self._ctx.post(job)

    # ------------------------------------------------------------------------------------------------------------ both

    def poll(self) -> list[ReadDone | PostDone | LandedIn]:
        events: list[ReadDone | PostDone | LandedIn] = []
        for result in self._helper.drain():
            if isinstance(result, PackJob):
                self._ctx.packed(result)
            else:
                events.append(self._gen.unpacked(result))
        for event in self._thread.drain():
            if isinstance(event, Arrived):
                landed = self._gen.arrived(event)
                events += [landed] if landed is not None else []
            elif isinstance(event, Sent):
                self._ctx.sent(event)
            else:
                self._gen.ended(event)
                self._ctx.ended(event)
        events += self._gen.poll()
        events += self._ctx.poll()
        return events

    def busy(self) -> bool:
        return self._gen.busy(self._clock()) or self._ctx.busy()

    def counts(self) -> ChunkCounts:
        return self._gen.book.counts()

    def check(self) -> None:
        """Raises LedgerError if the law of the landing chunks is broken."""
        self._gen.book.check()

    def close(self) -> None:
        self._gen.close()
        self._ctx.close()
        self._thread.close()
        self._helper.close()
