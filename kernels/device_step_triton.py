"""The Triton kernels of device_step.py, same signatures. Each reads its inputs once and writes its results once.

Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.device_step import check_add_rms_norm, check_rotary_write, check_silu_mul
from tailrace.kernels.overlap_triton import begin, overlapped

_HEADS = 8  # of a token that one program turns
_GATE_BLOCK = 2048


@triton.jit
def _add_rms_norm(
    hidden,  # pointer to float32 [rows, size]
    part,  # pointer to [rows, size], rows part_rise numbers apart; anything if not ADDED
    weight,  # pointer to [size]
    out,  # pointer to [rows, size]
    size,
    part_rise,
    eps,
    COLUMNS: tl.constexpr,  # size rounded up to a power of two
    ADDED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < size
    scales = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)  # no kernel of a step writes it
    begin(OVERLAPPED)
    x = tl.load(hidden + row * size + column, mask=there, other=0.0)
    if ADDED:
        x += tl.load(part + row * part_rise + column, mask=there, other=0.0).to(tl.float32)
        tl.store(hidden + row * size + column, x, mask=there)
    norm = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out + row * size + column, (x * norm * scales).to(out.dtype.element_ty), mask=there)


@triton.jit
def _rotary_write(
    qkv,  # pointer to [tokens, HEADS + 2 * KV_HEADS, DIM], tokens rise numbers apart
    cos,  # pointer to [tokens, DIM]
    sin,
    slots,  # pointer to int64 [tokens]
    pool,  # pointer to the layer's keys in page 0, [.., k|v, KV_HEADS, PAGE, DIM], pages page_rise numbers apart
    q_norm,  # pointer to [DIM]; anything if not NORMED
    k_norm,
    out,  # pointer to [tokens, HEADS, DIM]
    rise,
    page_rise,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # DIM / 2 rounded up to a power of two
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (tokens, ceil((HEADS + 2 * KV_HEADS) / BLOCK))."""
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    there = (head < HEADS + 2 * KV_HEADS)[:, None] & (column < HALF)[None, :]
    inside = column < HALF
    place = token * rise + head[:, None] * DIM + column[None, :]
    begin(OVERLAPPED)
    slot = tl.load(slots + token)
    low = tl.load(qkv + place, mask=there, other=0.0)
    high = tl.load(qkv + place + HALF, mask=there, other=0.0)
    x, y = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        is_q = (head < HEADS)[:, None]
        norm = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        q_low = tl.load(q_norm + column, mask=inside, other=0.0).to(tl.float32)
        q_high = tl.load(q_norm + HALF + column, mask=inside, other=0.0).to(tl.float32)
        k_low = tl.load(k_norm + column, mask=inside, other=0.0).to(tl.float32)
        k_high = tl.load(k_norm + HALF + column, mask=inside, other=0.0).to(tl.float32)
        x = x * norm * tl.where(is_q, q_low[None, :], k_low[None, :])
        y = y * norm * tl.where(is_q, q_high[None, :], k_high[None, :])
    turn = token * DIM + column
    cos_low = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_high = tl.load(cos + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_low = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_high = tl.load(sin + turn + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    turned_low = (x * cos_low + y * sin_low).to(low.dtype)
    turned_high = (y * cos_high + x * sin_high).to(low.dtype)
    is_v = (head >= HEADS + KV_HEADS)[:, None]
    turned_low = tl.where(is_v, low, turned_low)
    turned_high = tl.where(is_v, high, turned_high)
    queries = there & (head < HEADS)[:, None]
    place = (token * HEADS + head[:, None]) * DIM + column[None, :]
    tl.store(out + place, turned_low, mask=queries)
    tl.store(out + place + HALF, turned_high, mask=queries)
    row = slot // PAGE * page_rise + slot % PAGE * DIM
    place = row + (head - HEADS)[:, None] * (PAGE * DIM) + column[None, :]  # values stand behind the keys
    others = there & (head >= HEADS)[:, None]
    tl.store(pool + place, turned_low, mask=others)
    tl.store(pool + place + HALF, turned_high, mask=others)


@triton.jit
def _silu_mul(
    gate_up,  # pointer to [rows, 2 * n], rows rise numbers apart
    out,  # pointer to [rows, n]
    n,
    rise,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (rows, ceil(n / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < n
    begin(OVERLAPPED)
    gate = tl.load(gate_up + row * rise + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * rise + n + column, mask=there, other=0.0).to(tl.float32)
    gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * n + column, gated.to(out.dtype.element_ty), mask=there)


# -------------------------------------------------------------------------------------------------------------- launch


def add_rms_norm(
    hidden: torch.Tensor,
    part: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As device_step.add_rms_norm."""
    check_add_rms_norm(hidden, part, weight)
    rows, size = hidden.shape
    dtype = dtype or (weight if part is None else part).dtype
    out = torch.empty(rows, size, dtype=dtype, device=hidden.device)
    if rows:
        columns = triton.next_power_of_2(size)
        added = hidden if part is None else part
        _add_rms_norm[(rows,)](
            hidden, added, weight, out, size, added.stride(0), eps, COLUMNS=columns, ADDED=part is not None,
            num_warps=min(16, max(1, columns // 512)), **overlapped(hidden.device),
        )  # fmt: skip
    return out


def rotary_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """As device_step.rotary_write."""
    check_rotary_write(qkv, cos, sin, slots, kv, layer, q_norm, k_norm)
    tokens, total, dim = qkv.shape
    kv_heads, page = kv.shape[3], kv.shape[4]
    heads = total - 2 * kv_heads
    out = torch.empty(tokens, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _rotary_write[(tokens, triton.cdiv(total, _HEADS))](
            qkv, cos, sin, slots, kv[0, layer], cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
            out, qkv.stride(0), kv.stride(0), eps, HEADS=heads, KV_HEADS=kv_heads, DIM=dim,
            COLUMNS=triton.next_power_of_2(dim // 2), PAGE=page, BLOCK=_HEADS, NORMED=q_norm is not None, num_warps=2,
            **overlapped(qkv.device),
        )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As device_step.silu_mul."""
    check_silu_mul(gate_up)
    rows, n = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, n, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _silu_mul[(rows, triton.cdiv(n, _GATE_BLOCK))](
            gate_up, out, n, gate_up.stride(0), BLOCK=_GATE_BLOCK, **overlapped(gate_up.device)
        )
    return out
