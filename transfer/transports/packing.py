"""The two copies of a landing transport: pages into a staging chunk at ctx, a landed chunk into pages at gen.

Both run in a helper thread and end only when their copy has returned. Pages of a pair that are alike are copied whole,
the fast way; others go through the pair's Conversion. Know no NIXL; who may use a chunk when is decided by landing.py
and the transport.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from tailrace.model.errors import PeerError
from tailrace.transfer.messages import Landed, PageDescriptor
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports.base import CopyFailed, PageHook, PostJob, ReadDone, ReadJob, spoil
from tailrace.transfer.transports.conversion import CodecUse, Conversion, Ranks
from tailrace.transfer.transports.copying import Job, gather, scatter
from tailrace.transfer.transports.landing import HEADER_BYTES, Checksum, is_sound, seal
from tailrace.transfer.transports.reading import Mapped, unchanged

DIRECT_PAGE_BYTES = 256 << 10  # from here on a piece of a write costs less than the copy that would save it
_SLICE_BYTES = 1 << 20  # packed, then summed while a core's cache holds it
_PIECE_BYTES = 1 << 20  # of a write: UCX sends pieces of this size a tenth faster than one of several MiB


def may_go_directly(own: Mapped, hook: PageHook | None, conversion: Conversion | None) -> bool:
    """Whether pages are so big, and cross as they are, that a write should read them where they stand."""
    alike = hook is None and conversion is None and len(own.pages) == 1
    return alike and own.pages[0].shape[1] >= DIRECT_PAGE_BYTES


def _pieces(data: np.ndarray) -> list[np.ndarray]:
    return [data[low : low + _PIECE_BYTES] for low in range(0, len(data), _PIECE_BYTES)]


class PackJob(Job["PackJob"]):
    """Pages into a staging chunk; then their generation numbers, because one that changed was packed too late.

    With `direct` they are not copied: the write reads them where they stand, so their numbers are to be looked at again
    when it is done (`is_unchanged`), before anybody is told of it.

    Attributes:
        direct: the pages stay in their places; only the header is in the staging chunk.
        sources: what the write reads, one after the other.
        nbytes: that the packed pages take; known when the job has ended.
        landed: what the chunk's notification will say; None if it must not be posted, and `error` says why.
        cancelled: set by the transfer thread: nobody will post it.
        use: what the pair's codec did.
    """

    def __init__(
        self,
        job: PostJob,
        slot: int,
        chunk: np.ndarray,
        own: Mapped,
        hook: PageHook | None,
        conversion: Conversion | None = None,
        *,
        direct: bool = False,
    ) -> None:
        self.job, self.slot = job, slot
        self.nbytes = 0
        self.landed: Landed | None = None
        self.error: str | None = None
        self.stale = False
        self.cancelled = False
        self.use = CodecUse()
        self.direct = direct
        self.sources: list[np.ndarray] = []
        self._pages = PageList.of(job.pages)
        self._chunk, self._own, self._hook, self._conversion = chunk, own, hook, conversion

    def is_unchanged(self) -> bool:
        """Whether every page still has the generation that was announced."""
        return bool(unchanged(self._own, self._pages.pages, self._pages.generations).all())

    def steps(self) -> Iterator[bool]:
        pages, hook = self._pages, self._hook
        for descriptor in pages if hook is not None else ():
            try:
                while hook is not None and not hook(self.job.key, descriptor):
                    yield False
            except CopyFailed as error:
                self.error = str(error)
                return
        if self.cancelled:
            return
        checksum = Checksum(pages)
        if not self.direct:
            self._pack(checksum)
        elif self.is_unchanged():  # else a number may be out of range
            self._sum(checksum)
        if not self.is_unchanged():
            self.stale, self.error = True, "a page was used anew before it was packed"
        elif not self.cancelled:
            self.landed = seal(self._chunk, self.job.key, self.job.grant, pages, self.nbytes, checksum.value)
            for place, descriptor in enumerate(pages if hook is not None else ()):
                size = self.nbytes // len(pages)
                packed = self._chunk[HEADER_BYTES + place * size : HEADER_BYTES + (place + 1) * size]
                spoil(hook, "staging", descriptor.ordinal, packed)

    def _pack(self, checksum: Checksum) -> None:
        numbers, room = self._pages.pages, self._chunk[HEADER_BYTES:]
        if self._conversion is not None:
            self.nbytes = self._conversion.pack(self._own.pages, numbers, room, self.use)
            checksum.feed(room[: self.nbytes])
            self.sources = _pieces(self._chunk[: HEADER_BYTES + self.nbytes])
            return
        (own,) = self._own.pages
        page_bytes = own.shape[1]
        self.nbytes = len(numbers) * page_bytes
        into = room[: self.nbytes].reshape(-1, page_bytes)
        step = max(1, _SLICE_BYTES // page_bytes)
        for low in range(0, len(numbers), step):
            part = into[low : low + step]
            gather(part, own, numbers[low : low + step])
            checksum.feed(part)
        self.sources = _pieces(self._chunk[: HEADER_BYTES + self.nbytes])

    def _sum(self, checksum: Checksum) -> None:
        """The pages where they stand, neighbours as one piece."""
        (own,) = self._own.pages
        numbers = self._pages.pages
        self.nbytes = len(numbers) * own.shape[1]
        starts = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        pieces = [own[numbers[low] : numbers[low] + high - low] for low, high in itertools.pairwise(starts)]
        for piece in pieces:
            checksum.feed(piece)
        self.sources = [self._chunk[:HEADER_BYTES], *(part for piece in pieces for part in _pieces(piece.reshape(-1)))]

    def result(self) -> PackJob:
        return self


class UnpackJob(Job[ReadDone]):
    """What landed into our pages, after the check that it is what was announced."""

    def __init__(
        self,
        job: ReadJob,
        landed: Landed,
        chunk: np.ndarray,
        own: Ranks,
        hook: PageHook | None,
        conversion: Conversion | None = None,
    ) -> None:
        self.job, self.landed = job, landed
        self.abandoned = False
        self._chunk, self._own, self._hook, self._conversion = chunk, own, hook, conversion
        self._units = UnitList.of(job.units)
        self._num_ok = 0
        self._use = CodecUse()
        self._error: str | None = None

    def steps(self) -> Iterator[bool]:
        if self.abandoned:
            self._error = "abandoned"
            return
        places = self._places()
        if places is None or not self._fits() or not is_sound(self._chunk, self.landed):
            self._error = "corrupt"
            return
        data = self._chunk[HEADER_BYTES : HEADER_BYTES + self.landed.nbytes]
        if self._hook is None:
            self._unpack(data, self._units, places)
            return
        for i, (descriptor, page) in enumerate(self._units):
            try:
                while not self._hook(self.job.key, descriptor):
                    yield False
            except CopyFailed as error:
                self._error = str(error)
                return
            self._unpack(data, self._units[i : i + 1], places[i : i + 1])
            spoil(self._hook, "unpacked", descriptor.ordinal, self._own[0][page])

    def _fits(self) -> bool:
        nbytes, num_pages = self.landed.nbytes, len(self.landed.pages)
        if self._conversion is not None:
            return self._conversion.may_have(nbytes, num_pages)
        return nbytes == num_pages * self._own[0].shape[1]

    def _unpack(self, data: np.ndarray, units: UnitList, places: np.ndarray) -> None:
        if self._conversion is None:
            (own,) = self._own
            rows = data.reshape(-1, own.shape[1])
            scatter(own, units.dst, rows if len(places) == len(rows) else rows[places])
        else:
            assert self.job.into is not None
            try:
                self._conversion.unpack(data, self._own, places.tolist(), units, self.job.into, self._use)
            except PeerError:
                self._error = "corrupt"
                return
        self._num_ok += len(units)

    def _places(self) -> np.ndarray | None:
        """[n] int64: where in the chunk each wanted page stands, rising; None if one does not."""
        wanted, pages = self._units.src, PageList.of(self.landed.pages)
        if wanted == pages:
            return np.arange(len(pages))
        where: dict[PageDescriptor, int] = {page: i for i, page in enumerate(pages)}
        places = np.fromiter((where.get(descriptor, -1) for descriptor in wanted), np.int64, len(wanted))
        return None if (places < 0).any() or (np.diff(places) <= 0).any() else places

    def result(self) -> ReadDone:
        done = self._units.src[: self._num_ok]
        wire = worth = self.landed.nbytes if done else 0
        if self._conversion is not None and self.job.into is not None:
            worth = self._conversion.logical_bytes(self._units[: self._num_ok], self.job.into)
        use = self._use
        return ReadDone(
            self.job.job, self.job.key, done, (), self._error, wire, worth, use.codec, use.seconds, use.step
        )
