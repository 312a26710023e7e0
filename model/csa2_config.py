"""DeepSeek V4.1 as one description: sizes, layer roles, state groups. Torch-free; knows no weights and no tokens.

From the *boundary* on, the last owner (csa2_layers.py), no layer makes rows that grow: the layers below encode the
prompt, those above only read, so their windows can be rebuilt by replay (replay.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from tailrace.model.config import Rope, RopeKind, checked_layers
from tailrace.model.config_keys import Keys
from tailrace.model.csa2_layers import Candidates, LayerPlan, Role, layer_plans
from tailrace.model.csa2_tensors import lower_shapes, tensor_shapes
from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import GroupKind

MODEL_TYPE = "deepseek_v41"
WINDOW_TILE, MAIN_GROUP, KEY_GROUP = 32, 16, 32  # elements a scale, of the three row formats


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """Tables of n-gram rows, of the layers in front of which they are read.

    Attributes:
        layers: in ascending order.
        table_rows: one a layer.
        max_ngram: n-grams of 2 .. max_ngram tokens.
        heads: hashes an n-gram size; each has `head_dim` elements a row.
        first_bucket: primes are searched from here on.
        num_classes: of the token map.
        pad_id: token whose class stands for what is not there.
        masked_id: token (an image's) that takes no part; -1: none.
    """

    layers: tuple[int, ...]
    table_rows: tuple[int, ...]
    max_ngram: int
    heads: int
    head_dim: int
    first_bucket: int
    num_classes: int
    pad_id: int
    masked_id: int

    @property
    def lookback(self) -> int:
        return self.max_ngram - 1

    @property
    def row_width(self) -> int:
        """Elements of all rows of one token."""
        return self.lookback * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """DSpark: a few blocks that propose several tokens at once (csa2_draft.py).

    Attributes:
        stages: blocks, each with a window of its own.
        block: tokens proposed at once.
        targets: layers whose incoming streams the stages read.
        noise_id: the token that stands for those to be proposed.
        markov_rank: of what a proposed token adds to the next one's logits.
        num_experts, experts_per_token: of the stages' mixtures.
    """

    stages: int
    block: int
    targets: tuple[int, ...]
    noise_id: int
    markov_rank: int
    num_experts: int
    experts_per_token: int


@dataclass(frozen=True, slots=True)
class Csa2Config:
    """One checkpoint's text model. Made by `parse_config`, which checks it.

    Attributes:
        layers: one plan a layer.
        rope_dims: trailing dimensions that are rotated, in interleaved pairs.
        streams: of the residual (mHC).
        window_rope, history_rope: of SWA layers, and of all others (their windows included).
        draft: None if the checkpoint has none.
        drafts: it is used: its windows are state, and its weights are loaded.
        boundary: the last owner.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    layers: tuple[LayerPlan, ...]
    num_heads: int
    head_dim: int
    rope_dims: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    index_heads: int
    index_dim: int
    index_topk: int
    candidates: Candidates | None
    streams: int
    sinkhorn_iterations: int
    hc_floor: float
    norm_eps: float
    num_experts: int
    experts_per_token: int
    expert_size: int
    route_scale: float
    route_normalized: bool
    swiglu_limit: float
    window_rope: Rope
    history_rope: Rope
    engram: EngramConfig | None
    draft: DraftConfig | None = None
    drafts: bool = False

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(i for i, plan in enumerate(self.layers) if plan.role is Role.FULL)

    @property
    def boundary(self) -> int:
        return self.owners[-1]

    @property
    def num_parameters(self) -> int:
        shapes = tensor_shapes(self)  # pyright: ignore[reportArgumentType]  # one class under two paths
        return sum(math.prod(shape) for _, shape in shapes)

    @property
    def num_lower_parameters(self) -> int:
        """Of those, what a worker needs that stops at the boundary."""
        shapes = lower_shapes(self)  # pyright: ignore[reportArgumentType]
        return sum(math.prod(shape) for _, shape in shapes)

    @property
    def window_row_bytes(self) -> int:
        return self.head_dim + self.head_dim // WINDOW_TILE

    @property
    def main_row_bytes(self) -> int:
        return self.head_dim // 2 + self.head_dim // MAIN_GROUP

    @property
    def key_row_bytes(self) -> int:
        return self.index_dim // 2 + self.index_dim // KEY_GROUP

    def drafting(self) -> Self:
        """The same with its draft in use; ConfigError if it has none."""
        if self.draft is None:
            raise ConfigError("the checkpoint has no draft stages (dspark_block_size)")
        return replace(self, drafts=True)

    def row_groups(self, kv_dtype: str = "bfloat16") -> tuple[RowGroup, ...]:
        """State groups. `kv_dtype` changes nothing: the model was trained on rows rounded to these formats."""
        every = tuple(range(self.num_layers))
        ratios = sorted({self.layers[i].ratio for i in self.owners}, reverse=True)
        groups = []
        for ratio in ratios:
            main = RowField(main_field(ratio), self.main_row_bytes, f"fp4-{self.head_dim}g{MAIN_GROUP}-e4m3")
            key = RowField(key_field(ratio), self.key_row_bytes, f"fp4-{self.index_dim}g{KEY_GROUP}-ue8m0")
            groups.append(RowGroup(GroupKind.HISTORY, self._owners(ratio), (main, key), tokens_per_row=ratio))
        window = RowField("window", self.window_row_bytes, f"fp8-{self.head_dim}t{WINDOW_TILE}-ue8m0")
        groups.append(RowGroup(GroupKind.WINDOW, every, (window,), rows=self.window))
        if self.draft is not None and self.drafts:
            row = RowField("draft", 2 * self.head_dim, f"bfloat16x{self.head_dim}")
            groups.append(RowGroup(GroupKind.WINDOW, tuple(range(self.draft.stages)), (row,), rows=self.window))
        if self.engram is not None:
            ids = RowField("ids", 4, "int32")
            groups.append(RowGroup(GroupKind.TOKENS, (0,), (ids,), rows=self.engram.lookback))
        for ratio in ratios:
            if ratio > 1:
                pair = RowField(pending_field(ratio), 8 * self.head_dim, f"float32x{2 * self.head_dim}")
                groups.append(RowGroup(GroupKind.TAIL, self._owners(ratio), (pair,), rows=ratio - 1, period=ratio))
        return tuple(groups)

    def _owners(self, ratio: int) -> tuple[int, ...]:
        return tuple(i for i in self.owners if self.layers[i].ratio == ratio)


def main_field(ratio: int) -> str:
    """Name of the rows that owners of this ratio make."""
    return f"main_r{ratio}"


def key_field(ratio: int) -> str:
    return f"key_r{ratio}"


def pending_field(ratio: int) -> str:
    return f"pending_r{ratio}"


# ---------------------------------------------------------------------------------------------------------- reading


def parse_config(raw: Mapping[str, Any], where: str) -> Csa2Config:
    """Csa2Config from the object in config.json.

    Args:
        raw: config.json as parsed; the text model may stand in `text_config`.
        where: the file, for messages.

    Raises:
        ConfigError: a key is missing or of a wrong kind, or layers whose sources cannot be served.
    """
    text = {**raw, **raw["text_config"]} if isinstance(raw.get("text_config"), dict) else raw
    keys = Keys(text, where)
    if raw.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{where}: model_type is {raw.get('model_type')!r}, expected {MODEL_TYPE!r}")
    for key, value in (
        ("scoring_func", "sqrtsoftplus"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("n_shared_experts", 1),
        ("num_key_value_heads", 1),
        ("topk_method", "noaux_tc"),
    ):
        keys.only(key, value)
    num_layers = checked_layers(keys.integer("num_hidden_layers", least=1), where)
    candidates = _candidates(keys, num_layers, where)
    plans = layer_plans(
        num_layers,
        keys.integers("compress_ratios"),
        keys.integers("kv_source_layer_ids"),
        keys.integers("index_source_layer_ids"),
        candidates,
        where,
    )
    config = Csa2Config(
        family="csa2",
        vocab_size=keys.integer("vocab_size", least=1),
        hidden_size=keys.integer("hidden_size", least=1),
        num_layers=num_layers,
        max_position=keys.integer("max_position_embeddings", least=1),
        layers=plans,
        num_heads=keys.integer("num_attention_heads", least=1),
        head_dim=keys.integer("head_dim", least=1),
        rope_dims=keys.integer("qk_rope_head_dim", least=1),
        q_rank=keys.integer("q_lora_rank", least=1),
        o_groups=keys.integer("o_groups", least=1),
        o_rank=keys.integer("o_lora_rank", least=1),
        window=keys.integer("sliding_window", least=1),
        index_heads=keys.integer("index_n_heads", least=1),
        index_dim=keys.integer("index_head_dim", least=1),
        index_topk=keys.integer("index_topk", least=1),
        candidates=candidates,
        streams=keys.integer("hc_mult", least=1),
        sinkhorn_iterations=keys.integer("hc_sinkhorn_iters", least=1),
        hc_floor=keys.real("hc_eps", least=0),
        norm_eps=keys.real("rms_norm_eps", least=0),
        num_experts=keys.integer("n_routed_experts", least=1),
        experts_per_token=keys.integer("num_experts_per_tok", least=1),
        expert_size=keys.integer("moe_intermediate_size", least=1),
        route_scale=keys.real("routed_scaling_factor"),
        route_normalized=keys.flag("norm_topk_prob", True),
        swiglu_limit=keys.real("swiglu_limit", 0.0, least=0),
        window_rope=Rope(theta=keys.real("rope_theta")),
        history_rope=_history_rope(keys, text.get("rope_scaling"), where),
        engram=_engram(keys, text, num_layers, where),
        draft=_draft(keys, plans, where),
    )
    _check_sizes(config, where)
    return config


def _check_sizes(config: Csa2Config, where: str) -> None:
    for name, value, unit in (
        ("head_dim", config.head_dim, WINDOW_TILE),
        ("index_head_dim", config.index_dim, KEY_GROUP),
        ("num_attention_heads", config.num_heads, config.o_groups),
        ("qk_rope_head_dim", config.rope_dims, 2),
    ):
        if value % unit:
            raise ConfigError(f"{where}: {name} is {value}, expected a multiple of {unit}")
    if config.rope_dims > min(config.head_dim, config.index_dim):
        raise ConfigError(
            f"{where}: qk_rope_head_dim {config.rope_dims} is above head_dim {config.head_dim} "
            f"or index_head_dim {config.index_dim}"
        )
    if config.experts_per_token > config.num_experts:
        raise ConfigError(f"{where}: {config.experts_per_token} of {config.num_experts} experts a token")


def _candidates(keys: Keys, num_layers: int, where: str) -> Candidates | None:
    layer = keys.integer("candidate_source_layer_id", -1, least=-1)
    blocks = keys.integer("candidate_topk_blocks", 0, least=0)
    if layer < 0 or blocks == 0:
        return None
    if layer >= num_layers:
        raise ConfigError(f"{where}: candidate_source_layer_id is {layer} of {num_layers} layers")
    return Candidates(layer, blocks, keys.integer("candidate_block_size", least=1))


def _history_rope(keys: Keys, scaling: object, where: str) -> Rope:
    theta = keys.real("compress_rope_theta")
    if scaling is None:
        return Rope(theta=theta)
    if not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_scaling is {scaling!r}, expected an object")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta=theta)
    if kind not in ("yarn", "deepseek_yarn"):
        raise ConfigError(f"{where}: rope type {kind!r} is not supported, only 'yarn'")
    inner = Keys(scaling, f"{where}: rope_scaling")
    return Rope(
        RopeKind.YARN,
        theta,
        factor=inner.real("factor"),
        original_max_position=inner.integer("original_max_position_embeddings", least=1),
        beta_fast=inner.real("beta_fast", 32.0),
        beta_slow=inner.real("beta_slow", 1.0),
    )


def _engram(keys: Keys, text: Mapping[str, Any], num_layers: int, where: str) -> EngramConfig | None:
    if not text.get("engram_layer_ids"):
        return None
    layers, rows = keys.integers("engram_layer_ids"), keys.integers("engram_num_embeddings")
    ordered = list(layers) == sorted(set(layers)) and 0 <= layers[0] <= layers[-1] < num_layers
    if not ordered or len(rows) != len(layers) or min(rows) < 1:
        raise ConfigError(
            f"{where}: engram_layer_ids {list(layers)} and engram_num_embeddings {list(rows)} of {num_layers} layers"
        )
    return EngramConfig(
        layers=layers,
        table_rows=rows,
        max_ngram=keys.integer("engram_max_ngram_size", least=2),
        heads=keys.integer("engram_n_heads", least=1),
        head_dim=keys.integer("engram_head_dim", least=1),
        first_bucket=keys.integer("engram_vocab_size", least=2),
        num_classes=keys.integer("engram_compressed_vocab_size", least=1),
        pad_id=keys.integer("engram_pad_token_id", least=0),
        masked_id=keys.integer("image_token_id", -1, least=-1),
    )


def _draft(keys: Keys, plans: tuple[LayerPlan, ...], where: str) -> DraftConfig | None:
    block = keys.integer("dspark_block_size", 0, least=0)
    if block == 0:
        return None
    targets = keys.integers("dspark_target_layer_ids")
    boundary = max(i for i, plan in enumerate(plans) if plan.role is Role.FULL)
    if not targets or not boundary <= min(targets) <= max(targets) < len(plans):
        raise ConfigError(
            f"{where}: dspark_target_layer_ids {list(targets)}, expected layers {boundary} to {len(plans) - 1}"
        )
    num_experts = keys.integer("dspark_n_routed_experts", keys.integer("n_routed_experts"), least=1)
    per_token = keys.integer("dspark_num_experts_per_tok", keys.integer("num_experts_per_tok"), least=1)
    noise_id, vocab = keys.integer("dspark_noise_token_id", least=0), keys.integer("vocab_size")
    if per_token > num_experts or noise_id >= vocab:
        raise ConfigError(
            f"{where}: dspark_num_experts_per_tok is {per_token} of {num_experts} experts, "
            f"dspark_noise_token_id {noise_id} of {vocab} ids"
        )
    return DraftConfig(
        stages=checked_layers(keys.integer("num_nextn_predict_layers", least=1), where),
        block=block,
        targets=targets,
        noise_id=noise_id,
        markov_rank=keys.integer("dspark_markov_rank", 256, least=1),
        num_experts=num_experts,
        experts_per_token=per_token,
    )
