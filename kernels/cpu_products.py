"""Whether this CPU multiplies bfloat16 as fast as it should, and the products of those that do not.

A CPU without AVX-512 or AMX has no bfloat16 products in PyTorch's matrix library: what PyTorch does instead took 2.7
times as long as float32 products of the same numbers for 12 rows, 6 times for 128 (AVX2, one thread), the conversion
of the weights included. Plain PyTorch, the CPU path.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

_FEW_ROWS = 3  # up to here reading bfloat16 weights once is faster than converting them
_AT_ONCE = 4096  # outputs whose weights exist in float32 at one time


@cache
def has_bf16_products() -> bool:
    """True if PyTorch multiplies bfloat16 matrices through oneDNN on this CPU."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + b for bfloat16, by float32 products where rows are many: the same numbers, rounded once at the end.

    x: [rows, n];  weight: [m, n];  bias: [m] or None -> [rows, m] in x's dtype.
    """
    if len(x) <= _FEW_ROWS:
        return functional.linear(x, weight, bias)
    wide = x.float()
    parts = [functional.linear(wide, part.float()) for part in weight.split(_AT_ONCE)]
    y = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return (y if bias is None else y.add_(bias)).to(x.dtype)
