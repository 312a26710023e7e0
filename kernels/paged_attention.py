"""Attention over paged keys and values, and the writing of new ones. Plain PyTorch, the CPU path.

A step's rows stand one behind the other: `q` is [tokens, heads, dim], `kv` [tokens, k|v, kv_heads, dim]. Rows of one
token (decode) come first, then the chunks. What all layers share (which page rows to gather, which slots to write, what
to mask) is worked out once a step by `plan_attention`; a layer then calls

    write_kv(kv, pool, layer, plan)             the new tokens' keys and values go to their pages
    paged_attention(q, kv, pool, layer, window, plan, out)

Every masked element that may be read is finite: page 0 is kept so by its owner, and the rest of a page is cleared when
its first token is written (`PagedPool.clear_fresh`). Without that a NaN left by an earlier owner would pass the mask,
since 0 * NaN is NaN.

Knows no sequence and no model; a wrong page number reads another's page, so tables are the caller's duty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

_QUERY_BLOCK = 128  # queries of a chunk that are scored at once; bounds the scores and skips what causality hides
_WASTE_TOKENS = 256  # padding that one more group of decode rows would cost as much as


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row's new tokens [start, start + num_new) and its page table, page of each ordinal: [num_pages] int."""

    start: int
    num_new: int
    pages: np.ndarray


class PagedPool:
    """Views of a pool [num_pages, layer, field (k, v), kv_head, token, dim] that the kernels index."""

    def __init__(self, kv: torch.Tensor) -> None:
        if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
            raise ValueError(f"a pool is contiguous [page, layer, k|v, kv_head, token, dim], not {tuple(kv.shape)}")
        self.kv = kv
        self.num_pages, self.num_layers, _, self.kv_heads, self.tokens_per_page, self.dim = kv.shape
        self.page_rows = kv.view(-1, self.tokens_per_page * self.dim)  # one row: a head's tokens of one page
        self.slots = kv.view(-1, self.dim)

    def clear_fresh(self, rows: Sequence[RowSpan]) -> None:
        """Zero each page whose first token these rows write and whose last token they do not."""
        size = self.tokens_per_page
        for row in rows:
            end = row.start + row.num_new
            ordinal = (end - 1) // size
            if end % size and ordinal * size >= row.start:
                self.kv[int(row.pages[ordinal])].zero_()


@dataclass(frozen=True, slots=True)
class _Group:
    """Decode rows [first, last) of a step, attended together.

    gather: a layer each, index into PagedPool.page_rows, [k|v, row, kv_head, page] flat.
    mask: [rows * kv_heads, 1, width] float32, 0 or -inf, or None if nothing is hidden in tokens [skip, skip + width).
    """

    first: int
    last: int
    gather: Sequence[torch.Tensor]
    skip: int
    width: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [q_first, q_last) of a chunk see its gathered keys [k_first, k_last).

    mask: [q_last - q_first, n] float32, added to the scores of the last n keys; None hides nothing.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens, [first, last) of the step. gather: as in _Group; None if its own tokens are all keys."""

    first: int
    last: int
    gather: Sequence[torch.Tensor] | None
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of one step; see the module's docstring. write: a layer each, index into PagedPool.slots."""

    num_tokens: int
    write: Sequence[torch.Tensor]
    groups: dict[int | None, tuple[_Group, ...]]
    chunks: dict[int | None, tuple[_Chunk, ...]]


def plan_attention(pool: PagedPool, rows: Sequence[RowSpan], windows: Sequence[int | None]) -> AttentionPlan:
    """Work out a step's indices.

    Args:
        rows: rows of one new token first, then the others.
        windows: the distinct window sizes of the model's layers (positions seen, own included); None is all.
    """
    num_decode = sum(1 for row in rows if row.num_new == 1)
    decode, chunks = rows[:num_decode], rows[num_decode:]
    starts = np.cumsum([num_decode] + [row.num_new for row in chunks])
    return AttentionPlan(
        num_tokens=int(starts[-1]),
        write=_write_index(pool, rows),
        groups={w: _plan_groups(pool, decode, w) for w in windows},
        chunks={
            w: tuple(_plan_chunk(pool, row, int(at), w) for row, at in zip(chunks, starts, strict=False))
            for w in windows
        },
    )


