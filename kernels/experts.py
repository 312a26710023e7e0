"""Mixtures of experts: who is chosen with which weight, and what the chosen give. Plain PyTorch, the CPU path, twin of
experts_triton.py.

    scores = sqrt_softplus(logits)  (V4, V4.1)  or  logits.sigmoid()  (V3)
    chosen, weights = top_k_routing(scores, k, scale, bias, ..)   or   hash_routing(scores, table[ids], scale)
    out = grouped_swiglu(x, gate_up, down, chosen, weights, limit)

Choices use exact_topk, so of equal experts the lower number is taken. The bias counts for the choice only. A row's
result depends on no other row.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tailrace.kernels.exact_topk import exact_topk
from tailrace.kernels.steady import steady_linear, steady_softplus

BROKEN = -1e30  # the rank of a score that is NaN: it may be chosen last, so that its weight, and the row, become NaN


def sqrt_softplus(logits: torch.Tensor) -> torch.Tensor:
    """sqrt(log(1 + exp(x))) of float32 router logits."""
    return steady_softplus(logits).sqrt_()


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
    """The k experts of highest score + bias.

    Args:
        scores: [n, experts] float32, not negative.
        k: experts a row.
        scale: the weights are multiplied with it.
        bias: [experts] float32, added for the choice only.
        groups: experts stand in so many equal groups (V3), of which
        top_groups: those of the highest sum of their best two may be chosen from.
        normalise: weights are divided by their sum (+ 1e-20).

    Returns:
        chosen [n, k] int64, best first, and weights [n, k] float32, from the scores without bias.

    Raises:
        ValueError: k experts cannot be chosen.
    """
    check_groups(scores, k, groups, top_groups)
    n, experts = scores.shape
    rank = scores if bias is None else scores + bias
    rank = torch.where(rank > -torch.inf, rank, BROKEN)
    if top_groups < groups:
        each = rank.view(n, groups, experts // groups)
        best = exact_topk(each.topk(min(2, experts // groups), -1).values.sum(-1), top_groups)
        allowed = torch.zeros(n, groups, dtype=torch.bool, device=scores.device).scatter_(1, best, True)
        rank = each.masked_fill(~allowed.unsqueeze(-1), -torch.inf).view(n, experts)
    chosen = exact_topk(rank, k)
    return chosen, _weights(scores, chosen, scale, normalise)


def check_groups(scores: torch.Tensor, k: int, groups: int, top_groups: int) -> None:
    """ValueError unless k experts can be chosen, the arguments being those of top_k_routing."""
    experts = scores.shape[1]
    if not 1 <= top_groups <= groups or experts % groups or k > experts // groups * top_groups:
        raise ValueError(f"cannot choose {k} of {experts} experts from {top_groups} of {groups} groups")


def hash_routing(scores: torch.Tensor, chosen: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts fixed by the token id, weights from the scores.

    Args:
        scores: [n, experts] float32.
        chosen: [n, k] integer: the table's rows of the tokens' ids; the same expert may stand there twice.
        scale: the weights are multiplied with it.

    Returns:
        chosen [n, k] int64 and weights [n, k] float32.
    """
    chosen = chosen.long()
    return chosen, _weights(scores, chosen, scale, normalise=True)


def _weights(scores: torch.Tensor, chosen: torch.Tensor, scale: float, normalise: bool) -> torch.Tensor:
    weights = scores.gather(1, chosen)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def grouped_swiglu(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    limit: float | None = None,
) -> torch.Tensor:
    """sum over a row's chosen experts e of weight * down[e] (silu(gate) * up), gate and up from gate_up[e] x.

    Args:
        x: [n, hidden] float32 or bfloat16.
        gate_up: [experts, 2 * inner, hidden] of x's dtype, gate first.
        down: [experts, hidden, inner] of x's dtype.
        chosen: [n, k] int64.
        weights: [n, k] float32.
        limit: gate is at most, up is within plus and minus this; none if None or 0.

    Returns:
        [n, hidden] float32: the sum over experts is not rounded.

    Raises:
        ValueError: shapes do not fit each other.
    """
    check_experts(x, gate_up, down, chosen, weights)
    experts, _, hidden = gate_up.shape
    out = torch.zeros(len(x), hidden, device=x.device)
    order = chosen.flatten().sort(stable=True)
    counts = torch.bincount(order.values, minlength=experts).tolist()
    k, begin = chosen.shape[1], 0
    flat = weights.flatten()
    for expert, count in enumerate(counts):
        if not count:
            continue
        places = order.indices[begin : begin + count]
        begin += count
        rows = places // k
        gate, up = steady_linear(x[rows], gate_up[expert]).chunk(2, -1)
        inner = swiglu(gate, up, limit)
        out.index_add_(0, rows, steady_linear(inner, down[expert]).float() * flat[places, None])
    return out


def check_experts(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> None:
    """ValueError unless the shapes of grouped_swiglu's arguments fit each other."""
    experts, double, hidden = gate_up.shape
    fits = x.shape == (len(chosen), hidden) and down.shape == (experts, hidden, double // 2)
    if not fits or chosen.shape != weights.shape:
        raise ValueError(
            f"experts of x {tuple(x.shape)}: gate and up {tuple(gate_up.shape)}, down {tuple(down.shape)}, "
            f"chosen {tuple(chosen.shape)} and weights {tuple(weights.shape)} do not fit"
        )


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    """silu(gate) * up in float32, rounded once; gate at most and up within plus and minus `limit` if that is not 0."""
    dtype = gate.dtype
    gate, up = gate.float(), up.float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (functional.silu(gate) * up).to(dtype)
