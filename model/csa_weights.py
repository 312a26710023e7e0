"""A DeepSeek V4 checkpoint's weights as the decoder reads them.

`Reader` is the one place where a stored tensor becomes numbers. Names are those of the published checkpoints
(csa_tensors.py) or those that transformers writes. What decides (gates, mixing, compressors, norms, sinks) is float32
whatever the store's dtype is, as in the published inference code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tailrace.kernels.hyper_connections import CollapseWeights, MixingWeights
from tailrace.kernels.norm import RmsNorm
from tailrace.model import quantized as blocks
from tailrace.model.csa_config import CsaConfig
from tailrace.model.csa_tensors import LayerKind, tensor_shapes
from tailrace.model.errors import ConfigError
from tailrace.model.family import Progress
from tailrace.model.linear import Linear, PrepackedLinear, SteadyLinear, prepacking_works
from tailrace.model.scaled_blocks import integers
from tailrace.model.tensors import TensorEntry, TensorTable

# How transformers 5.23 writes names that it does not write as published.
_OTHER_NAMES = (
    (re.compile(r"^embed\."), "embed_tokens."),
    (re.compile(r"^hc_head_"), "hc_head.hc_"),
    (re.compile(r"\.attn\.kv_norm\."), ".attn.norm."),
)


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Of one compressor; m tokens a window, `width` its entry's dim, twice that where windows overlap.

    Attributes:
        projection: [2 width, hidden] float32: values, then gates.
        position_bias: [m, width] float32, added to the gates by position in the window.
        norm: over an entry.
    """

    projection: torch.Tensor
    position_bias: torch.Tensor
    norm: RmsNorm


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """Of a CSA layer's index. weights_proj: [index heads, hidden] float32."""

    compressor: CompressorWeights
    q_proj: Linear
    weights_proj: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Of one layer.

    Attributes:
        q_a_proj, q_norm, q_b_proj: hidden -> q rank -> heads x head_dim.
        kv_proj, kv_norm: hidden -> head_dim, one row that is key and value.
        o_a_proj: [groups, o rank, heads / groups x head_dim], of each group of heads.
        o_b_proj: groups x o rank -> hidden.
        sinks: [heads] float32.
        compressor: None in window layers; indexer: in CSA layers only.
    """

    q_a_proj: Linear
    q_norm: RmsNorm
    q_b_proj: Linear
    kv_proj: Linear
    kv_norm: RmsNorm
    o_a_proj: torch.Tensor
    o_b_proj: Linear
    sinks: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class ExpertsWeights:
    """Of one layer.

    Attributes:
        gate: [experts, hidden] float32.
        bias: [experts] float32, for choosing only; None where experts are looked up.
        table: [vocab, experts a token] int64, experts by token id; None where they are chosen.
        gate_up: [experts, 2 x inner, hidden], gate first;  down: [experts, hidden, inner].
        shared_gate_up, shared_down: of the expert that every token passes.
    """

    gate: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None
    gate_up: torch.Tensor
    down: torch.Tensor
    shared_gate_up: Linear
    shared_down: Linear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: attention, then experts, each with its norm and its mixing weights."""

    kind: LayerKind
    attention_mixing: MixingWeights
    attention_norm: RmsNorm
    attention: AttentionWeights
    experts_mixing: MixingWeights
    experts_norm: RmsNorm
    experts: ExpertsWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """One draft (MTP) block: e_proj on the next token's embedding, h_proj on each stream, a window layer, its ends."""

    embed_norm: RmsNorm
    embed_proj: Linear
    streams_norm: RmsNorm
    streams_proj: Linear
    layer: LayerWeights
    head: CollapseWeights
    norm: RmsNorm


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model. embed: [vocab, hidden] in the store's dtype."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    drafts: tuple[DraftWeights, ...]
    head: CollapseWeights
    norm: RmsNorm
    lm_head: Linear


