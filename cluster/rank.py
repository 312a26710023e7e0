"""A worker's rank process, from its first line to its orderly end; a child of cluster/supervisor.py.

    python -m tailrace.cluster.rank --parent PID --report-fd N --stamp-fd N      (the spec comes on stdin)
                                    --channel-fd N .. --meeting-fd N             (where the worker has several ranks)

The main thread is the worker's loop, or at a further rank the one that follows rank 0. Thread settings are made before
torch is imported, since its OpenMP reads them once: spinning threads of two workers on two cores cost more than they
compute. The process dies with its supervisor (parent-death signal), and on any failure, of whichever thread, with one
log record and a non-zero status. SIGTERM to rank 0 ends all in order: followers told, sockets closed, arenas unlinked.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from tailrace.cluster import log as logs
from tailrace.cluster.launcher import check_port_free
from tailrace.cluster.progress import Phase, ProgressStamp
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.ties import Ties
from tailrace.model.errors import TailraceError, WorkerError

if TYPE_CHECKING:
    from tailrace.cluster.worker import Worker

log = logging.getLogger("tailrace.cluster.rank")  # started with -m this module is __main__, whose log goes nowhere

STAMP_PERIOD_S = 0.1
DRAIN_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1

Report = Callable[[dict[str, Any]], None]
Stamp = Callable[[Phase, float, float | None], None]
Follow = Callable[["Worker"], None]
NO_TIES = Ties()


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit now if that has happened already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"the supervisor {parent} is gone")


def set_thread_environment(threads: int | None, tp: int = 1) -> int:
    """What OpenMP reads when torch is imported; returns the number of threads. RuntimeError: it has read other things.

    `threads`: of this rank; if None, this rank's share of the cores.
    """
    count = max(1, len(os.sched_getaffinity(0)) // tp) if threads is None else threads
    wanted = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    wanted |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(count))
    if "torch" in sys.modules and wanted.items() - os.environ.items():
        raise RuntimeError("torch is imported already: its OpenMP has read other settings")
    os.environ.update(wanted)
    return count


def run_rank(spec: RankSpec, report: Report, stamp: Stamp, follow: Follow, ties: Ties = NO_TIES) -> None:
    """Load, compile and run one rank: rank 0 until SIGTERM, any other until rank 0 ends it.

    Args:
        report: is told {"ready": ...} once the loop is about to run, or {"failed": ...}.
        stamp: is told phase, part done and the time of progress (None: now).
        follow: runs in a thread of its own and tells the worker where the router is, and to drain. Rank 0 only.
        ties: what this process inherited to work with the other ranks.
    """
    stop = threading.Event()
    # A further rank ends when rank 0 does, which has work to end first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN if spec.rank else lambda n, frame: _on_sigterm(stop, n, frame))
    config = spec.config
    pool = config.pool(spec.role)
    logs.configure(config.log_level, spec.title)
    sys.excepthook = lambda kind, error, trace: _root_cause(report, kind, error, trace)
    threads = set_thread_environment(pool.threads, pool.tp)
    stamp("load", 0.0, None)
    fields = {"role": spec.role, "rank": spec.rank, "tp": pool.tp, "threads": threads}
    log.info("rank_starts", extra={"fields": {**fields, **logs.versions()}})
    if spec.rank:
        from tailrace.cluster.follower import run_follower  # imports torch

        run_follower(spec, config, ties, threads, lambda phase, done: stamp(phase, done, None))
        return
    deaths = threading.excepthook = ThreadDeaths(stop)
    check_port_free(spec.host, spec.port, "the worker's links")  # importing and loading would take seconds first
    from tailrace.cluster.worker import Worker  # imports torch

    started = time.monotonic()
    worker = Worker(spec, config, ties, threads=threads, progress=lambda phase, done: stamp(phase, done, None))
    try:
        worker.load()
        worker.warm_up()
        gc.collect()
        gc.freeze()  # what serving stands on, torch above all, stays: looking through it again stops a step for 0.24 s
        host, port = worker.start()
        threading.Thread(target=follow, args=(worker,), daemon=True, name="follow").start()
        threading.Thread(target=_copy_stamp, args=(worker, stamp), daemon=True, name="stamp").start()
        report({"ready": {"boot": worker.boot, "host": host, "port": port, "pid": os.getpid()}})
        seconds = round(time.monotonic() - started, 2)
        log.info("rank_ready", extra={"fields": {"boot": worker.boot, "port": port, "seconds": seconds}})
        worker.run(stop)
        deaths.raise_first()
    finally:
        worker.close()
    log.info("rank_ends", extra={"fields": {"boot": worker.boot}})


class ThreadDeaths:
    """Hears of threads that die of a fault, as threading.excepthook: without one of them (the one that follows the
    router, say) the rank would live on and be of no use, so it ends.

    Args:
        stop: set then, which ends the loop.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._first: str | None = None

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if args.exc_type is SystemExit:
            return
        name = "?" if args.thread is None else args.thread.name
        log.error(
            "thread_failed", exc_info=args.exc_value, extra={"fields": {"thread": name, "reason": repr(args.exc_value)}}
        )
        self._first = self._first or f"thread {name!r} failed: {args.exc_value!r}"
        self._stop.set()

    def raise_first(self) -> None:
        """Raises WorkerError if one has died."""
        if self._first is not None:
            raise WorkerError(self._first)


