"""The router core as a state machine: whatever happens, in whatever order, no claim is left at the end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from router_plain import assert_as_computed_anew
from router_scene import Scene

from tailrace.transfer.messages import Bound, Cancel, Done, Drain, Held, Holding, NotNow, Progress, Unbind

NAMES = ("ctx-0", "ctx-1", "gen-0", "gen-1", "both-0")
INGRESSES = ("ingress-1", "ingress-2")
pick = st.integers(0, 99)


class RouterMachine(RuleBasedStateMachine):
    """Random workers, ingresses and frames: right ones, late ones, doubled ones, ones for the wrong request."""

    @initialize(local=st.sampled_from([0, 40, None]), never=st.booleans(), total=st.sampled_from([8, 30, 200]))
    def begin(self, local, never, total):
        self.scene = Scene(
            local_prefill_max_tokens=local, local_prefill="never" if never else "auto", max_waiting=5,
            request_lease_s=4.0, max_wait_s=6.0,
        )  # fmt: skip
        self.total, self.boots, self.keys, self.count = total, {}, [], 0
        for name in NAMES[:3]:
            self.start(name)
        for ingress in INGRESSES:
            self.scene.ingress(ingress)
        self.scene.pair()
        self.scene.wait(1.1)

    def start(self, name):
        self.count += 1
        boot = self.scene.worker(name, name.split("-")[0], boot=f"{name}-{self.count}", total=self.total)
        self.boots[name] = boot

    def any_boot(self, number):
        return (sorted(self.boots.values()) or ["none"])[number % max(len(self.boots), 1)]

    def any_key(self, number):
        return self.keys[number % len(self.keys)]

    def living(self):
        return {name: boot for name, boot in self.boots.items() if self.scene.state.workers.get(boot)}

    # -------------------------------------------------------------------------------------------------------- workers

    @rule(name=st.sampled_from(NAMES))
    def worker_starts(self, name):
        self.start(name)

    @rule(name=st.sampled_from(NAMES))
    def worker_link_drops(self, name):
        if name in self.boots:
            self.scene.down(self.boots[name])

    @rule(name=st.sampled_from(NAMES))
    def worker_dials_again(self, name):
        boot = self.boots.get(name)
        if boot is not None and not self.scene.state.workers.is_dead(boot):
            self.scene.worker(name, name.split("-")[0], boot=boot, total=self.total)

    @rule(name=st.sampled_from(NAMES))
    def worker_is_said_to_be_dead(self, name):
        if name in self.boots:
            self.scene.core.declare_dead(self.boots[name], "killed")
            self.scene.beats.pop(self.boots[name], None)
            self.scene.pump()

    @rule(name=st.sampled_from(NAMES), free=st.integers(0, 200), paired=st.booleans(), stuck=st.booleans())
    def heartbeat(self, name, free, paired, stuck):
        boot = self.boots.get(name)
        if boot in self.scene.beats:
            pairs = tuple(b for n, b in self.boots.items() if n.startswith("ctx")) if paired else ()
            self.scene.beat(boot, free_pages=free, pairs=pairs, stamp_age_s=9.0 if stuck else 0.0)

    @rule(name=st.sampled_from(NAMES))
    def worker_drains(self, name):
        if name in self.living():
            self.scene.say(self.boots[name], Drain(1.0))

    # ------------------------------------------------------------------------------------------------------- requests

    @rule(
        ingress=st.sampled_from(INGRESSES), tokens=st.sampled_from([1, 30, 100, 500]), samples=st.integers(1, 3),
        max_new=st.sampled_from([0, 1, 2, 50]), attempt=st.integers(1, 3), number=pick, again=st.booleans(),
        at=st.booleans(), deadline=st.sampled_from([None, 0.1, 5.0]),
    )  # fmt: skip
    def place(self, ingress, tokens, samples, max_new, attempt, number, again, at, deadline):
        request = self.any_key(number)[0] if again and self.keys else f"r{len(self.keys)}"
        key = self.scene.place(
            request, ingress=ingress, attempt=attempt, tokens=tokens, samples=samples, max_new=max_new,
            at=self.any_boot(number) if at else "", deadline_s=deadline,
        )  # fmt: skip
        self.keys.append(key)

    def say(self, boot, frame):
        if self.scene.state.workers.get(boot) is not None:
            self.scene.say(boot, frame)

    @precondition(lambda self: self.keys)
    @rule(number=pick, ready=st.integers(0, 100), last=st.booleans(), wrong=st.booleans())
    def progress(self, number, ready, last, wrong):
        key = self.any_key(number)
        record = self.scene.state.records.get(key)
        boot = self.any_boot(number) if wrong or record is None else record.worker
        self.say(boot, Progress(*key, ready, 100, (100 - ready) / 1000, last))

    @precondition(lambda self: self.keys)
    @rule(number=pick, answer=st.sampled_from(["bound", "not_now", "pair", "unbind"]), wrong=st.booleans())
    def gen_answers(self, number, answer, wrong):
        key = self.any_key(number)
        record = self.scene.state.records.get(key)
        boot = self.any_boot(number)
        if record is not None and not wrong:
            boot = record.pending.gen if record.pending else record.gen or boot
        frame = {
            "bound": Bound(*key, 7),
            "not_now": NotNow(*key, "pages", 7, 3, 0.1),
            "pair": NotNow(*key, "pair", 7, 3, 0.1),
            "unbind": Unbind(*key, "gave up"),
        }[answer]
        self.say(boot, frame)

    @precondition(lambda self: self.keys)
    @rule(number=pick, how_far=st.integers(1, 2))
    def goes_well(self, number, how_far):
        """An attempt is prefilled to its end, a gen is asked and (2) takes it."""
        record = self.scene.state.records.get(self.any_key(number))
        if record is None or record.leg != "prefill" or self.scene.state.workers.get(record.worker) is None:
            return
        self.scene.progress(record.key)
        if how_far == 2 and record.pending is not None:
            self.scene.say(record.pending.gen, Bound(*record.key, record.pages))

    @rule()
    def all_is_well(self):
        for name in NAMES[:4]:
            if self.boots.get(name) not in self.scene.beats:
                self.start(name)
        self.scene.pair(gens=[b for b in self.scene.beats if self.scene.registers[b].duty != "ctx"])
        for boot in self.scene.beats:
            self.scene.beat(boot, free_pages=self.total, stamp_age_s=0.0)
        for ingress in INGRESSES:
            self.scene.ingress(ingress)
        self.scene.wait(0.2)

    @rule(ingress=st.sampled_from(INGRESSES), tokens=st.integers(1, 120))
    def place_plainly(self, ingress, tokens):
        self.keys.append(self.scene.place(f"r{len(self.keys)}", ingress=ingress, tokens=tokens))

    @rule(name=st.sampled_from(NAMES), which=st.lists(pick, max_size=4), seen=st.integers(0, 60), needs=st.booleans())
    def whole_set(self, name, which, seen, needs):
        boot = self.boots.get(name)
        keys = {self.any_key(number) for number in which} if self.keys else set()
        leg = "prefill" if name.startswith("ctx") else "decode"
        held = tuple(Held(*key, 5, 7 if needs and leg == "prefill" else 0, leg, 0.0) for key in sorted(keys))
        if boot is not None:
            self.say(boot, Holding(name, boot, seen, held))

    @precondition(lambda self: self.keys)
    @rule(number=pick, outcome=st.sampled_from(["finished", "cancelled", "failed", "migrating"]))
    def done(self, number, outcome):
        self.scene.say("ingress-1", Done(*self.any_key(number), outcome, ""))

    @rule(ingress=st.sampled_from(INGRESSES), back=st.booleans())
    def ingress_link(self, ingress, back):
        if back:
            self.scene.ingress(ingress)
        else:
            self.scene.core.link_down(ingress)
            self.scene.pump()

    @rule(seconds=st.sampled_from([0.05, 0.4, 2.6]), beat=st.booleans())
    def time_passes(self, seconds, beat):
        self.scene.wait(seconds, beat=beat, step=0.2)

    # ------------------------------------------------------------------------------------------------------------ law

    @invariant()
    def the_books_are_right(self):
        if not hasattr(self, "scene"):
            return
        scene, state = self.scene, self.scene.state
        scene.core.check()
        assert_as_computed_anew(state, scene.now)
        for claims in (state.prefill, state.pages, state.seats, state.migrations.in_flight):
            assert set(claims._claims) <= set(state.records)
        for key, record in state.records.items():
            waits = key in state.queue or key in state.migrations
            assert waits == (record.leg == "")
            if key in state.unbound:
                assert not record.gen and record.pending is None and not record.worker_done
            if record.pending is not None:
                assert state.pages.holder(key) == record.pending.gen == state.seats.holder(key)
                assert not record.gen
            if record.gen and record.leg == "prefill":
                assert key not in state.pages
            assert record.key in state.ingresses[record.ingress].keys
        living = {w.boot for w in state.workers}
        assert all(state.seats.holder(key) in living for key in state.seats._claims)

    def teardown(self):
        if not hasattr(self, "scene"):
            return
        for ingress in INGRESSES:
            self.scene.ingress(ingress)
        for key in list(self.scene.state.records):
            self.scene.say("ingress-1", Done(*key, "cancelled", ""))
        self.scene.assert_quiet()
        for boot in [w.boot for w in self.scene.state.workers]:
            worker = self.scene.state.workers.get(boot)
            self.scene.say(boot, Holding(worker.name, boot, 0, ()))
            assert self.scene.state.active(worker) == 0 and self.scene.state.tokens_left(worker) == 0
        assert all(isinstance(f, Cancel) for f in self.scene.taken("nobody"))


RouterMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
test_claims_are_zero_at_the_end_whatever_happens = RouterMachine.TestCase
