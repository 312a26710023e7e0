"""Rotary position embedding, half-split form: dimension i is paired with i + dim / 2. Plain PyTorch, the CPU path."""

from __future__ import annotations

import torch


def rotary_rows(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of a step's rows, shared by all layers.

    Args:
        positions: [rows] integer, absolute.
        frequencies: [dim / 2] float32, radians a position.
        scale: both are multiplied with it (yarn's attention factor).

    Returns:
        cos, sin: [rows, 1, dim] in `dtype`; the first half of sin is negated, as `apply_rotary` wants it.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    if scale != 1.0:
        cos, sin = cos.mul_(scale), sin.mul_(scale)
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate in place.  x: [rows, heads, dim];  cos, sin: [rows, 1, dim] from `rotary_rows`."""
    turned = x.roll(x.shape[-1] // 2, -1)
    torch.addcmul(x.mul_(cos), turned, sin, out=x)
