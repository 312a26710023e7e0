"""A checkpoint's weights, or one rank's share of them, as the decoder reads them: named fields, fused projections, one
dtype.

It does not know file formats beyond asking the source for tensors, nor what the decoder computes with them. float32 is
exact: block types are decoded and kept dense, so that a float32 store can be held against any other implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from tailrace.model import quantized as blocks
from tailrace.model.config import ModelConfig
from tailrace.model.errors import ConfigError
from tailrace.model.few_rows import FewRowsWeights
from tailrace.model.few_rows import pack as pack_few_rows
from tailrace.model.linear import (
    ByRowsLinear,
    DenseLinear,
    Int4Linear,
    Linear,
    cpu_linear,
    int4_works,
    prepacking_works,
)
from tailrace.model.quantized import ALL_ROWS, Int4Groups
from tailrace.model.shard import WHOLE, Shard
from tailrace.model.source import ModelSource
from tailrace.model.tensors import TensorEntry

Progress = Callable[[int, int], None]  # bytes done, bytes in all

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Embedding(Protocol):
    """Token embedding table."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [tokens] int32 or int64 -> [tokens, hidden_size] in the store's dtype, in memory of its own."""
        ...

    @property
    def num_bytes(self) -> int: ...


class DenseEmbedding:
    """table: [vocab_size, hidden_size]."""

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, ids)

    @property
    def num_bytes(self) -> int:
        return self._table.nbytes


class Q8Embedding:
    """A Q8_0 table kept at a byte an element; the rows asked for are decoded exactly, then rounded to `dtype`."""

    def __init__(self, scale: torch.Tensor, values: torch.Tensor, dtype: torch.dtype) -> None:
        """scale: [vocab_size, hidden_size / 32] float32;  values: [vocab_size, hidden_size] int8."""
        # Scales are stored as float16 in the file, so this loses nothing.
        self._scale, self._values, self._dtype = scale.to(torch.float16), values, dtype

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        values = self._values.index_select(0, ids).unflatten(1, (-1, blocks.GROUP)).float()
        return values.mul_(self._scale.index_select(0, ids).float()[..., None]).flatten(1).to(self._dtype)

    @property
    def num_bytes(self) -> int:
        return self._scale.nbytes + self._values.nbytes


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. Norms are [hidden_size] (q_norm, k_norm: [head_dim]) in the store's dtype.

    qkv_proj's output is [q heads | k heads | v heads] x head_dim, biases included; the rotary embedding is always the
    half-split ("rotate half") form, whatever the file's order was. gate_up_proj's output is [gate | up].
    """

    input_norm: torch.Tensor
    qkv_proj: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: Linear
    post_norm: torch.Tensor
    gate_up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All of a model, or one rank's share.

    Attributes:
        config: of this rank: its own heads and MLP width.
        lm_head: is there also when it is tied to `embed`; None at ranks that do not sample.
        num_bytes: held in memory, of all weights.
        few_rows: the quantized weights once more, as steps of few tokens read them; None where that is not possible.
    """

    config: ModelConfig
    dtype: torch.dtype
    embed: Embedding
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: Linear | None
    num_bytes: int
    few_rows: FewRowsWeights | None = None


def load_weights(
    source: ModelSource,
    *,
    dtype: torch.dtype,
    quantized: bool = True,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    device: torch.device | None = None,
) -> Weights:
    """Read the weights of a source.

    Args:
        source: an opened model.
        dtype: float32 or bfloat16.
        quantized: keep 4-bit weights packed beside their bf16 copy and use them for few rows, and a Q8_0 embedding at
            a byte an element. Ignored for float32 and where a tensor's type or shape cannot be packed.
        progress: told after every tensor.
        shard: which share of them. Packed weights are not split: tp above 1 takes `quantized` False.
        device: plain and dense there, for model/device_decoder.py; None: in the forms that a CPU's products want.

    Raises:
        ConfigError: a dtype that is not supported, or a model that cannot be split so.
    """
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} is not supported; supported: {', '.join(DTYPES)}")
    pack = quantized and dtype is torch.bfloat16 and device is None
    if pack and shard.tp > 1:
        raise ConfigError(f"weights: quantized weights are not split over {shard.tp} ranks: use dense")
    with torch.no_grad():
        weights = _Loader(source, dtype, pack, progress, shard, device).load()
    source.tensors.drop_pages()
    return weights


