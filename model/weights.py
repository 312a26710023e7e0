"""A checkpoint's weights as the decoder reads them: named fields, fused projections, one dtype.

It does not know file formats beyond asking the source for tensors, nor what the decoder computes with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tailrace.model.config import ModelConfig
from tailrace.model.linear import Linear

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Embedding(Protocol):
    """Token embedding table."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int32 or int64 -> [tokens, hidden_size] in the store's dtype."""
        ...


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Norms are [hidden_size] (q_norm, k_norm: [head_dim]) in the store's dtype.

    qkv_proj's output is [q heads | k heads | v heads] x head_dim, biases included; the rotary embedding is always the
    half-split ("rotate half") form, whatever the file's order was. gate_up_proj's output is [gate | up].
    """

    input_norm: torch.Tensor
    qkv_proj: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: Linear
    post_norm: torch.Tensor
    gate_up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. `lm_head` is there also when it is tied to `embed`."""

    config: ModelConfig
    dtype: torch.dtype
    embed: Embedding
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Linear
