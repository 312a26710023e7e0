"""One engine step against transformers and against itself: families, chunking, batches, page sizes, broken pages."""

import random

import numpy as np
import pytest
import torch
from oracle import Comparison, Mismatch, compare_greedy, greedy, reference, same_logprobs, transformers_reference
from transformers import AutoModelForCausalLM

from tailrace.engine.engine import NOT_FINITE, NOTHING_TO_DRAW, Engine, pool_tensor
from tailrace.engine.forward import padded_rows
from tailrace.engine.sampler import Sampler
from tailrace.engine.sequence import sampler_states
from tailrace.engine.step import Row, SamplerState, StepPlan
from tailrace.model.decoder import Decoder
from tailrace.model.errors import ConfigError

LENGTHS = [1, 2, 15, 16, 17, 40, 70, 130]  # around pages, over mistral's window of 24


def prompts_of(lengths: list[int], seed: int = 0, vocab: int = 512) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, vocab) for _ in range(n)] for n in lengths]


def greedy_state(num_prompt_tokens: int, **params: object) -> tuple[SamplerState, ...]:
    return sampler_states(greedy(64, **params), range(1), num_prompt_tokens, frozenset(), {}, [])


def ids32(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int32)


# ---------------------------------------------------------------------------------------------- equal to transformers


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
        ("llama3", {}),
        ("llama-linear", {}),
        ("llama-yarn", {}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2-window", {}),
        ("qwen3", {}),
    ],
)
def test_greedy_output_of_each_family_equals_transformers(tiny, family, overrides):
    path = tiny(family, **overrides)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ref = reference(path, max_num_tokens=64)
    prompts = prompts_of(LENGTHS)
    comparison = Comparison()
    for prompt, result in zip(prompts, ref.generate(prompts, greedy(24)), strict=True):
        sample = result.samples[0]
        assert sample.finish_reason == "length" and len(set(sample.ids)) > 3
        tops = [logprob.top for logprob in sample.logprobs]
        expected = transformers_reference(oracle, prompt, sample.ids)
        comparison.add(expected, sample.ids, tops)
        same_logprobs(expected[0].top, tops[0])
    comparison.check()


def test_rope_scaling_and_windows_change_the_output(tiny):
    """Else the families above would prove nothing."""
    prompt = prompts_of([130])
    plain = reference(tiny("llama")).generate(prompt, greedy(24))[0].samples[0]
    for family in ("llama3", "llama-linear", "llama-yarn", "mistral"):
        other = reference(tiny(family)).generate(prompt, greedy(24))[0].samples[0]
        assert other.ids != plain.ids, family


# ------------------------------------------------------------------------------------- what must not change the output


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window"])
@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_chunked_prefill_equals_whole_prefill(tiny, family, chunk):
    prompts = prompts_of([50, 130])
    whole = reference(tiny(family)).generate(prompts, greedy(16))
    chunked = reference(tiny(family), max_num_tokens=chunk, max_batch_size=1).generate(prompts, greedy(16))
    comparison = Comparison()
    for a, b in zip(whole, chunked, strict=True):
        comparison.add(a.samples[0].logprobs, b.ids, [logprob.top for logprob in b.samples[0].logprobs])
        same_logprobs(a.samples[0].logprobs[0].top, b.samples[0].logprobs[0].top)
    comparison.check()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_mixed_batch_equals_each_request_alone(tiny, family):
    prompts = prompts_of([3, 90, 17, 33, 130, 1, 64, 65, 8, 40])
    together = reference(tiny(family), max_num_tokens=48).generate(prompts, greedy(20))
    ref = reference(tiny(family))
    comparison = Comparison()
    for prompt, result in zip(prompts, together, strict=True):
        alone = ref.generate([prompt], greedy(20))[0]
        comparison.add(alone.samples[0].logprobs, result.ids)
    comparison.check()


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_page_size_does_not_change_the_output(tiny, family):
    prompts = prompts_of([7, 8, 9, 63, 64, 65, 130])
    base = reference(tiny(family), tokens_per_page=16).generate(prompts, greedy(16))
    for size in (8, 64):
        other = reference(tiny(family), tokens_per_page=size).generate(prompts, greedy(16))
        comparison = Comparison()
        for a, b in zip(base, other, strict=True):
            comparison.add(a.samples[0].logprobs, b.ids)
        comparison.check()


def test_warming_up_changes_no_output_and_leaves_the_scratch_page_zero(tiny):
    ref = reference(tiny("mistral"), max_num_tokens=64)
    prompts = prompts_of([40, 5])
    before = ref.generate(prompts, greedy(8))
    ref.engine.warm_up(64, 4)
    assert (ref.pool[0] == 0).all()
    after = ref.generate(prompts, greedy(8))
    assert [r.ids for r in after] == [r.ids for r in before]


