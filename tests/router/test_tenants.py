"""Shares, rates and the bounds of the queue: the accounts alone, and the core under load in simulated time."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_load import ROWS, SHARES, TOKEN_S, Load
from router_scene import Scene

from tailrace.router.admission import Needs, WaitQueue
from tailrace.router.tenants import Share, Tenant, Tenants
from tailrace.router.worker import Usable
from tailrace.transfer.messages import Done, Refused


def small_and_large(load):
    """One request in five is large: prompts of 40 or 2000 tokens, outputs of 10 to 60."""
    return lambda: (2000 if load.random.random() < 0.2 else 40, load.random.randint(10, 60))


def small(load):
    return lambda: (40, 30)


def large(load):
    return lambda: (800, 5)


def short_outputs(load):
    return lambda: (400, load.random.randint(1, 4))


@pytest.mark.parametrize(
    ("big", "other", "rows"),
    [
        (small, small, ROWS), (small_and_large, small_and_large, ROWS), (small, large, ROWS), (large, small, ROWS),
        (short_outputs, short_outputs, 10_000),
    ],
)  # fmt: skip
def test_two_saturating_tenants_are_served_four_to_one_and_nobody_waits_long(big, other, rows):
    """Bound by gens' rows, and in the last case by prefill; whatever the sizes of the requests."""
    load = Load(rows=rows)
    for _ in range(80):
        load.client("big", big(load))
        load.client("small", other(load))
    load.run(10.0)
    load.served.clear()
    load.waits.clear()
    load.run(60.0)
    ratio = load.served["big"] / load.served["small"]
    assert 3.6 <= ratio <= 4.4, dict(load.served)
    for waits in load.waits.values():
        assert len(waits) > 20 and max(waits) <= 5 * statistics.median(waits)
    assert load.state.rows.sum <= load.state.row_capacity(Usable([load.state.workers.get(load.gen)]))
    load.core.check()


def test_a_tenant_alone_is_served_all_there_is():
    load = Load()
    for _ in range(40):
        load.client("small", small(load))
    load.run(20.0)
    assert load.served["small"] >= 0.9 * 20.0 * ROWS / (30 * TOKEN_S) * 70


def test_a_flood_of_one_tenant_locks_no_other_out():
    load = Load(max_waiting=64)
    for _ in range(400):
        load.client("small", small(load))
    load.run(5.0)
    assert load.refusals["small", "queue_full"] and load.state.queue.by_tenant()["small"] <= 64 - 8
    for _ in range(8):
        load.client("big", small(load))
    load.waits.clear()
    load.run(10.0)
    assert len(load.waits["big"]) > 80 and max(load.waits["big"]) < 2.0
    assert not any(tenant == "big" for tenant, _ in load.refusals), load.refusals
    assert load.refusals["small", "fairness"]
    assert load.served["small"] > 0


def test_names_that_nobody_configured_have_equal_shares():
    load = Load()
    for name in ("x", "y"):
        for _ in range(60):
            load.client(name, small_and_large(load))
    load.run(40.0)
    assert 0.9 <= load.served["x"] / load.served["y"] <= 1.1


def test_priorities_order_a_tenants_own_requests_and_take_nothing_from_others():
    load = Load()
    for priority in (-1, 0):
        for _ in range(40):
            load.client("x", small(load), priority=priority)
    for _ in range(80):
        load.client("y", small(load))
    load.run(30.0)
    assert 0.9 <= load.served["x"] / load.served["y"] <= 1.1
    places = Counter()
    for record in load.state.records.values():
        if record.key in load.state.queue and record.place.tenant == "x":
            places[record.place.priority] += 1
    assert places[0] > 30 and places[-1] < 40


def test_e14_of_ten_times_the_capacity_what_is_admitted_is_served_within_three_times_its_idle_latency():
    """Two ctx, prompts of 2000 tokens: 0.1 s each, so 20 a second. The wait is bounded by twice the idle latency."""
    load = Load(max_wait_s=0.19, rows=10_000)
    load.arrivals(2.0, 5.0, 2000, 4)
    load.run(6.0)
    alone_s = statistics.median(load.first_s)
    load.first_s.clear()
    load.arrivals(200.0, 30.0, 2000, 4)
    load.run(30.0)
    assert len(load.first_s) >= 0.9 * 20 * 30, "the rest is refused, but nobody is idle"
    assert max(load.first_s) <= 3 * alone_s
    assert sum(load.refusals.values()) >= 200 * 30 - len(load.first_s) - 10
    assert set(load.refusals) == {("", "queue_full")}
    load.first_s.clear()
    load.arrivals(10.0, 2.0, 2000, 4)
    load.run(3.0)
    assert len(load.first_s) >= 20 and max(load.first_s[-15:]) <= 1.5 * alone_s, "recovered at once"
    load.assert_quiet()


