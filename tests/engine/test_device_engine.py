"""The engine on a device against the CPU's: families, mixed batches, padding, sampling, rows that fail. On the CPU the
kernels' plain twins run; tests marked gpu run the kernels and the graphs."""

import random

import numpy as np
import pytest
import torch
from device_rig import DEVICES, device_reference
from oracle import Comparison, greedy, reference

from tailrace.engine.device_forward import MAX_CHUNKS
from tailrace.engine.device_graphs import CaptureSizes
from tailrace.engine.engine import NOT_FINITE
from tailrace.engine.sampler import margin
from tailrace.engine.sequence import sampler_states
from tailrace.engine.step import Row, StepPlan
from tailrace.model.sampling_params import SamplingParams

LENGTHS = [1, 2, 15, 16, 17, 40, 70, 130]  # around pages, over mistral's window of 24
FEW = CaptureSizes((1, 2, 4, 8), (1, 4, 16, 64), ("greedy", "temperature_only", "advanced"), (4, 64))

on_each = pytest.mark.parametrize("device", DEVICES)


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(4, 512) for _ in range(n)] for n in lengths]


def plain_greedy(max_tokens: int, **more: object) -> SamplingParams:
    return greedy(max_tokens, logprobs=None, **more)


def rows_of(lengths: list[int], start: int = 0, first_page: int = 1, **params: object) -> list[Row]:
    """Rows of fresh random tokens, each with pages of its own for 64 tokens."""
    rows = []
    for i, ids in enumerate(prompts_of(lengths, seed=start)):
        states = sampler_states(plain_greedy(64, **params), range(1), len(ids), frozenset(), {}, [])
        pages = np.arange(first_page + 4 * i, first_page + 4 * i + 4, dtype=np.int32)
        rows.append(Row(i, np.array(ids, np.int32), start, pages, states))
    return rows


# ----------------------------------------------------------------------------------------------------- equal to the CPU


@on_each
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
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
def test_greedy_output_of_each_family_equals_the_cpus(tiny, device, family, overrides):
    path, prompts = tiny(family, **overrides), prompts_of(LENGTHS)
    expected = reference(path, max_num_tokens=64).generate(prompts, greedy(20))
    ours = device_reference(path, device, max_num_tokens=64, max_batch_size=8, sizes=FEW, warm=device == "cuda")
    comparison = Comparison()
    for want, have in zip(expected, ours.generator.generate(prompts, [plain_greedy(20)] * len(prompts)), strict=True):
        comparison.add(want.samples[0].logprobs, have.ids)
    comparison.check()
    ours.kv.check()


@on_each
@pytest.mark.parametrize("max_num_tokens", [9, 33, 512])
def test_output_does_not_depend_on_how_prompts_are_cut(tiny, device, max_num_tokens):
    """Chunks that go on behind pages already written, beside rows that decode."""
    path, prompts = tiny("llama"), prompts_of([130, 33, 64, 5, 90])
    expected = reference(path).generate(prompts, greedy(12))
    ours = device_reference(path, device, max_num_tokens=max_num_tokens, max_batch_size=4)
    comparison = Comparison()
    for want, have in zip(expected, ours.generator.generate(prompts, [plain_greedy(12)] * len(prompts)), strict=True):
        comparison.add(want.samples[0].logprobs, have.ids)
    comparison.check()


@on_each
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 5},
        {"temperature": 0.9, "top_p": 0.7, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": -3},
    ],
)
def test_tokens_drawn_on_the_device_are_the_hosts(tiny, device, params):
    path, prompts = tiny("llama"), prompts_of([17, 3, 30])
    wanted = SamplingParams(**{"max_tokens": 24, "seed": 11, "ignore_eos": True} | params)
    cpu, ours = reference(path), device_reference(path, device, sizes=FEW, max_batch_size=8, warm=device == "cuda")
    expected = cpu.generate(prompts, wanted, samples=2)
    found = ours.generator.generate(prompts, [wanted] * 3, samples=2)
    same = 0
    for prompt, want, have in zip(prompts, expected, found, strict=True):
        for number, (a, b) in enumerate(zip(want.samples, have.samples, strict=True)):
            agreed = next((i for i, (x, y) in enumerate(zip(a.ids, b.ids, strict=True)) if x != y), len(a.ids))
            same += agreed
            if agreed < len(a.ids):  # only where noise may have moved a boundary
                text = prompt + a.ids[:agreed]
                states = sampler_states(wanted, range(number, number + 1), len(prompt), frozenset(), {}, a.ids[:agreed])
                row = Row(0, np.array(text, np.int32), 0, np.arange(1, 9, dtype=np.int32), states)
                hidden = cpu.engine._forward([row])
                logits = cpu.engine._decoder.logits(hidden[len(text) - 1 : len(text)])
                assert not margin(logits[0], states[0], len(text)).clear
    assert same >= 0.9 * 24 * 6


