"""How many guesses are verified: what pays, by chance and by what a step takes; and what a step takes, measured."""

from __future__ import annotations

import itertools
from itertools import accumulate
from operator import mul

import numpy as np
import pytest

from tailrace.engine.sequence import Chunk, Sequence, sampler_states
from tailrace.gen_worker.drafting import Drafting, StepCost, count_unfit, unfit_reason, verification_lengths
from tailrace.model.sampling_params import SamplingParams

BUDGET = 100


def test_verification_takes_what_pays():
    """Against every choice of lengths."""
    rng = np.random.default_rng(1)
    for _ in range(30):
        survival = [list(accumulate(row, mul)) for row in rng.random((3, 4)).tolist()]
        slope, known = float(rng.random()) * 0.3, int(rng.integers(3, 9))

        def speed(tokens: int, slope: float = slope) -> float:
            return 1 / (1 + slope * tokens)

        def value(lengths: tuple[int, ...], survival=survival, speed=speed, known=known) -> float:
            expected = 3 + sum(sum(row[:n]) for row, n in zip(survival, lengths, strict=True))
            return expected * speed(known + sum(lengths))

        best = max(map(value, itertools.product(range(5), repeat=3)))
        assert value(tuple(verification_lengths(survival, known, speed, BUDGET))) == pytest.approx(best)


def test_a_budget_takes_the_likeliest_and_ties_go_to_the_earlier_guess_then_the_earlier_row():
    def flat(tokens: int) -> float:
        return 1.0

    assert verification_lengths([[1.0, 1.0], [0.0, 0.0]], 2, flat, BUDGET) == [2, 0], "what is never right never pays"
    assert verification_lengths([[0.9, 0.1], [0.8, 0.7]], 2, flat, 3) == [1, 2]
    assert verification_lengths([[0.5, 0.5], [0.5, 0.5]], 2, flat, 1) == [1, 0]
    assert verification_lengths([[0.5, 0.5], [0.5, 0.5]], 2, flat, 2) == [1, 1]
    assert verification_lengths([[0.9], []], 2, flat, 0) == [0, 0]
    assert verification_lengths([], 0, flat, BUDGET) == []
    assert verification_lengths([[0.9]], 1, lambda tokens: 1.0 / tokens, BUDGET) == [0], "twice the step, 1.9 tokens"


def test_the_cost_of_a_step_is_a_line_over_its_tokens():
    cost = StepCost()
    assert cost.line() is None
    for _ in range(5):
        cost.measure(8, 0.5)
    assert cost.line() is None, "one size says nothing of the others"
    for tokens in (1, 4, 16, 8, 2) * 20:
        cost.measure(tokens, 0.25 + 0.03 * tokens)
    assert cost.line() == pytest.approx((0.25, 0.03), rel=1e-3)
    for tokens in (1, 4, 16, 8, 2) * 60:  # the machine is slower now
        cost.measure(tokens, 0.5 + 0.06 * tokens)
    assert cost.line() == pytest.approx((0.5, 0.06), rel=1e-3)


def test_no_step_is_taken_to_cost_less_than_nothing():
    falling, through_nought = StepCost(), StepCost()
    for tokens in (1, 10) * 20:
        falling.measure(tokens, 1.0 / tokens)
        through_nought.measure(tokens, 0.1 * tokens - 0.05)
    base, slope = falling.line() or (0.0, 1.0)
    assert slope == 0.0 and base > 0
    base, slope = through_nought.line() or (1.0, 0.0)
    assert base == pytest.approx(0.0) and slope > 0
    still = StepCost()
    for tokens in (1, 10) * 20:
        still.measure(tokens, 0.0)
    assert still.line() is None, "a clock that stands says nothing"


def sequence(chances: list[float], **params: int) -> Sequence:
    wanted = SamplingParams(**({"max_tokens": 20} | params))
    states = sampler_states(wanted, [0], 3, frozenset(), {}, [7])
    made = Sequence(("r", 0), 0, 0.0, 3, np.arange(3, dtype=np.int32), states, output=[7])
    made.drafts, made.chances = list(range(len(chances))), chances
    return made


def planned(
    drafting: Drafting, *sequences: Sequence, budget: int = BUDGET, room: int = BUDGET
) -> list[tuple[int, int]]:
    chunks = drafting.plan([Chunk(s, 1) for s in sequences], lambda _, count: min(count, room), budget)
    return [(chunk.num_drafts, chunk.want_drafts) for chunk in chunks]


def test_a_plan_verifies_by_confidence_and_asks_for_as_many_as_may_become_tokens():
    drafting = Drafting(4)
    sure, unsure = sequence([0.9, 0.9, 0.9, 0.9, 0.9]), sequence([0.2, 0.9])
    assert planned(drafting, sure, unsure) == [(4, 4), (2, 4)], "nothing is measured: every guess pays"
    for tokens in (1, 2, 5, 9) * 10:
        drafting.measure(tokens, 0.1 + 0.06 * tokens)
    assert planned(drafting, sure, unsure) == [(3, 4), (0, 4)], "4.4 tokens in 0.40 s, 5.1 would take 0.46"
    assert planned(drafting, sure, budget=3) == [(3, 4)] and planned(drafting, sure, room=2) == [(2, 4)]
    assert planned(drafting, sequence([0.9] * 4, max_tokens=4)) == [(2, 1)], "one is there, one is drawn at the end"


def test_what_guesses_cannot_serve_asks_for_none_and_is_counted_by_its_name():
    counts: dict[str, int] = {}
    for params, reason in (
        ({"repetition_penalty": 1.2}, "penalties"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"grammar": "root ::= [a-z]"}, "grammar"),
        ({"max_tokens": 2}, "max_tokens"),
        ({}, None),
    ):
        wanted = SamplingParams(**({"max_tokens": 20} | params))
        assert unfit_reason(wanted) == reason
        one = Sequence(("r", 0), 0, 0.0, 3, None, sampler_states(wanted, [0], 3, frozenset(), {}, []))
        count_unfit([one], counts)
        if reason not in (None, "grammar"):
            assert planned(Drafting(4), sequence([], **params)) == [(0, 0)]
    assert counts == {"penalties": 2, "grammar": 1, "max_tokens": 1}
