"""The Triton kernels of device_attention.py, same signatures.

Decode: the keys of a row are cut into pieces; a program takes one piece of one key head and all query heads that share
it (grouped-query attention reads each key once), and leaves an unfinished sum, its largest logit and its weight; a
second kernel joins the pieces. How many programs are launched follows from shapes alone, never from lengths, so that a
captured launch serves any lengths; which piece of which row each takes stands in the plan's tasks, since one long row
among short ones would else be the work of few. Without tasks all rows are cut alike. Prefill: a program takes a block
of a chunk's queries of one head and walks over its keys, those that all its queries see without a mask first, then the
rest; late blocks, which see most, start first. Keys and values are read where they stand in their pages, and nothing
past a row's length is. bfloat16 and float16 products run on tensor cores and are summed in float32; float32 products
are exact float32. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tailrace.kernels.device_attention import check_decode, check_prefill
from tailrace.kernels.device_plan import MOST_PIECES, DecodeTasks
from tailrace.kernels.overlap_triton import begin, overlapped

_LOG2_E = 1.4426950408889634
_LEAST_ROWS = 16  # of a product on tensor cores
_MOST_QUERIES = 64  # query heads of one key head that one decode program takes
_DECODE_PROGRAMS = 264  # that keep an H200 busy: keys are cut into pieces until there are so many
_JOINED, _JOINED_ALONE = 4, 16  # heads that a program joins; fewer rows than that: one
_LEAST_PIECE = 64  # keys; the pieces of a pool's longest row are not shorter


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes of a launch. queries: of a prefill program; keys: that are held at once."""

    keys: int
    warps: int
    stages: int
    queries: int = 0


def decode_tile(dim: int, dtype: torch.dtype, programs: int) -> Tile:
    """By what was fastest on an H200. Few programs wait less for memory with more asked for ahead."""
    if dtype is torch.float32:
        return Tile(keys=32, warps=4, stages=2)
    if dim > 128:
        return Tile(keys=64, warps=4, stages=2)
    return Tile(keys=64, warps=4, stages=5 if programs < 2 * _DECODE_PROGRAMS else 3)


def prefill_tile(dim: int, dtype: torch.dtype, max_new: int, heads: int) -> Tile:
    """By what was fastest on an H200."""
    if dtype is torch.float32:
        return Tile(queries=32, keys=32, warps=4, stages=1)
    if dim <= 64:
        return Tile(queries=128, keys=128, warps=4, stages=3)
    if dim > 128:
        return Tile(queries=128, keys=64, warps=8, stages=2)
    if max_new <= 64:
        return Tile(queries=64, keys=64, warps=4, stages=3)
    if triton.cdiv(max_new, 256) * heads < _DECODE_PROGRAMS // 2:  # fewer than there are multiprocessors
        return Tile(queries=128, keys=128, warps=8, stages=3)
    return Tile(queries=256, keys=64, warps=8, stages=3)


