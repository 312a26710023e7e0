"""The shortlist of many workers: it must hold whoever the policy would have taken among all."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from router_scene import COMPAT, Scene

from tailrace.router.policies import PlaceView, choose
from tailrace.router.shortlist import FAR, FIRST, HOLDERS, LENGTHS, MANY
from tailrace.transfer.messages import CacheEvent, Deaths, Drain, Held, Holding, PairCost

BLOCK = COMPAT.block_tokens
COUNT = 200


def scene_of(placement, count=COUNT, seed=0):
    """Many workers, some with prefixes of the same prompt and all with some load."""
    rng = random.Random(seed)
    scene = Scene(placement=placement, max_backlog_s=1000.0)
    scene.core.placer.prospects.given_ahead_s = lambda worker: 1000.0
    ctxs, _ = scene.cluster(count, 1, total=100_000)
    prompt = rng.randbytes(16 * 40)
    for ctx in ctxs:
        held = rng.choice((0, 1, 1, 1, 2, 2, 10, 10, 20, 40)) if rng.random() < 0.9 else 0
        scene.say(ctx, CacheEvent(ctx, ctx, 1, True, ((b"n", prompt[: 16 * held]),), ()))
    for i in range(count):
        scene.state.prefill.claim((f"load {i}", 0), rng.choice(ctxs), rng.randrange(1, 4000))
    return scene, ctxs, prompt, rng


@pytest.mark.parametrize("placement", ["least_prefill", "least_tokens", "round_robin"])
@pytest.mark.parametrize("seed", range(4))
def test_the_choice_among_the_few_is_the_choice_among_all(placement, seed):
    scene, ctxs, prompt, rng = scene_of(placement, seed=seed)
    placer, state = scene.core.placer, scene.state
    for i in range(60):
        hashes = prompt[: 16 * rng.randrange(41)] + rng.randbytes(16 * rng.randrange(4))
        tokens = len(hashes) // 16 * BLOCK + 10
        cached = state.cached_tokens(_Place(hashes, tokens))
        placer._cached = state.find_cached(_Place(hashes, tokens))
        every = [placer._candidate(state.workers.get(ctx), tokens) for ctx in ctxs]
        assert all(c.cached_tokens == cached.get(c.boot, 0) for c in every)
        expected = choose(placer.policy, every, PlaceView(tokens))
        scene.place(tokens=tokens, max_new=1, hashes=hashes)
        (placed,) = scene.placed()
        assert placed.boot == expected, i
        assert state.shortlist._window == sum(state.shortlist._bits[:FAR])


def test_prefix_among_the_few_gives_up_little_of_what_it_would_take_among_all():
    scene, ctxs, prompt, _ = scene_of("prefix")
    placer, state = scene.core.placer, scene.state
    for length in (1, 2, 10, 20, 40):
        hashes = prompt[: 16 * length]
        place = _Place(hashes, length * BLOCK + 10)
        placer._cached = state.find_cached(place)
        every = [placer._candidate(state.workers.get(ctx), place.num_tokens) for ctx in ctxs]
        best = next(c for c in every if c.boot == choose(placer.policy, every, PlaceView(place.num_tokens)))
        scene.place(tokens=place.num_tokens, max_new=1, hashes=hashes)
        (placed,) = scene.placed()
        got = next(c for c in every if c.boot == placed.boot)
        assert got.cached_tokens >= best.cached_tokens and got.ready_s <= best.ready_s + 1.0


def test_the_dead_the_draining_and_the_silent_are_not_taken_from_the_shortlist():
    scene, ctxs, prompt, _ = scene_of("prefix")
    for _ in range(30):
        scene.place(tokens=40 * BLOCK + 10, max_new=1, hashes=prompt)
        (placed,) = scene.placed()
        scene.say("ingress-1", Deaths((placed.boot,)))
        ctxs.remove(placed.boot)
    assert len(scene.state.shortlist) == len(ctxs) == COUNT - 30
    scene.down(ctxs[0])
    idle = scene.place(tokens=100, max_new=1)
    assert scene.state.records[idle].worker != ctxs[0]


def test_a_burst_spreads_over_many_workers():
    scene = Scene(max_backlog_s=1000.0)
    scene.cluster(MANY * 2, 1, total=100_000)
    for _ in range(MANY * 8):
        scene.place(tokens=100, max_new=1)
    share = Counter(p.boot for p in scene.placed())
    assert len(share) == MANY * 2 and max(share.values()) <= 5


def test_where_none_of_the_few_may_be_used_all_are_looked_at():
    scene, ctxs, _, _ = scene_of("least_prefill")
    order = [key[2] for key in scene.state.shortlist._order]
    usable = order[-1]
    scene.place(tokens=100, max_new=1, exclude=tuple(ctx for ctx in ctxs if ctx != usable))
    (placed,) = scene.placed()
    assert placed.boot in ctxs  # those to be avoided are taken if nobody else is among the few


def test_a_choice_among_a_thousand_looks_at_a_few():
    scene, _, prompt, rng = scene_of("prefix", 1024)
    placer, state = scene.core.placer, scene.state
    for i in range(200):
        hashes = prompt[: 16 * rng.randrange(41)]
        place = _Place(hashes, len(hashes) // 16 * BLOCK + 10)
        placer._cached = state.find_cached(place)
        few = placer._few(_Record(place), state.workers.decoders(scene.now), scene.now)
        assert 0 < len(few) <= FIRST + HOLDERS * LENGTHS
        chosen = placer._choose(_Record(place), placer._with_room(_Record(place), few), scene.now)
        state.prefill.claim((f"new {i}", 0), chosen.boot, place.num_tokens)


class World:
    """What may happen to many workers, told twice alike: once the router looks at a few, once at all of them."""

    def __init__(self, placement, seed, duties, **settings):
        self.rng, self.scene = random.Random(seed), Scene(
            placement=placement, max_backlog_s=1000.0, max_waiting=10**6, max_wait_s=1e6, breaker_faults=2, **settings
        )  # fmt: skip
        self.scene.core.placer.prospects.given_ahead_s = lambda worker: 1000.0
        self.boots = [
            self.scene.worker(f"{duty}-{i}", duty, total=4000, rows=64) for duty, count in duties for i in range(count)
        ]
        self.scene.pair()
        self.scene.wait(self.scene.settle_s)
        self.prompt = self.rng.randbytes(16 * 40)
        for number, boot in enumerate(self.boots):
            held = self.rng.choice((0, 1, 1, 2, 10, 20, 40)) if self.rng.random() < 0.8 else 0
            self.scene.say(boot, CacheEvent(boot, boot, 1, True, ((b"n", self.prompt[: 16 * held]),), ()))
            if not number % 25:
                self.scene.wait(0.05)  # else the first have been silent for long
        self.keys, self.log = [], []

    def run(self, steps, **place):
        for _ in range(steps):
            self._step(place)
            self.log += [(p.request, p.leg, p.boot) for p in self.scene.placed()]
        return self.log

    def _step(self, place):
        scene, rng, what = self.scene, self.rng, self.rng.random()
        boot = rng.choice(self.boots)
        there = boot in scene.beats
        if what < 0.45:
            hashes = self.prompt[: 16 * rng.randrange(41)] + rng.randbytes(16 * rng.randrange(4))
            tokens = rng.choice((len(hashes) // 16 * BLOCK + 10, rng.randrange(1, 400)))
            exclude = (rng.choice(self.boots),) if rng.random() < 0.2 else ()
            more = {"max_new": rng.choice((1, 20)), "hashes": hashes[: tokens // BLOCK * 16], "exclude": exclude}
            self.keys.append(scene.place(tokens=tokens, **(more | place)))
        elif what < 0.6 and self.keys:
            key = self.keys.pop(rng.randrange(len(self.keys)))
            if key in scene.state.records:
                scene.done(key)
        elif what < 0.7 and self.keys:
            record = scene.state.records.get(rng.choice(self.keys))
            if record is not None and record.leg == "prefill":
                tokens = record.place.num_tokens
                scene.progress(record.key, ready=rng.randrange(tokens + 1), total=tokens, last=False)
        elif what < 0.8 and there:
            scene.beat(boot, free_pages=rng.choice((0, 40, 4000, 4000)), stamp_age_s=rng.choice((0.0, 0.0, 0.0, 9.0)))
        elif what < 0.82 and there:
            scene.beat(boot, pairs=tuple(rng.sample(self.boots, 5)))
        elif what < 0.84 and there:
            scene.say(boot, Drain(1.0))
        elif what < 0.88:
            scene.state.at_fault(boot)
        elif what < 0.9 and there and len(scene.beats) > len(self.boots) * 0.8:
            scene.beats.pop(boot)  # it is silent from now on, for some time or for ever
            if rng.random() < 0.5:
                scene.core.declare_dead(boot, "killed")
        elif what < 0.93 and there:
            held = [Held(f"other {rng.randrange(9)}", 0, 3, 7, "prefill", rng.random()) for _ in range(2)]
            scene.say(boot, Holding(boot, boot, 0, tuple({h.request: h for h in held}.values())))
        else:
            scene.wait(rng.choice((0.05, 0.05, 0.4)), step=0.2)
            scene.core.check()


def told_twice(monkeypatch, *world, steps=250, **place):
    few = World(*world[:3], **world[3]).run(steps, **place)
    for module in ("placing", "alone"):
        monkeypatch.setattr(f"tailrace.router.{module}.MANY", 10**9)
    every = World(*world[:3], **world[3]).run(steps, **place)
    return few, every


@pytest.mark.parametrize("placement", ["least_prefill", "least_tokens", "round_robin"])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_the_few_hold_whom_all_would_give(monkeypatch, placement, seed):
    duties = [("ctx", 90), ("gen", 8)]
    few, every = told_twice(monkeypatch, placement, seed, duties, {"local_prefill_max_tokens": 0})
    assert few == every and len({boot for _, leg, boot in few if leg == "prefill"}) > 20


def costs_of(boot):
    return (PairCost(boot, 2e6, 0.03),)


@pytest.mark.parametrize("most", [None, 300])
@pytest.mark.parametrize("seed", range(2))
def test_the_gen_that_prefills_itself_is_the_same_among_a_few_and_among_all(monkeypatch, most, seed):
    monkeypatch.setattr(Scene, "worker", _measured(Scene.worker))
    duties = [("ctx", 4), ("gen", 90)]
    few, every = told_twice(monkeypatch, "least_prefill", seed, duties, {"local_prefill_max_tokens": most})
    assert few == every
    assert len({boot for _, leg, boot in few if leg == "local"}) > 10 and any(leg == "prefill" for _, leg, _ in few)


def _measured(worker):
    return lambda scene, name, duty, **more: worker(
        scene, name, duty, **more | ({"costs": costs_of("ctx-0-boot")} if duty == "gen" else {})
    )


def test_a_gen_that_is_never_cheaper_or_has_measured_nothing_keeps_no_other_out_of_the_first():
    scene = Scene(max_backlog_s=1000.0)
    ctxs, gens = scene.cluster(2, MANY * 2)
    for number, gen in enumerate(gens):
        costs = () if number < MANY else (PairCost(ctxs[0], 2e6, 0.0 if number < 2 * MANY - 3 else 0.2),)
        scene.beat(gen, costs=costs)
    assert len(scene.core.placer.alone.shortlist) == 3
    scene.place(tokens=20)
    (placed,) = scene.placed()
    assert placed.leg == "local" and placed.boot in gens[-3:]


class _Place:
    tenant, conversation, namespace, exclude = "", None, b"n", ()

    def __init__(self, hashes, num_tokens):
        self.hashes, self.num_tokens = hashes, num_tokens


class _Record:
    needs_gen = True

    def __init__(self, place):
        self.place = place


def test_of_few_workers_the_names_of_the_dead_do_not_add_up():
    scene = Scene(max_backlog_s=1000.0)
    scene.cluster(2, 1)
    most = 0
    for number in range(20 * MANY):
        scene.state.load_changed(f"boot {number}")
        scene.state.refresh_shortlists()
        most = max(most, *(shortlist.num_changed for shortlist in scene.state.shortlists))
    assert MANY < most <= 2 * MANY
