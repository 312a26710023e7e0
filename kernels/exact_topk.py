"""The k best of many scores with one answer only: the higher score first, of equal scores the lower index first.

Prefill and decode must choose the same rows, and ties are common (a ReLU gives many zeros), so the order of equal
scores is part of the rule. Plain PyTorch, the CPU path, and the twin of exact_topk_triton.py.

    exact_topk(scores, k)                    over all scores
    exact_topk(scores, k, visible)           query i may choose among its first visible[i] scores only

Both give exactly k columns; what there is not is -1 and stands last. -0.0 equals 0.0. A score of -inf or NaN is never
chosen: -inf is how a caller hides a row that is no candidate.
"""

from __future__ import annotations

import torch


def exact_topk(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
    """The indices of the k best scores, best first.

    Args:
        scores: [.., n] float32; n may be 0.
        k: how many, at least 1.
        visible: [..] integer: only the first so many scores count. All if None.

    Returns:
        [.., k] int64, -1 where there is no further score.

    Raises:
        ValueError: k is below 1, scores are not float32, or `visible` has another shape.
    """
    if k < 1 or scores.dtype is not torch.float32:
        raise ValueError(f"exact top-k takes float32 scores and k >= 1, not {scores.dtype} and {k}")
    hidden = ~(scores > -torch.inf)  # NaN as well
    if visible is not None:
        if visible.shape != scores.shape[:-1]:
            raise ValueError(f"visible counts {tuple(visible.shape)} do not fit scores {tuple(scores.shape)}")
        hidden |= torch.arange(scores.shape[-1], device=scores.device) >= visible.unsqueeze(-1)
    best, index = scores.masked_fill(hidden, -torch.inf).sort(dim=-1, descending=True, stable=True)
    index = index[..., :k].masked_fill_(best[..., :k] == -torch.inf, -1)
    missing = k - index.shape[-1]
    return torch.nn.functional.pad(index, (0, missing), value=-1) if missing else index
