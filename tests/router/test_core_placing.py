"""Admission and the first leg: who is chosen, who waits, who is refused, and what is claimed."""

from __future__ import annotations

from collections import Counter

import pytest
from router_scene import PAGE, Scene

from tailrace.model.errors import ConfigError, ProtocolError
from tailrace.router.settings import RouterSettings
from tailrace.transfer.messages import Cancel, Deaths, Drain, Placed


def test_a_request_is_placed_on_a_ctx_and_claimed_on_both_legs():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    key = scene.place(tokens=100, samples=2)
    (placed,) = scene.placed()
    assert placed == Placed(*key, "prefill", "ctx-0", ctx, "10.0.0.1", 1)
    assert scene.state.prefill.total(ctx) == 100
    assert scene.state.pages.sum == 7 + 1  # 101 tokens in pages of 16, and the second sample's open page
    scene.done(key)
    scene.assert_quiet()


def test_a_second_report_of_the_end_gives_nothing_back_twice():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    first, second = scene.place(), scene.place()
    scene.done(first)
    scene.done(first)
    assert scene.state.prefill.total(ctx) == 100
    scene.done(second, "cancelled")
    scene.assert_quiet()


@pytest.mark.parametrize("placement", ["least_prefill", "least_tokens", "round_robin", "prefix"])
def test_a_burst_spreads_over_ctx_workers_before_any_heartbeat(placement):
    scene = Scene(placement=placement)
    ctxs, _ = scene.cluster(4, 4, total=10_000)
    for _ in range(64):
        scene.place(max_new=1)
    share = Counter(p.boot for p in scene.placed())
    assert set(share) == set(ctxs) and max(share.values()) <= 1.3 * 16


def test_a_burst_of_binds_spreads_over_gens_before_any_heartbeat():
    scene = Scene()
    _, gens = scene.cluster(4, 4, total=10_000)
    keys = [scene.place() for _ in range(64)]
    share = Counter(scene.bind(key) for key in keys)
    assert set(share) == set(gens) and max(share.values()) <= 1.3 * 16


def test_unequal_measurements_of_equal_workers_do_not_skew_the_shares():
    scene = Scene(max_backlog_s=100.0)
    ctxs, _ = scene.cluster(4, 1, total=10_000)
    for i, ctx in enumerate(ctxs):
        scene.beat(ctx, prefill_tokens_per_s=700.0 + 200 * i)
    for _ in range(40):
        scene.place(max_new=1)
    share = Counter(p.boot for p in scene.placed())
    assert max(share.values()) <= 1.5 * min(share.values())


def test_a_worker_shown_to_be_much_faster_gets_more():
    scene = Scene(max_backlog_s=100.0)
    (slow, fast), _ = scene.cluster(2, 1, total=10_000)
    scene.beat(slow, prefill_tokens_per_s=500.0)
    scene.beat(fast, prefill_tokens_per_s=5000.0)
    for _ in range(44):
        scene.place(max_new=1)
    share = Counter(p.boot for p in scene.placed())
    assert share[fast] > 5 * share[slow] > 0


def test_short_prompts_avoid_the_worker_with_long_ones():
    scene = Scene(placement="least_prefill", max_backlog_s=100.0)
    (a, b), _ = scene.cluster(2, 1, total=10_000)
    scene.place(tokens=8000)
    (long_at,) = [p.boot for p in scene.placed()]
    other = b if long_at == a else a
    for _ in range(20):
        scene.place(tokens=100)
    assert Counter(p.boot for p in scene.placed())[other] == 20


def test_claims_survive_heartbeats_and_shrink_with_progress():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    key = scene.place(tokens=100)
    scene.wait(30.0)
    assert scene.state.prefill.total(ctx) == 100
    scene.progress(key, ready=60, seconds_left=9.0, last=False)
    assert scene.state.prefill.total(ctx) == 40
    scene.progress(key, ready=20, seconds_left=9.0, last=False)
    assert scene.state.prefill.total(ctx) == 40  # late and lower: claims never rise


