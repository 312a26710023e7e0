"""DeepSeek V3 and V3.2 as one description: latent attention (MLA), on V3.2 over the rows that an indexer selects.

Formulas: the reports of DeepSeek V2 (MLA), V3 (experts, draft blocks) and V3.2-Exp (indexer). Everything is read from
config.json and checked here, so that a decoder may trust every field. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.model.config import Rope, RopeKind, checked_layers
from tailrace.model.config_keys import Keys, parse_rope, yarn_mscale
from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import GroupKind

V3, V32 = "deepseek_v3", "deepseek_v32"
FAMILIES = (V3, V32)

LATENT_NORM_EPS = 1e-6  # of the norms inside attention, whatever rms_norm_eps is
PACKED_TILE = 128  # elements of a packed row that share a scale

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture of experts of every layer that has one.

    Attributes:
        num: routed experts, in `num_groups` equal groups.
        per_token: routed experts chosen for a token, out of the best `top_groups` groups.
        num_shared: experts that every token passes, stored as one MLP of so many times `intermediate_size`.
        normalize: the chosen experts' weights are divided by their sum.
        scale: the weights are multiplied with it (`routed_scaling_factor`).
    """

    num: int
    per_token: int
    num_groups: int
    top_groups: int
    num_shared: int
    intermediate_size: int
    normalize: bool
    scale: float


@dataclass(frozen=True, slots=True)
class Indexer:
    """What selects the rows that a query attends to: the best `top_k` of all before it."""

    num_heads: int
    dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """One decoder of the family.

    Attributes:
        family: `deepseek_v3 | deepseek_v32`, for messages only; no code may branch on it.
        q_lora_rank: width that queries are made from; None: from the hidden state itself.
        kv_lora_rank: width of the latent that stands for all keys and values of a token.
        nope_dim, rope_dim, v_dim: of one head: key without position, key with it (shared by all heads), value.
        softmax_scale: scores are multiplied with it; yarn's correction is in it.
        rope_interleave: rotated dimensions are stored in neighbouring pairs (the indexer's never are).
        is_sparse: one entry a layer: experts instead of one MLP.
        experts: None if no layer has any.
        indexer: None: attention over all rows.
        attention_bias: the projections into both latents and out of attention carry a bias.
        num_draft_layers_stored: draft (MTP) blocks behind the last layer of the checkpoint.
        num_draft_layers: how many of them are used; their rows then stand behind the layers'.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    rope_interleave: bool
    softmax_scale: float
    is_sparse: tuple[bool, ...]
    experts: Experts | None
    indexer: Indexer | None
    attention_bias: bool = False
    tie_embeddings: bool = False
    num_draft_layers_stored: int = 0
    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.num_draft_layers <= self.num_draft_layers_stored:
            raise ConfigError(
                f"{self.num_draft_layers} draft layers are asked for, the checkpoint has {self.num_draft_layers_stored}"
            )

    @property
    def latent_dim(self) -> int:
        """Elements of a latent row: the latent and the shared rotated key."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def num_parameters(self) -> int:
        """Of the layers, the draft blocks in use and both ends; a tied embedding counted once."""
        return sum(math.prod(shape) for shape in expected_shapes(self).values())

    def row_groups(self, kv_dtype: str) -> tuple[RowGroup, ...]:
        """What decode needs: a latent row, and an index key if there is an indexer, of each token and layer.

        Args:
            kv_dtype: `float32`: plain rows; `bfloat16`: plain bfloat16 rows, with an indexer 8-bit rows with scales
                (512 + 64 elements in 656 bytes, a key of 128 in 132).
        """
        if kv_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not supported; supported: float32, bfloat16")
        each, plain = (4, f"float32x{self.latent_dim}") if kv_dtype == "float32" else (2, f"bfloat16x{self.latent_dim}")
        fields = (RowField("latent", each * self.latent_dim, plain),)
        if self.indexer is not None and kv_dtype == "float32":
            fields += (RowField("index_key", 4 * self.indexer.dim, f"float32x{self.indexer.dim}"),)
        elif self.indexer is not None:
            fields = (
                _packed("latent", self.kv_lora_rank, self.rope_dim),
                _packed("index_key", self.indexer.dim, 0),
            )
        layers = tuple(range(self.num_layers + self.num_draft_layers))
        return (RowGroup(GroupKind.HISTORY, layers, fields),)


