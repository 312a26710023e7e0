"""Late binding: when a gen is asked, which one, and what happens when it says no, gives up or dies."""

from __future__ import annotations

from router_scene import Scene

from tailrace.transfer.messages import Bound, Cancel, Peers, Placed, Unbind


def ready_to_bind(scene, **more):
    key = scene.place(**more)
    scene.progress(key, total=scene.state.records[key].place.num_tokens)
    return key


def test_a_gen_is_asked_only_when_the_rest_of_prefill_falls_to_the_transfer():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1, total=1000)
    key = scene.place(tokens=2048)  # chunks of 256 tokens take 0.256 s; transfer takes about 7 ms
    for ready in (256, 1024, 1700):
        scene.progress(key, ready=ready, total=2048, seconds_left=(2048 - ready) / 1000, last=False)
        assert not scene.binds(gen)
    scene.progress(key, ready=1792, total=2048, seconds_left=0.256, last=False)
    (bind,) = scene.binds(gen)
    assert (bind.request, bind.ctx.worker, bind.num_tokens, bind.namespace) == (key[0], "ctx-0", 2048, b"n")


def test_a_slow_wire_binds_earlier():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1, total=1000)
    scene.beat(gen, transfer_bytes_per_s=1e6)  # 2048 tokens of 1000 bytes take 2 s
    key = scene.place(tokens=2048)
    scene.progress(key, ready=0, total=2048, seconds_left=2.5, last=False)
    assert not scene.binds(gen)
    scene.progress(key, ready=256, total=2048, seconds_left=1.8, last=False)
    assert len(scene.binds(gen)) == 1


def test_it_is_asked_at_the_latest_when_the_last_chunk_is_launched():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1, total=1000)
    key = scene.place(tokens=2048)
    scene.progress(key, ready=1024, total=2048, seconds_left=99.0, last=True)
    assert len(scene.binds(gen)) == 1


def test_bound_tells_the_ingress_and_turns_the_claim_into_the_gens_pages():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    key = ready_to_bind(scene)
    assert scene.state.pages.total(gen) == 7
    scene.placed()
    scene.say(gen, Bound(*key, 7))
    assert scene.placed() == [Placed(*key, "decode", "gen-0", gen, "10.0.0.1", 1)]
    assert scene.state.pages.sum == 0 and scene.state.seats.total(gen) == 1
    assert scene.state.workers.get(gen).free_pages == 93
    scene.say(gen, Bound(*key, 7))  # doubled
    assert not scene.placed() and not scene.taken(gen, Cancel)
    scene.done(key)
    scene.assert_quiet()


def test_not_now_goes_to_another_gen_and_then_waits_until_it_may_ask_again():
    scene = Scene()
    scene.cluster(1, 2)
    key = ready_to_bind(scene)
    first = scene.not_now(key, why="busy", retry_s=1.0)
    second = scene.not_now(key, why="busy", retry_s=1.0)
    assert first != second and key in scene.state.unbound
    assert scene.state.pages.total("") == 7 and scene.state.seats.sum == 0
    scene.binds(first), scene.binds(second)
    scene.wait(0.8)
    assert not scene.binds(first) and not scene.binds(second)
    scene.wait(0.4)
    assert len(scene.binds(first)) + len(scene.binds(second)) == 1


def test_a_gen_without_pages_is_asked_when_its_heartbeat_shows_room():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    key = ready_to_bind(scene)
    scene.not_now(key, why="pages", free=3, retry_s=0.05)
    scene.binds(gen)
    full = scene.beats.pop(gen)
    scene.wait(1.0)
    assert not scene.binds(gen)
    scene.say(gen, full)
    assert len(scene.binds(gen)) == 1


def test_an_unbound_request_is_asked_for_as_soon_as_its_pages_are_free():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1, total=20)
    big = scene.place(tokens=300)
    scene.beat(gen, free_pages=10)
    scene.progress(big, total=300)
    scene.beat(gen, free_pages=18)
    assert big in scene.state.unbound
    scene.beat(gen, free_pages=19)
    assert scene.asked(big) == gen


