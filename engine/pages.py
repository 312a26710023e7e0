"""What an engine does to whole pages, wherever they stand. Pools: one a rank, page first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_POISON_BYTE = 0xFF  # NaN as float32, bfloat16 and float8


def copy_pages(pools: Sequence[torch.Tensor], src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy whole pages; all of src is read before dst is written."""
    to, of = torch.tensor(dst, dtype=torch.int64), torch.tensor(src, dtype=torch.int64)
    for kv in pools:
        kv[to.to(kv.device)] = kv[of.to(kv.device)]


def compare_rows(
    pools: Sequence[torch.Tensor], pages: Sequence[int], others: Sequence[int], span: range
) -> tuple[float, float]:
    """How far two runs of pages [layer, field, kv_head, token, dim] are apart in the rows (tokens) of `span`, counted
    from the first page's start.

    Returns:
        The largest difference of two elements, and the largest length of a difference relative to the row
        (of one head of one field) in `others`. Infinite where one is not finite.
    """
    largest = relative = 0.0
    for kv in pools:
        rows = []
        for which in (pages, others):
            index = torch.tensor(which, dtype=torch.int64).to(kv.device)
            run = kv[index].float().movedim(0, 3)  # [layer, field, head, page, ..]
            rows.append(run.flatten(3, 4)[:, :, :, span.start : span.stop])
        difference = rows[0] - rows[1]
        if not difference.isfinite().all():
            return float("inf"), float("inf")
        lengths = rows[1].norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        largest = max(largest, float(difference.abs().max()))
        relative = max(relative, float((difference.norm(dim=-1) / lengths).max()))
    return largest, relative


def poison(pools: Sequence[torch.Tensor], pages: Sequence[int]) -> None:
    """Fill pages with NaN (rows of their own formats: with bytes 0xFF), so that who reads them unwritten is found
    out."""
    for kv in pools:
        value = _POISON_BYTE if kv.dtype is torch.uint8 else torch.nan
        for page in pages:
            kv[page].fill_(value)
