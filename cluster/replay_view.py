"""A flight recording and what its replay found, as tables for the terminal. Shows; transfer/replay.py decides."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from tailrace.transfer.recording import Changed, Handled, Recording
from tailrace.transfer.replay import Outcome, Replay

HEADER = ("tailrace", "protocol", "worker", "boot", "duty", "why", "reason")


def render(recording: Recording, replay: Replay, last: int) -> Iterator[Table | Text]:
    """Where the recording is from, its last events (all if `last` is 0) with the finding marked, and the verdict."""
    outcome = replay.outcome
    yield _header(recording, outcome)
    yield _timeline(recording, replay, last)
    yield verdict(recording, replay)


def verdict(recording: Recording, replay: Replay) -> Text:
    """One paragraph."""
    text, outcome = Text(), replay.outcome
    if outcome.broken is not None:
        at = replay.event_of(outcome.broken.entry)
        text.append(f"The law is broken after event {at}", "bold red")
        text.append(f" ({_event(recording.entries[at])}): {outcome.broken.what}.\n")
    if outcome.diverged is not None:
        text.append(f"At event {outcome.diverged.entry} the core parts from the recording", "bold yellow")
        text.append(f" ({_event(recording.entries[outcome.diverged.entry])}): {outcome.diverged.what}.\n")
    if outcome.broken is None and outcome.diverged is None:
        text.append("The law holds to the end", "bold green")
        text.append(f"; {outcome.events} events did what was recorded.\n")
    return text


def _header(recording: Recording, outcome: Outcome) -> Table:
    table = Table("recording", "", title_justify="left")
    for key in HEADER:
        table.add_row(key, str(recording.header.get(key, "-")))
    table.add_row("written", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(recording.header.get("at", 0))))
    pages = len(recording.columns["holders"]) - 1
    table.add_row("pages", f"{pages}, of {recording.header['books']['layout'].tokens_per_page} tokens")
    table.add_row("entries", f"{len(recording.entries)}, of them {outcome.events} events replayed")
    return table


def _timeline(recording: Recording, replay: Replay, last: int) -> Table:
    table = Table("event", "ms", "core", "what came", "what it did", "books", title="timeline", title_justify="left")
    rows = _rows(recording)
    found = [f.entry for f in (replay.outcome.broken, replay.outcome.diverged) if f is not None]
    marked = {replay.event_of(entry) for entry in found}
    begun = rows[0][1].now if rows else 0.0
    for number, entry, changes in rows[-last:] if last else rows:
        cells = (number, f"{(entry.now - begun) * 1e3:.1f}", entry.core, _event(entry), _actions(entry), changes)
        table.add_row(*map(str, cells), style="bold red" if number in marked else None)
    return table


def _rows(recording: Recording) -> list[tuple[int, Handled, str]]:
    """Number, event, and the changes of the books that followed it."""
    rows: list[tuple[int, Handled, list[str]]] = []
    for number, entry in enumerate(recording.entries):
        if isinstance(entry, Handled):
            rows.append((number, entry, []))
        elif rows:
            rows[-1][2].append(_change(entry))
    return [(number, entry, "; ".join(changes)) for number, entry, changes in rows]


def _change(entry: Changed) -> str:
    pages = str(entry.what) if isinstance(entry.what, int) else _few(entry.what)
    return f"{entry.change} {pages}" + ("" if entry.by_core else " (loop)")


def _few(pages: tuple[int, ...]) -> str:
    shown = " ".join(map(str, pages[:8]))
    return f"[{shown} … {len(pages)} in all]" if len(pages) > 8 else f"[{shown}]"


def _event(entry: Any) -> str:
    """Kind and request of an event."""
    event = entry.event
    frame = getattr(event, "frame", event)
    name = type(event).__name__ if frame is event else f"{type(frame).__name__} {_from(event)}"
    inner = getattr(frame, "landed", frame)
    key = getattr(inner, "key", None) or (getattr(inner, "request", ""), getattr(inner, "attempt", ""))
    who = f" {key[0][:8]}/{key[1]}" if key[0] else ""
    boots = getattr(frame, "boots", ())
    return name + who + (f" {', '.join(boots)}" if boots else "")


def _from(event: Any) -> str:
    kind = type(event).__name__.removeprefix("From").lower()
    return f"from {getattr(event, 'boot', kind)}"


def _actions(entry: Handled) -> str:
    return ", ".join(action for action in entry.actions if action != "Measure") or "-"
