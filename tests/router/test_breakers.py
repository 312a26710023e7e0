"""Breakers and the queue of migrations: by themselves, and in the router core on a stopped clock."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_scene import Scene

from tailrace.router import view
from tailrace.router.breaker import ONE_EVENT_S, Breakers
from tailrace.router.migrations import Migrations
from tailrace.transfer.messages import Bound, Done, Held, Holding, Placed, Refused
from tailrace.transfer.metrics import Metrics

KEY, OTHER = ("r", 1), ("s", 1)


def tripped(limit=3, probe_s=2.0):
    breakers = Breakers(limit, probe_s)
    for i in range(limit):
        assert breakers.admits("w", float(i))
        breakers.fault("w", "boot", float(i))
    return breakers, float(limit - 1)


# -------------------------------------------------------------------------------------------------------- the breaker


def test_faults_in_a_row_open_it_and_a_success_between_them_does_not_let_it():
    breakers = Breakers(3, 2.0)
    for i in range(20):
        breakers.fault("w", "boot", 1.0 * i)
        if i % 2:
            breakers.success("w", KEY)
    assert breakers.state("w", 20.0) == "closed" and breakers.trips == 0
    breakers, now = tripped()
    assert breakers.state("w", now) == "open" and not breakers.admits("w", now) and breakers.trips == 1
    assert breakers.admits("x", now) and breakers.state("x", now) == "closed"


def test_faults_of_one_moment_are_one():
    breakers = Breakers(3, 2.0)
    for i in range(50):
        breakers.fault("w", "boot", 1.0 + i * ONE_EVENT_S / 60)
    assert breakers.state("w", 2.0) == "closed"


def test_half_open_lets_one_probe_through_which_closes_it():
    breakers, now = tripped()
    assert breakers.wait_s("w", now + 0.5) == 1.5
    now += 2.0
    assert breakers.state("w", now) == "half_open" and breakers.admits("w", now)
    breakers.given("w", KEY, now)
    assert not breakers.admits("w", now + 1.0)
    breakers.success("w", OTHER)  # was under way before
    assert breakers.state("w", now) == "half_open"
    breakers.success("w", KEY)
    assert breakers.state("w", now) == "closed" and breakers.admits("w", now)


def test_a_probe_that_fails_opens_it_for_another_interval():
    breakers, now = tripped()
    now += 2.5
    breakers.given("w", KEY, now)
    breakers.fault("w", "boot", now + 0.1)
    assert breakers.state("w", now + 2.0) == "open" and breakers.admits("w", now + 2.1)
    assert breakers.trips == 1


def test_faults_of_what_was_under_way_do_not_put_the_probe_off():
    breakers, now = tripped()
    breakers.fault("w", "boot", now + 1.9)
    assert breakers.admits("w", now + 2.0)


def test_a_probe_without_a_verdict_makes_room_for_the_next():
    breakers, now = tripped()
    now += 2.0
    breakers.given("w", KEY, now)
    breakers.ended("w", OTHER)
    assert not breakers.admits("w", now)
    breakers.ended("w", KEY)  # its client left
    assert breakers.admits("w", now)
    breakers.given("w", OTHER, now)  # and this one is never heard of again
    assert not breakers.admits("w", now + 1.9) and breakers.admits("w", now + 2.0)


def test_a_new_boot_begins_closed_unless_its_predecessors_died_one_after_the_other():
    breakers, now = tripped()
    breakers.died("w", now)
    breakers.registered("w", "boot-2")
    assert breakers.state("w", now) == "closed"
    for number in range(3, 5):
        now += 1.0
        breakers.died("w", now)
        breakers.registered("w", f"boot-{number}")
    assert breakers.state("w", now) == "open"
    assert breakers.admits("w", now + 2.0)
    breakers.given("w", KEY, now + 2.0)
    breakers.success("w", KEY)
    breakers.died("w", now + 3.0)
    assert breakers.state("w", now + 3.0) == "closed"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["fault", "success", "given", "ended", "died", "boot"]), st.integers(0, 3)),
        max_size=60,
    ),
    st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.0]),  # so that sums are exact
)
def test_whatever_happens_a_healed_worker_is_closed_within_one_interval(events, step):
    """And never two probes at once within an interval."""
    breakers, now, boots = Breakers(2, 2.0), 0.0, 0
    probes: list[float] = []
    for kind, number in events:
        now += step
        key = ("r", number)
        if kind == "fault":
            breakers.fault("w", "boot", now)
        elif kind == "success":
            breakers.success("w", key)
            probes.clear()
        elif kind == "ended":
            breakers.ended("w", key)
            probes.clear()
        elif kind == "died":
            breakers.died("w", now)
        elif kind == "boot":
            boots += 1
            breakers.registered("w", f"boot-{boots}")
            probes.clear()
        elif breakers.admits("w", now):
            if breakers.state("w", now) != "closed":
                assert not probes or now - probes[-1] >= 2.0 - 1e-9
                probes.append(now)
            breakers.given("w", key, now)
    assert breakers.wait_s("w", now) <= 2.0
    now += 2.0
    assert breakers.admits("w", now)
    breakers.given("w", ("probe", 1), now)
    breakers.success("w", ("probe", 1))
    assert breakers.state("w", now) == "closed"


# --------------------------------------------------------------------------------------------------------- in the core


def fail_some(scene, number, *faults):
    """Requests one after the other, each ended by a fault of these workers."""
    for _ in range(number):
        key = scene.place(tokens=20)
        scene.say("ingress-1", Done(*key, "failed", "internal", faults))
        scene.wait(0.3)
    scene.mail.clear()


def test_c7_an_open_breaker_of_the_only_ctx_refuses_at_once_and_reserves_no_page():
    scene = Scene(local_prefill="never", breaker_faults=3, breaker_probe_s=2.0)
    (ctx,), (gen,) = scene.cluster(1, 1)
    fail_some(scene, 3, ctx)
    opened = scene.now
    assert view.ready(scene.state, scene.now)["status"] == "unready"
    for _ in range(5):
        key = scene.place(tokens=50)
        (refused,) = scene.refused()
        assert (refused.status, refused.reason) == (503, "breaker_open") and 0.5 <= refused.retry_after_s <= 2.0
        assert key not in scene.state.records and scene.state.pages.sum == 0 and not scene.binds(gen)
    while view.ready(scene.state, scene.now)["status"] != "ready":  # with no traffic at all
        scene.wait(0.1)
    assert scene.now - opened <= 2.0
    probe = scene.place(tokens=50)
    assert [p.boot for p in scene.placed()] == [ctx]
    scene.place(tokens=50)
    assert [r.reason for r in scene.refused()] == ["breaker_open"]  # while the probe is out
    scene.bind(probe)
    scene.done(probe)
    assert scene.state.workers.breakers.state("ctx-0", scene.now) == "closed"
    scene.mail.clear()
    scene.place(tokens=50)
    scene.place(tokens=50)
    assert len(scene.placed()) == 2


def test_an_open_breaker_of_one_of_two_sends_all_to_the_other():
    for duty in ("ctx", "gen"):
        scene = Scene(breaker_faults=3, local_prefill_max_tokens=0)
        ctxs, gens = scene.cluster(2, 2)
        bad = (ctxs if duty == "ctx" else gens)[0]
        fail_some(scene, 3, bad)
        for _ in range(6):
            scene.bind(scene.place(tokens=20))
        placed = scene.placed()
        assert len(placed) == 12 and bad not in {p.boot for p in placed}


def test_a_breaker_guards_both_legs():
    """An open gen is bound to nothing and prefills nothing; with all gens open, nothing is prefilled for nobody."""
    scene = Scene(breaker_faults=3)
    (ctx,), (gen,) = scene.cluster(1, 1)
    fail_some(scene, 3, gen)
    scene.place(tokens=50)
    assert [r.reason for r in scene.refused()] == ["breaker_open"] and not scene.placed()
    assert scene.state.prefill.sum == scene.state.pages.sum == 0


def test_with_local_prefill_an_open_ctx_is_replaced_by_gens():
    scene = Scene(breaker_faults=3, local_prefill_max_tokens=0)
    (ctx,), (gen,) = scene.cluster(1, 1)
    fail_some(scene, 3, ctx)
    scene.place(tokens=50)
    assert [(p.leg, p.boot) for p in scene.placed()] == [("local", gen)]
    assert view.ready(scene.state, scene.now)["status"] == "degraded"


@pytest.mark.parametrize("outcome", ["cancelled", "refused", "finished", "failed", "migrating"])
def test_ends_that_are_no_fault_of_a_worker_never_open_a_breaker(outcome):
    scene = Scene(breaker_faults=2)
    scene.cluster(1, 1)
    for _ in range(20):
        key = scene.place(tokens=20)
        scene.say("ingress-1", Done(*key, outcome, "client"))
        scene.wait(0.3)
    assert scene.state.workers.breakers.trips == 0


def test_a_half_open_gen_is_bound_to_one_request_of_those_that_wait():
    scene = Scene(breaker_faults=3, breaker_probe_s=2.0)
    _, (gen,) = scene.cluster(2, 1)
    keys = [scene.place(tokens=50) for _ in range(3)]
    fail_some(scene, 3, gen)
    for key in keys:
        scene.progress(key)
    assert not scene.binds(gen)
    scene.wait(2.0)
    assert len(scene.binds(gen)) == 1
    (asked,) = [key for key in keys if scene.state.records[key].pending is not None]
    scene.say(gen, Bound(*asked, 4))
    scene.done(asked)
    assert len(scene.binds(gen)) == 2


def test_binds_that_are_not_answered_are_faults_and_so_are_deaths_in_a_row():
    scene = Scene(breaker_faults=3, bind_timeout_s=0.5)
    scene.cluster(1, 2)
    key = scene.place(tokens=50)
    scene.progress(key)
    scene.wait(4.0)
    assert scene.state.workers.breakers.trips == 2 and scene.state.pages.total("gen-0-boot") == 0
    scene = Scene(breaker_faults=3)
    scene.cluster(1, 1)
    for number in range(3):
        boot = next(w.boot for w in scene.state.workers if w.name == "gen-0")
        scene.core.declare_dead(boot, "killed")
        scene.beats.pop(boot)
        scene.worker("gen-0", "gen", boot=f"again-{number}")
    assert scene.state.workers.breakers.state("gen-0", scene.now) == "open"


def test_a_worker_that_drains_and_goes_is_no_death_in_a_row():
    scene = Scene(breaker_faults=1)
    (ctx,), _ = scene.cluster(1, 1)
    scene.state.workers.get(ctx).draining = True
    scene.core.declare_dead(ctx, "gone")
    assert scene.state.workers.breakers.trips == 0


def test_breakers_are_shown():
    scene = Scene(breaker_faults=3)
    (ctx,), _ = scene.cluster(1, 1)
    fail_some(scene, 3, ctx)
    page = view.cluster(scene.state, scene.core.placer, scene.now)
    json.dumps(page)
    breakers = {w["name"]: w["breaker"] for pool in page["pools"].values() for w in pool["workers"]}
    assert breakers == {"ctx-0": "open", "gen-0": "closed"}
    metrics = Metrics("router", "router-0", "tiny")
    view.update_metrics(metrics, scene.state, scene.now)
    assert metrics.value("tailrace_breaker_open", peer="ctx-0") == 1
    assert metrics.value("tailrace_breaker_open", peer="gen-0") == 0
    assert metrics.value("tailrace_breaker_trips_total") == 1


# ----------------------------------------------------------------------------------------------------------- migrations


def test_migrations_wait_in_order_of_priority_and_arrival():
    queue = Migrations(2)
    for number, priority in enumerate((0, 0, -1, 5)):
        queue.add((str(number), 2), priority, float(number))
    assert [key[0] for key, _ in queue.waiting()] == ["2", "0", "1", "3"] and queue.age_s(10.0) == 10.0
    queue.remove(("0", 2))
    queue.remove(("0", 2))
    assert queue.head() == ("2", 2) and len(queue) == 3 and ("0", 2) not in queue


def prefilled(scene, placed):
    """The prefill of each of these ends: a gen takes them."""
    for place in placed:
        scene.bind((place.request, place.attempt))


def test_the_death_of_a_gen_with_many_streams_drowns_no_ctx_and_starves_no_new_request():
    scene = Scene(local_prefill_max_tokens=0, max_migrations_in_flight=4, max_waiting=10)
    ctxs, _ = scene.cluster(2, 2, total=10_000)
    lost = [scene.place(f"m{i}", attempt=2, tokens=100, deaths=1) for i in range(200)]
    first = scene.placed()
    assert len(first) == 8 and {ctx: sum(p.boot == ctx for p in first) for ctx in ctxs} == dict.fromkeys(ctxs, 4)
    assert not scene.refused(), "a stream that is under way is not refused for a full queue"
    new = [scene.place(f"n{i}", tokens=100) for i in range(4)]
    assert {p.request for p in scene.placed()} == {key[0] for key in new}
    rounds, under_way = 0, first
    order = [p.request for p in first]
    while under_way:
        rounds += 1
        prefilled(scene, under_way)
        under_way = [p for p in scene.placed() if p.leg == "prefill"]
        order += [p.request for p in under_way]
        assert all(scene.state.migrations.in_flight.total(ctx) <= 4 for ctx in ctxs)
    assert order == [key[0] for key in lost] and rounds == 25
    for key in (*lost, *new):
        scene.done(key)
    scene.assert_quiet()


def test_migrations_go_before_new_requests_where_pages_are_short():
    scene = Scene(local_prefill_max_tokens=0, max_wait_s=1000.0)
    scene.cluster(1, 1, total=14)
    running = [scene.place(tokens=40), scene.place(tokens=170)]  # 3 and 11 pages
    scene.placed()
    scene.place("new", tokens=10)
    scene.place("moved", attempt=2, tokens=100)  # 7 pages
    scene.place("newer", tokens=10)
    assert not scene.placed()
    scene.done(running[0])
    scene.wait(0.2)
    assert not scene.placed(), "a new request has taken pages that the migration waits for"
    scene.done(running[1])
    assert [p.request for p in scene.placed()] == ["moved", "new", "newer"]


def test_a_migration_that_waits_leaves_with_its_cancel_its_deadline_and_its_ingress():
    scene = Scene(local_prefill_max_tokens=0, max_migrations_in_flight=1)
    scene.cluster(1, 1)
    scene.place("a", attempt=2)
    cancelled = scene.place("b", attempt=2)
    scene.place("c", attempt=2, deadline_s=1.0)
    scene.place("d", attempt=2)
    scene.done(cancelled, "cancelled")
    scene.wait(1.2)
    assert [(r.request, r.reason) for r in scene.refused()] == [("c", "deadline")]
    scene.core.link_down("ingress-1")
    assert len(scene.state.migrations) == 0 and ("d", 2) not in scene.state.records
    assert view.cluster(scene.state, scene.core.placer, scene.now)["queue"]["migrations"] == 0


@pytest.mark.parametrize("end", ["streams", "gone", "died", "cancelled", "finished"])
def test_a_gen_that_prefills_itself_takes_no_more_migrations_at_once_than_a_ctx(end):
    scene = Scene(max_migrations_in_flight=2, max_backlog_s=1000.0)
    scene.core.placer.prospects.given_ahead_s = lambda worker: 1000.0
    _, (gen, other) = scene.cluster(0, 2, total=10_000)
    keys = [scene.place(f"m{i}", attempt=2, tokens=100) for i in range(7)]
    first = scene.placed()
    assert sorted(p.boot for p in first) == sorted([gen, gen, other, other]) and len(scene.state.migrations) == 3
    assert all(p.leg == "local" for p in first) and not scene.refused()
    here = [(p.request, 2) for p in first if p.boot == gen]
    if end == "streams":
        scene.held(gen, (here[0], "local", 7, 0), (here[1], "local", 0, 0), seconds_left=None)
        assert not scene.placed()  # neither has told of its first token
        scene.say(
            gen, Holding("gen-0", gen, 99, (Held(*here[0], 7, 0, "local", 0.0), Held(*here[1], 0, 0, "local", None)))
        )
    elif end == "gone":
        scene.held(gen, (here[0], "local", 7, 0), (here[1], "local", 7, 0), seconds_left=None)
        scene.held(gen, (here[1], "local", 7, 0), seconds_left=None)
    elif end == "died":
        scene.down(gen)
        scene.core.declare_dead(gen, "killed")
        assert not scene.placed() and scene.state.migrations.in_flight.total(gen) == 0
        return
    else:
        scene.done(here[0], end)
    assert [(p.request, p.boot) for p in scene.placed()] == [("m4", gen)]
    for key in keys:
        scene.done(key)
    scene.assert_quiet()


def test_a_prefill_that_ends_in_any_way_makes_room_for_the_next_migration():
    for end in ("progress", "bound", "died", "cancelled", "set"):
        scene = Scene(local_prefill_max_tokens=0, max_migrations_in_flight=1)
        (ctx, _), _ = scene.cluster(2, 1)
        keys = [scene.place(f"m{i}", attempt=2) for i in range(3)]
        on_ctx = next(p for p in scene.placed() if p.boot == ctx)
        key = (on_ctx.request, 2)
        if end == "progress":
            scene.progress(key)
        elif end == "bound":
            scene.bind(key)
        elif end == "cancelled":
            scene.done(key, "cancelled")
        elif end == "died":
            scene.core.declare_dead(ctx, "killed")
            scene.say("ingress-1", Done(*key, "migrating", "lost"))
            scene.done(keys[1] if key == keys[0] else keys[0])
        else:
            scene.say(ctx, Holding("ctx-0", ctx, 99, (Held(*key, 7, 7, "prefill", 0.0),)))
            scene.progress(key, ready=50, last=False)
            scene.say(ctx, Holding("ctx-0", ctx, 99, ()))
        assert [p.request for p in scene.taken("ingress-1", Placed) if p.leg == "prefill"] == ["m2"], end
        assert not scene.taken("ingress-1", Refused)
