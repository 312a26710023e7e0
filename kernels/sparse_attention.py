"""Attention of queries over rows that each of them chose, over ranges of rows, or over both. Plain PyTorch, the CPU
path, twin of sparse_attention_triton.py.

One key head: a row is the key of every head and its first `value_dim` numbers are the value (K = V if that is all).
The rows of a query come in parts that share one softmax:

    PickedRows   row numbers a query, -1 for none: rows an indexer chose, or a window by number
    RowRange     rows first .. end - 1 a query: a causal prefix, a window, all closed entries

    out = sum exp(l - m) v / (sum exp(l - m) + exp(sink - m)),   l = scale * q . row

With a per-head sink logit the weights sum to less than 1. A query with no row and no sink gets 0. Sums are of float32
numbers in float32, and rounded once. How long a range is would change their order: in float32 they are therefore of
float64 where there is a range, so that a query's result does not depend on its company and on how a prompt is cut.

A picked row that no query picks may hold anything; rows of a RowRange must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tailrace.kernels.row_formats import PackedRows, numbers

_NUMBERS = 1 << 23  # gathered numbers and scores held at once


@dataclass(frozen=True, slots=True)
class PickedRows:
    """rows: [n, dim] float32 or bfloat16, or packed;  index: [t, m] int64, -1 for none."""

    rows: torch.Tensor | PackedRows
    index: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowRange:
    """rows: as of PickedRows;  first, end: [t] int64, 0 <= first and end <= n; no row where end <= first."""

    rows: torch.Tensor | PackedRows
    first: torch.Tensor
    end: torch.Tensor


def sparse_attention(
    q: torch.Tensor,
    parts: Sequence[PickedRows | RowRange],
    scale: float,
    sinks: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Attend.

    Args:
        q: [t, h, dim] float32 or bfloat16.
        parts: where each query's rows are; their order does not matter but for rounding.
        scale: of the logits.
        sinks: [h], a logit a head that has no value; none if None.
        value_dim: the first so many numbers of a row are its value; all if None.

    Returns:
        [t, h, value_dim] of q's dtype.

    Raises:
        ValueError: shapes do not fit each other.
    """
    width = check_attention(q, parts, sinks, value_dim)
    t, heads, dim = q.shape
    has_range = any(isinstance(part, RowRange) for part in parts)
    inside = torch.float64 if has_range and q.dtype is torch.float32 else torch.float32
    ranges = [numbers(part.rows).to(inside) if isinstance(part, RowRange) else None for part in parts]
    each = sum(p.index.shape[1] * dim if isinstance(p, PickedRows) else len(p.rows) * heads for p in parts)
    step = max(1, _NUMBERS // max(1, each))
    out = torch.empty(t, heads, width, dtype=q.dtype, device=q.device)
    for i in range(0, t, step):
        block = slice(i, i + step)
        out[block] = _attend(q[block].to(inside), list(zip(parts, ranges, strict=True)), block, scale, sinks, width)
    return out


def check_attention(
    q: torch.Tensor, parts: Sequence[PickedRows | RowRange], sinks: torch.Tensor | None, value_dim: int | None
) -> int:
    """The value dims of an attention's arguments, which are those of sparse_attention; ValueError as there."""
    t, heads, dim = q.shape
    width = dim if value_dim is None else value_dim
    for part in parts:
        counts = (part.index,) if isinstance(part, PickedRows) else (part.first, part.end)
        if len(part.rows.shape) != 2 or part.rows.shape[1] != dim or any(len(c) != t for c in counts):
            raise ValueError(
                f"attention of q {tuple(q.shape)}: part with rows {tuple(part.rows.shape)} for {len(counts[0])} queries"
            )
    if not 0 < width <= dim or (sinks is not None and sinks.shape != (heads,)):
        given = None if sinks is None else tuple(sinks.shape)
        raise ValueError(f"attention of q {tuple(q.shape)}: {width} value dims and sinks {given} do not fit")
    return width


def _attend(
    q: torch.Tensor,
    parts: Sequence[tuple[PickedRows | RowRange, torch.Tensor | None]],
    block: slice,
    scale: float,
    sinks: torch.Tensor | None,
    width: int,
) -> torch.Tensor:
    """q: [b, h, dim], the queries `block`;  parts: with the numbers of ranges, of q's dtype -> [b, h, width] of it."""
    logits, values = [], []
    for part, rows in parts:
        if isinstance(part, PickedRows):
            index = part.index[block]
            absent = index < 0
            if not index.shape[1] or not len(part.rows):
                continue
            rows = numbers(part.rows, index.clamp(min=0)).to(q.dtype).masked_fill_(absent.unsqueeze(-1), 0.0)
            logits.append((q @ rows.mT).mul_(scale).masked_fill_(absent.unsqueeze(1), -torch.inf))
            values.append(rows[..., :width])
        elif rows is not None and len(rows):
            number = torch.arange(len(rows), device=q.device)
            absent = (number < part.first[block, None]) | (number >= part.end[block, None])
            logits.append((q @ rows.t()).mul_(scale).masked_fill_(absent.unsqueeze(1), -torch.inf))
            values.append(rows[:, :width])
    if sinks is not None:
        logits.append(sinks.to(q.dtype).view(1, -1, 1).expand(len(q), -1, 1))
    if not logits:
        return q.new_zeros(*q.shape[:2], width)
    joined = torch.cat(logits, -1)
    weights = torch.softmax(joined, -1)
    if sinks is None:
        weights.masked_fill_((joined == -torch.inf).all(-1, keepdim=True), 0.0)  # no row at all; other NaN stay
    out = q.new_zeros(*q.shape[:2], width)
    at = 0
    for value in values:
        out += weights[..., at : at + value.shape[-2]] @ value
        at += value.shape[-2]
    return out