def test_few_pages_coming_back_refuse_nobody_while_few_were_taken():
    scene = Scene()
    scene.cluster(1, 1, total=40)
    small = scene.place(tokens=PAGE // 2)
    scene.done(small)
    scene.wait(9.0)
    scene.place(tokens=36 * PAGE)
    waiting = scene.place(tokens=30 * PAGE)
    assert len(scene.placed()) == 2 and not scene.refused()
    assert waiting in scene.state.queue


def test_a_whole_set_that_does_not_know_the_seconds_left_changes_no_claim():
    scene = Scene(local_prefill_max_tokens=200)
    _, (gen,) = scene.cluster(1, 1)
    key = scene.place(tokens=100)
    assert scene.placed()[0].boot == gen
    scene.held(gen, (key, "local", 7, 0), seen=10**6, seconds_left=None)
    assert scene.state.prefill.total(gen) == 100
    scene.held(gen, (key, "local", 7, 0), seen=10**6, seconds_left=0.0)
    assert scene.state.prefill.total(gen) == 0


# --------------------------------------------------------------------------------------------------------- who is there


def test_a_starting_router_listens_before_it_places():
    scene = Scene(settle=False)
    scene.cluster(1, 1)
    scene.place()
    assert not scene.placed() and not scene.refused()
    scene.wait(1.1)
    assert len(scene.placed()) == 1


def test_without_a_living_gen_requests_are_refused_with_the_time_to_its_return():
    scene = Scene()
    scene.cluster(1, 0)
    scene.place()
    refusal = scene.refused()[0]
    assert (refusal.status, refusal.reason) == (503, "no_gen") and refusal.retry_after_s >= 1.0
    scene.assert_quiet()


def test_while_a_gen_may_dial_again_requests_wait_for_it():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    scene.down(gen)
    scene.place()
    scene.wait(0.4)
    assert not scene.refused() and not scene.placed()
    scene.worker("gen-0", "gen")
    scene.pair()
    assert len(scene.placed()) == 1


def test_requests_are_refused_within_a_second_of_the_last_gens_death_also_before_it_is_certain():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    scene.down(gen)
    scene.place()
    scene.wait(0.6)
    assert [r.reason for r in scene.refused()] == ["no_gen"] and not scene.state.workers.is_dead(gen)
    scene.place()
    assert [r.reason for r in scene.refused()] == ["no_gen"], "it has been away for long"


def test_all_ctx_dead_means_local_prefill_whatever_the_threshold():
    scene = Scene(local_prefill_max_tokens=0)
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.core.declare_dead(ctx, "killed")
    scene.beats.pop(ctx)
    key = scene.place(tokens=1000)
    (placed,) = scene.placed()
    assert (placed.leg, placed.boot) == ("local", gen)
    assert scene.state.counters["local_fallback"] == 1 and scene.state.counters["local_chosen"] == 0
    assert scene.state.seats.total(gen) == 1
    scene.done(key)
    scene.assert_quiet()


def test_a_ctx_whose_link_just_dropped_is_waited_for_before_local_prefill():
    scene = Scene(local_prefill_max_tokens=0)
    (ctx,), _ = scene.cluster(1, 1)
    scene.down(ctx)
    scene.place()
    scene.wait(0.4)
    assert not scene.placed()
    scene.wait(0.2)
    assert [p.leg for p in scene.placed()] == ["local"]


def test_local_prefill_never_refuses_when_all_ctx_are_dead():
    scene = Scene(local_prefill="never", local_prefill_max_tokens=1000)
    (ctx,), _ = scene.cluster(1, 1)
    scene.place(tokens=10)
    assert [p.leg for p in scene.placed()] == ["prefill"]
    scene.core.declare_dead(ctx, "killed")
    scene.beats.pop(ctx)
    scene.place()
    assert [r.reason for r in scene.refused()] == ["no_ctx"]


def test_short_prompts_are_prefilled_locally_and_counted_as_chosen():
    scene = Scene(local_prefill_max_tokens=64)
    scene.cluster(1, 2)
    for tokens in (64, 65, 10):
        scene.place(tokens=tokens)
    assert [p.leg for p in scene.placed()] == ["local", "prefill", "local"]
    assert scene.state.counters["local_chosen"] == 2 and scene.state.counters["local_fallback"] == 0


def test_without_a_usable_pair_requests_are_refused_within_two_seconds():
    scene = Scene()
    scene.cluster(1, 1)
    scene.pair(ctxs=[])
    scene.place()
    scene.wait(1.0)
    assert not scene.refused()
    scene.wait(1.0)
    assert [r.reason for r in scene.refused()] == ["no_pair"]
    assert scene.state.counters["local_fallback"] == 0


def test_a_pair_that_comes_in_time_is_used():
    scene = Scene()
    scene.cluster(1, 1)
    scene.pair(ctxs=[])
    scene.place()
    scene.wait(0.5)
    scene.pair()
    assert len(scene.placed()) == 1


def test_a_request_that_ends_with_its_first_token_needs_no_pair_and_no_pages():
    scene = Scene()
    scene.cluster(1, 1)
    scene.pair(ctxs=[])
    key = scene.place(max_new=1)
    assert [p.leg for p in scene.placed()] == ["prefill"] and scene.state.pages.sum == 0
    scene.progress(key)
    assert key not in scene.state.unbound
    scene.done(key)
    scene.assert_quiet()


def test_only_ctx_workers_with_a_pair_are_chosen():
    scene = Scene()
    (a, b), _ = scene.cluster(2, 1)
    scene.pair(ctxs=[b])
    for _ in range(5):
        scene.place()
    assert {p.boot for p in scene.placed()} == {b}


def test_a_stuck_worker_leaves_the_candidates_and_comes_back():
    scene = Scene()
    (a, b), _ = scene.cluster(2, 1)
    scene.beat(a, stamp_age_s=9.0)
    for _ in range(4):
        scene.place()
    assert {p.boot for p in scene.placed()} == {b}
    scene.beat(a, stamp_age_s=0.1)
    for _ in range(4):
        scene.place()
    assert a in {p.boot for p in scene.placed()}


def test_a_loading_worker_is_no_candidate():
    scene = Scene()
    (a, b), _ = scene.cluster(2, 1)
    scene.beat(a, phase="load")
    for _ in range(4):
        scene.place()
    assert {p.boot for p in scene.placed()} == {b}


def test_a_silent_worker_is_passed_over_but_the_only_one_still_serves():
    scene = Scene()
    (a, b), (gen,) = scene.cluster(2, 1)
    beat = scene.beats.pop(a)
    scene.wait(2.0)
    for _ in range(4):
        scene.place()
    assert {p.boot for p in scene.placed()} == {b}
    scene.beats.pop(b)
    scene.wait(2.0)
    scene.place()
    assert len(scene.placed()) == 1  # stale figures do not stop the flow
    scene.say(a, beat)
    scene.place()
    assert [p.boot for p in scene.placed()] == [a]


def test_a_draining_worker_gets_nothing_new():
    scene = Scene()
    (a, b), (gen, other) = scene.cluster(2, 2)
    scene.say(a, Drain(30.0))
    scene.say(gen, Drain(30.0))
    keys = [scene.place() for _ in range(4)]
    assert {p.boot for p in scene.placed()} == {b}
    assert {scene.bind(key) for key in keys} == {other}


def test_excluded_workers_are_avoided_while_others_are_there():
    scene = Scene()
    (a, b), _ = scene.cluster(2, 1)
    for _ in range(3):
        scene.place(exclude=(a,))
    assert {p.boot for p in scene.placed()} == {b}
    scene.place(exclude=(a, b))
    assert len(scene.placed()) == 1


def test_a_worker_of_duty_both_does_both_legs():
    scene = Scene()
    boths = [scene.worker(f"both-{i}", "both") for i in range(2)]
    scene.wait(1.1)
    keys = [scene.place() for _ in range(4)]
    placed = scene.placed()
    assert {p.leg for p in placed} == {"local"} and Counter(p.boot for p in placed) == {boths[0]: 2, boths[1]: 2}
    assert not scene.state.counters["local_fallback"] and not scene.state.counters["local_chosen"]
    for key in keys:
        scene.done(key)
    scene.assert_quiet()


def test_a_request_that_saw_too_many_deaths_is_refused():
    scene = Scene()
    scene.cluster(1, 1)
    scene.place(deaths=1)
    scene.place(deaths=2)
    assert len(scene.placed()) == 1 and [r.reason for r in scene.refused()] == ["worker_deaths"]


def test_place_again_is_answered_again_and_claimed_once():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    key = scene.place("r")
    first = scene.placed()
    scene.place("r")
    assert scene.placed() == first and scene.state.prefill.total(ctx) == 100
    gen = scene.bind(key)
    scene.placed()
    scene.place("r")
    assert [(p.leg, p.boot) for p in scene.placed()] == [("prefill", ctx), ("decode", gen)]


# ---------------------------------------------------------------------------------------------------------------- queue


def test_a_request_waits_for_pages_and_is_placed_when_they_come_back():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1, total=10)
    first, second = scene.place(tokens=100), scene.place(tokens=100)
    assert [p.request for p in scene.placed()] == [first[0]] and len(scene.state.queue) == 1
    scene.bind(first)
    scene.beat(gen, free_pages=3)
    scene.placed()
    scene.done(first)
    assert [p.request for p in scene.placed()] == [second[0]]  # at once, before the next heartbeat
    scene.done(second)
    scene.assert_quiet()


