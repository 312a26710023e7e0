"""The Triton kernels of compressor.py, same signatures: pooling of windows, and one more row to an open window.

A program takes one window and BLOCK of its channels and goes once over its slots with a running maximum. Importable
only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.compressor import Overlap, Running

_BLOCK = 128


@triton.jit
def _slots(
    top,  # [BLOCK] float32: largest gate so far
    total,  # [BLOCK] float32: sum of e^(gate - top)
    weighted,  # [BLOCK] float32: sum of e^(gate - top) value
    values,  # pointer to float32, the channels of the first slot
    gates,  # likewise
    slots,
    rise,  # numbers from one slot to the next
    gates_rise,
    mask,
):
    """The running softmax of some slots more."""
    for slot in range(slots):
        gate = tl.load(gates + slot * gates_rise, mask=mask, other=0.0)
        value = tl.load(values + slot * rise, mask=mask, other=0.0)
        higher = tl.maximum(top, gate)
        shrink, power = tl.exp(top - higher), tl.exp(gate - higher)
        total = total * shrink + power
        weighted = weighted * shrink + power * value
        top = higher
    return top, total, weighted


@triton.jit
def _pool(
    values,  # pointer to float32 [windows, M, WIDTH], rows RISE numbers apart
    gates,  # likewise
    before_values,  # pointer to float32 [M, DIM], rows BEFORE_RISE numbers apart; anything if not BEFORE
    before_gates,
    out,  # pointer to float32 [windows, DIM]
    rise,
    gates_rise,
    before_rise,
    before_gates_rise,
    M: tl.constexpr,
    DIM: tl.constexpr,
    OVERLAPS: tl.constexpr,  # a row is (first half for the next window, second half for its own)
    BEFORE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (windows, ceil(DIM / BLOCK))."""
    window = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < DIM
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    values += window * M * rise + channel
    gates += window * M * gates_rise + channel
    if OVERLAPS:
        if window > 0:
            top, total, weighted = _slots(
                top, total, weighted, values - M * rise, gates - M * gates_rise, M, rise, gates_rise, mask
            )
        elif BEFORE:
            top, total, weighted = _slots(
                top, total, weighted, before_values + channel, before_gates + channel, M, before_rise,
                before_gates_rise, mask,
            )  # fmt: skip
        values += DIM
        gates += DIM
    top, total, weighted = _slots(top, total, weighted, values, gates, M, rise, gates_rise, mask)
    tl.store(out + window * DIM + channel, weighted / total, mask=mask)


@triton.jit
def _extend(
    running,  # pointer to float32 [3, DIM]: maximum, total, weighted; anything if not OPEN
    values,  # pointer to float32 [n, DIM], rows `rise` numbers apart
    gates,  # likewise
    out,  # pointer to float32 [3, DIM]
    n,
    rise,
    gates_rise,
    DIM: tl.constexpr,
    OPEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (ceil(DIM / BLOCK),)."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < DIM
    if OPEN:
        top = tl.load(running + channel, mask=mask, other=0.0)
        total = tl.load(running + DIM + channel, mask=mask, other=0.0)
        weighted = tl.load(running + 2 * DIM + channel, mask=mask, other=0.0)
    else:
        top = tl.full((BLOCK,), float("-inf"), tl.float32)
        total, weighted = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    top, total, weighted = _slots(top, total, weighted, values + channel, gates + channel, n, rise, gates_rise, mask)
    tl.store(out + channel, top, mask=mask)
    tl.store(out + DIM + channel, total, mask=mask)
    tl.store(out + 2 * DIM + channel, weighted, mask=mask)


# -------------------------------------------------------------------------------------------------------------- launch


def pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """As compressor.pool; rows contiguous."""
    return _pooled(values, gates, values.shape[-1], None, overlaps=False)


def pool_overlapping(values: torch.Tensor, gates: torch.Tensor, before: Overlap | None) -> torch.Tensor:
    """As compressor.pool_overlapping; rows contiguous."""
    return _pooled(values, gates, values.shape[-1] // 2, before, overlaps=True)


def extend(running: Running | None, values: torch.Tensor, gates: torch.Tensor) -> Running:
    """As compressor.extend; rows contiguous."""
    n, dim = values.shape
    rise, gates_rise = _rise(values), _rise(gates)
    if not n or gates.shape != values.shape:
        raise ValueError(f"values {tuple(values.shape)} and gates {tuple(gates.shape)} do not extend a window")
    out = torch.empty(3, dim, device=values.device)
    state = out if running is None else torch.stack(running)
    _extend[(triton.cdiv(dim, _BLOCK),)](
        state, values, gates, out, n, rise, gates_rise, DIM=dim, OPEN=running is not None, BLOCK=_BLOCK
    )
    return Running(*out)


def _pooled(
    values: torch.Tensor, gates: torch.Tensor, dim: int, before: Overlap | None, *, overlaps: bool
) -> torch.Tensor:
    windows, m, width = values.shape
    if gates.shape != values.shape or (overlaps and width % 2):
        raise ValueError(f"values {tuple(values.shape)} and gates {tuple(gates.shape)} do not make windows")
    if before is not None and not before.values.shape == before.gates.shape == (m, dim):
        raise ValueError(f"an overlap is [{m}, {dim}], not {tuple(before.values.shape)}, {tuple(before.gates.shape)}")
    old = Overlap(values, gates) if before is None else before
    out = torch.empty(windows, dim, device=values.device)
    if windows:
        _pool[(windows, triton.cdiv(dim, _BLOCK))](
            values, gates, *old, out, _rise(values), _rise(gates), _rise(old.values), _rise(old.gates),
            M=m, DIM=dim, OVERLAPS=overlaps, BEFORE=before is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def _rise(rows: torch.Tensor) -> int:
    """Numbers from one row to the next; ValueError unless float32, each row contiguous, windows back to back."""
    stride = rows.stride()
    back_to_back = rows.dim() < 3 or rows.shape[0] < 2 or stride[0] == rows.shape[1] * stride[1]
    if rows.dtype is not torch.float32 or (rows.shape[-1] > 1 and stride[-1] != 1) or not back_to_back:
        raise ValueError(f"a compressor's rows are float32, each contiguous, not {rows.dtype} {stride}")
    return stride[-2]
