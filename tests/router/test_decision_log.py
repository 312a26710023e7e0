"""The log of placements: complete, small, bounded, and good for asking another policy."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from dataclasses import replace

import pytest
from router_scene import Scene
from typer.testing import CliRunner

from tailrace.cluster.cli import cli
from tailrace.model.errors import ConfigError
from tailrace.router.decision_log import DecisionLog, load
from tailrace.router.decisions import KEPT, Decision, Entry, Outcome, from_line, replay, snapshot, to_line
from tailrace.router.policies import POLICIES, PlaceView, PrefillCandidate
from tailrace.transfer.messages import Done, Timing


def candidates(count):
    return [
        PrefillCandidate(f"w{i}", 100 + (i * 37) % 101, ((i * 53) % 97) / 10, 0.5, (i * 29) % 211, (i * 41) % 89)
        for i in range(count)
    ]


def entry(number, seen=(), *, chosen="w0", outcome="finished", ttft_s=1.5):
    decision = Decision(
        100.0 + number, f"r{number}", 1, 640, "least_prefill", "prefill", "", 0.25, chosen, 1.25, len(seen), tuple(seen)
    )
    return Entry(decision, Outcome(outcome, ttft_s, 0.25, 0.75, 64))


class Logged(Scene):
    """A scene whose core keeps its decisions."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.entries = []
        self.state.log_decision = self.entries.append


def test_an_entry_is_one_line_of_json_and_comes_back_equal():
    made = entry(1, candidates(3))
    line = to_line(made)
    assert "\n" not in line and from_line(line) == made
    assert json.loads(line)["candidates"][0] == ["w0", 100, 0.0, 0.5, 0, 0]


@pytest.mark.parametrize("line", ["", "{}", "[]", '{"v":2}', to_line(entry(1))[:-9]])
def test_what_is_no_line_is_refused_by_name(line):
    with pytest.raises(ConfigError, match="decision log"):
        from_line(line)


@pytest.mark.parametrize("count", [1, KEPT, KEPT + 1, 1024])
def test_of_many_candidates_those_are_kept_that_any_policy_would_take(count):
    everyone, view = candidates(count), PlaceView(640)
    last = everyone[-1].boot
    kept = snapshot(everyone, view, last)
    assert len(kept) == min(count, KEPT) if count <= KEPT else len(kept) <= KEPT
    assert last in {c.boot for c in kept} and len(to_line(entry(1, kept))) < 1600
    for policy in POLICIES.values():
        assert policy(kept, view) == policy(everyone, view)


def test_a_placement_is_logged_once_when_its_request_ends_with_what_the_policy_saw():
    scene = Logged(max_backlog_s=1e9)
    ctxs, _ = scene.cluster(2, 1)
    busy, key = scene.place(tokens=640), scene.place(tokens=320)
    chosen = scene.state.records[key].worker
    assert not scene.entries
    scene.say("ingress-1", Done(*key, "finished", "", timing=Timing(0.5, 0.1, 0.3, 32)))
    (made,) = scene.entries
    decision = made.decision
    assert (decision.request, decision.num_tokens, decision.policy) == (key[0], 320, "least_prefill")
    assert decision.chosen == chosen and {c.boot for c in decision.candidates} == set(ctxs)
    assert sorted(c.wait_s for c in decision.candidates) == [0.0, pytest.approx(0.64)]
    assert decision.predicted_s == pytest.approx(0.32)
    assert made.outcome == Outcome("finished", 0.5, 0.1, 0.3, 32)
    scene.done(busy, "cancelled")
    scene.done(key)
    assert len(scene.entries) == 2 and scene.entries[1].outcome == Outcome("cancelled")
    scene.assert_quiet()


def test_time_in_the_queue_and_local_prefills_are_told_apart_from_what_a_policy_did():
    scene = Logged(local_prefill_max_tokens=64, max_backlog_s=0.5)
    scene.cluster(1, 1)
    local = scene.place(tokens=10)
    first, waits = scene.place(tokens=600), scene.place(tokens=600)
    scene.wait(1.0)
    scene.done(first)
    for key in (local, waits):
        scene.done(key)
    by_request = {e.decision.request: e.decision for e in scene.entries}
    assert (by_request[local[0]].leg, by_request[local[0]].why, by_request[local[0]].candidates) == (
        "local", "chosen", (),
    )  # fmt: skip
    assert by_request[waits[0]].waited_s == pytest.approx(1.0) and by_request[first[0]].waited_s == 0


def test_without_a_log_no_decision_is_kept():
    scene = Scene()
    scene.cluster(2, 1)
    key = scene.place()
    assert scene.state.records[key].decision is None


