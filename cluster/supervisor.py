"""Starts one worker's rank processes, watches them, and tells rank 0 where the router is. Torch-free: a Serve replica
runs it.

Health is answered from here, from the process table and the progress stamps, never by a rank itself: a rank that is
busy for long is well, one that is dead or stuck is not, and the two are told apart by the phase's limit. A worker is
all of its ranks: they share one boot id, and when one of them fails, dies or is stuck the others are killed. It does
not restart anything: whoever runs it (Ray Serve, a test) replaces the whole worker, with a new boot id. If the
supervisor dies, its rank processes are killed by the kernel (parent-death signal).

Channel to rank 0, JSON lines (cluster/rank_process.py): on its stdin the spec, then {"router": {host, port, boot}}
whenever that changes, {"drain": seconds}; on the report pipe {"ready": {boot, host, port, pid}} once, {"drained": true}
when a drain is over, or {"failed": "why"} before it exits. The other ranks get their spec and report failures; what
they do, rank 0 tells them, over sockets that are made here and inherited (engine/group.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tailrace.cluster.discovery import ROUTER, WORKER_PREFIX, Directory, Entry
from tailrace.cluster.progress import PHASES, PhaseLimits
from tailrace.cluster.rank_process import RankProcess
from tailrace.cluster.spec import RankSpec
from tailrace.model.errors import PeerError, WorkerError

log = logging.getLogger(__name__)

ROUTER_UNKNOWN_POLL_S = 0.1
ROUTER_KNOWN_POLL_S = 0.5
WATCH_S = 0.1
TERM_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class RankReady:
    """What a rank says when its loop runs."""

    boot: str
    host: str
    port: int
    pid: int


class Supervisor:
    """One worker. All methods belong to one event loop, whose thread must outlive the worker."""

    def __init__(
        self,
        spec: RankSpec,
        limits: PhaseLimits,
        directory: Directory,
        *,
        command: tuple[str, ...] = (sys.executable, "-m", "tailrace.cluster.rank"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.limits, self.directory, self.command, self.clock = spec, limits, directory, command, clock
        self.ready: RankReady | None = None
        tp = spec.config.pool(spec.role).tp
        self._ranks = [RankProcess(replace(spec, rank=rank), self._heard) for rank in range(tp)]
        self._lost: RankProcess | None = None  # the rank that ended first
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._news, self._drained, self._over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._stopping = False
        self._published: Entry = {}

    @property
    def pid(self) -> int | None:
        """Rank 0's."""
        return self._ranks[0].pid

    @property
    def pids(self) -> list[int]:
        """Of all ranks that were started, in order."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    @property
    def well(self) -> bool:
        """True if all ranks run and none is stuck."""
        return self.ready is not None and self._reason() is None

    async def start(self) -> RankReady:
        """Start the ranks and wait until rank 0's loop runs, which it does once all ranks are ready.

        Raises:
            WorkerError: one failed, died or got stuck first; the rank's own reason is in the message.
        """
        await self._start_ranks()
        self._tasks += [asyncio.create_task(self._watch(rank)) for rank in self._ranks]
        self._following = asyncio.create_task(self._follow_router())
        while self.ready is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), WATCH_S)
            self._news.clear()
            self._publish_phase()
            if self._reason() is not None:
                await asyncio.gather(*(rank.read_last_words() for rank in self._ranks if rank.exit_code is not None))
                why = self._reason()
                await self.stop(0.0)
                self._publish({"role": self.spec.role, "phase": "failed", "fraction": 0.0, "reason": why})
                raise WorkerError(f"worker {self.spec.name} did not start: {why}")
        self._publish_phase()
        return self.ready

    def check(self) -> None:
        """Return if the worker is well; raise WorkerError once a rank is dead or stuck, or nobody tells it any more
        where the router is. All ranks are killed first."""
        if self._stopping:
            return
        reason = self._reason()
        if reason is None and self._following is not None and self._following.done():
            reason = f"following the router failed: {self._following.exception()!r}"
        if reason is None:
            return
        log.error("worker_lost", extra={"fields": {"worker": self.spec.name, "reason": reason}})
        self._signal(signal.SIGKILL)
        raise WorkerError(f"worker {self.spec.name}: {reason}")

    async def drain(self, limit_s: float) -> bool:
        """Ask rank 0 to take nothing new, and wait until it holds nothing for anybody; False after `limit_s`."""
        self._ranks[0].send({"drain": limit_s})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), limit_s)
        return self._drained.is_set()

    async def wait(self) -> int:
        """Exit status of the rank that ends first, when it has ended."""
        if self.pid is None:
            raise WorkerError("the ranks were never started")
        await self._over.wait()
        assert self._lost is not None
        return await self._lost.wait()

    async def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """End the worker: SIGTERM to rank 0, which ends the others, and SIGKILL to all after `grace_s`.

        May be called more than once.
        """
        self._stopping = True
        started = [rank for rank in self._ranks if rank.pid is not None]
        if started and grace_s > 0 and started[0].exit_code is None:
            started[0].signal(signal.SIGTERM)
            ends = [asyncio.create_task(rank.wait()) for rank in started]
            _, waiting = await asyncio.wait(ends, timeout=grace_s)
            for end in waiting:
                end.cancel()
            if waiting:
                fields = {"worker": self.spec.name, "pids": [r.pid for r in started if r.exit_code is None]}
                log.warning("rank_ignores_sigterm", extra={"fields": fields})
        self._signal(signal.SIGKILL)
        for rank in started:
            await rank.wait()
        await self._forget_tasks(started)
        if "reason" not in self._published:  # last words stay until the next start
            self.directory.withdraw(WORKER_PREFIX + self.spec.name)

    # ------------------------------------------------------------------------------------------------------- inside

    async def _start_ranks(self) -> None:
        """Each further rank shares a socket with rank 0, and all of them an empty file where they meet."""
        pairs = [socket.socketpair() for _ in self._ranks[1:]]
        meeting = os.memfd_create("tailrace-meeting", os.MFD_CLOEXEC) if pairs else None
        ends = [[ours.fileno() for ours, _ in pairs], *([theirs.fileno()] for _, theirs in pairs)]
        try:
            for rank, channels in zip(self._ranks, ends, strict=True):
                options = [f"--channel-fd={fd}" for fd in channels]
                fds = list(channels)
                if meeting is not None:
                    options.append(f"--meeting-fd={meeting}")
                    fds.append(meeting)
                await rank.start(self.command, options, fds)
        finally:
            for pair in pairs:
                for end in pair:
                    end.close()
            if meeting is not None:
                os.close(meeting)

    async def _watch(self, rank: RankProcess) -> None:
        """The first rank that ends takes the others with it."""
        await rank.wait()
        if self._lost is None:
            self._lost = rank
            self._over.set()
            self._news.set()
            if not self._stopping:
                self._signal(signal.SIGKILL)

    async def _forget_tasks(self, started: list[RankProcess]) -> None:
        watching = self._tasks[: len(started)]
        if watching:
            await asyncio.wait(watching)  # they have seen the end, and so has who waits for it
        for task in (*self._tasks, self._following):
            if task is not None:
                task.cancel()
        for rank in started:
            rank.stop_listening()

    def _heard(self, report: dict[str, Any]) -> None:
        if "ready" in report:
            self.ready = RankReady(**report["ready"])
        elif "drained" in report:
            self._drained.set()
        self._news.set()

    def _reason(self) -> str | None:
        """Why the worker must be replaced, by the rank that began it, or None."""
        now = self.clock()
        if self._lost is not None:
            return self._said(self._lost, self._lost.failure or self._lost.verdict(self.limits, now))
        failed = next((rank for rank in self._ranks if rank.failure is not None), None)
        if failed is not None:
            return self._said(failed, failed.failure)
        ill = [rank for rank in self._ranks if rank.verdict(self.limits, now) is not None]
        return self._stuck(ill, now) if ill else None

    def _stuck(self, ill: list[RankProcess], now: float) -> str | None:
        """A rank that stands still stops the others in their next pass, so the one with the oldest stamp is the likely
        cause; all that stand are told."""
        ages = {rank.spec.rank: now - rank.stamp.read().stamp for rank in self._ranks}
        first = max(ill, key=lambda rank: ages[rank.spec.rank])
        oldest = ages.pop(first.spec.rank)
        others = [f"rank {rank}: none for {age:.1f} s" for rank, age in ages.items() if age > oldest / 2]
        why = self._said(first, first.verdict(self.limits, now))
        return f"{why} ({', '.join(others)})" if others else why

    def _said(self, rank: RankProcess, why: str | None) -> str | None:
        return why if len(self._ranks) == 1 else f"rank {rank.spec.rank}: {why}"

    def _signal(self, number: int) -> None:
        for rank in self._ranks:
            rank.signal(number)

    async def _follow_router(self) -> None:
        told: Entry | None = None
        while True:
            try:
                found = await asyncio.to_thread(self.directory.lookup, ROUTER)
            except PeerError as error:  # the store is away for a while: what is connected goes on
                log.warning("directory_unreachable", extra={"fields": {"reason": str(error)}})
                found = told
            if found is not None and found != told:
                self._ranks[0].send({"router": found})
                told = found
            await asyncio.sleep(ROUTER_UNKNOWN_POLL_S if found is None else ROUTER_KNOWN_POLL_S)

    def _publish_phase(self) -> None:
        """The phase that the last of the ranks is in."""
        stamps = [rank.stamp.read() for rank in self._ranks]
        progress = min(stamps, key=lambda stamp: (PHASES.index(stamp.phase), stamp.fraction))
        entry: Entry = {"role": self.spec.role, "phase": progress.phase, "fraction": round(progress.fraction, 2)}
        if self.ready is not None:
            entry |= {"phase": "ready", "pid": self.ready.pid, "boot": self.ready.boot, "host": self.ready.host}
        self._publish(entry)

    def _publish(self, entry: Entry) -> None:
        if entry != self._published:
            self._published = entry
            self.directory.publish(WORKER_PREFIX + self.spec.name, entry)