def load_weights(tensors: TensorTable, config: CsaConfig, dtype: torch.dtype, progress: Progress | None) -> Weights:
    """Read everything that the config names.

    Args:
        tensors: by the names of the checkpoint's files.
        dtype: float32 or bfloat16, of what is not always float32.
        progress: told (bytes read, bytes in all) after each tensor.

    Raises:
        ConfigError: a tensor is missing or has another shape, or an id table names no expert.
    """
    with torch.no_grad():
        weights = _Loader(Reader(tensors, config, progress), config, dtype).load()
    tensors.drop_pages()
    return weights


class Reader:
    """Tensors by their published names, whatever the files call them."""

    def __init__(self, tensors: TensorTable, config: CsaConfig, progress: Progress | None) -> None:
        self._tensors, self._progress = tensors, progress
        self._shapes = dict(tensor_shapes(config))
        self._done, self._total = 0, sum(self._entry(name).num_bytes for name in self._shapes)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """In `dtype`, in memory of its own."""
        entry = self._entry(name)
        result = blocks.dense(entry, dtype)
        self._count(entry)
        return result

    def table(self, name: str, below: int) -> torch.Tensor:
        """Numbers as int64, in memory of its own; ConfigError for one outside 0 .. below - 1."""
        entry = self._entry(name)
        numbers = integers(entry)
        least, most = int(numbers.min()), int(numbers.max())
        if least < 0 or most >= below:
            raise ConfigError(
                f"{entry.file}: tensor {entry.stored_name} {entry.shape} holds {least if least < 0 else most}, "
                f"expected 0 to {below - 1}"
            )
        self._count(entry)
        return numbers

    def _count(self, entry: TensorEntry) -> None:
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _entry(self, name: str) -> TensorEntry:
        return self._tensors.required(_stored_name(self._tensors, name), self._shapes[name])


def _stored_name(tensors: Mapping[str, object], name: str) -> str:
    """What this checkpoint calls a tensor; the published name if it has neither."""
    if name in tensors:
        return name
    other = name
    for pattern, written in _OTHER_NAMES:
        other = pattern.sub(written, other)
    return next((n for n in (f"model.{other}", other) if n in tensors), name)


