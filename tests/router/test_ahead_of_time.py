"""How much prefill the router gives a worker ahead of time: a huge prompt keeps nobody away, and claims never fade.

Workers compute 1,000 tokens a second in passes of 256, and are given two passes: prompts of 160 tokens, four of them.
"""

from __future__ import annotations

import pytest
from router_scene import Scene

TOKENS, GIVEN = 160, 4


def test_f4_a_huge_prompt_keeps_no_short_one_waiting_at_the_router():
    """100 s of prefill on the only ctx, which lets short ones go before: it counts as one of them."""
    scene = Scene(local_prefill_max_tokens=0)
    scene.cluster(1, 1, total=20_000)
    huge = scene.place(tokens=100_000)
    scene.progress(huge, ready=1000, total=100_000, seconds_left=99.0, last=False)
    scene.placed()
    short = [scene.place(tokens=TOKENS) for _ in range(8)]
    assert [p.request for p in scene.placed()] == [key[0] for key in short[: GIVEN - 1]]
    assert not scene.refused()
    for key in short[:4]:
        scene.done(key)
        assert len(scene.placed()) == 1


def test_c10_claims_of_a_silent_prefill_never_fade_so_no_more_than_the_limit_are_in_flight():
    """Four are given ahead of time, each says nothing for six minutes, and sixteen wait."""
    scene = Scene(local_prefill_max_tokens=0, max_wait_s=1e6)
    (ctx,), _ = scene.cluster(1, 1, total=2000)
    keys = [scene.place(tokens=TOKENS) for _ in range(20)]
    in_flight = scene.placed()
    assert len(in_flight) == GIVEN
    scene.wait(360.0, step=0.5)
    assert not scene.placed() and not scene.refused()
    assert scene.state.prefill.total(ctx) == GIVEN * TOKENS
    for ended in range(20):
        scene.done(keys[ended])
        in_flight += scene.placed()
        assert len(in_flight) - ended - 1 <= GIVEN
    assert len(in_flight) == 20
    scene.assert_quiet()


@pytest.mark.parametrize("silent_s", [0.0, 4.0])
def test_c10_the_only_worker_takes_as_much_when_its_statistics_are_stale(silent_s):
    scene = Scene(local_prefill_max_tokens=0)
    scene.cluster(1, 1, total=2000)
    scene.wait(silent_s, beat=False)
    for _ in range(6):
        scene.place(tokens=TOKENS)
    assert len(scene.placed()) == GIVEN
