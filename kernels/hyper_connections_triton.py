"""The Triton kernels of hyper_connections.py, same signatures: mixing, collapse and spread, one program a token.

The projection of a token's streams (n dim numbers to n (2 + n)) is a sum over blocks of columns in a fixed order, so a
token's result does not depend on its company. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.hyper_connections import CollapseWeights, Mixing, MixingWeights
from tailrace.kernels.page_codecs_triton import float_words, load_float32, store_float32

_BLOCK = 256


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _mixing(
    streams,  # pointer to float32 or int16 (the bits of bfloat16) [rows, NUMBERS]
    projection,  # pointer to float32 [N (2 + N), NUMBERS]
    base,  # pointer to float32 [N (2 + N)]
    scales,  # pointer to float32 [3]
    pre,  # pointer to float32 [rows, N]
    post,  # pointer to float32 [rows, N]
    combination,  # pointer to float32 [rows, N, N]
    rms_eps,
    floor,
    iterations,
    N: tl.constexpr,
    NUMBERS: tl.constexpr,  # of a token: N times dim
    SIDE: tl.constexpr,  # N rounded up to a power of two
    BF16: tl.constexpr,
    ONLY_PRE: tl.constexpr,  # a collapse: projection [N, NUMBERS], base [N], scales [1]; post and combination are none
    BLOCK: tl.constexpr,
):
    """grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    line = tl.arange(0, SIDE)
    inside = (line < N)[:, None] & (line < N)[None, :]
    pair = 2 * N + line[:, None] * N + line[None, :]  # rows of the projection that make the combination
    raw_pre, raw_post = tl.zeros((SIDE,), tl.float32), tl.zeros((SIDE,), tl.float32)
    raw = tl.zeros((SIDE, SIDE), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, NUMBERS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        there = column < NUMBERS
        x = load_float32(streams + row * NUMBERS + column, there, BF16)
        mask = (line < N)[:, None] & there[None, :]
        at = projection + line[:, None] * NUMBERS + column[None, :]
        raw_pre += tl.sum(tl.load(at, mask=mask, other=0.0) * x[None, :], 1)
        if not ONLY_PRE:
            raw_post += tl.sum(tl.load(at + N * NUMBERS, mask=mask, other=0.0) * x[None, :], 1)
            at = projection + pair[:, :, None] * NUMBERS + column[None, None, :]
            weight = tl.load(at, mask=inside[:, :, None] & there[None, None, :], other=0.0)
            raw += tl.sum(weight * x[None, None, :], 2)
        squares += x * x
    norm = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / NUMBERS + rms_eps)
    bias = tl.load(base + line, mask=line < N, other=0.0)
    tl.store(pre + row * N + line, _sigmoid(raw_pre * norm * tl.load(scales) + bias) + floor, mask=line < N)
    if not ONLY_PRE:
        bias = tl.load(base + N + line, mask=line < N, other=0.0)
        tl.store(post + row * N + line, 2.0 * _sigmoid(raw_post * norm * tl.load(scales + 1) + bias), mask=line < N)
        square = raw * norm * tl.load(scales + 2) + tl.load(base + pair, mask=inside, other=0.0)
        square = tl.where(inside, square, float("-inf"))
        top = tl.max(square, 1)
        square = tl.exp(square - tl.where(line < N, top, 0.0)[:, None])
        square = tl.where(inside, square / tl.sum(square, 1)[:, None] + floor, 0.0)
        square = tl.where(inside, square / (tl.sum(square, 0) + floor)[None, :], 0.0)
        for _ in range(1, iterations):
            square = tl.where(inside, square / (tl.sum(square, 1) + floor)[:, None], 0.0)
            square = tl.where(inside, square / (tl.sum(square, 0) + floor)[None, :], 0.0)
        tl.store(combination + row * N * N + line[:, None] * N + line[None, :], square, mask=inside)


