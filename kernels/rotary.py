"""Rotary position embedding. Plain PyTorch, the CPU path.

Half-split form (`rotary_rows`, `apply_rotary`): dimension i is paired with i + dim / 2. Interleaved form
(`rotary_pairs`, `apply_rotary_pairs`): dimension 2i with 2i + 1, of the last or first n dims.
"""

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


# --------------------------------------------------------------------------------------------------- interleaved pairs


def rotary_pairs(positions: torch.Tensor, frequencies: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """The turns of a step's rows for `apply_rotary_pairs`, shared by all layers of one theta.

    Args:
        positions: [rows] integer, absolute.
        frequencies: [n / 2] float32, radians a position.
        scale: cos and sin are multiplied with it.

    Returns:
        [2, rows, n / 2] float32: cos, sin.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin())) * scale


def apply_rotary_pairs(
    x: torch.Tensor, turns: torch.Tensor, *, first: bool = False, inverse: bool = False
) -> torch.Tensor:
    """Rotate numbers (2i, 2i + 1) of the last n of x's dims (of the first n if `first`); a copy.

    Args:
        x: [rows, .., dim], dim >= n, of any float dtype; computed in float32, rounded once.
        turns: [2, rows, n / 2] from `rotary_pairs`.
        first: the first n dims instead of the last n.
        inverse: turn back.
    """
    n = 2 * turns.shape[-1]
    shape = (len(x), *(1,) * (x.dim() - 2), n // 2)
    cos, sin = turns[0].view(shape), turns[1].view(shape)
    if inverse:
        sin = -sin
    out = x.clone()
    part = out[..., :n] if first else out[..., out.shape[-1] - n :]
    even, odd = part[..., 0::2].float(), part[..., 1::2].float()
    part[..., 0::2], part[..., 1::2] = even * cos - odd * sin, even * sin + odd * cos
    return out
