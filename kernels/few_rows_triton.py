"""Products of one to four rows with a large weight in Triton; few_rows.py says what is computed and has the twins.

A program makes one column of y for all rows: it reads its row of the weight once, BLOCK numbers at a time, and x, which
stays in cache, beside it. The gated form reads two rows of the weight. Offsets are 64-bit: an output projection has
more than 2^29 elements, and larger ones pass 2^31.

Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

# (numbers at a time, warps) by the length of a row, measured on an H200 at one row
_LONG_ROW = 8192
_LONG, _SHORT = (1024, 4), (2048, 8)


@triton.jit
def _dot(x, row, x_stride, N, BLOCK: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """[PADDED] float32: the rows of x times one row of a weight."""
    at = tl.arange(0, BLOCK)
    which = tl.arange(0, PADDED)
    total = tl.zeros((PADDED, BLOCK), tl.float32)
    for start in range(0, N, BLOCK):
        inside = start + at < N
        w = tl.load(row + start + at, mask=inside, other=0.0).to(tl.float32)
        there = (which < ROWS)[:, None] & inside[None, :]
        v = tl.load(x + which[:, None] * x_stride + (start + at)[None, :], mask=there, other=0.0)
        total += v.to(tl.float32) * w[None, :]
    return tl.sum(total, 1)


@triton.jit
def _linear(
    x,  # pointer to [ROWS, N], rows x_stride apart
    weight,  # pointer to [M, N]
    bias,  # pointer to [M], or None
    out,  # pointer to [ROWS, M]
    x_stride,
    M,
    N,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """grid [M]: one column of out each."""
    column = tl.program_id(0)
    y = _dot(x, weight + column.to(tl.int64) * N, x_stride, N, BLOCK, ROWS, PADDED)
    if bias is not None:
        y += tl.load(bias + column).to(tl.float32)
    which = tl.arange(0, PADDED)
    tl.store(out + which * M + column, y.to(out.dtype.element_ty), mask=which < ROWS)


@triton.jit
def _gated(
    x,  # pointer to [ROWS, N], rows x_stride apart
    weight,  # pointer to [2 * M, N]
    out,  # pointer to [ROWS, M]
    x_stride,
    M,
    N,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """grid [M]: one column of out each."""
    column = tl.program_id(0)
    gate = _dot(x, weight + column.to(tl.int64) * N, x_stride, N, BLOCK, ROWS, PADDED)
    up = _dot(x, weight + (column + M).to(tl.int64) * N, x_stride, N, BLOCK, ROWS, PADDED)
    y = gate / (1.0 + tl.exp(-gate)) * up
    which = tl.arange(0, PADDED)
    tl.store(out + which * M + column, y.to(out.dtype.element_ty), mask=which < ROWS)


def few_rows_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As few_rows.few_rows_linear."""
    rows, (m, n) = len(x), weight.shape
    if out is None:
        out = torch.empty(rows, m, dtype=x.dtype, device=x.device)
    block, warps = _LONG if n >= _LONG_ROW else _SHORT
    padded = triton.next_power_of_2(rows)
    _linear[(m,)](x, weight, bias, out, x.stride(0), m, n, BLOCK=block, ROWS=rows, PADDED=padded, num_warps=warps)
    return out


def few_rows_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As few_rows.few_rows_gated."""
    rows, n, m = len(x), weight.shape[1], len(weight) // 2
    out = torch.empty(rows, m, dtype=x.dtype, device=x.device)
    block, warps = _LONG if n >= _LONG_ROW else _SHORT
    padded = triton.next_power_of_2(rows)
    _gated[(m,)](x, weight, out, x.stride(0), m, n, BLOCK=block, ROWS=rows, PADDED=padded, num_warps=warps)
    return out
