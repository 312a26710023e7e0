"""Both cores and both page books through drops, duplicates, delays, stops, kills, restarts with a new boot id, new
routers, broken links and cancels, in simulated time, over a reading and a landing transport.

Whatever the schedule, no page is decoded whose content is wrong, no law of the books breaks (pages, landing chunks, and
what the cores own of them), every request ends, and within lease + 2 s of the last one's end nothing is left. Cores
with a planted fault show that the machine would see one. tests/transfer/test_handoff_search.py looks at small worlds
without gaps; this one at larger worlds by chance.
"""

import multiprocessing
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import pytest
from handoff_sim import CONFIG as LONG
from handoff_sim import KINDS, PAGE, World, prompt, row_layout
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tailrace.model.errors import LedgerError
from tailrace.transfer.bitmap import UnitBitmap
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.gen_core import GenCore

CONFIG = replace(LONG, pin_lease_s=1.0)  # so that leases end in most schedules
WORKERS = st.sampled_from(["c0", "c1", "g0", "g1"])


class HandoffMachine(RuleBasedStateMachine):
    """`ctx_core`, `gen_core`: the cores under test. `layout`: of the pages; None for plain ones."""

    ctx_core, gen_core, layout = CtxCore, GenCore, None

    @initialize(landing=st.booleans(), pages=st.integers(8, 14))
    def begin(self, landing, pages):
        if self.layout is not None:
            pages += 2 * self.layout.num_state_pages
        self.world = World(
            landing=landing, ctx_pages=pages + 6, gen_pages=pages, num_ctx=2, num_gen=2,
            ctx_core=self.ctx_core, gen_core=self.gen_core, config=CONFIG, layout=self.layout,
        )  # fmt: skip
        self.world.chunk_tokens = 6  # a page of 4 spans two chunks
        self.count = 0

    @rule(
        family=st.integers(0, 2), length=st.integers(1, 30), max_tokens=st.sampled_from([1, 8, 8, 8]),
        n=st.integers(1, 3), seconds=st.sampled_from([0.0, 0.06, 0.1, 0.2]), left=st.sampled_from([0, 0, 0, 5, 40]),
    )  # fmt: skip
    def submit(self, family, length, max_tokens, n, seconds, left):
        """`left`: of the prompt's last tokens, to gen."""
        for _ in range(n):
            self.count += 1
            self.world.submit(f"r{self.count}", prompt(family, length, self.count), max_tokens=max_tokens, left=left)
        self.world.run(seconds)

    @rule(seconds=st.sampled_from([0.01, 0.03, 0.1, 0.3]))
    def wait(self, seconds):
        self.world.run(seconds)

    @rule(seconds=st.sampled_from([0.2, 0.5, 1.0, 3.5]))
    def wait_long(self, seconds):
        self.world.run(seconds)

    @precondition(lambda self: self.count)
    @rule(back=st.integers(0, 3))
    def cancel(self, back):
        self.world.cancel(f"r{max(1, self.count - back)}")

    @rule(kind=st.sampled_from(sorted(KINDS)), fault=st.sampled_from(["drop", "dup", "late"]), n=st.integers(1, 3))
    def lose(self, kind, fault, n):
        self.world.faults[kind] += [fault] * n

    @rule()
    def silence(self):
        """Gen's renewals do not come through for a while, so that pin leases end."""
        self.world.faults["want"] += ["drop"] * 40

    @rule(held=st.booleans())
    def hold(self, held):
        self.world.held = held

    @rule(seconds=st.sampled_from([0.002, 0.02, 0.3]))
    def speed(self, seconds):
        self.world.read_s = seconds

    @rule()
    def fail_read(self):
        self.world.read_errors = ["fault"]

    @rule(how=st.sampled_from(["fault", "lost"]))
    def fail_post(self, how):
        self.world.post_errors = [how]

    @rule(name=WORKERS)
    def kill(self, name):
        self.world.kill(name)

    @rule(name=WORKERS)
    def restart(self, name):
        if not self.world.workers[name].alive:
            self.world.start("ctx" if name[0] == "c" else "gen", name)

    @rule(name=WORKERS)
    def stop(self, name):
        """Its process stands still, like under SIGSTOP: what it is sent waits, its leases run."""
        self.world.stop(name)

    @rule(name=WORKERS, ticks_first=st.booleans())
    def resume(self, name, ticks_first):
        self.world.resume(name, ticks_first=ticks_first)

    @rule()
    def new_router(self):
        self.world.new_router()

    @rule(c=st.sampled_from(["c0", "c1"]), g=st.sampled_from(["g0", "g1"]), seconds=st.sampled_from([0.05, 1.0]))
    def break_link(self, c, g, seconds):
        ctx, gen = self.world.workers[c], self.world.workers[g]
        if ctx.alive and gen.alive and (ctx.boot, gen.boot) not in self.world.down:
            self.world.break_link(ctx.boot, gen, seconds)

    @invariant()
    def laws_hold(self):
        if hasattr(self, "world"):
            self.world.check_laws()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.held = False
        world.faults.clear()
        for name, worker in list(world.workers.items()):
            world.resume(name, ticks_first=True)
            if not worker.alive:
                world.start("ctx" if name[0] == "c" else "gen", name)
        world.run(20)
        open_still = [(r, r.key in world.unbound) for r in world.requests.values() if not r.outcome]
        assert not open_still, f"requests that never ended: {open_still}"
        world.renewing = False
        world.run(max(CONFIG.pin_lease_s, CONFIG.request_lease_s, CONFIG.kv_transfer_timeout_s) + 2)
        world.assert_quiet()


