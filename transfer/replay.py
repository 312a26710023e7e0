"""A recording run again: the same events through the same cores, the same changes through page books of its own.

Two things are looked for. The first entry after which the law (law.py, pool.py) is broken. And the first event at which
a core does something else than was recorded: then the recording was made by other code, or the worker's memory was
damaged; the books go on alone from there. Pure: bytes in, findings out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.kv_cache.pool import PagePool
from tailrace.model.errors import ConfigError, LedgerError
from tailrace.transfer.core_events import Action, ChunkDone, ToLoop
from tailrace.transfer.core_state import install, look
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.hand import real_pages
from tailrace.transfer.law import disagreement
from tailrace.transfer.loop_events import Admitted
from tailrace.transfer.recording import Changed, Handled, Recording, asked_of
from tailrace.transfer.transports.base import ReadDone

_HOLDS = {"take": 1, "hold": 1, "release": -1, "quarantine": -1}
Watch = Callable[[int, Handled, list[Action]], None]


class Diverged(Exception):
    """A core does not do what was recorded of it."""


class OutOfAnswers(Diverged):
    """It asks more than the recorded one did."""


@dataclass(frozen=True, slots=True)
class Finding:
    """At this entry."""

    entry: int
    what: str


@dataclass(slots=True)
class Outcome:
    """What a run found; `entry` numbers count from 0."""

    events: int = 0
    broken: Finding | None = None
    diverged: Finding | None = None


class Playback:
    """Stands for books and wire: gives a core the answers that were recorded."""

    def __init__(self, **known: Any) -> None:
        vars(self).update(known)  # what is no method: layout, block_tokens
        self.answers: deque[tuple[str, tuple[int, ...], Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.answer(name, asked_of(name, args))

    def __call__(self) -> Any:
        return self.answer("", ())

    def answer(self, name: str, asked: tuple[int, ...]) -> Any:
        """The next answer, which must be to this question."""
        if not self.answers:
            raise OutOfAnswers(f"it asks for {_named(name, asked)}, and the recording has no answer left")
        method, about, result = self.answers.popleft()
        if (method, about) != (name, asked):
            raise Diverged(f"it asks for {_named(name, asked)}, the recording answers {_named(method, about)}")
        return result


def _named(method: str, asked: tuple[int, ...]) -> str:
    return (method or "the headroom") + (f" of pages {list(asked)}" if asked else "")


class Replay:
    """One run.

    Args:
        ctx_core, gen_core: what plays; tests plant faults here.
        watch: sees each event that a core has handled, and its actions.

    Raises:
        ConfigError: the recording's state is not one of these cores.
    """

    def __init__(
        self, recording: Recording, *, ctx_core: type[CtxCore] = CtxCore, gen_core: type[GenCore] = GenCore,
        watch: Watch | None = None,
    ) -> None:  # fmt: skip
        header = recording.header
        self.recording, self.outcome, self._watch = recording, Outcome(), watch
        self._playback: Any = Playback(**header["books"])
        self.cores: dict[str, Any] = {}
        for name, state in recording.cores.items():
            parts = (self._playback, header["config"])
            core: Any = ctx_core(*parts) if name == "ctx" else gen_core(parts[0], parts[0], parts[1], parts[0])
            try:
                install(core, state)
            except ValueError as error:
                raise ConfigError(f"the recording was made by another version: {error}") from None
            self.cores[name] = core
        pages = len(recording.columns["holders"])
        self.pool = PagePool(pages, np.zeros(pages, np.uint64))
        self.pool.restore(recording.columns)
        self.pool.journal = self
        self._busy: Counter[int] = Counter()
        self._writes: dict[int, tuple[int, ...]] = {}
        self._pins: Counter[int] = Counter()  # made by the loop, not yet handed to the core
        self._holds = self._handed_over()  # by the gen core
        self._core = ""  # that was given the last event
        self._early: str | None = None

    def run(self) -> Outcome:
        """All of it, or up to the first entry that breaks the law."""
        for number, entry in enumerate(self.recording.entries):
            wrong = self._changed(entry) if isinstance(entry, Changed) else self._handled(number, entry)
            last = number + 1 == len(self.recording.entries)
            if wrong is None and (last or isinstance(self.recording.entries[number + 1], Handled)):
                wrong = self._law()  # what belongs to one event is complete
            if wrong is not None:
                self.outcome.broken = Finding(number, wrong)
                return self.outcome
        try:
            self.pool.check()
        except LedgerError as error:
            self.outcome.broken = Finding(len(self.recording.entries) - 1, str(error))
        return self.outcome

    def event_of(self, number: int) -> int:
        """The last event that a core was given up to this entry."""
        return max((i for i in range(number + 1) if isinstance(self.recording.entries[i], Handled)), default=number)

    # ------------------------------------------------------------------------------------------------------- one entry

    def _handled(self, number: int, entry: Handled) -> str | None:
        self.outcome.events += 1
        self._core = entry.core
        if isinstance(entry.event, ReadDone):
            self._busy.subtract(self._writes.pop(entry.event.job, ()))
        if self.outcome.diverged is None:
            try:
                self._play(number, entry)
            except Diverged as error:
                if not (isinstance(error, OutOfAnswers) and self._is_unfinished(number, entry)):
                    self.outcome.diverged = Finding(number, str(error))
        for job, pages in entry.writes:
            self._writes[job] = pages
            self._busy.update(pages)
        if isinstance(entry.event, ChunkDone):
            self._pins.subtract(page for _, page in entry.event.pinned)
        return None

    def _play(self, number: int, entry: Handled) -> None:
        self._playback.answers = deque(entry.answers)
        actions = self.cores[entry.core].handle(entry.event, entry.now)
        did = tuple(type(action).__name__ for action in actions)
        for action in actions:
            if isinstance(action, ToLoop) and isinstance(action.event, Admitted):
                self._holds.subtract(real_pages(list(action.event.pages)))
        if self._watch is not None:
            self._watch(number, entry, actions)
        if self._playback.answers:
            raise Diverged(f"it does not ask for {self._playback.answers[0][0]}, as the recorded one did")
        if did != entry.actions and not self._is_unfinished(number, entry):
            raise Diverged(
                f"it does {', '.join(did) or 'nothing'}; recorded is {', '.join(entry.actions) or 'nothing'}"
            )

    def _is_unfinished(self, number: int, entry: Handled) -> bool:
        """The recording was dumped while this event was handled."""
        later = self.recording.entries[number + 1 :]
        return not entry.actions and all(isinstance(other, Changed) for other in later)

    def _changed(self, entry: Changed) -> str | None:
        self._early = None
        try:
            result = getattr(self.pool, entry.change)(entry.what)
        except LedgerError as error:
            return str(error)
        if entry.by_core and self._core == "gen" and entry.change in _HOLDS:
            pages: Any = result if entry.change == "take" else entry.what
            self._holds.update(dict.fromkeys(pages, _HOLDS[entry.change]))
        if entry.change == "pin" and not entry.by_core and not isinstance(entry.what, int):
            self._pins.update(entry.what)
        return self._early

    def changed(self, change: str, what: Any) -> None:
        """Journal of our pool: nothing to do."""

    def refused(self, reason: str) -> None:
        """Journal of our pool: the error that follows says it."""

    def idle(self, pages: Any) -> None:
        """Journal of our pool."""
        early = [page for page in pages if self._busy[page] > 0]
        if early:
            self._early = f"pages {early} lost their last user while a copy of ours may write them"

    def _law(self) -> str | None:
        if self.outcome.diverged is not None:
            return None
        if "gen" in self.cores and (wrong := self._lost_hold()) is not None:
            return wrong
        for core in self.cores.values():
            wrong = disagreement(core, self.pool, +self._pins)
            if wrong is not None:
                return wrong
        return None

    def _handed_over(self) -> Counter[int]:
        """Holds of the gen core: each page of each hand-off, once."""
        hands = look(self.cores["gen"])["_hands"].values() if "gen" in self.cores else ()
        return Counter(page for hand in hands for page in real_pages(hand.pages))

    def _lost_hold(self) -> str | None:
        expected = self._handed_over()
        for page in expected.keys() | self._holds.keys():
            if self._holds[page] != expected[page]:
                return f"the gen core has {self._holds[page]} holds of page {page}, its hand-offs need {expected[page]}"
        return None