def test_waiting_requests_go_in_order_and_small_ones_do_not_overtake():
    scene = Scene()
    scene.cluster(1, 1, total=10)
    first = scene.place(tokens=100)
    scene.place("big", tokens=140)
    scene.place("small", tokens=10)
    scene.place("urgent", tokens=10, priority=-1)
    scene.place("retry", tokens=10, attempt=2)
    assert [p.request for p in scene.placed()] == [first[0], "urgent", "retry"]  # small fits too, but comes after big
    for key in (first, ("urgent", 1), ("retry", 2)):
        scene.done(key)
    assert [p.request for p in scene.placed()] == ["big", "small"]


def test_later_attempts_and_lower_priority_numbers_are_placed_first():
    scene = Scene(local_prefill_max_tokens=0)
    scene.cluster(1, 1, total=7)
    first = scene.place(tokens=100)
    scene.place("normal", tokens=100)
    scene.place("urgent", tokens=100, priority=-1)
    scene.place("retry", tokens=100, attempt=2)
    order = [first]
    for _ in range(3):
        scene.placed()
        scene.done(order[-1])
        (placed,) = scene.placed()
        order.append((placed.request, placed.attempt))
    assert [request for request, _ in order[1:]] == ["retry", "urgent", "normal"]


def test_the_queue_is_bounded_and_the_refusal_computes_when_to_come_again():
    scene = Scene(max_waiting=2, max_backlog_s=1.0)
    scene.cluster(1, 1, total=10_000)
    for _ in range(14):
        scene.place(tokens=100)
    placed, refused = scene.placed(), scene.refused()
    assert len(placed) == 6 and len(refused) == 6  # two passes of 0.256 s and one more are given ahead, two wait
    assert refused[0].reason == "queue_full" and refused[0].status == 503
    assert refused[0].retry_after_s == 0.5  # less than the least that is told: 0.1 s, and 0.2 s for the two that wait


