"""The Triton kernel of page_sums.py: one program a slice of a page.

Bit-equal to its twin: integers mod 2^64 have no order of addition. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from tailrace.kernels.page_sums import weights, word_bytes

_BLOCK = 512
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit
def _sum_slices(
    words,  # pointer to int32 | int16 | uint8 [num_pages, slices, words_per_slice]
    pages,  # pointer to int64 [n]
    weight,  # pointer to int64 [used]
    sums,  # pointer to int64 [n, slices]
    slices,
    words_per_slice,
    used,  # words of a slice that count
    MASK: tl.constexpr,  # zero-extends a word
    BLOCK: tl.constexpr,
):
    """grid (n, slices)."""
    row, part = tl.program_id(0), tl.program_id(1)
    page = tl.load(pages + row)
    first = (page * slices + part) * words_per_slice  # 64 bits: a pool passes 2^31 words
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, used, BLOCK):
        at = start + tl.arange(0, BLOCK)
        word = tl.load(words + first + at, mask=at < used, other=0).to(tl.int64) & MASK
        total += word * tl.load(weight + at, mask=at < used, other=0)
    tl.store(sums + row * slices + part, tl.sum(total, 0))


def page_sums(pool: torch.Tensor, pages: torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
    """Sums of some pages of a pool.

    Args:
        pool: [num_pages, layer, field, kv_head, token, dim], contiguous.
        pages: [n] int64 on the pool's device.
        num_tokens: of each slice only this many tokens; all if None.

    Returns:
        [n, layer, field, kv_head] int64: the bits of the sums.
    """
    tokens, dim = pool.shape[4:]
    row_bytes = dim * pool.element_size()
    size = word_bytes(row_bytes)
    words = pool.view(torch.uint8).view(len(pool), -1).view(_WORDS[size])
    used = (tokens if num_tokens is None else num_tokens) * row_bytes // size
    slices = pool.shape[1] * pool.shape[2] * pool.shape[3]
    sums = torch.empty(len(pages), *pool.shape[1:4], dtype=torch.int64, device=pool.device)
    if used and len(pages):
        weight = torch.from_numpy(weights(used).astype(np.int64)).to(pool.device)
        grid = (len(pages), slices)
        _sum_slices[grid](
            words, pages, weight, sums, slices, tokens * row_bytes // size, used, MASK=(1 << 8 * size) - 1, BLOCK=_BLOCK
        )
    else:
        sums.zero_()
    return sums
