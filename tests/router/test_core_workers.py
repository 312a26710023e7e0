"""Who is there and who is dead; who is in office; and how a new router finds out what is going on."""

from __future__ import annotations

import pytest
from router_scene import PAGE, Scene

from tailrace.model.errors import ProtocolError
from tailrace.router.epochs import EpochRule, Verdict
from tailrace.router.worker import Usable
from tailrace.transfer.messages import (
    Bound,
    CacheQuery,
    Cancel,
    Deaths,
    Epoch,
    EpochRefused,
    Heartbeat,
    Peers,
    Progress,
)


def everybody_heard(scene, boot, boots):
    return {who: [f.boots for f in scene.taken(who, Deaths)] for who in boots} == {who: [(boot,)] for who in boots}


def test_a_dropped_link_is_a_death_only_after_the_grace_and_is_told_once():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.ingress()
    scene.down(ctx)
    scene.wait(1.9)
    assert not scene.taken(gen, Deaths)
    scene.wait(0.3)
    assert everybody_heard(scene, ctx, [gen, "ingress-1"])
    scene.core.declare_dead(ctx, "again")
    scene.wait(5.0)
    assert not scene.taken(gen, Deaths) and len(scene.state.workers) == 1


def test_a_worker_that_dials_again_in_time_goes_on_with_its_claims():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.place()
    scene.down(ctx)
    scene.wait(1.0)
    scene.worker("ctx-0", "ctx")
    scene.wait(5.0)
    assert not scene.taken(gen, Deaths) and scene.state.prefill.total(ctx) == 100
    assert scene.state.workers.restarts == 0


def test_a_new_boot_of_the_same_name_means_the_old_one_is_dead_at_once():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.place()
    scene.down(ctx)
    scene.worker("ctx-0", "ctx", boot="ctx-0-second")
    assert everybody_heard(scene, ctx, [gen, "ingress-1"])
    assert scene.state.prefill.total(ctx) == 0
    assert scene.state.workers.restarts == 1
    assert [p.boot for p in scene.taken(gen, Peers)[-1].peers] == ["ctx-0-second"]


def test_a_stopped_worker_is_passed_over_and_used_again_with_the_same_boot():
    scene = Scene()
    (a, b), (gen,) = scene.cluster(2, 1)
    beat = scene.beats.pop(a)
    scene.wait(5.0)
    assert not scene.taken(gen, Deaths)
    scene.say(a, beat)
    scene.place(), scene.place()
    assert {p.boot for p in scene.placed()} == {a, b}


def test_long_silence_is_death_and_who_comes_back_must_start_anew():
    scene = Scene()
    (a, b), (gen,) = scene.cluster(2, 1)
    scene.beats.pop(a)
    scene.wait(15.2)
    assert everybody_heard(scene, a, [gen, b])
    assert [f.boots for f in scene.taken(a, Deaths)] == [(a,)] and scene.closed == [a]
    scene.core.link_down(a)
    scene.mail.clear()
    scene.core.link_up("ctx", "ctx-0", a)
    scene.say(a, scene.registers[a])
    assert scene.mail[a] == [Epoch(1, "router-1"), Deaths((a,))] and scene.closed == [a, a]
    assert a not in {w.boot for w in scene.state.workers}
    assert not scene.taken(gen, Deaths)


def test_frames_of_a_dead_boot_that_are_still_under_way_are_ignored():
    scene = Scene()
    (a, b), _ = scene.cluster(2, 1)
    beat = scene.beats.pop(a)
    scene.core.declare_dead(a, "killed")
    scene.say(a, beat)
    assert a not in {w.boot for w in scene.state.workers}


def test_a_supervisors_word_is_enough():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.core.link_up("supervisor", "sup", "sup-boot")
    scene.beats.pop(ctx)
    scene.say("sup-boot", Deaths((ctx,)))
    assert everybody_heard(scene, ctx, [gen])


def test_a_restart_teaches_how_long_the_next_will_take():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    scene.core.declare_dead(gen, "killed")
    scene.beats.pop(gen)
    scene.place()
    assert scene.refused()[0].retry_after_s == pytest.approx(5.0, abs=0.1)
    scene.wait(9.0)
    scene.worker("gen-0", "gen", boot="second")
    scene.core.declare_dead("second", "killed")
    scene.beats.pop("second")
    scene.place()
    assert scene.refused()[0].retry_after_s == pytest.approx(7.0, abs=0.1)  # half way from 5 to 9


