"""Copies between page arrays in helper threads beside the transfer thread. No peers, no protocol, no torch.

A page array is [num_pages, bytes_per_page] uint8. numpy copies without the interpreter lock, so the loop computes on
meanwhile; each call into numpy takes the lock once, so neighbouring pages are copied in one call. If a helper thread
dies of a fault of ours, the next `drain` raises it in the transfer thread, which takes the process down.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np

from tailrace.transfer.transports.base import Wake

BIG_JOB_BYTES = 8 << 20  # from here on a second thread is worth its start
_SLICE_BYTES = 4 << 20  # of one call, so that a job can be split and nothing waits long for the lock
_BIG_PAGE_BYTES = 96 << 10  # from here on a call a page, or a run of pages, costs nothing beside its copy
# Of small pages on their way from scattered to scattered places. More than a core's own cache holds: two threads that
# return from many short calls wait for the interpreter lock, and each such wait puts a core to sleep.
_SCRATCH_BYTES = 2 << 20
_SHARE_BYTES = 4 << 20  # of a slice that one of two threads takes
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
    """dst[dst_pages[i]] = src[src_pages[i]] for every i; the destinations are different pages.

    Big pages are copied by runs of neighbours. Small ones in few calls: a gather if the destinations are neighbours, a
    scatter if the sources are, else both, slice by slice through a buffer that the cache holds.
    """
    if len(dst_pages):
        _copy(dst, *_in_order(dst_pages, src_pages, dst.shape[1]), src)


def _copy(dst: np.ndarray, to: np.ndarray, at: np.ndarray, src: np.ndarray) -> None:
    n = len(to)
    step = max(1, _SLICE_BYTES // dst.shape[1])
    if dst.shape[1] >= _BIG_PAGE_BYTES or (np.diff(to) == 1).all():
        _copy_runs(dst, to, src, at, step)
    elif (np.diff(at) == 1).all():
        for low in range(0, n, step):
            scatter(dst, to[low : low + step], src[at[low] : at[low] + min(step, n - low)])
    else:
        _copy_small(dst, to, src, at)


def _in_order(dst_pages: Numbers, src_pages: Numbers, page_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """Destinations and sources by rising destination; if nothing comes of that, by rising source: reads gain more."""
    to, at = np.asarray(dst_pages, np.int64), np.asarray(src_pages, np.int64)
    by_destination = page_bytes >= _BIG_PAGE_BYTES or int(to.max()) - int(to.min()) == len(to) - 1
    key = to if by_destination else at
    if (np.diff(key) > 0).all():
        return to, at
    order = np.argsort(key, kind="stable")
    return to[order], at[order]


def gather(dst: np.ndarray, src: np.ndarray, src_pages: np.ndarray) -> None:
    """dst[i] = src[src_pages[i]], one call: pages [n] int64 of `src`, all in range."""
    src.take(src_pages, 0, dst, "clip")


def scatter(dst: np.ndarray, dst_pages: np.ndarray, src: np.ndarray) -> None:
    """dst[dst_pages[i]] = src[i], one call."""
    dst[dst_pages] = src


def _copy_runs(dst: np.ndarray, to: np.ndarray, src: np.ndarray, at: np.ndarray, max_pages: int) -> None:
    firsts, sources = to.tolist(), at.tolist()
    for start, end, adjacent in runs(to, at, max_pages):
        into = dst[firsts[start] : firsts[start] + end - start]
        if adjacent:
            np.copyto(into, src[sources[start] : sources[start] + end - start])
        else:
            src.take(at[start:end], 0, into, "clip")


class _Scratch(threading.local):
    """It begins with a page of memory, as the pages do. A large block of malloc's begins 16 bytes behind such a border,
    and where a destination stands a little behind its source in that sense, some processors (Zen 3 and 4 with `rep
    movsb`, which glibc uses before 2.39) copy at a fifth of their rate."""

    def __init__(self) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, _SCRATCH_BYTES), np.uint8)


_scratch = _Scratch()


def _copy_small(dst: np.ndarray, to: np.ndarray, src: np.ndarray, at: np.ndarray) -> None:
    page_bytes = dst.shape[1]
    step = _SCRATCH_BYTES // page_bytes
    buffer = _scratch.memory[: step * page_bytes].reshape(step, page_bytes)
    for low in range(0, len(to), step):
        part = at[low : low + step]
        src.take(part, 0, buffer[: len(part)], "clip")
        dst[to[low : low + step]] = buffer[: len(part)]


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
    """copy_pages, big ones shared with a second thread: each takes the next slice, so neither waits for the other's.

    The second may be late, or come when all is done: the first then copies more, or all of it.
    """

    def __init__(self, name: str, threads: int = 2) -> None:
        self._second: Helper[None] | None = Helper(f"{name}-2") if threads > 1 else None

    def copy(self, dst: np.ndarray, dst_pages: Numbers, src: np.ndarray, src_pages: Numbers) -> None:
        n = len(dst_pages)
        if self._second is None or n < 2 or n * dst.shape[1] < BIG_JOB_BYTES:
            copy_pages(dst, dst_pages, src, src_pages)
            return
        to, at = _in_order(dst_pages, src_pages, dst.shape[1])
        step = max(1, _SHARE_BYTES // dst.shape[1])
        starts = iter(range(0, n, step))  # `next` of it is one step of the interpreter: no slice is taken twice

        def work() -> None:
            for low in starts:
                _copy(dst, to[low : low + step], at[low : low + step], src)

        helping = _Helping(work)
        self._second.submit(helping)
        work()
        helping.end()
        self._second.drain()

    def close(self) -> None:
        if self._second is not None:
            self._second.close()


class _Helping(Job[None]):
    """Work that another thread shares; once `end` has returned, this one neither does nor will do any of it."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()  # held while it works
        self._over = False

    def end(self) -> None:
        with self._lock:
            self._over = True

    def steps(self) -> Iterator[bool]:
        with self._lock:
            if not self._over:
                self._work()
        yield True

    def result(self) -> None:
        return None