@triton.jit
def _collapse(
    streams,  # pointer to float32 or int16 (the bits of bfloat16) [rows, N, DIM]
    pre,  # pointer to float32 [rows, N]
    out,  # pointer to float32 [rows, DIM]
    N: tl.constexpr,
    DIM: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (rows, ceil(DIM / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(N):
        x = load_float32(streams + (row * N + i) * DIM + column, column < DIM, BF16)
        total += tl.load(pre + row * N + i) * x
    tl.store(out + row * DIM + column, total, mask=column < DIM)


@triton.jit
def _spread(
    streams,  # pointer to float32 or int16 (the bits of bfloat16) [rows, N, DIM]
    output,  # pointer to float32 or int16 [rows, DIM]
    post,  # pointer to float32 [rows, N]
    combination,  # pointer to float32 [rows, N, N]
    out,  # pointer as streams
    N: tl.constexpr,
    DIM: tl.constexpr,
    BF16: tl.constexpr,
    OUTPUT_BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (rows, ceil(DIM / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < DIM
    y = load_float32(output + row * DIM + column, there, OUTPUT_BF16)
    for k in tl.static_range(N):
        total = tl.load(post + row * N + k) * y
        for j in tl.static_range(N):
            x = load_float32(streams + (row * N + j) * DIM + column, there, BF16)
            total += tl.load(combination + (row * N + j) * N + k) * x
        store_float32(out + (row * N + k) * DIM + column, total, there, BF16)


# -------------------------------------------------------------------------------------------------------------- launch


def mixing(streams: torch.Tensor, weights: MixingWeights, *, rms_eps: float, floor: float, iterations: int) -> Mixing:
    """As hyper_connections.mixing; streams and weights contiguous."""
    rows, n, _ = streams.shape
    mixed = Mixing(
        torch.empty(rows, n, device=streams.device),
        torch.empty(rows, n, device=streams.device),
        torch.empty(rows, n, n, device=streams.device),
    )
    _weigh(streams, weights, mixed, n * (2 + n), rms_eps, floor, iterations)
    return mixed


def collapse_weights(streams: torch.Tensor, weights: CollapseWeights, *, rms_eps: float, floor: float) -> torch.Tensor:
    """As hyper_connections.collapse_weights; streams and weights contiguous."""
    rows, n, _ = streams.shape
    pre = torch.empty(rows, n, device=streams.device)
    _weigh(streams, weights, Mixing(pre, pre, pre), n, rms_eps, floor, 1)
    return pre


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """As hyper_connections.collapse; streams contiguous."""
    rows, n, dim = streams.shape
    _check("streams", streams)
    if pre.shape != (rows, n):
        raise ValueError(f"pre {tuple(pre.shape)} does not fit streams {tuple(streams.shape)}")
    out = torch.empty(rows, dim, device=streams.device)
    if rows:
        _collapse[(rows, triton.cdiv(dim, _BLOCK))](
            float_words(streams), pre.contiguous(), out, N=n, DIM=dim, BF16=streams.dtype is torch.bfloat16,
            BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def spread(streams: torch.Tensor, output: torch.Tensor, mixed: Mixing) -> torch.Tensor:
    """As hyper_connections.spread; streams and output contiguous."""
    rows, n, dim = streams.shape
    _check("streams", streams)
    _check("a block's output", output)
    shapes = (tuple(output.shape), tuple(mixed.post.shape), tuple(mixed.combination.shape))
    if shapes != ((rows, dim), (rows, n), (rows, n, n)):
        raise ValueError(f"output, post and combination {shapes} do not fit streams {tuple(streams.shape)}")
    out = torch.empty_like(streams)
    if rows:
        _spread[(rows, triton.cdiv(dim, _BLOCK))](
            float_words(streams), float_words(output), mixed.post.contiguous(), mixed.combination.contiguous(),
            float_words(out), N=n, DIM=dim, BF16=streams.dtype is torch.bfloat16,
            OUTPUT_BF16=output.dtype is torch.bfloat16, BLOCK=_BLOCK,
        )  # fmt: skip
    return out


def _weigh(
    streams: torch.Tensor, weights: MixingWeights | CollapseWeights, mixed: Mixing, outs: int, rms_eps: float,
    floor: float, iterations: int,
) -> None:  # fmt: skip
    rows, n, dim = streams.shape
    _check("streams", streams)
    scales = 1 if isinstance(weights, CollapseWeights) else 3
    for name, shape in (("projection", (outs, n * dim)), ("base", (outs,)), ("scale", (scales,))):
        weight: torch.Tensor = getattr(weights, name)
        if weight.shape != shape or weight.dtype is not torch.float32 or not weight.is_contiguous():
            raise ValueError(f"{name} is contiguous float32 {shape}, not {weight.dtype} {tuple(weight.shape)}")
    if rows:
        _mixing[(rows,)](
            float_words(streams), weights.projection, weights.base, weights.scale, *mixed, rms_eps, floor, iterations,
            N=n, NUMBERS=n * dim, SIDE=triton.next_power_of_2(n), BF16=streams.dtype is torch.bfloat16,
            ONLY_PRE=scales == 1, BLOCK=_BLOCK,
        )  # fmt: skip


def _check(what: str, x: torch.Tensor) -> None:
    if x.dtype not in (torch.float32, torch.bfloat16) or not x.is_contiguous():
        raise ValueError(f"{what}: contiguous float32 or bfloat16, not {x.dtype} {x.stride()}")
