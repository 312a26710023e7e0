"""Flows and the router core together under deaths, broken links, new routers, refusals and cancels, at any moment.

Whatever happens: each attempt is reported once, each request ends once, what a stream has said is never said again nor
skipped, and once all is well again everything ends in time and no claim is left.
"""

from __future__ import annotations

import pytest
from flow_world import INGRESS, LEASE_S, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tailrace.router.flow import FlowPolicy
from tailrace.transfer.request_state import State

NAMES = ("ctx-0", "ctx-1", "gen-0", "gen-1")
pick = st.integers(0, 999)


class FlowMachine(RuleBasedStateMachine):
    @initialize(
        total=st.sampled_from([4, 40]), migrations=st.sampled_from([1, 8]), never=st.booleans(),
        retries=st.sampled_from([True, True, False]), deaths=st.sampled_from([2, 9]), left=st.sampled_from([0, 0, 9]),
    )  # fmt: skip
    def begin(self, total, migrations, never, retries, deaths, left):
        policy = FlowPolicy(
            retries, deaths, router_wait_s=3.0, rebind_wait_s=4.0, request_lease_s=LEASE_S, left_to_gen=left
        )
        self.world = World(
            total=total, policy=policy, max_migrations_in_flight=migrations, breaker_probe_s=0.5,
            max_worker_deaths_per_request=deaths, local_prefill="never" if never else "auto",
        )  # fmt: skip
        self.number = 0
        self.world.ingress_dials()
        self.world.deliver_all()
        self.world.pass_time(0.5)
        self.world.deliver_all()

    # ------------------------------------------------------------------------------------------------------ requests

    @rule(
        prompt=st.sampled_from([3, 40]), most=st.sampled_from([1, 2, 6, 12]), samples=st.sampled_from([1, 1, 2, 3]),
        deadline=st.sampled_from([None, None, 4.0]),
    )  # fmt: skip
    def ask(self, prompt, most, samples, deadline):
        self.number += 1
        self.world.ask(self.number, prompt, most, samples, deadline)

    @rule(which=pick)
    def client_leaves(self, which):
        if self.number:
            self.world.cancel(f"r{which % self.number + 1}")

    # ---------------------------------------------------------------------------------------------------------- work

    @rule(which=st.lists(pick, min_size=1, max_size=8))
    def frames_arrive(self, which):
        for number in which:
            links = sorted(self.world.links)
            if links:
                self.world.deliver(links[number % len(links)])

    @rule()
    def all_frames_arrive(self):
        self.world.deliver_all()

    @rule(name=st.sampled_from(NAMES), times=st.integers(1, 4))
    def a_worker_works(self, name, times):
        worker = self.world.workers[name]
        for _ in range(times):
            for key in list(worker.jobs):
                worker.work(key)

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.2]))
    def time_passes(self, seconds):
        self.world.pass_time(seconds)

    @rule(rounds=st.integers(1, 3))
    def all_goes_well(self, rounds):
        for _ in range(rounds):
            self.world.deliver_all()
            for worker in self.world.workers.values():
                for key in list(worker.jobs):
                    worker.work(key)
            self.world.pass_time(0.1)

    # --------------------------------------------------------------------------------------------------------- faults

    @rule(name=st.sampled_from(NAMES))
    def worker_is_killed(self, name):
        self.world.kill(name)

    @rule(name=st.sampled_from(NAMES), told=st.booleans())
    def worker_is_killed_and_the_ingress_sees_it_at_once(self, name, told):
        boot = self.world.workers[name].boot
        self.world.kill(name)
        if told:
            self.world.lose(boot, dead=False, reached=True)
        self.world.lose(boot, dead=True, reached=True)

    @rule(which=st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    def workers_come_back(self, which):
        for name in which:
            self.world.restart(name)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_loses_its_router(self, name):
        self.world.undial(name)

    @rule(name=st.sampled_from(NAMES))
    def a_worker_dials_again(self, name):
        self.world.dial(name)

    @rule(name=st.sampled_from(NAMES))
    def the_ingress_loses_a_worker_that_lives(self, name):
        worker = self.world.workers[name]
        if worker.alive and worker.boot not in self.world.gone:
            self.world.lose(worker.boot, dead=False, reached=True)

    @rule(name=st.sampled_from(NAMES), stop=st.booleans())
    def worker_is_stopped_or_goes_on(self, name, stop):
        self.world.workers[name].frozen = stop and self.world.workers[name].alive

    @rule(
        name=st.sampled_from(NAMES), which=pick, retryable=st.booleans(),
        code=st.sampled_from(["transfer", "corrupt", "internal", "expired", "out_of_pages"]),
    )  # fmt: skip
    def a_worker_fails_an_attempt(self, name, which, code, retryable):
        worker = self.world.workers[name]
        if worker.jobs and not worker.frozen:
            worker.fail(sorted(worker.jobs)[which % len(worker.jobs)], code, retryable)

    @rule()
    def router_is_killed(self):
        self.world.kill_router()

    @rule(dial=st.lists(st.sampled_from(NAMES), unique=True), ingress=st.booleans(), late=st.booleans())
    def router_comes_back(self, dial, ingress, late):
        if self.world.router is None:
            self.world.start_router()
        if ingress and not late:
            self.world.ingress_dials()
        for name in dial:
            self.world.dial(name)
        if ingress and late:
            self.world.ingress_dials()

    @rule()
    def the_ingress_loses_the_router(self):
        self.world.ingress_loses_router()

    # ------------------------------------------------------------------------------------------------------------ law

    @invariant()
    def the_books_are_right(self):
        if hasattr(self, "world") and self.world.router is not None:
            self.world.router.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.heal(at_least_s=3.0)  # who was declared dead meanwhile has to come back
        assert set(world.ends) == set(world.flows)
        for flow in world.flows.values():
            outcomes = [world.dones[flow.spec.request, n + 1] for n in range(flow.attempt)]
            assert "failed" in outcomes or "refused" in outcomes or flow.state in (State.FINISHED, State.CANCELLED)
            if flow.state is State.FINISHED:
                assert all(len(s.ids) == flow.spec.params.max_tokens for s in flow.samples)
        world.ask(999, 40, 6, 2)
        world.heal()
        assert world.flows["r999"].state is State.FINISHED, "nothing is served after the storm"


FlowMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_every_request_ends_once_and_no_token_is_repeated_whatever_dies = FlowMachine.TestCase


@pytest.mark.soak
@pytest.mark.timeout(1200)
class TestLongStorms(FlowMachine.TestCase):
    settings = settings(
        max_examples=800, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("lost", ["ctx-0", "ctx-1", "gen-0", "gen-1"])
def test_a_new_router_learns_who_is_dead_to_the_ingress(lost):
    """A worker that lost the old router for too long is dead to all it told; the new one must not give it work."""
    world = World(total=4, policy=FlowPolicy(True, 2, router_wait_s=3.0, rebind_wait_s=4.0, request_lease_s=LEASE_S))
    world.ingress_dials()
    for name in world.workers:
        world.dial(name)
    world.deliver_all()
    world.pass_time(1.2)
    boot = world.workers[lost].boot
    world.undial(lost)
    for _ in range(4):
        world.pass_time(1.2)
        world.deliver_all()
    assert boot in world.gone
    world.kill_router()
    world.start_router()
    world.dial(lost)  # it does not know yet
    world.heal(at_least_s=3.0)
    world.ask(1, 3, 2, 1)
    world.heal()
    assert world.flows["r1"].state is State.FINISHED and world.workers[lost].boot != boot


# ------------------------------------------------------------------------------------- who waits for what nobody has


def waiting_world(*names):
    """A world at rest. What is asked here waits with its worker until that works."""
    policy = FlowPolicy(True, 2, router_wait_s=3.0, rebind_wait_s=4.0, request_lease_s=LEASE_S)
    world = World(names=names, policy=policy)
    world.ingress_dials()
    world.deliver_all()
    world.pass_time(1.2)
    world.deliver_all()
    return world


@pytest.mark.parametrize("told", [True, False])
def test_a_request_whose_renewals_come_too_late_is_placed_again(told):
    """The worker's word that the lease has ended may be lost: then the next renewal is answered."""
    world = waiting_world("gen-0")
    world.ask(1, 3, 6, 1)
    world.deliver_all()
    assert world.workers["gen-0"].jobs
    world.pass_time(LEASE_S + 0.5)  # the renewals stay under way
    assert not world.workers["gen-0"].jobs
    if not told:
        del world.links[world.workers["gen-0"].boot, INGRESS]
    assert world.heal() < LEASE_S / 3 + 2.0
    flow = world.flows["r1"]
    assert flow.state is State.FINISHED and flow.attempt == 2


def test_a_stream_goes_on_whose_ingress_has_lost_the_router_for_long():
    world = waiting_world("ctx-0", "gen-0")
    world.ask(1, 40, 6, 1)
    while not world.workers["gen-0"].jobs:
        world.deliver_all()
        world.workers["ctx-0"].work(("r1", 1))
        world.pass_time(0.1)
    for _ in range(3):
        world.deliver_all()
        world.workers["gen-0"].work(("r1", 1))
    world.deliver_all()
    flow = world.flows["r1"]
    assert flow.state is State.DECODING
    world.ingress_loses_router()
    for _ in range(6):
        world.pass_time(1.0)
        world.deliver_all()
    assert not world.router.state.records, "the router keeps what is an ingress's that it has lost"
    world.heal()
    assert flow.state is State.FINISHED and flow.attempt == 1


def test_a_gen_that_a_dead_router_bound_is_told_to_the_ingress_by_the_next_router():
    """The ctx has given its pages away, the gen has them, and the word of which gen it is died with the router."""
    world = waiting_world("ctx-0", "gen-0")
    world.ask(1, 40, 6, 1)
    world.deliver_all()
    world.workers["ctx-0"].work(("r1", 1))
    while not world.workers["gen-0"].jobs:
        for link in [link for link in world.links if link != ("router", INGRESS)]:
            world.deliver(link)
        world.pass_time(0.1)
    world.deliver((world.workers["ctx-0"].boot, INGRESS))
    world.kill_router()
    world.workers["gen-0"].work(("r1", 1))
    flow = world.flows["r1"]
    assert flow.attempts[1].gen is None and not world.workers["ctx-0"].jobs
    assert world.heal() < 4.0
    assert flow.state is State.FINISHED and flow.attempt == 1
