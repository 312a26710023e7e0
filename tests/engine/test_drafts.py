"""Decoding with drafts says what plain decoding says: every family, whatever was guessed, on the loop and the engine.

The drafts come from a list of what is right (draft_rig.py), spoiled by a pattern: all right, all wrong, only the first,
or right up to a random place. References are plain decoding on the same engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from draft_rig import DraftRig, Side, make_side
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mla_checkpoints import write_tiny_mla
from oracle import Comparison, greedy, same_logprobs

from tailrace.engine.drafts import Guess
from tailrace.engine.sequence import Sequence
from tailrace.engine.step import StepPlan
from tailrace.model import mla_decoder
from tailrace.model.decoder import Decoder
from tailrace.model.draft_rows import num_accepted
from tailrace.model.hf_directory import read_json, stored_tensors
from tailrace.model.mla_config import parse_config
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights
from tests.model.csa2_models import ENGRAM, make_decoder
from tests.model.csa_models import tiny_v4

NEW = 66
PAGES = {"llama": 8, "mistral": 8, "deepseek_v3": 8, "deepseek_v32": 8, "deepseek_v4": 32, "deepseek_v41": 16}
FAMILIES = tuple(PAGES)


@pytest.fixture(scope="module")
def sides(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Side]:
    made: dict[str, Side] = {}

    def decoder(family: str) -> Any:
        if family in ("llama", "mistral"):
            return Decoder(load_weights(open_source(str(tiny(family))), dtype=torch.float32))
        if family == "deepseek_v4":
            return tiny_v4("WCHC")[1]
        if family == "deepseek_v41":
            return make_decoder(ENGRAM)
        directory = write_tiny_mla(tmp_path_factory.mktemp(family), family)
        config = parse_config(read_json(directory / "config.json", required=True), "config.json")
        return mla_decoder.load(stored_tensors(directory), config, torch.float32, 8)

    def get(family: str) -> Side:
        if family not in made:
            made[family] = make_side(decoder(family), PAGES[family])
        return made[family]

    return get


def prompts_for(side: Side, *lengths: int) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(4, side.vocab_size) for _ in range(n)] for n in lengths]


def check_equal(
    side: Side, pattern: str, lengths: tuple[int, ...], params: SamplingParams, plain=None, **how: Any
) -> DraftRig:
    """Several requests together, with drafts, against plain decoding."""
    prompts = prompts_for(side, *lengths)
    expected = side.generate(prompts, params) if plain is None else plain
    rig = DraftRig(side, pattern, **how)
    keys = [
        rig.ask(str(i), prompt, params, [result.ids])
        for i, (prompt, result) in enumerate(zip(prompts, expected, strict=True))
    ]
    rig.drain()
    comparison = Comparison()
    for key, result in zip(keys, expected, strict=True):
        found = [p.top for delta in rig.node.deltas(key) for p in delta.logprobs]
        if params.greedy:
            comparison.add(result.samples[0].logprobs, rig.output(key), found)
            same_logprobs(result.samples[0].logprobs[0].top, found[0])
        else:
            assert rig.output(key) == result.ids
    if params.greedy:
        comparison.check(0.5)
    return rig


@pytest.mark.parametrize("family", [*FAMILIES[:-1], pytest.param("deepseek_v41", marks=pytest.mark.soak)])
def test_greedy_output_is_that_of_plain_decoding(sides, family):
    side, lengths = sides(family), (7, 21)
    plain = side.generate(prompts_for(side, *lengths), greedy(NEW))
    for pattern in ("right", "partly"):
        rig = check_equal(side, pattern, lengths, greedy(NEW), plain)
        stats = rig.node.loop_stats
        assert stats.drafts_accepted > 0
        if pattern == "right":
            assert stats.drafts_accepted == stats.drafts_verified
            assert rig.decode_steps <= NEW // 5 + 2  # four guesses a step, and a word of its own
        else:
            assert stats.drafts_accepted < stats.drafts_verified


@pytest.mark.parametrize("pattern", ["wrong", "first"])
def test_wrong_guesses_cost_steps_and_no_token(sides, pattern):
    rig = check_equal(sides("mistral"), pattern, (13,), greedy(NEW))
    assert rig.decode_steps >= NEW // 2 - 1


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v41", marks=pytest.mark.soak)])
def test_seeded_output_is_that_of_plain_decoding(sides, family):
    params = SamplingParams(max_tokens=NEW, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    rig = check_equal(sides(family), "partly", (9,), params)
    assert rig.node.loop_stats.drafts_accepted > 0


def test_samples_of_one_request_go_their_own_ways(sides):
    side = sides("deepseek_v32")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    (prompt,) = prompts_for(side, 19)
    (expected,) = side.generate([prompt], params, samples=2)
    rig = DraftRig(side, "partly")
    key = rig.ask("two", prompt, params, [sample.ids for sample in expected.samples])
    rig.drain()
    outputs = [rig.output(key, sample) for sample in range(2)]
    assert outputs == [sample.ids for sample in expected.samples] and outputs[0] != outputs[1]


def test_a_sample_ends_in_the_middle_of_right_guesses(sides):
    """By a stop id at each place of a step's tokens, and by max_tokens; nothing behind the end is sent or counted."""
    side = sides("llama")
    (prompt,) = prompts_for(side, 17)
    (plain,) = side.generate([prompt], greedy(24))
    for end in range(1, 12):
        token = plain.ids[end]
        first = plain.ids.index(token)
        for params, length, finish in (
            (greedy(24, stop_token_ids=(token,)), first + 1, "stop"),
            (greedy(end), end, "length"),
        ):
            rig = DraftRig(side, "right")
            key = rig.ask("a", prompt, params, [plain.ids])
            rig.drain()
            assert rig.output(key) == plain.ids[:length]
            assert rig.node.finish(key) == finish and rig.node.ends[key] == "finished"
            assert rig.node.loop_stats.output_tokens == length
            last = rig.node.deltas(key)[-1]
            assert last.stop_id == (token if finish == "stop" else None)
            assert len(last.logprobs) * 4 == len(last.ids)