# ------------------------------------------------------------------------------------------------------------- accounts


def test_a_tenant_that_comes_back_is_owed_nothing_and_owes_nothing():
    tenants = Tenants(SHARES)
    big, small_one = tenants.of("big"), tenants.of("small")
    for _ in range(100):
        tenants.wake(big)
        tenants.begin(big, 40)
    tenants.wake(small_one)
    assert small_one.time == tenants.time
    tenants.begin(small_one, 10_000)
    tenants.wake(small_one)
    assert small_one.time == pytest.approx(tenants.time + 10_000), "leaving does not wipe out what it has had"


def test_the_difference_to_what_was_expected_is_charged_at_the_end():
    tenants = Tenants(SHARES)
    big = tenants.of("big")
    tenants.wake(big)
    tenants.begin(big, 100)
    tenants.end(big, 100, 260)
    assert big.time == 65.0 and big.served == 260 and big.idle


def test_outputs_are_expected_from_those_that_a_tenant_had():
    tenants = Tenants({})
    one = tenants.of("one")
    assert tenants.expected(one, 10, 1000, 1) == 10 + 128 and tenants.expected(one, 10, 5, 2) == 10 + 10
    for _ in range(50):
        tenants.learn(one, 60, 2)
    assert tenants.expected(one, 10, 1000, 2) == 10 + 60
    assert tenants.expected(tenants.of("other"), 10, 1000, 1) == 10 + 30, "of others', until its own are known"


def test_idle_tenants_are_forgotten_but_not_those_who_wait_or_are_configured():
    tenants = Tenants(SHARES, kept=10)
    tenants.of("big")
    busy = tenants.of("busy")
    tenants.wake(busy)
    tenants.begin(busy, 1)
    for number in range(1000):
        tenants.of(f"t{number}")
    names = {tenant.name for tenant in tenants}
    assert len(names) <= 14 and {"big", "busy", "t999"} <= names


def test_a_bucket_refills_at_its_rate_and_waits_for_what_was_overdrawn():
    tenant = Tenant("t", Share(1.0, 100.0), 0.0)
    assert tenant.wait_s(0.0) == 0.0
    tenant.draw(1000)
    assert tenant.wait_s(0.0) == pytest.approx(0.01)
    tenant.draw(500)
    assert tenant.wait_s(1.0) == pytest.approx(4.01) and tenant.wait_s(5.1) == 0.0
    tenant.draw(-10_000)
    tenant.draw(1001)
    assert tenant.wait_s(5.1) == pytest.approx(0.02), "it holds no more than ten seconds' worth"


def test_a_tenant_over_its_rate_is_refused_at_once_with_the_time_until_it_may_ask():
    scene = Scene(tenants={"t": Share(1.0, 10.0)})
    scene.cluster(1, 1, total=10_000)
    keys = [scene.place(tokens=100, max_new=1, tenant="t", attempt=1) for _ in range(3)]
    (refused, again) = scene.refused()
    assert len(scene.placed()) == 1 and refused.status == 429 and refused.reason == "rate"
    assert refused.retry_after_s == again.retry_after_s == 0.5, "2 tokens at 10/s, and the least that is told"
    scene.place(tokens=100, max_new=1, attempt=1)
    assert len(scene.placed()) == 1, "others are not held back"
    scene.say("ingress-1", Done(*keys[0], "finished", "", (), None, 100, 1))
    scene.wait(refused.retry_after_s + 0.11)
    scene.place(tokens=100, max_new=1, tenant="t", attempt=1)
    assert len(scene.placed()) == 1
    scene.wait(1.0)
    scene.place("later attempt", tokens=100, max_new=1, tenant="t", attempt=2)
    assert len(scene.placed()) == 1, "a stream that goes on elsewhere is no new request"