@on_each
def test_rows_with_penalties_bias_logprobs_or_a_grammar_are_the_host_samplers(tiny, device):
    path, prompts = tiny("llama"), prompts_of([20, 9, 33, 12, 7])
    each = [
        greedy(12),
        plain_greedy(12, repetition_penalty=1.4, frequency_penalty=0.3),
        plain_greedy(12, logit_bias=((7, 30.0),)),
        plain_greedy(12, ignore_eos=False, min_tokens=4),
        SamplingParams(max_tokens=12, temperature=0.7, seed=5, logprobs=2, ignore_eos=True),
    ]
    expected = reference(path).generate(prompts, each)
    found = device_reference(path, device, sizes=FEW, max_batch_size=8).generator.generate(prompts, each)
    for want, have in zip(expected, found, strict=True):
        assert have.ids == want.ids and have.samples[0].finish_reason == want.samples[0].finish_reason
        for a, b in zip(want.samples[0].logprobs, have.samples[0].logprobs, strict=True):
            assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-4


@on_each
def test_prompt_logprobs_are_the_cpus(tiny, device):
    path, prompts = tiny("llama"), prompts_of([90, 5])
    wanted = plain_greedy(2, prompt_logprobs=3)
    expected = reference(path, max_num_tokens=64).generate(prompts, wanted)
    found = device_reference(path, device, max_num_tokens=64, sizes=FEW).generator.generate(prompts, [wanted] * 2)
    for want, have in zip(expected, found, strict=True):
        assert len(have.prompt_logprobs) == len(want.prompt_logprobs)
        for a, b in zip(want.prompt_logprobs, have.prompt_logprobs, strict=True):
            assert a.token == b.token and abs(a.logprob - b.logprob) < 1e-4


# --------------------------------------------------------------------------------------------- padding, parts, failures


@on_each
def test_padding_rows_change_no_page_and_no_result(tiny, device):
    path = tiny("llama")
    plain = device_reference(path, device, sizes=CaptureSizes((), (), ()))
    padded = device_reference(path, device, sizes=CaptureSizes((8,), (64,), FEW.variants, (64,)), warm=True)
    for rows in ([20, 7], [1, 1, 1], [1, 12, 1]):
        results = [ref.engine.step(StepPlan(rows_of(rows))) for ref in (plain, padded)]
        assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
    assert padded.forward.book.replayed == 6 and not padded.forward.book.eager
    used = 4 * 3 + 1
    assert padded.pool[used:].isnan().all()
    written = [ref.pool[1:used].nan_to_num(nan=-77.0) for ref in (plain, padded)]
    assert ((written[0] == -77.0) == (written[1] == -77.0)).all()
    torch.testing.assert_close(written[0], written[1], rtol=1e-4, atol=1e-4)
    assert padded.pool[0].isfinite().all()


@on_each
def test_a_step_of_more_rows_than_a_launch_holds_is_run_in_parts(tiny, device):
    path = tiny("llama")
    ours = device_reference(path, device, num_pages=512, max_num_tokens=64, max_batch_size=4, sizes=FEW)
    lengths = [1] * 6 + [3] * (MAX_CHUNKS + 3) + [40, 40]
    rows = rows_of(lengths)
    whole = ours.engine.step(StepPlan(rows))
    assert [r.key for r in whole] == [r.key for r in rows]
    alone = [ours.engine.step(StepPlan([row]))[0].tokens for row in rows]
    assert [r.tokens for r in whole] == alone


@on_each
def test_a_full_batch_and_chunks_that_end_beside_it_are_one_launch(tiny, device):
    ours = device_reference(tiny("llama"), device, sizes=FEW, max_batch_size=8, warm=True)
    rows = rows_of([1] * 8 + [30, 20])
    whole = ours.engine.step(StepPlan(rows))
    assert (ours.forward.book.replayed, ours.forward.book.eager) == (2, 0)
    assert [r.tokens for r in whole] == [ours.engine.step(StepPlan([row]))[0].tokens for row in rows]


@on_each
def test_a_row_whose_pages_hold_nan_fails_alone(tiny, device):
    ours = device_reference(tiny("llama"), device, sizes=FEW, max_batch_size=8, warm=True)
    ours.engine.step(StepPlan(rows_of([20, 20, 20, 20])))
    good = rows_of([1, 1, 30, 1], start=20)
    clean = ours.engine.step(StepPlan(good))
    ours.engine.poison([5, 13])  # the first page of the second and of the last row
    results = ours.engine.step(StepPlan(good))
    assert [r.error for r in results] == [None, NOT_FINITE, None, NOT_FINITE]
    assert [r.tokens for r in results] == [clean[0].tokens, [], clean[2].tokens, []]


@on_each
def test_a_chunk_that_samples_nothing_is_looked_at_too(tiny, device):
    ours = device_reference(tiny("llama"), device, sizes=FEW, max_batch_size=8)
    rows = rows_of([20, 20])
    rows[0].samplers = ()
    first = ours.engine.step(StepPlan(rows))
    assert first[0].tokens == [] and first[0].error is None and len(first[1].tokens) == 1
    ours.engine.poison([1])
    more = rows_of([5, 5], start=20)
    more[0].samplers = ()
    assert [r.error for r in ours.engine.step(StepPlan(more))] == [NOT_FINITE, None]


