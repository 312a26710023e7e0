"""The Triton kernel of page_read.py: a few persistent programs that copy spans, each with many loads in flight.

A span is cut into pieces and a tile is some pieces, of one span or of several small ones: every program copies tile
after tile, in the order of the list, with 16-byte accesses where the sizes allow it. A tile is 64 KiB in registers: so
many bytes a program has under way, each warp its own part of them, and while they come the numbers of the next tile do.
No program waits for another, so none waits for ever. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tailrace.kernels.device_memory import Memory
from tailrace.kernels.page_read import DEFAULT_PROGRAMS

_WORDS = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the kernel. `tile_bytes`: power of two; `warps`, `stages`: of a program.

    On an H200 the default is the fastest of those tried for pages of 4 to 64 KiB; stages through shared memory (2 and
    more) were slower, tiles of 128 KiB need more registers than there are.
    """

    tile_bytes: int = 64 << 10
    warps: int = 32
    stages: int = 1


DEFAULT_SHAPE = Shape()


# Not specialized: a job of another size must not wait for a compilation.
@triton.jit(do_not_specialize=["n", "units", "stride", "pieces", "tiles"])
def _read_spans(
    dst,  # pointer to words
    src,  # pointer to words
    numbers,  # pointer to int32 [2, n]: of src, of dst
    n,
    units,  # of a span
    stride,  # units from one number to the next
    pieces,  # of a span: ceil(units * UNIT / PIECE)
    tiles,  # ceil(n * pieces / ROWS)
    UNIT: tl.constexpr,  # words of one
    ROWS: tl.constexpr,  # pieces of a tile
    PIECE: tl.constexpr,  # words of a piece
    STAGES: tl.constexpr,
):
    """grid (programs,)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, PIECE)
    first, step = tl.program_id(0), tl.num_programs(0)
    span, inside = _span_of(first, row, pieces, n, ROWS)
    at = tl.load(numbers + span, mask=inside, other=0)
    to = tl.load(numbers + n + span, mask=inside, other=0)
    for tile in tl.range(first, tiles, step, num_stages=STAGES):
        next_span, next_inside = _span_of(tile + step, row, pieces, n, ROWS)  # so that no load of data waits for it
        next_at = tl.load(numbers + next_span, mask=next_inside, other=0)
        next_to = tl.load(numbers + n + next_span, mask=next_inside, other=0)
        word = ((tile * ROWS + row - span * pieces) * PIECE)[:, None] + column[None, :]
        mask = inside[:, None] & (word < units * UNIT)
        first_read = at.to(tl.int64) * stride * UNIT  # 64 bits: a pool passes 2^31 words
        x = tl.load(src + first_read[:, None] + word, mask=mask)
        tl.store(dst + (to.to(tl.int64) * stride * UNIT)[:, None] + word, x, mask=mask)
        span, inside, at, to = next_span, next_inside, next_at, next_to


@triton.jit
def _span_of(tile, row, pieces, n, ROWS: tl.constexpr):
    """The span of each row of a tile, and whether there is one."""
    span = (tile * ROWS + row) // pieces
    return span, span < n


class _Words:
    """A memory as Triton takes a pointer: a peer's need not be on a device that torch knows."""

    def __init__(self, memory: Memory, dtype: torch.dtype) -> None:
        self._address, self.dtype = memory.address, dtype

    def data_ptr(self) -> int:
        return self._address


def read_spans(
    dst: Memory,
    src: Memory,
    numbers: torch.Tensor,
    length: int,
    stride: int,
    unit: int,
    programs: int = DEFAULT_PROGRAMS,
    shape: Shape = DEFAULT_SHAPE,
) -> None:
    """As page_read.read_spans."""
    n = numbers.shape[1]
    if not n:
        return
    dtype = _WORDS[unit]
    words = length * unit // dtype.itemsize
    tile = shape.tile_bytes // 4  # words are fewer bytes only where nothing is aligned
    piece = min(triton.next_power_of_2(words), tile)
    rows, pieces = tile // piece, triton.cdiv(words, piece)
    tiles = triton.cdiv(n * pieces, rows)
    if (tiles + programs) * rows >= 1 << 31:
        raise ValueError(f"{n} spans of {length} units of {unit} bytes are more than one launch takes")
    _read_spans[(min(programs, tiles),)](
        _pointer(dst, dtype), _pointer(src, dtype), numbers, n, length, stride, pieces, tiles,
        UNIT=unit // dtype.itemsize, ROWS=rows, PIECE=piece, STAGES=shape.stages, num_warps=shape.warps,
    )  # fmt: skip


def _pointer(memory: Memory, dtype: torch.dtype) -> Any:
    if memory.device.type == "cuda":
        return _Words(memory, dtype)
    whole = memory.tensor[: memory.nbytes // dtype.itemsize * dtype.itemsize]
    return whole.view(dtype)  # the interpreter takes tensors only
