"""NIXL over UCX in host memory: ctx packs pages and writes them into landing chunks that gen granted, gen unpacks.

    gen   grants -> Want                                        LandedIn -> read -> [helper: check, unpack] -> ReadDone
    ctx   post -> [helper: pack, look at generations, seal] -> write with notification -> done -> PostDone

Nobody but gen writes gen's pages, and no chunk is used again before the table of landing.py says so. The transfer
thread posts and polls; one helper thread packs and unpacks beside it. A pair has an agent at each side
(nixl_agents.py): a peer that dies, stalls or breaks is ended by destroying it, and other pairs go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.kv_cache.arena import Arena, ArenaGroup
from tailrace.model.errors import ConfigError
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
from tailrace.transfer.transports.landing import CODED_PAGE_EXTRA
from tailrace.transfer.transports.nixl_agents import check_installed
from tailrace.transfer.transports.nixl_receive import LandingSide, Target
from tailrace.transfer.transports.nixl_send import PostingSide
from tailrace.transfer.transports.packing import PackJob
from tailrace.transfer.transports.reading import Mapped

_ALIGN = 4096
_HOT_S, _COLD_S = 0.0002, 0.001  # between two polls: while something came within the last _WARM_S, and later
_WARM_S = 0.003


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Memory that transfers use beside the pools.

    Attributes:
        landing_chunks: chunks that peers write into; 0 for a worker that never reads.
        staging_chunks: chunks that we pack into; 0 for a worker that is never read.
        chunk_bytes: a chunk takes as many whole pages as fit into this, but at least one. Each costs both sides about
            half a millisecond beside its bytes, and the first and the last of a transfer are not overlapped.
    """

    landing_chunks: int = 8
    staging_chunks: int = 4
    chunk_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if self.landing_chunks < 0 or self.staging_chunks < 0 or self.chunk_bytes < 1:
            raise ConfigError(f"numbers and bytes of chunks cannot be negative: {self}")

    def pages_per_chunk(self, bytes_per_page: int) -> int:
        return max(1, self.chunk_bytes // bytes_per_page)

    def staging_room(self, bytes_per_page: int) -> int:
        """Bytes of pages that a staging chunk takes: no fewer than a chunk of a peer with other pages grants."""
        return -(-max(self.chunk_bytes, bytes_per_page + CODED_PAGE_EXTRA) // _ALIGN) * _ALIGN


class NixlTransport:
    """Both sides of every nixl pair of a worker.

    Args:
        boot: our boot id.
        arena: our pages, or those of all our ranks, which we alone write.
        chunks: memory beside it; allocated when the first pair needs it.
        wake: called when `poll` has something new.
        hook: tests only.

    Raises:
        ConfigError: NIXL is not installed, or UCX is set up so that a stopped peer could write into re-used memory.
    """

    name = "nixl"
    reads_survive_death = False

    def __init__(
        self,
        boot: str,
        arena: Arena | ArenaGroup,
        chunks: ChunkConfig | None = None,
        *,
        wake: Wake | None = None,
        hook: PageHook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_installed()
        chunks = chunks or ChunkConfig()
        ranks = arena if isinstance(arena, ArenaGroup) else ArenaGroup([arena])
        own, page_bytes = Mapped(ranks.pages, ranks.generations), sum(ranks.bytes_per_page)
        per_chunk, room = chunks.pages_per_chunk(page_bytes), chunks.staging_room(page_bytes)
        self.units_per_grant = per_chunk
        self._clock = clock
        self._moved_at = float("-inf")
        self._helper: Helper[ReadDone | PackJob] = Helper("nixl-pack", wake)
        self._gen = LandingSide(boot, own.pages, chunks.landing_chunks, per_chunk, self._helper, hook)
        self._ctx = PostingSide(boot, own, chunks.staging_chunks, room, self._helper, hook)

    @property
    def stale_notifications(self) -> int:
        """Notifications that named no chunk granted to their sender; dropped."""
        return self._gen.stale_notifications

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
        return self._gen.book.grant(key, boot, n, self._gen.units_in_grant(boot))

    def read(self, job: ReadJob) -> None:
        self._gen.read(job)

    def abandon(self, boot: str, job: int) -> None:
        self._gen.abandon(job)

    def drop_landed(self, boot: str, landed: Landed) -> None:
        self._gen.book.drop(landed)

    def reclaim(self, key: Key, boot: str) -> None:
        self._gen.book.reclaim(key, boot)

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        """The memory of a dead peer cannot be seen from another host."""
        return False

    # ------------------------------------------------------------------------------------------------------------- ctx

    def post(self, job: PostJob) -> None:
        self._ctx.post(job)

    # ------------------------------------------------------------------------------------------------------------ both

    def poll(self) -> list[ReadDone | PostDone | LandedIn]:
        events: list[ReadDone | PostDone | LandedIn] = []
        results = self._helper.drain()
        for result in results:
            if isinstance(result, PackJob):
                self._ctx.packed(result, self._clock())
            else:
                events.append(self._gen.unpacked(result))
        events += self._gen.poll()
        events += self._ctx.poll(self._clock())
        if results or events:
            self._moved_at = self._clock()
        return events

    def busy(self) -> float:
        """Soon again while bytes move: nobody else moves them on, and the peer waits for what has arrived."""
        now = self._clock()
        if not self._gen.busy(now) and not self._ctx.busy(now):
            return 0.0
        return _HOT_S if now - self._moved_at < _WARM_S else _COLD_S

    def counts(self) -> ChunkCounts:
        return self._gen.book.counts()

    def check(self) -> None:
        """Raises LedgerError if the law of the landing chunks is broken."""
        self._gen.book.check()

    def close(self) -> None:
        self._gen.close()
        self._ctx.close()
        self._helper.close()
