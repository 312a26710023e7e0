"""DeepSeek V4 as one description: layer kinds, sizes, and what decode needs of the past.

Which layer is of which kind (csa_tensors.py) is read, never assumed. Torch-free; checked when made, so that a decoder
may trust every field. DeepSeek-V4 report, sections 2.1 to 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.model.config import Rope, checked_layers
from tailrace.model.config_keys import Keys, parse_rope
from tailrace.model.csa_tensors import LayerKind, tensor_shapes
from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import GroupKind

Json = Mapping[str, Any]

KV_DTYPES = ("float32", "bfloat16")
FP8_TILE = 64  # elements under one scale in a packed row
FP4_GROUP = 32  # elements under one scale in a packed index key
MAX_RATE = 1 << 16


@dataclass(frozen=True, slots=True)
class CsaConfig:
    """One decoder of the family.

    Attributes:
        kinds: of each layer.
        hash_layers: of each layer: its experts are looked up by token id, not chosen by score.
        csa_rate, hca_rate: tokens an entry.
        window: tokens that a query sees as they are, its own included.
        rope, compressed_rope: of window layers, and of all the others (their windows included).
        rope_dim: trailing elements of a head that are rotated; of an index head too.
        norm_eps, hc_eps: of RMS norms; the floor of the mixing weights.
        num_draft_layers_stored: draft (MTP) blocks behind the last layer of the checkpoint; window layers.
        num_draft_layers: how many of them are used, at most 1; its window stands behind the layers'.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    window: int
    csa_rate: int
    hca_rate: int
    index_heads: int
    index_dim: int
    index_topk: int
    streams: int
    sinkhorn_iterations: int
    num_experts: int
    experts_per_token: int
    expert_dim: int
    routed_scale: float
    swiglu_limit: float
    norm_eps: float
    hc_eps: float
    max_position: int
    rope: Rope
    compressed_rope: Rope
    kinds: tuple[LayerKind, ...]
    hash_layers: tuple[bool, ...]
    tie_embeddings: bool
    num_draft_layers_stored: int = 0
    num_draft_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("csa_rate", "hca_rate"):
            if not 2 <= getattr(self, name) <= MAX_RATE:
                raise ConfigError(f"model config: {name} is {getattr(self, name)}, must be 2 to {MAX_RATE}")
        if self.rope_dim % 2 or not 0 < self.rope_dim < self.head_dim or self.rope_dim > self.index_dim:
            raise ConfigError(
                f"model config: {self.rope_dim} rotated elements must be even, below head_dim {self.head_dim} and at "
                f"most index_head_dim {self.index_dim}"
            )
        if self.index_dim & (self.index_dim - 1):
            raise ConfigError(f"model config: index_head_dim {self.index_dim} must be a power of two")
        if not 0 <= self.num_draft_layers <= min(1, self.num_draft_layers_stored):
            raise ConfigError(
                f"model config: {self.num_draft_layers} draft layers are asked for, the checkpoint has "
                f"{self.num_draft_layers_stored} and one can be used"
            )
        if self.num_heads % self.o_groups:
            raise ConfigError(f"model config: {self.num_heads} heads are not a multiple of o_groups {self.o_groups}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(
                f"model config: num_experts_per_tok {self.experts_per_token} of n_routed_experts {self.num_experts}"
            )

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    def layers_of(self, kind: LayerKind) -> tuple[int, ...]:
        """Numbers of the layers of one kind."""
        return tuple(i for i, k in enumerate(self.kinds) if k is kind)

    @property
    def num_parameters(self) -> int:
        """Of the layers, the draft blocks in use and both ends. The tables that hash layers look up are not counted."""
        shapes = tensor_shapes(self)  # pyright: ignore[reportArgumentType]  # one class under two paths
        return sum(math.prod(shape) for name, shape in shapes if not name.endswith("tid2eid"))

    def row_groups(self, kv_dtype: str) -> tuple[RowGroup, ...]:
        """What decode needs of the past.

        A CSA layer's open rows and its overlap hold value | gate of the main compressor, then of the index's, position
        bias added. Of an HCA layer's open window only maximum | total | weighted sum is kept (kernels/compressor.py):
        3 rows instead of up to `hca_rate` - 1 pairs of them.

        With a draft a step's last token may turn out wrong and the next step starts before it. So what is open is kept
        as it was after the last two lengths: a row more a window, and overlaps and sums in turns (csa_rows.py).

        Args:
            kv_dtype: float32: plain rows. bfloat16: the packed rows of the published inference code. What is open is
                float32 in both.

        Raises:
            ConfigError: another kv_dtype.
        """
        if kv_dtype not in KV_DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} is not supported; supported: {', '.join(KV_DTYPES)}")
        packed = kv_dtype == "bfloat16"
        lengths = 1 + self.num_draft_layers
        csa, hca, dim, key = self.layers_of(LayerKind.CSA), self.layers_of(LayerKind.HCA), self.head_dim, self.index_dim

        def row(name: str) -> RowField:
            return self._packed_row(name) if packed else _floats(name, dim)

        index = self._packed_key("csa_key") if packed else _floats("csa_key", key)
        groups = [
            RowGroup(GroupKind.HISTORY, csa, (row("csa"), index), tokens_per_row=self.csa_rate),
            RowGroup(GroupKind.HISTORY, hca, (row("hca"),), tokens_per_row=self.hca_rate),
            RowGroup(
                GroupKind.WINDOW,
                tuple(range(self.num_layers + self.num_draft_layers)),
                (row("window"),),
                rows=self.window,
            ),
            RowGroup(
                GroupKind.CARRY,
                csa,
                (_floats("csa_overlap", 2 * dim), _floats("csa_key_overlap", 2 * key)),
                rows=self.csa_rate * lengths,
            ),
            RowGroup(
                GroupKind.TAIL,
                csa,
                (_floats("csa_open", 4 * dim), _floats("csa_key_open", 4 * key)),
                rows=self.csa_rate - 2 + lengths,
                period=self.csa_rate,
            ),
            RowGroup(GroupKind.TAIL, hca, (_floats("hca_open", 3 * dim),), rows=lengths, period=self.hca_rate),
        ]
        return tuple(group for group in groups if group.layers)

    @property
    def fp8_tiles(self) -> int:
        """Scales of a packed row; the last tile may be shorter than the others."""
        return -(-(self.head_dim - self.rope_dim) // FP8_TILE)

    @property
    def fp8_pad(self) -> int:
        """Zero bytes behind those scales, which make them a multiple of 8."""
        return -self.fp8_tiles % 8

    @property
    def fp4_group(self) -> int:
        """Elements under one scale of a packed index key."""
        return math.gcd(self.index_dim, FP4_GROUP)

    def _packed_row(self, name: str) -> RowField:
        width = self.head_dim - self.rope_dim
        tiles, pad = self.fp8_tiles, self.fp8_pad
        written = f"fp8-{width}t{FP8_TILE}-ue8m0" + (f"+pad{pad}" if pad else "") + f"+bf16-{self.rope_dim}"
        return RowField(name, width + tiles + pad + 2 * self.rope_dim, written)

    def _packed_key(self, name: str) -> RowField:
        size = self.index_dim // 2 + self.index_dim // self.fp4_group
        return RowField(name, size, f"hadamard+fp4-{self.index_dim}g{self.fp4_group}-ue8m0")


def _floats(name: str, dim: int) -> RowField:
    return RowField(name, 4 * dim, f"float32x{dim}")


# ------------------------------------------------------------------------------------------------------- config.json


def parse_config(raw: Json, where: str) -> CsaConfig:
    """CsaConfig from the object in config.json, in the published form or as transformers writes it.

    Args:
        raw: config.json as parsed.
        where: the file, for messages.

    Raises:
        ConfigError: naming the key that is wrong or not supported.
    """
    keys = Keys(raw, where)
    for key, values in (
        ("num_key_value_heads", (1,)),
        ("n_shared_experts", (1,)),
        ("scoring_func", ("sqrtsoftplus",)),
        ("topk_method", ("noaux_tc",)),
        ("norm_topk_prob", (True,)),
        ("hidden_act", ("silu",)),
        ("attention_bias", (False,)),
        ("mlp_bias", (False,)),
    ):
        keys.only(key, *values)
    count = checked_layers(keys.integer("num_hidden_layers", 43), where)
    head_dim, max_position = keys.integer("head_dim", 512, 1), keys.integer("max_position_embeddings", 1 << 20, 1)
    csa_rate, hca_rate = _rates(raw, where)
    drafts = keys.integer("num_nextn_predict_layers", 1, 0)
    rope, compressed_rope = _ropes(raw, max_position, where)
    return CsaConfig(
        family="csa_hca",
        vocab_size=keys.integer("vocab_size", 129280, 1),
        hidden_size=keys.integer("hidden_size", 4096, 1),
        num_heads=keys.integer("num_attention_heads", 64, 1),
        head_dim=head_dim,
        rope_dim=_rope_dim(raw, head_dim, where),
        q_rank=keys.integer("q_lora_rank", 1024, 1),
        o_groups=keys.integer("o_groups", 8, 1),
        o_rank=keys.integer("o_lora_rank", 1024, 1),
        window=keys.integer("sliding_window", 128, 1),
        csa_rate=csa_rate,
        hca_rate=hca_rate,
        index_heads=keys.integer("index_n_heads", 64, 1),
        index_dim=keys.integer("index_head_dim", 128, 1),
        index_topk=keys.integer("index_topk", 512, 1),
        streams=keys.integer("hc_mult", 4, 1),
        sinkhorn_iterations=keys.integer("hc_sinkhorn_iters", 20, 1),
        num_experts=keys.integer("n_routed_experts", 256, 1),
        experts_per_token=keys.integer("num_experts_per_tok", 6, 1),
        expert_dim=keys.integer("moe_intermediate_size", 2048, 1),
        routed_scale=keys.real("routed_scaling_factor", 1.5),
        swiglu_limit=_above_zero(keys, where, "swiglu_limit", 10.0),
        norm_eps=_above_zero(keys, where, "rms_norm_eps", 1e-6),
        hc_eps=_above_zero(keys, where, "hc_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        compressed_rope=compressed_rope,
        kinds=_kinds(raw, count, drafts, csa_rate, hca_rate, where),
        hash_layers=_hash_layers(raw, count, where),
        tie_embeddings=keys.flag("tie_word_embeddings", False),
        num_draft_layers_stored=drafts,
    )


def _above_zero(keys: Keys, where: str, key: str, default: float) -> float:
    value = keys.real(key, default)
    if value <= 0:
        raise ConfigError(f"{where}: {key} is {value}, must be above 0")
    return value


def _rates(raw: Json, where: str) -> tuple[int, int]:
    """Tokens an entry of CSA and of HCA layers: 4 and 128, or what `compress_rates` or its older keys say."""
    given = raw.get("compress_rates") or {}
    if not isinstance(given, dict) or not set(given) <= {LayerKind.CSA.value, LayerKind.HCA.value}:
        raise ConfigError(
            f"{where}: compress_rates is {given!r}, expected an object with {LayerKind.CSA}, {LayerKind.HCA}"
        )
    rates = Keys(given, f"{where}: compress_rates")
    keys = Keys(raw, where)
    csa = keys.integer("compress_rate_csa", rates.integer(LayerKind.CSA, 4, 2), 2)
    hca = keys.integer("compress_rate_hca", rates.integer(LayerKind.HCA, 128, 2), 2)
    return csa, hca


def _strings(raw: Json, key: str, allowed: set[str], count: int, where: str) -> list[str] | None:
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value) or not set(value) <= allowed:
        raise ConfigError(f"{where}: {key} is {value!r}, expected a list of {', '.join(sorted(allowed))}")
    if len(value) < count:
        raise ConfigError(f"{where}: {key} has {len(value)} entries for num_hidden_layers {count}")
    return value[:count]


def _kinds(raw: Json, count: int, drafts: int, csa_rate: int, hca_rate: int, where: str) -> tuple[LayerKind, ...]:
    """From `layer_types`, else from `compress_ratios` (0: window only), else the pattern of the config class.

    `compress_ratios` goes on with the draft blocks' ratios, which must be 0.
    """
    names = _strings(raw, "layer_types", {k.value for k in LayerKind}, count, where)
    if names is not None:
        return tuple(map(LayerKind, names))
    ratios = raw.get("compress_ratios")
    if ratios is None:
        rest = [LayerKind.CSA if i % 2 else LayerKind.HCA for i in range(max(count - 2, 0))]
        return (*[LayerKind.HCA] * min(count, 2), *rest)
    by_ratio = {0: LayerKind.WINDOW, csa_rate: LayerKind.CSA, hca_rate: LayerKind.HCA}
    if not isinstance(ratios, list) or not all(type(r) is int and r in by_ratio for r in ratios):
        raise ConfigError(f"{where}: compress_ratios is {ratios!r}, expected a list of 0, {csa_rate}, {hca_rate}")
    if len(ratios) < count:
        raise ConfigError(f"{where}: compress_ratios has {len(ratios)} entries for num_hidden_layers {count}")
    if any(ratios[count : count + drafts]):
        raise ConfigError(
            f"{where}: compress_ratios gives draft blocks the ratios {ratios[count:]}, only 0 is supported"
        )
    return tuple(by_ratio[r] for r in ratios[:count])


def _hash_layers(raw: Json, count: int, where: str) -> tuple[bool, ...]:
    names = _strings(raw, "mlp_layer_types", {"hash_moe", "moe"}, count, where)
    if names is not None:
        return tuple(name == "hash_moe" for name in names)
    first = Keys(raw, where).integer("num_hash_layers", 3, 0)
    return tuple(i < first for i in range(count))


def _rope_dim(raw: Json, head_dim: int, where: str) -> int:
    keys = Keys(raw, where)
    if raw.get("partial_rotary_factor") is not None:
        return int(head_dim * keys.real("partial_rotary_factor"))
    return keys.integer("qk_rope_head_dim", head_dim * 64 // 512, 1)


def _ropes(raw: Json, max_position: int, where: str) -> tuple[Rope, Rope]:
    """Of window layers and of compressed ones: two objects (`main`, `compress`), or one for the latter alone.

    Cos and sin of compressed layers are not multiplied with yarn's factor unless `attention_factor` says so.
    """
    keys = Keys(raw, where)
    given = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: rope_scaling is {given!r}, expected an object")
    main, compress = given.get("main"), given.get("compress")
    if not isinstance(main, dict) or not isinstance(compress, dict):
        main = {"rope_theta": keys.real("rope_theta", 10000.0)}
        flat = {k: v for k, v in given.items() if k not in ("main", "compress")}
        compress = flat | {"rope_theta": keys.real("compress_rope_theta", 160000.0)}
    ropes = []
    for label, settings in (("main", main), ("compress", compress)):
        kept = {k: v for k, v in settings.items() if k != "partial_rotary_factor"}
        if kept.get("attention_factor") is None:
            kept["attention_factor"] = 1.0
        ropes.append(parse_rope({"rope_scaling": kept}, max_position, f"{where}: {label}"))
    return ropes[0], ropes[1]
