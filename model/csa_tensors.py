"""Kinds of DeepSeek V4 layers, and every tensor of a checkpoint, by the names that the published ones use. Torch-free.

Every layer attends over a sliding window. A CSA layer also attends over the best few of one entry per few tokens, found
by an index with keys of its own; an HCA layer over all of one entry per many tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tailrace.model.csa_config import CsaConfig

Shapes = Iterator[tuple[str, tuple[int, ...]]]


class LayerKind(StrEnum):
    """Values are config.json's names in `layer_types`."""

    WINDOW = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


def tensor_shapes(config: CsaConfig) -> Shapes:
    """(name, shape) of every tensor that is loaded; weights are (out_features, in_features)."""
    hidden = config.hidden_size
    yield "embed.weight", (config.vocab_size, hidden)
    yield "norm.weight", (hidden,)
    if not config.tie_embeddings:
        yield "head.weight", (config.vocab_size, hidden)
    yield from head_shapes(config, "")
    for i, (kind, by_hash) in enumerate(zip(config.kinds, config.hash_layers, strict=True)):
        yield from layer_shapes(config, f"layers.{i}.", kind, by_hash)
    for i in range(config.num_draft_layers):
        p = f"mtp.{i}."
        for name in ("enorm", "hnorm", "norm"):
            yield f"{p}{name}.weight", (hidden,)
        for name in ("e_proj", "h_proj"):
            yield f"{p}{name}.weight", (hidden, hidden)
        yield from head_shapes(config, p)
        yield from layer_shapes(config, p, LayerKind.WINDOW, False)


def head_shapes(config: CsaConfig, prefix: str) -> Shapes:
    """What collapses the streams behind the last layer."""
    n = config.streams
    yield f"{prefix}hc_head_fn", (n, n * config.hidden_size)
    yield f"{prefix}hc_head_base", (n,)
    yield f"{prefix}hc_head_scale", (1,)


def layer_shapes(config: CsaConfig, prefix: str, kind: str, by_hash: bool) -> Shapes:
    """One layer's tensors.  kind: a LayerKind."""
    hidden, n, inner = config.hidden_size, config.streams, config.expert_dim
    for block in ("attn", "ffn"):
        yield f"{prefix}{block}_norm.weight", (hidden,)
        yield f"{prefix}hc_{block}_fn", (n * (2 + n), n * hidden)
        yield f"{prefix}hc_{block}_base", (n * (2 + n),)
        yield f"{prefix}hc_{block}_scale", (3,)
    yield from _attention_shapes(config, f"{prefix}attn.", kind)
    yield f"{prefix}ffn.gate.weight", (config.num_experts, hidden)
    if by_hash:
        yield f"{prefix}ffn.gate.tid2eid", (config.vocab_size, config.experts_per_token)
    else:
        yield f"{prefix}ffn.gate.bias", (config.num_experts,)
    for expert in (*(f"experts.{e}" for e in range(config.num_experts)), "shared_experts"):
        yield f"{prefix}ffn.{expert}.w1.weight", (inner, hidden)
        yield f"{prefix}ffn.{expert}.w2.weight", (hidden, inner)
        yield f"{prefix}ffn.{expert}.w3.weight", (inner, hidden)


def _attention_shapes(config: CsaConfig, prefix: str, kind: str) -> Shapes:
    hidden, heads, dim = config.hidden_size, config.num_heads, config.head_dim
    yield f"{prefix}wq_a.weight", (config.q_rank, hidden)
    yield f"{prefix}q_norm.weight", (config.q_rank,)
    yield f"{prefix}wq_b.weight", (heads * dim, config.q_rank)
    yield f"{prefix}wkv.weight", (dim, hidden)
    yield f"{prefix}kv_norm.weight", (dim,)
    yield f"{prefix}wo_a.weight", (config.o_groups * config.o_rank, heads * dim // config.o_groups)
    yield f"{prefix}wo_b.weight", (hidden, config.o_groups * config.o_rank)
    yield f"{prefix}attn_sink", (heads,)
    if kind == LayerKind.CSA:
        index = f"{prefix}indexer."
        yield from _compressor_shapes(f"{prefix}compressor.", hidden, config.csa_rate, dim, 2 * dim)
        yield from _compressor_shapes(
            f"{index}compressor.", hidden, config.csa_rate, config.index_dim, 2 * config.index_dim
        )
        yield f"{index}wq_b.weight", (config.index_heads * config.index_dim, config.q_rank)
        yield f"{index}weights_proj.weight", (config.index_heads, hidden)
    elif kind == LayerKind.HCA:
        yield from _compressor_shapes(f"{prefix}compressor.", hidden, config.hca_rate, dim, dim)


def _compressor_shapes(prefix: str, hidden: int, rate: int, dim: int, width: int) -> Shapes:
    yield f"{prefix}wkv.weight", (width, hidden)
    yield f"{prefix}wgate.weight", (width, hidden)
    yield f"{prefix}ape", (rate, width)
    yield f"{prefix}norm.weight", (dim,)