def test_over_a_long_time_no_more_than_the_rate_is_served():
    load = Load()
    for _ in range(20):
        load.client("metered", small(load))
    load.run(60.0)
    assert load.refusals["metered", "rate"]
    assert 0.85 * 60 * 500 <= load.served["metered"] <= 60 * 500 + 500 * 10 + 20 * 70


def test_what_never_ran_costs_a_tenant_nothing():
    scene = Scene(tenants={"t": Share(1.0, 1000.0)})
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100)
    waiting = scene.place(tokens=100, tenant="t")
    scene.done(waiting, "cancelled")
    tenant = scene.state.tenants.of("t")
    assert (tenant.time, tenant.served, tenant.waiting, tenant.running) == (0.0, 0, 0, 0)
    assert tenant._level == tenant.burst


def test_a_client_that_leaves_pays_for_what_was_computed_for_it():
    scene = Scene()
    scene.cluster(1, 1, total=1000)
    key = scene.place(tokens=100, tenant="t")
    scene.progress(key, ready=60, last=False)
    scene.done(key, "cancelled")
    assert scene.state.tenants.of("t").served == 60
    scene.assert_quiet()


def test_a_new_router_takes_over_what_runs_and_all_tenants_begin_equal():
    scene = Scene(tenants=SHARES)
    (ctx,), _ = scene.cluster(1, 1, total=1000, rows=8)
    key = scene.place(tokens=100, tenant="big", attempt=1, at=ctx)
    big, small_one = scene.state.tenants.of("big"), scene.state.tenants.of("small")
    assert (big.running, scene.state.rows.sum) == (1, 1) and scene.state.prefill.total(ctx) == 100
    waiting = scene.place(tokens=100, tenant="small", attempt=1)
    assert small_one.time == (100 + 50) / 1.0, "it began where big did, and was charged for its own"
    scene.bind(key)
    scene.bind(waiting)
    scene.done(key)
    scene.done(waiting)
    scene.assert_quiet()
    assert not scene.state.rows.sum and big.idle and small_one.idle


# ---------------------------------------------------------------------------------------------------------------- queue


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 50)), min_size=1, max_size=30))
def test_the_queue_goes_in_the_order_that_it_foretells(entries):
    tenants = Tenants({"a": Share(4.0), "b": Share(0.5)})
    queue = WaitQueue(100, tenants)
    for number, (name, priority, cost) in enumerate(entries):
        queue.add((str(number), 1), tenants.of(name), priority, 0.0, Needs(0.0, 0, 0, cost))
    foretold, placed = [entry.key for entry in queue.in_order()], []
    while (key := queue.head()) is not None:
        name, _, cost = entries[int(key[0])]
        tenants.wake(tenants.of(name))
        tenants.begin(tenants.of(name), cost)
        queue.remove(key)
        placed.append(key)
    assert placed == foretold and not queue.by_tenant() and queue.needs == Needs()


def test_what_is_ahead_of_a_newcomer_is_what_its_weight_does_not_let_it_overtake():
    tenants = Tenants(SHARES)
    queue = WaitQueue(1000, tenants)
    big, small_one = tenants.of("big"), tenants.of("small")
    for number in range(100):
        queue.add((f"s{number}", 1), small_one, 0, 0.0, Needs(1.0, 10, 1, 100))
    assert queue.ahead_of(big, 0) == Needs() and queue.ahead_of(small_one, 0).cost == 100 * 100
    for number in range(40):
        queue.add((f"b{number}", 1), big, 0, 0.0, Needs(1.0, 10, 1, 100))
    ahead = queue.ahead_of(big, 0)
    assert ahead.cost == pytest.approx(4000 + 1000) and ahead.rows == pytest.approx(50)
    assert queue.ahead_of(big, -1).cost == 0


def test_refusals_that_are_about_the_tenant_are_429_and_others_503():
    scene = Scene(max_waiting=16, max_wait_s=1000.0)
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100)
    for name, count in (("flood", 30), ("other", 3), ("flood", 3)):
        for _ in range(count):
            scene.place(tokens=100, tenant=name)
    told = [(r.status, r.reason) for r in scene.taken("ingress-1", Refused)]
    assert told == [(503, "queue_full")] * 17 + [(429, "fairness")] * 3
    assert scene.state.queue.by_tenant() == {"flood": 14, "other": 2}
