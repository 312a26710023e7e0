"""One block of DeepSeek V3 or V3.2: latent attention over a sequence's rows, then an MLP or experts.

Attention is in the absorbed form: a query is turned into one over latents, so that rows are read as they are stored
and never expanded to heads. On V3.2 an indexer scores all rows and only the best are attended to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tailrace.kernels.activation import silu_mul
from tailrace.kernels.by_device import (
    exact_topk,
    grouped_swiglu,
    index_scores,
    pack,
    sparse_attention,
    top_k_routing,
    unpack,
)
from tailrace.kernels.packed_rows import HistoryRows
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kernels.rotary import apply_rotary, rotary_rows
from tailrace.kernels.row_formats import RowFormat
from tailrace.kernels.sparse_attention import PickedRows, RowRange
from tailrace.kernels.steady import steady_groups, steady_linear, steady_sigmoid
from tailrace.model.mla_config import Experts, Indexer, MlaConfig
from tailrace.model.mla_weights import (
    AttentionWeights,
    BlockWeights,
    ExpertsWeights,
    IndexerWeights,
    MlpWeights,
)
from tailrace.model.row_store import RowPool, SequenceRows

INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class RowFormats:
    """How a token's rows are stored. index_key: None without an indexer."""

    latent: RowFormat
    index_key: RowFormat | None


@dataclass(frozen=True, slots=True)
class _Span:
    """A row's tokens `at` of the step, in the sequence [start, end)."""

    at: slice
    start: int
    end: int
    rows: SequenceRows


class Step:
    """What all blocks of one step share.

    Args:
        positions: [tokens or more] int64.
        frequencies: [rope_dim / 2] float32.
    """

    def __init__(
        self,
        config: MlaConfig,
        frequencies: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
    ) -> None:
        self.cos, self.sin = rotary_rows(positions, frequencies, config.rope.attention_factor, torch.float32)
        spans, at = [], 0
        for row in rows:
            end = row.start + row.num_new
            spans.append(_Span(slice(at, at + row.num_new), row.start, end, pool.of(row.pages)))
            at += row.num_new
        self.spans = tuple(spans)


class Block:
    """Attention and MLP of one layer, each added to the hidden state.

    Args:
        layer: the number under which its rows stand.
    """

    def __init__(self, config: MlaConfig, weights: BlockWeights, formats: RowFormats, layer: int) -> None:
        self._input_norm, self._post_norm = weights.input_norm, weights.post_norm
        self._attention = _Attention(config, weights.attention, formats, layer)
        self._mlp: _Mlp | _MixtureOfExperts
        if isinstance(weights.mlp, ExpertsWeights):
            assert config.experts is not None
            self._mlp = _MixtureOfExperts(config.experts, weights.mlp)
        else:
            self._mlp = _Mlp(weights.mlp)

    def __call__(self, hidden: torch.Tensor, step: Step) -> None:
        """hidden: [tokens or more, hidden_size] float32, added to in place. Writes the new tokens' rows."""
        hidden += self._attention(self._input_norm(hidden), step)
        hidden += self._mlp(self._post_norm(hidden))


