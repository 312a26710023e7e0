"""Reading over shared memory: gen maps the arenas of a ctx on its host read-only and copies page to page.

The mapping outlives ctx: what it had published can be read, and judged by its generation numbers, after its death.
Copies run in helper threads. Nobody writes to a peer's memory, so there is nothing to wait for but our own copies.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence

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
from tailrace.transfer.transports.conversion import Conversion, PairConversions
from tailrace.transfer.transports.copying import Helper, SplitCopier
from tailrace.transfer.transports.reading import CopyJob, Mapped, NotALandingTransport, all_unchanged, check_alike

log = logging.getLogger(__name__)

_BETWEEN_NAMES = "/"  # stands in no file's name


class ShmTransport:
    """Reads from the arenas of peers on this host; lets peers read ours.

    Args:
        arena: our own, or those of all our ranks, which we alone write.
        wake: called when `poll` has something new.
        hook: tests only.
        threads: helper threads that a big job may use, 1 or 2.
    """

    name = "shm"
    reads_survive_death = True
    units_per_grant = 0

    def __init__(
        self, arena: Arena | ArenaGroup, *, wake: Wake | None = None, hook: PageHook | None = None, threads: int = 2
    ) -> None:
        self._own = arena if isinstance(arena, ArenaGroup) else ArenaGroup([arena])
        self._hook = hook
        self._peers: dict[str, ArenaGroup] = {}
        self._conversions = PairConversions()
        self._jobs: dict[int, CopyJob] = {}
        self._done: list[ReadDone] = []
        self._copier = SplitCopier("shm-copy", threads)
        self._helper: Helper[ReadDone] = Helper("shm-copy-1", wake)

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str) -> bytes:
        """The names of our ranks' arenas, whoever asks."""
        return _BETWEEN_NAMES.join(self._own.names).encode()

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        names = tuple(info.decode(errors="replace").split(_BETWEEN_NAMES))
        known = self._peers.get(boot)
        if known is not None and known.names == names:
            return
        peer = ArenaGroup.open_read_only(names)
        check_alike(boot, peer.pages, self._own.pages, conversion)
        self.disconnect(boot)
        self._peers[boot] = peer
        self._conversions.put(boot, conversion)
        nbytes = sum(pages.nbytes for pages in peer.pages)
        log.info("arena_mapped", extra={"fields": {"boot": boot, "arenas": names, "bytes": nbytes}})

    def probe(self, boot: str) -> bool:
        """Whether the known bytes are seen; touches every page, so that no read pays for page faults."""
        peer = self._peers.get(boot)
        if peer is None or not peer.is_readable():
            return False
        for pages in peer.pages:
            pages.reshape(-1)[:: mmap.PAGESIZE].max()
        return True

    def disconnect(self, boot: str) -> None:
        peer = self._peers.pop(boot, None)
        if peer is None:
            return
        for copy in self._jobs.values():
            if copy.job.boot == boot:
                copy.drop("the mapping of the peer's memory was closed")
        peer.close()  # running copies keep what they read from mapped
        self._conversions.end(boot)

    # --------------------------------------------------------------------------------------------------------- reading

    def read(self, job: ReadJob) -> None:
        peer = self._peers.get(job.boot)
        if peer is None:
            self._done.append(ReadDone(job.job, job.key, (), (), f"no memory of {job.boot} is mapped"))
            return
        source = Mapped(peer.pages, peer.generations)
        copy = CopyJob(job, source, self._own.pages, self._copier, self._hook, self._conversions.get(job.boot))
        self._jobs[job.job] = copy
        self._helper.submit(copy)

    def abandon(self, boot: str, job: int) -> None:
        copy = self._jobs.get(job)
        if copy is not None:
            copy.drop("abandoned")

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        peer = self._peers.get(boot)
        return peer is not None and all_unchanged(Mapped(peer.pages, peer.generations), seen)

    def poll(self) -> list[ReadDone | PostDone | LandedIn]:
        done: list[ReadDone | PostDone | LandedIn] = [*self._helper.drain(), *self._done]
        self._done = []
        for event in done:
            if isinstance(event, ReadDone):
                self._jobs.pop(event.job, None)
        return done

    def busy(self) -> bool:
        return bool(self._jobs or self._done)

    def close(self) -> None:
        for boot in list(self._peers):
            self.disconnect(boot)
        self._helper.close()
        self._copier.close()

    # -------------------------------------------------------------------------------------------- landing: not our kind

    def units_in_grant(self, boot: str) -> int:
        return 0

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        return ()

    def drop_landed(self, boot: str, landed: Landed) -> None:
        raise NotALandingTransport(self.name)

    def reclaim(self, key: Key, boot: str) -> None:
        """Nothing was ever granted."""

    def post(self, job: PostJob) -> None:
        raise NotALandingTransport(self.name)

    def counts(self) -> ChunkCounts:
        return ChunkCounts()
