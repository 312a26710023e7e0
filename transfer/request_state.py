"""The life of a request as one table; ingress, router, ctx and gen run projections of it.

An event that the table does not list for a state raises and names both. Every request ends in exactly one terminal
state. docs/request_states.md is generated from this table, by

    python -m tailrace.transfer.request_state > docs/request_states.md

Pure: knows no process, no frame and no clock. Who breaks it is told by UnlistedEvent, which ends one request alone.
"""

from __future__ import annotations

import sys
from enum import StrEnum

from tailrace.model.errors import WorkerError


class State(StrEnum):
    QUEUED = "queued"
    PLACED = "placed"
    PREFILLING = "prefilling"
    PREFILLED_UNBOUND = "prefilled_unbound"  # all pages final, no gen bound yet
    READING = "reading"  # a gen is bound; may overlap prefill
    RELEASING = "releasing"  # all read, `valid` awaited
    DECODING = "decoding"
    MIGRATING = "migrating"  # a new attempt is being placed
    FINISHED = "finished"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    FAILED = "failed"


class Event(StrEnum):
    PLACE = "place"
    START = "start"  # first chunk scheduled
    BIND = "bind"  # a gen took the request
    UNBIND = "unbind"  # that gen died or gave up before release
    UNBIND_EARLY = "unbind_early"  # the same while the prompt was still being computed, or queued
    PREFILL_END = "prefill_end"
    READ_ALL = "read_all"  # bitmap full and hand-off record there
    VALID = "valid"
    EXPIRED = "expired"
    LOST = "lost"  # a worker that held the request died
    PREEMPT = "preempt"
    FINISH = "finish"
    CANCEL = "cancel"
    REFUSE = "refuse"
    FAIL = "fail"


TERMINAL = frozenset({State.FINISHED, State.CANCELLED, State.REFUSED, State.FAILED})

_S, _E = State, Event
TABLE: dict[tuple[State, Event], State] = (
    {
        (_S.QUEUED, _E.PLACE): _S.PLACED,
        (_S.QUEUED, _E.REFUSE): _S.REFUSED,
        (_S.PLACED, _E.START): _S.PREFILLING,
        (_S.PLACED, _E.BIND): _S.READING,
        (_S.PREFILLING, _E.START): _S.PREFILLING,  # was bound, then unbound, while queued on ctx
        (_S.PREFILLING, _E.BIND): _S.READING,
        (_S.PREFILLING, _E.PREFILL_END): _S.PREFILLED_UNBOUND,
        (_S.PREFILLING, _E.VALID): _S.DECODING,  # local prefill: nothing to read
        (_S.PREFILLING, _E.FINISH): _S.FINISHED,
        (_S.PREFILLED_UNBOUND, _E.BIND): _S.READING,
        (_S.PREFILLED_UNBOUND, _E.FINISH): _S.FINISHED,  # the first token ended it
        (_S.READING, _E.START): _S.READING,  # bound while still queued on ctx
        (_S.READING, _E.PREFILL_END): _S.READING,
        (_S.READING, _E.UNBIND): _S.PREFILLED_UNBOUND,
        (_S.READING, _E.UNBIND_EARLY): _S.PREFILLING,
        (_S.READING, _E.READ_ALL): _S.RELEASING,
        (_S.READING, _E.FINISH): _S.FINISHED,
        (_S.RELEASING, _E.VALID): _S.DECODING,
        (_S.RELEASING, _E.EXPIRED): _S.MIGRATING,
        (_S.RELEASING, _E.UNBIND): _S.PREFILLED_UNBOUND,
        (_S.DECODING, _E.PREEMPT): _S.PREFILLING,  # recompute on the same worker
        (_S.DECODING, _E.FINISH): _S.FINISHED,
        (_S.MIGRATING, _E.PLACE): _S.PLACED,
        (_S.MIGRATING, _E.REFUSE): _S.FAILED,
    }
    | {(s, e): t for s in State if s not in TERMINAL for e, t in ((_E.CANCEL, _S.CANCELLED), (_E.FAIL, _S.FAILED))}
    | {
        (s, _E.LOST): _S.MIGRATING
        for s in (_S.PLACED, _S.PREFILLING, _S.PREFILLED_UNBOUND, _S.READING, _S.RELEASING, _S.DECODING)
    }
)


class UnlistedEvent(WorkerError):
    """The table has no transition for this event in this state."""


def advance(state: State, event: Event) -> State:
    """The state after `event`; raises UnlistedEvent naming both if the table does not list it."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise UnlistedEvent(f"event {event.value!r} is not listed for state {state.value!r}") from None


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> queued"]
    lines += [f"    {s.value} --> {t.value}: {e.value}" for (s, e), t in TABLE.items()]
    lines += [f"    {t.value} --> [*]" for t in sorted(TERMINAL)]
    return "\n".join(lines) + "\n"


_PAGE = """# The states of a request

Generated from `transfer/request_state.py`; do not edit. `python -m tailrace.transfer.request_state` prints this page.

The ingress, the router, a ctx worker and a gen worker each follow the part of the table that they can see. An event
that stands in no row for a state is an error of that process: it raises `UnlistedEvent`, which names both. Every
request ends in exactly one of {terminal}.

```mermaid
{diagram}```

## The table

| state | event | next state |
|---|---|---|
{rows}
"""


def page() -> str:
    """docs/request_states.md as it must stand."""
    rows = [f"| {state} | {event} | {target} |" for (state, event), target in sorted(TABLE.items(), key=_order)]
    names = sorted(TERMINAL)
    terminal = f"{', '.join(f'`{name}`' for name in names[:-1])} and `{names[-1]}`"
    return _PAGE.format(terminal=terminal, diagram=diagram(), rows="\n".join(rows))


def _order(entry: tuple[tuple[State, Event], State]) -> tuple[int, int]:
    (state, event), _ = entry
    return list(State).index(state), list(Event).index(event)


if __name__ == "__main__":
    sys.stdout.write(page())
