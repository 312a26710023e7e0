"""The Triton kernels of page_codecs.py, same signatures: gather and encode, decode and scatter, one pass each.

Rounding is done on the bits, because the interpreter and the hardware differ in how they convert bfloat16 and e4m3; no
product is followed by a sum that a fused multiply-add could round otherwise. So the wire rows equal the twin's to the
bit. A program works on `BLOCK` rows (int4: pieces) of one page. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tailrace.kernels.page_codecs import INT4_GROUP, hadamard_width, int4_bytes, rows_and_dim, scaled_bytes

_SMALLEST_STEP = tl.constexpr(2.0**-126)
_INFINITY = tl.constexpr(0x7F800000)
_BLOCK_NUMBERS, _INT4_BLOCK_NUMBERS = 4096, 2048  # numbers a program


@triton.jit
def load_float32(words: tl.tensor, mask: tl.tensor, BF16: tl.constexpr):
    """words: pointer to int16 (the bits of bfloat16), float16 or float32."""
    if BF16:
        bits = tl.load(words, mask=mask, other=0).to(tl.int32) & 0xFFFF
        return (bits << 16).to(tl.float32, bitcast=True)
    return tl.load(words, mask=mask, other=0).to(tl.float32)


@triton.jit
def store_float32(words: tl.tensor, x: tl.tensor, mask: tl.tensor, BF16: tl.constexpr):
    """The reverse of load_float32, rounded to nearest, ties to even."""
    if BF16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(words, tl.where(x != x, 0x7FC0, rounded).to(tl.int16), mask=mask)
    else:
        tl.store(words, x.to(words.dtype.element_ty), mask=mask)


@triton.jit
def _to_int(y):
    """float32 of less than 2^22 -> int32, to nearest, ties to even: the bits of y + 1.5 * 2^23."""
    return (y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def to_e4m3(y: tl.tensor):
    """float32 of at most 448 -> int32 with the bits of e4m3."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)  # below 2^-6 steps are 2^-9


