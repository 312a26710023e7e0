"""The engine on a family whose rows have formats of their own: chunks, samples, poison, and that each row counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from equal import prompt_of
from oracle import Comparison, Reference, compare_greedy, greedy, reference
from row_family import LOOKBACK, PARTS, write_row_checkpoint

from tailrace.engine.engine import NOT_FINITE
from tailrace.engine.group import Followers
from tailrace.engine.row_forward import RowForward
from tailrace.engine.step import Row, StepPlan
from tailrace.model.errors import ConfigError
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import describe, open_source
from tailrace.model.weights import load_weights

PAGE = 8
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 70)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_row_checkpoint(tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def ref(checkpoint: Path) -> Reference:
    return reference(checkpoint, tokens_per_page=PAGE)


def test_a_checkpoint_of_a_family_opens_by_its_model_type(checkpoint: Path):
    source = open_source(str(checkpoint))
    assert source.family is not None and source.config.family == "tiny_rows"
    assert source.max_position == 4096 and describe(source).num_parameters == 1000
    assert source.revision != open_source(str(write_row_checkpoint(checkpoint.parent / "other", seed=4))).revision
    with pytest.raises(ConfigError, match="loader of its own"):
        load_weights(source, dtype=torch.float32)


@pytest.mark.parametrize("chunk", [3, 13])
def test_answers_do_not_depend_on_how_prompts_are_cut(ref: Reference, chunk: int):
    prompts = [prompt_of(n, 10 + n) for n in LENGTHS]
    expected = ref.generate(prompts, greedy(12))
    cut = reference(ref.source, weights=ref.weights, tokens_per_page=PAGE, max_num_tokens=chunk + 8, max_batch_size=4)
    comparison = Comparison()
    for whole, other in zip(expected, cut.generate(prompts, greedy(12)), strict=True):
        assert other.error is None
        comparison.add(whole.samples[0].logprobs, other.ids)
    comparison.check()


def test_samples_go_on_from_copies_of_what_is_written_to(ref: Reference):
    params = SamplingParams(max_tokens=14, temperature=1.0, seed=5, ignore_eos=True)
    for length in (7, 8, 21):
        (together,) = ref.generate([prompt_of(length, length)], params, samples=3)
        assert len({tuple(s.ids) for s in together.samples}) == 3
        (alone,) = ref.generate([prompt_of(length, length)], params, samples=1)
        assert together.samples[0].ids == alone.ids
        (again,) = ref.generate([prompt_of(length, length)], params, samples=2)
        assert again.samples[1].ids == together.samples[1].ids


def test_logprobs_of_the_prompt_come_as_from_any_model(ref: Reference):
    prompt = prompt_of(19, 1)
    (result,) = ref.generate([prompt], greedy(3, prompt_logprobs=2))
    assert [p.token for p in result.prompt_logprobs] == prompt[1:]
    (longer,) = ref.generate([prompt[:10]], greedy(1, logprobs=200))
    assert abs(dict(longer.samples[0].logprobs[0].top).get(prompt[10], result.prompt_logprobs[9].logprob)
               - result.prompt_logprobs[9].logprob) < 1e-4  # fmt: skip


def next_logits(ref: Reference, pages: np.ndarray, token: int, at: int) -> torch.Tensor:
    hidden = ref.engine._run([Row(None, np.array([token], np.int32), at, pages)])
    return ref.weights.logits(hidden)[0]


@pytest.mark.parametrize("part", PARTS)
def test_each_row_that_is_lost_shows(ref: Reference, part: str):
    """The standing negative control: a hand-off that forgets any of these answers otherwise."""
    length, layout = 27, ref.layout
    pages = np.array(ref.kv.allocate(layout.num_pages(length + 4)), np.int32)
    prompt = np.array(prompt_of(length + 4, 3), np.int32)
    ref.engine.step(StepPlan([Row(None, prompt[:length], 0, pages)]))
    saved = ref.pool[pages].clone()

    def run() -> torch.Tensor:
        ref.pool[pages] = saved
        if lost:
            for (name, layer), region in layout.rows.state.items():
                if name == part:
                    rows = ref.engine._run.pool.of(pages).state(name, layer)
                    rows.write(torch.arange(region.rows), torch.zeros(region.rows, region.row_bytes, dtype=torch.uint8))
            for name, layer in layout.rows.history:
                if name == part:
                    rows = ref.engine._run.pool.of(pages).history(name, layer)
                    rows.write(0, torch.zeros(length // int(name[-1]), 64, dtype=torch.uint8))
        return torch.stack([next_logits(ref, pages, int(prompt[length + i]), length + i) for i in range(4)])

    with torch.inference_mode():
        lost = False
        whole = run()
        lost = True
        assert (run() - whole).abs().max() > 0.1
    ref.kv.release(pages.tolist())
    assert LOOKBACK == 3


def test_a_row_over_poisoned_state_fails_alone(ref: Reference):
    kv, layout = ref.kv, ref.layout
    good, bad = (np.array(kv.allocate(layout.num_pages(9)), np.int32) for _ in range(2))
    prompt = np.array(prompt_of(9, 8), np.int32)
    ref.engine.step(StepPlan([Row(None, prompt[:8], 0, good), Row(None, prompt[:8], 0, bad)]))
    ref.engine.poison(bad[-layout.num_state_pages :].tolist())
    ref.engine.copy_pages([int(good[0])], [int(bad[0])])
    results = ref.engine.step(StepPlan([Row(p, prompt[8:], 8, p) for p in (good, bad)]))
    assert [r.error for r in results] == [None, NOT_FINITE]
    kv.release([*good.tolist(), *bad.tolist()])


def test_warming_up_leaves_no_trace(ref: Reference):
    before = ref.pool.clone()
    ref.engine.warm_up(30, 4)
    assert torch.equal(ref.pool[1:], before[1:]) and not ref.pool[0].any()


def test_what_such_pages_cannot_do_is_refused(ref: Reference):
    with pytest.raises(ConfigError, match="not compared row by row"):
        ref.engine.compare_rows([1], [2], range(1))
    with pytest.raises(ConfigError, match=r"\[n, 384\] uint8"):
        RowForward(ref.weights, torch.zeros(4, 385, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="runs on one rank, not on 2"):
        type(ref.engine)(ref.weights, ref.pool, followers=Followers([], [ref.pool]))


def test_a_stale_page_of_another_prompt_changes_the_answer(ref: Reference):
    prompt = prompt_of(40, 5)
    (good,) = ref.generate([prompt], greedy(16))
    (bad,) = ref.generate([[*prompt_of(16, 6), *prompt[16:]]], greedy(16))
    with pytest.raises(AssertionError):
        compare_greedy(good.samples[0].logprobs, bad.ids)
