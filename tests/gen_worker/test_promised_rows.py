"""What is being prefilled at gen has its rows of the batch already: no more is let in than can decode at once."""

from __future__ import annotations

import pytest
from gen_fakes import Gen
from loop_fakes import prompt_of

ROWS = 3


def rows_taken(gen: Gen) -> int:
    assert gen.prefill is not None
    return len(gen.scheduler.running) + sum(len(s.samplers) for s in gen.prefill if s.pages)


def most_taken(gen: Gen) -> int:
    """Runs the loop to its end; the most rows that were decoding, or sure to, behind any pass."""
    most = 0
    for _ in range(400):
        if not gen.loop.run_pass() and not gen.node.events:
            break
        most = max(most, rows_taken(gen))
    return most


@pytest.mark.parametrize("samples", [1, 2])
def test_replays_that_have_not_ended_count(samples: int):
    gen = Gen(num_pages=300, batch=ROWS, admissions=8, budget=8, replay=12)
    prompts = [prompt_of(20, i) for i in range(6)]
    keys = [gen.admit(f"r{i}", p, max_tokens=9, left_to_gen=12, samples=samples) for i, p in enumerate(prompts)]
    assert most_taken(gen) == ROWS // samples * samples
    for key, prompt in zip(keys, prompts, strict=True):
        for sample in range(samples):
            gen.assert_local_equals_undisturbed(key, prompt, sample, max_tokens=9)
    gen.assert_quiet()


def test_local_prompts_that_have_not_ended_count():
    gen = Gen(num_pages=300, batch=ROWS, budget=8)
    prompts = [prompt_of(20, i) for i in range(6)]
    keys = [gen.local(f"r{i}", prompt, max_tokens=9) for i, prompt in enumerate(prompts)]
    assert most_taken(gen) == ROWS
    for key, prompt in zip(keys, prompts, strict=True):
        gen.assert_local_equals_undisturbed(key, prompt, max_tokens=9)
    gen.assert_quiet()


def test_a_hand_off_waits_for_the_row_of_a_local_prompt_and_the_other_way_round():
    gen = Gen(num_pages=300, batch=1, budget=8, replay=12)
    local = gen.local("local", prompt_of(20, 1), max_tokens=5)
    gen.loop.run_pass()
    handed = gen.admit("handed", prompt_of(20, 2), max_tokens=5)
    replay = gen.admit("replay", prompt_of(20, 3), max_tokens=5, left_to_gen=12)
    assert most_taken(gen) == 1
    assert list(gen.node.ends) == [local, handed, replay] and set(gen.node.ends.values()) == {"finished"}
    gen.assert_quiet()


def test_what_has_more_samples_than_the_batch_has_rows_is_let_in_alone():
    gen = Gen(num_pages=300, batch=2, admissions=8, budget=8, replay=12)
    for i in range(3):
        gen.admit(f"r{i}", prompt_of(20, i), max_tokens=5, left_to_gen=12, samples=4)
    assert most_taken(gen) == 4
    assert set(gen.node.ends.values()) == {"finished"} and len(gen.node.ends) == 3
    gen.assert_quiet()
