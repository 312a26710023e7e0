"""The shadow check: one hand-off in N is computed again, and a difference is found, told and given to nobody."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from checkpoints import write_tiny_checkpoint
from gen_fakes import Gen
from loop_fakes import prompt_of

from tailrace.engine.engine import Engine
from tailrace.engine.step import Row, StepPlan
from tailrace.gen_worker.shadow import FLOAT32_BOUND, PATIENCE_PASSES, ShadowConfig
from tailrace.kv_cache.layout import single_layout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights

EVERY = ShadowConfig(every=1)


def results(gen: Gen) -> tuple[int, int, int]:
    stats = gen.node.loop_stats
    return stats.shadow_equal, stats.shadow_different, stats.shadow_skipped


def spoil(gen: Gen, key: tuple[str, int], ordinal: int) -> None:
    """Other state in one page of a hand-off that has just been put into the node's events."""
    page = next(e for e in gen.node.events if getattr(e, "key", None) == key).pages[ordinal]
    gen.engine.memory[page, 1] = 77


def test_one_hand_off_in_three_is_checked_and_right_ones_go_on_undisturbed():
    gen = Gen(shadow=ShadowConfig(every=3))
    keys = [gen.admit(f"r{n}", prompt_of(12 + n, n), max_tokens=6) for n in range(7)]
    gen.drain()
    assert results(gen) == (2, 0, 0)
    for key in keys:
        gen.assert_equals_undisturbed(key)
    gen.assert_quiet()


def test_a_page_that_differs_ends_its_request_as_corrupt_and_is_found_by_nobody(caplog):
    gen = Gen(shadow=EVERY)
    prompt = prompt_of(15, 1)
    key = gen.admit("r", prompt, max_tokens=40)
    other = gen.admit("s", prompt_of(9, 2), max_tokens=40)
    spoil(gen, key, 2)  # tokens 8..11: the last full block
    with caplog.at_level(logging.ERROR):
        gen.drain()
    assert gen.node.fails[key][0] == "corrupt" and gen.node.fails[key][2]
    assert len(gen.node.output(key)) <= PATIENCE_PASSES
    gen.assert_equals_undisturbed(other)
    assert results(gen) == (1, 1, 0)
    (record,) = [r for r in caplog.records if r.message == "shadow_check_differs"]
    assert record.fields["request"] == "r" and record.fields["first_token"] == 8
    hit = gen.kv.match_prefix(gen.handoffs[key].namespace, gen.handoffs[key].hashes, 15, whole=True)
    assert hit.pages == []
    gen.assert_quiet()


def test_by_policy_fail_the_attempt_is_not_to_be_made_again():
    gen = Gen(shadow=ShadowConfig(every=1, retry=False))
    key = gen.admit("r", prompt_of(8, 1), max_tokens=40)
    spoil(gen, key, 1)
    gen.drain()
    assert gen.node.fails[key][0] == "corrupt" and not gen.node.fails[key][2]


def test_a_request_that_has_ended_meanwhile_is_only_counted():
    gen = Gen(shadow=EVERY)
    key = gen.admit("r", prompt_of(8, 1), max_tokens=2)
    spoil(gen, key, 1)
    gen.drain()
    assert key in gen.node.ends and results(gen) == (0, 1, 0)
    gen.assert_quiet()


def test_no_pass_that_decodes_carries_the_check_and_it_waits_only_a_few_passes():
    gen = Gen(shadow=EVERY)
    gen.admit("r", prompt_of(8, 1), max_tokens=20)
    gen.drain()
    sizes = [[len(row.ids) for row in plan.rows] for plan in gen.engine.steps]
    assert [4] in sizes and sizes.index([4]) == PATIENCE_PASSES
    assert all(size in ([1], [4]) for size in sizes)


@pytest.mark.parametrize(
    ("length", "options"),
    [(3, {}), (12, {"tail": 3}), (12, {"window": 4})],
    ids=["shorter than a block", "its ids are not in the tail", "the state before it is gone"],
)
def test_what_cannot_be_checked_is_skipped_and_counted(length, options):
    window = options.pop("window", None)
    gen = Gen(shadow=EVERY, window=window)
    key = gen.admit("r", prompt_of(length, 1), **options)
    gen.drain()
    assert results(gen) == (0, 0, 1)
    gen.assert_equals_undisturbed(key)


def test_the_tail_may_begin_where_the_block_begins():
    gen = Gen(shadow=EVERY)
    gen.admit("r", prompt_of(14, 1), tail=6)
    gen.drain()
    assert results(gen) == (1, 0, 0)


def test_a_check_gives_its_pages_back_when_the_loop_needs_them():
    """Nine pages: two prompts of four, which both need a fifth; one that waits for its check holds its own."""
    gen = Gen(9, shadow=EVERY, prefill=True)
    keys = [gen.admit(f"r{n}", prompt_of(15, n), max_tokens=10) for n in range(2)]
    gen.drain()
    for key in keys:
        gen.assert_equals_undisturbed(key)
    assert sum(results(gen)) == 2
    gen.assert_quiet()


@pytest.mark.parametrize("page", [8, 32, 128])
def test_the_real_engine_finds_one_flipped_element_and_no_fault_in_right_pages(tmp_path, page):
    """Blocks of 64 tokens in pages of 8, 32 and 128; the prompt was computed in other chunks than the check's."""
    source = open_source(str(write_tiny_checkpoint(tmp_path, "llama")))
    layout = single_layout(state_groups(source.config), page, "float32")
    count = -(-150 // page)
    kv = torch.zeros(3 * count + 1, *layout.shape)
    engine = Engine(Decoder(load_weights(source, dtype=torch.float32, quantized=False)), kv)
    ids = np.random.default_rng(0).integers(3, 90, 150).astype(np.int32)
    received, fresh = np.arange(1, count + 1, dtype=np.int32), list(range(count + 1, 2 * count + 1))
    for low in range(0, 150, 50):
        engine.step(StepPlan([Row("r", ids[low : low + 50], low, received)]))

    def check() -> tuple[float, float]:
        first = 64 // page
        table = np.array([*received[:first], *fresh[first:]], np.int32)
        if 64 % page:
            engine.copy_pages([int(received[first])], [fresh[first]])
        engine.step(StepPlan([Row("shadow", ids[64:128], 64, table)]))
        last = -(-128 // page)
        return engine.compare_rows(
            received[first:last].tolist(), fresh[first:last], range(64 - first * page, 128 - first * page)
        )

    assert check()[0] <= FLOAT32_BOUND
    for token in (70, 3):  # in the block, and long before it: there only what follows from it differs
        row = kv[int(received[token // page]), 0, 1, 0, token % page]
        kept = row[0].item()
        row[0] = kept + 2.0
        assert check()[0] > FLOAT32_BOUND
        row[0] = torch.nan
        assert check() == (float("inf"), float("inf"))
        row[0] = kept
    assert check()[0] <= FLOAT32_BOUND