# ------------------------------------------------------------------------------------------------- the negative control


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("page", [3, 4, 5])
def test_one_altered_page_changes_the_greedy_output(tiny, family, page):
    """The standing negative control: without it a corrupt page could hide behind a constant output."""
    ref = reference(tiny(family))
    prompt = prompts_of([96])[0]
    table = ids32(list(range(1, 9)))

    def decode(altered: bool) -> list[int]:
        state = greedy_state(96)
        first = ref.engine.step(StepPlan([Row("r", ids32(prompt), 0, table, state)]))[0]
        if altered:
            ref.pool[page + 1, :, 0] = ref.pool[page + 1, :, 0].roll(1, -2)  # keys change places, values do not
        ids = first.tokens
        for at in range(15):
            ids += ref.engine.step(StepPlan([Row("r", ids32(ids[-1:]), 96 + at, table, state)]))[0].tokens
        return ids

    clean = decode(altered=False)
    is_read = family == "llama" or page >= 4  # mistral's window of 24 reaches the prompt's last two pages
    assert (decode(altered=True) != clean) == is_read


def test_the_comparison_finds_one_wrong_token(tiny):
    result = reference(tiny("llama")).generate(prompts_of([20]), greedy(8))[0].samples[0]
    assert compare_greedy(result.logprobs, result.ids) == 8
    with pytest.raises(Mismatch, match="position 5"):
        compare_greedy(result.logprobs, [*result.ids[:5], result.ids[5] ^ 1, *result.ids[6:]])
    with pytest.raises(Mismatch, match="8 tokens, reference 7"):
        compare_greedy(result.logprobs[:7], result.ids)


# --------------------------------------------------------------------------------------------------------- single steps


def test_results_stand_in_plan_order_whatever_the_order_of_computing(tiny):
    ref = reference(tiny("llama"))
    prompts = prompts_of([20, 1, 30, 1])
    tables = np.arange(1, 17, dtype=np.int32).reshape(4, 4)
    rows = [Row(i, ids32(p), 0, tables[i], greedy_state(len(p))) for i, p in enumerate(prompts)]
    results = ref.engine.step(StepPlan(rows))
    assert [r.key for r in results] == [0, 1, 2, 3]
    for prompt, result in zip(prompts, results, strict=True):
        assert result.tokens == ref.generate([prompt], greedy(1))[0].ids


def test_a_chunk_without_samplers_gives_no_token_and_runs_no_output_projection(tiny, monkeypatch):
    ref = reference(tiny("llama"))
    asked: list[int] = []
    real = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, hidden: asked.append(len(hidden)) or real(self, hidden))
    ids = prompts_of([32])[0]
    table = ids32([1, 2, 3])
    assert ref.engine.step(StepPlan([Row("r", ids32(ids[:20]), 0, table)]))[0].tokens == []
    assert asked == []
    assert len(ref.engine.step(StepPlan([Row("r", ids32(ids[20:]), 20, table, greedy_state(32))]))[0].tokens) == 1
    assert asked == [1]


def test_several_samplers_of_a_row_share_its_logits_and_draw_apart(tiny):
    ref = reference(tiny("llama"))
    params = greedy(4, temperature=1.0, seed=11)
    states = sampler_states(params, range(8), 20, frozenset(), {}, [])
    rows = [
        Row("n", ids32(prompts_of([20])[0]), 0, ids32([1, 2]), states),
        Row("m", ids32(prompts_of([9], seed=5)[0]), 0, ids32([3]), greedy_state(9)),
    ]
    many, one = ref.engine.step(StepPlan(rows))
    assert len(many.tokens) == len(many.logprobs) == 8 and len(set(many.tokens)) > 1
    assert len({logprob.top for logprob in many.logprobs if logprob}) == 1
    assert one.tokens == ref.generate([prompts_of([9], seed=5)[0]], greedy(1))[0].ids


def test_the_sampler_is_told_the_position_of_the_token_it_draws(tiny, monkeypatch):
    """Else a sample would draw other random numbers after a hand-off or a recompute than without."""
    ref = reference(tiny("llama"))
    told: list[int] = []
    real = Sampler.sample

    def sample(self, logits, states, positions):
        told.extend(positions)
        return real(self, logits, states, positions)

    monkeypatch.setattr(Sampler, "sample", sample)
    ids = prompts_of([32])[0]
    states = sampler_states(greedy(4), range(2), 32, frozenset(), {}, [])
    ref.engine.step(StepPlan([Row("r", ids32(ids[:20]), 0, ids32([1, 2, 3]))]))
    ref.engine.step(StepPlan([Row("r", ids32(ids[20:]), 20, ids32([1, 2, 3]), states)]))
    ref.engine.step(StepPlan([Row("r", ids32([7]), 32, ids32([1, 2, 3]), greedy_state(32))]))
    assert told == [32, 32, 33]


def test_prompt_logprobs_equal_transformers_whatever_the_chunks(tiny):
    path = tiny("qwen3")
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = prompts_of([150])[0]
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for chunk in (512, 33):
        result = reference(path, max_num_tokens=chunk).generate([prompt], greedy(2, prompt_logprobs=3))[0]
        assert [logprob.token for logprob in result.prompt_logprobs] == prompt[1:]
        for at, logprob in enumerate(result.prompt_logprobs):
            assert abs(logprob.logprob - float(expected[at, prompt[at + 1]])) < 1e-4
            values, ids = expected[at].topk(3)
            same_logprobs(list(zip(ids.tolist(), values.tolist(), strict=True)), logprob.top)