def test_pages_that_an_elder_waits_for_are_not_given_to_a_younger_one():
    scene = Scene()
    scene.cluster(1, 2, total=40)
    gens = ("gen-0-boot", "gen-1-boot")
    elder, younger = scene.place(tokens=300), scene.place(tokens=100)
    scene.beat(gens[0], free_pages=15)
    scene.beat(gens[1], free_pages=8)
    scene.progress(elder, total=300)
    scene.progress(younger)
    assert elder in scene.state.unbound  # needs 19, waits for the roomier gen
    assert scene.asked(younger) == gens[1]


def test_only_gens_with_a_usable_pair_are_asked():
    scene = Scene()
    (ctx,), (a, b) = scene.cluster(1, 2)
    scene.pair(gens=[a], ctxs=[])
    keys = [ready_to_bind(scene) for _ in range(4)]
    assert {scene.asked(key) for key in keys} == {b}


def test_a_gen_that_says_its_pair_is_gone_is_asked_after_its_next_heartbeat():
    scene = Scene()
    _, (a, b) = scene.cluster(1, 2)
    key = ready_to_bind(scene)
    first = scene.not_now(key, why="pair", retry_s=0.0)
    assert scene.asked(key) != first
    scene.not_now(key, why="pair", retry_s=0.0)
    assert key in scene.state.unbound
    scene.wait(0.1)
    assert key not in scene.state.unbound


def test_when_gen_dies_before_it_answered_another_is_asked_at_once():
    scene = Scene()
    scene.cluster(1, 2)
    key = ready_to_bind(scene)
    dead = scene.asked(key)
    scene.core.declare_dead(dead, "killed")
    assert scene.asked(key) not in (None, dead)


def test_when_a_bound_gen_dies_ctx_says_whether_another_can_read():
    scene = Scene()
    scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.placed()
    scene.core.declare_dead(dead, "killed")
    scene.beats.pop(dead)
    scene.pump()
    assert scene.state.records[key].pending is None and scene.state.seats.sum == 0
    scene.progress(key)  # ctx lost its reader
    other = scene.asked(key)
    assert other != dead
    scene.say(other, Bound(*key, 7))
    assert [p.boot for p in scene.placed()] == [other]
    scene.done(key)
    scene.assert_quiet()


def test_ctxs_word_may_come_before_the_gens_link_drops_here():
    scene = Scene()
    scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.progress(key)  # ctx saw the pair break
    assert scene.state.records[key].gen == dead
    scene.down(dead)
    assert scene.asked(key) not in (None, dead)


def test_ctxs_word_after_the_link_dropped_is_not_made_to_wait_for_the_grace():
    scene = Scene()
    scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.down(dead)
    assert scene.state.records[key].pending is None
    scene.progress(key)
    assert scene.asked(key) not in (None, dead)


def test_ctxs_whole_set_also_says_that_the_reader_is_gone():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.core.declare_dead(dead, "killed")
    scene.held(ctx, (key, "prefill", 7, 7))
    assert scene.asked(key) not in (None, dead)


def test_a_request_whose_gen_died_after_the_release_is_over_at_once():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.core.declare_dead(dead, "killed")
    scene.pump()
    assert not scene.refused()
    scene.held(ctx)
    assert [r.reason for r in scene.refused()] == ["gen_lost"]
    scene.assert_quiet()


def test_a_request_that_ctx_released_before_its_gen_died_is_over_at_once():
    scene = Scene()
    (ctx,), _ = scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.held(ctx)
    scene.core.declare_dead(dead, "killed")
    scene.pump()
    assert [r.reason for r in scene.refused()] == ["gen_lost"]
    scene.assert_quiet()


def test_a_request_that_only_a_dead_gen_could_read_is_refused_as_a_new_one_would_be():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    bound, unbound, prefilling = scene.place(), scene.place(), scene.place()
    scene.bind(bound)
    scene.not_now(ready_again(scene, unbound), retry_s=5.0)
    alone = scene.place(max_new=1)  # needs no gen
    scene.down(gen)
    scene.progress(bound)  # ctx lost its reader, and has the pages
    scene.wait(1.9)
    assert not scene.refused()  # it may dial again
    scene.wait(0.3)
    assert {((r.request, r.attempt), r.reason) for r in scene.refused()} == {
        (key, "no_gen") for key in (bound, unbound, prefilling)
    }
    scene.done(alone)
    scene.assert_quiet()


