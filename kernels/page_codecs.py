"""Lossy wire forms of KV pages, plain PyTorch: the CPU path, and the twin of page_codecs_triton.py.

Each codec has an encoder, which gathers pages of a pool by number and writes one wire row a page, and a decoder, which
scatters wire rows into pages of a pool of any float dtype. A *row* below is one token of one head of one field of one
layer: `dim` numbers, in the page's order [layer, field, kv_head, token, dim].

    int8   float32 scale a row, then int8 [rows, dim]:      x ~ q * scale,  scale = max|x| / 127
    fp8    float32 scale a row, then e4m3 [rows, dim]:      x ~ q * scale,  scale = max|x| / 448
    int4   each row is split into pieces of `width` numbers and rotated by a Hadamard matrix (y = H x / width, undone by
           x = H y), which spreads an outlier over its piece; then groups of 32: y ~ low + q * step, q in 0..15.
           wire: low bf16 [width / 32, pieces], step likewise, then q [width / 2, pieces], two a byte (j, j + width / 2)

Wire rows end in zeros up to a multiple of 16 bytes. A row (int4: a piece) with a number that is not finite decodes as
NaN as a whole: what is broken must not become quietly right. Numbers near the smallest normal float32 lose precision,
and int4 gives NaN beyond 1.6e38. Rounding is to nearest, ties to even, and both twins do the same operations in the
same order, so that they agree to the bit. Knows no wire and no worker; nothing to lose when a process dies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

INT4_GROUP = 32
SMALLEST_STEP = 2.0**-126  # the smallest normal float32: a scale never becomes zero or loses bits
_SLICE_NUMBERS = 1 << 18  # numbers that are worked on at once, so that what is between two operations stays in cache
_E4M3_MAX = 448.0


def aligned(nbytes: int) -> int:
    """Wire rows and their parts begin at multiples of 16 bytes."""
    return -(-nbytes // 16) * 16


def rows_and_dim(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, dim) of a page of shape [layer, field, kv_head, token, dim]."""
    layers, fields, heads, tokens, dim = shape
    return layers * fields * heads * tokens, dim


def scaled_bytes(shape: Sequence[int]) -> int:
    """Bytes of a wire row of int8 and fp8."""
    rows, dim = rows_and_dim(shape)
    return aligned(rows * (4 + dim))


