"""Two-level selection: blocks of rows that one layer's scores put first, and scores confined to them. Plain PyTorch,
the CPU path, twin of candidate_blocks_triton.py.

    keep = best_blocks(scores, visible, blocks, size)      the layer that publishes candidates
    scores = within_blocks(scores, keep, size)             a layer behind it, before its own exact_topk

A block is worth its best visible row; of equal blocks the lower number is taken (exact_topk). The block with the newest
visible row is always among them. A block without a visible row is never.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tailrace.kernels.exact_topk import exact_topk


def best_blocks(scores: torch.Tensor, visible: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    """The blocks that later layers may choose from.

    Args:
        scores: [t, n] float32, of rows; -inf and NaN are worth nothing.
        visible: [t] int64: each query sees its first so many rows.
        blocks: how many are kept, at least 1.
        size: rows a block; the last may have fewer.

    Returns:
        [t, ceil(n / size)] bool.

    Raises:
        ValueError: shapes do not fit each other.
    """
    check_blocks(scores, visible)
    t, rows = scores.shape
    hidden = (torch.arange(rows, device=scores.device) >= visible[:, None]) | ~(scores > -torch.inf)
    padded = functional.pad(scores.masked_fill(hidden, -torch.inf), (0, -rows % size), value=-torch.inf)
    best = padded.unflatten(1, (-1, size)).amax(-1) if rows else padded
    newest = (visible - 1).div(size, rounding_mode="floor")
    best = best.masked_fill(torch.arange(best.shape[1], device=scores.device) == newest[:, None], torch.inf)
    chosen = exact_topk(best, blocks)
    keep = torch.zeros(t, best.shape[1] + 1, dtype=torch.bool, device=scores.device)
    return keep.scatter_(1, chosen.masked_fill(chosen < 0, best.shape[1]), True)[:, :-1]


def within_blocks(scores: torch.Tensor, keep: torch.Tensor, size: int) -> torch.Tensor:
    """Scores of rows in kept blocks; -inf, which exact_topk never chooses, for all others.

    Args:
        scores: [t, n] float32.
        keep: [t, ceil(n / size)] bool or wider, from best_blocks.

    Raises:
        ValueError: shapes do not fit each other.
    """
    check_keep(scores, keep, size)
    return scores.masked_fill(~keep.repeat_interleave(size, 1)[:, : scores.shape[1]], -torch.inf)


def check_blocks(scores: torch.Tensor, visible: torch.Tensor) -> None:
    """ValueError unless the arguments of best_blocks fit each other."""
    if scores.dim() != 2 or scores.dtype is not torch.float32 or visible.shape != scores.shape[:1]:
        raise ValueError(f"visible counts {tuple(visible.shape)} do not fit scores {tuple(scores.shape)}")


def check_keep(scores: torch.Tensor, keep: torch.Tensor, size: int) -> None:
    """ValueError unless the arguments of within_blocks fit each other."""
    t, rows = scores.shape
    if keep.dtype is not torch.bool or keep.dim() != 2 or len(keep) != t or keep.shape[1] * size < rows:
        raise ValueError(f"kept blocks {tuple(keep.shape)} of {size} rows do not fit scores {tuple(scores.shape)}")