def decode_splits(programs: int, longest: int) -> int:
    """Pieces of each row where no tasks are given, from shapes alone.

    programs: of a launch with one piece a row.  longest: tokens that the page table has room for.
    """
    return max(1, min(_DECODE_PROGRAMS // programs, MOST_PIECES, longest // _LEAST_PIECE))


@triton.jit
def _dot(a, b, EXACT: tl.constexpr):
    """float32 sum of products; of float32 numbers without TF32."""
    if EXACT:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def _token_places(table, at, there, page_rise, PAGE: tl.constexpr, DIM: tl.constexpr):
    """64-bit places in a key head's part of the pool of tokens `at`; anything where they are not `there`."""
    page = tl.load(table + at // PAGE, mask=there, other=0).to(tl.int64)
    return page * page_rise + (at % PAGE) * DIM


@triton.jit
def _decode(
    q,  # pointer to [rows, HEADS, DIM], rows q_rise numbers apart
    keys,  # pointer to the layer's keys in page 0, [.., KV_HEADS, PAGE, DIM], pages page_rise numbers apart
    values,  # likewise
    table,  # pointer to int32 [rows, pages], rows table_rise numbers apart
    lengths,  # pointer to int32 [rows]
    tasks,  # pointer to int32 [tasks, 4]: row or -1, piece, pieces of the row, its length; anything if SPLITS
    sinks,  # pointer to float32 [HEADS]; anything if not SINKS
    out,  # pointer to [rows, HEADS, DIM], for rows of one piece
    sums,  # pointer to float32 [tasks, HEADS, DIM], for rows of several
    tops,  # pointer to float32 [tasks, HEADS, 2]: largest logit (base 2), sum of the powers below it
    q_rise,
    table_rise,
    page_rise,
    scale,  # times log2(e)
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,  # heads a program
    KEYS: tl.constexpr,  # tokens a step
    SPLITS: tl.constexpr,  # pieces of each row, whose tasks then are row * SPLITS + piece; 0: as `tasks` says
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (KV_HEADS * ceil(HEADS / KV_HEADS / QUERIES), tasks). Piece i has the steps i, i + pieces, .."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCKS: tl.constexpr = (GROUP + QUERIES - 1) // QUERIES
    kv_head = tl.program_id(0) // BLOCKS
    member = tl.program_id(0) % BLOCKS * QUERIES + tl.arange(0, QUERIES)
    task = tl.program_id(1).to(tl.int64)
    begin(OVERLAPPED)
    if SPLITS:
        row, piece, pieces = task // SPLITS, tl.program_id(1) % SPLITS, SPLITS
        length = tl.load(lengths + row)
    else:
        row, piece = tl.load(tasks + 4 * task).to(tl.int64), tl.load(tasks + 4 * task + 1)
        pieces, length = tl.load(tasks + 4 * task + 2), tl.load(tasks + 4 * task + 3)
    if row >= 0:
        column = tl.arange(0, DIM)
        head = kv_head * GROUP + member
        own = member < GROUP
        queries = tl.load(q + row * q_rise + head[:, None] * DIM + column[None, :], mask=own[:, None], other=0.0)
        first = tl.maximum(length - window, 0) if WINDOWED else length * 0
        keys += kv_head * PAGE * DIM
        values += kv_head * PAGE * DIM
        table += row * table_rise
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        total = tl.zeros((QUERIES, DIM), tl.float32)
        for start in range(first + piece * KEYS, length, pieces * KEYS):
            at = start + tl.arange(0, KEYS)
            there = at < length
            place = _token_places(table, at, there, page_rise, PAGE, DIM)[:, None] + column[None, :]
            k = tl.load(keys + place, mask=there[:, None], other=0.0)
            logits = tl.where(there[None, :], _dot(queries, tl.trans(k), EXACT) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))  # finite: the step has a key
            powers = tl.exp2(logits - higher[:, None])
            shrink = tl.exp2(top - higher)
            weight = weight * shrink + tl.sum(powers, 1)
            v = tl.load(values + place, mask=there[:, None], other=0.0)
            total = total * shrink[:, None] + _dot(powers.to(v.dtype), v, EXACT)
            top = higher
        if pieces == 1:
            if SINKS:
                sink = tl.load(sinks + head, mask=own, other=0.0) * 1.4426950408889634
                higher = tl.maximum(top, sink)
                shrink = tl.exp2(top - higher)
                weight = weight * shrink + tl.exp2(sink - higher)
                total *= shrink[:, None]
            total = tl.where(length > 0, total / tl.where(weight != 0, weight, 1.0)[:, None], 0.0)
            place = (row * HEADS + head)[:, None] * DIM + column[None, :]
            tl.store(out + place, total.to(out.dtype.element_ty), mask=own[:, None])
        else:
            part = task * HEADS + head
            tl.store(tops + 2 * part, top, mask=own)
            tl.store(tops + 2 * part + 1, weight, mask=own)
            tl.store(sums + part[:, None] * DIM + column[None, :], total, mask=own[:, None])


@triton.jit
def _join(
    firsts,  # pointer to int32 [rows, 2]: first task of a row, its pieces; anything if SPLITS
    lengths,  # as of _decode
    sums,
    tops,
    sinks,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # heads a program
    PIECES: tl.constexpr,  # the most of a row, rounded up to a power of two
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (HEADS / BLOCK, rows)."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, DIM)
    piece = tl.arange(0, PIECES)
    begin(OVERLAPPED)
    if SPLITS:
        first, pieces = row * SPLITS, SPLITS
    else:
        first, pieces = tl.load(firsts + 2 * row).to(tl.int64), tl.load(firsts + 2 * row + 1)
    if pieces > 1:
        there = piece < pieces
        length = tl.load(lengths + row)
        for i in tl.static_range(BLOCK):
            head = tl.program_id(0) * BLOCK + i
            place = (first + piece) * HEADS + head
            top = tl.load(tops + 2 * place, mask=there, other=float("-inf"))
            weight = tl.load(tops + 2 * place + 1, mask=there, other=0.0)
            total = tl.load(sums + place[:, None] * DIM + column[None, :], mask=there[:, None], other=0.0)
            sink = tl.load(sinks + head) * 1.4426950408889634 if SINKS else float("-inf")
            base = tl.maximum(tl.max(top, 0), sink)
            base = tl.where(base == float("-inf"), 0.0, base)
            power = tl.exp2(top - base)
            whole = tl.sum(weight * power, 0) + tl.exp2(sink - base)
            result = tl.sum(total * power[:, None], 0) / tl.where(whole != 0, whole, 1.0)
            result = tl.where(length > 0, result, 0.0)
            tl.store(out + (row * HEADS + head) * DIM + column, result.to(out.dtype.element_ty))


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    page_table: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tasks: DecodeTasks | None = None,
    splits: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As device_attention.decode_attention; splits (pieces of each row) and tile only to be measured."""
    check_decode(q, kv, layer, page_table, lengths, window, sinks, out, tasks)
    rows, heads, dim = q.shape
    kv_heads, page = kv.shape[3], kv.shape[4]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not rows:
        return out
    group = heads // kv_heads
    queries = min(_MOST_QUERIES, max(_LEAST_ROWS, triton.next_power_of_2(group)))
    each = kv_heads * triton.cdiv(group, queries)
    if tasks is None:
        splits = splits or decode_splits(rows * each, page_table.shape[1] * page)
        count, listed, firsts, most = rows * splits, lengths, lengths, triton.next_power_of_2(splits)
    else:
        splits, count, listed, firsts, most = 0, len(tasks.tasks), tasks.tasks, tasks.firsts, MOST_PIECES
    tile = tile or decode_tile(dim, q.dtype, count * each)
    sums, tops = out, out
    if splits != 1:
        sums = torch.empty(count * heads * dim, dtype=torch.float32, device=q.device)
        tops = torch.empty(2 * count * heads, dtype=torch.float32, device=q.device)
    part, learned = kv[0, layer], lengths if sinks is None else sinks
    constants = {"HEADS": heads, "DIM": dim, "SPLITS": splits, "SINKS": sinks is not None} | overlapped(q.device)
    _decode[(each, count)](
        q, part[0], part[1], page_table, lengths, listed, learned, out, sums, tops,
        q.stride(0), page_table.stride(0), kv.stride(0), scale * _LOG2_E, window or 0,
        KV_HEADS=kv_heads, PAGE=page, QUERIES=queries, KEYS=tile.keys, WINDOWED=window is not None,
        EXACT=q.dtype is torch.float32, num_warps=tile.warps, num_stages=tile.stages, **constants,
    )  # fmt: skip
    if splits != 1:
        block = 1 if rows < _JOINED_ALONE or heads % _JOINED else _JOINED
        _join[(heads // block, rows)](
            firsts, lengths, sums, tops, learned, out, BLOCK=block, PIECES=most, num_warps=4, **constants
        )
    return out


# ------------------------------------------------------------------------------------------------------------- prefill


@triton.jit
def _walk(
    total,  # [QUERIES, DIM] float32: sum of powers times values
    weight,  # [QUERIES] float32: sum of powers
    top,  # [QUERIES] float32: largest logit, base 2
    queries,  # [QUERIES, DIM]
    position,  # [QUERIES] int32
    keys,
    values,
    table,
    low,
    high,
    length,
    page_rise,
    scale,
    window,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """The running softmax over keys [low, high); all queries see all of them unless MASKED."""
    column = tl.arange(0, DIM)
    for start in range(low, high, KEYS):
        at = start + tl.arange(0, KEYS)
        if MASKED:
            there = at < length
            place = _token_places(table, at, there, page_rise, PAGE, DIM)[:, None] + column[None, :]
            k = tl.load(keys + place, mask=there[:, None], other=0.0)
        else:
            place = (tl.load(table + at // PAGE).to(tl.int64) * page_rise + (at % PAGE) * DIM)[:, None] + column[
                None, :
            ]
            k = tl.load(keys + place)
        logits = _dot(queries, tl.trans(k), EXACT)
        if MASKED:
            seen = at[None, :] <= position[:, None]
            if WINDOWED:
                seen = seen & (at[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            powers = tl.exp2(logits - base[:, None])
            shrink = tl.exp2(top - base)
        else:
            higher = tl.maximum(top, tl.max(logits, 1) * scale)
            powers = tl.exp2(logits * scale - higher[:, None])
            shrink = tl.exp2(top - higher)
        weight = weight * shrink + tl.sum(powers, 1)
        total = total * shrink[:, None]
        v = tl.load(values + place, mask=there[:, None], other=0.0) if MASKED else tl.load(values + place)
        if EXACT:
            total += tl.dot(powers, v, input_precision="ieee")
        else:
            total = tl.dot(powers.to(v.dtype), v, total)
        top = higher
    return total, weight, top


@triton.jit
def _prefill(
    q,  # pointer to [tokens, HEADS, DIM], tokens q_rise numbers apart
    keys,  # as of _decode
    values,
    starts,  # pointer to int32 [chunks + 1]
    context,  # pointer to int32 [chunks]
    table,  # pointer to int32 [chunks, pages], rows table_rise numbers apart
    sinks,  # pointer to float32 [HEADS]; anything if not SINKS
    out,  # pointer to [tokens, HEADS, DIM]
    q_rise,
    table_rise,
    page_rise,
    scale,  # times log2(e), above 0
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    EXACT: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """grid (ceil(max_new / QUERIES) * HEADS, chunks)."""
    chunk = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEADS
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // HEADS
    begin(OVERLAPPED)
    first = tl.load(starts + chunk)
    new = tl.load(starts + chunk + 1) - first
    if block * QUERIES < new:
        before = tl.load(context + chunk)
        length = before + new
        number = block * QUERIES + tl.arange(0, QUERIES)
        position = before + number
        column = tl.arange(0, DIM)
        token = first.to(tl.int64) + number
        own = number < new
        queries = tl.load(q + token[:, None] * q_rise + head * DIM + column[None, :], mask=own[:, None], other=0.0)
        keys += head // (HEADS // KV_HEADS) * PAGE * DIM
        values += head // (HEADS // KV_HEADS) * PAGE * DIM
        table += chunk * table_rise
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        weight = tl.zeros((QUERIES,), tl.float32)
        total = tl.zeros((QUERIES, DIM), tl.float32)
        low = before * 0
        if WINDOWED:
            low = tl.maximum(before + block * QUERIES + 1 - window, 0) // KEYS * KEYS
        else:
            shared = (before + block * QUERIES + 1) // KEYS * KEYS  # keys that each of the queries sees
            total, weight, top = _walk(
                total, weight, top, queries, position, keys, values, table, low, shared, length, page_rise, scale,
                window, DIM, PAGE, KEYS, False, False, EXACT,
            )  # fmt: skip
            low = shared
        high = tl.minimum(before + (block + 1) * QUERIES, length)
        total, weight, top = _walk(
            total, weight, top, queries, position, keys, values, table, low, high, length, page_rise, scale,
            window, DIM, PAGE, KEYS, True, WINDOWED, EXACT,
        )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks + head) * 1.4426950408889634
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            weight = weight * shrink + tl.exp2(sink - higher)
            total *= shrink[:, None]
        total = total / tl.where(weight != 0, weight, 1.0)[:, None]
        place = (token * HEADS + head)[:, None] * DIM + column[None, :]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=own[:, None])


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    layer: int,
    chunk_starts: torch.Tensor,
    context: torch.Tensor,
    chunk_pages: torch.Tensor,
    max_new: int,
    *,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """As device_attention.prefill_attention, scale above 0; tile only to be measured."""
    check_prefill(q, kv, layer, chunk_starts, context, chunk_pages, max_new, window, sinks, out)
    if scale <= 0:
        raise ValueError(f"scale is {scale}, expected above 0")
    heads, dim = q.shape[1:]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    tile = tile or prefill_tile(dim, q.dtype, max_new, heads)
    blocks = triton.cdiv(max_new, tile.queries)
    if not blocks or not len(context):
        return out
    part = kv[0, layer]
    _prefill[(blocks * heads, len(context))](
        q, part[0], part[1], chunk_starts, context, chunk_pages, out if sinks is None else sinks, out,
        q.stride(0), chunk_pages.stride(0), kv.stride(0), scale * _LOG2_E, window or 0,
        HEADS=heads, KV_HEADS=kv.shape[3], DIM=dim, PAGE=kv.shape[4], QUERIES=tile.queries, KEYS=tile.keys,
        WINDOWED=window is not None, SINKS=sinks is not None, EXACT=q.dtype is torch.float32,
        num_warps=tile.warps, num_stages=tile.stages, **overlapped(q.device),
    )  # fmt: skip
    return out
