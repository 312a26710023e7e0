"""The Triton kernels of exact_topk.py, same signature and same result.

One program a row of scores finds the k-th best by its bits, eight at a time from the top, then walks the row once more
from the front and keeps what is better and the first of what is equal; a second kernel puts the kept in order. Scores
are compared as integers of the same order. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024
_NOTHING = tl.constexpr(-(2**63))
_LAST_INDEX = tl.constexpr(0x7FFFFFFF)
_TOP = tl.constexpr(0x80000000)


@triton.jit
def _ordered(scores, mask):
    """(int64 in 0 .. 2^32 - 1, ordered as the scores are, -0 as 0; whether the score may be chosen)."""
    score = tl.load(scores, mask=mask, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + _TOP
    return order, score > float("-inf")


@triton.jit
def _keep(
    scores,  # pointer to float32 [rows, n]
    visible,  # pointer to int64 [rows]; anything if not LIMITED
    kept,  # pointer to int64 [rows, KEPT]: order and index of the best, in any order
    n,
    K: tl.constexpr,
    KEPT: tl.constexpr,  # K rounded up to a power of two
    LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    scores += row * n
    kept += row * KEPT
    count = tl.minimum(tl.maximum(tl.load(visible + row), 0), n) if LIMITED else n
    bins = tl.arange(0, 256)
    needed = tl.zeros((), tl.int32) + K  # so many of those whose upper bits are `prefix`, and all above
    prefix = tl.zeros((), tl.int64)
    for digit in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, count, BLOCK):
            at = start + tl.arange(0, BLOCK)
            order, chosen = _ordered(scores + at, at < count)
            same = chosen & ((order >> (32 - 8 * digit)) == prefix)
            counts += tl.histogram(((order >> (24 - 8 * digit)) & 0xFF).to(tl.int32), 256, mask=same)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
        if digit == 0:
            needed = tl.minimum(needed, tl.sum(counts, 0))
        here = tl.max(tl.where(at_least >= needed, bins, 0), 0)
        needed -= tl.sum(tl.where(bins == here, at_least - counts, 0), 0)
        prefix = (prefix << 8) | here.to(tl.int64)
    num_kept = tl.zeros((), tl.int32)
    num_equal = tl.zeros((), tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        order, chosen = _ordered(scores + at, at < count)
        equal = (chosen & (order == prefix)).to(tl.int32)
        place = num_equal + tl.cumsum(equal, 0)
        keep = chosen & ((order > prefix) | ((equal == 1) & (place <= needed)))
        to = num_kept + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(kept + to, ((order - _TOP) << 32) + (-at.to(tl.int64) + _LAST_INDEX), mask=keep)
        num_kept += tl.sum(keep.to(tl.int32), 0)
        num_equal += tl.sum(equal, 0)
    slot = tl.arange(0, KEPT)
    tl.store(kept + slot, tl.full((KEPT,), _NOTHING, tl.int64), mask=slot >= num_kept)


@triton.jit
def _sort_kept(
    kept,  # pointer to int64 [rows, KEPT]
    out,  # pointer to int64 [rows, K]
    K: tl.constexpr,
    KEPT: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, KEPT)
    best = tl.sort(tl.load(kept + row * KEPT + slot), descending=True)
    index = tl.where(best == _NOTHING, -1, -(best & 0xFFFFFFFF) + _LAST_INDEX)
    tl.store(out + row * K + slot, index, mask=slot < K)


def exact_topk(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
    """As exact_topk.exact_topk; scores contiguous, fewer than 2^31 a row."""
    if k < 1 or scores.dtype is not torch.float32 or not scores.is_contiguous():
        raise ValueError(f"exact top-k takes contiguous float32 scores and k >= 1, not {scores.dtype} and {k}")
    rows, n = scores.shape[:-1], scores.shape[-1]
    if visible is not None and visible.shape != rows:
        raise ValueError(f"visible counts {tuple(visible.shape)} do not fit scores {tuple(scores.shape)}")
    if n > 0x7FFFFFFF:
        raise ValueError(f"exact top-k of {n} scores: indices have 31 bits")
    out = torch.empty(*rows, k, dtype=torch.int64, device=scores.device)
    size = triton.next_power_of_2(k)
    kept = torch.empty(rows.numel(), size, dtype=torch.int64, device=scores.device)
    counts = scores if visible is None else visible.to(torch.int64).contiguous()
    if len(kept):
        _keep[(len(kept),)](scores, counts, kept, n, K=k, KEPT=size, LIMITED=visible is not None, BLOCK=_BLOCK)
        _sort_kept[(len(kept),)](kept, out, K=k, KEPT=size)
    return out