class _Attention:
    def __init__(self, config: MlaConfig, weights: AttentionWeights, formats: RowFormats, layer: int) -> None:
        self._config, self._w, self._format, self._layer = config, weights, formats.latent, layer
        self._selector = None
        if config.indexer is not None and weights.indexer is not None and formats.index_key is not None:
            self._selector = _Selector(config.indexer, weights.indexer, config.rope_dim, formats.index_key, layer)

    def __call__(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        config, w = self._config, self._w
        x_q = x if w.q_down is None or w.q_norm is None else w.q_norm(w.q_down(x))
        q_nope, q_rope = w.q_up(x_q).unflatten(1, (config.num_heads, -1)).split([config.nope_dim, config.rope_dim], 2)
        latent, k_rope = w.kv_down(x).split([config.kv_lora_rank, config.rope_dim], 1)
        rows = torch.cat((w.kv_norm(latent), k_rope), 1).float()
        _rotate(rows[:, None, config.kv_lora_rank :], step)
        queries = torch.cat((steady_groups(q_nope, w.k_up), q_rope), 2).float()
        _rotate(queries[..., config.kv_lora_rank :], step)
        packed = pack(self._format, rows)
        attended = queries.new_zeros(*queries.shape[:2], config.kv_lora_rank)
        index = None if self._selector is None else self._selector.project(x, x_q, step)
        for span in step.spans:
            store = span.rows.history("latent", self._layer)
            store.write(span.start, packed[span.at])
            visible = torch.arange(span.start + 1, span.end + 1)
            selected = None
            if index is not None and self._selector is not None:
                selected = self._selector.select(index, span, visible)
            part = self._past(store, visible) if selected is None else self._picked(store, selected, span.end)
            attended[span.at] = sparse_attention(
                queries[span.at], [part], config.softmax_scale, value_dim=config.kv_lora_rank
            )
        return w.out(steady_groups(attended.to(x.dtype), w.v_up).flatten(1))

    def _past(self, store: HistoryRows, visible: torch.Tensor) -> RowRange:
        """All rows before each query, its own included."""
        return RowRange(unpack(self._format, store.first(int(visible[-1]))), torch.zeros_like(visible), visible)

    def _picked(self, store: HistoryRows, selected: torch.Tensor, end: int) -> PickedRows:
        """selected: [queries, top_k], -1 for none, of rows below `end`. Few queries read only what they selected."""
        if selected.numel() >= end:
            return PickedRows(unpack(self._format, store.first(end)), selected)
        numbers, places = selected.clamp(min=0).unique(return_inverse=True)
        return PickedRows(unpack(self._format, store.read(numbers)), places.masked_fill(selected < 0, -1))


@dataclass(frozen=True, slots=True)
class _Index:
    """queries: [tokens, heads, dim];  keys: packed rows;  weights: [tokens, heads], scales included."""

    queries: torch.Tensor
    keys: torch.Tensor
    weights: torch.Tensor


class _Selector:
    """V3.2's indexer: which rows a query attends to."""

    def __init__(
        self,
        config: Indexer,
        weights: IndexerWeights,
        rope_dim: int,
        row_format: RowFormat,
        layer: int,
    ) -> None:
        self._config, self._w, self._rope_dim = config, weights, rope_dim
        self._format, self._layer = row_format, layer
        self._scale = config.dim**-0.5 * config.num_heads**-0.5

    def project(self, x: torch.Tensor, x_q: torch.Tensor, step: Step) -> _Index:
        config, w = self._config, self._w
        queries = w.q(x_q).unflatten(1, (config.num_heads, config.dim)).float()
        keys = functional.layer_norm(w.k(x).float(), (config.dim,), *w.k_norm, INDEX_NORM_EPS)
        # The first dimensions turn here, in half-split order whatever the file's is for attention.
        _rotate(queries[..., : self._rope_dim], step)
        _rotate(keys[:, None, : self._rope_dim], step)
        return _Index(queries, pack(self._format, keys), steady_linear(x.float(), w.head_weights) * self._scale)

    def select(self, index: _Index, span: _Span, visible: torch.Tensor) -> torch.Tensor | None:
        """[span's tokens, top_k] int64, -1 where there are fewer; None if all rows are selected."""
        store = span.rows.history("index_key", self._layer)
        store.write(span.start, index.keys[span.at])
        if span.end <= self._config.top_k:
            return None
        keys = unpack(self._format, store.first(span.end))
        scores = index_scores(index.queries[span.at], keys, index.weights[span.at])
        return exact_topk(scores, self._config.top_k, visible)


class _Mlp:
    def __init__(self, weights: MlpWeights) -> None:
        self._w = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._w.down(silu_mul(self._w.gate_up(x)))


class _MixtureOfExperts:
    def __init__(self, config: Experts, weights: ExpertsWeights) -> None:
        self._config, self._w = config, weights
        self._shared = None if weights.shared is None else _Mlp(weights.shared)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config, w = self._config, self._w
        chosen, weights = top_k_routing(
            steady_sigmoid(steady_linear(x.float(), w.router)),
            config.per_token,
            config.scale,
            w.bias,
            groups=config.num_groups,
            top_groups=config.top_groups,
            normalise=config.normalize,
        )
        y = grouped_swiglu(x, w.gate_up, w.down, chosen, weights)
        return y if self._shared is None else y + self._shared(x)


def _rotate(x: torch.Tensor, step: Step) -> None:
    """x: [tokens or more, heads, rope_dim] float32, in place."""
    apply_rotary(x, step.cos, step.sin)
