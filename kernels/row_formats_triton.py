"""The Triton kernels of row_formats.py: rows of float32 to packed bytes anywhere in memory and back, one pass each.

    pack, unpack              as the methods of RowFormat
    write_rows, read_rows     as the functions of row_formats.py: pack and scatter, gather and unpack

Bytes equal the twin's, but for the bits of a bfloat16 NaN. A row may begin at any byte, so all is stored as bytes. A
program works on BLOCK rows. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.page_codecs_triton import float_words, from_e4m3, load_float32, to_e4m3
from tailrace.kernels.row_formats import FP4_E4M3_FLOOR, FP4_UE8M0_FLOOR, FP8_FLOOR, PackedRows, RowFormat

_NUMBERS = 4096  # a program
_INFINITY = tl.constexpr(0x7F800000)
_ONE = tl.constexpr(0x3F800000)
_TOP8, _TOP4 = tl.constexpr(0x43E00000), tl.constexpr(0x40C00000)  # bits of 448 and of 6
_FLOOR8, _FLOOR4, _FLOOR4_E4M3 = tl.constexpr(FP8_FLOOR), tl.constexpr(FP4_UE8M0_FLOOR), tl.constexpr(FP4_E4M3_FLOOR)


@triton.jit
def row_begin(offsets: tl.tensor, row: tl.tensor, mask: tl.tensor, ROW_BYTES: tl.constexpr, ANYWHERE: tl.constexpr):
    """First byte of each row, 64 bits: offsets[row] if ANYWHERE, else rows stand one behind the other."""
    return tl.load(offsets + row, mask=mask, other=0) if ANYWHERE else row.to(tl.int64) * ROW_BYTES


@triton.jit
def finite_top(bits: tl.tensor, finite: tl.tensor, FLOOR: tl.constexpr):
    """Largest magnitudes by their bits -> float32, at least FLOOR; 1 where not finite."""
    return tl.maximum(tl.where(finite, bits, _ONE).to(tl.float32, bitcast=True), FLOOR)


@triton.jit
def power_of_two(code: tl.tensor):
    """ue8m0 code int32 -> float32; 0 is 2^-127, 255 is NaN."""
    bits = tl.where(code == 0, 1 << 22, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def from_e4m3_or_nan(code: tl.tensor):
    return tl.where((code & 0x7F) == 0x7F, float("nan"), from_e4m3(code))


@triton.jit
def to_e2m1(y: tl.tensor):
    """float32 -> int32 codes 0..15, to nearest, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | tl.where(bits < 0, 8, 0)