class _Loader:
    """One load."""

    def __init__(self, reader: Reader, config: CsaConfig, dtype: torch.dtype) -> None:
        self._tensor, self._table, self._config, self._dtype = reader.tensor, reader.table, config, dtype
        self._prepack = dtype is torch.bfloat16 and prepacking_works()

    def load(self) -> Weights:
        config = self._config
        embed = self._tensor("embed.weight", self._dtype)
        lm_head = self._linear(embed) if config.tie_embeddings else self._linear_of("head.weight")
        layers = tuple(
            self._layer(f"layers.{i}.", kind, by_hash)
            for i, (kind, by_hash) in enumerate(zip(config.kinds, config.hash_layers, strict=True))
        )
        drafts = tuple(self._draft(f"mtp.{i}.") for i in range(config.num_draft_layers))
        return Weights(embed, layers, drafts, self._collapse(""), self._norm("norm.weight"), lm_head)

    def _float(self, name: str) -> torch.Tensor:
        return self._tensor(name, torch.float32)

    def _linear(self, weight: torch.Tensor) -> Linear:
        return PrepackedLinear(weight) if self._prepack else SteadyLinear(weight)

    def _linear_of(self, *names: str) -> Linear:
        """Projections of one input, one behind the other."""
        weights = [self._tensor(name, self._dtype) for name in names]
        return self._linear(weights[0] if len(weights) == 1 else torch.cat(weights))

    def _norm(self, name: str, dtype: torch.dtype | None = None) -> RmsNorm:
        return RmsNorm(self._tensor(name, dtype or self._dtype), self._config.norm_eps)

    def _mixing(self, prefix: str) -> MixingWeights:
        return MixingWeights(*(self._float(prefix + part) for part in ("fn", "base", "scale")))

    def _collapse(self, prefix: str) -> CollapseWeights:
        return CollapseWeights(*(self._float(f"{prefix}hc_head_{part}") for part in ("fn", "base", "scale")))

    def _layer(self, p: str, kind: LayerKind, by_hash: bool) -> LayerWeights:
        return LayerWeights(
            kind=kind,
            attention_mixing=self._mixing(f"{p}hc_attn_"),
            attention_norm=self._norm(f"{p}attn_norm.weight"),
            attention=self._attention(f"{p}attn.", kind),
            experts_mixing=self._mixing(f"{p}hc_ffn_"),
            experts_norm=self._norm(f"{p}ffn_norm.weight"),
            experts=self._experts(f"{p}ffn.", by_hash),
        )

    def _draft(self, p: str) -> DraftWeights:
        return DraftWeights(
            embed_norm=self._norm(f"{p}enorm.weight"),
            embed_proj=self._linear_of(f"{p}e_proj.weight"),
            streams_norm=self._norm(f"{p}hnorm.weight"),
            streams_proj=self._linear_of(f"{p}h_proj.weight"),
            layer=self._layer(p, LayerKind.WINDOW, False),
            head=self._collapse(p),
            norm=self._norm(f"{p}norm.weight"),
        )

    def _attention(self, p: str, kind: LayerKind) -> AttentionWeights:
        groups = self._tensor(f"{p}wo_a.weight", self._dtype).unflatten(0, (self._config.o_groups, -1))
        indexer = None
        if kind is LayerKind.CSA:
            indexer = IndexerWeights(
                self._compressor(f"{p}indexer.compressor."),
                self._linear_of(f"{p}indexer.wq_b.weight"),
                self._float(f"{p}indexer.weights_proj.weight"),
            )
        return AttentionWeights(
            q_a_proj=self._linear_of(f"{p}wq_a.weight"),
            q_norm=self._norm(f"{p}q_norm.weight"),
            q_b_proj=self._linear_of(f"{p}wq_b.weight"),
            kv_proj=self._linear_of(f"{p}wkv.weight"),
            kv_norm=self._norm(f"{p}kv_norm.weight", torch.float32),
            o_a_proj=groups,
            o_b_proj=self._linear_of(f"{p}wo_b.weight"),
            sinks=self._float(f"{p}attn_sink"),
            compressor=None if kind is LayerKind.WINDOW else self._compressor(f"{p}compressor."),
            indexer=indexer,
        )

    def _compressor(self, p: str) -> CompressorWeights:
        projection = torch.cat((self._float(f"{p}wkv.weight"), self._float(f"{p}wgate.weight")))
        return CompressorWeights(projection, self._float(f"{p}ape"), self._norm(f"{p}norm.weight", torch.float32))

    def _experts(self, p: str, by_hash: bool) -> ExpertsWeights:
        inner, hidden, count = self._config.expert_dim, self._config.hidden_size, self._config.num_experts
        gate_up = torch.empty(count, 2 * inner, hidden, dtype=self._dtype)
        down = torch.empty(count, hidden, inner, dtype=self._dtype)
        for e in range(count):
            gate_up[e, :inner] = self._tensor(f"{p}experts.{e}.w1.weight", self._dtype)
            gate_up[e, inner:] = self._tensor(f"{p}experts.{e}.w3.weight", self._dtype)
            down[e] = self._tensor(f"{p}experts.{e}.w2.weight", self._dtype)
        return ExpertsWeights(
            gate=self._float(f"{p}gate.weight"),
            bias=None if by_hash else self._float(f"{p}gate.bias"),
            table=self._table(f"{p}gate.tid2eid", count) if by_hash else None,
            gate_up=gate_up,
            down=down,
            shared_gate_up=self._linear_of(f"{p}shared_experts.w1.weight", f"{p}shared_experts.w3.weight"),
            shared_down=self._linear_of(f"{p}shared_experts.w2.weight"),
        )
