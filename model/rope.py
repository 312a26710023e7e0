"""Rotary frequencies of a model, as transformers computes them bit for bit (float32, same order of operations)."""

from __future__ import annotations

import math

import torch

from tailrace.model.config import Rope, RopeKind


def frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float32: radians that dimension pair i turns with each position.

    Cos and sin are to be multiplied with `rope.attention_factor` (1 but for yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, head_dim, exponents)
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind is RopeKind.LINEAR:
        inv_freq /= rope.factor
    elif rope.kind is RopeKind.FACTORS:
        inv_freq = inv_freq / torch.tensor(rope.divisors, dtype=torch.float32)
    elif rope.kind is RopeKind.LLAMA3:
        inv_freq = _llama3(rope, inv_freq)
    return inv_freq


def _llama3(rope: Rope, inv_freq: torch.Tensor) -> torch.Tensor:
    """Slow dimensions are stretched by `factor`, fast ones kept, those between blended by wavelength."""
    context = rope.original_max_position
    low_wavelength, high_wavelength = context / rope.low_freq_factor, context / rope.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    stretched = torch.where(wavelength > low_wavelength, inv_freq / rope.factor, inv_freq)
    smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelength < high_wavelength) * ~(wavelength > low_wavelength)
    return torch.where(between, blended, stretched)


def _yarn(rope: Rope, head_dim: int, exponents: torch.Tensor) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, slow ones stretched, with a ramp between."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    wavelengths = rope.theta**exponents
    kept = 1 - ramp
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
