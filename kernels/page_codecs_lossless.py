"""Lossless wire form of KV pages, plain PyTorch: the CPU path, and the twin of page_codecs_lossless_triton.py.

Of a bfloat16 number the sign and the 7 bits of mantissa look random, but the exponents of a head's numbers lie close
together. So they are sent as 4 bits: code 0 is exponent 0 (zeros), code c is exponent top - 15 + c, where top is the
largest exponent of the *slab* (one head of one field of one layer: token x dim numbers). The few numbers below that
are *escapes*: code 0, and their position and exponent in a list at the end. float32 is its bfloat16 half so encoded and
its other half as it is. Every bit pattern comes back, NaN payloads and minus zero too.

A wire row is at most `lossless_bound` long and says its own length. All parts begin at multiples of 16 bytes, zeros
between them:

    head     int32 [4]: bytes of the row, mode, escapes, bytes of a number
    raw      mode 0: the page as it is, where coding would not make it shorter
    coded    mode 1 (of bfloat16) and 2 (of float32):
             top uint8 [slab] | sign and mantissa uint8 [slab, n] | the lower halves int16 [slab, n], mode 2
             | codes uint8 [slab, n / 2], two a byte (j, j + n / 2) | positions int32 [escapes] | exponents int32

Knows no wire and no worker; nothing to lose when a process dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.kernels.page_codecs import aligned

HEAD_BYTES = 16
RAW, CODED_BF16, CODED_FP32 = 0, 1, 2
CODES = 15  # exponents that have a code of their own, zero apart
_BYTES = {torch.bfloat16: 2, torch.float32: 4}


@dataclass(frozen=True, slots=True)
class LosslessForm:
    """Sizes of a page's wire row.

    Attributes:
        slabs, slab_numbers: of a page.
        number_bytes: 2 (bfloat16) or 4 (float32).
        tops, mantissas, halves, codes, escapes: byte at which each part begins; halves == codes without lower halves.
        max_escapes: with more of them the row would be no shorter than the page, which is then sent as it is.
        bound: most bytes of a row.
    """

    slabs: int
    slab_numbers: int
    number_bytes: int

    @property
    def numbers(self) -> int:
        return self.slabs * self.slab_numbers

    @property
    def mode(self) -> int:
        return CODED_BF16 if self.number_bytes == 2 else CODED_FP32

    @property
    def tops(self) -> int:
        return HEAD_BYTES

    @property
    def mantissas(self) -> int:
        return self.tops + aligned(self.slabs)

    @property
    def halves(self) -> int:
        return self.mantissas + aligned(self.numbers)

    @property
    def codes(self) -> int:
        return self.halves + aligned(self.numbers * (self.number_bytes - 2))

    @property
    def escapes(self) -> int:
        return self.codes + aligned(self.numbers // 2)

    @property
    def bound(self) -> int:
        return HEAD_BYTES + aligned(self.numbers * self.number_bytes)

    @property
    def max_escapes(self) -> int:
        """-1 if even without any the page is better sent raw."""
        room = self.bound - 16 - self.escapes
        return room // 32 * 4 if room >= 0 else -1

    def coded_bytes(self, escapes: int) -> int:
        """Length of a coded row."""
        return self.escapes + 2 * aligned(4 * escapes)


def lossless_form(shape: Sequence[int], dtype: torch.dtype) -> LosslessForm:
    """Sizes for pages [layer, field, kv_head, token, dim]. Raises ValueError for what has no lossless form."""
    layers, fields, heads, tokens, dim = shape
    if dtype not in _BYTES:
        raise ValueError(f"lossless codes bfloat16 and float32, not {str(dtype).removeprefix('torch.')}")
    if tokens * dim % 2:
        raise ValueError(f"lossless needs an even number of numbers a head and page, not {tokens} x {dim}")
    return LosslessForm(layers * fields * heads, tokens * dim, _BYTES[dtype])


def lossless_bound(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Most bytes of a wire row; ValueError as lossless_form."""
    return lossless_form(shape, dtype).bound


