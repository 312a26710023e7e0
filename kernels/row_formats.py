"""How a row of numbers becomes bytes in a packed pool, and back. Plain PyTorch, the CPU path, twin of
row_formats_triton.py, to the bit.

Every format is one row of bytes, its parts one behind the other, no part aligned (the bytes are what counts):

    plain      numbers of one dtype
    fp8_tiles  e4m3 [dim - tail] | a scale a tile | `pad` zero bytes | bfloat16 [tail]
    fp4_groups e2m1 [dim], two a byte, the lower nibble first | a scale a group

Scales, of the largest magnitude `amax` of a tile (the last tile of a row may be shorter) or group:

    ue8m0      fp8, fp4   one byte e + 127: 2^e, e = ceil(log2(amax / top)), top being 448 (fp8) or 6 (fp4)
    float32    fp8        amax / 448
    e4m3       fp4        amax / 6, rounded to e4m3, at most 448

Before that amax is raised to a floor: 1e-4 for fp8, 6 * 2^-126 for fp4 with ue8m0, 6 * 2^-9 (the smallest e4m3) for fp4
with e4m3. Numbers are divided by the scale, clipped to the top and rounded to nearest, ties to even. These are the
rules of DeepSeek's published inference kernels. With a power of two the exponent comes from the bits of amax, so no
logarithm can round: the float32 log2 of mlx-lm gives one less where amax exceeds 448 * 2^e by fewer than about |e|
units in the last place, one tile in a million, of which only numbers below 2^-6 of the scale then differ. All else is
equal to mlx-lm's to the bit, signs of zeros included.

A tile with a number that is not finite decodes as NaN as a whole, and so does a row of bytes 0xFF: what is broken must
not become quietly right. In the checks below, row bytes of the published models are 584 (V4), 656 (V3.2 latent), 132
(fp8 index key), 288 (V4.1 main), 68 (fp4 index key) and 528 (V4.1 window).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.nn import functional

FP8_TOP, FP4_TOP = 448.0, 6.0
FP8_FLOOR = 1e-4
FP4_UE8M0_FLOOR = 6.0 * 2.0**-126
FP4_E4M3_FLOOR = 6.0 * 2.0**-9
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between two of them; a tie goes to the even code


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One way to write a row of `dim` numbers.

    Attributes:
        name: equal for equal formats, e.g. `fp8-448t64-ue8m0+bf16-64`; goes into RowField.row_format.
        dim: numbers a row.
        row_bytes: bytes a row.
        kind: of the three above, for the kernels.
        tile: numbers that share a scale; 0 for plain.
        scale: the form of the scales, for plain "".
        tail_dims: last numbers that are kept as bfloat16.
        pad: zero bytes behind the scales.
        dtype: of a plain row.
    """

    name: str
    dim: int
    row_bytes: int
    kind: Literal["plain", "fp8", "fp4"]
    tile: int = 0
    scale: str = ""
    tail_dims: int = 0
    pad: int = 0
    dtype: torch.dtype = torch.float32
    _pack: Callable[[torch.Tensor], torch.Tensor] = field(repr=False, compare=False, default=lambda x: x)
    _unpack: Callable[[torch.Tensor], torch.Tensor] = field(repr=False, compare=False, default=lambda x: x)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, dim] float32 -> [n, row_bytes] uint8. ValueError for another shape or dtype."""
        if x.dim() != 2 or x.shape[1] != self.dim or x.dtype is not torch.float32:
            raise ValueError(f"rows of {self.name} are float32 [n, {self.dim}], not {x.dtype} {tuple(x.shape)}")
        return self._pack(x) if len(x) else x.new_empty(0, self.row_bytes, dtype=torch.uint8)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """rows: [n, row_bytes] uint8 -> [n, dim] float32. ValueError for another shape or dtype."""
        if rows.dim() != 2 or rows.shape[1] != self.row_bytes or rows.dtype is not torch.uint8:
            raise ValueError(
                f"packed rows of {self.name} are uint8 [n, {self.row_bytes}], not {rows.dtype} {tuple(rows.shape)}"
            )
        return self._unpack(rows) if len(rows) else rows.new_empty(0, self.dim, dtype=torch.float32)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """What is left of x [.., dim] of any float dtype after a round trip, in float32."""
        return self.unpack(self.pack(x.reshape(-1, self.dim).float())).view(x.shape)


def plain(dim: int, dtype: torch.dtype) -> RowFormat:
    """Rows of float32 or bfloat16 as they are."""
    short = str(dtype).removeprefix("torch.")

    def pack(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).contiguous().view(torch.uint8)

    def unpack(rows: torch.Tensor) -> torch.Tensor:
        return _words(rows, dtype).float()

    return RowFormat(f"{short}x{dim}", dim, dim * dtype.itemsize, "plain", dtype=dtype, _pack=pack, _unpack=unpack)


def fp8_tiles(dim: int, tile: int, scale: Literal["ue8m0", "float32"], tail_dims: int = 0, pad: int = 0) -> RowFormat:
    """e4m3 in tiles, the last `tail_dims` numbers in bfloat16.

    Args:
        dim: numbers a row, the tail included.
        tile: numbers that share a scale; the last tile may have fewer.
        scale: ue8m0 takes one byte a tile, float32 four.
        tail_dims: below `dim`.
        pad: zero bytes behind the scales.

    Raises:
        ValueError: the numbers do not fit each other.
    """
    width = dim - tail_dims
    if width < 1 or tail_dims < 0 or tile < 1 or pad < 0 or scale not in ("ue8m0", "float32"):
        raise ValueError(f"no fp8 format of {dim} numbers, {tail_dims} of them bf16, tile {tile}, {scale}, pad {pad}")
    tiles = -(-width // tile)
    scale_bytes = tiles * (1 if scale == "ue8m0" else 4)

    def pack(x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        blocks = functional.pad(x[:, :width], (0, tiles * tile - width)).view(n, tiles, tile)
        steps, written = _steps(blocks, FP8_TOP, FP8_FLOOR, scale)
        q = _divided(blocks, steps).clamp_(-FP8_TOP, FP8_TOP).to(torch.float8_e4m3fn)
        parts = [q.view(torch.uint8).view(n, tiles * tile)[:, :width], written]
        if pad:
            parts.append(x.new_zeros(n, pad, dtype=torch.uint8))
        if tail_dims:
            parts.append(x[:, width:].to(torch.bfloat16).contiguous().view(torch.uint8))
        return torch.cat(parts, 1)

    def unpack(rows: torch.Tensor) -> torch.Tensor:
        q = rows[:, :width].contiguous().view(torch.float8_e4m3fn).float()
        steps = _read_steps(rows[:, width : width + scale_bytes], scale).repeat_interleave(tile, 1)[:, :width]
        values = q.mul_(steps)
        if not tail_dims:
            return values
        return torch.cat((values, _words(rows[:, width + scale_bytes + pad :], torch.bfloat16).float()), 1)

    name = f"fp8-{width}t{tile}-{scale}" + (f"+pad{pad}" if pad else "") + (f"+bf16-{tail_dims}" if tail_dims else "")
    return RowFormat(
        name, dim, width + scale_bytes + pad + 2 * tail_dims, "fp8", tile, scale, tail_dims, pad,
        _pack=pack, _unpack=unpack,
    )  # fmt: skip


def fp4_groups(dim: int, group: int, scale: Literal["ue8m0", "e4m3"]) -> RowFormat:
    """e2m1 in groups with one byte of scale each.

    Args:
        dim: numbers a row, a multiple of `group`.
        group: numbers that share a scale, an even number.
        scale: form of the scale.

    Raises:
        ValueError: the numbers do not fit each other.
    """
    if dim < 1 or group < 2 or group % 2 or dim % group or scale not in ("ue8m0", "e4m3"):
        raise ValueError(f"no fp4 format of {dim} numbers in groups of {group} with {scale} scales")
    floor = FP4_UE8M0_FLOOR if scale == "ue8m0" else FP4_E4M3_FLOOR

    def pack(x: torch.Tensor) -> torch.Tensor:
        blocks = x.reshape(len(x), dim // group, group)
        steps, written = _steps(blocks, FP4_TOP, floor, scale)
        codes = _to_e2m1(_divided(blocks, steps)).view(len(x), dim // 2, 2)
        return torch.cat((codes[..., 0] | codes[..., 1] << 4, written), 1)

    def unpack(rows: torch.Tensor) -> torch.Tensor:
        both = rows[:, : dim // 2]
        codes = torch.stack((both & 15, both >> 4), -1).view(len(rows), dim)
        values = torch.tensor((*_E2M1, *(-v for v in _E2M1)), device=rows.device)[codes.long()]
        return values.mul_(_read_steps(rows[:, dim // 2 :], scale).repeat_interleave(group, 1))

    return RowFormat(
        f"fp4-{dim}g{group}-{scale}", dim, dim // 2 + dim // group, "fp4", group, scale, _pack=pack, _unpack=unpack
    )


def pack(fmt: RowFormat, x: torch.Tensor) -> torch.Tensor:
    """RowFormat.pack, as a function like its kernel."""
    return fmt.pack(x)


def unpack(fmt: RowFormat, rows: torch.Tensor) -> torch.Tensor:
    """RowFormat.unpack, likewise."""
    return fmt.unpack(rows)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows as they stand in a pool: kernels take them in place of a tensor of numbers.

    Attributes:
        fmt: how they are written.
        memory: uint8, contiguous.
        offsets: [n] int64, the first byte of each row.
    """

    fmt: RowFormat
    memory: torch.Tensor
    offsets: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(n, dim), as of the tensor it stands for."""
        return len(self.offsets), self.fmt.dim

    def __len__(self) -> int:
        return len(self.offsets)

    def read(self, index: torch.Tensor | None = None) -> torch.Tensor:
        """index: [..] int64 -> [.., dim] float32; all rows if None."""
        offsets = self.offsets if index is None else self.offsets[index]
        return read_rows(self.fmt, self.memory, offsets.flatten()).view(*offsets.shape, self.fmt.dim)


def numbers(rows: torch.Tensor | PackedRows, index: torch.Tensor | None = None) -> torch.Tensor:
    """Rows, packed or not, as float32: all [n, dim], or those of an index [..] -> [.., dim]."""
    if isinstance(rows, PackedRows):
        return rows.read(index)
    return (rows if index is None else rows[index]).float()


def write_rows(fmt: RowFormat, memory: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> None:
    """Pack rows to where they stand.

    Args:
        memory: uint8, one dimension or contiguous.
        offsets: [n] int64, the first byte of each row; no two rows may overlap.
        x: [n, dim] float32.
    """
    memory.view(-1)[offsets[:, None] + torch.arange(fmt.row_bytes, device=memory.device)] = fmt.pack(x)


def read_rows(fmt: RowFormat, memory: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The reverse of write_rows: [n, dim] float32."""
    return fmt.unpack(memory.view(-1)[offsets[:, None] + torch.arange(fmt.row_bytes, device=memory.device)])


