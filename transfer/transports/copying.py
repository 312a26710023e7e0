"""Copies between page arrays in helper threads beside the transfer thread. No peers, no protocol, no torch.

A page array is [num_pages, bytes_per_page] uint8. numpy copies without the interpreter lock, so the loop computes on
meanwhile; each call into numpy takes the lock once, so neighbouring pages are copied in one call. If a helper thread
dies of a fault of ours, the next `drain` raises it in the transfer thread, which takes the process down.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from tailrace.transfer.transports.base import Wake

BIG_JOB_BYTES = 8 << 20  # from here on a second thread is worth its start
_SLICE_BYTES = 4 << 20  # of a gathering call, so that a job can be split and nothing waits long for the lock
_HELD_S = 0.001

Numbers = Sequence[int] | np.ndarray
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


def runs(dst_pages: np.ndarray, src_pages: np.ndarray, max_pages: int) -> list[tuple[int, int, bool]]:
    """Group copies whose destinations are neighbours, at most `max_pages` a group.

    Args:
        dst_pages: [n] rising page numbers.
        src_pages: [n] page of each.

    Returns:
        (start, end, adjacent) for each group of copies start..end-1; `adjacent`: its sources are neighbours too.
    """
    n = len(dst_pages)
    ends = [*(np.flatnonzero(np.diff(dst_pages) != 1) + 1).tolist(), n]
    jumps = np.concatenate(([0], np.cumsum(np.diff(src_pages) != 1))).tolist()
    groups = []
    start = 0
    for end in ends:
        for low in range(start, end, max_pages):
            high = min(low + max_pages, end)
            groups.append((low, high, jumps[high - 1] == jumps[low]))
        start = end
    return groups


def copy_pages(dst: np.ndarray, dst_pages: Numbers, src: np.ndarray, src_pages: Numbers) -> None:
    """dst[dst_pages[i]] = src[src_pages[i]] for every i; the destinations are different pages."""
    if not len(dst_pages):
        return
    to, at = _by_destination(dst_pages, src_pages)
    firsts, sources = to.tolist(), at.tolist()
    for start, end, adjacent in runs(to, at, max(1, _SLICE_BYTES // dst.shape[1])):
        into = dst[firsts[start] : firsts[start] + end - start]
        if adjacent:
            np.copyto(into, src[sources[start] : sources[start] + end - start])
        else:
            src.take(at[start:end], 0, into, "clip")


def _by_destination(dst_pages: Numbers, src_pages: Numbers) -> tuple[np.ndarray, np.ndarray]:
    to, at = np.asarray(dst_pages, np.int64), np.asarray(src_pages, np.int64)
    if (np.diff(to) > 0).all():
        return to, at
    order = np.argsort(to, kind="stable")
    return to[order], at[order]


class Job(Generic[Result_co]):
    """Something a helper does. `steps` yields False where it is held and would be asked again, True to go on."""

    def steps(self) -> Iterator[bool]:
        raise NotImplementedError

    def result(self) -> Result_co:
        """What `drain` returns for it, after the last step."""
        raise NotImplementedError


class Helper(Generic[Result]):
    """One thread that runs jobs in order, a held one aside; what they result in is fetched by `drain`."""

    def __init__(self, name: str, wake: Wake | None = None) -> None:
        self._wake = wake
        self._queue: SimpleQueue[Job[Result] | None] = SimpleQueue()
        self._results: deque[Result] = deque()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False

    def submit(self, job: Job[Result]) -> None:
        if not self._started:
            self._started = True
            self._thread.start()
        self._queue.put(job)

    def drain(self) -> list[Result]:
        """Results since the last call, in the order of their ends. Raises what the thread died of."""
        if self._failure is not None:
            raise self._failure
        found = []
        while self._results:
            found.append(self._results.popleft())
        return found

    def close(self) -> None:
        """Let what was submitted end (held jobs stay undone), then end the thread."""
        if self._started:
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._failure = error
            if self._wake is not None:
                self._wake()
            raise

    def _serve(self) -> None:
        held: deque[tuple[Job[Result], Iterator[bool]]] = deque()
        while True:
            if not held or not self._queue.empty():
                job = self._queue.get()
                if job is None:
                    return
                steps = job.steps()
            else:
                time.sleep(_HELD_S)
                job, steps = held.popleft()
            if all(steps):
                self._results.append(job.result())
                if self._wake is not None:
                    self._wake()
            else:
                held.append((job, steps))


class SplitCopier:
    """copy_pages, big ones shared with a second thread."""

    def __init__(self, name: str, threads: int = 2) -> None:
        self._second: Helper[None] | None = Helper(f"{name}-2") if threads > 1 else None

    def copy(self, dst: np.ndarray, dst_pages: Numbers, src: np.ndarray, src_pages: Numbers) -> None:
        n = len(dst_pages)
        if self._second is None or n < 2 or n * dst.shape[1] < BIG_JOB_BYTES:
            copy_pages(dst, dst_pages, src, src_pages)
            return
        to, at = _by_destination(dst_pages, src_pages)
        half = _Half(lambda: copy_pages(dst, to[n // 2 :], src, at[n // 2 :]))
        self._second.submit(half)
        copy_pages(dst, to[: n // 2], src, at[: n // 2])
        half.done.wait()
        self._second.drain()

    def close(self) -> None:
        if self._second is not None:
            self._second.close()


class _Half(Job[None]):
    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self.done = threading.Event()

    def steps(self) -> Iterator[bool]:
        try:
            self._work()
        finally:
            self.done.set()
        yield True

    def result(self) -> None:
        return None
