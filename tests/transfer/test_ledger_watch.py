"""A real node whose core is at fault: the recording it writes, and what `tailrace replay` says of it."""

import json
import os
import subprocess
import sys

import pytest
from node_rig import KEY, event, finish, prefill, submit, until

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import LedgerError
from tailrace.transfer import ledger_watch
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.loop_events import Admitted, Arrived, FaultsSet
from tailrace.transfer.messages import Bound, Cancel, SetFaults
from tailrace.transfer.recording import Handled, load
from tailrace.transfer.replay import Replay


class ReleasesUnderACopy(GenCore):
    """Gives the pages of a dropped hand-off back at once, also those that a copy may still write."""

    def _drop(self, hand, why, *, tell_ctx):
        for number in hand.jobs:
            self._jobs.pop(number)
        hand.jobs.clear()
        return super()._drop(hand, why, tell_ctx=tell_ctx)


class ForgetsTheRelease(CtxCore):
    """Answers a release and keeps the pins."""

    def _release(self, boot, release):
        attempt = self._attempts.get((release.request, release.attempt))
        if attempt is not None:
            attempt.pinned = {}
        return super()._release(boot, release)


def replayed(path):
    """The command, as an operator runs it."""
    command = [sys.executable, "-m", "tailrace.cluster.cli", "replay", str(path), "--last", "0"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    )


def handed_over(rig, num_tokens=16):
    rig.ingress.dial(rig.ctx)
    rig.ingress.send("c0", submit(num_tokens))
    event(rig.ctx, Arrived)
    pages = prefill(rig, num_tokens)
    rig.bind(num_tokens)
    rig.router.expect(Bound)
    finish(rig, num_tokens, pages)
    admitted = event(rig.gen, Admitted)
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(KEY, "finished")


@pytest.fixture
def planted_rig(one_rig, tmp_path, monkeypatch):
    """A rig whose nodes write to tmp_path, with cores of our own in place of the product's."""

    def make(**cores):
        for name, core in cores.items():
            monkeypatch.setattr(ledger_watch, name, core)
        settings = {"faults": True, "recorder_dir": str(tmp_path)}
        rig = one_rig(ctx=settings, gen=settings)
        rig.follow(rig.ctx, rig.gen)
        rig.pair()
        return rig

    return make


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_page_freed_under_a_copy_ends_the_worker_and_its_recording_names_the_event(planted_rig, tmp_path):
    rig = planted_rig(GenCore=ReleasesUnderACopy)
    rig.router.send("g0", SetFaults(json.dumps({"hold_before_page": 1})))
    event(rig.gen, FaultsSet)
    rig.ingress.dial(rig.ctx)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("c0", submit(16))
    event(rig.ctx, Arrived)
    prefill(rig, 16)
    rig.bind(16)
    rig.router.expect(Bound)
    until(lambda: rig.gen.kv.counts().held == 4)
    until(lambda: rig.gen._board._gen.jobs())
    rig.ingress.send("g0", Cancel(*KEY, "client"))
    until(lambda: list(tmp_path.glob("g0-*.recording")))
    until(lambda: rig.gen._failure is not None)  # what its pages hold can no longer be trusted
    (path,) = tmp_path.glob("g0-*.recording")
    recording = load(path.read_bytes())
    assert recording.header["boot"] == rig.gen.config.boot and recording.header["why"] == "broken"
    run = Replay(recording, gen_core=ReleasesUnderACopy)
    found = run.run()
    assert found.diverged is None and "while a copy of ours may write them" in found.broken.what
    culprit = recording.entries[run.event_of(found.broken.entry)]
    assert isinstance(culprit, Handled) and isinstance(culprit.event.frame, Cancel)
    result = replayed(path)
    assert result.returncode == 1, result.stderr
    assert f"The law is broken after event {run.event_of(found.broken.entry)} (Cancel from ingress" in result.stdout
    assert "the core parts from the recording" in result.stdout  # the product's core would have quarantined them


def test_a_lost_release_is_found_at_rest_shown_and_recorded_and_the_worker_goes_on(planted_rig, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_watch, "STILL_S", 0.5)
    rig = planted_rig(CtxCore=ForgetsTheRelease)
    handed_over(rig)
    until(lambda: list(tmp_path.glob("c0-*.recording")))
    assert rig.ctx.metrics.value("tailrace_ledger_holds", books="kv") == 0
    assert rig.gen.metrics.value("tailrace_ledger_holds", books="kv") == 1
    until(lambda: rig.ctx.metrics.value("tailrace_recordings_total", reason="broken") == 1)
    assert rig.ctx._failure is None and rig.ctx.kv.counts().pinned == 4
    (path,) = tmp_path.glob("c0-*.recording")
    run = Replay(load(path.read_bytes()), ctx_core=ForgetsTheRelease)
    found = run.run()
    assert "pins" in found.broken.what
    assert type(run.recording.entries[run.event_of(found.broken.entry)].event.frame).__name__ == "Release"
    result = replayed(path)
    assert result.returncode == 4 and "unpin" in result.stdout, result.stdout


def test_a_healthy_worker_writes_a_recording_when_asked_and_it_replays_clean(planted_rig, tmp_path):
    rig = planted_rig()
    handed_over(rig)
    for worker in ("c0", "g0"):
        rig.router.send(worker, SetFaults(json.dumps({"record": True})))
    until(lambda: len(list(tmp_path.glob("*.recording"))) == 2)
    for path in tmp_path.glob("*.recording"):
        result = replayed(path)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "The law holds to the end" in result.stdout and "asked" in result.stdout
    assert rig.ctx.metrics.value("tailrace_ledger_holds", books="kv") == 1


def test_recording_starts_anew_once_the_books_were_found_right_at_rest(planted_rig, tmp_path):
    rig = planted_rig()
    handed_over(rig)
    recorders = [node._board.ledger.recorder for node in (rig.ctx, rig.gen)]
    until(lambda: not any(recorder._segment.entries for recorder in recorders))
    assert all(recorder._segment.columns["generations"][1:5] == [1, 1, 1, 1] for recorder in recorders[:1])


def test_what_the_loop_does_wrong_is_recorded_too(planted_rig, tmp_path):
    rig = planted_rig()
    handed_over(rig)
    page = rig.ctx.kv.allocate(1)
    rig.ctx.kv.release(page)
    with pytest.raises(LedgerError):
        rig.ctx.kv.release(page)
    (path,) = tmp_path.glob("c0-*.recording")
    result = replayed(path)
    assert result.returncode == 1 and "nobody may release it now" in result.stdout
    assert f"release [{page[0]}] (loop)" in result.stdout


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_books_that_do_not_add_up_end_the_worker(planted_rig, tmp_path):
    rig = planted_rig()
    handed_over(rig)
    books: KvManager = rig.ctx.kv
    books._pool._count[0] -= 1
    rig.ingress.send("c0", Cancel("f" * 32, 0, "client"))  # something happens, then it rests
    until(lambda: rig.ctx._failure is not None)
    (path,) = tmp_path.glob("c0-*.recording")
    assert "the books say" in load(path.read_bytes()).header["reason"]


def test_what_is_no_recording_is_told_by_the_command(tmp_path):
    (tmp_path / "no.recording").write_bytes(b"no")
    for name, text in (("no.recording", "no flight recording"), ("absent", "No such file")):
        result = replayed(tmp_path / name)
        assert result.returncode == 2 and text in result.stderr
