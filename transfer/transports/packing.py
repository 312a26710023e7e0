"""The two copies of a landing transport: pages into a staging chunk at ctx, a landed chunk into pages at gen.

Both run in a helper thread and end only when their copy has returned. Know no NIXL; who may use a chunk when is decided
by landing.py and the transport.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tailrace.transfer.messages import Landed, PageDescriptor
from tailrace.transfer.transports.base import CopyFailed, PageHook, PostJob, ReadDone, ReadJob
from tailrace.transfer.transports.copying import Job, copy_pages
from tailrace.transfer.transports.landing import HEADER_BYTES, is_sound, seal
from tailrace.transfer.transports.reading import Mapped, numbers, unchanged


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
        pages, generations = numbers(self.job.pages)
        if self._hook is None:
            if not self.cancelled:
                copy_pages(room, range(len(pages)), self._own.pages, pages)
        else:
            for i, descriptor in enumerate(self.job.pages):
                try:
                    while not self._hook(self.job.key, descriptor):
                        yield False
                except CopyFailed as error:
                    self.error = str(error)
                    return
                copy_pages(room, [i], self._own.pages, [descriptor.page])
        if not unchanged(self._own, pages, generations).all():
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
        places = self._places()
        fits = places is not None and self.landed.nbytes == len(self.landed.pages) * page_bytes
        if places is None or not fits or not is_sound(self._chunk, self.landed):
            self._error = "corrupt"
            return
        room = self._chunk[HEADER_BYTES : HEADER_BYTES + self.landed.nbytes].reshape(-1, page_bytes)
        if self._hook is None:
            copy_pages(self._own, [page for _, page in self.job.units], room, places)
            self._ok.extend(d for d, _ in self.job.units)
            return
        for (descriptor, page), place in zip(self.job.units, places, strict=True):
            try:
                while not self._hook(self.job.key, descriptor):
                    yield False
            except CopyFailed as error:
                self._error = str(error)
                return
            copy_pages(self._own, [page], room, [place])
            self._ok.append(descriptor)

    def _places(self) -> Sequence[int] | None:
        """Where in the chunk each wanted page stands; None if one does not."""
        units, pages = self.job.units, self.landed.pages
        if len(units) == len(pages) and all(unit[0] is page for unit, page in zip(units, pages, strict=True)):
            return range(len(pages))
        where = {page: i for i, page in enumerate(pages)}
        places = [where.get(descriptor, -1) for descriptor, _ in units]
        return None if -1 in places else places

    def result(self) -> ReadDone:
        return ReadDone(self.job.job, self.job.key, tuple(self._ok), (), self._error)