TestHandoff = HandoffMachine.TestCase
TestHandoff.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


class RowHandoffMachine(HandoffMachine):
    """The same with state pages, which ctx overwrites with each chunk."""

    layout = row_layout()


TestRowHandoff = RowHandoffMachine.TestCase
TestRowHandoff.settings = settings(TestHandoff.settings, max_examples=30)


class ReleasesUnderACopy(GenCore):
    """Frees the pages of a dropped hand-off at once, also those that a copy may still write."""

    def _drop(self, hand, why, *, tell_ctx):
        for number in hand.jobs:
            self._jobs.pop(number)
        hand.jobs.clear()
        return super()._drop(hand, why, tell_ctx=tell_ctx)


class AnnouncesTheOpenPage(CtxCore):
    """Tells of the page that the next chunk will still write."""

    def _chunk_done(self, event, now):
        attempt = self._attempts.get(event.key)
        limit = attempt.num_tokens - 1 if attempt is not None and event.tokens_ready < attempt.num_tokens else 1 << 30
        rounded = min(limit, -(-event.tokens_ready // PAGE) * PAGE)
        return super()._chunk_done(replace(event, tokens_ready=max(event.tokens_ready, rounded)), now)


class AnnouncesTheState(CtxCore):
    """Takes a prompt for computed when its last page is begun."""

    def _chunk_done(self, event, now):
        attempt = self._attempts.get(event.key)
        if attempt is not None and self._kv.layout.num_pages(event.tokens_ready) == self._kv.layout.num_pages(
            attempt.num_tokens
        ):
            event = replace(event, tokens_ready=attempt.num_tokens)
        return super()._chunk_done(event, now)


class ForgetsTheState(GenCore):
    """Expects no state pages where it holds a part of the history."""

    def _bind(self, bind, now):
        actions = super()._bind(bind, now)
        hand = self._hands.get((bind.request, bind.attempt))
        if hand is not None and hand.num_matched_tokens:
            history = self._kv.layout.history_pages(bind.num_tokens)
            hand.units = UnitBitmap([u for u in hand.units.missing() if u.ordinal < history])
        return actions


class ForgetsTheRelease(CtxCore):
    """Answers a release and keeps the pins."""

    def _release(self, boot, release):
        attempt = self._attempts.get((release.request, release.attempt))
        if attempt is not None:
            attempt.pinned = {}
        return super()._release(boot, release)


class ForgetsChunks(GenCore):
    """Does not take the landing chunks back that its peer will not write any more."""

    def _reclaim(self, key, boot, hand):
        self._orphans.take(boot, key)
        if hand is not None:
            hand.grants = {}


@pytest.mark.parametrize(
    ("side", "core", "machine"),
    [
        ("gen_core", ReleasesUnderACopy, HandoffMachine), ("ctx_core", AnnouncesTheOpenPage, HandoffMachine),
        ("ctx_core", ForgetsTheRelease, HandoffMachine), ("gen_core", ForgetsChunks, HandoffMachine),
        ("ctx_core", AnnouncesTheState, RowHandoffMachine), ("gen_core", ForgetsTheState, RowHandoffMachine),
    ],
)  # fmt: skip
def test_the_machine_finds_what_is_freed_or_announced_too_early_and_what_is_never_freed(side, core, machine):
    planted = type("Planted", (machine,), {side: core})
    plan = settings(
        max_examples=400, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
    )  # fmt: skip
    with pytest.raises((AssertionError, LedgerError, KeyError)):
        run_state_machine_as_test(planted, settings=plan)


@pytest.mark.alone
def _a_minute(told: Connection) -> None:
    """Tell how many schedules a minute one processor runs, by the best of three."""
    runs, best = 60, 0.0
    plan = settings(
        max_examples=runs, stateful_step_count=40, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    for _ in range(3):
        begun = time.process_time()
        run_state_machine_as_test(HandoffMachine, settings=plan)
        best = max(best, runs * 60 / (time.process_time() - begun))
    told.send(best)


def test_it_runs_thousands_of_schedules_a_minute(record_property):
    """All processors at once, each schedule of up to 40 rules, ending quiet."""
    fork, rates = multiprocessing.get_context("fork"), []
    for _ in os.sched_getaffinity(0):
        rate, told = fork.Pipe(duplex=False)
        process = fork.Process(target=_a_minute, args=(told,))
        process.start()
        rates.append((rate, process))
    found = []
    for rate, process in rates:
        assert rate.poll(120), "a process ran no schedules"
        found.append(rate.recv())
        process.join()
        assert process.exitcode == 0
    record_property("schedules_a_minute", round(sum(found)))
    assert sum(found) > 2000, found


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_five_thousand_schedules_end_quiet():
    plan = settings(
        max_examples=5000, stateful_step_count=60, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(HandoffMachine, settings=plan)
    run_state_machine_as_test(RowHandoffMachine, settings=plan)
