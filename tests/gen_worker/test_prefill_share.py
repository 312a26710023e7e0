"""A long prompt computed on a gen does not stall the streams that run there."""

from __future__ import annotations

import pytest
from gen_fakes import Gen
from loop_fakes import prompt_of

from tailrace.gen_worker.prefill_share import PrefillShare


def taught(streams_s, token_s):
    share = PrefillShare()
    share.measure(4, 0, streams_s)
    share.measure(0, 100, 100 * token_s)
    return share


def test_a_chunk_takes_as_long_as_a_pass_of_the_streams():
    assert taught(0.05, 0.001).limit(4, 508) == pytest.approx(50, abs=1)
    assert taught(0.05, 0.001).limit(0, 512) == 512
    assert taught(0.05, 0.0001).limit(4, 300) == 300
    assert taught(0.001, 0.001).limit(4, 508) == 16  # less would never end
    assert PrefillShare().limit(4, 508) == 16


def test_what_a_token_takes_is_learned_in_mixed_passes_too():
    share = PrefillShare()
    share.measure(4, 0, 0.05)
    for _ in range(30):
        tokens = share.limit(4, 508)
        share.measure(4, tokens, 0.05 + 0.0005 * tokens)
    assert share.limit(4, 508) == pytest.approx(100, abs=3)


class SlowPasses:
    """A pass costs `a_pass` beside its tokens, as where weights are read once a pass."""

    def __init__(self, gen, a_pass):
        def step(plan):
            gen.clock.now += a_pass

        gen.engine.during_step = step


def gaps_of(gen, key):
    return [delta.stamps["itl"] for delta in gen.node.deltas(key)][1:]


def test_streams_stay_within_twice_their_pace_while_a_prompt_of_a_thousand_tokens_is_computed():
    gen = Gen(num_pages=800, budget=256, batch=8)
    SlowPasses(gen, 0.05)
    running = [gen.admit(f"d{i}", prompt_of(5, i), max_tokens=150) for i in range(4)]
    for _ in range(10):
        gen.loop.run_pass()
    alone = max(gaps_of(gen, running[0]))
    prompt = prompt_of(1000, 9)
    before = len(gen.engine.steps)
    key = gen.local("long", prompt, max_tokens=2)
    while not gen.node.deltas(key):
        gen.loop.run_pass()
    passes = gen.engine.steps[before:]
    assert len(passes) < 40  # it gets on: about a pass's worth of tokens each time
    for stream in running:
        assert max(gaps_of(gen, stream)) <= 2.2 * alone
    gen.drain()
    gen.assert_local_equals_undisturbed(key, prompt, max_tokens=2)
    for stream in running:
        gen.assert_equals_undisturbed(stream)
    gen.assert_quiet()


def test_without_streams_a_prompt_takes_whole_passes():
    gen = Gen(num_pages=800, budget=256)
    gen.local("long", prompt_of(1000), max_tokens=2)
    gen.drain()
    assert [plan.num_tokens for plan in gen.engine.steps[:4]] == [256, 256, 256, 232]
