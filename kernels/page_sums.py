"""Sums over pages: 64 bits for each (page, layer, field, kv_head), by which two processes see that they hold the same.

    sum = (word[0] * w[0] + word[1] * w[1] + ...) mod 2^64        w[i]: odd, drawn from the position i alone

A word is 32 bits of one slice `[token, dim]` (16 or 8 where a token's row is no multiple of that). Weights are odd, so
any change of one word changes the sum; words, rows or pages that changed places have other weights. The sum is linear:
the first n tokens of a slice have the sum of its first words, whatever stands behind them.

`page_sums` is the plain twin of page_sums_triton.py, for any device; `slice_sums` is the same for host memory at the
rate of a copy, without torch's temporaries. All give the same bits. Knows no page book and no peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

SUM_BYTES = 8
_BLOCK_BYTES = 1 << 20  # small pages are gathered this much at a time; it stays in the cache
_WORDS = {4: np.uint32, 2: np.uint16, 1: np.uint8}
_TORCH_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def word_bytes(row_bytes: int) -> int:
    """Bytes of a word where one token's row of a slice has `row_bytes`."""
    return next(size for size in _WORDS if row_bytes % size == 0)


@cache
def weights(num_words: int) -> np.ndarray:
    """[num_words] uint64, read-only: w[i] depends on i alone (splitmix64) and is odd."""
    x = np.arange(1, num_words + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    w = (x ^ (x >> np.uint64(31))) | np.uint64(1)
    w.flags.writeable = False
    return w


def page_sums(pages: torch.Tensor, num_tokens: int | None = None) -> torch.Tensor:
    """The plain twin.

    Args:
        pages: [n, layer, field, kv_head, token, dim] of any dtype.
        num_tokens: of each slice only this many tokens; all if None.

    Returns:
        [n, layer, field, kv_head] int64: the bits of the sums.
    """
    *slices, tokens, _ = pages.shape
    row_bytes = pages.shape[-1] * pages.element_size()
    size = word_bytes(row_bytes)
    used = (tokens if num_tokens is None else num_tokens) * row_bytes // size
    words = pages.contiguous().view(torch.uint8).view(*slices, tokens * row_bytes).view(_TORCH_WORDS[size])
    wide = words[..., :used].to(torch.int64) & ((1 << 8 * size) - 1)
    return (wide * torch.from_numpy(weights(used).astype(np.int64)).to(pages.device)).sum(-1)


def slice_sums(
    memory: np.ndarray,
    pages: Sequence[int] | np.ndarray,
    row_bytes: int,
    tokens: int,
    span: range,
    weight_from: int = 0,
) -> np.ndarray:
    """Sums of pages in host memory.

    Args:
        memory: [num_pages, bytes_per_page] uint8; a page is slices of `tokens` rows of `row_bytes`.
        pages: [n] which of them.
        span: of each slice only these rows (step 1).
        weight_from: the first of them has the weights of this row. Parts of a slice that stand elsewhere, each summed
            with the weights of where it came from, add up to the slice's sum.

    Returns:
        [n, slices] uint64.
    """
    size = word_bytes(row_bytes)
    slices, row_words = memory.shape[1] // (tokens * row_bytes), row_bytes // size
    which = np.asarray(pages, np.int64)
    sums = np.empty((len(which), slices), np.uint64)
    at_once = max(1, _BLOCK_BYTES // memory.shape[1])
    weight = weights((weight_from + len(span)) * row_words)[weight_from * row_words :]
    for start in range(0, len(which), at_once):
        some = which[start : start + at_once]
        block = memory[some[0] : some[0] + 1] if len(some) == 1 else memory.take(some, 0)
        words = block.reshape(len(some) * slices, tokens * row_bytes).view(_WORDS[size])
        found = np.einsum("pk,k->p", words[:, span.start * row_words : span.stop * row_words], weight, dtype=np.uint64)
        sums[start : start + at_once] = found.reshape(len(some), slices)
    return sums