def write_kv(kv: torch.Tensor, pool: PagedPool, layer: int, plan: AttentionPlan) -> None:
    """Store the new tokens.  kv: [tokens, k|v, kv_heads, dim] in the pool's dtype."""
    pool.slots.index_copy_(0, plan.write[layer], kv.reshape(-1, pool.dim))


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    pool: PagedPool,
    layer: int,
    window: int | None,
    plan: AttentionPlan,
    out: torch.Tensor,
) -> None:
    """softmax(q k^T / sqrt(dim)) v for each row over its pages, causal, within `window` positions.

    Args:
        q: [tokens, heads, dim].
        kv: [tokens, k|v, kv_heads, dim], already written to the pool.
        out: [tokens, heads, dim], written.
    """
    for group in plan.groups[window]:
        _decode(q[group.first : group.last], pool, layer, group, out[group.first : group.last])
    for chunk in plan.chunks[window]:
        at = slice(chunk.first, chunk.last)
        _prefill(q[at], kv[at], pool, layer, chunk, out[at])


# ------------------------------------------------------------------------------------------------------------ running


def _decode(q: torch.Tensor, pool: PagedPool, layer: int, group: _Group, out: torch.Tensor) -> None:
    rows, heads, dim = q.shape
    kv_heads = pool.kv_heads
    past = pool.page_rows.index_select(0, group.gather[layer]).view(2, rows * kv_heads, -1, dim)
    past = past[:, :, group.skip : group.skip + group.width].to(torch.float32)
    scaled = q.to(torch.float32).mul_(dim**-0.5).view(rows * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(scaled, past[0].transpose(1, 2))
    if group.mask is not None:
        scores += group.mask
    out.copy_(torch.bmm(scores.softmax(-1), past[1]).view(rows, heads, dim))


def _prefill(q: torch.Tensor, kv: torch.Tensor, pool: PagedPool, layer: int, chunk: _Chunk, out: torch.Tensor) -> None:
    tokens, heads, dim = q.shape
    kv_heads = pool.kv_heads
    per_group = heads // kv_heads
    if chunk.gather is None:
        keys = kv.permute(1, 2, 0, 3)  # [k|v, kv_head, token, dim]
    else:
        keys = pool.page_rows.index_select(0, chunk.gather[layer]).view(2, kv_heads, -1, dim)
    k, v = keys.to(torch.float32)
    scaled = q.to(torch.float32).mul_(dim**-0.5).view(tokens, kv_heads, per_group, dim).permute(1, 2, 0, 3)
    for block in chunk.blocks:
        count = block.q_last - block.q_first
        queries = scaled[:, :, block.q_first : block.q_last].reshape(kv_heads, -1, dim)
        scores = torch.bmm(queries, k[:, block.k_first : block.k_last].transpose(1, 2))
        if block.mask is not None:
            hidden = scores.view(kv_heads, per_group, count, -1)
            hidden[..., hidden.shape[-1] - block.mask.shape[-1] :] += block.mask
        attended = torch.bmm(scores.softmax(-1), v[:, block.k_first : block.k_last])
        attended = attended.view(kv_heads, per_group, count, dim).permute(2, 0, 1, 3)
        out[block.q_first : block.q_last].view(count, kv_heads, per_group, dim).copy_(attended)


# ----------------------------------------------------------------------------------------------------------- planning


def _layers(pool: PagedPool, base: np.ndarray, layer_stride: int) -> Sequence[torch.Tensor]:
    """[n] index of layer 0 -> one [n] tensor a layer."""
    offsets = np.arange(pool.num_layers, dtype=np.int64)[:, None] * layer_stride
    return torch.from_numpy(offsets + base.reshape(1, -1)).unbind(0)


def _write_index(pool: PagedPool, rows: Sequence[RowSpan]) -> Sequence[torch.Tensor]:
    size = pool.tokens_per_page
    page_slots = pool.num_layers * 2 * pool.kv_heads * size
    first = []
    for row in rows:
        positions = np.arange(row.start, row.start + row.num_new)
        first.append(row.pages[positions // size].astype(np.int64) * page_slots + positions % size)
    heads = np.arange(2 * pool.kv_heads, dtype=np.int64) * size
    return _layers(pool, np.concatenate(first)[:, None] + heads, 2 * pool.kv_heads * size)


def _gather_index(pool: PagedPool, table: np.ndarray) -> Sequence[torch.Tensor]:
    """table: [rows, pages] -> index into page_rows, [k|v, row, kv_head, page] flat, a layer each."""
    heads = pool.kv_heads
    base = table.astype(np.int64)[:, None, :] * (pool.num_layers * 2 * heads) + np.arange(heads)[:, None]
    return _layers(pool, np.stack((base, base + heads)), 2 * heads)


def _seen(row: RowSpan, window: int | None, size: int) -> tuple[int, int, int]:
    """(first page ordinal gathered, first token seen, past-the-last token), tokens from that page's start."""
    end = row.start + row.num_new
    first_token = 0 if window is None else max(0, row.start + 1 - window)
    page = first_token // size
    return page, first_token - page * size, end - page * size


def _plan_groups(pool: PagedPool, rows: Sequence[RowSpan], window: int | None) -> tuple[_Group, ...]:
    """Neighbouring decode rows share a group until the padding would cost more than a group of their own."""
    size = pool.tokens_per_page
    seen = [_seen(row, window, size) for row in rows]
    groups = []
    first = 0
    while first < len(rows):
        last, widest, total = first, 0, 0
        while last < len(rows):
            new_widest, new_total = max(widest, seen[last][2]), total + seen[last][2]
            if new_widest * (last + 1 - first) - new_total > _WASTE_TOKENS:
                break
            last, widest, total = last + 1, new_widest, new_total
        groups.append(_plan_group(pool, rows, seen, first, last))
        first = last
    return tuple(groups)


def _plan_group(
    pool: PagedPool, rows: Sequence[RowSpan], seen: Sequence[tuple[int, int, int]], first: int, last: int
) -> _Group:
    size = pool.tokens_per_page
    width = max(end for _, _, end in seen[first:last])
    table = np.zeros((last - first, -(-width // size)), np.int64)
    for i in range(first, last):
        page, _, end = seen[i]
        pages = rows[i].pages[page : page - (-end // size)]
        table[i - first, : len(pages)] = pages
    bounds = np.array([(start, end) for _, start, end in seen[first:last]])
    skip = int(bounds[:, 0].min())
    mask = None
    if (bounds[:, 0] != skip).any() or (bounds[:, 1] != width).any():
        at = np.arange(skip, width)
        hidden = (at < bounds[:, :1]) | (at >= bounds[:, 1:])
        rows_mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        mask = rows_mask.repeat_interleave(pool.kv_heads, 0)[:, None]
    return _Group(first, last, _gather_index(pool, table), skip, width - skip, mask)


def _plan_chunk(pool: PagedPool, row: RowSpan, at: int, window: int | None) -> _Chunk:
    size = pool.tokens_per_page
    page, _, end = _seen(row, window, size)
    origin = page * size if row.start else 0  # absolute position of the first gathered key
    gather = None
    if row.start:
        gather = _gather_index(pool, row.pages[None, page : page - (-end // size)])
    blocks = []
    for q_first in range(0, row.num_new, _QUERY_BLOCK):
        q_last = min(q_first + _QUERY_BLOCK, row.num_new)
        first, last = row.start + q_first, row.start + q_last
        k_first = 0 if window is None else max(0, first + 1 - window)
        if window is None or last <= window:
            mask = torch.full((q_last - q_first,) * 2, -torch.inf).triu_(1)
        else:
            queries, keys = np.arange(first, last)[:, None], np.arange(k_first, last)
            hidden = (keys > queries) | (keys <= queries - window)
            mask = torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0)))
        blocks.append(_Block(q_first, q_last, k_first - origin, last - origin, mask))
    return _Chunk(at, at + row.num_new, gather, tuple(blocks))
