"""The largest logits of a bf16 model are told apart by float32, whatever bf16 made of them."""

from __future__ import annotations

import torch

from tailrace.model.decoder import _settle_near_ties
from tailrace.model.weights import DenseEmbedding


def near_tie(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(table, hidden, true logits): words 3 and 7 are the largest, 0.05 apart at 25, where bf16's step is 0.125."""
    table = torch.zeros(16, 512)
    table[3, :512], table[7, :512] = 25 / 512, 25 / 512
    table[7, 0] += 0.05
    hidden = torch.ones(rows, 512)
    table, hidden = table.bfloat16(), hidden.bfloat16()
    return table, hidden, hidden.float() @ table.float().T


def test_words_that_bf16_makes_equal_are_told_apart():
    table, hidden, true = near_tie()
    logits = true.bfloat16().float()
    assert (logits[:, 3] == logits[:, 7]).all() and (logits.argmax(-1) == 3).all()
    _settle_near_ties(logits, hidden, DenseEmbedding(table))
    assert (logits.argmax(-1) == 7).all()
    torch.testing.assert_close(logits[:, [3, 7]], true[:, [3, 7]])


def test_words_far_from_the_best_and_rows_that_are_not_finite_stay_as_they_are():
    table, hidden, true = near_tie(3)
    logits = true.bfloat16().float()
    logits[1] = torch.nan
    logits[2] = 0.0  # every word alike: no near tie
    before = logits.clone()
    _settle_near_ties(logits, hidden, DenseEmbedding(table))
    assert logits[1].isnan().all()
    torch.testing.assert_close(logits[0, :3], before[0, :3], rtol=0, atol=0)