# ----------------------------------------------------------------------------------------------------------------- file


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_the_log_is_written_by_another_thread_and_read_back(tmp_path):
    path = tmp_path / "placements.jsonl"
    log = DecisionLog(path, 1 << 20)
    for number in (2, 1, 3):
        log.put(entry(number, candidates(2)))
    log.close()
    log.put(entry(4))
    assert [e.decision.request for e in load(path)] == ["r1", "r2", "r3"] and log.dropped == 1
    assert not [t for t in threading.enumerate() if t.name == "decision-log"]
    again = DecisionLog(path, 1 << 20)
    again.put(entry(5))
    again.close()
    with path.open("a") as file:
        file.write('{"v":1,"ti')  # the router was killed here
    assert [e.decision.request for e in load(path)] == ["r1", "r2", "r3", "r5"]


def test_its_size_is_bounded_and_the_newest_half_stays(tmp_path):
    path, limit = tmp_path / "p.jsonl", 20_000
    log = DecisionLog(path, limit)
    for number in range(300):
        log.put(entry(number, candidates(2)))
        if number % 7 == 0:
            wait_for(lambda: not log._pending)
        with contextlib.suppress(FileNotFoundError):  # the thread is just moving one away
            assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= limit
    log.close()
    kept = [e.decision.request for e in load(path)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.jsonl", "p.jsonl.1"]
    assert kept == [f"r{n}" for n in range(300 - len(kept), 300)] and len(kept) * 400 > limit / 2


def test_a_disk_that_takes_nothing_is_told_once_and_holds_up_nobody(tmp_path, caplog):
    log = DecisionLog(tmp_path / "absent" / "p.jsonl", 1 << 20)
    for number in range(5):
        log.put(entry(number))
        wait_for(lambda n=number: log.dropped == n + 1)
    log.close()
    assert sum(record.message == "decision_log_not_written" for record in caplog.records) == 1


def test_what_the_thread_cannot_keep_up_with_is_dropped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("tailrace.router.decision_log._MOST_PENDING", 3)
    gate = threading.Event()
    monkeypatch.setattr(DecisionLog, "_write", lambda self, batch: gate.wait(10))
    log = DecisionLog(tmp_path / "p.jsonl", 1 << 20)
    log.put(entry(0))
    wait_for(lambda: not log._pending)
    for number in range(5):
        log.put(entry(number))
    assert log.dropped == 2
    gate.set()
    log.close()


# --------------------------------------------------------------------------------------------------------------- replay


def test_other_policies_are_asked_with_what_this_one_saw():
    near = PrefillCandidate("near", 500, 2.0, 0.5, 1, 0)
    idle = PrefillCandidate("idle", 900, 0.0, 1.0, 2, 0)
    entries = [entry(1, (near, idle), chosen="idle"), entry(2)]
    (least,) = replay(entries, "least_prefill")
    assert least.same and least.predicted_s == 1.0
    (tokens,) = replay(entries, "least_tokens")
    assert not tokens.same and (tokens.chosen, tokens.predicted_s) == ("near", 2.5)
    (mine,) = replay(entries, lambda seen, view: seen[0].boot if view.num_tokens == 640 else "")
    assert mine.chosen == "near"
    with pytest.raises(ConfigError, match="known are least_prefill"):
        list(replay(entries, "best"))


def test_a_conversation_that_was_bound_is_bound_in_the_replay_too():
    near, idle = PrefillCandidate("near", 500, 0.5, 0.5, 1, 0), PrefillCandidate("idle", 900, 0.99, 0.0, 2, 0)
    made = entry(1, (near, idle))
    stays = replace(made, decision=replace(made.decision, bound="near", crowd_wait_s=0.25))
    assert from_line(to_line(stays)) == stays
    assert [r.chosen for r in replay([made, stays], "least_prefill")] == ["idle", "near"]


def test_the_command_shows_what_another_policy_would_have_chosen(tmp_path):
    path = tmp_path / "p.jsonl"
    near, idle = PrefillCandidate("near", 500, 2.0, 0.5, 1, 0), PrefillCandidate("idle", 900, 0.0, 1.0, 2, 0)
    path.write_text("".join(to_line(entry(n, (near, idle), chosen="idle")) + "\n" for n in range(4)))
    shown = CliRunner().invoke(cli, ["replay-decisions", str(path), "--policy", "least_tokens"])
    assert shown.exit_code == 0 and "2.5000" in shown.output and "1.2500" in shown.output
    assert "0 of 4" in " ".join(shown.output.split())
    assert isinstance(CliRunner().invoke(cli, ["replay-decisions", str(path), "--policy", "x"]).exception, ConfigError)
    assert isinstance(
        CliRunner().invoke(cli, ["replay-decisions", str(tmp_path / "no"), "--policy", "prefix"]).exception, ConfigError
    )
