"""Pooling of token rows into one entry a window: per channel, a softmax over the window's slots weighs their values.

`values` and `gates` are what a compressor's two projections give for each token; a position bias, if the family has
one, is already in the gates. Norm and rotary embedding of the entry are the caller's. All float32: a softmax over close
gates loses its order in bfloat16. Plain PyTorch, the CPU path; DeepSeek-V4 report, sections 2.3.1 and 2.3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Overlap(NamedTuple):
    """What a closed window leaves to the next one: the first halves of its rows.  values, gates: [m, dim] float32."""

    values: torch.Tensor
    gates: torch.Tensor


class Running(NamedTuple):
    """Windows that are not closed yet, however many rows they have.  maximum, total, weighted: [.., dim] float32.

    `total` is the sum of e^(gate - maximum), `weighted` that of e^(gate - maximum) value: three rows instead of all.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor

    def entry(self) -> torch.Tensor:
        """[.., dim]: the windows' entries, once all of their rows are in."""
        return self.weighted / self.total


def extend(running: Running | None, values: torch.Tensor, gates: torch.Tensor) -> Running:
    """Add rows to open windows, one after the other: the result is the same to the bit however they are cut.

    Args:
        running: of the rows so far, [.., dim]; None if these are the first.
        values, gates: [.., n >= 1, dim] float32. A gate of -inf leaves a window that has rows as it is.
    """
    if running is None:
        nothing = torch.zeros_like(values[..., 0, :])
        running = Running(torch.full_like(nothing, float("-inf")), nothing, nothing)
    top, total, weighted = running
    for value, gate in zip(values.unbind(-2), gates.unbind(-2), strict=True):
        higher = torch.maximum(top, gate)
        shrink, power = _exp(top - higher), _exp(gate - higher)
        total, weighted = total * shrink + power, weighted * shrink + power * value
        top = higher
    return Running(top, total, weighted)


def _exp(x: torch.Tensor) -> torch.Tensor:
    """By way of float64: float32's own exp differs by where in a vector register a number stands."""
    return x.double().exp_().float()


def pool(values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """Entries of windows that do not overlap.  values, gates: [windows, m, dim] float32 -> [windows, dim]."""
    return extend(None, values, gates).entry()


def pool_overlapping(values: torch.Tensor, gates: torch.Tensor, before: Overlap | None) -> torch.Tensor:
    """Entries of consecutive windows, each from the first halves of the window before and its own second halves.

    Args:
        values, gates: [windows, m, 2 dim] float32.
        before: of the window before the first one; None if there is none, whose slots then weigh nothing.

    Returns:
        [windows, dim].
    """
    windows, m, width = values.shape
    dim = width // 2
    slots = values.new_zeros(windows, 2 * m, dim)
    weights = gates.new_full((windows, 2 * m, dim), float("-inf"))
    slots[:, m:], weights[:, m:] = values[..., dim:], gates[..., dim:]
    slots[1:, :m], weights[1:, :m] = values[:-1, :, :dim], gates[:-1, :, :dim]
    if windows and before is not None:
        slots[0, :m], weights[0, :m] = before
    return (slots * weights.softmax(-2)).sum(-2)


def overlap_of(values: torch.Tensor, gates: torch.Tensor) -> Overlap:
    """What the last of some closed windows leaves.  values, gates: [windows >= 1, m, 2 dim]."""
    dim = values.shape[-1] // 2
    return Overlap(values[-1, :, :dim], gates[-1, :, :dim])
