"""Rotation by a Hadamard matrix: spreads an outlier over a vector, keeps dot products. Plain PyTorch, the CPU path."""

from __future__ import annotations

import torch


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H x / sqrt(d) over the last dimension, H in natural order; its own inverse.

    Args:
        x: [.., d] float32, d a power of two.
    """
    d = x.shape[-1]
    half = 1
    y = x * d**-0.5
    while half < d:
        even, odd = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((even + odd, even - odd), -2).flatten(-3)
        half *= 2
    return y
