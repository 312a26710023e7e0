"""Two-level selection: blocks by their best row, then by number, the newest always; scores confined to them."""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.candidate_blocks import best_blocks, within_blocks


def test_blocks_are_kept_by_their_best_row_then_by_number_and_the_newest_always():
    scores = torch.tensor([[5.0, 0, 1, 1, 2, 2, 9, 9], [0, 0, 0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]])
    visible = torch.tensor([5, 7, 0])
    kept = best_blocks(scores, visible, 2, 2)
    assert kept.tolist() == [[True, False, True, False], [True, False, False, True], [False] * 4]
    assert best_blocks(scores[:, :0], visible * 0, 2, 2).shape == (3, 0)
    uneven = best_blocks(scores[:1, :7], torch.tensor([7]), 1, 3)
    assert uneven.tolist() == [[False, False, True]]


def test_what_is_nan_or_minus_infinity_is_worth_nothing_and_spoils_no_block():
    scores = torch.tensor([[torch.nan, 3.0, -torch.inf, -torch.inf, torch.nan, torch.nan, 0.0, 0.0]])
    assert best_blocks(scores, torch.tensor([8]), 4, 2).tolist() == [[True, False, False, True]]


def test_scores_outside_of_the_kept_blocks_can_no_longer_be_chosen():
    scores = torch.arange(7.0).repeat(2, 1)
    keep = torch.tensor([[True, False, True], [False, True, False]])
    hidden = -torch.inf
    assert within_blocks(scores, keep, 3).tolist() == [
        [0, 1, 2, hidden, hidden, hidden, 6], [hidden, hidden, hidden, 3, 4, 5, hidden]
    ]  # fmt: skip
    assert scores.isfinite().all(), "the caller's are left alone"
    assert within_blocks(scores[:, :0], keep[:, :0], 3).shape == (2, 0)


def test_wrong_shapes_are_refused_with_their_numbers():
    scores, keep = torch.zeros(2, 7), torch.ones(2, 2, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"visible counts \(3,\) do not fit scores \(2, 7\)"):
        best_blocks(scores, torch.zeros(3, dtype=torch.int64), 1, 2)
    with pytest.raises(ValueError, match=r"kept blocks \(2, 2\) of 3 rows do not fit scores \(2, 7\)"):
        within_blocks(scores, keep, 3)