@on_each
def test_pages_are_copied_compared_and_poisoned(tiny, device):
    ours = device_reference(tiny("llama"), device)
    ours.engine.step(StepPlan(rows_of([20])))
    ours.engine.copy_pages([1, 2], [30, 31])
    assert ours.engine.compare_rows([1, 2], [30, 31], range(20)) == (0.0, 0.0)
    ours.engine.poison([31])
    assert ours.engine.compare_rows([1, 2], [30, 31], range(20))[0] == float("inf")


@pytest.mark.gpu
def test_what_is_done_to_pages_has_ended_when_it_returns(tiny):
    """Their next owner may be a read on another stream, which waits for none of ours."""
    ours = device_reference(tiny("llama"), "cuda")
    for work in (lambda: ours.engine.copy_pages([1], [2]), lambda: ours.engine.poison([2])):
        work()  # what it needs is compiled and loaded
        torch.cuda._sleep(100_000_000)
        assert not torch.cuda.current_stream().query()
        work()
        assert torch.cuda.current_stream().query()


def test_a_variant_that_is_not_captured_runs_eagerly_and_is_told_once(tiny, caplog):
    sizes = CaptureSizes((1, 2, 4), (), ("greedy",))
    ours = device_reference(tiny("llama"), "cpu", sizes=sizes, warm=True)
    assert not caplog.records
    prompts = prompts_of([5, 6])
    ours.generator.generate(prompts, [SamplingParams(max_tokens=6, temperature=0.5, ignore_eos=True)] * 2)
    told = [r for r in caplog.records if r.message == "sampling_variant_runs_eagerly"]
    assert len(told) == 1 and told[0].fields == {"variant": "temperature_only"}
    assert ours.forward.book.eager > 0


# ------------------------------------------------------------------------------------------------------------- graphs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_graph_computes_equals_the_eager_step_to_the_bit(tiny, dtype):
    path = tiny("llama", num_hidden_layers=3)
    made = [
        device_reference(path, "cuda", dtype=dtype, sizes=FEW, max_batch_size=8, warm=warm) for warm in (True, False)
    ]
    for lengths, start in (([20, 3, 40], 0), ([1, 1, 1], 40), ([64], 0), ([1] * 7, 3), ([1, 30, 1, 8], 20)):
        results = [ref.engine.step(StepPlan(rows_of(lengths, start=start))) for ref in made]
        assert [r.tokens for r in results[0]] == [r.tokens for r in results[1]]
        for name in ("hidden", "logits"):
            a, b = (getattr(ref.forward, name) for ref in made)
            assert torch.equal(a[: len(lengths)].nan_to_num(), b[: len(lengths)].nan_to_num()), (name, lengths)
    pools = [ref.pool[1:].nan_to_num(nan=-77.0) for ref in made]
    assert torch.equal(*pools)
    assert made[0].forward.book.replayed == 10 and made[1].forward.book.eager == 10


@pytest.mark.gpu
def test_bfloat16_on_the_gpu_is_as_near_to_float32_as_on_the_cpu(tiny):
    """Mean distance of the logprobs of a fixed text from float32's: at most 1.5 times the CPU's own."""
    path, prompts = tiny("llama", num_hidden_layers=6), prompts_of([200] * 8)
    wanted = plain_greedy(1, prompt_logprobs=0)
    exact = reference(path).generate(prompts, wanted)
    cpu = reference(path, dtype="bfloat16").generate(prompts, wanted)
    gpu = device_reference(path, "cuda", dtype="bfloat16").generator.generate(prompts, [wanted] * len(prompts))

    def distance(results):
        pairs = [zip(a.prompt_logprobs, b.prompt_logprobs, strict=True) for a, b in zip(exact, results, strict=True)]
        return float(np.mean([abs(a.logprob - b.logprob) for pair in pairs for a, b in pair]))

    assert distance(gpu) <= 1.5 * distance(cpu)


@on_each
def test_a_request_may_have_more_samples_than_a_launch_has_rows(tiny, device):
    """The API allows 128 whatever max_batch_size is, and all of them are drawn behind one row."""
    path, prompts = tiny("llama"), prompts_of([17, 3])
    wanted = SamplingParams(max_tokens=6, seed=11, temperature=0.8, ignore_eos=True)
    expected = reference(path).generate(prompts, wanted, samples=100)
    ours = device_reference(path, device, max_batch_size=4, max_samples=128, sizes=FEW)
    found = ours.generator.generate(prompts, [wanted] * 2, samples=100)
    for want, have in zip(expected, found, strict=True):
        assert [s.ids[0] for s in have.samples] == [s.ids[0] for s in want.samples]
        assert all(len(s.ids) == 6 for s in have.samples)
