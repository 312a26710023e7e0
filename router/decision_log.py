"""The log of decisions: one JSON line an entry (decisions.py), written by a thread of its own, off the event loop.

Two files, `PATH` and `PATH.1`, hold `max_bytes` together; the older half goes first. What the thread cannot keep up
with, or the disk does not take, is dropped and counted: the log never holds up a request. If the router dies, decisions
whose requests have not ended are not in the log.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

from tailrace.model.errors import ConfigError
from tailrace.router.decisions import Entry, from_line, to_line

log = logging.getLogger(__name__)

_MOST_PENDING = 10_000  # entries that wait for the thread


def load(path: Path) -> list[Entry]:
    """Both files of a log, by the time of the decision. A last line that was cut off is left out.

    Raises:
        ConfigError: there is no such file, or it is no decision log.
    """
    lines: list[str] = []
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file")
    for part in (_older(path), path):
        if part.exists():
            whole = part.read_text(errors="replace").split("\n")
            lines += whole[:-1]  # what follows the last newline was cut off, or is nothing
    return sorted(map(from_line, lines), key=lambda entry: entry.decision.at)


def _older(path: Path) -> Path:
    return path.with_name(path.name + ".1")


class DecisionLog:
    """Writes entries from a thread. `dropped`: entries that were not written.

    Args:
        path: of the younger file; appended to if it is there.
        max_bytes: of both files together.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.dropped = path, 0
        self._half = max(1, max_bytes // 2)
        self._pending: deque[Entry] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._told = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="decision-log")
        self._thread.start()

    def put(self, entry: Entry) -> None:
        """Returns at once. May be called from any thread."""
        with self._wake:
            if self._closed or len(self._pending) >= _MOST_PENDING:
                self.dropped += 1
                return
            self._pending.append(entry)
            self._wake.notify()

    def close(self) -> None:
        """Write what is pending, for a second at most."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._pending or self._closed)
                batch, self._pending = list(self._pending), deque()
                closed = self._closed
            if batch:
                self._write(batch)
            if closed and not self._pending:
                return

    def _write(self, batch: list[Entry]) -> None:
        data = [(to_line(entry) + "\n").encode() for entry in batch]
        try:
            while data:
                size = self.path.stat().st_size if self.path.exists() else 0
                if size and size + len(data[0]) > self._half:
                    os.replace(self.path, _older(self.path))
                    size = 0
                with self.path.open("ab") as file:
                    while data and (not size or size + len(data[0]) <= self._half):
                        size += file.write(data.pop(0))
        except OSError as error:
            self.dropped += len(data)
            if not self._told:
                self._told = True
                fields = {"path": str(self.path), "reason": str(error)}
                log.error("decision_log_not_written", extra={"fields": fields})