@triton.jit
def from_e4m3(q: tl.tensor):
    """int32 with the bits of e4m3 -> float32: normal ones by their exponent, the others as multiples of 2^-9."""
    magnitude = q & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    return (value.to(tl.int32, bitcast=True) | ((q & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _encode_scaled(
    words,  # pointer to int16 | float16 | float32 [num_pages, rows, dim]
    pages,  # pointer to int64 [n]
    out,  # pointer to uint8 [n, bound]
    scales,  # the same memory, pointer to float32 [n, bound / 4]
    rows,
    bound,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # DIM rounded up to a power of two
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    E4M3: tl.constexpr,  # else int8
):
    """grid (n, ceil(rows / BLOCK))."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    first = tl.load(pages + at) * rows * DIM  # 64 bits: a pool passes 2^31 numbers
    number = row[:, None] * DIM + column[None, :]
    x = load_float32(words + first + number, mask, BF16)
    magnitude = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers, because NaN counts there
    finite = magnitude < _INFINITY
    top = tl.where(finite, magnitude, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(top, tl.full((BLOCK,), 448.0 if E4M3 else 127.0, tl.float32)), _SMALLEST_STEP)
    y = tl.div_rn(tl.where(finite[:, None], x, 0.0), tl.broadcast_to(scale[:, None], (BLOCK, COLUMNS)))
    q = to_e4m3(y) if E4M3 else _to_int(y)
    tl.store(out + at * bound + 4 * rows + number, (q & 0xFF).to(tl.uint8), mask=mask)
    tl.store(scales + at * (bound // 4) + row, tl.where(finite, scale, float("nan")), mask=row < rows)


@triton.jit
def _decode_scaled(
    data,  # pointer to uint8 [n, bound]
    scales,  # the same memory, pointer to float32 [n, bound / 4]
    words,  # pointer to int16 | float16 | float32 [num_pages, rows, dim]
    pages,  # pointer to int64 [n]
    rows,
    bound,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
    E4M3: tl.constexpr,
):
    """grid (n, ceil(rows / BLOCK))."""
    at = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    first = tl.load(pages + at) * rows * DIM
    number = row[:, None] * DIM + column[None, :]
    q = tl.load(data + at * bound + 4 * rows + number, mask=mask, other=0).to(tl.int32)
    value = from_e4m3(q) if E4M3 else ((q << 24) >> 24).to(tl.float32)
    scale = tl.load(scales + at * (bound // 4) + row, mask=row < rows, other=0)
    store_float32(words + first + number, value * scale[:, None], mask, BF16)


@triton.jit
def _add_pairs(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr):
    """x [ROWS, WIDTH]: sums and differences of numbers that stand HALF apart."""
    pairs = tl.permute(tl.reshape(x, (ROWS, WIDTH // (2 * HALF), 2, HALF)), (0, 1, 3, 2))
    a, b = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (ROWS, WIDTH))


@triton.jit
def _rotate(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """x [ROWS, WIDTH] times the Hadamard matrix; WIDTH = 2^STEPS, the nearest numbers are added first."""
    for step in tl.static_range(STEPS):
        x = _add_pairs(x, ROWS, WIDTH, 1 << step)
    return x


@triton.jit
def _encode_int4(
    words,  # pointer to int16 | float16 | float32 [num_pages, pieces, width]
    pages,  # pointer to int64 [n]
    out,  # pointer to uint8 [n, bound]
    sides,  # the same memory, pointer to int16 [n, bound / 2]
    pieces,
    bound,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):
    """grid (n, ceil(pieces / BLOCK))."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    at = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < pieces
    first = tl.load(pages + at) * pieces * WIDTH
    number = piece[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    x = load_float32(words + first + number, tl.broadcast_to(inside[:, None], (BLOCK, WIDTH)), BF16)
    y = tl.reshape(_rotate(x * (1.0 / WIDTH), BLOCK, WIDTH, STEPS), (BLOCK, GROUPS, GROUP))
    finite = tl.max(y.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2) < _INFINITY
    y = tl.where(finite[:, :, None], y, 0.0)
    bits = tl.min(y, 2).to(tl.int32, bitcast=True)
    low = (tl.where(bits < 0, bits + 0xFFFF, bits) & -0x10000).to(tl.float32, bitcast=True)
    span = tl.max(y, 2) - low
    step = tl.div_rn(span, tl.full((BLOCK, GROUPS), 15.0, tl.float32))
    step = ((step.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    step = tl.maximum(step, _SMALLEST_STEP)
    finite = finite & (span < float("inf")) & (step < float("inf"))
    low, step = tl.where(finite, low, 0.0), tl.where(finite, step, 1.0)
    y = tl.where(finite[:, :, None], y - low[:, :, None], 0.0)
    q = _to_int(tl.minimum(tl.div_rn(y, tl.broadcast_to(step[:, :, None], (BLOCK, GROUPS, GROUP))), 15.0))
    halves = tl.permute(tl.reshape(tl.maximum(q, 0), (BLOCK, 2, WIDTH // 2)), (0, 2, 1))
    lower, upper = tl.split(halves)
    side = tl.arange(0, GROUPS)[None, :] * pieces + piece[:, None]
    outside = tl.broadcast_to(inside[:, None], (BLOCK, GROUPS))
    step = tl.where(finite, step, float("nan"))
    sides += at * (bound // 2)
    tl.store(sides + side, (low.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=outside)
    tl.store(sides + GROUPS * pieces + side, (step.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=outside)
    place = tl.arange(0, WIDTH // 2)[None, :] * pieces + piece[:, None]
    packed = out + at * bound + 4 * GROUPS * pieces
    tl.store(packed + place, (lower | (upper << 4)).to(tl.uint8), mask=inside[:, None])


@triton.jit
def _decode_int4(
    data,  # pointer to uint8 [n, bound]
    sides,  # the same memory, pointer to int16 [n, bound / 2]
    words,  # pointer to int16 | float16 | float32 [num_pages, pieces, width]
    pages,  # pointer to int64 [n]
    pieces,
    bound,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BF16: tl.constexpr,
):
    """grid (n, ceil(pieces / BLOCK))."""
    GROUPS: tl.constexpr = WIDTH // GROUP
    at = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = piece < pieces
    place = tl.arange(0, WIDTH // 2)[None, :] * pieces + piece[:, None]
    packed = tl.load(data + at * bound + 4 * GROUPS * pieces + place, mask=inside[:, None], other=0).to(tl.int32)
    codes = tl.permute(tl.join(packed & 15, packed >> 4), (0, 2, 1))
    y = tl.reshape(codes, (BLOCK, GROUPS, GROUP)).to(tl.float32)
    side = sides + at * (bound // 2) + tl.arange(0, GROUPS)[None, :] * pieces + piece[:, None]
    low = load_float32(side, tl.broadcast_to(inside[:, None], (BLOCK, GROUPS)), True)
    step = load_float32(side + GROUPS * pieces, tl.broadcast_to(inside[:, None], (BLOCK, GROUPS)), True)
    y = y * step[:, :, None] + low[:, :, None]  # 4 bits times 8 bits is exact, fused or not
    x = _rotate(tl.reshape(y, (BLOCK, WIDTH)), BLOCK, WIDTH, STEPS)
    first = tl.load(pages + at) * pieces * WIDTH
    number = piece[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    store_float32(words + first + number, x, tl.broadcast_to(inside[:, None], (BLOCK, WIDTH)), BF16)


# -------------------------------------------------------------------------------------------------------------- launch


def encode_int8(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """As page_codecs.encode_int8; rows of `out` begin at multiples of 16 bytes."""
    _scaled_launch(_encode_scaled, pool, pages, out, encodes=True, e4m3=False)


def decode_int8(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As page_codecs.decode_int8; rows of `data` begin at multiples of 16 bytes."""
    _scaled_launch(_decode_scaled, pool, pages, data, encodes=False, e4m3=False)


def encode_fp8(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """As page_codecs.encode_fp8; rows of `out` begin at multiples of 16 bytes."""
    _scaled_launch(_encode_scaled, pool, pages, out, encodes=True, e4m3=True)


def decode_fp8(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As page_codecs.decode_fp8; rows of `data` begin at multiples of 16 bytes."""
    _scaled_launch(_decode_scaled, pool, pages, data, encodes=False, e4m3=True)


def encode_int4(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """As page_codecs.encode_int4; rows of `out` begin at multiples of 16 bytes."""
    _int4_launch(_encode_int4, pool, pages, out, encodes=True)


def decode_int4(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As page_codecs.decode_int4; rows of `data` begin at multiples of 16 bytes."""
    _int4_launch(_decode_int4, pool, pages, data, encodes=False)


def float_words(pool: torch.Tensor) -> torch.Tensor:
    """A pool as the kernels take it: the bits of bfloat16, other float types as they are."""
    return pool.view(torch.int16) if pool.dtype is torch.bfloat16 else pool


def check_rows(rows: torch.Tensor, num_bytes: int) -> None:
    """Raises ValueError unless `rows` [n, at least num_bytes] uint8 is contiguous and aligned as the kernels need."""
    if rows.dtype is not torch.uint8 or not rows.is_contiguous() or rows.shape[1] != num_bytes or rows.data_ptr() % 16:
        raise ValueError(f"wire rows are contiguous uint8 [n, {num_bytes}] at a multiple of 16 bytes")


def _scaled_launch(
    kernel: Any, pool: torch.Tensor, pages: torch.Tensor, rows_out: torch.Tensor, *, encodes: bool, e4m3: bool
) -> None:
    rows, dim = rows_and_dim(pool.shape[1:])
    bound = scaled_bytes(pool.shape[1:])
    check_rows(rows_out, bound)
    columns = triton.next_power_of_2(dim)
    block = max(1, _BLOCK_NUMBERS // columns)
    wire = (rows_out, rows_out.view(torch.float32))
    first = (float_words(pool), pages)
    if encodes:
        rows_out[:, rows * (4 + dim) :] = 0
    if len(pages):
        kernel[(len(pages), triton.cdiv(rows, block))](
            *((*first, *wire) if encodes else (*wire, *first)), rows, bound,
            DIM=dim, COLUMNS=columns, BLOCK=block, BF16=pool.dtype is torch.bfloat16, E4M3=e4m3,
        )  # fmt: skip


def _int4_launch(
    kernel: Any, pool: torch.Tensor, pages: torch.Tensor, rows_out: torch.Tensor, *, encodes: bool
) -> None:
    rows, dim = rows_and_dim(pool.shape[1:])
    bound = int4_bytes(pool.shape[1:])
    check_rows(rows_out, bound)
    width = hadamard_width(dim)
    pieces = rows * (dim // width)
    block = max(1, _INT4_BLOCK_NUMBERS // width)
    wire = (rows_out, rows_out.view(torch.int16))
    first = (float_words(pool), pages)
    if encodes:
        rows_out[:, pieces * (width // 2 + width // INT4_GROUP * 4) :] = 0
    if len(pages):
        kernel[(len(pages), triton.cdiv(pieces, block))](
            *((*first, *wire) if encodes else (*wire, *first)), pieces, bound,
            WIDTH=width, STEPS=width.bit_length() - 1, GROUP=INT4_GROUP, BLOCK=block,
            BF16=pool.dtype is torch.bfloat16,
        )  # fmt: skip
