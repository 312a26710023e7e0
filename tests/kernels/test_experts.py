"""Mixtures of experts: choice, weights and what the chosen give."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tailrace.kernels.experts import grouped_swiglu, hash_routing, sqrt_softplus, swiglu, top_k_routing


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_bias_chooses_and_does_not_weigh():
    scores = sqrt_softplus(random(20, 8))
    torch.testing.assert_close(scores, torch.log1p(random(20, 8).exp()).sqrt(), rtol=1e-5, atol=1e-6)
    bias = random(8, seed=1)
    chosen, weights = top_k_routing(scores, 3, 1.5, bias)
    for row in range(20):
        expected = sorted(range(8), key=lambda e: -float((scores + bias)[row, e]))[:3]
        assert chosen[row].tolist() == expected
        own = scores[row, expected]
        torch.testing.assert_close(weights[row], own / own.sum() * 1.5)
    assert (top_k_routing(scores, 3, 1.5)[0] != chosen).any()
    assert torch.equal(top_k_routing(scores, 3, 2.0, bias, normalise=False)[1], scores.gather(1, chosen) * 2)


def test_of_equal_experts_the_lower_number_is_chosen():
    assert top_k_routing(torch.ones(2, 300), 4, 1.0)[0].tolist() == [[0, 1, 2, 3]] * 2


def test_groups_are_chosen_by_the_sum_of_their_best_two():
    scores = torch.tensor([[0.9, 0.0, 0.1, 0.5, 0.55, 0.0, 0.3, 0.3, 0.3]])
    chosen, _ = top_k_routing(scores, 3, 1.0, groups=3, top_groups=2)
    assert chosen.tolist() == [[0, 4, 3]], "group sums are 1.0, 1.05, 0.6"
    assert top_k_routing(scores, 3, 1.0, groups=3, top_groups=1)[0].tolist() == [[4, 3, 5]]
    with pytest.raises(ValueError, match="4 of 9 experts from 1 of 3 groups"):
        top_k_routing(scores, 4, 1.0, groups=3)


def test_a_row_whose_scores_are_not_numbers_becomes_nan_and_no_other_does():
    scores = sqrt_softplus(random(3, 8))
    scores[1] = torch.nan
    whole = top_k_routing(sqrt_softplus(random(3, 8)), 3, 1.0, groups=4, top_groups=2)
    chosen, weights = top_k_routing(scores, 3, 1.0, groups=4, top_groups=2)
    assert weights[1].isnan().all() and (chosen[1] >= 0).all()
    assert torch.equal(chosen[::2], whole[0][::2]) and torch.equal(weights[::2], whole[1][::2])


def test_hashed_experts_are_the_tables_and_their_weights_the_scores():
    scores = sqrt_softplus(random(4, 6))
    table = torch.tensor([[5, 0], [1, 1], [2, 3]], dtype=torch.int32)
    ids = torch.tensor([2, 0, 1, 2])
    chosen, weights = hash_routing(scores, table[ids], 1.5)
    assert chosen.tolist() == [[2, 3], [5, 0], [1, 1], [2, 3]]
    torch.testing.assert_close(weights[2], torch.tensor([0.75, 0.75]))
    torch.testing.assert_close(weights[1, 0], scores[1, 5] / (scores[1, 5] + scores[1, 0]) * 1.5)


@pytest.mark.parametrize("limit", [None, 0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_give_their_weighted_sum(limit, dtype):
    x, gate_up, down = random(7, 12).to(dtype), random(5, 16, 12, seed=1).to(dtype), random(5, 12, 8, seed=2).to(dtype)
    chosen = torch.randint(0, 5, (7, 3), generator=torch.Generator().manual_seed(3))
    chosen[0] = 4  # the same expert three times
    weights = random(7, 3, seed=4)
    found = grouped_swiglu(x, gate_up, down, chosen, weights, limit)
    expected = torch.zeros(7, 12)
    for row in range(7):
        for e, weight in zip(chosen[row], weights[row], strict=True):
            gate, up = (gate_up[e].float() @ x[row].float()).chunk(2)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            expected[row] += weight * (down[e].float() @ (functional.silu(gate) * up))
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, **({} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 0.3}))


def test_a_rows_result_does_not_depend_on_its_company():
    x, gate_up, down = random(9, 12), random(4, 16, 12, seed=1), random(4, 12, 8, seed=2)
    chosen, weights = top_k_routing(random(9, 4, seed=3).sigmoid(), 2, 1.0)
    whole = grouped_swiglu(x, gate_up, down, chosen, weights, 1.0)
    alone = torch.cat(
        [grouped_swiglu(x[i : i + 1], gate_up, down, chosen[i : i + 1], weights[i : i + 1], 1.0) for i in range(9)]
    )
    torch.testing.assert_close(alone, whole, rtol=1e-5, atol=1e-6)
    assert grouped_swiglu(x[:0], gate_up, down, chosen[:0], weights[:0]).shape == (0, 12)


def test_swiglu_clamps_the_gate_from_above_only():
    gate, up = torch.tensor([-20.0, 20.0, 1.0]), torch.tensor([20.0, -20.0, 0.5])
    expected = functional.silu(torch.tensor([-20.0, 10.0, 1.0])) * torch.tensor([10.0, -10.0, 0.5])
    assert torch.equal(swiglu(gate, up, 10.0), expected)
    assert swiglu(gate.bfloat16(), up.bfloat16()).dtype is torch.bfloat16


def test_wrong_shapes_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match=r"x \(7, 11\)"):
        grouped_swiglu(
            random(7, 11), random(5, 16, 12), random(5, 12, 8), torch.zeros(7, 1, dtype=torch.int64), random(7, 1)
        )