def _on_sigterm(stop: threading.Event, number: int, frame: FrameType | None) -> None:
    stop.set()


def _root_cause(report: Report, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        expected = issubclass(kind, TailraceError)  # says all by itself
        where = None if expected else (kind, error, trace)
        log.error("rank_failed", exc_info=where, extra={"fields": {"reason": str(error)}})
    report({"failed": f"{kind.__name__}: {error}"})


def _copy_stamp(worker: Worker, stamp: Stamp) -> None:
    """The loop's own stamp, to where the supervisor reads it: if the loop does not move, neither does the stamp."""
    while True:
        stamp("run", 1.0, worker.loop_stamp)
        time.sleep(STAMP_PERIOD_S)


def _lines(fd: int) -> Iterator[dict[str, Any]]:
    """JSON lines from a file descriptor. Read without a file object: a daemon thread that holds the lock of one when
    the interpreter ends would abort it."""
    pending = b""
    while data := os.read(fd, 65536):
        *complete, pending = (pending + data).split(b"\n")
        yield from (json.loads(line) for line in complete)


def _obey(worker: Worker, messages: Iterator[dict[str, Any]], report: Report) -> None:
    """What the supervisor says. The end of it means that the supervisor is gone, and the kernel sees to that."""
    for message in messages:
        if "router" in message:
            worker.set_router(message["router"])
        if "drain" in message:
            worker.drain(float(message["drain"]))
            threading.Thread(target=_tell_drained, args=(worker, report), daemon=True, name="drain").start()


def _tell_drained(worker: Worker, report: Report) -> None:
    while not worker.idle:
        time.sleep(DRAIN_POLL_S)
    report({"drained": True})


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a worker; started by its supervisor.")
    for name in ("parent", "report-fd", "stamp-fd"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--channel-fd", type=int, action="append", default=[])
    parser.add_argument("--meeting-fd", type=int, default=-1)
    options = parser.parse_args()
    die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the supervisor's parents to decide on
    pipe = os.fdopen(options.report_fd, "w")
    stamp = ProgressStamp(options.stamp_fd)

    def report(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    messages = _lines(0)
    spec = RankSpec.from_json(next(messages))
    ties = Ties(tuple(options.channel_fd), options.meeting_fd)
    run_rank(spec, report, stamp.write, lambda worker: _obey(worker, messages, report), ties)


if __name__ == "__main__":
    main()
