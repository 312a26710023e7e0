"""Starts one worker's rank process, watches it, and tells it where the router is. Torch-free: a Serve replica runs it.

Health is answered from here, from the process table and the progress stamp, never by the rank itself: a rank that is
busy for long is well, one that is dead or stuck is not, and the two are told apart by the phase's limit. It does not
restart anything: whoever runs it (Ray Serve, a test) replaces the whole worker, with a new boot id. If the supervisor
dies, its rank process is killed by the kernel (parent-death signal).

Channel to the rank, JSON lines: on its stdin the spec, then {"router": {host, port, boot}} whenever that changes,
{"drain": seconds}; on the report pipe {"ready": {boot, host, port, pid}} once, {"drained": true} when a drain is over,
or {"failed": "why"} before it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tailrace.cluster.discovery import ROUTER, WORKER_PREFIX, Directory, Entry
from tailrace.cluster.progress import PhaseLimits, ProgressStamp, verdict
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
        self.failure: str | None = None  # the rank's own last words
        self._process: asyncio.subprocess.Process | None = None
        self._stamp = ProgressStamp.create()
        self._tasks: list[asyncio.Task[None]] = []
        self._reported, self._drained = asyncio.Event(), asyncio.Event()
        self._stopping = False
        self._published: Entry = {}

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def well(self) -> bool:
        """True if the rank runs and is not stuck."""
        return self.ready is not None and self._verdict() is None

    async def start(self) -> RankReady:
        """Start the rank and wait until its loop runs.

        Raises:
            WorkerError: it failed, died or got stuck first; the rank's own reason is in the message.
        """
        read_fd, write_fd = os.pipe()
        fds = (write_fd, self._stamp.fd)
        options = (f"--parent={os.getpid()}", f"--report-fd={write_fd}", f"--stamp-fd={self._stamp.fd}")
        self._process = await asyncio.create_subprocess_exec(
            *self.command, *options, stdin=asyncio.subprocess.PIPE, pass_fds=fds, start_new_session=True
        )
        os.close(write_fd)
        log.info("rank_started", extra={"fields": {"worker": self.spec.name, "pid": self._process.pid}})
        self._send(self.spec.to_json())
        self._tasks.append(asyncio.create_task(self._read_reports(read_fd)))
        self._tasks.append(asyncio.create_task(self._follow_router()))
        while self.ready is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), WATCH_S)
            self._publish_phase()
            reason = self.failure or self._verdict()
            if reason is not None:
                await self._read_last_words()
                await self.stop(0.0)
                why = self.failure or reason
                self._publish({"role": self.spec.role, "phase": "failed", "fraction": 0.0, "reason": why})
                raise WorkerError(f"worker {self.spec.name} did not start: {why}")
        self._publish_phase()
        return self.ready

    def check(self) -> None:
        """Return if the worker is well; raise WorkerError once it is dead or stuck. A stuck rank is killed first."""
        reason = self._verdict()
        if reason is None or self._stopping:
            return
        log.error("worker_lost", extra={"fields": {"worker": self.spec.name, "reason": self.failure or reason}})
        self._signal(signal.SIGKILL)
        raise WorkerError(f"worker {self.spec.name}: {self.failure or reason}")

    async def drain(self, limit_s: float) -> bool:
        """Ask the rank to take nothing new, and wait until it holds nothing for anybody; False after `limit_s`."""
        self._send({"drain": limit_s})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained.wait(), limit_s)
        return self._drained.is_set()

    async def wait(self) -> int:
        """Exit status of the rank, when it ends."""
        if self._process is None:
            raise WorkerError("the rank was never started")
        return await self._process.wait()

    async def stop(self, grace_s: float = TERM_GRACE_S) -> None:
        """End the rank: SIGTERM, and SIGKILL to its group after `grace_s`. May be called more than once."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        process = self._process
        if process is not None:
            if process.returncode is None and grace_s > 0:
                self._signal(signal.SIGTERM)
                await _ended_within(process, grace_s)
            self._signal(signal.SIGKILL)
            await process.wait()
        if "reason" not in self._published:  # last words stay until the next start
            self.directory.withdraw(WORKER_PREFIX + self.spec.name)

    # ------------------------------------------------------------------------------------------------------- inside

    def _verdict(self) -> str | None:
        code = None if self._process is None else self._process.returncode
        return verdict(self._stamp.read(), code, self.limits, self.clock())

    def _signal(self, number: int) -> None:
        """To the rank's whole group, also after the rank itself is gone."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def _send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_reports(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(fd, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while line := await reader.readline():
                report = json.loads(line)
                if "ready" in report:
                    self.ready = RankReady(**report["ready"])
                elif "failed" in report:
                    self.failure = str(report["failed"])
                elif "drained" in report:
                    self._drained.set()
                self._reported.set()
        finally:
            transport.close()

    async def _read_last_words(self) -> None:
        """A dying rank's report may still be in the pipe when its death is seen."""
        await asyncio.wait(self._tasks[:1], timeout=0.5)

    async def _follow_router(self) -> None:
        told: Entry | None = None
        while True:
            try:
                found = await asyncio.to_thread(self.directory.lookup, ROUTER)
            except PeerError as error:  # the store is away for a while: what is connected goes on
                log.warning("directory_unreachable", extra={"fields": {"reason": str(error)}})
                found = told
            if found is not None and found != told:
                self._send({"router": found})
                told = found
            await asyncio.sleep(ROUTER_UNKNOWN_POLL_S if found is None else ROUTER_KNOWN_POLL_S)

    def _publish_phase(self) -> None:
        progress = self._stamp.read()
        entry: Entry = {"role": self.spec.role, "phase": progress.phase, "fraction": round(progress.fraction, 2)}
        if self.ready is not None:
            entry |= {"phase": "ready", "pid": self.ready.pid, "boot": self.ready.boot, "host": self.ready.host}
        self._publish(entry)

    def _publish(self, entry: Entry) -> None:
        if entry != self._published:
            self._published = entry
            self.directory.publish(WORKER_PREFIX + self.spec.name, entry)


async def _ended_within(process: asyncio.subprocess.Process, limit_s: float) -> None:
    try:
        await asyncio.wait_for(process.wait(), limit_s)
    except TimeoutError:
        log.warning("rank_ignores_sigterm", extra={"fields": {"pid": process.pid}})
