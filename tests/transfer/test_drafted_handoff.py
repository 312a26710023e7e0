"""V4.1 with its draft stages (DSpark), prefilled on one worker and decoded with drafts on another.

The stages' windows go along with the other windows. What comes out is what plain decoding in one process gives, greedy
or seeded; what guesses cannot serve is decoded without them and counted by its name.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from equal import prompt_of
from oracle import Comparison, Reference, greedy, reference
from row_rig import RowRig, one_process
from tiny_families import write_tiny_family

from tailrace.model import drafting
from tailrace.model.replay_policy import ReplayPolicy
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import open_source

PAGE = 16


@pytest.fixture(scope="module")
def ref(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    source = open_source(str(write_tiny_family(tmp_path_factory.mktemp("drafts"), "v41-draft")))
    decoder = drafting.load(source.tensors, source.config, torch.float32, PAGE)  # type: ignore[arg-type]
    yield reference(source, weights=decoder, tokens_per_page=PAGE, block_tokens=PAGE, num_pages=1000)
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["shm", pytest.param("nixl", marks=pytest.mark.soak)])
def test_answers_are_those_of_plain_decoding_in_fewer_steps(ref: Reference, kind: str):
    if kind == "nixl":
        pytest.importorskip("nixl")
    with RowRig(ref, kind, chunk=40, drafts=5) as rig:
        lengths = (1, 16, 17, 50)
        answers = rig.assert_equal([prompt_of(n, 100 + n) for n in lengths], 20, share=0.8)
        assert [a.moved.pages for a in answers] == [ref.layout.moved_pages(n) for n in lengths]
        stats = rig.gen.node.loop_stats
        assert stats.drafts_accepted > 2 * len(lengths), "the stages' windows came along, and know what follows"
        assert stats.drafts_accepted < stats.drafts_verified, "and not always"
        metrics = rig.gen.node.metrics
        rig.quiet()
        assert metrics.value("tailrace_draft_tokens_total", result="accepted") == stats.drafts_accepted
        assert metrics.value("tailrace_draft_tokens_total", result="proposed") == stats.drafts_verified


def test_seeded_answers_are_the_same_draws(ref: Reference):
    params = SamplingParams(max_tokens=20, temperature=0.6, seed=5, ignore_eos=True)
    prompts = [prompt_of(n, 7 * n) for n in (20, 45)]
    with RowRig(ref, drafts=4) as rig:
        expected = ref.generate(prompts, params)
        answers = rig.ask(prompts, params)
        assert [a.samples[0] for a in answers] == [e.samples[0].ids for e in expected]
        assert rig.gen.node.loop_stats.drafts_verified > 0
        rig.quiet()


def test_a_local_prefill_and_a_prefix_hit_have_the_stages_windows_too(ref: Reference):
    with RowRig(ref, chunk=32, drafts=5) as rig:
        prompt = prompt_of(61, 5)
        for leg in ("local", "prefill", "prefill"):
            before = rig.gen.node.loop_stats.drafts_accepted
            rig.assert_equal([prompt], 14, leg=leg, share=0.8)
            assert rig.gen.node.loop_stats.drafts_accepted > before, leg
        rig.quiet()


def test_a_replay_makes_the_stages_windows_too(ref: Reference):
    policy = ReplayPolicy(20, 20)
    with RowRig(ref, chunk=40, drafts=5, replay=policy) as rig:
        prompts = [prompt_of(n, 11 * n) for n in (9, 37, 50)]
        answers = rig.ask(prompts, greedy(14))
        comparison = Comparison()
        for prompt, answer in zip(prompts, answers, strict=True):
            comparison.add(one_process(ref, prompt, policy, 14), answer.samples[0])
        comparison.check(0.8)
        assert rig.gen.node.loop_stats.drafts_accepted > 2 * len(prompts)
        rig.quiet()


def test_what_guesses_cannot_serve_is_decoded_without_them_and_counted_by_name(ref: Reference):
    prompt = prompt_of(30, 9)
    with RowRig(ref, drafts=4) as rig:
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, repetition_penalty=1.3)
        (expected,), (answer,) = ref.generate([prompt], params), rig.ask([prompt], params)
        assert answer.samples[0] == expected.samples[0].ids
        rig.assert_equal([prompt], 2, share=0.5)
        stats = rig.gen.node.loop_stats
        assert (stats.undrafted, stats.drafts_verified) == ({"penalties": 1, "max_tokens": 1}, 0)
        rig.quiet()
