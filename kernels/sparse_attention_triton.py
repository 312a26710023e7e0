"""The Triton kernels of sparse_attention.py, same signature: rows may be numbers or packed, as they stand in a pool.

Each part of the rows, cut into `splits` pieces, gives a query's heads an unfinished sum, its largest logit and its
weight; a second kernel joins them with the sink. Decode, with few queries, has many splits; a chunk has one a part.
Products are made of bfloat16 numbers if q is bfloat16, sums in float32. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tailrace.kernels.page_codecs_triton import float_words, load_float32, store_float32
from tailrace.kernels.row_formats_triton import load_rows, on_tensor_cores, row_arguments
from tailrace.kernels.sparse_attention import PickedRows, RowRange, check_attention

_ROWS, _HEADS = 16, 16  # a step of a program; with 32 rows of 512 numbers registers spill on an H200, with 16 not
_PROGRAMS = 264  # that keep a GPU busy; what one call has less is made up by splits
_UNFINISHED = 1 << 26  # float32 numbers of unfinished sums held at once


@triton.jit
def _attend(
    q,  # pointer to float32 or int16 (the bits of bfloat16) [t, HEADS, DIM]
    memory,  # as load_rows
    offsets,
    index,  # pointer to int64 [t, picks] if PICKED, else to int64 [2, t]: first, end
    sums,  # pointer to float32 [pieces, t, HEADS, VALUES]
    tops,  # pointer to float32 [pieces, 2, t, HEADS]: largest logit, sum of the weights below it
    t,
    picks,
    piece,  # of the part's first split
    scale,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    VALUES: tl.constexpr,  # the first so many numbers of a row
    VALUE_COLUMNS: tl.constexpr,  # VALUES rounded up to a power of two, at least 16
    REST_COLUMNS: tl.constexpr,  # DIM - VALUES likewise, or 0
    PICKED: tl.constexpr,
    BF16: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    TAIL_AT: tl.constexpr,
):
    """grid (t, ceil(HEADS / HEAD_BLOCK), splits)."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, VALUE_COLUMNS)
    own = q + (query * HEADS + head)[:, None] * DIM
    q1 = load_float32(own + column[None, :], (head < HEADS)[:, None] & (column < VALUES)[None, :], BF16)
    if REST_COLUMNS:
        rest = VALUES + tl.arange(0, REST_COLUMNS)
        q2 = load_float32(own + rest[None, :], (head < HEADS)[:, None] & (rest < DIM)[None, :], BF16)
    if PICKED:
        low, high = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + picks
    else:
        low, high = tl.load(index + query), tl.load(index + t + query)
    each = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), tl.num_programs(2)), ROWS) * ROWS
    low += tl.program_id(2) * each
    high = tl.minimum(high, low + each)
    top = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32)
    weight = tl.zeros((HEAD_BLOCK,), tl.float32)
    total = tl.zeros((HEAD_BLOCK, VALUE_COLUMNS), tl.float32)
    for start in range(low, high, ROWS):
        at = start + tl.arange(0, ROWS)
        there = at < high
        row = at
        if PICKED:
            row = tl.load(index + query * picks + at, mask=there, other=-1)
            there = row >= 0
        k1 = load_rows(memory, offsets, row, there, column, DIM, VALUES, KIND, WIDTH, TILE, SCALE, SIZE, TAIL_AT)
        if TENSOR_CORES:
            k1 = k1.to(tl.bfloat16)
            logits = tl.dot(q1.to(tl.bfloat16), tl.trans(k1))
        else:
            logits = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        if REST_COLUMNS:
            k2 = load_rows(memory, offsets, row, there, rest, DIM, DIM, KIND, WIDTH, TILE, SCALE, SIZE, TAIL_AT)
            if TENSOR_CORES:
                logits += tl.dot(q2.to(tl.bfloat16), tl.trans(k2.to(tl.bfloat16)))
            else:
                logits += tl.dot(q2, tl.trans(k2), input_precision="ieee")
        logits = tl.where(there[None, :], logits * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(top - base)
        powers = tl.exp(logits - base[:, None])
        weight = weight * shrink + tl.sum(powers, 1)
        total = total * shrink[:, None]
        if TENSOR_CORES:
            total += tl.dot(powers.to(tl.bfloat16), k1)
        else:
            total += tl.dot(powers, k1, input_precision="ieee")
        top = higher
    piece += tl.program_id(2)
    place = (piece.to(tl.int64) * t + query) * HEADS + head
    sums += place[:, None] * VALUES + column[None, :]
    tl.store(sums, total, mask=(head < HEADS)[:, None] & (column < VALUES)[None, :])
    place += piece.to(tl.int64) * t * HEADS
    tl.store(tops + place, top, mask=head < HEADS)
    tl.store(tops + place + t * HEADS, weight, mask=head < HEADS)


@triton.jit
def _join(
    sums,  # as of _attend
    tops,
    sinks,  # pointer to float32 [HEADS]; anything if not SINKS
    out,  # pointer to float32 or int16 (the bits of bfloat16) [t, HEADS, VALUES]
    t,
    pieces,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    SINKS: tl.constexpr,
    BF16: tl.constexpr,
):
    """grid (t, HEADS)."""
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, VALUE_COLUMNS)
    own = query * HEADS + head
    step = tl.zeros((), tl.int64) + t * HEADS
    top = tl.load(sinks + head) if SINKS else tl.full((), float("-inf"), tl.float32)
    for piece in range(pieces):
        top = tl.maximum(top, tl.load(tops + 2 * piece * step + own))
    base = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp(tl.load(sinks + head) - base) if SINKS else tl.zeros((), tl.float32)
    total = tl.zeros((VALUE_COLUMNS,), tl.float32)
    for piece in range(pieces):
        power = tl.exp(tl.load(tops + 2 * piece * step + own) - base)
        weight += power * tl.load(tops + (2 * piece + 1) * step + own)
        total += power * tl.load(sums + (piece * step + own) * VALUES + column, mask=column < VALUES, other=0.0)
    result = tl.where(weight == 0.0, 0.0, total / weight)
    store_float32(out + own * VALUES + column, result, column < VALUES, BF16)


