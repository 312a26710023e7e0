"""Manifold-constrained hyper-connections: a residual of several streams, read and written by weights of its own.

Before a block, `mixing` derives from a token's streams how they are collapsed into the block's input (pre), how its
output is spread over them (post) and how they are mixed among themselves (combination, nearly doubly stochastic):

    mixed = mixing(streams, weights, ..)
    y = block(collapse(streams, mixed.pre))          # or with the block before's `pre`: the lag is the caller's choice
    streams = spread(streams, y, mixed)

Nothing here looks at another token. Plain PyTorch, the CPU path; DeepSeek-V4 report, section 2.2, and Xie et al. 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from tailrace.kernels.steady import steady_linear, steady_sigmoid


@dataclass(frozen=True, slots=True)
class MixingWeights:
    """Of one block; all float32. `n` streams of `dim`.

    Attributes:
        projection: [n (2 + n), n dim]; rows in the order pre, post, combination (row-major).
        base: [n (2 + n)], the same order.
        scale: [3], of pre, post and combination.
    """

    projection: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class CollapseWeights:
    """What only collapses, after the last block: projection [n, n dim], base [n], scale [1]; all float32."""

    projection: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class Mixing(NamedTuple):
    """pre, post: [rows, n];  combination: [rows, n, n], from stream (first index) to stream. float32."""

    pre: torch.Tensor
    post: torch.Tensor
    combination: torch.Tensor


def mixing(streams: torch.Tensor, weights: MixingWeights, *, rms_eps: float, floor: float, iterations: int) -> Mixing:
    """How a token's streams are read and written around one block.

    Args:
        streams: [rows, n, dim], any float dtype; computed in float32.
        rms_eps: added to the mean square over all n dim elements.
        floor: added to pre, to the combination's entries and to each sum that it is divided by.
        iterations: of normalising the combination, the last step being by columns; at least 1.
    """
    n = streams.shape[1]
    raw = _project(streams, weights.projection, rms_eps)
    pre, post, combination = raw.split((n, n, n * n), -1)
    pre_base, post_base, combination_base = weights.base.split((n, n, n * n))
    pre_scale, post_scale, combination_scale = weights.scale.unbind()
    square = (combination * combination_scale + combination_base).unflatten(-1, (n, n))
    return Mixing(
        steady_sigmoid(pre * pre_scale + pre_base) + floor,
        2 * steady_sigmoid(post * post_scale + post_base),
        doubly_stochastic(square.softmax(-1) + floor, floor, iterations),
    )


def doubly_stochastic(square: torch.Tensor, floor: float, iterations: int) -> torch.Tensor:
    """Sinkhorn-Knopp on softmaxed rows: divide by column sums, then iterations - 1 times by row and column sums.

    Args:
        square: [.., n, n], positive; its rows sum to about 1.
        floor: added to each sum.
    """
    square = square / square.sum(-2, keepdim=True).add_(floor)
    for _ in range(iterations - 1):
        square.div_(square.sum(-1, keepdim=True).add_(floor))
        square.div_(square.sum(-2, keepdim=True).add_(floor))
    return square


def collapse_weights(streams: torch.Tensor, weights: CollapseWeights, *, rms_eps: float, floor: float) -> torch.Tensor:
    """What the last block's streams are collapsed with.  streams: [rows, n, dim] -> [rows, n] float32."""
    return steady_sigmoid(_project(streams, weights.projection, rms_eps) * weights.scale + weights.base) + floor


def collapse(streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """Sum of the streams, each times its weight.  streams: [rows, n, dim];  pre: [rows, n] -> [rows, dim] float32."""
    return (pre[..., None] * streams).sum(1)


def spread(streams: torch.Tensor, output: torch.Tensor, mixed: Mixing) -> torch.Tensor:
    """Streams after a block: k = post_k output + sum_j combination_jk stream_j.

    Args:
        streams: [rows, n, dim] before the block.
        output: [rows, dim], the block's.

    Returns:
        [rows, n, dim] in the streams' dtype.
    """
    carried = torch.matmul(mixed.combination.transpose(-1, -2), streams.float())
    return carried.addcmul_(mixed.post[..., None], output.float()[:, None]).to(streams.dtype)


def _project(streams: torch.Tensor, projection: torch.Tensor, rms_eps: float) -> torch.Tensor:
    """All streams of a token as one vector, RMS-normalised without a weight, times `projection`."""
    flat = streams.float().flatten(1)
    return steady_linear(functional.rms_norm(flat, flat.shape[1:], None, rms_eps), projection)
