"""Names and shapes of DeepSeek V4.1's tensors, as its checkpoint has them. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tailrace.model.csa2_layers import LayerPlan, Role

if TYPE_CHECKING:
    from tailrace.model.csa2_config import Csa2Config

Shapes = Iterator[tuple[str, tuple[int, ...]]]


def tensor_shapes(config: Csa2Config) -> Shapes:
    """Of the text model. The draft stages (`mtp.`) and the vision part are not among them."""
    yield "embed.weight", (config.vocab_size, config.hidden_size)
    yield "norm.weight", (config.hidden_size,)
    yield "head.weight", (config.vocab_size, config.hidden_size)
    for i, plan in enumerate(config.layers):
        for name, shape in _block(config, plan, config.num_experts):
            yield f"layers.{i}.{name}", shape
    if config.engram is not None:
        for layer, rows in zip(config.engram.layers, config.engram.table_rows, strict=True):
            p, n, hidden = f"layers.{layer}.engram.", config.streams, config.hidden_size
            yield p + "embed.weight", (rows, config.engram.head_dim)
            yield p + "wkv.weight", ((n + 1) * hidden, config.engram.row_width)
            yield p + "q_weight", (n, hidden)
            yield p + "k_weight", (n, hidden)


def lower_shapes(config: Csa2Config) -> Shapes:
    """Of what makes all rows that grow, and the windows below the boundary: the layers in front of it, and the part of
    the boundary that makes its own rows."""
    own = f"layers.{config.boundary}."
    kept = (*(f"layers.{i}." for i in range(config.boundary)), own + "attn_norm.", own + "attn.compressor.")
    kept = (*kept, own + "attn.indexer.wk.", own + "attn.indexer.k_norm.", own + "engram.", "embed.", "norm.")
    for name, shape in tensor_shapes(config):
        if name.startswith(kept):
            yield name, shape


def draft_shapes(config: Csa2Config) -> Shapes:
    """Of the draft stages; none without them."""
    draft, hidden = config.draft, config.hidden_size
    if draft is None:
        return
    for i in range(draft.stages):
        for name, shape in _block(config, LayerPlan(Role.SWA), draft.num_experts):
            yield f"mtp.{i}.{name}", shape
    last = f"mtp.{draft.stages - 1}."
    yield "mtp.0.main_proj.weight", (hidden, len(draft.targets) * hidden)
    yield "mtp.0.main_norm.weight", (hidden,)
    yield last + "norm.weight", (hidden,)
    yield last + "markov_head.markov_w1.weight", (config.vocab_size, draft.markov_rank)
    yield last + "markov_head.markov_w2.weight", (config.vocab_size, draft.markov_rank)
    yield last + "confidence_head.proj.weight", (1, hidden + draft.markov_rank)


def _block(config: Csa2Config, plan: LayerPlan, num_experts: int) -> Shapes:
    hidden, heads, dim, n = config.hidden_size, config.num_heads, config.head_dim, config.streams
    yield "attn_norm.weight", (hidden,)
    yield "ffn_norm.weight", (hidden,)
    for part in ("attn", "ffn"):
        yield f"hc_{part}_fn", ((2 + n) * n, n * hidden)
        yield f"hc_{part}_base", ((2 + n) * n,)
        yield f"hc_{part}_scale", (3,)
    yield "attn.wq_a.weight", (config.q_rank, hidden)
    yield "attn.q_norm.weight", (config.q_rank,)
    yield "attn.wq_b.weight", (heads * dim, config.q_rank)
    yield "attn.wkv.weight", (dim, hidden)
    yield "attn.kv_norm.weight", (dim,)
    yield "attn.wo_a.weight", (config.o_groups * config.o_rank, heads * dim // config.o_groups)
    yield "attn.wo_b.weight", (hidden, config.o_groups * config.o_rank)
    yield "attn.attn_sink", (heads,)
    if plan.role is Role.FULL:
        yield "attn.compressor.wkv.weight", (dim, hidden)
        if plan.ratio > 1:
            yield "attn.compressor.wgate.weight", (dim, hidden)
        yield "attn.compressor.norm.weight", (dim,)
        yield "attn.indexer.wk.weight", (config.index_dim, dim)
        yield "attn.indexer.k_norm.weight", (config.index_dim,)
    if plan.selects:
        yield "attn.indexer.wq_b.weight", (config.index_heads * config.index_dim, config.q_rank)
        yield "attn.indexer.weights_proj.weight", (config.index_heads, hidden)
    yield "ffn.gate.weight", (num_experts, hidden)
    yield "ffn.gate.bias", (num_experts,)
    for name in ("shared_experts", *(f"experts.{e}" for e in range(num_experts))):
        yield f"ffn.{name}.w1.weight", (config.expert_size, hidden)
        yield f"ffn.{name}.w2.weight", (hidden, config.expert_size)
        yield f"ffn.{name}.w3.weight", (config.expert_size, hidden)