class _Loader:
    """One load; counts the bytes read and those held."""

    def __init__(
        self,
        source: ModelSource,
        dtype: torch.dtype,
        pack: bool,
        progress: Progress | None,
        shard: Shard,
        device: torch.device | None,
    ) -> None:
        model = source.config
        if not isinstance(model, ModelConfig):
            raise ConfigError(f"model {source.name}: family {model.family} has a loader of its own")
        self.config, self.tensors, self.shard = shard.config(model), source.tensors, shard
        self.dtype, self.pack, self._packs_products = dtype, pack, pack
        dim = self.config.head_dim
        self._kept = {  # of projections that are split along their outputs: the rows of this rank
            "q_proj": _scaled(shard.part(model.num_heads), dim),
            "k_proj": _scaled(shard.kv_heads(model.num_kv_heads), dim),
            "v_proj": _scaled(shard.kv_heads(model.num_kv_heads), dim),
            "gate_proj": _scaled(shard.part(model.intermediate_size)),
            "up_proj": _scaled(shard.part(model.intermediate_size)),
        }
        self._inputs = {"o_proj": self._kept["q_proj"], "down_proj": self._kept["gate_proj"]}
        self._device = device
        self._progress = progress
        self._done, self._total = 0, source.tensors.num_bytes
        self._held = 0

    def load(self) -> Weights:
        few_rows = pack_few_rows(self.config, self.tensors) if self.pack else None
        if few_rows is not None:
            self._held += few_rows.num_bytes
            self._packs_products = False
        embed, lm_head = self._ends()
        layers = tuple(self._layer(f"layers.{i}.") for i in range(self.config.num_layers))
        norm = self._vector("norm.weight")
        return Weights(self.config, self.dtype, embed, layers, norm, lm_head, self._held, few_rows)

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)

    def _count(self, entry: TensorEntry) -> None:
        self._done += entry.num_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _vector(self, name: str, part: slice = ALL_ROWS) -> torch.Tensor:
        entry = self.tensors[name]
        vector = self._placed(blocks.dense(entry, self.dtype, part))
        self._count(entry)
        self._held += vector.nbytes
        return vector

    def _optional(self, name: str, part: slice = ALL_ROWS) -> torch.Tensor | None:
        return self._vector(name, part) if name in self.tensors else None

    def _layer(self, prefix: str) -> LayerWeights:
        return LayerWeights(
            input_norm=self._vector(prefix + "input_norm.weight"),
            qkv_proj=self._linear(prefix, "q_proj", "k_proj", "v_proj"),
            q_norm=self._optional(prefix + "q_norm.weight"),
            k_norm=self._optional(prefix + "k_norm.weight"),
            o_proj=self._adding(prefix, "o_proj"),
            post_norm=self._vector(prefix + "post_norm.weight"),
            gate_up_proj=self._linear(prefix, "gate_proj", "up_proj"),
            down_proj=self._adding(prefix, "down_proj"),
        )

    def _linear(self, prefix: str, *parts: str) -> Linear:
        """Projections of one input, fused along their outputs, of which each rank has its own."""
        entries = [self.tensors[f"{prefix}{part}.weight"] for part in parts]
        biases = [self._optional(f"{prefix}{part}.bias", self._kept[part]) for part in parts]
        weight = torch.cat(
            [blocks.dense(entry, self.dtype, self._kept[part]) for entry, part in zip(entries, parts, strict=True)]
        )
        linear = self._build(weight, entries, [b for b in biases if b is not None])
        for entry in entries:
            self._count(entry)
        return linear

    def _adding(self, prefix: str, part: str) -> Linear:
        """A projection of what this rank has computed; the ranks' results are added up, so only one has the bias."""
        entry = self.tensors[f"{prefix}{part}.weight"]
        bias = self._optional(f"{prefix}{part}.bias") if self.shard.rank == 0 else None
        weight = blocks.dense(entry, self.dtype)
        if self.shard.tp > 1:
            weight = weight[:, self._inputs[part]].contiguous()
        linear = self._build(weight, [entry], [] if bias is None else [bias])
        self._count(entry)
        return linear

    def _build(self, weight: torch.Tensor, entries: list[TensorEntry], biases: list[torch.Tensor]) -> Linear:
        """`entries`: whose weights these are, one after another, for the packed form."""
        bias = torch.cat(biases) if biases else None
        many = cpu_linear(weight, bias) if self._device is None else DenseLinear(self._placed(weight), bias)
        few = self._few(entries, biases)
        linear = ByRowsLinear(few, many) if few else many
        self._held += linear.num_bytes
        return linear

    def _few(self, entries: list[TensorEntry], biases: list[torch.Tensor]) -> list[Linear]:
        """Packed parts for few rows; empty if no part of the weight can be packed."""
        if not self._packs_products or not any(_packable(entry) for entry in entries):
            return []
        parts: list[Linear] = []
        start = 0
        for end in range(1, len(entries) + 1):
            if end < len(entries) and entries[end].kind == entries[start].kind:
                continue
            bias = torch.cat(biases[start:end]) if biases else None
            parts.append(self._part(entries[start:end], bias))
            start = end
        return parts

    def _part(self, run: list[TensorEntry], bias: torch.Tensor | None) -> Linear:
        if all(_packable(entry) for entry in run):
            return Int4Linear(_joined([blocks.int4_groups(entry) for entry in run]), bias)
        weight = torch.cat([blocks.dense(entry, self.dtype) for entry in run])
        return cpu_linear(weight, bias)

    def _ends(self) -> tuple[Embedding, Linear | None]:
        """Embedding and, at the rank that samples, the output projection, sharing memory where they can."""
        entry = self.tensors["embed.weight"]
        head = self.tensors.get("lm_head.weight", entry)
        lm_head: Linear | None = None
        if self.pack and entry.kind == "Q8_0":
            embed: Embedding = Q8Embedding(*blocks.q8_0_rows(entry.rows()), self.dtype)
        else:
            table = self._placed(blocks.dense(entry, self.dtype))
            embed = DenseEmbedding(table)
            is_prepacked = self.dtype is torch.bfloat16 and self._device is None and prepacking_works()
            if head is entry and not is_prepacked:
                lm_head = cpu_linear(table) if self._device is None else DenseLinear(table)
        if self.shard.rank:
            lm_head = None
        elif lm_head is None:
            lm_head = self._build(blocks.dense(head, self.dtype), [head], [])
        self._held += embed.num_bytes
        self._count(entry)
        if head is not entry:
            self._count(head)
        return embed, lm_head


def _scaled(part: range, each: int = 1) -> slice:
    """Rows of `part`, `each` of them belonging to one of its numbers."""
    return slice(part.start * each, part.stop * each)


def _packable(entry: TensorEntry) -> bool:
    return entry.kind in blocks.INT4_KINDS and int4_works(*entry.shape)


def _joined(groups: list[Int4Groups]) -> Int4Groups:
    return Int4Groups(
        torch.cat([g.codes for g in groups]),
        torch.cat([g.scale for g in groups]),
        torch.cat([g.zero for g in groups]),
    )
