"""The table of a request's states: it always comes to an end, says no clearly, and is what the docs show."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.transfer.request_state import TABLE, TERMINAL, Event, State, UnlistedEvent, advance, diagram, page

DOCS = Path(__file__).resolve().parents[2] / "docs" / "request_states.md"
LIVING = [state for state in State if state not in TERMINAL]
UNLISTED = [(state, event) for state in State for event in Event if (state, event) not in TABLE]


def successors(state: State) -> set[State]:
    return {target for (source, _), target in TABLE.items() if source is state}


def reachable(start: State) -> set[State]:
    found, todo = {start}, [start]
    while todo:
        for target in successors(todo.pop()) - found:
            found.add(target)
            todo.append(target)
    return found


def test_every_state_is_reached_from_the_first_one():
    assert reachable(State.QUEUED) == set(State)


@pytest.mark.parametrize("state", LIVING)
def test_from_every_living_state_each_end_but_a_refusal_can_be_reached(state):
    assert reachable(state) >= TERMINAL - {State.REFUSED}


@pytest.mark.parametrize("state", sorted(TERMINAL))
def test_an_ended_request_stays_ended(state):
    assert successors(state) == set()


@pytest.mark.parametrize("state", LIVING)
def test_a_client_may_leave_and_a_fault_may_come_at_any_time(state):
    assert advance(state, Event.CANCEL) is State.CANCELLED
    assert advance(state, Event.FAIL) is State.FAILED


def test_only_what_was_never_placed_is_refused():
    assert {source for (source, _), target in TABLE.items() if target is State.REFUSED} == {State.QUEUED}


def test_whatever_a_worker_holds_survives_its_death_as_another_attempt():
    lost = {source for (source, event) in TABLE if event is Event.LOST}
    assert lost == set(LIVING) - {State.QUEUED, State.MIGRATING}
    assert all(advance(state, Event.LOST) is State.MIGRATING for state in lost)


def test_nothing_is_decoded_before_it_was_found_valid():
    ways = {(source, event) for (source, event), target in TABLE.items() if target is State.DECODING}
    assert ways == {(State.RELEASING, Event.VALID), (State.PREFILLING, Event.VALID)}  # the second: local prefill


@pytest.mark.parametrize(("state", "event"), UNLISTED)
def test_an_unlisted_event_raises_and_names_both(state, event):
    with pytest.raises(UnlistedEvent, match=f"'{event.value}'.*'{state.value}'"):
        advance(state, event)


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_no_order_of_events_ends_a_request_twice(events):
    state, ends = State.QUEUED, 0
    for event in events:
        if (state, event) in TABLE:
            state = advance(state, event)
            ends += state in TERMINAL
    assert ends == (state in TERMINAL)


def test_the_diagram_shows_every_transition_once():
    lines = diagram().splitlines()
    shown = [line.strip() for line in lines if ": " in line]
    assert sorted(shown) == sorted(f"{source} --> {target}: {event}" for (source, event), target in TABLE.items())
    assert {line.strip() for line in lines if "[*]" in line} == {
        "[*] --> queued", *(f"{state} --> [*]" for state in TERMINAL),
    }  # fmt: skip


def test_the_page_in_the_docs_is_the_table():
    told = "run `python -m tailrace.transfer.request_state > docs/request_states.md`"
    assert DOCS.read_text() == page(), told


def test_the_module_prints_the_page():
    command = [sys.executable, "-m", "tailrace.transfer.request_state"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == page()