def _words(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes [n, m * size] as [n, m] of dtype, wherever they stand."""
    return rows.clone(memory_format=torch.contiguous_format).view(dtype)  # a copy is aligned


def ceil_exponent(amax: torch.Tensor, top: float) -> torch.Tensor:
    """ceil(log2(amax / top)) of normal positive float32, int32, exact: from the bits, of which an exponent is 2^23."""
    mantissa, exponent = math.frexp(top)
    top_bits = (exponent - 1 + 127 << 23) + int((2 * mantissa - 1) * 2**23)
    return (amax.view(torch.int32) - top_bits + 0x7FFFFF) >> 23


def _steps(blocks: torch.Tensor, top: float, floor: float, scale: str) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks: [n, tiles, tile] -> the scales [n, tiles] float32 (NaN where not finite) and their bytes [n, ..]."""
    amax = blocks.abs().amax(-1)
    broken = ~(amax < torch.inf)
    amax = amax.masked_fill(broken, 1.0).clamp_(min=floor)
    if scale == "ue8m0":
        exponent = ceil_exponent(amax, top).masked_fill_(broken, 128) + 127
        return _power_of_two(exponent), exponent.to(torch.uint8)
    steps = (amax / top).masked_fill_(broken, torch.nan)
    if scale == "e4m3":
        coded = steps.clamp_(max=FP8_TOP).to(torch.float8_e4m3fn)
        return coded.float(), coded.view(torch.uint8)
    return steps, steps.view(torch.uint8)


def _divided(blocks: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """blocks / steps, and 0 where the step is NaN, so that the bytes of a broken tile are the same everywhere."""
    return (blocks / steps.unsqueeze(-1)).masked_fill_(steps.isnan().unsqueeze(-1), 0.0)


def _read_steps(written: torch.Tensor, scale: str) -> torch.Tensor:
    """The reverse of _steps: bytes -> [n, tiles] float32."""
    if scale == "ue8m0":
        return _power_of_two(written.to(torch.int32))
    if scale == "e4m3":
        return written.contiguous().view(torch.float8_e4m3fn).float()
    return _words(written, torch.float32)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^(exponent - 127) of int32 0..254; NaN for 255."""
    power = (exponent << 23).masked_fill(exponent == 0, 1 << 22).view(torch.float32)
    return power.masked_fill(exponent == 255, torch.nan)


def _to_e2m1(y: torch.Tensor) -> torch.Tensor:
    """float32 -> codes 0..15 uint8, to nearest, ties to even; what is beyond 6 becomes 6, NaN any."""
    magnitude = y.abs()
    code = torch.zeros_like(y, dtype=torch.uint8)
    for below, bound in enumerate(_E2M1_BOUNDS):
        code += magnitude > bound if below % 2 == 0 else magnitude >= bound
    return code | y.signbit().to(torch.uint8) << 3
