"""The sampler against plain definitions of what each parameter means."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.engine.philox import uniforms
from tailrace.engine.sampler import NO_TOKEN, Sampler, adjusted, best_ids, logprobs_of, margin
from tailrace.engine.step import SamplerState
from tailrace.model.sampling_params import SamplingParams

VOCAB = 1000
EOS = frozenset({2})


def state_of(*, sample=0, prompt=(), output=(), **params) -> SamplerState:
    made = SamplingParams(**{"max_tokens": 100, **params})
    counts: dict[int, int] = {}
    for token in prompt:
        counts[token] = counts.get(token, 0) + 1
    state = SamplerState(made, sample, len(prompt), EOS, counts if made.needs_counts else {})
    for token in output:
        state.observe(token)
    return state


def random_logits(n: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((n, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def draw(row: torch.Tensor, state: SamplerState, position: int = 7) -> int:
    return Sampler().sample(row[None], [state], [position])[0][0]


def reference_probabilities(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Straight from the definitions, in float64, over the full vocabulary."""
    scores = row.astype(np.float64) / params.temperature
    order = sorted(range(len(row)), key=lambda t: (-row[t], t))
    kept = set(order[: params.top_k] if params.top_k else order)
    p = np.array([math.exp(scores[t] - scores.max()) if t in kept else 0.0 for t in range(len(row))])
    if params.top_p < 1.0:
        total, running, nucleus = p.sum(), 0.0, set()
        for token in order:
            nucleus.add(token)
            running += p[token] / total
            if running >= params.top_p:
                break
        p[[t for t in range(len(row)) if t not in nucleus]] = 0.0
    if params.min_p:
        p[p < params.min_p * p.max()] = 0.0
    return p / p.sum()


# -------------------------------------------------------------------------------------------------------------- greedy


def test_greedy_takes_the_lowest_id_of_equal_logits():
    logits = torch.zeros(3, VOCAB)
    logits[0, [40, 7, 900]] = 5.0
    logits[2, -1] = 1.0
    states = [state_of(temperature=0.0) for _ in range(3)]
    assert [t for t, _ in Sampler().sample(logits, states, [1, 2, 3])] == [7, 0, VOCAB - 1]


def test_filters_do_not_change_a_greedy_choice():
    row = random_logits(1)[0]
    state = state_of(temperature=0.0, top_k=1, top_p=0.01, min_p=0.9)
    assert draw(row, state) == int(row.argmax())


def test_a_row_with_nan_gives_no_token_and_its_neighbours_are_untouched():
    logits = random_logits(4)
    logits[1, 500] = math.nan
    logits[2, 500] = math.nan
    states = [state_of(temperature=t) for t in (0.0, 0.0, 1.0, 1.0)]
    tokens = [t for t, _ in Sampler().sample(logits, states, [5] * 4)]
    alone = [draw(logits[i], states[i], 5) for i in (0, 3)]
    assert tokens == [alone[0], NO_TOKEN, NO_TOKEN, alone[1]]


def test_a_row_with_nothing_left_gives_no_token():
    logits = torch.full((2, VOCAB), -math.inf)
    states = [state_of(temperature=0.0), state_of(temperature=1.0)]
    assert [t for t, _ in Sampler().sample(logits, states, [1, 1])] == [NO_TOKEN, NO_TOKEN]


# ---------------------------------------------------------------------------------------------------------- seeded draw


def test_a_draw_depends_on_seed_sample_and_position_and_on_no_batch_mate():
    logits = random_logits(1, scale=1.0).repeat(6, 1)
    states = [state_of(seed=s, sample=i) for s, i in ((1, 0), (1, 1), (2, 0), (1, 0), (1, 0), (9, 9))]
    positions = [10, 10, 10, 11, 10, 10]
    together = [t for t, _ in Sampler().sample(logits, states, positions)]
    alone = [draw(logits[i], states[i], positions[i]) for i in range(6)]
    assert together == alone
    assert together[0] == together[4]
    assert len(set(together)) > 2