def _packed(name: str, dim: int, tail: int) -> RowField:
    tiles = -(-dim // PACKED_TILE)
    text = f"fp8-{dim}t{PACKED_TILE}-float32" + (f"+bf16-{tail}" if tail else "")
    return RowField(name, dim + 4 * tiles + 2 * tail, text)


def parse_config(raw: Mapping[str, Any], where: str) -> MlaConfig:
    """MlaConfig from the object in config.json.

    Args:
        raw: config.json as parsed.
        where: the file, for messages.

    Raises:
        ConfigError: naming the key.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: model_type {family!r} is not supported here; supported: {', '.join(FAMILIES)}")
    keys = Keys(raw, where)
    keys.only("hidden_act", "silu")
    heads = keys.integer("num_attention_heads", least=1)
    if keys.integer("num_key_value_heads", heads) != heads:
        raise ConfigError(
            f"{where}: num_key_value_heads is {raw['num_key_value_heads']}, must be num_attention_heads, {heads}: "
            "all heads share one latent"
        )
    if "q_lora_rank" not in raw:
        raise ConfigError(f"{where}: q_lora_rank is missing; null says that there is none")
    q_rank = None if raw["q_lora_rank"] is None else keys.integer("q_lora_rank", least=1)
    layers = checked_layers(keys.integer("num_hidden_layers"), where)
    max_position = keys.integer("max_position_embeddings", least=1)
    nope, rope_dim = keys.integer("qk_nope_head_dim", least=1), _even(keys, "qk_rope_head_dim", where)
    rope = parse_rope(raw, max_position, where)
    is_sparse = _sparse_layers(raw, keys, layers, where)
    indexer = _indexer(raw, keys, q_rank, rope_dim, where) if family == V32 else None
    return MlaConfig(
        family=family,
        vocab_size=keys.integer("vocab_size", least=1),
        hidden_size=keys.integer("hidden_size", least=1),
        intermediate_size=keys.integer("intermediate_size", least=1),
        num_layers=layers,
        num_heads=heads,
        q_lora_rank=q_rank,
        kv_lora_rank=keys.integer("kv_lora_rank", least=1),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=keys.integer("v_head_dim", least=1),
        max_position=max_position,
        rms_norm_eps=keys.real("rms_norm_eps", 1e-6, least=0),
        rope=rope,
        rope_interleave=keys.flag("rope_interleave", True),
        softmax_scale=(nope + rope_dim) ** -0.5 * _yarn_correction(raw, rope, where),
        is_sparse=is_sparse,
        experts=_experts(keys, where) if any(is_sparse) else None,
        indexer=indexer,
        attention_bias=keys.flag("attention_bias", False),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        num_draft_layers_stored=keys.integer("num_nextn_predict_layers", 0, least=0),
    )


def _even(keys: Keys, key: str, where: str) -> int:
    value = keys.integer(key, least=2)
    if value % 2:
        raise ConfigError(f"{where}: {key} is {value}, must be even: dimensions are rotated in pairs")
    return value


def _sparse_layers(raw: Mapping[str, Any], keys: Keys, layers: int, where: str) -> tuple[bool, ...]:
    keys.only("moe_layer_freq", 1)
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        dense = keys.integer("first_k_dense_replace", least=0)
        return tuple(layer >= dense for layer in range(layers))
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in ("dense", "sparse") for kind in kinds):
        raise ConfigError(f"{where}: mlp_layer_types is {kinds!r}, expected {layers} of dense, sparse")
    return tuple(kind == "sparse" for kind in kinds)


def _experts(keys: Keys, where: str) -> Experts:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    num, groups = keys.integer("n_routed_experts", least=1), keys.integer("n_group", least=1)
    top_groups, per_token = keys.integer("topk_group", least=1), keys.integer("num_experts_per_tok", least=1)
    if num % groups or num // groups < 2:
        raise ConfigError(f"{where}: n_group is {groups}, which makes no equal groups of 2 or more of {num} experts")
    if top_groups > groups:
        raise ConfigError(f"{where}: topk_group is {top_groups}, of n_group {groups}")
    if per_token > top_groups * (num // groups):
        raise ConfigError(
            f"{where}: num_experts_per_tok is {per_token}, "
            f"but topk_group {top_groups} groups hold {top_groups * (num // groups)} experts"
        )
    return Experts(
        num=num,
        per_token=per_token,
        num_groups=groups,
        top_groups=top_groups,
        num_shared=keys.integer("n_shared_experts", 1, least=0),
        intermediate_size=keys.integer("moe_intermediate_size", least=1),
        normalize=keys.flag("norm_topk_prob", True),
        scale=keys.real("routed_scaling_factor", 2.5),
    )


def _indexer(raw: Mapping[str, Any], keys: Keys, q_rank: int | None, rope_dim: int, where: str) -> Indexer:
    if q_rank is None:
        raise ConfigError(f"{where}: q_lora_rank is null, but the indexer's queries are made from that width")
    if raw.get("rope_interleave") is False:
        raise ConfigError(f"{where}: rope_interleave false is not supported by {V32}")
    dim = keys.integer("index_head_dim", least=1)
    if dim < rope_dim:
        raise ConfigError(f"{where}: index_head_dim is {dim}, less than qk_rope_head_dim, {rope_dim}")
    return Indexer(keys.integer("index_n_heads", least=1), dim, keys.integer("index_topk", least=1))


def _yarn_correction(raw: Mapping[str, Any], rope: Rope, where: str) -> float:
    """What a stretched context multiplies the scores with, beside what the rotation itself carries."""
    if rope.kind is RopeKind.DEFAULT:
        return 1.0
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    mscale = Keys(scaling, f"{where}: rope").real("mscale_all_dim", 0.0)
    return yarn_mscale(rope.factor, mscale) ** 2 if mscale else 1.0


# ------------------------------------------------------------------------------------------------------------ tensors


def expected_shapes(config: MlaConfig) -> Shapes:
    """Every tensor that is read from a checkpoint of this config, by its stored name; weights are (out, in)."""
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer, is_sparse in enumerate(config.is_sparse):
        shapes |= layer_shapes(config, f"model.layers.{layer}.", is_sparse)
    for draft in range(config.num_draft_layers):
        shapes |= draft_shapes(config, f"model.layers.{config.num_layers + draft}.")
    return shapes


def layer_shapes(config: MlaConfig, prefix: str, is_sparse: bool) -> Shapes:
    """One layer's tensors; `prefix` ends in a dot."""
    hidden = config.hidden_size
    shapes: Shapes = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    shapes |= {f"self_attn.{name}": shape for name, shape in _attention_shapes(config)}
    if not is_sparse or config.experts is None:
        shapes |= _mlp_shapes("mlp.", hidden, config.intermediate_size)
        return {prefix + name: shape for name, shape in shapes.items()}
    experts = config.experts
    shapes["mlp.gate.weight"] = (experts.num, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (experts.num,)
    for i in range(experts.num):
        shapes |= _mlp_shapes(f"mlp.experts.{i}.", hidden, experts.intermediate_size)
    if experts.num_shared:
        shapes |= _mlp_shapes("mlp.shared_experts.", hidden, experts.num_shared * experts.intermediate_size)
    return {prefix + name: shape for name, shape in shapes.items()}


def draft_shapes(config: MlaConfig, prefix: str) -> Shapes:
    """A draft block's tensors; its copies of the embedding and the output projection are the model's own."""
    hidden = config.hidden_size
    own = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden), "shared_head.norm": (hidden,)}
    return {f"{prefix}{name}.weight": shape for name, shape in own.items()} | layer_shapes(config, prefix, True)


