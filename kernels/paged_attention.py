"""Attention over paged keys and values, and the writing of new ones. Plain PyTorch, the CPU path.

A step's rows stand one behind the other: `q` is [tokens, heads, dim], `kv` [tokens, k|v, kv_heads, dim]. Rows of one
token (decode) come first, then the chunks. What all layers share (which page rows to gather, which slots to write, what
to mask) is worked out once a step by `plan_attention`; a layer then calls

    write_kv(kv, pool, layer, plan)             the new tokens' keys and values go to their pages
    paged_attention(q, kv, pool, layer, window, plan)

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
from torch.nn import functional

from tailrace.kernels.cpu_products import has_bf16_products

_QUERY_BLOCK = 128  # queries of a chunk that are scored at once; bounds the scores and skips what causality hides
_QUERY_STEP = 32  # a chunk's last block is padded to a multiple of this
_KEY_STEP = 64  # keys are padded to a multiple of this
_WASTE_TOKENS = 256  # padding that one more group of decode rows would cost as much as
_FUSED_KEYS = 1024  # keys up to which a chunk of one block is attended by the fused operator


@dataclass(frozen=True, slots=True)
class RowSpan:
    """A row's new tokens [start, start + num_new) and its page table, page of each ordinal: [num_pages] int.

    `num_drafts`: the last so many tokens are guesses. Rows that grow with the sequence may be written for them, since
    who comes back to such a position writes it again before anybody reads it; what is overwritten in place may not.
    `upper_from`: of a family that can begin its upper layers late (model/replay.py): they know nothing of tokens before
    this position. A row ends there, or begins there, and ends before it only if they are not wanted at all.
    """

    start: int
    num_new: int
    pages: np.ndarray
    num_drafts: int = 0
    upper_from: int = 0

    @property
    def num_kept(self) -> int:
        """Tokens whose state stays."""
        return self.num_new - self.num_drafts


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
    narrow: (first, number) of the gathered tokens to use; None for all.
    mask: [rows, 1, 1, tokens used], 0 or -inf; None if nothing is hidden.
    """

    first: int
    last: int
    gather: Sequence[torch.Tensor]
    narrow: tuple[int, int] | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries [q_first, q_last) of a chunk see its gathered keys [k_first, k_last); q_last may lie past its end.

    mask: [q_last - q_first, n], added to the scores of the last n keys.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A row of several tokens, [first, last) of the step.

    gather: as in _Group; None if its own tokens are all its keys, which are then padded to num_keys.
    """

    first: int
    last: int
    gather: Sequence[torch.Tensor] | None
    num_keys: int
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
    """Store the new tokens.  kv: [rows, k|v, kv_heads, dim] in the pool's dtype, padding included."""
    if len(kv) != plan.num_tokens:
        kv = kv[: plan.num_tokens]
    pool.slots.index_copy_(0, plan.write[layer], kv.reshape(-1, pool.dim))


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, pool: PagedPool, layer: int, window: int | None, plan: AttentionPlan
) -> torch.Tensor:
    """softmax(q k^T / sqrt(dim)) v for each row over its pages, causal, within `window` positions.

    Args:
        q: [rows, heads, dim]; the first plan.num_tokens count, what follows is padding.
        kv: [rows, k|v, kv_heads, dim], already written to the pool.

    Returns:
        [rows, heads, dim], zero for padding.
    """
    groups, chunks = plan.groups[window], plan.chunks[window]
    if len(groups) == 1 and groups[0].last == len(q):
        return _decode(q, pool, layer, groups[0])
    out = torch.zeros(q.shape, dtype=q.dtype)
    for group in groups:
        out[group.first : group.last] = _decode(q[group.first : group.last], pool, layer, group)
    for chunk in chunks:
        at = slice(chunk.first, chunk.last)
        _prefill(q[at], kv[at], pool, layer, chunk, out[at])
    return out


# ------------------------------------------------------------------------------------------------------------ running


def _decode(q: torch.Tensor, pool: PagedPool, layer: int, group: _Group) -> torch.Tensor:
    """The queries of one key head stand as a sequence of their own: one fused operator for any grouping of heads."""
    rows, heads, dim = q.shape
    past = pool.page_rows.index_select(0, group.gather[layer]).view(2, rows, pool.kv_heads, -1, dim)
    if group.narrow is not None:
        past = past.narrow(3, *group.narrow)
    k, v = past.unbind(0)
    queries = q.reshape(rows, pool.kv_heads, -1, dim)
    return functional.scaled_dot_product_attention(queries, k, v, attn_mask=group.mask).reshape(rows, heads, dim)