def test_the_drawn_token_is_the_inverse_of_the_cumulative_distribution_in_id_order():
    row = random_logits(1, scale=1.0)[0]
    p = reference_probabilities(row.numpy(), SamplingParams(max_tokens=1))
    cumulative = np.cumsum(p)
    for position in range(300):
        u = uniforms([5], [position], [0])[0]
        assert draw(row, state_of(seed=5), position) == int(np.searchsorted(cumulative, u, side="right"))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.99},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    ],
)
def test_frequencies_follow_the_definition_of_each_filter(params):
    row = random_logits(1, vocab=40, scale=1.5)[0]
    n = 6000
    expected = reference_probabilities(row.numpy(), SamplingParams(max_tokens=1, **params))
    tokens = [t for t, _ in Sampler().sample(row.expand(n, -1), [state_of(seed=11, **params)] * n, list(range(n)))]
    seen = np.bincount(tokens, minlength=40) / n
    assert (seen[expected == 0.0] == 0.0).all()
    assert np.abs(seen - expected).max() < 5 * 0.5 / n**0.5


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab=st.sampled_from([3, 64, 257, 5000]),
    scale=st.sampled_from([0.05, 1.0, 6.0]),
    coarse=st.booleans(),
    top_k=st.sampled_from([0, 1, 2, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.3, 1e-9]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
def test_a_draw_equals_the_plain_definition(seed, vocab, scale, coarse, top_k, top_p, min_p, temperature):
    row = random_logits(1, vocab, seed, scale)[0]
    if coarse:
        row = (row * 2).round() / 2  # many exact ties
    state = state_of(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    if not margin(row, state, 3).clear:
        return
    cumulative = np.cumsum(reference_probabilities(row.numpy(), state.params))
    u = uniforms([seed], [3], [0])[0]
    assert draw(row, state, 3) == int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def test_a_tiny_temperature_is_greedy():
    row = random_logits(1)[0]
    assert draw(row, state_of(temperature=1e-30)) == int(row.argmax())


# ----------------------------------------------------------------------------------------------------- changed logits


def test_repetition_penalty_counts_prompt_and_output_once_each():
    row = np.array([2.0, -2.0, 1.0, 3.0], np.float32)
    state = state_of(prompt=(0, 0, 1), output=(2,), repetition_penalty=2.0)
    assert adjusted(row, state).tolist() == [1.0, -4.0, 0.5, 3.0]


def test_presence_and_frequency_count_output_only():
    row = np.zeros(4, np.float32)
    state = state_of(prompt=(0, 0, 1), output=(2, 2, 3), presence_penalty=0.5, frequency_penalty=0.25)
    assert adjusted(row, state).tolist() == [0.0, 0.0, -1.0, -0.75]


def test_bias_comes_after_penalties():
    row = np.array([4.0, 0.0], np.float32)
    state = state_of(output=(0,), repetition_penalty=2.0, logit_bias=((0, 1.0),))
    assert adjusted(row, state).tolist() == [3.0, 0.0]


def test_end_tokens_cannot_be_drawn_before_min_tokens():
    row = torch.zeros(10)
    row[[2, 5]] = 50.0
    row[8] = 1.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (5,)}
    assert draw(row, state_of(output=(1,), **params)) == 8
    assert draw(row, state_of(output=(1, 1), **params)) == 2
    assert draw(row, state_of(output=(1,), **{**params, "temperature": 1.0})) not in (2, 5)


def test_bias_survives_the_mask_of_min_tokens():
    row = torch.zeros(10)
    assert draw(row, state_of(temperature=0.0, min_tokens=3, logit_bias=((2, 100.0), (4, 1.0)))) == 4


def test_sampling_leaves_logits_and_state_alone():
    logits = random_logits(2)
    before = logits.clone()
    state = state_of(output=(3,), presence_penalty=1.0, logit_bias=((1, 5.0),), min_tokens=9, logprobs=3)
    Sampler().sample(logits, [state, state_of()], [4, 4])
    assert torch.equal(before, logits)
    assert state.num_output_tokens == 1 and state.output_counts == {3: 1}


# ------------------------------------------------------------------------------------------------------------- logprobs


def test_logprobs_are_those_of_the_model_whatever_chose_the_token():
    row = random_logits(1)[0]
    expected = torch.log_softmax(row.double(), 0)
    state = state_of(temperature=3.0, top_k=4, presence_penalty=1.0, output=(1,), logit_bias=((6, 100.0),), logprobs=5)
    token, logprob = Sampler().sample(row[None], [state], [3])[0]
    assert token == 6
    assert logprob is not None and logprob.token == 6
    assert logprob.logprob == pytest.approx(float(expected[6]), abs=1e-6)
    order = sorted(range(VOCAB), key=lambda t: (-float(row[t]), t))[:5]
    assert [t for t, _ in logprob.top] == order
    assert [v for _, v in logprob.top] == pytest.approx([float(expected[t]) for t in order], abs=1e-6)


def test_top_logprobs_of_equal_logits_come_by_rising_id():
    row = torch.zeros(VOCAB)
    row[[700, 30, 400]] = 1.0
    _, logprob = Sampler().sample(row[None], [state_of(temperature=0.0, logprobs=5)], [1])[0]
    assert logprob is not None and [t for t, _ in logprob.top] == [30, 400, 700, 0, 1]


def test_logprobs_none_gives_none_and_zero_gives_the_token_alone():
    row = random_logits(1)
    assert Sampler().sample(row, [state_of(temperature=0.0)], [1])[0][1] is None
    _, logprob = Sampler().sample(row, [state_of(temperature=0.0, logprobs=0)], [1])[0]
    assert logprob is not None and logprob.top == ()


def test_logprobs_of_known_tokens_are_those_of_their_rows():
    logits = random_logits(3)
    found = logprobs_of(logits, [5, 6, 7], 2)
    expected = torch.log_softmax(logits.double(), 1)
    assert [p.token for p in found] == [5, 6, 7]
    assert [p.logprob for p in found] == pytest.approx([float(expected[i, 5 + i]) for i in range(3)], abs=1e-6)
    assert all(len(p.top) == 2 for p in found)


# -------------------------------------------------------------------------------------------------- best few, margin


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 0.5, 2.0]), min_size=1, max_size=400),
    k=st.integers(1, 420),
)
def test_the_best_few_come_by_falling_score_then_rising_id(values, k):
    row = np.array(values, np.float32)
    expected = sorted(range(len(row)), key=lambda t: (-row[t], t))[:k]
    assert best_ids(row, min(k, len(row))).tolist() == expected