def test_a_frame_in_another_workers_name_closes_the_link():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    with pytest.raises(ProtocolError):
        scene.core.frame(ctx, scene.beats[gen])
    with pytest.raises(ProtocolError):
        scene.core.frame(ctx, scene.registers[gen])


# --------------------------------------------------------------------------------------------------------------- epochs


def test_the_first_router_takes_epoch_one():
    scene = Scene(settle=False)
    ctx = scene.worker("ctx-0", "ctx")
    assert scene.taken(ctx, Epoch) == [Epoch(1, "router-1")]


def test_the_epoch_comes_before_everything_else_on_a_worker_link():
    scene = Scene(settle=False)
    scene.worker("ctx-0", "ctx")
    gen = scene.worker("gen-0", "gen")
    assert [type(f) for f in scene.mail[gen]] == [Epoch, Peers, CacheQuery]
    scene.worker("gen-0", "gen", boot="second")
    kinds = [type(f) for f in scene.mail["second"]]
    assert kinds[0] is Epoch and kinds[-2:] == [Peers, CacheQuery]


def test_a_starting_router_takes_one_more_than_the_highest_it_is_told_and_tells_all():
    scene = Scene(settle=False)
    a = scene.worker("ctx-0", "ctx", epoch=(4, "former"))
    b = scene.worker("ctx-1", "ctx", epoch=(7, "former"))
    c = scene.worker("gen-0", "gen", epoch=(8, "router-1"))
    assert [e.number for e in scene.taken(a, Epoch)] == [5, 8]
    assert [e.number for e in scene.taken(b, Epoch)] == [8]
    assert [e.number for e in scene.taken(c, Epoch)] == [8]
    assert not scene.exits


def test_a_starting_router_that_is_refused_takes_the_next_number():
    scene = Scene(settle=False)
    a = scene.worker("ctx-0", "ctx", epoch=(0, ""))
    scene.say(a, EpochRefused(1, "another"))
    assert [e.number for e in scene.taken(a, Epoch)] == [1, 2]
    scene.say(a, EpochRefused(1, "another"))  # late: about the number that was given up
    assert not scene.taken(a, Epoch) and not scene.exits


def test_a_router_that_has_served_and_is_refused_exits():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    scene.place()
    scene.say(ctx, EpochRefused(2, "another"))
    assert len(scene.exits) == 1 and "another" in scene.exits[0]


def test_the_same_number_with_another_boot_is_another_router():
    rule = EpochRule("mine")
    assert rule.told(3, "former") is Verdict.RAISED and rule.number == 4
    assert rule.told(4, "mine") is Verdict.KEEP
    assert rule.told(3, "former") is Verdict.KEEP
    assert rule.told(4, "rival") is Verdict.RAISED and rule.number == 5
    rule.served = True
    assert rule.told(5, "rival") is Verdict.DEPOSED


# ------------------------------------------------------------------------------------------------------ after a restart


def test_a_new_router_counts_what_workers_hold_until_they_no_longer_do():
    scene = Scene()
    (ctx, other), (gen,) = scene.cluster(2, 1)
    scene.held(ctx, (("old", 0), "prefill", 3, 9 * PAGE - 1), (("older", 0), "prefill", 3, 0))  # tokens, and the first
    scene.held(gen, (("oldest", 0), "decode", 20, 0))
    assert scene.state.pool_pages(Usable([scene.state.workers.get(gen)])) == 100 - 9
    assert scene.state.active(scene.state.workers.get(gen)) == 1
    scene.held(ctx)
    scene.held(gen)
    assert scene.state.pool_pages(Usable([scene.state.workers.get(gen)])) == 100
    scene.assert_quiet()


def test_unbound_requests_of_a_former_router_are_taken_over_when_their_ingress_asks():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.held(ctx, (("old", 1), "prefill", 7, 7))
    scene.say(ctx, Progress("old", 1, 100, 100, 0.0, True))
    assert not scene.state.records
    key = scene.place("old", at=ctx)
    assert not scene.placed()  # the ingress knows the first leg
    assert scene.asked(key) == gen and not scene.state.workers.get(ctx).foreign
    scene.say(gen, Bound(*key, 7))
    assert [p.leg for p in scene.placed()] == ["decode"]
    scene.done(key)
    scene.assert_quiet()


