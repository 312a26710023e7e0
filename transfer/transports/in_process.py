"""The test double: both workers live in one process, and copies happen where the test can see and stop them.

No threads: jobs wait in a list, and each `poll` copies the next pages of each job, so a test decides how far a transfer
gets. Peers find each other in an Exchange; taking one out of it is its death.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tailrace.model.errors import PeerError
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
)
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.copying import SplitCopier
from tailrace.transfer.transports.reading import CopyJob, Mapped, NotALandingTransport, all_unchanged, check_alike


class Exchange:
    """The memories of every worker of this process, by boot id."""

    def __init__(self) -> None:
        self.memories: dict[str, Mapped] = {}


class InProcessTransport:
    """Reads from other workers of the same process.

    Args:
        exchange: where this worker is found by the others from now on.
        boot: our boot id.
        memory: our pages and generation numbers.
        hook: as in base.PageHook; asked in `poll`.
        pages_per_poll: with a hook, how many steps each job makes a poll; None for as many as the hook lets it.
        shuffle: ends of jobs are reported in an order it draws; None for the order of their starts.
        reads_survive_death: whether a worker taken out of the exchange can still be read.
    """

    name = "in_process"
    units_per_grant = 0

    def __init__(
        self,
        exchange: Exchange,
        boot: str,
        memory: Mapped,
        *,
        hook: PageHook | None = None,
        pages_per_poll: int | None = None,
        shuffle: random.Random | None = None,
        reads_survive_death: bool = True,
    ) -> None:
        self.reads_survive_death = reads_survive_death
        self.hook = hook
        self.pages_per_poll = pages_per_poll
        self._exchange, self._boot, self._memory, self._shuffle = exchange, boot, memory, shuffle
        self._peers: dict[str, tuple[Mapped, Conversion | None]] = {}
        self._running: dict[int, _Running] = {}
        self._done: list[ReadDone] = []
        self._copier = SplitCopier("in-process", threads=1)
        exchange.memories[boot] = memory

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str) -> bytes:
        return self._boot.encode()

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        memory = self._exchange.memories.get(info.decode(errors="replace"))
        if memory is None:
            raise PeerError(f"worker {info!r} is not in this process")
        check_alike(boot, memory.pages, self._memory.pages, conversion)
        self._peers[boot] = (memory, conversion)

    def probe(self, boot: str) -> bool:
        return self._reachable(boot) is not None

    def disconnect(self, boot: str) -> None:
        self._peers.pop(boot, None)
        for running in self._running.values():
            if running.copy.job.boot == boot:
                running.copy.drop("the peer was disconnected")

    # --------------------------------------------------------------------------------------------------------- reading

    def read(self, job: ReadJob) -> None:
        memory = self._reachable(job.boot)
        if memory is None:
            self._done.append(ReadDone(job.job, job.key, (), (), f"worker {job.boot} cannot be read"))
            return
        conversion = self._peers[job.boot][1]
        copy = CopyJob(job, memory, self._memory.pages, self._copier, self.hook, conversion)
        self._running[job.job] = _Running(copy)

    def abandon(self, boot: str, job: int) -> None:
        running = self._running.get(job)
        if running is not None:
            running.copy.drop("abandoned")

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        memory = self._reachable(boot)
        return memory is not None and all_unchanged(memory, seen)

    def poll(self) -> list[ReadDone | PostDone | LandedIn]:
        for job, running in list(self._running.items()):
            if running.advance(self.pages_per_poll):
                del self._running[job]
                self._done.append(running.copy.result())
        done: list[ReadDone | PostDone | LandedIn] = list(self._done)
        self._done.clear()
        if self._shuffle is not None:
            self._shuffle.shuffle(done)
        return done

    def busy(self) -> bool:
        return bool(self._running or self._done)

    def close(self) -> None:
        """Also the worker's death, as far as others can tell."""
        self._exchange.memories.pop(self._boot, None)

    def _reachable(self, boot: str) -> Mapped | None:
        memory, _ = self._peers.get(boot, (None, None))
        alive = any(other is memory for other in self._exchange.memories.values())
        return memory if alive or self.reads_survive_death else None

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


class _Running:
    def __init__(self, copy: CopyJob) -> None:
        self.copy = copy
        self._steps = copy.steps()

    def advance(self, pages: int | None) -> bool:
        """Copy at most this many pages; True when the job is over."""
        return all(went_on and made != pages for made, went_on in enumerate(self._steps, start=1))
