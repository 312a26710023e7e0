"""Ledger, queue, policies, pairing, predictions: the router core's small parts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import LedgerError
from tailrace.router.admission import Needs, WaitQueue, next_grant_s
from tailrace.router.ledger import POOL, Claims
from tailrace.router.pairing import assign_pairs
from tailrace.router.policies import (
    POLICIES,
    GenCandidate,
    PlaceView,
    PrefillCandidate,
    choose_gen,
    least_prefill,
    least_tokens,
    prefix,
    round_robin,
)
from tailrace.router.tenants import Tenants
from tailrace.router.told import Told
from tailrace.transfer.messages import Done

A, B = ("a", 0), ("b", 0)


def test_a_claim_is_made_once_and_returned_once():
    claims = Claims("pages")
    claims.claim(A, "gen", 5)
    with pytest.raises(LedgerError):
        claims.claim(A, "gen", 5)
    claims.move(A, POOL, 7)
    claims.reduce(A, 6)
    claims.reduce(A, 9)
    assert (claims.total("gen"), claims.total(POOL), claims.amount(A)) == (0, 6, 6)
    assert claims.give_back(A) == 6 and claims.give_back(A) == 0 and claims.sum == 0
    with pytest.raises(LedgerError):
        claims.move(A, "gen")
    claims.check()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["claim", "move", "reduce", "give_back"]),
        st.integers(0, 4), st.sampled_from(["x", "y", POOL]), st.integers(0, 50),
    ),
    max_size=40,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(OPERATIONS)
def test_totals_are_always_the_sum_of_the_claims(operations):
    claims = Claims("tokens")
    for operation, number, holder, amount in operations:
        key = (str(number), 0)
        if operation == "claim" and key not in claims:
            claims.claim(key, holder, amount)
        elif operation == "move" and key in claims:
            claims.move(key, holder, amount)
        elif operation == "reduce":
            claims.reduce(key, amount)
        elif operation == "give_back":
            claims.give_back(key)
        claims.check()
    for number in range(5):
        claims.give_back((str(number), 0))
    assert claims.sum == 0 and len(claims) == 0


def test_a_total_that_does_not_add_up_is_found():
    claims = Claims("pages")
    claims.claim(A, "gen", 5)
    claims._totals["gen"] = 4
    with pytest.raises(LedgerError):
        claims.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=20))
def test_the_queue_keeps_its_order_and_its_sums(entries):
    tenants = Tenants({})
    queue, kept, one = WaitQueue(100, tenants), [], tenants.of("one")
    for i, (priority, leave) in enumerate(entries):
        key = (str(i), 1)
        queue.add(key, one, priority, float(i), Needs(0.5, 3, 1, 15))
        if leave:
            queue.remove(key)
            queue.remove(key)
        else:
            kept.append((priority, i, key))
    assert [entry.key for entry in queue.in_order()] == [entry[-1] for entry in sorted(kept)]
    n = len(kept)
    assert queue.needs == Needs(0.5 * n, 3 * n, n, 15 * n)
    assert len(queue) == n == len(queue.waiting()) and (queue.head() is None) == (not kept)
    assert one.waiting == n


def test_the_next_grant_is_the_later_of_both_legs():
    legs = {"max_backlog_s": 1.0, "waiting_s": 2.0, "pages_per_s": 10.0}
    assert next_grant_s(least_backlog_s=3.0, missing_pages=0, **legs) == 4.0
    assert next_grant_s(least_backlog_s=0.0, missing_pages=70, **legs) == 7.0
    assert next_grant_s(least_backlog_s=0.0, missing_pages=5, **legs | {"waiting_s": 0.0, "pages_per_s": 0.0}) == 1.0
    assert next_grant_s(least_backlog_s=0.0, missing_pages=0, missing_rows=9, rows_per_s=2.0, **legs) == 4.5


def candidates(*rows, tokens=10):
    """Rows of (boot, tokens left, tokens a second, last chosen, and of `tokens` those cached, if any)."""
    return [
        PrefillCandidate(boot, left, left / rate, (tokens - sum(cached)) / rate, last, *cached)
        for boot, left, rate, last, *cached in rows
    ]


def test_each_policy_follows_its_own_rule():
    workers = candidates(("a", 100, 100.0, 3), ("b", 150, 1000.0, 2), ("c", 120, 100.0, 1))
    request = PlaceView(10)
    assert round_robin(workers, request) == "c"
    assert least_tokens(workers, request) == "a"
    assert least_prefill(workers, request) == prefix(workers, request) == "b"


def test_ties_go_to_whoever_was_chosen_longest_ago():
    workers = candidates(("a", 0, 100.0, 2), ("b", 0, 100.0, 1))
    assert all(policy(workers, PlaceView(10)) == "b" for policy in POLICIES.values())


@pytest.mark.parametrize("policy", [least_prefill, prefix])
def test_a_cached_prefix_is_worth_what_it_would_cost_to_compute_it_again(policy):
    at_holder = [("holder", 700, 1000.0, 9, 800), ("idle", 0, 1000.0, 1)]
    assert policy(candidates(*at_holder, tokens=1000), PlaceView(1000)) == "holder"
    at_holder[0] = ("holder", 900, 1000.0, 9, 800)
    assert policy(candidates(*at_holder, tokens=1000), PlaceView(1000)) == "idle"


def test_a_gen_is_chosen_by_requests_then_room_and_must_have_room():
    assert choose_gen([]) is None
    assert choose_gen([GenCandidate("a", 5, 6, 0, 0)]) is None
    assert choose_gen([GenCandidate("a", 9, 6, 2, 0), GenCandidate("b", 7, 6, 1, 0)]) == "b"
    assert choose_gen([GenCandidate("a", 9, 6, 1, 0), GenCandidate("b", 12, 6, 1, 0)]) == "b"


# -------------------------------------------------------------------------------------------------------------- pairing


def pairs_of(gens, ctxs, limit, current=None, **more):
    more = {"last_used": {}, "busy": frozenset()} | more
    return assign_pairs(gens, ctxs, current or {}, limit, **more)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5), st.data())
def test_pairs_obey_the_limit_on_both_sides_keep_what_was_and_fill_what_they_can(num_gens, num_ctxs, limit, data):
    gens, ctxs = [f"g{i}" for i in range(num_gens)], [f"c{i}" for i in range(num_ctxs)]
    former = pairs_of([*gens, "dead"], [*ctxs[: num_ctxs // 2], "gone"], limit)
    pairs = pairs_of(gens, ctxs, limit, former)
    peers = {ctx: sum(ctx in of_gen for of_gen in pairs.values()) for ctx in ctxs}
    assert set(pairs) == set(gens)
    for gen in gens:
        assert len(pairs[gen]) == len(set(pairs[gen])) <= limit
        assert {c for c in former[gen] if c in ctxs} <= set(pairs[gen])
    assert all(count <= limit for count in peers.values())
    for gen in gens:  # nothing that could be paired is left
        assert len(pairs[gen]) == limit or all(c in pairs[gen] or peers[c] == limit for c in ctxs)


def test_few_workers_are_all_paired():
    assert pairs_of(["g"], ["a", "b"], 8) == {"g": ("a", "b")}


def test_a_wanted_ctx_takes_the_place_of_the_least_recently_used_idle_pair():
    current = {"g0": ("a", "b"), "g1": ("c", "d")}
    used = {("g0", "a"): 5.0, ("g0", "b"): 9.0, ("g1", "c"): 1.0, ("g1", "d"): 3.0}
    more = {"last_used": used, "wanted": ["e"]}
    assert "e" in pairs_of(["g0", "g1"], list("abcde"), 2, current, **more)["g1"]
    changed = pairs_of(["g0", "g1"], list("abcde"), 2, current, busy={("g1", "c"), ("g1", "d")}, **more)
    assert set(changed["g0"]) == {"e", "b"} and set(changed["g1"]) == {"c", "d"}


def test_when_every_pair_is_busy_a_wanted_ctx_has_to_wait():
    current = {"g": ("a",)}
    assert pairs_of(["g"], ["a", "b"], 1, current, busy={("g", "a")}, wanted=["b"]) == {"g": ("a",)}


def test_ends_are_repeated_for_as_long_as_a_router_may_hold_their_claims():
    told = Told(3.0)
    for number in range(6):
        told.note(Done(f"r{number}", 1, "finished", ""), 2.0 * number)
    assert [done.request for done in told.again(10.0)] == ["r3", "r4", "r5"] and len(told) == 3
    assert told.again(100.0) == []
