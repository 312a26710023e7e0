"""Passes launched before the last one's tokens are known: what stops acts one pass late, and nothing of it is seen."""

from __future__ import annotations

import numpy as np
import pytest
from checkpoints import write_tiny_checkpoint
from device_rig import DEVICES, device_reference
from gen_fakes import Gen
from loop_fakes import EOS, prompt_of

from tailrace.engine.sequence import sampler_states
from tailrace.engine.step import UNKNOWN, Row, StepPlan
from tailrace.gen_worker.run_ahead import draws_alone
from tailrace.model.sampling_params import SamplingParams


def test_tokens_are_those_of_waiting_for_each_pass_and_passes_do_fly():
    gen = Gen(ahead=True)
    keys = [gen.admit(f"r{i}", prompt_of(5 + i, i), max_tokens=6 + i) for i in range(5)]
    gen.drain()
    for key in keys:
        gen.assert_equals_undisturbed(key)
    gen.assert_quiet()
    assert gen.engine.launches >= 8


def test_a_pass_is_launched_before_the_last_ones_tokens_are_fetched():
    gen = Gen(ahead=True)
    gen.admit("a", prompt_of(6, 1), max_tokens=8)
    gen.loop.run_pass()
    assert len(gen.engine.flights) == 1 and not gen.node.passes
    for passes in range(1, 4):
        gen.loop.run_pass()
        assert len(gen.engine.flights) == 1 and len(gen.node.passes) == passes


def test_the_token_behind_a_stop_is_computed_and_never_sent_or_counted():
    gen = Gen(ahead=True)
    gen.engine.forced[10] = EOS
    key = gen.admit("a", prompt_of(6, 1), max_tokens=30)
    other = gen.admit("b", prompt_of(7, 2), max_tokens=9, ignore_eos=True)
    gen.drain()
    gen.assert_equals_undisturbed(key)
    gen.assert_equals_undisturbed(other)
    sent = len(gen.node.output(key)) + len(gen.node.output(other))
    assert gen.node.output(key)[-1] == EOS and gen.node.loop_stats.output_tokens == sent
    computed = sum(len(plan.rows) for plan in gen.engine.steps)
    assert computed == sent + 1, "one row behind the stop"
    gen.assert_quiet()


def test_a_sample_whose_last_token_is_known_to_be_its_last_is_not_launched_again():
    gen = Gen(ahead=True)
    key = gen.admit("a", prompt_of(6, 1), max_tokens=5)
    gen.drain()
    gen.assert_equals_undisturbed(key)
    assert sum(len(plan.rows) for plan in gen.engine.steps) == 4 == len(gen.node.output(key))


def test_pages_of_a_cancelled_row_are_held_until_the_launched_pass_has_landed():
    gen = Gen(ahead=True)
    key = gen.admit("a", prompt_of(6, 1), max_tokens=30)
    other = gen.admit("b", prompt_of(6, 2), max_tokens=30)
    for _ in range(3):
        gen.loop.run_pass()
    pages = set(gen.loop._requests[key].live[0].pages)
    free = gen.kv.counts().free
    gen.cancel(key)
    gen.node.events.append(gen.node.events.pop())
    gen.loop._admit()
    assert gen.node.ends[key] == "cancelled" and gen.kv.counts().free == free and gen.given_up() == pages
    sent = len(gen.node.output(key))
    gen.drain()
    assert len(gen.node.output(key)) == sent
    gen.assert_equals_undisturbed(other)
    gen.assert_quiet()


def test_without_a_page_to_spare_a_pass_waits_for_the_last_one_and_somebody_gives_way():
    gen = Gen(num_pages=5, ahead=True)
    keys = [gen.admit(name, prompt_of(6, i), max_tokens=10) for i, name in enumerate("ab")]
    gen.drain()
    for key in keys:
        gen.assert_equals_undisturbed(key)
    assert gen.node.loop_stats.preemptions > 0
    gen.assert_quiet()


