"""DeepSeek V4.1's weights as the decoder reads them: a checkpoint's tensors under their own names, in one dtype.

What decides in float32 (mHC, routing, the gates of a compressor) is kept in float32 whatever the dtype is. Engram's
tables stay in the mapped file. Every other tensor is read in one place, `_Reader.read`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.kernels.hyper_connections import MixingWeights
from tailrace.kernels.norm import RmsNorm
from tailrace.model import quantized
from tailrace.model.csa2_config import Csa2Config
from tailrace.model.csa2_layers import LayerPlan, Role
from tailrace.model.csa2_tensors import draft_shapes, lower_shapes, tensor_shapes
from tailrace.model.engram import EngramTable, EngramWeights, row_range
from tailrace.model.errors import ConfigError
from tailrace.model.family import Progress
from tailrace.model.scaled_blocks import gathered_rows
from tailrace.model.tensors import TensorEntry


@dataclass(frozen=True, slots=True)
class SelectorWeights:
    """Index queries of a layer that selects.  queries: [heads dim, q_rank];  head_weights: [heads, hidden]."""

    queries: torch.Tensor
    head_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnerWeights:
    """What makes an owner's rows.

    Attributes:
        values, gates: [head_dim, hidden], float32 if the ratio is above 1; gates is None if it is 1.
        norm: over head_dim, of the pooled latent.
        keys: [index_dim, head_dim], of the latent.
        key_norm: over index_dim.
    """

    values: torch.Tensor
    gates: torch.Tensor | None
    norm: RmsNorm
    keys: torch.Tensor
    key_norm: RmsNorm


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """gate: [experts, hidden] float32;  bias: [experts] float32, for the choice only.

    gate_up: [experts + 1, 2 size, hidden], gate rows first;  down: [experts + 1, hidden, size]; the shared one is last.
    """

    gate: torch.Tensor
    bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class Csa2LayerWeights:
    """One layer. Projections are [out, in]; out_groups is [groups, rank, in]; sink is [heads] float32."""

    attn_norm: RmsNorm
    ffn_norm: RmsNorm
    attn_mixing: MixingWeights
    ffn_mixing: MixingWeights
    q_down: torch.Tensor
    q_norm: RmsNorm
    q_up: torch.Tensor
    kv: torch.Tensor
    kv_norm: RmsNorm
    out_groups: torch.Tensor
    out: torch.Tensor
    sink: torch.Tensor
    owner: OwnerWeights | None
    selector: SelectorWeights | None
    moe: MoeWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class BoundaryWeights:
    """What of the boundary layer makes its rows that grow: all that is needed of it where nothing goes through it."""

    attn_norm: RmsNorm
    owner: OwnerWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """Of DSpark.

    Attributes:
        context: [hidden, targets hidden]: what the stages read, of the model's streams.
        norm: after the last stage.
        markov_in, markov_out: [vocabulary, rank] float32.
        confidence: [1, hidden + rank] float32;  confidence_bias: [1] float32, 0 if the checkpoint has none.
    """

    stages: tuple[Csa2LayerWeights, ...]
    context: torch.Tensor
    context_norm: RmsNorm
    norm: RmsNorm
    markov_in: torch.Tensor
    markov_out: torch.Tensor
    confidence: torch.Tensor
    confidence_bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class Csa2Weights:
    """Of the whole model, or of its lower half.

    Attributes:
        embed: [vocabulary, hidden].
        layers: all; of a lower half those in front of the boundary.
        head: [vocabulary, hidden] float32; None in a lower half.
        token_map: [vocabulary]; None without Engram.
        draft: None if it is not in use, and in a lower half.
    """

    config: Csa2Config
    dtype: torch.dtype
    embed: torch.Tensor
    layers: tuple[Csa2LayerWeights, ...]
    boundary: BoundaryWeights
    norm: RmsNorm
    head: torch.Tensor | None
    token_map: np.ndarray | None
    draft: DraftWeights | None

    @property
    def is_whole(self) -> bool:
        return self.head is not None

    def owner(self, layer: int) -> OwnerWeights:
        """Of a layer that is one."""
        found = self.boundary.owner if layer == self.config.boundary else self.layers[layer].owner
        assert found is not None
        return found

    def engrams(self) -> dict[int, EngramWeights]:
        """By layer, of those that are here."""
        found = {i: w.engram for i, w in enumerate(self.layers)} | {self.config.boundary: self.boundary.engram}
        return {i: w for i, w in sorted(found.items()) if w is not None}


def load_weights(
    tensors: Mapping[str, TensorEntry],
    config: Csa2Config,
    dtype: torch.dtype,
    token_map: np.ndarray | None,
    progress: Progress | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    *,
    lower: bool = False,
) -> Csa2Weights:
    """Read all tensors of the text model, or those of its lower half.

    Args:
        tensors: by the names of the checkpoint; what is not needed (draft stages, vision) is left alone.
        token_map: of Engram; None if the config has none.
        rank, num_ranks: whose share of Engram's tables is kept.
        lower: what stands behind the boundary is left alone.

    Raises:
        ConfigError: a tensor is missing or has another shape.
    """
    return _Reader(tensors, config, dtype, progress, rank, num_ranks, lower).weights(token_map)


class _Reader:
    """One load."""

    def __init__(
        self,
        tensors: Mapping[str, TensorEntry],
        config: Csa2Config,
        dtype: torch.dtype,
        progress: Progress | None,
        rank: int,
        num_ranks: int,
        lower: bool,
    ) -> None:
        self.config, self.dtype, self._lower = config, dtype, lower
        self._tensors, self._shapes = tensors, dict(lower_shapes(config) if lower else tensor_shapes(config))
        if config.drafts and not lower:
            self._shapes.update(draft_shapes(config))
        self._progress, self._done = progress, 0
        self._rank, self._num_ranks = rank, num_ranks
        entries = [tensors[name] for name in self._shapes if name in tensors]
        self._total = sum(entry.num_bytes for entry in entries)

    def _entry(self, name: str) -> TensorEntry:
        entry, shape = self._tensors.get(name), self._shapes[name]
        if entry is None:
            raise ConfigError(f"tensor {name} is missing")
        if entry.problem:
            raise ConfigError(entry.problem)
        if entry.shape != shape:
            raise ConfigError(f"{entry.file}: tensor {name} has shape {entry.shape}, expected {shape}")
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
        return entry

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in `dtype` (the store's if None), of the shape that the config wants."""
        entry = self._entry(name)
        return quantized.dense(entry, self.dtype if dtype is None else dtype)

    def _norm(self, name: str, dtype: torch.dtype | None = None) -> RmsNorm:
        return RmsNorm(self.read(name, dtype), self.config.norm_eps)

    def weights(self, token_map: np.ndarray | None) -> Csa2Weights:
        config = self.config
        count = config.boundary if self._lower else config.num_layers
        layers = tuple(self._layer(f"layers.{i}.", plan, i) for i, plan in enumerate(config.layers[:count]))
        return Csa2Weights(
            config=config,
            dtype=self.dtype,
            embed=self.read("embed.weight"),
            layers=layers,
            boundary=self._boundary(None if self._lower else layers[config.boundary]),
            norm=self._norm("norm.weight"),
            head=None if self._lower else self.read("head.weight", torch.float32),
            token_map=token_map,
            draft=None if self._lower else self._draft(),
        )

    def _boundary(self, layer: Csa2LayerWeights | None) -> BoundaryWeights:
        """As a part of the layer, or read alone."""
        if layer is not None:
            assert layer.owner is not None
            return BoundaryWeights(layer.attn_norm, layer.owner, layer.engram)
        number = self.config.boundary
        p = f"layers.{number}."
        owner = self._owner(p + "attn.", self.config.layers[number].ratio)
        return BoundaryWeights(self._norm(p + "attn_norm.weight"), owner, self._engram(number))

    def _layer(self, p: str, plan: LayerPlan, layer: int = -1) -> Csa2LayerWeights:
        """One of the model's, or a draft stage."""
        config = self.config
        out_groups = self.read(p + "attn.wo_a.weight").unflatten(0, (config.o_groups, config.o_rank))
        return Csa2LayerWeights(
            attn_norm=self._norm(p + "attn_norm.weight"),
            ffn_norm=self._norm(p + "ffn_norm.weight"),
            attn_mixing=self._mixing(p + "hc_attn_"),
            ffn_mixing=self._mixing(p + "hc_ffn_"),
            q_down=self.read(p + "attn.wq_a.weight"),
            q_norm=self._norm(p + "attn.q_norm.weight"),
            q_up=self.read(p + "attn.wq_b.weight"),
            kv=self.read(p + "attn.wkv.weight"),
            kv_norm=self._norm(p + "attn.kv_norm.weight"),
            out_groups=out_groups,
            out=self.read(p + "attn.wo_b.weight"),
            sink=self.read(p + "attn.attn_sink", torch.float32),
            owner=self._owner(p + "attn.", plan.ratio) if plan.role is Role.FULL else None,
            selector=self._selector(p + "attn.indexer.") if plan.selects else None,
            moe=self._moe(p + "ffn."),
            engram=self._engram(layer),
        )

    def _mixing(self, p: str) -> MixingWeights:
        return MixingWeights(*(self.read(p + name, torch.float32) for name in ("fn", "base", "scale")))

    def _owner(self, p: str, ratio: int) -> OwnerWeights:
        dtype = self.dtype if ratio == 1 else torch.float32
        return OwnerWeights(
            values=self.read(p + "compressor.wkv.weight", dtype),
            gates=None if ratio == 1 else self.read(p + "compressor.wgate.weight", dtype),
            norm=self._norm(p + "compressor.norm.weight"),
            keys=self.read(p + "indexer.wk.weight"),
            key_norm=self._norm(p + "indexer.k_norm.weight"),
        )

    def _selector(self, p: str) -> SelectorWeights:
        return SelectorWeights(self.read(p + "wq_b.weight"), self.read(p + "weights_proj.weight"))

    def _moe(self, p: str) -> MoeWeights:
        n, size, hidden = self._shapes[p + "gate.bias"][0] + 1, self.config.expert_size, self.config.hidden_size
        gate_up = torch.empty(n, 2 * size, hidden, dtype=self.dtype)
        down = torch.empty(n, hidden, size, dtype=self.dtype)
        for i in range(n):
            name = f"{p}experts.{i}." if i < n - 1 else f"{p}shared_experts."
            gate_up[i, :size] = self.read(name + "w1.weight")
            gate_up[i, size:] = self.read(name + "w3.weight")
            down[i] = self.read(name + "w2.weight")
        return MoeWeights(
            self.read(p + "gate.weight", torch.float32), self.read(p + "gate.bias", torch.float32), gate_up, down
        )

    def _engram(self, layer: int) -> EngramWeights | None:
        if self.config.engram is None or layer not in self.config.engram.layers:
            return None
        p = f"layers.{layer}.engram."
        match = self.read(p + "q_weight", torch.float32) * self.read(p + "k_weight", torch.float32)
        return EngramWeights(self._table(p + "embed.weight"), self.read(p + "wkv.weight"), match)

    def _draft(self) -> DraftWeights | None:
        draft = self.config.draft
        if draft is None or not self.config.drafts:
            return None
        last, f32 = f"mtp.{draft.stages - 1}.", torch.float32
        bias = self._tensors.get(last + "confidence_head.proj.bias")
        return DraftWeights(
            stages=tuple(self._layer(f"mtp.{i}.", LayerPlan(Role.SWA)) for i in range(draft.stages)),
            context=self.read("mtp.0.main_proj.weight"),
            context_norm=self._norm("mtp.0.main_norm.weight"),
            norm=self._norm(last + "norm.weight"),
            markov_in=self.read(last + "markov_head.markov_w1.weight", f32),
            markov_out=self.read(last + "markov_head.markov_w2.weight", f32),
            confidence=self.read(last + "confidence_head.proj.weight", f32),
            confidence_bias=torch.zeros(1) if bias is None else quantized.dense(bias, f32),
        )

    def _table(self, name: str) -> EngramTable:
        entry = self._entry(name)
        held = row_range(entry.shape[0], self._rank, self._num_ranks)
        return EngramTable(lambda rows: gathered_rows(entry, rows, torch.float32), held)