@triton.jit
def from_e2m1(code: tl.tensor):
    """int32 codes 0..15 -> float32: halves up to 2, then 3, 4, 6."""
    low = code & 7
    size = tl.where(low < 4, low * 0.5, tl.where(low == 4, 2.0, tl.where(low == 5, 3.0, tl.where(low == 6, 4.0, 6.0))))
    return (size.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def bf16_bits(x: tl.tensor):
    """float32 -> int32 with the bits of bfloat16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC0, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF)


@triton.jit
def load_bytes(pointers: tl.tensor, mask: tl.tensor, SIZE: tl.constexpr):
    """SIZE little-endian bytes from anywhere -> int32."""
    word = tl.load(pointers, mask=mask, other=0).to(tl.int32)
    for i in tl.static_range(1, SIZE):
        word |= tl.load(pointers + i, mask=mask, other=0).to(tl.int32) << (8 * i)
    return word


@triton.jit
def store_bytes(pointers: tl.tensor, word: tl.tensor, mask: tl.tensor, SIZE: tl.constexpr):
    for i in tl.static_range(SIZE):
        tl.store(pointers + i, ((word >> (8 * i)) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def _plain_rows(
    x,  # pointer to float32 [n, DIM]
    memory,  # pointer to uint8
    offsets,  # pointer to int64 [n]; anything if not ANYWHERE
    n,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,  # DIM rounded up to a power of two
    SIZE: tl.constexpr,  # 4: float32, 2: bfloat16
    ROW_BYTES: tl.constexpr,
    ANYWHERE: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (ceil(n / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, COLUMNS)
    mask = (row < n)[:, None] & (column < DIM)[None, :]
    at = memory + (row_begin(offsets, row, row < n, ROW_BYTES, ANYWHERE)[:, None] + (column * SIZE)[None, :])
    number = x + (row.to(tl.int64)[:, None] * DIM + column[None, :])
    if PACKS:
        value = tl.load(number, mask=mask, other=0.0)
        if SIZE == 4:
            store_bytes(at, value.to(tl.int32, bitcast=True), mask, 4)
        else:
            store_bytes(at, bf16_bits(value), mask, 2)
    else:
        word = load_bytes(at, mask, SIZE)
        if SIZE == 2:
            word = word << 16
        tl.store(number, word.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _fp8_rows(
    x,  # pointer to float32 [n, WIDTH + TAIL]
    memory,  # pointer to uint8
    offsets,  # pointer to int64 [n]; anything if not ANYWHERE
    n,
    WIDTH: tl.constexpr,  # numbers in e4m3
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,  # TILE rounded up to a power of two
    TILES: tl.constexpr,
    TILES_COLUMNS: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    PAD: tl.constexpr,
    SCALE_BYTES: tl.constexpr,  # 1: ue8m0, 4: float32
    ROW_BYTES: tl.constexpr,
    ANYWHERE: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (ceil(n / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < n
    begin = row_begin(offsets, row, there, ROW_BYTES, ANYWHERE)
    first = row.to(tl.int64) * (WIDTH + TAIL)
    tile, inside = tl.arange(0, TILES_COLUMNS), tl.arange(0, TILE_COLUMNS)
    column = tile[:, None] * TILE + inside[None, :]
    used = (inside < TILE)[None, :] & (column < WIDTH)
    mask = there[:, None, None] & used[None, :, :]
    number = x + (first[:, None, None] + column[None, :, :])
    code_at = memory + (begin[:, None, None] + column[None, :, :])
    scale_at = memory + (begin[:, None] + (WIDTH + tile * SCALE_BYTES)[None, :])
    scale_mask = there[:, None] & (tile < TILES)[None, :]
    if PACKS:
        value = tl.load(number, mask=mask, other=0.0)
        bits = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
        finite = bits < _INFINITY
        top = finite_top(bits, finite, _FLOOR8)
        value = tl.where(finite[:, :, None], value, 0.0)
        if SCALE_BYTES == 1:
            exponent = (top.to(tl.int32, bitcast=True) - _TOP8 + 0x7FFFFF) >> 23
            y = value * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, :, None]
            store_bytes(scale_at, tl.where(finite, exponent + 127, 255), scale_mask, 1)
        else:
            scale = tl.div_rn(top, tl.full((BLOCK, TILES_COLUMNS), 448.0, tl.float32))
            y = tl.div_rn(value, tl.broadcast_to(scale[:, :, None], (BLOCK, TILES_COLUMNS, TILE_COLUMNS)))
            store_bytes(scale_at, tl.where(finite, scale.to(tl.int32, bitcast=True), 0x7FC00000), scale_mask, 4)
        store_bytes(code_at, to_e4m3(tl.minimum(tl.maximum(y, -448.0), 448.0)), mask, 1)
        for i in tl.static_range(PAD):
            tl.store(memory + begin + (WIDTH + TILES * SCALE_BYTES + i), tl.zeros((BLOCK,), tl.uint8), mask=there)
    else:
        word = load_bytes(scale_at, scale_mask, SCALE_BYTES)
        scale = power_of_two(word) if SCALE_BYTES == 1 else word.to(tl.float32, bitcast=True)
        value = from_e4m3_or_nan(load_bytes(code_at, mask, 1)) * scale[:, :, None]
        tl.store(number, value, mask=mask)
    if TAIL:
        last = tl.arange(0, TAIL_COLUMNS)
        mask = there[:, None] & (last < TAIL)[None, :]
        number = x + (first[:, None] + (WIDTH + last)[None, :])
        at = memory + (begin[:, None] + (WIDTH + TILES * SCALE_BYTES + PAD + 2 * last)[None, :])
        if PACKS:
            store_bytes(at, bf16_bits(tl.load(number, mask=mask, other=0.0)), mask, 2)
        else:
            tl.store(number, (load_bytes(at, mask, 2) << 16).to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _fp4_rows(
    x,  # pointer to float32 [n, DIM]
    memory,  # pointer to uint8
    offsets,  # pointer to int64 [n]; anything if not ANYWHERE
    n,
    DIM: tl.constexpr,
    HALF: tl.constexpr,  # pairs of a group
    HALF_COLUMNS: tl.constexpr,  # HALF rounded up to a power of two
    GROUPS: tl.constexpr,
    GROUPS_COLUMNS: tl.constexpr,
    E4M3: tl.constexpr,  # form of the scales, else ue8m0
    ROW_BYTES: tl.constexpr,
    ANYWHERE: tl.constexpr,
    PACKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (ceil(n / BLOCK),)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < n
    begin = row_begin(offsets, row, there, ROW_BYTES, ANYWHERE)
    group, inside = tl.arange(0, GROUPS_COLUMNS), tl.arange(0, HALF_COLUMNS)
    pair = group[:, None] * HALF + inside[None, :]
    mask = there[:, None, None] & ((inside < HALF)[None, :] & (group < GROUPS)[:, None])[None, :, :]
    number = x + (row.to(tl.int64)[:, None, None] * DIM + 2 * pair[None, :, :])
    code_at = memory + (begin[:, None, None] + pair[None, :, :])
    scale_at = memory + (begin[:, None] + (DIM // 2 + group)[None, :])
    scale_mask = there[:, None] & (group < GROUPS)[None, :]
    if PACKS:
        even = tl.load(number, mask=mask, other=0.0)
        odd = tl.load(number + 1, mask=mask, other=0.0)
        bits = tl.maximum(even.to(tl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        bits = tl.max(bits, 2)
        finite = bits < _INFINITY
        if E4M3:
            top = finite_top(bits, finite, _FLOOR4_E4M3)
            code = to_e4m3(tl.minimum(tl.div_rn(top, tl.full((BLOCK, GROUPS_COLUMNS), 6.0, tl.float32)), 448.0))
            scale = from_e4m3(code)
            store_bytes(scale_at, tl.where(finite, code, 0x7F), scale_mask, 1)
        else:
            top = finite_top(bits, finite, _FLOOR4)
            code = ((top.to(tl.int32, bitcast=True) - _TOP4 + 0x7FFFFF) >> 23) + 127
            scale = power_of_two(code)
            store_bytes(scale_at, tl.where(finite, code, 255), scale_mask, 1)
        steps = tl.broadcast_to(scale[:, :, None], (BLOCK, GROUPS_COLUMNS, HALF_COLUMNS))
        low = to_e2m1(tl.div_rn(tl.where(finite[:, :, None], even, 0.0), steps))
        high = to_e2m1(tl.div_rn(tl.where(finite[:, :, None], odd, 0.0), steps))
        store_bytes(code_at, low | (high << 4), mask, 1)
    else:
        code = load_bytes(scale_at, scale_mask, 1)
        scale = from_e4m3_or_nan(code) if E4M3 else power_of_two(code)
        both = load_bytes(code_at, mask, 1)
        tl.store(number, from_e2m1(both & 15) * scale[:, :, None], mask=mask)
        tl.store(number + 1, from_e2m1(both >> 4) * scale[:, :, None], mask=mask)


@triton.jit
def load_rows(
    memory: tl.tensor,  # pointer to float32 [n, DIM], to int16 [n, DIM] (the bits of bfloat16), or to uint8
    offsets: tl.tensor,  # pointer to int64 [n], the first byte of each row, if packed
    row: tl.tensor,  # [BLOCK] int64
    there: tl.tensor,  # [BLOCK] bool: others are read as 0
    column: tl.tensor,  # [COLUMNS] int32; what is not below LAST is read as 0
    DIM: tl.constexpr,
    LAST: tl.constexpr,
    KIND: tl.constexpr,  # float32, bfloat16, or as RowFormat.kind
    WIDTH: tl.constexpr,  # as in the kernels above; for packed plain rows 0
    TILE: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,  # bytes of a number that is no code
    TAIL_AT: tl.constexpr,  # byte at which numbers that are no codes begin
):
    """Numbers of rows, packed or not: [BLOCK, COLUMNS] float32. What other kernels read rows with."""
    mask = there[:, None] & (column < LAST)[None, :]
    if KIND == "float32":
        value = tl.load(memory + (row[:, None] * DIM + column[None, :]), mask=mask, other=0.0)
    elif KIND == "bfloat16":
        value = load_float32(memory + (row[:, None] * DIM + column[None, :]), mask, True)
    elif KIND == "fp4":
        begin = memory + tl.load(offsets + row, mask=there, other=0)[:, None]
        both = load_bytes(begin + (column // 2)[None, :], mask, 1)
        value = from_e2m1((both >> ((column & 1) * 4)[None, :]) & 15)
        code = load_bytes(begin + (DIM // 2 + column // TILE)[None, :], mask, 1)
        scale = from_e4m3_or_nan(code) if SCALE == "e4m3" else power_of_two(code)
        value = tl.where(mask, value * scale, 0.0)
    else:
        begin = memory + tl.load(offsets + row, mask=there, other=0)[:, None]
        value = tl.zeros(mask.shape, tl.float32)
        if KIND == "fp8":
            is_code = mask & (column < WIDTH)[None, :]
            value = from_e4m3_or_nan(load_bytes(begin + column[None, :], is_code, 1))
            if SCALE == "ue8m0":
                scale = power_of_two(load_bytes(begin + (WIDTH + column // TILE)[None, :], is_code, 1))
            else:
                word = load_bytes(begin + (WIDTH + 4 * (column // TILE))[None, :], is_code, 4)
                scale = word.to(tl.float32, bitcast=True)
            value = tl.where(is_code, value * scale, 0.0)
        if WIDTH < LAST:
            is_last = mask & (column >= WIDTH)[None, :]
            word = load_bytes(begin + (TAIL_AT + SIZE * (column - WIDTH))[None, :], is_last, SIZE)
            if SIZE == 2:
                word = word << 16
            value = tl.where(is_last, word.to(tl.float32, bitcast=True), value)
    return value


# -------------------------------------------------------------------------------------------------------------- launch


def row_arguments(rows: torch.Tensor | PackedRows) -> tuple[torch.Tensor, torch.Tensor, dict[str, object]]:
    """(memory, offsets, constants) of `load_rows`.

    Raises:
        ValueError: rows that are not contiguous, of another dtype, or packed ones at offsets that are not int64.
    """
    if isinstance(rows, PackedRows):
        fmt, memory, offsets = rows.fmt, rows.memory, rows.offsets
        _check_packed(fmt, memory, offsets, len(offsets))
        width = 0 if fmt.kind == "plain" else fmt.dim - fmt.tail_dims
        tail_at = fmt.row_bytes - 2 * fmt.tail_dims if fmt.kind == "fp8" else 0
        size = fmt.dtype.itemsize if fmt.kind == "plain" else 2
        return memory, offsets, {
            "KIND": fmt.kind, "WIDTH": width, "TILE": max(1, fmt.tile), "SCALE": fmt.scale, "SIZE": size,
            "TAIL_AT": tail_at,
        }  # fmt: skip
    if rows.dtype not in (torch.float32, torch.bfloat16) or not rows.is_contiguous():
        raise ValueError(f"rows are contiguous float32 or bfloat16, not {rows.dtype} {rows.stride()}")
    kind = str(rows.dtype).removeprefix("torch.")
    words = float_words(rows)
    return words, words, {"KIND": kind, "WIDTH": 0, "TILE": 1, "SCALE": "", "SIZE": 0, "TAIL_AT": 0}


def on_tensor_cores(dtype: torch.dtype) -> bool:
    """Whether products are made of bfloat16 numbers; not in the interpreter, which has none."""
    return dtype is torch.bfloat16 and not triton.knobs.runtime.interpret


def pack(fmt: RowFormat, x: torch.Tensor) -> torch.Tensor:
    """As RowFormat.pack."""
    rows = torch.empty(len(x), fmt.row_bytes, dtype=torch.uint8, device=x.device)
    _launch(fmt, x, rows, None, packs=True)
    return rows


def unpack(fmt: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    """As RowFormat.unpack."""
    if rows.dim() != 2 or rows.shape[1] != fmt.row_bytes:
        raise ValueError(f"packed rows of {fmt.name} are uint8 [n, {fmt.row_bytes}], not {tuple(rows.shape)}")
    x = torch.empty(len(rows), fmt.dim, device=rows.device)
    _launch(fmt, x, rows, None, packs=False)
    return x


def write_rows(fmt: RowFormat, memory: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
    """As row_formats.write_rows."""
    _launch(fmt, x, memory, offsets, packs=True)


def read_rows(fmt: RowFormat, memory: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """As row_formats.read_rows."""
    x = torch.empty(len(offsets), fmt.dim, device=memory.device)
    _launch(fmt, x, memory, offsets, packs=False)
    return x


def _check_packed(fmt: RowFormat, memory: torch.Tensor, offsets: torch.Tensor | None, n: int) -> None:
    if memory.dtype is not torch.uint8 or not memory.is_contiguous():
        raise ValueError(f"packed rows of {fmt.name} stand in contiguous uint8 memory, not {memory.dtype}")
    if offsets is None:
        return
    if offsets.shape != (n,) or offsets.dtype is not torch.int64 or not offsets.is_contiguous():
        raise ValueError(f"offsets of {n} rows are contiguous int64 [{n}], not {offsets.dtype} {tuple(offsets.shape)}")


def _launch(
    fmt: RowFormat, x: torch.Tensor, memory: torch.Tensor, offsets: torch.Tensor | None, *, packs: bool
) -> None:
    n = len(x)
    if x.dim() != 2 or x.shape[1] != fmt.dim or x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"rows of {fmt.name} are contiguous float32 [n, {fmt.dim}], not {x.dtype} {tuple(x.shape)} {x.stride()}"
        )
    _check_packed(fmt, memory, offsets, n)
    if not n:
        return
    up = triton.next_power_of_2
    shared = {"ROW_BYTES": fmt.row_bytes, "ANYWHERE": offsets is not None, "PACKS": packs}
    arguments = (x, memory, memory if offsets is None else offsets, n)
    block = max(1, _NUMBERS // up(fmt.dim))
    grid = (triton.cdiv(n, block),)
    if fmt.kind == "plain":
        _plain_rows[grid](*arguments, DIM=fmt.dim, COLUMNS=up(fmt.dim), SIZE=fmt.dtype.itemsize, BLOCK=block, **shared)
    elif fmt.kind == "fp8":
        width = fmt.dim - fmt.tail_dims
        tiles = triton.cdiv(width, fmt.tile)
        _fp8_rows[grid](
            *arguments, WIDTH=width, TILE=fmt.tile, TILE_COLUMNS=up(fmt.tile), TILES=tiles, TILES_COLUMNS=up(tiles),
            TAIL=fmt.tail_dims, TAIL_COLUMNS=up(max(1, fmt.tail_dims)), PAD=fmt.pad,
            SCALE_BYTES=1 if fmt.scale == "ue8m0" else 4, BLOCK=block, **shared,
        )  # fmt: skip
    else:
        groups = fmt.dim // fmt.tile
        _fp4_rows[grid](
            *arguments, DIM=fmt.dim, HALF=fmt.tile // 2, HALF_COLUMNS=up(fmt.tile // 2), GROUPS=groups,
            GROUPS_COLUMNS=up(groups), E4M3=fmt.scale == "e4m3", BLOCK=block, **shared,
        )  # fmt: skip