def test_nobody_gives_way_to_a_row_whose_page_was_taken_while_a_pass_flies(monkeypatch):
    """The transfer thread may take the last pages between the look at them and the row's own."""
    gen = Gen(num_pages=10, ahead=True)
    keys = [gen.admit(name, prompt_of(6, i), max_tokens=12) for i, name in enumerate("ab")]
    gen.loop.run_pass()
    lent = gen.kv.allocate(gen.kv.available())
    flying: list[int] = []
    real = gen.loop._preempt
    monkeypatch.setattr(gen.loop, "_preempt", lambda s: flying.append(gen.loop._ahead.flying) or real(s))
    monkeypatch.setattr(gen.kv, "available", lambda: 99)
    for _ in range(6):
        gen.loop.run_pass()
    monkeypatch.undo()
    assert flying and not any(flying)
    gen.kv.release(lent)
    gen.drain()
    for key in keys:
        gen.assert_equals_undisturbed(key)
    gen.assert_quiet()


def test_a_row_that_fails_in_flight_ends_its_request_alone():
    gen = Gen(ahead=True)
    key = gen.admit("a", prompt_of(6, 1), max_tokens=30)
    other = gen.admit("b", prompt_of(6, 2), max_tokens=12)
    for _ in range(3):
        gen.loop.run_pass()
    gen.engine.broken.add(key)
    gen.drain()
    assert gen.node.fails[key][0] == "internal"
    gen.assert_equals_undisturbed(other)
    gen.assert_quiet()


def test_rows_that_the_host_draws_do_not_fly():
    gen = Gen(ahead=True)
    key = gen.admit("a", prompt_of(6, 1), max_tokens=8, logprobs=1)
    gen.drain()
    gen.assert_equals_undisturbed(key)
    assert gen.engine.launches == 0


def test_a_request_that_comes_joins_passes_that_fly_and_a_prompt_lands_them():
    gen = Gen(ahead=True)
    first = gen.admit("a", prompt_of(6, 1), max_tokens=25)
    for _ in range(4):
        gen.loop.run_pass()
    second = gen.admit("b", prompt_of(9, 2), max_tokens=6, samples=2)
    for _ in range(3):
        gen.loop.run_pass()
    assert gen.engine.flights
    prompt = prompt_of(40, 3)
    local = gen.local("c", prompt)
    gen.drain()
    gen.assert_equals_undisturbed(first)
    for sample in (0, 1):
        gen.assert_equals_undisturbed(second, sample)
    gen.assert_local_equals_undisturbed(local, prompt)
    gen.assert_quiet()


@pytest.mark.parametrize(
    ("params", "alone"),
    [
        ({}, True),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, True),
        ({"presence_penalty": 0.1}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"logit_bias": ((1, 2.0),)}, False),
        ({"logprobs": 0}, False),
        ({"grammar": "x"}, False),
        ({"min_tokens": 4}, False),
        ({"min_tokens": 3}, True),
    ],
)
def test_who_can_be_drawn_without_the_host(params, alone):
    assert draws_alone(SamplingParams(max_tokens=9, **params), 3) is alone


@pytest.mark.parametrize("device", DEVICES)
def test_the_device_engine_feeds_its_own_tokens_on(tmp_path, device):
    """Against steps that wait: rows in order, in another order, and a row that has just come."""
    model = write_tiny_checkpoint(tmp_path / "m", "llama")
    ref = device_reference(model, device, num_pages=64, max_batch_size=4, warm=True)

    def row(key: int, ids: list[int], start: int) -> Row:
        states = sampler_states(SamplingParams(max_tokens=9, temperature=0.0), range(1), 9, frozenset(), {}, [])
        return Row(key, np.array(ids, np.int32), start, np.arange(1 + 4 * key, 5 + 4 * key, dtype=np.int32), states)

    known: dict[int, list[int]] = {key: [7 + key, 30, 41] for key in range(3)}
    for key, ids in known.items():
        for _ in range(5):
            ids += ref.engine.step(StepPlan([row(key, ids, 0)]))[0].tokens
    for key, ids in known.items():
        ref.engine.step(StepPlan([row(key, ids[:3], 0)]))
    first = ref.engine.launch(StepPlan([row(key, [known[key][3]], 3) for key in (0, 1)]))
    second = ref.engine.launch(StepPlan([row(key, [UNKNOWN], 4) for key in (0, 1)]))
    assert [r.tokens[0] for r in ref.engine.collect(first)] == [known[key][4] for key in (0, 1)]
    third = ref.engine.launch(StepPlan([row(2, [known[2][3]], 3), row(1, [UNKNOWN], 5), row(0, [UNKNOWN], 5)]))
    assert [r.tokens[0] for r in ref.engine.collect(second)] == [known[key][5] for key in (0, 1)]
    assert [r.tokens[0] for r in ref.engine.collect(third)] == [known[2][4], known[1][6], known[0][6]]