def test_the_best_few_of_a_long_row_are_exact():
    row = random_logits(1, vocab=49_153)[0].numpy()
    assert best_ids(row, 20).tolist() == np.argsort(-row, kind="stable")[:20].tolist()


def test_a_greedy_margin_is_the_gap_between_the_best_two():
    row = torch.zeros(VOCAB)
    row[3], row[9] = 2.0, 1.9995
    found = margin(row, state_of(temperature=0.0), 1)
    assert found.greedy and found.distance == pytest.approx(0.0005, abs=1e-6) and not found.clear


def test_noise_flips_a_seeded_draw_only_where_the_margin_is_small():
    generator = torch.Generator().manual_seed(3)
    flips = clear = 0
    for position in range(1500):
        row = random_logits(1, vocab=500, seed=position, scale=2.0)[0]
        state = state_of(seed=1, top_k=50, top_p=0.95)
        noisy = row + torch.randn(500, generator=generator) * 1e-6
        flipped = draw(row, state, position) != draw(noisy, state, position)
        flips += flipped
        if margin(row, state, position).clear:
            clear += 1
            assert not flipped
    assert flips < 5
    assert clear > 0.97 * 1500


def test_a_draw_at_a_boundary_is_not_clear():
    u = uniforms([4], [2], [0])[0]
    row = torch.tensor([math.log(u), math.log(1.0 - u)])
    assert margin(row, state_of(seed=4), 2).distance < 1e-6


def test_a_token_at_the_edge_of_top_p_is_not_clear():
    row = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    near = [margin(row, state_of(seed=4, top_p=0.8), p).clear for p in range(200)]
    assert sum(near) < 200 * 0.8  # the nucleus may end before or after the second token, which moves the boundary
