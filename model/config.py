"""The Llama family as one description: what a decoder must know, whatever file it came from. Torch-free.

It does not know file formats (hf_directory.py, gguf_file.py fill it in), weights or tokens. Everything is checked when
a config is made, so that a decoder may trust every field; what cannot be served raises ConfigError naming the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tailrace.model.errors import ConfigError
from tailrace.model.state_groups import Field, GroupKind, StateGroup

MAX_LAYERS = 4096


def checked_layers(count: int, where: str) -> int:
    """`count` if a model may have so many layers: checked before anything is made for each of them."""
    if not 1 <= count <= MAX_LAYERS:
        raise ConfigError(f"{where}: {count} layers, expected 1 to {MAX_LAYERS}")
    return count


class RopeKind(StrEnum):
    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"
    FACTORS = "factors"  # a GGUF file's `rope_freqs.weight`: one divisor a frequency


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding; rope.py turns it into frequencies. Fields that a kind does not use stay at their defaults.

    Attributes:
        theta: base wavelength.
        factor: context stretch (linear, llama3, yarn).
        original_max_position: context before stretching (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's band edges.
        beta_fast, beta_slow: yarn's band edges, in rotations.
        truncate: yarn rounds its band edges to whole dimensions.
        attention_factor: what cos and sin are multiplied with (yarn), already derived from mscale where not given.
        divisors: head_dim / 2 divisors (factors).
    """

    kind: RopeKind = RopeKind.DEFAULT
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.theta <= 0 or self.factor <= 0:
            raise ConfigError(f"rope: theta {self.theta} and factor {self.factor} must be above 0")
        if self.kind in (RopeKind.LLAMA3, RopeKind.YARN) and self.original_max_position <= 0:
            raise ConfigError(f"rope {self.kind}: original_max_position_embeddings is missing")
        if self.kind is RopeKind.YARN and (self.theta == 1 or min(self.beta_fast, self.beta_slow) <= 0):
            raise ConfigError(
                f"rope yarn: beta_fast {self.beta_fast} and beta_slow {self.beta_slow} must be above 0, "
                f"and theta {self.theta} not be 1"
            )
        if self.kind is RopeKind.LLAMA3 and self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"rope llama3: high_freq_factor {self.high_freq_factor} must be above "
                f"low_freq_factor {self.low_freq_factor}"
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the family: pre-norm RMSNorm blocks, grouped-query attention with rotary, SwiGLU (silu).

    Attributes:
        family: `llama | mistral | qwen2 | qwen3`, for messages only; no code may branch on it.
        head_dim: independent of hidden_size / num_heads.
        windows: one entry a layer: how many positions attention sees (itself included), None for all of them.
        qkv_bias, o_bias, mlp_bias: those projections carry a bias.
        qk_norm: RMSNorm over head_dim on q and k before the rotary embedding.
        tie_embeddings: the output projection is the embedding table.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"model config: {name} is {getattr(self, name)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model config: {self.num_heads} attention heads are not a multiple of {self.num_kv_heads} kv heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"model config: head_dim {self.head_dim} must be even for the rotary embedding")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"model config: {len(self.windows)} windows for {self.num_layers} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ConfigError(f"model config: sliding window {self.windows} must be at least 1")
        if self.rope.divisors and len(self.rope.divisors) != self.head_dim // 2:
            raise ConfigError(f"rope factors: {len(self.rope.divisors)} divisors for head_dim {self.head_dim}")

    @property
    def q_size(self) -> int:
        """Rows of the q projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the k projection, and of the v projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden_size * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.intermediate_size
        mlp += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * self.hidden_size) + self.hidden_size


def state_groups(config: ModelConfig) -> tuple[StateGroup, ...]:
    """What decode needs of the past, in pages that all layers share.

    One WINDOW group where every layer looks back over the same window. Where some layers see everything, all layers
    stay in one HISTORY group: the full layers need each token kept, and a windowed layer's mask alone is then right.
    """
    layers = tuple(range(config.num_layers))
    fields = (Field("k", config.num_kv_heads, config.head_dim), Field("v", config.num_kv_heads, config.head_dim))
    if None in config.windows:
        return (StateGroup(GroupKind.HISTORY, layers, fields),)
    window = max(w for w in config.windows if w is not None)
    return (StateGroup(GroupKind.WINDOW, layers, fields, window=window),)
