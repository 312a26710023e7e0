"""Reading device memory: gen maps the pool of a ctx on its host and a kernel of its own copies the pages it wants.

    read -> kernel launched on the reader's stream -> its event -> the generation numbers, read again -> ReadDone

The order is that of transports/reading.py: the copy is over before the numbers are looked at. The mapping outlives ctx,
so what it had published can be read, and judged, after its death; ctx's memory stays allocated until then. Nobody
writes to a peer's memory. Jobs are begun by `read` and looked after by `poll`, both in the transfer thread, and nothing
waits for the device but `probe` and `close`, both bounded. If the device does not end a read within READ_LIMIT_S the
process cannot know what is still written, and ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from tailrace.kernels.device_memory import DeviceError, Memory
from tailrace.kernels.device_reads import Reader, Ticket
from tailrace.kernels.page_read import UNITS, unit_of
from tailrace.kv_cache.arena import known_bytes
from tailrace.kv_cache.device_pool import KNOWN_BYTES, DevicePool
from tailrace.model.errors import PeerError, WorkerError
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant
from tailrace.transfer.page_list import UnitList
from tailrace.transfer.transports.base import (
    ChunkCounts,
    CopyFailed,
    LandedIn,
    PageHook,
    PostDone,
    PostJob,
    ReadDone,
    ReadJob,
)
from tailrace.transfer.transports.conversion import Conversion
from tailrace.transfer.transports.peer_mapping import PeerMapping, PoolInfo
from tailrace.transfer.transports.reading import Mapped, NotALandingTransport, all_unchanged, unchanged

log = logging.getLogger(__name__)

READ_LIMIT_S = 60.0  # of a gigabyte that takes 3 ms alone, on a device that others share
CLOSE_LIMIT_S = 10.0
SOON_S = 0.0002  # a read of a few pages ends within that
_SOON_FOR_S = 0.005  # a longer one may as well be looked for each millisecond
# Pages of one launch: few at first, so that the device begins soon, and few at last, which are judged when it is done.
_FIRST, _MOST, _LAST = 4 << 10, 64 << 10, 8 << 10

Clock = Callable[[], float]


class ReadStuck(WorkerError):
    """The device does not end a read: nobody knows what it may still write."""


class PeerTransport:
    """Reads from the device pools of peers on this host; lets peers read ours.

    Args:
        pool: our own pages, which we alone write.
        reader: copies on our device.
        hook: tests only.
        clock: monotonic seconds.
    """

    name = "peer"
    reads_survive_death = True
    units_per_grant = 0

    def __init__(
        self,
        pool: DevicePool,
        reader: Reader,
        *,
        hook: PageHook | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._pool, self._reader, self._hook, self._clock = pool, reader, hook, clock
        self._info = PoolInfo.of(pool).packed()
        self._peers: dict[str, PeerMapping] = {}
        self._jobs: dict[int, _Read] = {}
        self._done: list[ReadDone] = []
        self._ended: list[PeerMapping] = []  # of former pairs; some may not be closed yet
        self._probing = threading.Lock()  # there is room for one peer's known bytes

    # --------------------------------------------------------------------------------------------------------- pairing

    def info_for(self, boot: str) -> bytes:
        """How our memory is mapped, whoever asks."""
        return self._info

    def connect(self, boot: str, info: bytes, conversion: Conversion | None = None) -> None:
        theirs, known = PoolInfo.unpack(info), self._peers.get(boot)
        if known is not None and known.info == theirs:
            return
        if conversion is not None:
            raise PeerError("device memory is read page by page, and pages of this pair differ")
        if theirs.bytes_per_page != self._pool.bytes_per_page:
            raise PeerError(f"pages of {boot} have {theirs.bytes_per_page} bytes, ours {self._pool.bytes_per_page}")
        mapping = PeerMapping(self._pool.provider, theirs)
        self.disconnect(boot)
        self._peers[boot] = mapping

    def probe(self, boot: str) -> bool:
        """Whether the known bytes behind the peer's pages come over. A scratch page goes first, so that no request
        waits for the kernel to be compiled for pages of this size."""
        mapping = self._peers.get(boot)
        if mapping is None:
            return False
        own = self._pool
        try:
            memory = mapping.hold()
        except PeerError as error:
            log.warning("peer_not_mapped", extra={"fields": {"boot": boot, "reason": str(error)}})
            return False
        try:
            with self._probing:
                scratch, unit = np.zeros(1, np.int64), unit_of(own.bytes_per_page)
                length = own.bytes_per_page // unit
                self._reader.read(own.memory, memory, (scratch, scratch), length, length, unit)
                known = tuple(np.array([at // KNOWN_BYTES]) for at in (mapping.info.known_at, own.landing_at))
                length = KNOWN_BYTES // UNITS[0]
                self._reader.read(own.memory, memory, (known[0], known[1]), length, length, UNITS[0])
                found = self._reader.fetch(own.memory, own.landing_at, KNOWN_BYTES)
        except DeviceError as error:  # the device is busy for longer than we wait: the pair is tried again
            log.warning("peer_not_read", extra={"fields": {"boot": boot, "reason": str(error)}})
            return False
        finally:
            mapping.let_go()
        return found == known_bytes(mapping.info.arena, KNOWN_BYTES)

    def disconnect(self, boot: str) -> None:
        """The mapping is closed when the reads that run have ended."""
        mapping = self._peers.pop(boot, None)
        if mapping is None:
            return
        for read in self._jobs.values():
            if read.job.boot == boot:
                read.drop("the mapping of the peer's memory was closed")
        running = sum(read.job.boot == boot for read in self._jobs.values())
        if running:
            log.info("peer_unmapped_later", extra={"fields": {"boot": boot, "reads": running}})
        self._ended = [former for former in self._ended if not former.wait_closed(0)] + [mapping]
        mapping.let_go()

    # --------------------------------------------------------------------------------------------------------- reading

    def read(self, job: ReadJob) -> None:
        mapping = self._peers.get(job.boot)
        if mapping is None:
            self._done.append(ReadDone(job.job, job.key, (), (), f"no memory of {job.boot} is mapped"))
            return
        try:
            memory = mapping.hold()
        except PeerError as error:
            self._done.append(ReadDone(job.job, job.key, (), (), str(error)))
            return
        read = _Read(job, mapping, memory, self._pool, self._reader, self._hook, self._clock)
        self._jobs[job.job] = read
        read.advance()

    def abandon(self, boot: str, job: int) -> None:
        read = self._jobs.get(job)
        if read is not None:
            read.drop("abandoned")

    def still_valid(self, boot: str, seen: Sequence[tuple[int, int]]) -> bool:
        mapping = self._peers.get(boot)
        return mapping is not None and all_unchanged(Mapped((), mapping.generations), seen)

    def poll(self) -> list[ReadDone | PostDone | LandedIn]:
        for number, read in list(self._jobs.items()):
            if read.advance():
                del self._jobs[number]
                self._done.append(read.result())
            elif read.waits and self._clock() - read.since > READ_LIMIT_S:
                raise ReadStuck(f"a read of {len(read.job.units)} pages has not ended for {READ_LIMIT_S:g} s")
        done: list[ReadDone | PostDone | LandedIn] = list(self._done)
        self._done.clear()
        return done

    def busy(self) -> float:
        now = self._clock()
        if any(read.waits and now - read.since < _SOON_FOR_S for read in self._jobs.values()):
            return SOON_S
        return bool(self._jobs or self._done)

    def close(self) -> None:
        for boot in list(self._peers):
            self.disconnect(boot)
        end = time.monotonic() + CLOSE_LIMIT_S
        while any(read.waits for read in self._jobs.values()) and time.monotonic() < end:
            self.poll()
            time.sleep(SOON_S)
        for read in [read for read in self._jobs.values() if not read.waits]:
            read.mapping.let_go()  # held by a hook: it stays undone
        left = sum(read.waits for read in self._jobs.values())
        if left:  # the end of the process closes the mapping
            log.error("reads_unfinished", extra={"fields": {"reads": left, "limit_s": CLOSE_LIMIT_S}})
            return
        for mapping in self._ended:
            mapping.wait_closed(max(0.0, end - time.monotonic()))

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


class _Read:
    """One ReadJob under way; holds the mapping until its result.

    Attributes:
        waits: a copy of it is on the device.
        since: when it came, or its last copy was launched; seconds of the clock.
    """

    def __init__(
        self,
        job: ReadJob,
        mapping: PeerMapping,
        memory: Memory,
        own: DevicePool,
        reader: Reader,
        hook: PageHook | None,
        clock: Clock,
    ) -> None:
        self.job, self.mapping, self._clock = job, mapping, clock
        self.since = clock()
        self.waits = False
        self._memory = memory
        self._own, self._reader, self._hook = own, reader, hook
        self._units = UnitList.of(job.units)
        self._unit = unit_of(own.bytes_per_page)
        self._num_copied = 0  # of the units, in their order
        self._same: list[np.ndarray] = []  # of those judged so far: is the page's number unchanged?
        self._nbytes = 0
        self._begun = False
        self._error: str | None = None
        self._steps = self._run()

    def drop(self, error: str) -> None:
        """End it with this error if no copy has been launched yet; otherwise it goes on to its end."""
        if not self._begun:
            self._error = self._error or error

    def advance(self) -> bool:
        """Go on as far as the device and the hook let it; whether it is over, and none of its copies can write."""
        return all(self._steps)

    def result(self) -> ReadDone:
        """After `advance` has said that it is over."""
        self._judge()
        job, same = self.job, np.concatenate(self._same)
        copied = self._units.src[: self._num_copied]
        self.mapping.let_go()
        ok, stale = (copied, ()) if same.all() else (copied.take(same), copied.take(~same))
        return ReadDone(job.job, job.key, ok, stale, self._error, self._nbytes, self._nbytes)

    def _run(self) -> Iterator[bool]:
        """Yields False where it is to be asked again."""
        if self._error is None and self._hook is None:
            yield from self._copy_all()
        if self._hook is None:
            return
        yield False  # a hook is asked by polls only
        for i, (descriptor, page) in enumerate(self._units):
            try:
                while self._error is None and not self._hook(self.job.key, descriptor):
                    yield False
            except CopyFailed as error:
                self._error = str(error)
            if self._error is not None:
                return
            unit = self._units[i : i + 1]
            yield from self._until(self._launch(unit), unit)
            self._spoil(descriptor.ordinal, page)
            yield True

    def _copy_all(self) -> Iterator[bool]:
        """Each slice is prepared while the device copies those before, and judged while it copies those behind."""
        slices = [self._units[low:end] for low, end in pairwise(_bounds(len(self._units))) if low < end]
        launched = [(units, self._launch(units)) for units in slices]
        self.waits = bool(launched)
        yield False  # looked at by the next poll
        for units, ticket in launched:
            yield from self._until(ticket, units)
            self._judge()

    def _until(self, ticket: Ticket, units: UnitList) -> Iterator[bool]:
        self.waits = True
        while not ticket.done():
            yield False
        self.waits = False
        self._num_copied += len(units)

    def _judge(self) -> None:
        """Look at the numbers of what has been copied and not been judged: behind the copy."""
        done = sum(len(same) for same in self._same)
        part = self._units.src[done : self._num_copied]
        self._same.append(unchanged(Mapped((), self.mapping.generations), part.pages, part.generations))

    def _launch(self, units: UnitList) -> Ticket:
        at, to = units.src.pages, units.dst
        self._begun = True
        inside = (at > 0) & (at < self.mapping.info.num_pages)
        if not inside.all():  # a page that the peer does not have is found stale
            at, to = at[inside], to[inside]
        self.since = self._clock()
        self._nbytes += len(at) * self._own.bytes_per_page
        length = self._own.bytes_per_page // self._unit
        return self._reader.read(self._own.memory, self._memory, (at, to), length, length, self._unit)

    def _spoil(self, ordinal: int, page: int) -> None:
        """As base.spoil, of a page on the device."""
        flip = getattr(self._hook, "spoil", None)
        if flip is None:
            return
        start, nbytes = page * self._own.bytes_per_page, self._own.bytes_per_page
        before = self._reader.fetch(self._own.memory, start, nbytes)
        data = np.frombuffer(bytearray(before), np.uint8)
        flip("unpacked", ordinal, data)
        if data.tobytes() != before:
            self._reader.store(self._own.memory, start, data)


def _bounds(n: int) -> list[int]:
    """Where the slices of n pages begin, and the end of the last."""
    if n <= _FIRST + _LAST:
        return [0, n]
    return [0, *range(_FIRST, n - _LAST, _MOST), n - _LAST, n]
