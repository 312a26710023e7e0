"""The Triton kernels of candidate_blocks.py, same signatures and same results.

One program takes a query's row of scores and BLOCKS blocks of it: the best visible row of each, the newest one's block
put above all. Which blocks are kept is exact_topk's choice among those; a second kernel marks them, and a third hides
what is in none. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.candidate_blocks import check_blocks, check_keep
from tailrace.kernels.exact_topk_triton import exact_topk

_NUMBERS = 1024  # a program


@triton.jit
def _block_worth(
    scores,  # pointer to float32 [t, n]
    visible,  # pointer to int64 [t]
    worth,  # pointer to float32 [t, num_blocks]
    n,
    num_blocks,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,  # SIZE rounded up to a power of two
    BLOCKS: tl.constexpr,
):
    """grid (t, ceil(num_blocks / BLOCKS))."""
    query = tl.program_id(0).to(tl.int64)
    block, inside = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, COLUMNS)
    count = tl.load(visible + query)
    row = block[:, None] * SIZE + inside[None, :]
    there = (inside < SIZE)[None, :] & (row < tl.minimum(count, n))
    score = tl.load(scores + query * n + row, mask=there, other=float("-inf"))
    best = tl.max(tl.where(score > float("-inf"), score, float("-inf")), 1)
    newest = (count > 0) & (block == (count - 1) // SIZE)
    tl.store(worth + query * num_blocks + block, tl.where(newest, float("inf"), best), mask=block < num_blocks)


@triton.jit
def _mark(
    chosen,  # pointer to int64 [t, K], -1 for none
    keep,  # pointer to int8 [t, num_blocks], 0 all
    num_blocks,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (t, ceil(K / BLOCK))."""
    query = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    block = tl.load(chosen + query * K + slot, mask=slot < K, other=-1)
    tl.store(keep + query * num_blocks + block, tl.full((BLOCK,), 1, tl.int8), mask=block >= 0)


@triton.jit
def _within(
    scores,  # pointer to float32 [t, n]
    keep,  # pointer to int8 [t, num_blocks]
    out,  # pointer to float32 [t, n]
    n,
    num_blocks,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (t, ceil(n / BLOCK))."""
    query = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(keep + query * num_blocks + row // SIZE, mask=row < n, other=0)
    score = tl.load(scores + query * n + row, mask=row < n, other=0.0)
    tl.store(out + query * n + row, tl.where(kept != 0, score, float("-inf")), mask=row < n)


# -------------------------------------------------------------------------------------------------------------- launch


def best_blocks(scores: torch.Tensor, visible: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    """As candidate_blocks.best_blocks; scores contiguous."""
    check_blocks(scores, visible)
    if not scores.is_contiguous():
        raise ValueError(f"scores are contiguous, not {scores.stride()}")
    t, n = scores.shape
    count = triton.cdiv(n, size)
    worth = torch.empty(t, count, device=scores.device)
    keep = torch.zeros(t, count, dtype=torch.int8, device=scores.device)
    if t and n:
        columns = triton.next_power_of_2(size)
        each = max(1, _NUMBERS // columns)
        _block_worth[(t, triton.cdiv(count, each))](
            scores, visible.to(torch.int64).contiguous(), worth, n, count, SIZE=size, COLUMNS=columns, BLOCKS=each
        )
        chosen = exact_topk(worth, blocks)
        _mark[(t, triton.cdiv(blocks, _NUMBERS))](chosen, keep, count, K=blocks, BLOCK=_NUMBERS)
    return keep.view(torch.bool)


def within_blocks(scores: torch.Tensor, keep: torch.Tensor, size: int) -> torch.Tensor:
    """As candidate_blocks.within_blocks; scores contiguous."""
    check_keep(scores, keep, size)
    if not scores.is_contiguous():
        raise ValueError(f"scores are contiguous, not {scores.stride()}")
    t, n = scores.shape
    out = torch.empty_like(scores)
    if t and n:
        _within[(t, triton.cdiv(n, _NUMBERS))](
            scores, keep.contiguous().view(torch.int8), out, n, keep.shape[1], SIZE=size, BLOCK=_NUMBERS
        )
    return out