def _prefill(q: torch.Tensor, kv: torch.Tensor, pool: PagedPool, layer: int, chunk: _Chunk, out: torch.Tensor) -> None:
    tokens, heads, dim = q.shape
    kv_heads = pool.kv_heads
    per_group = heads // kv_heads
    if chunk.gather is None:
        past = _padded(kv.permute(1, 2, 0, 3), chunk.num_keys)
    else:
        past = pool.page_rows.index_select(0, chunk.gather[layer]).view(2, kv_heads, -1, dim)
    if q.dtype is torch.bfloat16 and not has_bf16_products():
        q, past = q.float(), past.float()
    k, v = past.unbind(0)
    if len(chunk.blocks) == 1 and chunk.num_keys <= _FUSED_KEYS:
        _prefill_fused(q, k, v, chunk.blocks[0], out)
        return
    grouped = (q * dim**-0.5).view(tokens, kv_heads, per_group, dim).permute(1, 2, 0, 3)
    grouped = _padded(grouped, chunk.blocks[-1].q_last)
    for block in chunk.blocks:
        count = block.q_last - block.q_first
        queries = grouped[:, :, block.q_first : block.q_last].reshape(kv_heads, -1, dim)
        scores = torch.bmm(queries, k[:, block.k_first : block.k_last].transpose(1, 2))
        hidden = block.mask.shape[-1]
        scores.view(kv_heads, per_group, count, -1).narrow(-1, scores.shape[-1] - hidden, hidden).add_(block.mask)
        attended = torch.bmm(scores.softmax(-1), v[:, block.k_first : block.k_last])
        attended = attended.view(kv_heads, per_group, count, dim).permute(2, 0, 1, 3)
        into = out[block.q_first : block.q_last].view(-1, kv_heads, per_group, dim)
        into.copy_(attended[: len(into)])


def _prefill_fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block, out: torch.Tensor) -> None:
    """A short chunk: its scores stay float32 inside the operator, where bmm would round them to 8 bits in bf16.

    The first word of an answer may hang on that: two near words changed places with the CPU's bf16 kernels. For more
    keys the operator takes up to twice as long as the two products.
    """
    tokens, heads, dim = q.shape
    kv_heads, keys = len(k), slice(block.k_first, block.k_last)
    grouped = q.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3)
    mask = functional.pad(block.mask[:tokens], (block.k_last - block.k_first - block.mask.shape[1], 0)).to(q.dtype)
    k, v = (x[:, None, keys].expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
    attended = functional.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    out.copy_(attended.permute(2, 0, 1, 3).reshape(tokens, heads, dim))


def _padded(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """x [a, b, n, dim] as a contiguous [a, b, tokens, dim], zero past n."""
    if x.shape[2] == tokens:
        return x.contiguous()
    padded = x.new_zeros(x.shape[0], x.shape[1], tokens, x.shape[3])
    padded[:, :, : x.shape[2]] = x
    return padded


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
    starts, ends = zip(*((start, end) for _, start, end in seen[first:last]), strict=True)
    skip, width = min(starts), max(ends)
    table = np.zeros((last - first, -(-width // size)), np.int64)
    for i, (page, _, end) in enumerate(seen[first:last]):
        pages = rows[first + i].pages[page : page - (-end // size)]
        table[i, : len(pages)] = pages
    mask = None
    if max(starts) != skip or min(ends) != width:
        at = np.arange(skip, width)
        hidden = (at < np.array(starts)[:, None]) | (at >= np.array(ends)[:, None])
        mask = _mask(hidden, pool.kv.dtype)[:, None, None]
    narrow = None if (skip, width) == (0, table.shape[1] * size) else (skip, width - skip)
    return _Group(first, last, _gather_index(pool, table), narrow, mask)


def _plan_chunk(pool: PagedPool, row: RowSpan, at: int, window: int | None) -> _Chunk:
    size, dtype = pool.tokens_per_page, pool.kv.dtype
    page, _, end = _seen(row, window, size)
    origin = page * size if row.start else 0  # absolute position of the first key
    num_keys, gather = _rounded(row.start + row.num_new - origin), None
    if row.start:
        table = np.zeros((1, -(-num_keys // size)), np.int64)
        pages = row.pages[page : page - (-end // size)]
        table[0, : len(pages)] = pages
        gather, num_keys = _gather_index(pool, table), table.shape[1] * size
    blocks = []
    for q_first in range(0, row.num_new, _QUERY_BLOCK):
        q_last = min(q_first + _QUERY_BLOCK, q_first - (q_first - row.num_new) // _QUERY_STEP * _QUERY_STEP)
        first, last = row.start + q_first, row.start + q_last
        k_last = min(_rounded(last - origin), num_keys)
        queries = np.arange(first, last)[:, None]
        if window is None or last <= window:
            k_first = 0
            keys = np.arange(first, origin + k_last)
            mask = _mask(keys > queries, dtype)
        else:
            k_first = max(0, first + 1 - window - origin) // _KEY_STEP * _KEY_STEP
            keys = np.arange(origin + k_first, origin + k_last)
            mask = _mask((keys > queries) | (keys <= queries - window), dtype)
        blocks.append(_Block(q_first, q_last, k_first, k_last, mask))
    return _Chunk(at, at + row.num_new, gather, num_keys, tuple(blocks))


def _rounded(keys: int) -> int:
    """Few different numbers of keys: oneDNN compiles a kernel for each, which takes longer than it runs."""
    step = _KEY_STEP * (1 if keys <= 512 else 2 if keys <= 1024 else 4)
    return -(-keys // step) * step


def _mask(hidden: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0))).to(dtype)
