"""Products of one row with a large weight in Triton; one_row.py says what is computed and has the twins.

A program makes one number of y: it reads its row of the weight once, and x, which stays in cache, beside it. The gated
form reads two rows of the weight. Offsets are 64-bit: the weight of an output projection may pass 2^31 elements.

Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportIndexIssue=false
# pyright: reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 4096, 8  # numbers at a time: with these an 8B step was fastest on an H200


@triton.jit
def _part(row, start: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] of a row, zero behind its end."""
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= N:
        return tl.load(row + at)
    return tl.load(row + at, mask=at < N, other=0.0)


@triton.jit
def _linear(
    x,  # pointer to [N]
    weight,  # pointer to [grid, N]
    bias,  # pointer to [grid], or None
    out,  # pointer to [grid]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (outputs,)."""
    column = tl.program_id(0)
    row = weight + column.to(tl.int64) * N
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        total += _part(row, start, N, BLOCK).to(tl.float32) * _part(x, start, N, BLOCK).to(tl.float32)
    y = tl.sum(total, 0)
    if bias is not None:
        y += tl.load(bias + column).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty))


@triton.jit
def _gated(
    x,  # pointer to [N]
    weight,  # pointer to [2 * grid, N]
    out,  # pointer to [grid]
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (outputs,)."""
    column = tl.program_id(0)
    gates = weight + column.to(tl.int64) * N
    ups = gates + tl.num_programs(0).to(tl.int64) * N
    gate, up = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        v = _part(x, start, N, BLOCK).to(tl.float32)
        gate += _part(gates, start, N, BLOCK).to(tl.float32) * v
        up += _part(ups, start, N, BLOCK).to(tl.float32) * v
    g = tl.sum(gate, 0)
    y = g / (1.0 + tl.exp(-g)) * tl.sum(up, 0)
    tl.store(out + column, y.to(out.dtype.element_ty))


def one_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """As one_row.one_row_linear."""
    m, n = weight.shape
    if out is None:
        out = torch.empty(1, m, dtype=x.dtype, device=x.device)
    _linear[(m,)](x, weight, bias, out, n, _BLOCK, num_warps=_WARPS)
    return out


def one_row_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As one_row.one_row_gated."""
    m, n = len(weight) // 2, weight.shape[1]
    out = torch.empty(1, m, dtype=x.dtype, device=x.device)
    _gated[(m,)](x, weight, out, n, _BLOCK, num_warps=_WARPS)
    return out