def test_taking_over_works_when_the_ingress_is_earlier_than_the_ctx():
    scene = Scene(settle=False)
    key = scene.place("old", at="ctx-0-boot")
    ctx = scene.worker("ctx-0", "ctx")
    gen = scene.worker("gen-0", "gen")
    scene.pair()
    scene.say(ctx, Progress("old", 1, 100, 100, 0.0, True))
    assert scene.asked(key) == gen
    scene.done(key)
    scene.assert_quiet()


def test_what_a_former_router_bound_goes_on_where_it_is():
    """Its ingress may not have heard of the gen, and the ctx no longer has it."""
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    key = scene.place("old", at=ctx)
    other = scene.place("unbound", at=ctx)
    scene.progress(other, ready=50, last=False, seconds_left=9.0)
    scene.held(ctx)
    assert not scene.placed()
    scene.held(gen, (key, "decode", 7, 0), (other, "decode", 7, 0))
    (placed,) = scene.placed()
    assert (placed.request, placed.leg, placed.boot) == ("old", "decode", gen), "of the other, ctx says more"
    scene.held(ctx)
    scene.held(gen, (key, "decode", 7, 0))
    assert not scene.placed() and not scene.state.prefill.amount(key)
    scene.down(gen)
    scene.wait(3.0)
    assert [r.reason for r in scene.refused() if r.request == "old"] == ["gen_lost"]
    scene.done(other)
    scene.assert_quiet()


def test_an_ingress_that_links_again_hears_who_died_meanwhile():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    scene.ingress()
    assert not scene.taken("ingress-1", Deaths)
    scene.core.link_down("ingress-1")
    scene.core.declare_dead(gen, "silent")
    assert not scene.taken("ingress-1", Deaths)
    scene.ingress()
    assert scene.one("ingress-1", Deaths).boots == (gen,)


def test_a_request_whose_ctx_died_with_the_former_router_is_refused():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1)
    scene.core.declare_dead(ctx, "killed")
    scene.beats.pop(ctx)
    scene.place("old", at=ctx)
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_an_ended_request_that_a_whole_set_still_names_is_not_counted_again():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    key = scene.place()
    scene.done(key, "cancelled")
    scene.held(ctx, (key, "prefill", 7, 7 * PAGE - 1))
    assert scene.state.pool_pages(Usable([scene.state.workers.get(gen)])) == 100
    scene.wait(4.0)
    scene.held(ctx, (key, "prefill", 7, 7 * PAGE - 1))  # it really is still there
    assert scene.state.pool_pages(Usable([scene.state.workers.get(gen)])) == 93


def test_the_whole_set_frees_the_prefill_claim_when_ctx_is_done_with_a_request():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 1, total=1000)
    key = scene.place(tokens=2048)
    scene.held(ctx)  # Submit is still on its way
    assert scene.state.prefill.total(ctx) == 2048
    scene.progress(key, ready=2000, total=2048, seconds_left=0.05)
    scene.held(ctx, (key, "prefill", 7, 7))
    assert scene.state.prefill.total(ctx) == 48
    scene.held(ctx)
    assert scene.state.prefill.total(ctx) == 0


def test_a_local_request_gives_its_claims_over_to_the_gen_that_holds_it():
    scene = Scene(local_prefill_max_tokens=1000)
    _, (gen,) = scene.cluster(1, 1)
    key = scene.place()
    assert scene.state.pages.total(gen) == 7
    scene.held(gen, (key, "local", 7, 0))
    assert scene.state.pages.sum == 0 and scene.state.seats.total(gen) == 1
    scene.held(gen)
    assert scene.state.seats.sum == 0
    scene.done(key)
    assert not scene.taken(gen, Cancel)
    scene.assert_quiet()


def test_nothing_that_a_heartbeat_says_can_break_the_arithmetic():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    for rate in (float("nan"), float("inf"), -1.0, 0.0):
        scene.beat(ctx, prefill_tokens_per_s=rate)
        scene.beat(gen, transfer_bytes_per_s=rate)
        key = scene.place(tokens=1000)
        scene.progress(key, ready=1, total=1000, seconds_left=rate, last=False)
        scene.done(key)
    assert isinstance(scene.beats[ctx], Heartbeat)
    scene.assert_quiet()
