"""The flight recorder and its replay: events come out as they went in, without a word of a prompt; faults are found."""

import statistics
import time

import msgpack
import pytest
from handoff_sim import CONFIG, World, prompt

from tailrace.model.errors import ConfigError, LedgerError
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer import core_events as ce
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.messages import pack_ids
from tailrace.transfer.recorder import KEEP_FILES, Recorder
from tailrace.transfer.recording import Handled, dump, load, redacted
from tailrace.transfer.replay import Replay

MIB = 1 << 20


class Recorded:
    """A core of the simulation with a flight recorder; remembers what it did."""

    def __init__(self, folder, limit, core, kv, *given):
        config = given[0] if len(given) == 1 else given[1]
        books = {"layout": kv.layout, "block_tokens": kv.block_tokens, "granule_tokens": kv.granule_tokens}
        header = {"worker": core.__name__, "boot": "b", "duty": "", "config": config, "books": books}
        self.recorder = Recorder(kv, limit, folder, header)
        heard = [self.recorder.heard(part) if part is not config else part for part in given]
        self.core = core(self.recorder.heard(kv), *heard)
        self.recorder.record(**{"ctx" if len(given) == 1 else "gen": self.core})
        self.did = []

    def handle(self, event, now):
        actions = self.recorder.handle(self.core, event, now)
        if not isinstance(event, ce.Tick) or actions:
            self.did.append((event, actions))
        return actions

    @property
    def idle(self):
        return self.core.idle

    def __contains__(self, key):
        return key in self.core


def world(folder, *, limit=MIB, ctx_core=CtxCore, gen_core=GenCore, **more):
    return World(
        ctx_core=lambda *given: Recorded(folder, limit, ctx_core, *given),
        gen_core=lambda *given: Recorded(folder, limit, gen_core, *given),
        **more,
    )


def busy(folder, **more):
    """Two prompts handed over, a third cancelled while it is read."""
    scene = world(folder, **more)
    for i in range(2):
        scene.submit(f"r{i}", prompt(i, 14, i))
    scene.run(1.0)
    scene.read_s = 0.3
    scene.submit("r2", prompt(2, 14))
    scene.run(0.3)
    scene.cancel("r2")
    scene.run(2.0)
    return scene


def recording_of(core, why="asked"):
    path = core.recorder.dump(why, "a test")
    return load(path.read_bytes())


def without_ids(actions):
    """Kinds of actions, and what they say of pages."""
    return [(type(a).__name__, repr(getattr(a, "job", "")), type(getattr(a, "frame", None)).__name__) for a in actions]


@pytest.mark.parametrize("landing", [False, True])
def test_a_clean_recording_replays_to_the_same_actions(tmp_path, landing):
    scene = busy(tmp_path, landing=landing)
    for name in ("c0", "g0"):
        core = scene.workers[name].core
        played = []
        replay = Replay(recording_of(core), watch=lambda number, entry, actions, out=played: out.append(actions))
        outcome = replay.run()
        assert outcome.broken is None and outcome.diverged is None
        assert [without_ids(a) for a in played] == [without_ids(a) for _, a in core.did]
        assert outcome.events == len(core.did) > 10
        assert replay.pool.columns() == scene.workers[name].kv._pool.columns() | {
            "generations": replay.pool.columns()["generations"]
        }


def test_a_recording_that_begins_in_mid_work_replays_from_there(tmp_path):
    """Under load without rest segments are cut where they are full: the cores' states stand at the beginning."""
    scene = world(tmp_path, limit=6000)
    for i in range(30):
        scene.submit(f"r{i}", prompt(i, 14, i))
        scene.run(0.12)
    for name in ("c0", "g0"):
        recording = recording_of(scene.workers[name].core)
        assert any(recording.cores[role]["_leases"]._until for role in recording.cores), "it begins at rest"
        outcome = Replay(recording).run()
        assert outcome.broken is None and outcome.diverged is None and outcome.events > 5


def test_what_it_keeps_is_bounded(tmp_path):
    scene = world(tmp_path, limit=6000)
    sizes = []
    for i in range(60):
        scene.submit(f"r{i}", prompt(i, 14, i))
        scene.run(0.12)
        recorder = scene.workers["c0"].core.recorder
        sizes.append(sum(s.nbytes for s in (recorder._older, recorder._segment) if s is not None))
    assert max(sizes) < 6000 + 1500 and min(sizes[20:]) > 2000


def test_no_word_of_a_prompt_or_an_answer_is_in_a_recording(tmp_path):
    params = SamplingParams(max_tokens=8, seed=987654321, stop_token_ids=(31337,), logit_bias=((4242, 1.5),))
    scene = world(tmp_path)
    ids = tuple(range(70001, 70015))
    place = scene.place

    def with_params(request):
        request.params = params
        place(request)

    scene.place = with_params
    scene.submit("r0", ids)
    scene.run(3.0)
    for name in ("c0", "g0"):
        data = dump(recording_of(scene.workers[name].core))
        plain = msgpack.packb(_everything(load(data)))
        for secret in (
            *[pack_ids((i,)) for i in ids],
            msgpack.packb(987654321),
            msgpack.packb(31337),
            msgpack.packb(4242),
        ):
            assert secret not in plain
        assert scene.requests["r0"].outcome == "finished"