def test_a_worker_is_given_two_passes_ahead_and_no_more_than_the_limit():
    scene = Scene(max_backlog_s=0.3)
    scene.cluster(1, 1, total=10_000)
    for _ in range(10):
        scene.place(tokens=100)
    assert len(scene.placed()) == 4  # 0.3 s and one more


def test_a_short_prompt_is_not_held_back_by_a_huge_one_that_a_ctx_computes_after_it():
    scene = Scene()
    scene.cluster(1, 1, total=10_000)
    scene.place("huge", tokens=16_000)
    for _ in range(3):
        scene.place(tokens=50)
    assert len(scene.placed()) == 4
    scene.place("second huge one", tokens=16_000)
    assert not scene.placed()


def test_retry_after_grows_with_what_waits():
    scene = Scene(max_waiting=100, max_backlog_s=1.0)
    scene.cluster(1, 1, total=10_000)
    for _ in range(150):
        scene.place(tokens=1000)
    refused = scene.refused()
    assert refused and refused[-1].retry_after_s > 20.0


def test_the_wait_for_pages_is_predicted_from_the_rate_at_which_they_come_back():
    scene = Scene(max_waiting=1)
    _, (gen,) = scene.cluster(1, 1, total=7)
    for _ in range(20):
        key = scene.place(tokens=100)
        scene.bind(key)
        scene.beat(gen, free_pages=0)
        scene.wait(0.5)
        scene.done(key)
    scene.bind(scene.place(tokens=100))
    scene.beat(gen, free_pages=0)
    scene.place(tokens=100)
    scene.place(tokens=100)
    # 7 pages each half second: two requests of 7 pages wait before the next grant
    assert scene.refused()[0].retry_after_s == pytest.approx(1.0, rel=0.25)


