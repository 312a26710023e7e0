"""The Triton kernels of page_codecs_lossless.py, same signatures.

Encoding is two passes over a page, a program a slab: the first finds the largest exponent and counts the escapes, from
which follow each row's mode and where each slab's escapes stand; the second gathers and writes. Decoding is one pass
and a small one for the escapes. Only bits are moved, so rows equal the twin's. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.page_codecs_lossless import (
    CODES,
    HEAD_BYTES,
    RAW,
    LosslessForm,
    check_head,
    lossless_form,
    source_dtype,
)
from tailrace.kernels.page_codecs_triton import check_rows, float_words, store_float32

_BLOCK = 1024
_CODES = tl.constexpr(CODES)
_HEAD = tl.constexpr(HEAD_BYTES)
_RAW = tl.constexpr(RAW)


@triton.jit
def _load_bits(words, mask, FP32: tl.constexpr):
    """words: pointer to int16 or int32. The bits as int32; a bfloat16's are the lower half of it."""
    bits = tl.load(words, mask=mask, other=0).to(tl.int32)
    return bits if FP32 else bits & 0xFFFF


@triton.jit
def _exponent(bits, FP32: tl.constexpr):
    return (bits >> (23 if FP32 else 7)) & 0xFF


@triton.jit
def _measure(
    words,  # pointer to int16 | int32 [num_pages, slabs, n]
    pages,  # pointer to int64 [number of pages]
    tops,  # pointer to int32 [number of pages, slabs]
    counts,  # likewise: escapes
    slabs,
    n,
    FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (number of pages, slabs)."""
    at, slab = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (tl.load(pages + at) * slabs + slab) * n  # 64 bits: a pool passes 2^31 numbers
    top = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.max(_exponent(_load_bits(words + first + i, i < n, FP32), FP32), 0))
    count = tl.zeros((), tl.int32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        exponent = _exponent(_load_bits(words + first + i, i < n, FP32), FP32)
        count += tl.sum(((exponent > 0) & (exponent <= top - _CODES)).to(tl.int32), 0)
    tl.store(tops + at * slabs + slab, top)
    tl.store(counts + at * slabs + slab, count)


@triton.jit
def _code(bits, top, FP32: tl.constexpr):
    return tl.maximum(_exponent(bits, FP32) - (top - _CODES), 0) * (_exponent(bits, FP32) > 0).to(tl.int32)


@triton.jit
def _write(
    words,  # pointer to int16 | int32 [num_pages, slabs, n]
    pages,  # pointer to int64 [number of pages]
    tops,  # pointer to int32 [number of pages, slabs]
    starts,  # pointer to int32 [number of pages, slabs]: escapes of the slabs before
    out,  # pointer to uint8 [number of pages, bound]
    halves,  # the same memory, pointer to int16 [number of pages, bound / 2]
    heads,  # the same memory, pointer to int32 [number of pages, bound / 4]: int32 [4] is already written
    slabs,
    n,
    bound,
    tops_at,
    mantissas_at,
    halves_at,
    codes_at,
    escapes_at,
    FP32: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (number of pages, slabs). The *_at: bytes from a row's begin."""
    at, slab = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (tl.load(pages + at) * slabs + slab) * n
    row, half_row, word_row = out + at * bound, halves + at * (bound // 2), heads + at * (bound // 4)
    mode, escapes = tl.load(word_row + 1), tl.load(word_row + 2)
    if mode == _RAW:
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            bits = _load_bits(words + first + i, i < n, FP32)
            if FP32:
                tl.store(word_row + _HEAD // 4 + slab * n + i, bits, mask=i < n)
            else:
                tl.store(half_row + _HEAD // 2 + slab * n + i, bits.to(tl.int16), mask=i < n)
    else:
        top = tl.load(tops + at * slabs + slab)
        tl.store(row + tops_at + slab, top.to(tl.uint8))
        half = n // 2
        for start in range(0, half, BLOCK):
            i = start + tl.arange(0, BLOCK)
            lower = _code(_load_bits(words + first + i, i < half, FP32), top, FP32)
            upper = _code(_load_bits(words + first + half + i, i < half, FP32), top, FP32)
            tl.store(row + codes_at + slab * half + i, (lower | (upper << 4)).to(tl.uint8), mask=i < half)
        rank = tl.load(starts + at * slabs + slab)
        positions = word_row + escapes_at // 4
        exponents = positions + (escapes + 3) // 4 * 4
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            bits = _load_bits(words + first + i, i < n, FP32)
            exponent = _exponent(bits, FP32)
            upper = (bits >> 16) if FP32 else bits
            tl.store(
                row + mantissas_at + slab * n + i, ((upper & 0x7F) | ((upper >> 8) & 0x80)).to(tl.uint8), mask=i < n
            )
            if FP32:
                tl.store(half_row + halves_at // 2 + slab * n + i, (bits & 0xFFFF).to(tl.int16), mask=i < n)
            escaped = ((exponent > 0) & (exponent <= top - _CODES)).to(tl.int32)
            place = rank + tl.cumsum(escaped, 0) - escaped
            tl.store(positions + place, slab * n + i, mask=escaped > 0)
            tl.store(exponents + place, exponent, mask=escaped > 0)
            rank += tl.sum(escaped, 0)


@triton.jit
def _put(words, upper, lower, mask, SAME: tl.constexpr, FP32: tl.constexpr, BF16: tl.constexpr):
    """A number, from its upper and lower half: its bits if the pool has its dtype, else converted."""
    if SAME and not FP32:
        tl.store(words, upper.to(tl.int16), mask=mask)
    else:
        bits = (upper << 16) | lower
        if SAME:
            tl.store(words, bits, mask=mask)
        else:
            store_float32(words, bits.to(tl.float32, bitcast=True), mask, BF16)


@triton.jit
def _read(
    data,  # pointer to uint8 [number of pages, bound]
    halves,  # the same memory, pointer to int16 [number of pages, bound / 2]
    heads,  # the same memory, pointer to int32 [number of pages, bound / 4]
    words,  # pointer to the pool [num_pages, slabs, n]: bits if SAME, else float words
    pages,  # pointer to int64 [number of pages]
    slabs,
    n,
    bound,
    tops_at,
    mantissas_at,
    halves_at,
    codes_at,
    FP32: tl.constexpr,  # of what was encoded
    SAME: tl.constexpr,
    BF16: tl.constexpr,  # of the pool, if not SAME
    BLOCK: tl.constexpr,
):
    """grid (number of pages, slabs). All but the escapes."""
    at, slab = tl.program_id(0).to(tl.int64), tl.program_id(1)
    words += (tl.load(pages + at) * slabs + slab) * n
    row, half_row, word_row = data + at * bound, halves + at * (bound // 2), heads + at * (bound // 4)
    if tl.load(word_row + 1) == _RAW:
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            if FP32:
                bits = tl.load(word_row + _HEAD // 4 + slab * n + i, mask=i < n, other=0)
                _put(words + i, (bits >> 16) & 0xFFFF, bits & 0xFFFF, i < n, SAME, FP32, BF16)
            else:
                bits = tl.load(half_row + _HEAD // 2 + slab * n + i, mask=i < n, other=0).to(tl.int32) & 0xFFFF
                _put(words + i, bits, bits * 0, i < n, SAME, FP32, BF16)
    else:
        base = tl.load(row + tops_at + slab).to(tl.int32) - _CODES
        half = n // 2
        for start in range(0, n, BLOCK):
            i = start + tl.arange(0, BLOCK)
            packed = tl.load(row + codes_at + slab * half + i % half, mask=i < n, other=0).to(tl.int32)
            code = tl.where(i < half, packed & 15, packed >> 4)
            exponent = tl.where(code > 0, code + base, 0)
            rest = tl.load(row + mantissas_at + slab * n + i, mask=i < n, other=0).to(tl.int32)
            upper = (exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)
            lower = upper * 0
            if FP32:
                lower = tl.load(half_row + halves_at // 2 + slab * n + i, mask=i < n, other=0).to(tl.int32) & 0xFFFF
            _put(words + i, upper, lower, i < n, SAME, FP32, BF16)


@triton.jit
def _read_escapes(
    data,
    halves,
    heads,
    words,
    pages,
    numbers,  # of a page
    bound,
    mantissas_at,
    halves_at,
    escapes_at,
    FP32: tl.constexpr,
    SAME: tl.constexpr,
    BF16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """grid (number of pages,); arguments as of _read. A position outside the page is passed over."""
    at = tl.program_id(0).to(tl.int64)
    words += tl.load(pages + at) * numbers
    row, half_row, word_row = data + at * bound, halves + at * (bound // 2), heads + at * (bound // 4)
    escapes = tl.load(word_row + 2)
    positions = word_row + escapes_at // 4
    exponents = positions + (escapes + 3) // 4 * 4
    for start in range(0, escapes, BLOCK):
        i = start + tl.arange(0, BLOCK)
        place = tl.load(positions + i, mask=i < escapes, other=-1)
        inside = (place >= 0) & (place < numbers)
        exponent = tl.load(exponents + i, mask=i < escapes, other=0) & 0xFF
        rest = tl.load(row + mantissas_at + place, mask=inside, other=0).to(tl.int32)
        upper = (exponent << 7) | (rest & 0x7F) | ((rest & 0x80) << 8)
        lower = upper * 0
        if FP32:
            lower = tl.load(half_row + halves_at // 2 + place, mask=inside, other=0).to(tl.int32) & 0xFFFF
        _put(words + place, upper, lower, inside, SAME, FP32, BF16)


# -------------------------------------------------------------------------------------------------------------- launch


def encode_lossless(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """As page_codecs_lossless.encode_lossless; rows of `out` begin at multiples of 16 bytes."""
    form = lossless_form(pool.shape[1:], pool.dtype)
    check_rows(out, form.bound)
    count, fp32 = len(pages), form.number_bytes == 4
    if not count:
        return torch.empty(0, dtype=torch.int64, device=pool.device)
    words = _bits(pool)
    tops = torch.zeros((count, form.slabs), dtype=torch.int32, device=pool.device)
    counts = torch.zeros_like(tops)
    grid = (count, form.slabs)
    _measure[grid](words, pages, tops, counts, form.slabs, form.slab_numbers, FP32=fp32, BLOCK=_BLOCK)
    escapes = counts.sum(1)
    coded = escapes <= form.max_escapes
    lengths = torch.where(coded, form.escapes + (escapes + 3) // 4 * 32, form.bound)
    heads = out.view(torch.int32)
    heads[:, 0] = lengths.to(torch.int32)
    heads[:, 1] = torch.where(coded, form.mode, RAW).to(torch.int32)
    heads[:, 2] = torch.where(coded, escapes, 0).to(torch.int32)
    heads[:, 3] = form.number_bytes
    for begin, end in _gaps(form):
        out[:, begin:end] = 0
    starts = (counts.cumsum(1) - counts).to(torch.int32)
    _write[grid](
        words, pages, tops, starts, out, out.view(torch.int16), heads, form.slabs, form.slab_numbers, form.bound,
        form.tops, form.mantissas, form.halves, form.codes, form.escapes, FP32=fp32, BLOCK=_BLOCK,
    )  # fmt: skip
    return lengths.to(torch.int64)


def decode_lossless(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """As page_codecs_lossless.decode_lossless; rows of `data` begin at multiples of 16 bytes."""
    if not len(pages):
        return
    dtype = source_dtype(data)
    form = lossless_form(pool.shape[1:], dtype)
    check_rows(data, form.bound)
    heads = data.view(torch.int32)
    for head in heads[:, :4].tolist():
        check_head(head, form, form.bound)
    same = pool.dtype == dtype
    words = _bits(pool) if same else float_words(pool)
    kinds = {
        "FP32": form.number_bytes == 4, "SAME": same, "BF16": pool.dtype is torch.bfloat16 and not same,
        "BLOCK": _BLOCK,
    }  # fmt: skip
    _read[(len(pages), form.slabs)](
        data, data.view(torch.int16), heads, words, pages, form.slabs, form.slab_numbers, form.bound,
        form.tops, form.mantissas, form.halves, form.codes, **kinds,
    )  # fmt: skip
    _read_escapes[(len(pages),)](
        data, data.view(torch.int16), heads, words, pages, form.numbers, form.bound,
        form.mantissas, form.halves, form.escapes, **kinds,
    )  # fmt: skip


def _bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.int16 if pool.element_size() == 2 else torch.int32)


def _gaps(form: LosslessForm) -> list[tuple[int, int]]:
    """Bytes of a row that may lie between its parts or behind it; what is coded or raw there is written later."""
    return [
        (form.tops + form.slabs, form.mantissas),
        (form.mantissas + form.numbers, form.halves),
        (form.halves + form.numbers * (form.number_bytes - 2), form.codes),
        (form.codes + form.numbers // 2, form.bound),
    ]