def _attention_shapes(config: MlaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = config.hidden_size, config.num_heads
    q_rows = heads * (config.nope_dim + config.rope_dim)
    if config.q_lora_rank is None:
        yield "q_proj.weight", (q_rows, hidden)
    else:
        yield "q_a_proj.weight", (config.q_lora_rank, hidden)
        yield "q_a_layernorm.weight", (config.q_lora_rank,)
        yield "q_b_proj.weight", (q_rows, config.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (config.latent_dim, hidden)
    yield "kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield "kv_b_proj.weight", (heads * (config.nope_dim + config.v_dim), config.kv_lora_rank)
    yield "o_proj.weight", (hidden, heads * config.v_dim)
    if config.attention_bias:
        if config.q_lora_rank is not None:
            yield "q_a_proj.bias", (config.q_lora_rank,)
        yield "kv_a_proj_with_mqa.bias", (config.latent_dim,)
        yield "o_proj.bias", (hidden,)
    if config.indexer is not None and config.q_lora_rank is not None:
        indexer = config.indexer
        yield "indexer.wq_b.weight", (indexer.num_heads * indexer.dim, config.q_lora_rank)
        yield "indexer.wk.weight", (indexer.dim, hidden)
        yield "indexer.k_norm.weight", (indexer.dim,)
        yield "indexer.k_norm.bias", (indexer.dim,)
        yield "indexer.weights_proj.weight", (indexer.num_heads, hidden)


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    into = (inner, hidden)
    return {
        f"{prefix}{name}.weight": shape
        for name, shape in (("gate_proj", into), ("up_proj", into), ("down_proj", (hidden, inner)))
    }
