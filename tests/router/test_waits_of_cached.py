"""What admission predicts of prompts that are mostly cached: what must be computed counts, not how long they are."""

from __future__ import annotations

import random

import pytest
from router_scene import COMPAT, Scene

from tailrace.transfer.messages import CacheEvent

BLOCK, BLOCKS = COMPAT.block_tokens, 150
TOKENS = BLOCK * BLOCKS + 10  # ten seconds at 1,000 tokens/s
PROMPT = random.Random(1).randbytes(16 * BLOCKS)


def scene_of(cached_blocks, num_ctx=1, **settings):
    """Workers that all hold the beginning of one prompt and are busy for a second."""
    scene = Scene(local_prefill_max_tokens=0, **settings)
    ctxs, _ = scene.cluster(num_ctx, 1, total=100_000)
    for ctx in ctxs:
        held = PROMPT[: 16 * cached_blocks]
        scene.say(ctx, CacheEvent(ctx, ctx, 1, True, ((b"n", held),) if held else (), ()))
        scene.place(tokens=1000, max_new=1)
    scene.mail.clear()
    return scene, ctxs, PROMPT


def waiting(scene):
    return len(scene.state.queue)


@pytest.mark.parametrize("cached_blocks", [0, BLOCKS])
def test_a_deadline_is_held_against_what_must_be_computed(cached_blocks):
    scene, _, hashes = scene_of(cached_blocks)
    scene.place("mine", tokens=TOKENS, max_new=1, hashes=hashes, deadline_s=4.0)
    assert [r.reason for r in scene.refused()] == ([] if cached_blocks else ["deadline"])


@pytest.mark.parametrize(("cached_blocks", "seconds"), [(0, TOKENS / 1000), (BLOCKS, 0.01), (100, TOKENS / 1000 - 6.4)])
def test_what_waits_counts_with_the_tokens_that_nobody_holds(cached_blocks, seconds):
    scene, _, hashes = scene_of(cached_blocks, max_wait_s=1000.0)
    scene.core.placer.prospects.given_ahead_s = lambda worker: 0.0  # nothing more is given to a busy worker
    scene.place(tokens=TOKENS, max_new=1, hashes=hashes)
    assert waiting(scene) == 1
    assert scene.state.queue.needs.prefill_s == pytest.approx(seconds, rel=1e-6)


def test_a_crowd_of_cached_prompts_is_not_refused_for_a_full_queue():
    """Twenty of ten seconds each would be 200 s on one worker; all but a hundredth is cached."""
    scene, _, hashes = scene_of(BLOCKS, max_wait_s=20.0)
    scene.core.placer.prospects.given_ahead_s = lambda worker: 0.0
    for _ in range(20):
        scene.place(tokens=TOKENS, max_new=1, hashes=hashes)
    assert not scene.refused() and waiting(scene) == 20
    unknown, _, _ = scene_of(0, max_wait_s=20.0)
    unknown.core.placer.prospects.given_ahead_s = lambda worker: 0.0
    for _ in range(20):
        unknown.place(tokens=TOKENS, max_new=1)
    assert len(unknown.refused()) == 18


def test_only_as_much_goes_before_a_prompt_as_it_must_compute_itself():
    """A ctx computes the shortest first: a long prompt whose rest is short overtakes what is longer than that rest."""
    scene, (ctx,), hashes = scene_of(BLOCKS, max_backlog_s=3.0)
    prospects, worker = scene.core.placer.prospects, scene.state.workers.get(ctx)
    assert prospects.ahead_s(worker, TOKENS, 1.0) == pytest.approx(1.0)
    assert prospects.ahead_s(worker, 10, 1.0) == pytest.approx(0.01)
    scene.place("mine", tokens=TOKENS, max_new=1, hashes=hashes)
    (placed,) = scene.placed()
    assert placed.boot == ctx
