"""The Llama family's forward pass over a mixed batch with paged keys and values.

It knows tensors and weights, not sequences: rows come laid out by the engine, with their positions and an attention
plan. It holds no state between steps; what it computes for a token depends on that token's row alone.
"""

from __future__ import annotations

import torch

from tailrace.kernels.activation import silu_mul
from tailrace.kernels.norm import RmsNorm
from tailrace.kernels.paged_attention import AttentionPlan, PagedPool, paged_attention, write_kv
from tailrace.kernels.rotary import apply_rotary, rotary_rows
from tailrace.model.rope import frequencies
from tailrace.model.weights import LayerWeights, Weights


class _Layer:
    """One block's weights in the form its kernels want."""

    def __init__(self, weights: LayerWeights, eps: float, window: int | None) -> None:
        self.window = window
        self.input_norm = RmsNorm(weights.input_norm, eps)
        self.post_norm = RmsNorm(weights.post_norm, eps)
        self.q_norm = None if weights.q_norm is None else RmsNorm(weights.q_norm, eps)
        self.k_norm = None if weights.k_norm is None else RmsNorm(weights.k_norm, eps)
        self.qkv_proj, self.o_proj = weights.qkv_proj, weights.o_proj
        self.gate_up_proj, self.down_proj = weights.gate_up_proj, weights.down_proj


class Decoder:
    """Embedding, blocks, final norm and output projection."""

    def __init__(self, weights: Weights) -> None:
        self.config = weights.config
        self.dtype = weights.dtype
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(self.config.windows))
        eps = self.config.rms_norm_eps
        self._embed, self._lm_head = weights.embed, weights.lm_head
        self._norm = RmsNorm(weights.norm, eps)
        self._layers = tuple(
            _Layer(layer, eps, window) for layer, window in zip(weights.layers, self.config.windows, strict=True)
        )
        self._frequencies = frequencies(self.config.rope, self.config.head_dim)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: PagedPool,
        plan: AttentionPlan,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Run the blocks and store the new keys and values in the pool.

        Args:
            ids, positions: [rows] int64. Rows past plan.num_tokens are padding: computed, stored nowhere.
            pool: pages in this decoder's dtype.
            num_layers: run only the first blocks (to warm up: all blocks run the same kernels); None runs all.

        Returns:
            [rows, hidden_size] after the final norm.
        """
        config = self.config
        rows, heads, dim = len(ids), config.num_heads, config.head_dim
        cos, sin = rotary_rows(positions, self._frequencies, config.rope.attention_factor, self.dtype)
        hidden = self._embed(ids)
        for index, layer in enumerate(self._layers[:num_layers]):
            qkv = layer.qkv_proj(layer.input_norm(hidden)).view(rows, -1, dim)
            qk = qkv[:, : heads + config.num_kv_heads]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk[:, :heads] = layer.q_norm(qk[:, :heads])
                qk[:, heads:] = layer.k_norm(qk[:, heads:])
            apply_rotary(qk, cos, sin)
            q, kv = qkv[:, :heads], qkv[:, heads:].view(rows, 2, config.num_kv_heads, dim)
            write_kv(kv, pool, index, plan)
            attended = paged_attention(q, kv, pool, index, layer.window, plan)
            hidden += layer.o_proj(attended.view(rows, -1))
            hidden += layer.down_proj(silu_mul(layer.gate_up_proj(layer.post_norm(hidden))))
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] from `forward` -> [rows, vocab_size] float32."""
        return self._lm_head(hidden).float()
