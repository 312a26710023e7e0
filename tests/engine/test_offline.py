"""Generator: how requests end, and what it leaves behind."""

import random

import pytest
from oracle import greedy, reference

from tailrace.model.errors import ConfigError
from tailrace.model.sampling_params import SamplingParams


def prompts_of(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(4, 512) for _ in range(n)] for n in lengths]


@pytest.fixture(scope="module")
def ref(tiny):
    return reference(tiny("llama"), num_pages=64, max_num_tokens=32, max_batch_size=4)


def test_a_request_ends_by_length_at_exactly_max_tokens(ref):
    for max_tokens in (1, 2, 3):
        result = ref.generate(prompts_of([10]), greedy(max_tokens))[0]
        assert len(result.ids) == max_tokens and result.samples[0].finish_reason == "length"


def test_a_stop_id_ends_a_sample_and_is_its_last_token(ref):
    free = ref.generate(prompts_of([10]), greedy(12))[0].ids
    stop = free[6]
    at = free.index(stop)
    result = ref.generate(prompts_of([10]), greedy(12, stop_token_ids=(stop,)))[0]
    assert result.ids == free[: at + 1] and result.samples[0].finish_reason == "stop"


def test_more_requests_than_batch_and_pool_hold_are_all_served(ref):
    prompts = prompts_of([50, 1, 120, 33, 64, 2, 90, 17, 17, 200])
    wanted = [greedy(5 + i) for i in range(len(prompts))]
    results = ref.generate(prompts, wanted)
    assert [len(r.ids) for r in results] == [5 + i for i in range(len(prompts))]
    assert results[4].ids == ref.generate([prompts[4]], wanted[4])[0].ids


def test_a_request_larger_than_the_pool_is_refused_and_leaves_no_page(ref):
    with pytest.raises(ConfigError, match="prompt 1 of 1100 tokens"):
        ref.generate(prompts_of([5, 1100]), greedy(4))
    assert ref.kv.counts().used == 0


def test_greedy_samples_are_equal_and_seeded_ones_are_those_of_their_index(ref):
    prompt = prompts_of([21])
    three = ref.generate(prompt, greedy(9), samples=3)[0]
    assert [s.ids for s in three.samples] == [ref.generate(prompt, greedy(9))[0].ids] * 3
    seeded = SamplingParams(max_tokens=9, temperature=1.0, seed=42, ignore_eos=True)
    three = ref.generate(prompt, seeded, samples=3)[0]
    assert len({tuple(s.ids) for s in three.samples}) == 3
    assert three.samples[0].ids == ref.generate(prompt, seeded)[0].ids
    assert [s.ids for s in ref.generate(prompt, seeded, samples=3)[0].samples] == [s.ids for s in three.samples]


def test_samples_of_a_prompt_that_fills_its_last_page_share_it(ref):
    prompt = prompts_of([32])
    two = ref.generate(prompt, greedy(9), samples=2)[0]
    assert [s.ids for s in two.samples] == [ref.generate(prompt, greedy(9))[0].ids] * 2


def test_a_failed_request_carries_its_error_and_the_others_go_on(tiny):
    ref = reference(tiny("llama"), num_pages=64)
    real = ref.engine.step
    broken = {"3": False}

    def step(plan):
        if not broken["3"] and any(row.key.key[0] == "1" and row.start > 30 for row in plan.rows):
            broken["3"] = True
            row = next(row for row in plan.rows if row.key.key[0] == "1")
            ref.engine.poison([int(row.pages[0])])
        return real(plan)

    ref.engine.step = step
    results = ref.generate(prompts_of([20, 30, 10]), greedy(8))
    assert broken["3"] and results[1].error is not None
    assert [len(r.ids) for r in results] == [8, 2, 8] and results[0].error is None and results[2].error is None
