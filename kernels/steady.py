"""Arithmetic whose result for a row is the same to the bit whatever rows stand beside it. Plain PyTorch, CPU path.

For one to three rows, and for what is left when few rows are dealt out to threads by fours, the CPU's matrix library
sums in another order than for more; and PyTorch computes the last few numbers of a tensor with other functions than
those that fill a vector register. So a row decoded alone comes out about 1e-7 away from the same row in a chunk. Where
a result is then rounded to FP8 or FP4 rows, or chosen by comparison, that can flip a value. In float32, which is what
equality is promised in, few rows are therefore padded, and functions of small tensors run in float64. In bfloat16
nothing is promised and nothing is padded.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ROWS, _MANY = 4, 64  # multiples of the one, and all above the other, are summed alike: measured, held by the test


def steady_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x: [rows, n];  weight: [m, n], of one dtype -> [rows, m]."""
    missing = _missing(x)
    if not missing:
        return functional.linear(x, weight)
    return functional.linear(functional.pad(x, (0, 0, 0, missing)), weight)[: len(x)]


def steady_groups(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Each group by a map of its own.  x: [rows, groups, n];  weight: [groups, m, n] -> [rows, groups, m]."""
    missing = _missing(x)
    if missing:
        return steady_groups(functional.pad(x, (0, 0, 0, 0, 0, missing)), weight)[: len(x)]
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def steady_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Of float32, by way of float64: both ways to compute it agree once they are rounded."""
    return torch.sigmoid(x.double()).float()


def steady_softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + exp(x)) of float32, by way of float64."""
    return functional.softplus(x.double()).float()


def _missing(x: torch.Tensor) -> int:
    return 0 if x.dtype is not torch.float32 or len(x) > _MANY else -len(x) % _ROWS
