"""What every block of DeepSeek V4.1 does with its tokens, whether it is one of the model's or of its draft stages."""

from __future__ import annotations

import torch

from tailrace.kernels.by_device import grouped_swiglu, mixing, top_k_routing
from tailrace.kernels.experts import sqrt_softplus, swiglu
from tailrace.kernels.hyper_connections import Mixing, MixingWeights
from tailrace.kernels.rotary import apply_rotary_pairs
from tailrace.kernels.steady import steady_groups, steady_linear
from tailrace.model.csa2_config import Csa2Config
from tailrace.model.csa2_weights import Csa2LayerWeights, MoeWeights


def mix(streams: torch.Tensor, weights: MixingWeights, config: Csa2Config) -> Mixing:
    """How the streams are read and written around one block.  streams: [rows, streams, hidden]."""
    return mixing(
        streams, weights, rms_eps=config.norm_eps, floor=config.hc_floor, iterations=config.sinkhorn_iterations
    )


def queries(
    x: torch.Tensor, w: Csa2LayerWeights, turn: torch.Tensor, config: Csa2Config
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: [rows, hidden] -> what index queries are made of [rows, q_rank], queries [rows, heads, head_dim] float32."""
    reduced = w.q_norm(steady_linear(x, w.q_down))
    q = steady_linear(reduced, w.q_up).unflatten(1, (config.num_heads, config.head_dim))
    return reduced, apply_rotary_pairs(q, turn).float()


def window_keys(x: torch.Tensor, w: Csa2LayerWeights, turn: torch.Tensor) -> torch.Tensor:
    """Keys that are values too, of tokens or of what a draft reads.  x: [rows, hidden] -> [rows, head_dim] float32."""
    return apply_rotary_pairs(w.kv_norm(steady_linear(x, w.kv)), turn).float()


def attended(out: torch.Tensor, w: Csa2LayerWeights, turn: torch.Tensor, config: Csa2Config) -> torch.Tensor:
    """out: [rows, heads, head_dim] float32, still rotated -> [rows, hidden] of the weights' dtype."""
    out = apply_rotary_pairs(out, turn, inverse=True).to(w.out.dtype)
    grouped = steady_groups(out.flatten(1).unflatten(1, (config.o_groups, -1)), w.out_groups)
    return steady_linear(grouped.flatten(1), w.out)


def experts(x: torch.Tensor, w: MoeWeights, per_token: int, config: Csa2Config) -> torch.Tensor:
    """The shared expert and `per_token` of the others.  x: [rows, hidden] -> [rows, hidden] float32."""
    scores = sqrt_softplus(steady_linear(x.float(), w.gate))
    chosen, weights = top_k_routing(scores, per_token, config.route_scale, w.bias, normalise=config.route_normalized)
    routed = grouped_swiglu(x, w.gate_up[:-1], w.down[:-1], chosen, weights, config.swiglu_limit)
    gate, up = steady_linear(x, w.gate_up[-1]).chunk(2, -1)
    return routed + steady_linear(swiglu(gate, up, config.swiglu_limit), w.down[-1]).float()
