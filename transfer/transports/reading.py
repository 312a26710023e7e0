"""What the reading transports share: jobs that copy a peer's pages into ours and then look at its generation numbers.

The order is the whole safety argument: copy first, then read the generation numbers. The owner raises a number before
the page can be written again, so an unchanged number means that nothing was written before the copy was over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.model.errors import WorkerError
from tailrace.transfer.messages import PageDescriptor
from tailrace.transfer.transports.base import CopyFailed, PageHook, ReadDone, ReadJob
from tailrace.transfer.transports.copying import Job, SplitCopier


class NotALandingTransport(WorkerError):
    """A landing job was given to a transport that reads."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A peer's pages [num_pages, bytes_per_page] uint8 and generation numbers [num_pages] uint64; keeps them mapped."""

    pages: np.ndarray
    generations: np.ndarray


def unchanged(memory: Mapped, pages: np.ndarray, generations: np.ndarray) -> np.ndarray:
    """[n] bool: whether each page [n] int64 still has its generation [n] uint64; one out of range has not."""
    inside = (pages > 0) & (pages < len(memory.generations))
    return inside & (memory.generations[np.where(inside, pages, 0)] == generations)


def all_unchanged(memory: Mapped, seen: Sequence[tuple[int, int]]) -> bool:
    """Whether every (page, generation) still stands."""
    pages = np.array([page for page, _ in seen], np.int64)
    return bool(unchanged(memory, pages, np.array([generation for _, generation in seen], np.uint64)).all())


def numbers(descriptors: Sequence[PageDescriptor]) -> tuple[np.ndarray, np.ndarray]:
    """([n] int64 pages, [n] uint64 generations) of descriptors."""
    n = len(descriptors)
    pages = np.fromiter((d.page for d in descriptors), np.int64, n)
    return pages, np.fromiter((d.generation for d in descriptors), np.uint64, n)


class CopyJob(Job[ReadDone]):
    """One ReadJob under way. `source` is None once its peer was disconnected before it began."""

    def __init__(
        self, job: ReadJob, source: Mapped, dst: np.ndarray, copier: SplitCopier, hook: PageHook | None
    ) -> None:
        self.job = job
        self._source: Mapped | None = source
        self._dst, self._copier, self._hook = dst, copier, hook
        self._lock = threading.Lock()
        self._begun = False
        self._copied: list[PageDescriptor] = []
        self._numbers: list[tuple[np.ndarray, np.ndarray]] = []  # pages and generations of what was copied
        self._error: str | None = None

    def drop(self, error: str) -> None:
        """End it with this error if no page has been copied yet; otherwise it goes on to its end."""
        with self._lock:
            if not self._begun:
                self._source, self._error = None, self._error or error

    def steps(self) -> Iterator[bool]:
        if self._hook is None:
            if self._begin():
                self._copy(self.job.units)
            return
        for unit in self.job.units:
            try:
                while not self._hook(self.job.key, unit[0]):
                    if self._error is not None:
                        return
                    yield False
            except CopyFailed as error:
                self._error = str(error)
                return
            if not self._begin():
                return
            self._copy((unit,))
            yield True

    def result(self) -> ReadDone:
        job, source = self.job, self._source
        if source is None:
            return ReadDone(job.job, job.key, (), (), self._error)
        same = np.concatenate([unchanged(source, *seen) for seen in self._numbers] or [np.ones(0, bool)])
        if same.all():
            return ReadDone(job.job, job.key, tuple(self._copied), (), self._error)
        ok = tuple(d for d, kept in zip(self._copied, same, strict=True) if kept)
        stale = tuple(d for d, kept in zip(self._copied, same, strict=True) if not kept)
        return ReadDone(job.job, job.key, ok, stale, self._error)

    def _begin(self) -> bool:
        with self._lock:
            self._begun = self._begun or self._source is not None
            return self._begun

    def _copy(self, units: Sequence[tuple[PageDescriptor, int]]) -> None:
        source = self._source
        if source is None or not units:
            return
        descriptors, dst = zip(*units, strict=True)
        pages, generations = numbers(descriptors)
        to = np.fromiter(dst, np.int64, len(dst))
        inside = (pages > 0) & (pages < len(source.pages))
        if inside.all():
            self._copier.copy(self._dst, to, source.pages, pages)
        else:  # a page that the peer does not have is found stale
            self._copier.copy(self._dst, to[inside], source.pages, pages[inside])
        self._copied.extend(descriptors)
        self._numbers.append((pages, generations))
