"""Scores of an indexer: which rows a query should attend to. Plain PyTorch, the CPU path, twin of indexer_triton.py.

    score(t, w) = sum over heads h of weights[t, h] * relu(q[t, h] . keys[w])

A score that would be NaN or -inf counts as 0. (Rows a query may not see are hidden afterwards, by visible counts in
exact_topk or by -inf.) Both sums run in float64 and are rounded to float32 once: equal keys get equal scores and a
score does not depend on how many queries and keys are scored with it, so that prefill and decode choose alike.
"""

from __future__ import annotations

import torch

from tailrace.kernels.row_formats import PackedRows, numbers

_SCORES = 1 << 22  # head scores held at once


def index_scores(q: torch.Tensor, keys: torch.Tensor | PackedRows, weights: torch.Tensor) -> torch.Tensor:
    """The score of every key for every query.

    Args:
        q: [t, h, d] float32 or bfloat16.
        keys: [n, d] float32 or bfloat16, or packed rows.
        weights: [t, h] float32, constant factors included.

    Returns:
        [t, n] float32, never NaN nor -inf.

    Raises:
        ValueError: shapes do not fit each other.
    """
    t, heads, dim = q.shape
    if len(keys.shape) != 2 or keys.shape[1] != dim or weights.shape != (t, heads):
        raise ValueError(
            f"index scores of q {tuple(q.shape)}: keys {tuple(keys.shape)}, weights {tuple(weights.shape)} do not fit"
        )
    out = torch.empty(t, len(keys), device=q.device)
    columns = numbers(keys).double().t()
    factors = weights.double().unsqueeze(1)
    step = max(1, _SCORES // max(1, heads * len(keys)))
    for i in range(0, t, step):
        hits = (q[i : i + step].double() @ columns).relu_()
        out[i : i + step] = (factors[i : i + step] @ hits).squeeze(1)
    return out.masked_fill_(~(out > -torch.inf), 0.0)
