"""What is kept up to date about workers is what one would compute anew, whatever they do."""

from __future__ import annotations

import random

import pytest
from router_plain import assert_as_computed_anew
from router_scene import Scene

from tailrace.transfer.messages import Bound, Drain, Held, Holding, PairCost, PrefillSample

DUTIES = ("ctx", "ctx", "ctx", "gen", "gen", "both")


@pytest.mark.parametrize("seed", range(12))
def test_lists_sums_and_priors_are_those_of_plain_recomputation(seed):
    rng = random.Random(seed)
    scene = Scene(settle=False, breaker_faults=2, breaker_probe_s=0.7, dead_after_s=4.0)
    scene.ingress("ingress-1")
    names = [f"worker-{i}" for i in range(12)]
    boots, frames = {}, 0
    for step in range(300):
        name = rng.choice(names)
        boot, what = boots.get(name, ""), rng.random()
        there = scene.state.workers.get(boot) is not None
        if not there or what < 0.04:
            boots[name] = scene.worker(
                name, rng.choice(DUTIES), boot=f"{name}-{step}", rate=rng.choice((0.0, 900.0, 1000.0, 5000.0)),
                rows=rng.choice((0, 4, 4, 4)), beat=rng.random() < 0.9,
            )  # fmt: skip
        elif what < 0.45 and boot in scene.beats:
            scene.beat(
                boot, phase=rng.choice(("run", "run", "run", "load")), stamp_age_s=rng.choice((0.0, 0.0, 6.0)),
                free_pages=rng.randrange(100), prefill_tokens_per_s=rng.choice((0.0, 1e-9, 100.0, 950.0, 1e13)),
                prefills=tuple(
                    PrefillSample(n := rng.randrange(1, 500), 0, 0, n / 1000) for _ in range(rng.choice((0, 0, 0, 2)))
                ),
                costs=(PairCost("any", 1e6, 0.5),),
                pairs=tuple(rng.sample(sorted(boots.values()), min(3, len(boots)))),
            )  # fmt: skip
        elif what < 0.55:
            frames += 1
            scene.place(f"r{frames}", tokens=rng.randrange(1, 200), max_new=rng.choice((1, 4)))
        elif what < 0.65:
            held = [Held(f"r{rng.randrange(frames + 5)}", 0, 3, rng.choice((0, 7)), "prefill", 0.2) for _ in range(3)]
            scene.say(boot, Holding(name, boot, 0, tuple({h.request: h for h in held}.values())))
        elif what < 0.7:
            scene.core.link_down(boot)
        elif what < 0.75:
            scene.say(boot, scene.registers[boot])
        elif what < 0.77:
            scene.say(boot, Drain(1.0))
        elif what < 0.85:
            scene.state.at_fault(boot)
        elif what < 0.87:
            scene.core.declare_dead(boot, "killed")
        elif what < 0.92 and scene.state.records:
            record = rng.choice(list(scene.state.records.values()))
            if record.leg == "prefill":
                scene.progress(record.key, total=record.place.num_tokens)
            if record.pending is not None:
                scene.say(record.pending.gen, Bound(*record.key, record.pages))
            if rng.random() < 0.5:
                scene.done(record.key)
        else:
            scene.wait(rng.choice((0.05, 0.3, 1.6)), beat=False, step=0.3)
        assert_as_computed_anew(scene.state, scene.now)