def encode_lossless(pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Gather and encode.

    Args:
        pool: [num_pages, layer, field, kv_head, token, dim], bfloat16 or float32.
        pages: [n] int64.
        out: [n, lossless_bound] uint8; what lies behind a row's length is not written.

    Returns:
        [n] int64 lengths.
    """
    form = lossless_form(pool.shape[1:], pool.dtype)
    lengths = [_encode(pool[page], form, row) for page, row in zip(pages.tolist(), out, strict=True)]
    return torch.tensor(lengths, dtype=torch.int64)


def decode_lossless(data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
    """Decode and scatter: `data` [n, lossless_bound] uint8 into pages [n] of `pool` (any float dtype).

    Raises:
        ValueError: a row is none of this form.
    """
    if not len(pages):
        return
    dtype = source_dtype(data)
    form = lossless_form(pool.shape[1:], dtype)
    same = pool.dtype == dtype
    room = torch.empty(pool.shape[1:], dtype=dtype)
    for page, row in zip(pages.tolist(), data, strict=True):
        into = pool[page] if same else room
        _decode(row, form, into)
        if not same:
            pool[page].copy_(room)


def source_dtype(data: torch.Tensor) -> torch.dtype:
    """Of the pages that were encoded, from the first of the rows; ValueError if it says none."""
    number_bytes = int(data[0, 12:HEAD_BYTES].cpu().clone().view(torch.int32)[0])
    for dtype, size in _BYTES.items():
        if size == number_bytes:
            return dtype
    raise ValueError(f"a lossless row of numbers of {number_bytes} bytes cannot be")


def check_head(head: Sequence[int], form: LosslessForm, room: int) -> None:
    """Raises ValueError if a row's head (int32 [4]) cannot be right for a row of `room` bytes."""
    length, mode, escapes, number_bytes = head
    if mode == RAW:
        right = escapes == 0 and length == form.bound
    else:
        right = mode == form.mode and 0 <= escapes <= form.max_escapes and length == form.coded_bytes(escapes)
    if not right or number_bytes != form.number_bytes or length > room:
        raise ValueError(f"a lossless row of {length} bytes, mode {mode}, {escapes} escapes cannot be")


def _encode(page: torch.Tensor, form: LosslessForm, row: torch.Tensor) -> int:
    if form.max_escapes < 0:
        return _write_raw(page, form, row)
    upper, lower = _halves(page, form)
    exponents = (upper >> 7).bitwise_and_(0xFF)
    top = exponents.amax(1, keepdim=True)
    code = (exponents - (top - CODES)).clamp_(min=0).to(torch.uint8)
    where = torch.from_numpy(np.flatnonzero(code.numpy() == 0))  # torch's own comparison and search take 5 times longer
    if len(where):
        where = where[exponents.view(-1)[where] > 0]
    if len(where) > form.max_escapes:
        return _write_raw(page, form, row)
    length = form.coded_bytes(len(where))
    row[:HEAD_BYTES] = _head(length, form.mode, len(where), form.number_bytes)
    _put(row, form.tops, top.to(torch.uint8))
    _put(row, form.mantissas, (upper & 0x7F).bitwise_or_((upper >> 8).bitwise_and_(0x80)).to(torch.uint8))
    if lower is not None:
        _put(row, form.halves, lower)
    half = form.slab_numbers // 2
    _put(row, form.codes, (code[:, half:] << 4).bitwise_or_(code[:, :half]))
    _put(row, form.escapes, where.to(torch.int32))
    _put(row, form.escapes + aligned(4 * len(where)), exponents.view(-1)[where].to(torch.int32))
    return length


def _decode(row: torch.Tensor, form: LosslessForm, page: torch.Tensor) -> None:
    head = row[:HEAD_BYTES].clone().view(torch.int32).tolist()
    check_head(head, form, len(row))
    _, mode, escapes, _ = head
    if mode == RAW:
        flat = page.view(torch.uint8).view(-1)
        flat.copy_(row[HEAD_BYTES : HEAD_BYTES + len(flat)])
        return
    slabs, n = form.slabs, form.slab_numbers
    top = row[form.tops : form.tops + slabs].to(torch.int16).view(slabs, 1)
    packed = row[form.codes : form.codes + form.numbers // 2].view(slabs, n // 2)
    code = torch.empty(slabs, n, dtype=torch.int16)
    torch.bitwise_and(packed, 15, out=code[:, : n // 2])
    torch.bitwise_right_shift(packed, 4, out=code[:, n // 2 :])
    exponents = (code + (top - CODES)).mul_(code.clamp_(max=1))  # code 0 is exponent 0
    if escapes:
        where = _words(row, form.escapes, escapes).to(torch.int64)
        if int(where.amin()) < 0 or int(where.amax()) >= form.numbers:
            raise ValueError("a lossless row has an escape outside its page")
        values = _words(row, form.escapes + aligned(4 * escapes), escapes).to(torch.int16)
        exponents.view(-1)[where] = values.bitwise_and_(0xFF)
    rest = row[form.mantissas : form.mantissas + form.numbers].view(slabs, n).to(torch.int16)
    upper = exponents.bitwise_left_shift_(7).bitwise_or_(rest & 0x7F).bitwise_or_(rest.bitwise_and_(0x80) << 8)
    if form.number_bytes == 2:
        page.view(torch.int16).view(slabs, n).copy_(upper)
        return
    words = page.view(torch.int16).view(slabs, n, 2)  # little endian: the lower half first
    words[:, :, 0] = row[form.halves : form.halves + 2 * form.numbers].clone().view(torch.int16).view(slabs, n)
    words[:, :, 1] = upper


def _halves(page: torch.Tensor, form: LosslessForm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(upper, lower) int16 [slab, n] of a page's numbers; no lower halves for bfloat16."""
    if form.number_bytes == 2:
        return page.view(torch.int16).view(form.slabs, -1), None
    words = page.view(torch.int16).view(form.slabs, -1, 2)
    return words[:, :, 1].contiguous(), words[:, :, 0].contiguous()


def _write_raw(page: torch.Tensor, form: LosslessForm, row: torch.Tensor) -> int:
    row[:HEAD_BYTES] = _head(form.bound, RAW, 0, form.number_bytes)
    _put(row, HEAD_BYTES, page)
    return form.bound


def _head(*words: int) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int32).view(torch.uint8)


def _put(row: torch.Tensor, at: int, part: torch.Tensor) -> None:
    """A part at its place, and the zeros behind it."""
    raw = part.contiguous().view(-1).view(torch.uint8)
    end = at + len(raw)
    row[at:end] = raw
    row[end : at + aligned(len(raw))] = 0


def _words(row: torch.Tensor, at: int, n: int) -> torch.Tensor:
    return row[at : at + 4 * n].clone().view(torch.int32)