def ready_again(scene, key):
    scene.progress(key)
    return key


def test_a_request_whose_ctx_no_gen_can_read_any_more_is_placed_elsewhere_in_time():
    scene = Scene()
    _, (gen,) = scene.cluster(2, 1)
    key = scene.place()
    ctx = scene.state.records[key].worker
    scene.beat(gen, pairs=tuple(b for b in scene.beats if b not in (ctx, gen)))  # the pair broke
    scene.progress(key)
    scene.wait(2.0)
    assert not scene.refused()  # it may be made anew
    scene.wait(1.2)
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_a_pair_that_is_made_anew_in_time_serves_the_request():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    key = scene.place()
    scene.beat(gen, pairs=())
    scene.progress(key)
    scene.wait(2.0)
    scene.pair()
    scene.wait(0.2)
    assert scene.asked(key) == gen
    scene.wait(1.5)  # the wait for the pair is over, whatever else follows
    assert not scene.refused()


def test_without_a_word_of_ctx_a_lost_request_is_over_in_time():
    scene = Scene()
    scene.cluster(1, 2)
    key = scene.place()
    dead = scene.bind(key)
    scene.core.declare_dead(dead, "killed")
    scene.beats.pop(dead)
    scene.wait(2.4)
    assert not scene.refused()
    scene.wait(0.3)
    assert [r.reason for r in scene.refused()] == ["gen_lost"]
    scene.assert_quiet()


def test_progress_of_a_bound_request_is_no_reason_to_bind_again():
    scene = Scene()
    _, (gen, other) = scene.cluster(1, 2)
    key = scene.place()
    bound = scene.bind(key)
    scene.binds(gen), scene.binds(other)
    scene.progress(key)  # crossed with Want
    assert scene.state.records[key].gen == bound
    assert not scene.binds(gen) and not scene.binds(other)


def test_a_gen_that_gives_up_is_replaced_and_the_third_failure_ends_the_attempt():
    scene = Scene()
    _, gens = scene.cluster(1, 3)
    key = scene.place()
    used = []
    for _ in range(3):
        gen = scene.asked(key) if used else scene.bind(key)
        if used:
            scene.say(gen, Bound(*key, 7))
        used.append(gen)
        scene.say(gen, Unbind(*key, "lost pair"))
    assert set(used) == set(gens)
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_a_prompt_too_large_for_every_gen_ends_the_attempt():
    scene = Scene(max_binds_per_attempt=2)
    scene.cluster(1, 2)
    key = ready_to_bind(scene)
    scene.not_now(key, why="too_large")
    scene.not_now(key, why="too_large")
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_a_gen_that_never_takes_an_attempt_is_not_asked_for_ever():
    """It had another reader's word once; ctx takes no reader back, so only a new attempt can be read."""
    scene = Scene()
    scene.cluster(1, 1)
    key = ready_to_bind(scene)
    scene.not_now(key, why="another reader")
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_a_prompt_too_large_for_the_only_gen_ends_at_once():
    scene = Scene()
    scene.cluster(1, 1)
    scene.not_now(ready_to_bind(scene), why="too_large")
    assert [r.reason for r in scene.refused()] == ["bind_failed"]
    scene.assert_quiet()


def test_a_late_answer_for_an_ended_request_is_cancelled():
    scene = Scene()
    scene.cluster(1, 1)
    key = ready_to_bind(scene)
    gen = scene.asked(key)
    scene.done(key, "finished")  # its first token was its last
    scene.say(gen, Bound(*key, 7))
    assert scene.taken(gen, Cancel) == [Cancel(*key, "unwanted")]
    scene.assert_quiet()


def test_the_end_of_a_request_that_was_bound_a_moment_ago_is_told_to_its_gen():
    scene = Scene()
    scene.cluster(1, 1)
    key = scene.place()
    gen = scene.bind(key)
    scene.done(key, "finished")  # the ingress may not have seen Placed(decode)
    assert len(scene.taken(gen, Cancel)) == 1
    long = scene.place()
    scene.bind(long)
    scene.wait(5.0)
    scene.done(long, "finished")
    assert not scene.taken(gen, Cancel)
    scene.assert_quiet()