def hadamard_width(dim: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides `dim`.

    Raises:
        ValueError: it is smaller than a group.
    """
    width = dim & -dim
    if width < INT4_GROUP:
        raise ValueError(f"int4 needs a head dim that is a multiple of {INT4_GROUP}, not {dim}")
    return width


def int4_bytes(shape: Sequence[int]) -> int:
    """Bytes of a wire row of int4; ValueError as hadamard_width."""
    rows, dim = rows_and_dim(shape)
    hadamard_width(dim)
    return aligned(rows * (dim // 2 + dim // INT4_GROUP * 4))


def encode_int8(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """Gather and encode.

    Args:
        pool: [num_pages, layer, field, kv_head, token, dim] of a float dtype.
        pages: [n] int64.
        out: [n, scaled_bytes(pool.shape[1:])] uint8.
    """
    rows, dim = rows_and_dim(pool.shape[1:])
    for at, numbers in gathered(pool, pages):
        x = numbers.view(-1, dim).to(torch.float32, copy=True)
        scale, y = _scaled(x, 127.0)
        _write_scaled(out[at], scale.view(-1, rows), y.round_().to(torch.int8).view(-1, rows * dim))


def decode_int8(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """Decode and scatter: `data` [n, scaled_bytes] uint8 into pages [n] of `pool` (any float dtype)."""
    rows, dim = rows_and_dim(pool.shape[1:])
    for at, into in _slices(pool, pages):
        scale, q = _read_scaled(data[at], rows, dim)
        scatter(pool, into, torch.mul(q.view(torch.int8).view(-1, dim), scale))


def encode_fp8(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """As encode_int8, to e4m3."""
    rows, dim = rows_and_dim(pool.shape[1:])
    for at, numbers in gathered(pool, pages):
        x = numbers.view(-1, dim).to(torch.float32, copy=True)
        scale, y = _scaled(x, _E4M3_MAX)
        _write_scaled(out[at], scale.view(-1, rows), y.to(torch.float8_e4m3fn).view(-1, rows * dim))


def decode_fp8(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As decode_int8, from e4m3."""
    rows, dim = rows_and_dim(pool.shape[1:])
    for at, into in _slices(pool, pages):
        scale, q = _read_scaled(data[at], rows, dim)
        scatter(pool, into, _e4m3_to_float32(q.view(torch.int8)).view(-1, dim).mul_(scale))


def encode_int4(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> None:
    """As encode_int8; `out` is [n, int4_bytes(pool.shape[1:])]."""
    rows, dim = rows_and_dim(pool.shape[1:])
    width = hadamard_width(dim)
    pieces = rows * (dim // width)
    for at, numbers in gathered(pool, pages):
        y = numbers.view(-1, width).t().contiguous()  # before it becomes float32: there are fewer bytes
        y = y.to(torch.float32, copy=True)
        y = _hadamard(y.mul_(1.0 / width))
        groups = y.view(width // INT4_GROUP, INT4_GROUP, -1)
        low, step, broken = _group_ranges(groups)
        q = groups.sub_(low).div_(step).round_().clamp_(0, 15)
        if broken is not None:
            q.masked_fill_(broken, 0.0)
        codes = q.to(torch.int8).view(torch.uint8).view(width, -1)  # conversions of uint8 are slow
        packed = codes[: width // 2] | (codes[width // 2 :] << 4)
        for page in range(at.stop - at.start):
            one = slice(page * pieces, (page + 1) * pieces)
            parts = (_high_half(low[:, 0, one]), _high_half(step[:, 0, one]), packed[:, one])
            _write_parts(out[at.start + page], parts)


def decode_int4(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As decode_int8; `data` is [n, int4_bytes]."""
    rows, dim = rows_and_dim(pool.shape[1:])
    width = hadamard_width(dim)
    pieces = rows * (dim // width)
    num_groups = width // INT4_GROUP
    side = 2 * num_groups * pieces
    for page, wire in zip(pages.tolist(), data, strict=True):
        low, step = (wire[i * side : (i + 1) * side].clone().view(torch.bfloat16).to(torch.float32) for i in (0, 1))
        packed = wire[2 * side : 2 * side + width // 2 * pieces].view(width // 2, pieces)
        codes = torch.empty(width, pieces, dtype=torch.uint8)
        torch.bitwise_and(packed, 15, out=codes[: width // 2])
        torch.bitwise_right_shift(packed, 4, out=codes[width // 2 :])
        y = codes.view(torch.int8).to(torch.float32).view(num_groups, INT4_GROUP, pieces)
        y.mul_(step.view(num_groups, 1, pieces)).add_(low.view(num_groups, 1, pieces))
        pool[page].view(-1, width).copy_(_hadamard(y.view(width, pieces)).to(pool.dtype).t())


# -------------------------------------------------------------------------------------------------------------- slices


def _slices(pool: torch.Tensor, pages: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(which wire rows, their pages) a slice."""
    step = max(1, _SLICE_NUMBERS // pool[0].numel())
    for first in range(0, len(pages), step):
        at = slice(first, min(first + step, len(pages)))
        yield at, pages[at]


def gathered(pool: torch.Tensor, pages: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """(which wire rows, their pages' numbers [k, numbers a page], which are not to be written) a slice."""
    flat = pool.view(len(pool), -1)
    for at, some in _slices(pool, pages):
        yield at, flat[int(some)][None] if len(some) == 1 else flat.index_select(0, some)


def scatter(pool: torch.Tensor, pages: torch.Tensor, numbers: torch.Tensor) -> None:
    """pool[pages[i]] = i-th page of `numbers`, converted to the pool's dtype."""
    flat = pool.view(len(pool), -1)
    if len(pages) == 1:
        flat[int(pages)].copy_(numbers.view(-1))
    else:
        flat.index_copy_(0, pages, numbers.view(len(pages), -1).to(pool.dtype))


# --------------------------------------------------------------------------------------------------- one scale a row


def _scaled(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, dim] float32 (used up) -> its scales [rows, 1], and x in units of them, 0 where the scale is NaN."""
    top = x.abs().amax(1, keepdim=True)
    scale = torch.div(top, largest).clamp_(min=SMALLEST_STEP)
    broken = ~(top < torch.inf)  # NaN too
    if bool(broken.any()):
        scale.masked_fill_(broken, torch.nan)
        return scale, x.div_(scale).masked_fill_(broken, 0.0)
    return scale, x.div_(scale)


def _write_scaled(out: torch.Tensor, scales: torch.Tensor, q: torch.Tensor) -> None:
    side = scales.shape[1] * 4
    out[:, :side] = scales.contiguous().view(torch.uint8)
    out[:, side : side + q.shape[1]] = q.view(torch.uint8)
    out[:, side + q.shape[1] :] = 0


def _read_scaled(data: torch.Tensor, rows: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales [k * rows, 1] float32, payload [k, rows * dim] uint8) of wire rows."""
    scales = data[:, : 4 * rows].contiguous().view(torch.float32).view(-1, 1)
    return scales, data[:, 4 * rows : rows * (4 + dim)].contiguous()


def _e4m3_to_float32(q: torch.Tensor) -> torch.Tensor:
    """int8 bit patterns -> their values, by placing the bits 120 exponents too low; torch's own cast is 5 times slower.

    The two NaN patterns, which no encoder writes, give 480 and -480.
    """
    bits = q.to(torch.int32)
    magnitude = (bits & 0x7F).bitwise_left_shift_(20)
    return (bits & -0x80000000).bitwise_or_(magnitude).view(torch.float32).mul_(2.0**120)


# ---------------------------------------------------------------------------------------------------------------- int4


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x for x [width, n] (used up), H of +1 and -1; sums pair by pair, the nearest first, as the kernel does."""
    width, n = x.shape
    y = torch.empty_like(x)
    half = 1
    while half < width:
        pairs, into = x.view(-1, 2, half, n), y.view(-1, 2, half, n)
        torch.add(pairs[:, 0], pairs[:, 1], out=into[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=into[:, 1])
        x, y = y, x
        half *= 2
    return x


def _group_ranges(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(low, step, which are not finite) for groups [groups, 32, n]: each [groups, 1, n]; None if none is.

    Of bfloat16's precision; low is rounded down and step up, so that 15 steps reach the largest number.
    """
    low = _bf16_down(groups.amin(1, keepdim=True))
    span = torch.sub(groups.amax(1, keepdim=True), low)
    step = _bf16_up(torch.div(span, 15.0)).clamp_(min=SMALLEST_STEP)
    broken = ~((span < torch.inf) & (step < torch.inf))  # NaN too
    if bool(broken.any()):
        return low.masked_fill_(broken, 0.0), step.masked_fill_(broken, torch.nan), broken
    return low, step, None


def _bf16_down(x: torch.Tensor) -> torch.Tensor:
    bits = x.view(torch.int32)
    return torch.where(bits < 0, bits + 0xFFFF, bits).bitwise_and_(-0x10000).view(torch.float32)


def _bf16_up(x: torch.Tensor) -> torch.Tensor:
    """For x >= 0."""
    return (x.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _high_half(x: torch.Tensor) -> torch.Tensor:
    """The bfloat16 bit patterns of numbers that have bfloat16's precision."""
    return (x.contiguous().view(torch.int32) >> 16).to(torch.int16)


def _write_parts(row: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    at = 0
    for part in parts:
        raw = part.contiguous().view(torch.uint8).view(-1)
        row[at : at + len(raw)] = raw
        at += len(raw)
    row[at:] = 0
