"""Weights of DeepSeek V3 and V3.2 as the blocks use them, from a checkpoint's tensors.

Rotated dimensions that the file stores in neighbouring pairs are put into half-split order here, once: a score is a
sum over dimensions, so the same order on both of its sides changes nothing, and all rotations are then of one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailrace.kernels.norm import RmsNorm
from tailrace.model import quantized
from tailrace.model.errors import ConfigError
from tailrace.model.family import Progress
from tailrace.model.linear import Linear, PrepackedLinear, SteadyLinear, prepacking_works
from tailrace.model.mla_config import LATENT_NORM_EPS, MlaConfig, Shapes, expected_shapes
from tailrace.model.tensors import TensorTable
from tailrace.model.weights import DTYPES


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """q: from the query latent;  k, head_weights: from the hidden state;  head_weights: [heads, hidden] float32.

    k_norm: weight and bias of the layer norm over the key, float32.
    """

    q: Linear
    k: Linear
    k_norm: tuple[torch.Tensor, torch.Tensor]
    head_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Latent attention in the absorbed form.

    Attributes:
        q_down, q_norm: None where queries are made from the hidden state.
        q_up: to [heads, nope | rope], the rope part in half-split order.
        kv_down: to [latent | rope], the rope part in half-split order.
        k_up: [heads, rank, nope], turns a query into one over latents.
        v_up: [heads, v, rank], turns a sum of latents into one of values.
    """

    q_down: Linear | None
    q_norm: RmsNorm | None
    q_up: Linear
    kv_down: Linear
    kv_norm: RmsNorm
    k_up: torch.Tensor
    v_up: torch.Tensor
    out: Linear
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """gate_up's output is [gate | up]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """router: [experts, hidden] float32;  bias: [experts] float32, for the choice alone.

    gate_up: [experts, 2 * inner, hidden], gate first;  down: [experts, hidden, inner];  shared: None if there is none.
    """

    router: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """One layer, or the block of a draft layer."""

    input_norm: RmsNorm
    attention: AttentionWeights
    post_norm: RmsNorm
    mlp: MlpWeights | ExpertsWeights


class WeightReader:
    """Reads tensors by their stored names.

    Args:
        tensors: of the checkpoint.
        config: says what must be there.
        dtype: of what is read, where nothing else is said.
        progress: told after each tensor.

    Raises:
        ConfigError: a tensor is missing or has another shape, or dtype is not supported.
    """

    def __init__(
        self, tensors: TensorTable, config: MlaConfig, dtype: torch.dtype, progress: Progress | None = None
    ) -> None:
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype {dtype} is not supported; supported: {', '.join(DTYPES)}")
        self.config, self.dtype = config, dtype
        self._tensors, self._progress = tensors, progress
        self._shapes: Shapes = expected_shapes(config)
        self._prepack = dtype is torch.bfloat16 and prepacking_works()
        entries = [tensors.required(name, shape) for name, shape in self._shapes.items()]
        self._done, self._total = 0, sum(entry.num_bytes for entry in entries)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The one place where a tensor is read."""
        entry = self._tensors.required(name, self._shapes[name])
        tensor = quantized.dense(entry, self.dtype if dtype is None else dtype)
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return tensor

    def norm(self, name: str, eps: float | None = None) -> RmsNorm:
        return RmsNorm(self.tensor(name), self.config.rms_norm_eps if eps is None else eps)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: [out, in] of this reader's dtype."""
        return PrepackedLinear(weight, bias) if self._prepack else SteadyLinear(weight, bias)

    def block(self, prefix: str, is_sparse: bool) -> BlockWeights:
        """`prefix` ends in a dot."""
        return BlockWeights(
            self.norm(prefix + "input_layernorm.weight"),
            self._attention(prefix + "self_attn."),
            self.norm(prefix + "post_attention_layernorm.weight"),
            self._experts(prefix + "mlp.") if is_sparse else self._mlp(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        config, heads = self.config, self.config.num_heads
        has_query_latent = config.q_lora_rank is not None
        q_name = "q_b_proj" if has_query_latent else "q_proj"
        q_up = self.tensor(f"{prefix}{q_name}.weight").unflatten(0, (heads, -1))
        k_up, v_up = (
            self.tensor(prefix + "kv_b_proj.weight").unflatten(0, (heads, -1)).split([config.nope_dim, config.v_dim], 1)
        )
        kv_down, kv_bias = self.tensor(prefix + "kv_a_proj_with_mqa.weight"), self._bias(prefix + "kv_a_proj_with_mqa")
        return AttentionWeights(
            q_down=self._plain(prefix + "q_a_proj") if has_query_latent else None,
            q_norm=self.norm(prefix + "q_a_layernorm.weight", LATENT_NORM_EPS) if has_query_latent else None,
            q_up=self.linear(self._half_split(q_up, 1).flatten(0, 1)),
            kv_down=self.linear(
                self._half_split(kv_down, 0), None if kv_bias is None else self._half_split(kv_bias, 0)
            ),
            kv_norm=self.norm(prefix + "kv_a_layernorm.weight", LATENT_NORM_EPS),
            k_up=k_up.transpose(1, 2).contiguous(),
            v_up=v_up.contiguous(),
            out=self._plain(prefix + "o_proj"),
            indexer=None if config.indexer is None else self._indexer(prefix + "indexer."),
        )

    def _indexer(self, prefix: str) -> IndexerWeights:
        full = torch.float32
        return IndexerWeights(
            q=self._plain(prefix + "wq_b"),
            k=self._plain(prefix + "wk"),
            k_norm=(self.tensor(prefix + "k_norm.weight", full), self.tensor(prefix + "k_norm.bias", full)),
            head_weights=self.tensor(prefix + "weights_proj.weight", full),
        )

    def _mlp(self, prefix: str) -> MlpWeights:
        gate_up = torch.cat([self.tensor(f"{prefix}{part}_proj.weight") for part in ("gate", "up")])
        return MlpWeights(self.linear(gate_up), self._plain(prefix + "down_proj"))

    def _experts(self, prefix: str) -> ExpertsWeights:
        experts = self.config.experts
        assert experts is not None
        inner, hidden = experts.intermediate_size, self.config.hidden_size
        # Filled one by one: a list of them all beside the stack would hold everything twice.
        gate_up = torch.empty(experts.num, 2 * inner, hidden, dtype=self.dtype)
        down = torch.empty(experts.num, hidden, inner, dtype=self.dtype)
        for i in range(experts.num):
            gate_up[i, :inner] = self.tensor(f"{prefix}experts.{i}.gate_proj.weight")
            gate_up[i, inner:] = self.tensor(f"{prefix}experts.{i}.up_proj.weight")
            down[i] = self.tensor(f"{prefix}experts.{i}.down_proj.weight")
        return ExpertsWeights(
            router=self.tensor(prefix + "gate.weight", torch.float32),
            bias=self.tensor(prefix + "gate.e_score_correction_bias", torch.float32),
            gate_up=gate_up,
            down=down,
            shared=self._mlp(prefix + "shared_experts.") if experts.num_shared else None,
        )

    def _plain(self, name: str) -> Linear:
        return self.linear(self.tensor(name + ".weight"), self._bias(name))

    def _bias(self, name: str) -> torch.Tensor | None:
        return self.tensor(name + ".bias") if name + ".bias" in self._shapes else None

    def _half_split(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """x with the last rope_dim places of `dim` in half-split order: of each pair first the one, then the other."""
        if not self.config.rope_interleave:
            return x
        rest, rope = x.split([x.shape[dim] - self.config.rope_dim, self.config.rope_dim], dim)
        pairs = rope.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)
        return torch.cat((rest, pairs), dim)