def test_a_gen_that_does_not_answer_is_passed_over_and_its_late_answer_cancelled():
    scene = Scene()
    _, gens = scene.cluster(1, 2)
    key = ready_to_bind(scene)
    mute = scene.asked(key)
    scene.wait(2.2)
    other = scene.asked(key)
    assert other != mute
    scene.say(other, Bound(*key, 7))
    scene.say(mute, Bound(*key, 7))
    assert len(scene.taken(mute, Cancel)) == 1 and scene.state.records[key].gen == other
    scene.done(key)
    scene.assert_quiet()


def test_a_bind_that_got_lost_is_asked_again_after_the_whole_set_that_lacks_it():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    key = ready_to_bind(scene)
    (bind,) = scene.binds(gen)
    scene.held(gen, seen=bind.seq - 1)
    assert scene.asked(key) == gen and not scene.binds(gen)
    scene.held(gen, seen=bind.seq)
    scene.wait(0.2)
    assert len(scene.binds(gen)) == 1


def test_the_gens_whole_set_gives_the_seat_back_when_it_no_longer_has_the_request():
    scene = Scene()
    _, (gen,) = scene.cluster(1, 1)
    key = scene.place()
    scene.bind(key)
    seq = scene.state.records[key].bound_seq
    scene.held(gen, (key, "decode", 7, 0), seen=seq)
    assert scene.state.seats.total(gen) == 1
    scene.held(gen, seen=seq)
    assert scene.state.seats.total(gen) == 0
    scene.done(key)
    scene.assert_quiet()


def test_when_ctx_dies_an_unbound_request_waits_for_its_ingress_to_try_again():
    scene = Scene()
    (a, b), (gen,) = scene.cluster(2, 1)
    key = scene.place()
    (placed,) = scene.placed()
    scene.core.declare_dead(placed.boot, "killed")
    scene.beats.pop(placed.boot)
    scene.pump()
    assert scene.state.prefill.sum == scene.state.pages.sum == 0
    scene.done(key, "migrating")
    again = scene.place(key[0], attempt=2, deaths=1)
    assert scene.placed()[0].boot == ({a, b} - {placed.boot}).pop()
    scene.done(again)
    scene.assert_quiet()


def test_a_bind_under_way_when_ctx_dies_leaves_no_claim_behind():
    scene = Scene()
    (ctx,), (gen,) = scene.cluster(1, 1)
    key = ready_to_bind(scene)
    scene.core.declare_dead(ctx, "killed")
    scene.not_now(key, why="pair")
    assert scene.state.pages.sum == scene.state.seats.sum == 0
    scene.done(key, "migrating")
    scene.assert_quiet()


def test_a_ctx_without_any_pair_gets_one_when_a_request_needs_it():
    scene = Scene(pairs_per_worker=2)
    ctxs = [scene.worker(f"ctx-{i}", "ctx") for i in range(3)]
    gen = scene.worker("gen-0", "gen")
    assigned = [p.boot for p in scene.taken(gen, Peers)[-1].peers]
    assert len(assigned) == 2
    scene.pair(ctxs=assigned)
    scene.wait(1.1)
    scene.mail.clear()
    for ctx in assigned:
        scene.core.declare_dead(ctx, "killed")
        scene.beats.pop(ctx)
    scene.pump()
    assert [p.boot for p in scene.taken(gen, Peers)[-1].peers] == [c for c in ctxs if c not in assigned]


def test_a_loaded_pairing_gives_an_idle_ctx_a_pair():
    scene = Scene(pairs_per_worker=2)
    for i in range(3):
        scene.worker(f"ctx-{i}", "ctx")
    gen = scene.worker("gen-0", "gen", total=1000)
    assigned = [p.boot for p in scene.taken(gen, Peers)[-1].peers]
    scene.pair(ctxs=assigned)
    scene.wait(1.1)
    scene.mail.clear()
    for _ in range(4):
        scene.place(tokens=600)
    scene.place(tokens=10)
    scene.wait(1.1)
    (left_out,) = {f"ctx-{i}-boot" for i in range(3)} - set(assigned)
    assert left_out in [p.boot for p in scene.taken(gen, Peers)[-1].peers]
