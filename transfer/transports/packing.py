"""The two copies of a landing transport: pages into a staging chunk at ctx, a landed chunk into pages at gen.

Both run in a helper thread and end only when their copy has returned. Know no NIXL; who may use a chunk when is decided
by landing.py and the transport.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tailrace.transfer.messages import Landed, PageDescriptor
from tailrace.transfer.transports.base import CopyFailed, PageHook, PostJob, ReadDone, ReadJob
from tailrace.transfer.transports.copying import Job, copy_pages
from tailrace.transfer.transports.landing import HEADER_BYTES, is_sound, seal
from tailrace.transfer.transports.reading import Mapped, unchanged


class PackJob(Job["PackJob"]):
    """Pages into a staging chunk; then their generation numbers, because one that changed was packed too late."""

    def __init__(self, job: PostJob, slot: int, chunk: np.ndarray, own: Mapped, hook: PageHook | None) -> None:
        self.job, self.slot = job, slot
        self.landed: Landed | None = None
        self.error: str | None = None
        self.stale = False
        self.cancelled = False
        self._chunk, self._own, self._hook = chunk, own, hook

    @property
    def nbytes(self) -> int:
        return len(self.job.pages) * self._own.pages.shape[1]

    def steps(self) -> Iterator[bool]:
        room = self._chunk[HEADER_BYTES : HEADER_BYTES + self.nbytes].reshape(len(self.job.pages), -1)
        numbers = [d.page for d in self.job.pages]
        if self._hook is None:
            if not self.cancelled:
                copy_pages(room, range(len(numbers)), self._own.pages, numbers)
        else:
            for i, descriptor in enumerate(self.job.pages):
                try:
                    while not self._hook(self.job.key, descriptor):
                        yield False
                except CopyFailed as error:
                    self.error = str(error)
                    return
                copy_pages(room, [i], self._own.pages, [descriptor.page])
        if not unchanged(self._own, [(d.page, d.generation) for d in self.job.pages]).all():
            self.stale, self.error = True, "a page was used anew before it was packed"
        elif not self.cancelled:
            self.landed = seal(self._chunk, self.job.key, self.job.grant, self.job.pages, self.nbytes)

    def result(self) -> PackJob:
        return self


class UnpackJob(Job[ReadDone]):
    """What landed into our pages, after the check that it is what was announced."""

    def __init__(self, job: ReadJob, landed: Landed, chunk: np.ndarray, own: np.ndarray, hook: PageHook | None) -> None:
        self.job, self.landed = job, landed
        self.abandoned = False
        self._chunk, self._own, self._hook = chunk, own, hook
        self._ok: list[PageDescriptor] = []
        self._error: str | None = None

    def steps(self) -> Iterator[bool]:
        if self.abandoned:
            self._error = "abandoned"
            return
        page_bytes = self._own.shape[1]
        where = {descriptor: i for i, descriptor in enumerate(self.landed.pages)}
        fits = self.landed.nbytes == len(where) * page_bytes and all(d in where for d, _ in self.job.units)
        if not fits or not is_sound(self._chunk, self.landed):
            self._error = "corrupt"
            return
        room = self._chunk[HEADER_BYTES : HEADER_BYTES + self.landed.nbytes].reshape(len(where), page_bytes)
        if self._hook is None:
            copy_pages(self._own, [page for _, page in self.job.units], room, [where[d] for d, _ in self.job.units])
            self._ok.extend(d for d, _ in self.job.units)
            return
        for descriptor, page in self.job.units:
            try:
                while not self._hook(self.job.key, descriptor):
                    yield False
            except CopyFailed as error:
                self._error = str(error)
                return
            copy_pages(self._own, [page], room, [where[descriptor]])
            self._ok.append(descriptor)

    def result(self) -> ReadDone:
        return ReadDone(self.job.job, self.job.key, tuple(self._ok), (), self._error)