def _everything(value):
    if isinstance(value, dict):
        return [[_everything(k), _everything(v)] for k, v in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [_everything(v) for v in value]
    if isinstance(value, int | float | str | bytes | None):
        return value
    return [
        _everything(getattr(value, n)) for n in dir(value) if not n.startswith("__") and not callable(getattr(value, n))
    ]


class ReleasesUnderACopy(GenCore):
    """Gives the pages of a dropped hand-off back at once, also those that a copy may still write."""

    def _drop(self, hand, why, *, tell_ctx):
        for number in hand.jobs:
            self._jobs.pop(number)
        hand.jobs.clear()
        return super()._drop(hand, why, tell_ctx=tell_ctx)


class ForgetsPins(CtxCore):
    """Ends an attempt without giving its pins back."""

    def _let_go(self, attempt, word):
        attempt.pinned = {}
        return super()._let_go(attempt, word)


class ForgetsQuarantine(GenCore):
    """Does not give the pages of a dropped hand-off back when the copy has ended."""

    def _read_done(self, done, now):
        job = self._jobs[done.job]
        if job.quarantined:
            del self._jobs[done.job]
            return []
        return super()._read_done(done, now)


def test_a_page_freed_under_a_copy_is_dumped_at_once_and_replay_names_the_event(tmp_path):
    with pytest.raises(LedgerError, match="while a copy of ours may write them"):
        busy(tmp_path, gen_core=ReleasesUnderACopy)
    (path,) = tmp_path.glob("*.recording")
    recording = load(path.read_bytes())
    (cancel,) = [i for i, e in enumerate(recording.entries) if isinstance(e, Handled) and _is_cancel(e.event)]
    planted = Replay(recording, gen_core=ReleasesUnderACopy)
    found = planted.run()
    assert found.diverged is None and "while a copy" in found.broken.what
    assert planted.event_of(found.broken.entry) == cancel
    ours = Replay(recording).run()  # the product's core does it right, so it parts from the recording at that event
    assert ours.diverged.entry == cancel and "quarantine" in ours.diverged.what
    assert ours.broken == found.broken


def _is_cancel(event):
    return type(getattr(event, "frame", None)).__name__ == "Cancel"


@pytest.mark.parametrize(
    ("side", "core", "worker", "word"),
    [("ctx_core", ForgetsPins, "c0", "pins"), ("gen_core", ForgetsQuarantine, "g0", "is quarantined")],
)
def test_a_lost_release_is_found_at_the_event_that_lost_it(tmp_path, side, core, worker, word):
    scene = busy(tmp_path, **{side: core})
    recording = recording_of(scene.workers[worker].core, "broken")
    planted = Replay(recording, **{side: core})
    found = planted.run()
    assert found.diverged is None and word in found.broken.what
    ours = Replay(recording).run()  # at that event the product's core asks for what the other forgot
    assert ours.diverged.entry == planted.event_of(found.broken.entry)


def test_old_files_make_room_for_new_ones(tmp_path):
    scene = busy(tmp_path)
    recorder = scene.workers["c0"].core.recorder
    paths = [recorder.dump("asked", str(i)) for i in range(KEEP_FILES + 3)]
    assert sorted(tmp_path.glob("*.recording")) == sorted(paths[3:])
    assert recorder.dumps == {"asked": KEEP_FILES + 3}
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths[3:])


def test_what_is_no_recording_is_refused():
    for data in (b"", b"abc", b"tailrace recording 1\nabc"):
        with pytest.raises(ConfigError, match="recording"):
            load(data)


def test_recording_costs_a_few_microseconds_an_event(tmp_path, record_property):
    """Of the transfer thread's time, about 30 events a request; token deltas are none."""

    def seconds(limit):
        scene = world(tmp_path, limit=limit)
        begun, events = time.process_time(), 0
        for i in range(40):
            scene.submit(f"r{i}", prompt(i, 14, i))
            scene.run(0.2)
        events = sum(len(w.core.did) for w in scene.workers.values())
        return (time.process_time() - begun) / events

    pairs = [(seconds(MIB), seconds(0)) for _ in range(5)]
    cost = statistics.median(on - off for on, off in pairs)
    record_property("microseconds_an_event", cost * 1e6)
    assert cost < 60e-6


def test_redacted_events_are_as_long_as_they_were():
    config = CONFIG
    scene = World(config=config)
    request = scene.submit("r0", prompt(0, 9))
    submit = None
    scene.workers["c0"].core.handle = lambda event, now: _keep(event)
    kept = []

    def _keep(event):
        kept.append(event)
        return []

    scene.run(0.1)
    submit = next(e for e in kept if isinstance(e, ce.FromIngress))
    bare = redacted(submit)
    assert len(bare.frame.prompt_ids) == len(submit.frame.prompt_ids) == 4 * len(request.tokens)
    assert set(bare.frame.prompt_ids) == {0} and bare.frame.hashes == submit.frame.hashes