def test_min_tokens_bars_ends_at_the_very_position(sides):
    side = sides("llama")
    (prompt,) = prompts_for(side, 11)
    (free,) = side.generate([prompt], greedy(30))
    for least in range(3, 16):
        params = greedy(30, min_tokens=least, stop_token_ids=tuple(set(free.ids[2:])))
        (plain,) = side.generate([prompt], params)
        rig = DraftRig(side, "right")
        key = rig.ask("a", prompt, params, [plain.ids])
        rig.drain()
        assert rig.output(key) == plain.ids and plain.ids != free.ids and len(plain.ids) > least
        assert rig.node.loop_stats.drafts_accepted > 0


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v4", marks=pytest.mark.soak)])
def test_giving_way_and_computing_again_changes_nothing(sides, family):
    """Too few pages for all: some lose theirs, drafts and all, between one step and the next."""
    whole = sides(family)
    layout, lengths = whole.kv.layout, (14, 9, 20)
    pages = 1 + sum(map(layout.num_pages, lengths)) + layout.num_pages(lengths[0] + NEW) - layout.num_pages(lengths[0])
    small = make_side(whole.engine._decoder, PAGES[family], pages)
    prompts, params = prompts_for(whole, *lengths), greedy(NEW)
    expected = whole.generate(prompts, params)
    rig = DraftRig(small, "partly", num_drafts=3)
    keys = [rig.ask(str(i), p, params, [r.ids]) for i, (p, r) in enumerate(zip(prompts, expected, strict=True))]
    rig.drain()
    comparison = Comparison()
    for key, result in zip(keys, expected, strict=True):
        comparison.add(result.samples[0].logprobs, rig.output(key))
    comparison.check(0.5)
    assert rig.node.loop_stats.preemptions > 0 and rig.node.loop_stats.drafts_accepted > 0


def test_what_drafts_cannot_serve_is_decoded_plainly_and_counted(sides):
    side = sides("llama")
    (prompt,) = prompts_for(side, 10)
    served = greedy(20, logit_bias=((7, 2.0),))
    unfit = {"penalties": greedy(20, repetition_penalty=1.3), "max_tokens": greedy(2)}
    rig = DraftRig(side, "right")
    keys, expected = {}, {}
    for name, params in {"bias": served, **unfit}.items():
        (expected[name],) = side.generate([prompt], params)
        keys[name] = rig.ask(name, prompt, params, [expected[name].ids])
    rig.drain()
    for name, key in keys.items():
        assert rig.output(key) == expected[name].ids
    assert rig.node.loop_stats.undrafted == {"penalties": 1, "max_tokens": 1}
    drafted = {row.key.key[0] for plan in rig.steps for row in plan.rows if row.num_drafts or row.want_drafts}
    assert drafted == {"bias"}


def test_more_known_tokens_and_guesses_than_a_pass_takes(sides):
    rig = check_equal(sides("llama"), "partly", (8, 12, 5, 9, 30), greedy(20), num_drafts=6, budget=20, batch=8)
    assert rig.scheduler.max_rows == 2
    assert max(sum(len(row.ids) for row in plan.rows) for plan in rig.steps) <= 20


@pytest.mark.soak
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_pattern_of_right_and_wrong(sides, data):
    side = sides("deepseek_v4")
    prompts = prompts_for(side, data.draw(st.integers(1, 40)), data.draw(st.integers(1, 20)))
    rights = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=12))
    drafts = data.draw(st.integers(1, 6))
    expected = side.generate(prompts, greedy(24))
    given_out = iter(rights * 100)
    rig = DraftRig(side, lambda _, count: min(count, next(given_out)), num_drafts=drafts, budget=48)
    keys = [rig.ask(str(i), p, greedy(24), [r.ids]) for i, (p, r) in enumerate(zip(prompts, expected, strict=True))]
    rig.drain()
    for key, result in zip(keys, expected, strict=True):
        comparison = Comparison()
        comparison.add(result.samples[0].logprobs, rig.output(key))


# ------------------------------------------------------------------------------------------------------------- a step


def test_only_right_guesses_count():
    assert num_accepted([], [5]) == 0
    assert num_accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_accepted([1, 9, 3], [1, 2, 3, 4]) == 1
    assert num_accepted([9, 2, 3], [1, 2, 3, 4]) == 0


def test_a_drafter_that_says_what_is_no_word_is_not_believed(sides):
    side = sides("llama")

    class Mad:
        def propose(self, asks):
            return [Guess([1, side.vocab_size], [1.0, 1.0]) for _ in asks]

    side.engine._drafter = Mad()
    prompt = prompts_for(side, 9)[0]
    sequence = Sequence.for_prefill(("a", 0), np.array(prompt, np.int32), [], greedy(8), 1, frozenset())
    sequence.pages = side.kv.allocate(4)
    (result,) = side.engine.step(StepPlan([sequence.row(9, want_drafts=2)]))
    side.engine._drafter = None
    side.kv.release(sequence.pages)
    assert result.error is None and not result.drafts
