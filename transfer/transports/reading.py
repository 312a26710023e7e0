"""What the reading transports share: jobs that copy a peer's pages into ours and then look at its generation numbers.

The order is the whole safety argument: copy first, then read the generation numbers. The owner raises a number before
the page can be written again, so an unchanged number means that nothing was written before the copy was over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import numpy as np

from tailrace.model.errors import PeerError, WorkerError
from tailrace.transfer.page_list import UnitList
from tailrace.transfer.transports.base import CopyFailed, PageHook, ReadDone, ReadJob, spoil
from tailrace.transfer.transports.conversion import CodecUse, Conversion, Ranks
from tailrace.transfer.transports.copying import Job, SplitCopier


class NotALandingTransport(WorkerError):
    """A landing job was given to a transport that reads."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A worker's pages, [num_pages, bytes_per_page] uint8 a rank, and their generation numbers [num_pages] uint64.

    Keeps a peer's memory mapped.
    """

    pages: tuple[np.ndarray, ...]
    generations: np.ndarray


def unchanged(memory: Mapped, pages: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """[n] bool: whether each page [n] int64 still has its generation [n] uint64; one out of range has not."""
    inside = (pages > 0) & (pages < len(memory.generations))
    if inside.all():
        return memory.generations[pages] == generations
    return inside & (memory.generations[np.where(inside, pages, 0)] == generations)


def all_unchanged(memory: Mapped, seen: Sequence[tuple[int, int]]) -> bool:
    """Whether every (page, generation) still stands."""
    pages = np.array([page for page, _ in seen], np.int64)
    return bool(unchanged(memory, pages, np.array([generation for _, generation in seen], np.uint64)).all())


def check_alike(boot: str, theirs: Ranks, ours: Ranks, conversion: Conversion | None) -> None:
    """Raises PeerError unless a peer's pages are what the pair was made for: like ours, or as its conversion says."""
    have = [pages.shape[1] for pages in theirs]
    if conversion is None:
        due = [pages.shape[1] for pages in ours]
        if have != due or len(have) != 1:
            raise PeerError(f"pages of {boot} have {_sizes(have)} bytes, ours {_sizes(due)}")
    elif have != (due := [conversion.source.rank_page_bytes] * conversion.source.tp):
        raise PeerError(f"pages of {boot} have {_sizes(have)} bytes, by what it said {_sizes(due)}")


def _sizes(numbers: Sequence[int]) -> str:
    return " + ".join(str(number) for number in numbers)


class CopyJob(Job[ReadDone]):
    """One ReadJob under way. `source` is None once its peer was disconnected before it began."""

    def __init__(
        self,
        job: ReadJob,
        source: Mapped,
        own: Ranks,
        copier: SplitCopier,
        hook: PageHook | None,
        conversion: Conversion | None = None,
    ) -> None:
        self.job = job
        self._source: Mapped | None = source
        self._own, self._copier, self._hook, self._conversion = own, copier, hook, conversion
        self._nbytes = (0, 0)  # read of the peer's memory, and what it is worth in our pages
        self._use = CodecUse()
        self._lock = threading.Lock()
        self._begun = False
        self._units = UnitList.of(job.units)
        self._num_copied = 0  # of the units, in their order
        self._error: str | None = None

    def drop(self, error: str) -> None:
        """End it with this error if no page has been copied yet; otherwise it goes on to its end."""
        with self._lock:
            if not self._begun:
                self._source, self._error = None, self._error or error

    def steps(self) -> Iterator[bool]:
        if self._hook is None:
            if self._begin():
                self._copy(self._units)
            return
        for i, (descriptor, page) in enumerate(self._units):
            try:
                while not self._hook(self.job.key, descriptor):
                    if self._error is not None:
                        return
                    yield False
            except CopyFailed as error:
                self._error = str(error)
                return
            if not self._begin():
                return
            self._copy(self._units[i : i + 1])
            spoil(self._hook, "unpacked", descriptor.ordinal, self._own[0][page])
            yield True

    def result(self) -> ReadDone:
        job, source = self.job, self._source
        if source is None:
            return ReadDone(job.job, job.key, (), (), self._error)
        copied = self._units.src[: self._num_copied]
        same = unchanged(source, copied.pages, copied.generations)
        ok, stale = (copied, ()) if same.all() else (copied.take(same), copied.take(~same))
        return ReadDone(job.job, job.key, ok, stale, self._error, *self._nbytes, *astuple(self._use))

    def _begin(self) -> bool:
        with self._lock:
            self._begun = self._begun or self._source is not None
            return self._begun

    def _copy(self, units: UnitList) -> None:
        source = self._source
        if source is None or not units:
            return
        if self._conversion is not None:
            assert self.job.into is not None
            read = self._conversion.copy(source.pages, self._own, units, self.job.into, self._use)
            worth = self._conversion.logical_bytes(units, self.job.into)
        else:
            (theirs,), (ours,) = source.pages, self._own
            to, at = units.dst, units.src.pages
            inside = (at > 0) & (at < len(theirs))
            if not inside.all():  # a page that the peer does not have is found stale
                to, at = to[inside], at[inside]
            self._copier.copy(ours, to, theirs, at)
            read = worth = len(to) * ours.shape[1]
        self._nbytes = (self._nbytes[0] + read, self._nbytes[1] + worth)
        self._num_copied += len(units)