def sparse_attention(
    q: torch.Tensor,
    parts: Sequence[PickedRows | RowRange],
    scale: float,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """As sparse_attention.sparse_attention; everything contiguous, sinks float32, indices and spans int64."""
    t, heads, dim = q.shape
    width = check_attention(q, parts, sinks, value_dim)
    if q.dtype not in (torch.float32, torch.bfloat16) or not q.is_contiguous():
        raise ValueError(f"q is contiguous float32 or bfloat16, not {q.dtype} {q.stride()}")
    if sinks is not None and (sinks.dtype is not torch.float32 or not sinks.is_contiguous()):
        raise ValueError(f"sinks are contiguous float32, not {sinks.dtype} {sinks.stride()}")
    out = torch.empty(t, heads, width, dtype=q.dtype, device=q.device)
    here = [part for part in parts if len(part.rows) and (isinstance(part, RowRange) or part.index.shape[1])]
    blocks = triton.cdiv(heads, _HEADS)
    longest = [part.index.shape[1] if isinstance(part, PickedRows) else len(part.rows) for part in here]
    wanted = triton.cdiv(_PROGRAMS, max(1, t * blocks))
    splits = [min(wanted, triton.cdiv(length, _ROWS)) for length in longest]
    step = max(1, _UNFINISHED // max(1, sum(splits) * heads * width))
    for i in range(0, t, step):
        block = slice(i, min(t, i + step))
        _attend_block(q[block], here, splits, block, scale, sinks, out[block])
    return out


def _attend_block(
    q: torch.Tensor,
    parts: Sequence[PickedRows | RowRange],
    splits: Sequence[int],
    block: slice,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """q: [b, h, dim], the queries `block`;  out: [b, h, width]."""
    t, heads, dim = q.shape
    width = out.shape[-1]
    sums = torch.empty(sum(splits), t, heads, width, device=q.device)
    tops = torch.empty(sum(splits), 2, t, heads, device=q.device)
    columns = max(16, triton.next_power_of_2(width))
    rest = max(16, triton.next_power_of_2(dim - width)) if width < dim else 0
    piece = 0
    for part, pieces in zip(parts, splits, strict=True):
        memory, offsets, constants = row_arguments(part.rows)
        if isinstance(part, PickedRows):
            index, picks = _int64(part.index[block]), part.index.shape[1]
        else:
            index, picks = torch.stack((_int64(part.first[block]), _int64(part.end[block]))), 0
        _attend[(t, triton.cdiv(heads, _HEADS), pieces)](
            float_words(q), memory, offsets, index, sums, tops, t, picks, piece, scale,
            HEADS=heads, DIM=dim, VALUES=width, VALUE_COLUMNS=columns, REST_COLUMNS=rest,
            PICKED=isinstance(part, PickedRows), BF16=q.dtype is torch.bfloat16,
            TENSOR_CORES=on_tensor_cores(q.dtype), ROWS=_ROWS, HEAD_BLOCK=_HEADS, **constants,
        )  # fmt: skip
        piece += pieces
    _join[(t, heads)](
        sums, tops, sums if sinks is None else sinks, float_words(out), t, piece,
        HEADS=heads, VALUES=width, VALUE_COLUMNS=columns, SINKS=sinks is not None, BF16=q.dtype is torch.bfloat16,
    )  # fmt: skip


def _int64(numbers: torch.Tensor) -> torch.Tensor:
    if numbers.dtype is not torch.int64:
        raise ValueError(f"row numbers are int64, not {numbers.dtype}")
    return numbers.contiguous()
