"""One rank process as its supervisor holds it: started, listened to, looked at, signalled. Torch-free.

Channel to the rank, JSON lines: on its stdin the spec, then what the supervisor says; on the report pipe what the rank
says. It decides nothing. If the process dies, what it said last can still be read.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.cluster.progress import PhaseLimits, ProgressStamp, verdict
from tailrace.cluster.spec import RankSpec

log = logging.getLogger(__name__)

LAST_WORDS_S = 0.5


class RankProcess:
    """All methods belong to one event loop, whose thread must outlive the process.

    Args:
        on_report: told whatever the rank reports, failures included.

    Attributes:
        failure: the rank's own last words.
    """

    def __init__(self, spec: RankSpec, on_report: Callable[[dict[str, Any]], None]) -> None:
        self.spec = spec
        self.stamp = ProgressStamp.create()
        self.failure: str | None = None
        self._on_report = on_report
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self, command: Sequence[str], options: Sequence[str], fds: Sequence[int]) -> None:
        """Start it with the file descriptors `fds`, besides its own, and send its spec."""
        assert self._process is None, "a rank is started once"
        read_fd, write_fd = os.pipe()
        own = (f"--parent={os.getpid()}", f"--report-fd={write_fd}", f"--stamp-fd={self.stamp.fd}")
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, *own, *options, stdin=asyncio.subprocess.PIPE,
                pass_fds=(write_fd, self.stamp.fd, *fds), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            self.stamp.close_file()  # what is mapped stays
        fields = {"worker": self.spec.name, "rank": self.spec.rank, "pid": self._process.pid}
        log.info("rank_started", extra={"fields": fields})
        self.send(self.spec.to_json())
        self._reading = asyncio.create_task(self._read_reports(read_fd))

    def verdict(self, limits: PhaseLimits, now: float) -> str | None:
        """Why it must be replaced, or None."""
        return verdict(self.stamp.read(), self.exit_code, limits, now)

    def send(self, message: dict[str, Any]) -> None:
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def signal(self, number: int) -> None:
        """To the rank and its own children, also after the rank itself is gone."""
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    async def wait(self) -> int:
        """Its exit status, when it has ended."""
        assert self._process is not None, "the rank was never started"
        return await self._process.wait()

    async def read_last_words(self) -> None:
        """A dying rank's report may still be in the pipe when its death is seen."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=LAST_WORDS_S)

    def stop_listening(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read_reports(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(fd, "rb", buffering=0)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while line := await reader.readline():
                report = json.loads(line)
                if "failed" in report:
                    self.failure = str(report["failed"])
                self._on_report(report)
        finally:
            transport.close()