def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once():
    scene = Scene(max_backlog_s=1.0)
    scene.cluster(1, 1, total=10_000)
    for _ in range(5):
        scene.place(tokens=1000)
    scene.place(tokens=100, deadline_s=0.5)
    assert [r.reason for r in scene.refused()] == ["deadline"]
    scene.place(tokens=100, deadline_s=60.0)
    assert not scene.refused()


def test_a_deadline_that_passes_while_waiting_refuses():
    scene = Scene()
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100)
    scene.place(tokens=100, deadline_s=5.0)
    scene.wait(4.0)
    assert not scene.refused()
    scene.wait(1.0)
    assert [r.reason for r in scene.refused()] == ["deadline"]


def test_a_waiting_request_is_refused_as_soon_as_its_deadline_cannot_be_met_any_more():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1, total=10_000)
    scene.place("huge", tokens=8000)
    late = scene.place("late", tokens=9000, deadline_s=18.0)
    assert late in scene.state.queue and not scene.refused()  # 8 s to wait for, 9 s to compute
    scene.wait(2.0)  # and ctx gets nowhere
    assert not scene.refused()
    scene.wait(2.0)
    (refused,) = scene.refused()
    assert (refused.request, refused.reason) == ("late", "deadline") and refused.retry_after_s == pytest.approx(
        8 - 0.512
    )


def test_a_request_that_could_start_at_once_is_refused_if_its_own_prefill_takes_too_long():
    scene = Scene()
    scene.cluster(1, 1, total=10_000)
    scene.place(tokens=3000, deadline_s=2.9)
    assert [r.reason for r in scene.refused()] == ["deadline"]
    scene.place(tokens=3000, deadline_s=3.1)
    assert len(scene.placed()) == 1


def test_nobody_waits_longer_than_the_limit():
    scene = Scene(max_wait_s=3.0)
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100)
    scene.place(tokens=100)
    scene.wait(3.2)
    assert [r.reason for r in scene.refused()] == ["queue_full"]


def test_a_prompt_larger_than_every_pool_is_refused():
    scene = Scene()
    scene.cluster(1, 2, total=10)
    scene.place(tokens=161)
    assert [r.reason for r in scene.refused()] == ["too_large"]
    scene.place(tokens=159)
    assert len(scene.placed()) == 1


def test_cancelling_a_waiting_request_takes_it_out_of_the_queue():
    scene = Scene()
    scene.cluster(1, 1, total=10)
    first, second = scene.place(tokens=100), scene.place(tokens=100)
    scene.done(second, "cancelled")
    scene.done(first, "cancelled")
    scene.placed()
    scene.wait(1.0)
    assert not scene.placed()
    scene.assert_quiet()


