"""The flight recorder of a worker: what its cores were given, what its page books did, the last of it, in memory.

Entries are kept as they are and turned into bytes only when they are dumped, so that recording costs the transfer
thread some ten microseconds an event, and none a token. A segment begins with the cores' states and the pool's
columns. It begins anew whenever the law was found to hold at rest, so that what breaks it next has its cause in the
segment; under load without rest it is cut in two at half of the bound, and the older half is dropped with the next cut.

It also watches pages that a copy of ours may write: one that loses its last user meanwhile was freed too early, and
that is known at once. Thread-safe: the worker's loop changes the books too. Dies with its worker; a dump is a file.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import LedgerError
from tailrace.transfer.core_events import Action, StartRead, Tick
from tailrace.transfer.core_state import capture, look
from tailrace.transfer.messages import PROTOCOL_VERSION
from tailrace.transfer.recording import Changed, Handled, Recording, asked_of, dump, redacted
from tailrace.transfer.transports.base import ReadDone

log = logging.getLogger(__name__)

KEEP_FILES = 8  # of one worker, the newest
_ENTRY_BYTES, _ITEM_BYTES = 100, 12  # about, of an entry as an object, and of each page that it names


class Segment:
    """A starting state and what followed."""

    def __init__(self, cores: dict[str, dict[str, Any]], columns: dict[str, list[int]]) -> None:
        self.cores, self.columns = cores, columns
        self.entries: deque[Handled | Changed] = deque()
        self.nbytes = 0


class Recorder:
    """Records one worker's cores and books.

    Args:
        kv: the books; their journal is kept here from now on.
        limit_bytes: of entries, about; 0 records nothing, and watches nothing.
        folder: where dumps go; made when needed.
        header: what a recording says of its worker.
    """

    def __init__(self, kv: KvManager, limit_bytes: int, folder: Path, header: dict[str, Any]) -> None:
        self.enabled = limit_bytes > 0
        self.dumps: Counter[str] = Counter()  # by reason
        self._kv, self._limit, self._folder, self._header = kv, limit_bytes, folder, header
        self._cores: dict[str, Any] = {}
        self._lock = threading.RLock()
        self._thread = 0  # that runs a core, on `_current`
        self._current: Handled | None = None
        self._broken = False  # it has been dumped
        self._busy: Counter[int] = Counter()  # pages that a copy of ours may write
        self._writes: dict[int, tuple[int, ...]] = {}
        self._older: Segment | None = None
        self._segment = Segment({}, {})

    def heard(self, target: Any) -> Any:
        """`target` for a core: what it answers while an event is handled is recorded."""
        return Heard(target, self) if self.enabled else target

    def record(self, **cores: Any) -> None:
        """These are the cores, by name (ctx, gen); recording begins."""
        self._cores = {name: core for name, core in cores.items() if core is not None}
        if self.enabled:
            self.restart()
            self._kv.keep_journal(self)

    # -------------------------------------------------------------------------------------------------------- recording

    def handle(self, core: Any, event: Any, now: float) -> list[Action]:
        """`core.handle`, recorded.

        Raises:
            LedgerError: a page was freed under a copy, or the books refused a change; it has been dumped.
        """
        if not self.enabled:
            return core.handle(event, now)
        name = "ctx" if core is self._cores.get("ctx") else "gen"
        entry = Handled(name, now, redacted(event))
        self._add(entry, _ENTRY_BYTES + _ITEM_BYTES * _items(event))
        self._current, self._thread = entry, threading.get_ident()
        if type(event) is ReadDone and name == "gen":  # it writes no more
            self._busy -= Counter(self._writes.pop(event.job, ()))
        try:
            actions: list[Action] = core.handle(event, now)
        except LedgerError as error:
            self.breach(str(error))
            raise
        finally:
            self._current = None
        if type(event) is Tick and not actions:
            self._forget(entry)
            return actions
        entry.actions = tuple([type(action).__name__ for action in actions])
        if name == "gen":
            self._watch(core, entry, actions)
        if self._segment.nbytes > self._limit // 2:
            self._cut()
        return actions

    def answered(self, method: str, asked: tuple[int, ...], result: Any) -> None:
        """Books or wire have answered the core that runs."""
        if self._current is not None and threading.get_ident() == self._thread:
            self._current.answers.append((method, asked, result))

    def changed(self, change: str, what: Sequence[int] | int) -> None:
        """Journal of the page pool; under the lock of the books."""
        by_core = self._current is not None and threading.get_ident() == self._thread
        pages = what if isinstance(what, int) else tuple(what)
        size = 0 if isinstance(pages, int) else len(pages)
        self._add(Changed(change, pages, by_core), _ENTRY_BYTES // 2 + _ITEM_BYTES * size)

    def idle(self, pages: Sequence[int]) -> None:
        """Journal of the page pool: nobody uses these any more."""
        if self._busy:
            early = [page for page in pages if self._busy[page]]
            if early:
                reason = f"pages {early} lost their last user while a copy of ours may write them"
                self.breach(reason)
                raise LedgerError(reason)

    def refused(self, reason: str) -> None:
        """Journal of the page pool: somebody, of either thread, wanted what is forbidden."""
        self.breach(reason)

    def _add(self, entry: Handled | Changed, nbytes: int) -> None:
        with self._lock:
            self._segment.entries.append(entry)
            self._segment.nbytes += nbytes

    def _forget(self, entry: Handled) -> None:
        """A tick at which nothing happened."""
        with self._lock:
            if self._segment.entries and self._segment.entries[-1] is entry:
                self._segment.entries.pop()
                self._segment.nbytes -= _ENTRY_BYTES

    def _watch(self, core: Any, entry: Handled, actions: Sequence[Action]) -> None:
        """Remember what the copies that begin may write."""
        for action in actions:
            if isinstance(action, StartRead):
                number = action.job.job
                pages = self._writes[number] = tuple(sorted(look(core)["_jobs"][number].pages))
                self._busy.update(pages)
                entry.writes += ((number, pages),)

    # --------------------------------------------------------------------------------------------------------- segments

    def restart(self) -> None:
        """The law holds and nothing is held: what comes next is recorded from here."""
        if self.enabled:
            self._begin(None)

    def _cut(self) -> None:
        """Half of the bound is full; the books are recounted, for no rest came to do it."""
        self._kv.check()
        self._begin(self._segment)

    def _begin(self, older: Segment | None) -> None:
        self._broken = False
        cores = {name: capture(core) for name, core in self._cores.items()}

        def swap(columns: dict[str, list[int]]) -> None:
            with self._lock:
                self._older, self._segment = older, Segment(cores, columns)

        self._kv.snapshot(swap)

    # ------------------------------------------------------------------------------------------------------------ dumps

    def breach(self, reason: str) -> Path | None:
        """The law is broken: dump, and say so in the log. None if nothing is recorded or no file can be written."""
        if self._broken:  # one fault, one file: it often raises on its way out
            return None
        self._broken = True
        path = self.dump("broken", reason)
        log.critical("ledger_broken", extra={"fields": {"reason": reason, "recording": str(path)}})
        return path

    def dump(self, why: str, reason: str) -> Path | None:
        """Write a file of what is recorded. `why`: broken | asked. Any thread.

        The newest files of a worker stay, so that one that fails again and again does not fill the disk.
        """
        self.dumps[why] += 1
        if not self.enabled:
            return None
        with self._lock:
            first = self._older or self._segment
            entries = [*(self._older.entries if self._older else ()), *self._segment.entries]
            header = {**self._header, "protocol": PROTOCOL_VERSION, "why": why, "reason": reason, "at": time.time()}
            data = dump(Recording(header, first.cores, first.columns, entries))
        name = f"{self._header['worker']}-{self._header['boot']}-{time.time_ns()}.recording"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / name
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
            for old in sorted(self._folder.glob(f"{self._header['worker']}-*.recording"), key=_age)[:-KEEP_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.error("recording_not_written", extra={"fields": {"folder": str(self._folder), "reason": str(error)}})
            return None
        log.warning("recording_written", extra={"fields": {"path": str(path), "why": why, "entries": len(entries)}})
        return path


class Heard:
    """Passes everything on to an object; what its methods answer is told to a recorder."""

    def __init__(self, target: Any, recorder: Recorder) -> None:
        self._target, self._recorder = target, recorder

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = value(*args, **kwargs)
            self._recorder.answered(name, asked_of(name, args), answer)
            return answer

        setattr(self, name, call)
        return call

    def __call__(self) -> Any:
        answer = self._target()
        self._recorder.answered("", (), answer)
        return answer


def _items(event: Any) -> int:
    """About how many pages an event names."""
    inner = getattr(event, "frame", event)
    for name in ("pages", "units_ok", "pinned", "seen"):
        value = getattr(inner, name, None)
        if value is not None:
            return len(value)
    return len(getattr(getattr(inner, "landed", None), "pages", ()))


def _age(path: Path) -> int:
    return path.stat().st_mtime_ns
