"""The Triton kernel of indexer.py, same signature: keys may be numbers or packed rows.

A score is made by one program, over the heads in a fixed order: equal keys get equal scores, and a score does not
depend on its company. Sums run in float32, so that it differs from the twin's by some units in the last place; choices
of prefill and decode agree if both are made by the kernel or both by the twin. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.page_codecs_triton import float_words, load_float32
from tailrace.kernels.row_formats import PackedRows
from tailrace.kernels.row_formats_triton import load_rows, on_tensor_cores, row_arguments

_KEYS, _QUERIES = 64, 8  # a program; not tuned a call, because that would change sums
_WARPS = 8  # with 4 registers spill on an H200


@triton.jit
def _index_scores(
    q,  # pointer to float32 or int16 (the bits of bfloat16) [t, HEADS, DIM]
    memory,  # as load_rows
    offsets,
    weights,  # pointer to float32 [t, HEADS]
    out,  # pointer to float32 [t, n]
    t,
    n,
    HEADS: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,  # HEADS rounded up to a power of two, at least 16
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # DIM likewise
    BF16: tl.constexpr,  # q is bfloat16
    TENSOR_CORES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    TAIL_AT: tl.constexpr,
):
    """grid (ceil(n / KEYS), ceil(t / QUERIES))."""
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    column, head = tl.arange(0, COLUMNS), tl.arange(0, HEAD_COLUMNS)
    keys = load_rows(memory, offsets, key, key < n, column, DIM, DIM, KIND, WIDTH, TILE, SCALE, SIZE, TAIL_AT)
    if TENSOR_CORES:
        keys = keys.to(tl.bfloat16)
    mask = (column < DIM)[:, None] & (head < HEADS)[None, :]
    first = tl.program_id(1).to(tl.int64) * QUERIES
    for query in range(first, tl.minimum(first + QUERIES, t)):
        place = query * HEADS * DIM + head[None, :] * DIM + column[:, None]
        one = load_float32(q + place, mask, BF16)
        if TENSOR_CORES:
            one = one.to(tl.bfloat16)
        hits = tl.dot(keys, one, input_precision="ieee")  # [KEYS, HEAD_COLUMNS]
        hits = tl.where(hits < 0, 0.0, hits)  # NaN stays
        weight = tl.load(weights + query * HEADS + head, mask=head < HEADS, other=0.0)
        score = tl.sum(tl.where((head < HEADS)[None, :], hits * weight[None, :], 0.0), 1)
        tl.store(out + query * n + key, tl.where(score > float("-inf"), score, 0.0), mask=key < n)


def index_scores(q: torch.Tensor, keys: torch.Tensor | PackedRows, weights: torch.Tensor) -> torch.Tensor:
    """As indexer.index_scores; everything contiguous, weights float32."""
    t, heads, dim = q.shape
    n = len(keys)
    if len(keys.shape) != 2 or keys.shape[1] != dim or weights.shape != (t, heads):
        raise ValueError(
            f"index scores of q {tuple(q.shape)}: keys {tuple(keys.shape)}, weights {tuple(weights.shape)} do not fit"
        )
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        raise ValueError(f"q is contiguous float32 or bfloat16, not {q.dtype} {q.stride()}")
    if weights.dtype is not torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights are contiguous float32, not {weights.dtype} {weights.stride()}")
    memory, offsets, constants = row_arguments(keys)
    # A tensor core takes bfloat16: keys of more digits, which packed rows have once they are scaled, keep them.
    tensor_cores = on_tensor_cores(q.dtype) and not isinstance(keys, PackedRows) and keys.dtype is torch.bfloat16
    out = torch.empty(t, n, device=q.device)
    if t and n:
        _index_scores[(triton.cdiv(n, _KEYS), triton.cdiv(t, _QUERIES))](
            float_words(q), memory, offsets, weights, out, t, n,
            HEADS=heads, HEAD_COLUMNS=max(16, triton.next_power_of_2(heads)),
            DIM=dim, COLUMNS=max(16, triton.next_power_of_2(dim)), BF16=q.dtype is torch.bfloat16,
            TENSOR_CORES=tensor_cores, KEYS=_KEYS, QUERIES=_QUERIES,
            num_warps=_WARPS, **constants,  # pyright: ignore[reportCallIssue]
        )  # fmt: skip
    return out