# ------------------------------------------------------------------------------------------------------------ ingresses


def test_the_requests_of_a_lost_ingress_are_forgotten_after_their_lease():
    scene = Scene(request_lease_s=5.0)
    scene.cluster(1, 1)
    keys = [scene.place() for _ in range(3)]
    gen = scene.bind(keys[0])
    scene.core.link_down("ingress-1")
    scene.wait(5.5)
    assert len(scene.state.records) == 3
    scene.wait(1.0)
    scene.assert_quiet()
    assert not scene.state.ingresses
    assert not scene.taken(gen, Cancel), "the ingress may only have lost its link to here, and be served all the same"


def test_an_ingress_that_dials_again_in_time_keeps_its_requests():
    scene = Scene(request_lease_s=5.0)
    scene.cluster(1, 1)
    key = scene.place()
    scene.core.link_down("ingress-1")
    scene.wait(3.0)
    scene.ingress()
    scene.wait(10.0)
    assert key in scene.state.records
    scene.done(key)
    scene.assert_quiet()


def test_what_waits_leaves_with_its_ingress_link():
    scene = Scene()
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100)
    scene.place(tokens=100)
    scene.core.link_down("ingress-1")
    assert len(scene.state.queue) == 0 and len(scene.state.records) == 1


def test_nonsense_closes_the_link_of_its_sender():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    for fields in ({"tokens": 0}, {"samples": 0}, {"max_new": -1}):
        with pytest.raises(ProtocolError):
            scene.place(**fields)
    with pytest.raises(ProtocolError, match="no ingress"):
        scene.core.frame(ctx, scene_place())
    with pytest.raises(ProtocolError, match="before Register"):
        scene.core.frame("stranger", scene.beats[ctx])
    with pytest.raises(ProtocolError, match="no frame for a router"):
        scene.core.frame(ctx, Placed("r", 0, "prefill", "w", "b", "h", 1))
    scene.say("anyone", Deaths(("never heard of",)))
    scene.assert_quiet()


def scene_place():
    scene = Scene()
    scene.cluster(1, 1)
    return scene.state.records[scene.place()].place


@pytest.mark.parametrize("wrong", [{"placement": "best"}, {"local_prefill": "always"}])
def test_settings_that_cannot_be_served_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        RouterSettings(**wrong)


# ----------------------------------------------------------------------------------------------------- cases C2 and C10


def test_c2_forty_prompts_of_one_token_each_are_counted_when_they_are_placed():
    scene = Scene()
    ctxs, _ = scene.cluster(4, 1, total=10_000)
    waiting = [scene.place(tokens=200, max_new=1, attempt=1) for _ in range(40)]
    share = Counter()
    while placed := scene.placed():
        share.update(p.boot for p in placed)
        for frame in placed:
            scene.progress((frame.request, frame.attempt), total=200)
            scene.done((frame.request, frame.attempt))
    assert sum(share.values()) == len(waiting) and max(share.values()) <= 1.5 * min(share[ctx] for ctx in ctxs)


def test_c10_a_long_prefill_in_silence_is_still_counted_and_no_more_is_given():
    """Nothing is reaped by time: what a worker has not reported is still there."""
    scene = Scene(max_wait_s=100.0)
    (ctx,), _ = scene.cluster(1, 1, total=10_000)
    keys = [scene.place(tokens=256, attempt=1) for _ in range(8)]
    given = len(scene.placed())
    assert 2 <= given <= 4
    scene.wait(40.0)
    assert not scene.placed() and scene.state.prefill.total(ctx) == given * 256
    scene.progress(keys[0], total=256)
    assert len(scene.placed()) == 1, "one for one"


def test_c10_with_stale_statistics_requests_still_flow():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1, total=10_000)
    scene.beats.clear()
    scene.wait(5.0)
    for _ in range(3):
        key = scene.place(tokens=100, attempt=1)
        assert len(scene.placed()) == 1
        scene.progress(key)
        scene.done(key)
    scene.assert_quiet()
