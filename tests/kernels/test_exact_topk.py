"""Exact top-k: one answer, whatever the ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kernels.exact_topk import exact_topk

SCORES = st.sampled_from([-torch.inf, torch.nan, -1.5, -0.0, 0.0, 1e-30, 2.0, torch.inf])


def by_definition(scores: list[float], k: int, visible: int) -> list[int]:
    there = [i for i, score in enumerate(scores[:visible]) if score > -torch.inf]
    order = sorted(there, key=lambda i: (-scores[i], i))[:k]
    return order + [-1] * (k - len(order))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.lists(SCORES, min_size=13, max_size=13), min_size=1, max_size=3), st.integers(1, 16), st.data())
def test_the_choice_is_the_definition(scores, k, data):
    visible = data.draw(st.lists(st.integers(0, 15), min_size=len(scores), max_size=len(scores)))
    found = exact_topk(torch.tensor(scores), k, torch.tensor(visible))
    assert found.tolist() == [by_definition(row, k, v) for row, v in zip(scores, visible, strict=True)]
    assert exact_topk(torch.tensor(scores), k).tolist() == [by_definition(row, k, 13) for row in scores]


def test_equal_scores_of_many_rows_are_taken_from_the_front():
    scores = torch.zeros(2, 3, 5000)
    scores[..., 4000] = 1.0
    assert (exact_topk(scores, 4) == torch.tensor([4000, 0, 1, 2])).all()


def test_no_scores_choose_nothing():
    assert exact_topk(torch.empty(2, 0), 3).tolist() == [[-1] * 3] * 2


def test_wrong_arguments_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="k >= 1, not torch.float32 and 0"):
        exact_topk(torch.zeros(2, 4), 0)
    with pytest.raises(ValueError, match="float64"):
        exact_topk(torch.zeros(2, 4, dtype=torch.float64), 2)
    with pytest.raises(ValueError, match=r"\(3,\) do not fit scores \(2, 4\)"):
        exact_topk(torch.zeros(2, 4), 2, torch.ones(3))
