"""Linear layers that hide how their weights are stored: dense, or packed to 4 or 8 bits for the CPU.

A decoder calls `linear(x)` with x [rows, in_features] in the store's dtype and gets [rows, out_features] in it. Which
kernel runs is decided here, by the number of rows: packed weights are read at a quarter of the bytes and win while the
rows are few; a dense copy (where one is kept) wins through oneDNN for many. Nothing here knows layers or files.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """y = x W^T + b.  x: [rows, in_features];  y: [rows, out_features]; dtype and device are the store's."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Bytes held, dense copy included."""
        ...


class DenseLinear:
    """weight: [out_features, in_features];  bias: [out_features] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)
