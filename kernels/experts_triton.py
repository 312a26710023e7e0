"""The Triton kernels of experts.py, same signatures: routing, and the grouped products of chosen experts.

Routing is one program a row. For the products, rows are put in the order of their experts and each expert's are padded
to whole blocks, so that a program multiplies one block of rows with one expert; the last kernel adds a row's k results
in their order, without atomics, so that a row's sum depends on no other row. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tailrace.kernels.experts import BROKEN, check_experts, check_groups
from tailrace.kernels.page_codecs_triton import float_words, load_float32, store_float32
from tailrace.kernels.row_formats_triton import on_tensor_cores

_BROKEN = tl.constexpr(BROKEN)
_ROWS, _COLUMNS, _DEPTH = 16, 64, 64  # a program's block of a product, and what it adds at once


@triton.jit
def _route(
    scores,  # pointer to float32 [n, EXPERTS]
    bias,  # pointer to float32 [EXPERTS]; anything if not BIASED
    fixed,  # pointer to int64 [n, K], the chosen; anything if not FIXED
    chosen,  # pointer to int64 [n, K]
    weights,  # pointer to float32 [n, K]
    scale,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # EXPERTS rounded up to a power of two
    K: tl.constexpr,
    KEPT: tl.constexpr,  # K likewise
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BIASED: tl.constexpr,
    FIXED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, COLUMNS), tl.arange(0, KEPT)
    if FIXED:
        best = tl.load(fixed + row * K + slot, mask=slot < K, other=0)
    else:
        rank = tl.load(scores + row * EXPERTS + expert, mask=expert < EXPERTS, other=float("-inf"))
        if BIASED:
            rank += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0)
        rank = tl.where(rank > float("-inf"), rank, _BROKEN)
        rank = tl.where(expert < EXPERTS, rank, float("-inf"))
        if TOP_GROUPS < GROUPS:
            rank = _in_top_groups(rank, expert, EXPERTS // GROUPS, GROUPS, TOP_GROUPS)
        best = tl.full((KEPT,), -1, tl.int64)
        for i in tl.static_range(K):
            top = tl.max(rank, 0)
            first = tl.min(tl.where((rank == top) & (rank > float("-inf")), expert, COLUMNS), 0)
            best = tl.where((slot == i) & (first < COLUMNS), first.to(tl.int64), best)
            rank = tl.where(expert == first, float("-inf"), rank)
    weight = tl.load(scores + row * EXPERTS + best, mask=(slot < K) & (best >= 0), other=0.0)
    if NORMALISE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(chosen + row * K + slot, best, mask=slot < K)
    tl.store(weights + row * K + slot, weight * scale, mask=slot < K)


@triton.jit
def _in_top_groups(rank, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """rank, -inf outside of the groups with the highest sums of their best two; of equal groups the lower number."""
    worth = tl.full(rank.shape, float("-inf"), tl.float32)  # of the group that an expert is in
    for group in tl.static_range(GROUPS):
        inside = (expert // SIZE) == group
        own = tl.where(inside, rank, float("-inf"))
        top = tl.max(own, 0)
        total = top
        if SIZE > 1:
            first = tl.min(tl.where(own == top, expert, rank.shape[0]), 0)
            total += tl.max(tl.where(expert == first, float("-inf"), own), 0)
        worth = tl.where(inside, total, worth)
    allowed = tl.zeros(rank.shape, tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        top = tl.max(tl.where(allowed == 0, worth, float("-inf")), 0)
        first = tl.min(tl.where((allowed == 0) & (worth == top), expert, rank.shape[0]), 0)
        allowed = tl.where((expert // SIZE) == (first // SIZE), 1, allowed)
    return tl.where(allowed == 1, rank, float("-inf"))


@triton.jit
def _gate_up(
    x,  # pointer to float32 or int16 (the bits of bfloat16) [n, HIDDEN]
    gate_up,  # pointer as x [experts, 2 INNER, HIDDEN]
    places,  # pointer to int64 [blocks, ROWS]: row * K + slot, -1 for none
    owners,  # pointer to int64 [blocks]: the expert of a block, -1 for none
    inner,  # pointer as x [n * K, INNER]
    limit,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    LIMITED: tl.constexpr,
    BF16: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """grid (blocks, ceil(INNER / COLUMNS))."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    if owner >= 0:
        place = tl.load(places + block * ROWS + tl.arange(0, ROWS))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        weight = gate_up + owner * 2 * INNER * HIDDEN + column[None, :] * HIDDEN
        for start in range(0, HIDDEN, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            mask = (place >= 0)[:, None] & (depth < HIDDEN)[None, :]
            rows = load_float32(x + (place // K)[:, None] * HIDDEN + depth[None, :], mask, BF16)
            mask = (depth < HIDDEN)[:, None] & (column < INNER)[None, :]
            gate_weight = load_float32(weight + depth[:, None], mask, BF16)
            up_weight = load_float32(weight + INNER * HIDDEN + depth[:, None], mask, BF16)
            if TENSOR_CORES:
                rows = rows.to(tl.bfloat16)
                gate += tl.dot(rows, gate_weight.to(tl.bfloat16))
                up += tl.dot(rows, up_weight.to(tl.bfloat16))
            else:
                gate += tl.dot(rows, gate_weight, input_precision="ieee")
                up += tl.dot(rows, up_weight, input_precision="ieee")
        if LIMITED:
            gate = tl.where(gate > limit, limit, gate)  # not tl.minimum: a NaN must stay one
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = gate / (1.0 + tl.exp(-gate)) * up
        mask = (place >= 0)[:, None] & (column < INNER)[None, :]
        store_float32(inner + place[:, None] * INNER + column[None, :], value, mask, BF16)


@triton.jit
def _down(
    inner,  # pointer to float32 or int16 (the bits of bfloat16) [n * K, INNER]
    down,  # pointer as inner [experts, HIDDEN, INNER]
    places,  # pointer to int64 [blocks, ROWS], as above
    owners,  # pointer to int64 [blocks]
    parts,  # pointer to float32 [n * K, HIDDEN]
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    BF16: tl.constexpr,
    TENSOR_CORES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """grid (blocks, ceil(HIDDEN / COLUMNS))."""
    block = tl.program_id(0)
    owner = tl.load(owners + block)
    if owner >= 0:
        place = tl.load(places + block * ROWS + tl.arange(0, ROWS))
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, INNER, DEPTH):
            depth = start + tl.arange(0, DEPTH)
            mask = (place >= 0)[:, None] & (depth < INNER)[None, :]
            rows = load_float32(inner + place[:, None] * INNER + depth[None, :], mask, BF16)
            mask = (depth < INNER)[:, None] & (column < HIDDEN)[None, :]
            at = down + owner * HIDDEN * INNER + column[None, :] * INNER + depth[:, None]
            weight = load_float32(at, mask, BF16)
            if TENSOR_CORES:
                total += tl.dot(rows.to(tl.bfloat16), weight.to(tl.bfloat16))
            else:
                total += tl.dot(rows, weight, input_precision="ieee")
        mask = (place >= 0)[:, None] & (column < HIDDEN)[None, :]
        tl.store(parts + place[:, None] * HIDDEN + column[None, :], total, mask=mask)


@triton.jit
def _add_parts(
    parts,  # pointer to float32 [n, K, HIDDEN]
    weights,  # pointer to float32 [n, K]
    out,  # pointer to float32 [n, HIDDEN]
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """grid (n, ceil(HIDDEN / COLUMNS))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for i in tl.static_range(K):
        part = tl.load(parts + (row * K + i) * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total += tl.load(weights + row * K + i) * part
    tl.store(out + row * HIDDEN + column, total, mask=column < HIDDEN)


# -------------------------------------------------------------------------------------------------------------- launch


def top_k_routing(
    scores: torch.Tensor,
    k: int,
    scale: float,
    bias: torch.Tensor | None = None,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalise: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As experts.top_k_routing; scores contiguous."""
    check_groups(scores, k, groups, top_groups)
    if bias is not None and (bias.shape != scores.shape[1:] or bias.dtype is not torch.float32):
        raise ValueError(f"a bias of scores {tuple(scores.shape)} is float32, not {bias.dtype} {tuple(bias.shape)}")
    return _routed(scores, k, scale, bias, None, groups, top_groups, normalise)


def hash_routing(scores: torch.Tensor, chosen: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As experts.hash_routing; scores contiguous."""
    if chosen.dim() != 2 or len(chosen) != len(scores):
        raise ValueError(f"chosen {tuple(chosen.shape)} do not fit scores {tuple(scores.shape)}")
    return _routed(scores, chosen.shape[1], scale, None, chosen.long().contiguous(), 1, 1, True)


def _routed(
    scores: torch.Tensor, k: int, scale: float, bias: torch.Tensor | None, fixed: torch.Tensor | None, groups: int,
    top_groups: int, normalise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    if scores.dtype is not torch.float32 or not scores.is_contiguous():
        raise ValueError(f"scores are contiguous float32, not {scores.dtype} {scores.stride()}")
    n, experts = scores.shape
    chosen = torch.empty(n, k, dtype=torch.int64, device=scores.device)
    weights = torch.empty(n, k, device=scores.device)
    if n:
        _route[(n,)](
            scores, scores if bias is None else bias.contiguous(), chosen if fixed is None else fixed, chosen, weights,
            scale, EXPERTS=experts, COLUMNS=triton.next_power_of_2(experts), K=k, KEPT=triton.next_power_of_2(k),
            GROUPS=groups, TOP_GROUPS=top_groups, BIASED=bias is not None, FIXED=fixed is not None,
            NORMALISE=normalise,
        )  # fmt: skip
    return chosen, weights


def grouped_swiglu(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """As experts.grouped_swiglu; everything contiguous, x and the experts of one dtype."""
    check_experts(x, gate_up, down, chosen, weights)
    for what in (x, gate_up, down):
        if what.dtype is not x.dtype or x.dtype not in (torch.float32, torch.bfloat16) or not what.is_contiguous():
            raise ValueError(f"x and experts are contiguous and of one dtype, not {what.dtype} {what.stride()}")
    experts, double, hidden = gate_up.shape
    n, k = chosen.shape
    out = torch.empty(n, hidden, device=x.device)
    if not n:
        return out
    places, owners = _blocks(chosen, experts)
    wide = double // 2
    inner = torch.empty(n * k, wide, dtype=x.dtype, device=x.device)
    parts = torch.empty(n * k, hidden, device=x.device)
    shared = {
        "HIDDEN": hidden, "INNER": wide, "BF16": x.dtype is torch.bfloat16, "TENSOR_CORES": on_tensor_cores(x.dtype),
        "ROWS": _ROWS, "COLUMNS": _COLUMNS, "DEPTH": _DEPTH,
    }  # fmt: skip
    _gate_up[(len(owners), triton.cdiv(wide, _COLUMNS))](
        float_words(x), float_words(gate_up), places, owners, float_words(inner), float(limit or 0.0),
        K=k, LIMITED=bool(limit), **shared,
    )  # fmt: skip
    _down[(len(owners), triton.cdiv(hidden, _COLUMNS))](
        float_words(inner), float_words(down), places, owners, parts, **shared
    )
    _add_parts[(n, triton.cdiv(hidden, _COLUMNS))](
        parts, weights.contiguous(), out, K=k, HIDDEN=hidden, COLUMNS=_COLUMNS
    )
    return out


def _blocks(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(places [blocks, _ROWS], owners [blocks]): each expert's rows in whole blocks.

    There are as many blocks as there could be at most, so that no count comes back from the device; those that no
    expert needs belong to -1.
    """
    flat = chosen.flatten()
    order = flat.sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))
    filled = (counts + _ROWS - 1) // _ROWS  # blocks of each expert
    last = filled.cumsum(0)
    most = min(len(flat), experts + len(flat) // _ROWS)
    number = torch.arange(most, device=flat.device)
    owners = torch.searchsorted(last, number, right=True)
    owners = owners.masked_fill(number >= last[-1], -1)
    first = (last - filled) * _ROWS - (counts.cumsum(0) - counts)  # from a place in the order to one in the blocks
    at = torch.arange(len(flat), device=flat.device) + first[order.values]
    places = torch.full((most * _ROWS,), -1, dtype=torch.int64, device=flat.device)
    places[at] = order.indices
    return places.view(most, _ROWS), owners
