"""SwiGLU's gate. Plain PyTorch, the CPU path."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.  gate_up: [rows, 2 * n], gate first -> [rows, n]."""
    half = gate_up.shape[-1] // 2
    return functional.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