def test_a_prompt_may_be_scored_without_drawing_a_token(tiny):
    result = reference(tiny("llama")).generate(prompts_of([20]), greedy(0, prompt_logprobs=0))[0]
    assert len(result.prompt_logprobs) == 19 and result.ids == [] and result.samples[0].finish_reason == "length"


# --------------------------------------------------------------------------------------------------------- broken pages


def test_a_broken_page_fails_its_own_row_alone(tiny):
    ref = reference(tiny("llama"))
    prompts = prompts_of([30, 31, 32, 33])
    tables = np.arange(1, 17, dtype=np.int32).reshape(4, 4)
    rows = [Row(i, ids32(p), 0, tables[i], greedy_state(len(p))) for i, p in enumerate(prompts)]
    firsts = [result.tokens[0] for result in ref.engine.step(StepPlan(rows))]
    ref.engine.poison([int(tables[1][0]), int(tables[3][1])])
    rows = [Row(i, ids32([firsts[i]]), len(p), tables[i], greedy_state(len(p))) for i, p in enumerate(prompts)]
    rows[3] = Row(3, ids32([firsts[3], 5, 6]), 33, tables[3])  # a chunk that samples nothing is found out too
    results = ref.engine.step(StepPlan(rows))
    assert [r.error for r in results] == [None, NOT_FINITE, None, NOT_FINITE]
    assert results[1].tokens == [] and results[1].logprobs == []
    for i in (0, 2):
        alone = ref.generate([prompts[i]], greedy(2))[0]
        assert [firsts[i], *results[i].tokens] == alone.ids


def test_a_row_whose_every_logit_is_banned_fails_alone(tiny):
    ref = reference(tiny("llama"))
    banned = greedy_state(9, logit_bias=tuple((token, -float("inf")) for token in range(512)))
    rows = [
        Row("banned", ids32(prompts_of([9])[0]), 0, ids32([1]), banned),
        Row("free", ids32(prompts_of([9])[0]), 0, ids32([2]), greedy_state(9)),
    ]
    first, second = ref.engine.step(StepPlan(rows))
    assert first.error == NOTHING_TO_DRAW and first.tokens == [] and second.error is None and len(second.tokens) == 1


def test_a_plan_without_rows_gives_no_results(tiny):
    assert reference(tiny("llama")).engine.step(StepPlan([])) == []


def test_a_page_that_holds_an_earlier_owners_nan_serves_the_next_owner(tiny):
    ref = reference(tiny("llama"))
    clean = ref.generate(prompts_of([37, 5, 20]), greedy(8))
    ref.engine.poison(range(1, 256))
    again = ref.generate(prompts_of([37, 5, 20]), greedy(8))
    assert [r.ids for r in again] == [r.ids for r in clean]


def test_copied_pages_are_the_same_bytes_even_when_the_lists_overlap(tiny):
    ref = reference(tiny("llama"))
    ref.pool[1:4] = torch.randn_like(ref.pool[1:4])
    before = ref.pool[1:4].clone()
    ref.engine.copy_pages([1, 2, 3], [2, 3, 4])
    assert torch.equal(ref.pool[2:5], before) and torch.equal(ref.pool[1], before[0])
    ref.engine.copy_pages([], [])


def test_poisoned_pages_are_all_nan_and_no_other(tiny):
    ref = reference(tiny("llama"))
    ref.pool.zero_()
    ref.engine.poison([2, 5])
    assert ref.pool[[2, 5]].isnan().all() and not ref.pool[[0, 1, 3, 4]].isnan().any()


def test_pages_that_do_not_fit_the_model_are_refused(tiny):
    ref = reference(tiny("llama"))
    with pytest.raises(ConfigError, match="bfloat16"):
        Engine(Decoder(ref.weights), ref.pool.bfloat16())
    with pytest.raises(ConfigError, match="the model needs"):
        Engine(Decoder(ref.weights), ref.pool[:, :1].contiguous())


def test_the_pool_tensor_shares_the_arenas_bytes(tiny):
    layout = reference(tiny("llama")).layout
    pages = np.zeros((3, layout.bytes_per_page), np.uint8)
    tensor = pool_tensor(pages, layout)
    tensor[2].fill_(1.0)
    assert tensor.shape == (3, *layout.shape)
    assert (pages[2].view(np.float32) == 1.0).all() and not pages[:2].any()


def test_few_numbers_of_rows_are_ever_run():
    sizes = {padded_rows(n) for n in range(1, 2049)}
    assert all(n <= padded_rows(n) < n + 32 for n in range(1, 2049))
    assert len(sizes) < 90 and padded_rows(8) == 8 and padded_rows(512) == 512
