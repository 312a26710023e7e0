"""DeepSeek V4's forward pass over a mixed batch whose rows stand in packed pages.

It knows tensors and weights, not requests: rows come laid out by the engine. It holds no state between steps; what it
computes for a token depends neither on how its prompt was cut into chunks nor on the other rows of a step. Rows that go
to pages are attended to as they come back from there, so that rounding is the same for all. DeepSeek-V4 report,
section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tailrace.kernels.by_device import (
    collapse,
    collapse_weights,
    exact_topk,
    grouped_swiglu,
    hash_routing,
    index_scores,
    mixing,
    pack,
    rounded,
    sparse_attention,
    spread,
    top_k_routing,
    unpack,
)
from tailrace.kernels.experts import sqrt_softplus, swiglu
from tailrace.kernels.hadamard import hadamard
from tailrace.kernels.hyper_connections import CollapseWeights
from tailrace.kernels.packed_rows import HistoryRows
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kernels.rotary import apply_rotary_pairs, rotary_pairs
from tailrace.kernels.row_formats import RowFormat
from tailrace.kernels.sparse_attention import PickedRows, RowRange
from tailrace.kernels.steady import steady_groups, steady_linear
from tailrace.model.config import Rope
from tailrace.model.csa_config import CsaConfig
from tailrace.model.csa_rows import CsaRows, formats
from tailrace.model.csa_tensors import LayerKind
from tailrace.model.csa_weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertsWeights,
    IndexerWeights,
    LayerWeights,
    Weights,
    load_weights,
)
from tailrace.model.family import Progress
from tailrace.model.rope import frequencies
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorTable

_QUERY_BLOCK = (
    256  # queries of a chunk that attend at once: bounds the scores, and skips rows outside all their windows
)


def load(
    tensors: TensorTable,
    config: CsaConfig,
    dtype: torch.dtype,
    tokens_per_page: int,
    progress: Progress | None = None,
) -> CsaDecoder:
    """See family.py."""
    return CsaDecoder(config, load_weights(tensors, config, dtype, progress), dtype, tokens_per_page)


class _Rotary:
    """Turns at any positions, of one theta."""

    def __init__(self, rope: Rope, dim: int) -> None:
        self._frequencies, self._scale = frequencies(rope, dim), rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        return rotary_pairs(positions, self._frequencies, self._scale)


@dataclass(frozen=True, slots=True)
class _Span:
    """A sequence's new tokens, rows `at` of the step."""

    at: slice
    rows: CsaRows


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers share. turns, compressed_turns: of the step's rows, for window layers and for all others."""

    ids: torch.Tensor
    positions: torch.Tensor
    turns: torch.Tensor
    compressed_turns: torch.Tensor
    spans: tuple[_Span, ...]


class CsaDecoder:
    """See family.RowDecoder.

    Args:
        dtype: of weights and activations.
        tokens_per_page: a multiple of the model's compression rates.
        kv_dtype: of `CsaConfig.row_groups`; dtype's own if None.

    Raises:
        ConfigError: tokens_per_page does not fit.
    """

    def __init__(
        self,
        config: CsaConfig,
        weights: Weights,
        dtype: torch.dtype,
        tokens_per_page: int,
        kv_dtype: str | None = None,
    ) -> None:
        self.config, self.dtype, self._weights = config, dtype, weights
        if kv_dtype is None:
            kv_dtype = "float32" if dtype is torch.float32 else "bfloat16"
        self.layout = RowPages(config.row_groups(kv_dtype), tokens_per_page)
        self._formats = formats(config, kv_dtype)
        self._rotate_index = kv_dtype == "bfloat16"
        self._rotary = _Rotary(config.rope, config.rope_dim)
        self._compressed_rotary = _Rotary(config.compressed_rope, config.rope_dim)

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """See family.RowDecoder."""
        return self.finish(self.streams(ids, positions, pool, rows, num_layers))

    def streams(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """As `forward`, behind the last layer: [len(ids), n, hidden_size] float32, for `finish` and `draft`.

        With a draft block in use the last token of a row of several may be taken back: the sequence's next step then
        starts at that token's position. All that the step wrote for it is overwritten or never read; the page table
        must have room for it.
        """
        step = self._step(ids, positions, pool, rows)
        # The streams stay float32 whatever the dtype is: they are what all blocks' outputs are added up in.
        streams = self._weights.embed[ids].float()[:, None].expand(-1, self.config.streams, -1).contiguous()
        for number, layer in enumerate(self._weights.layers[:num_layers]):
            streams = self._layer(number, layer, streams, step)
        return streams

    def finish(self, streams: torch.Tensor) -> torch.Tensor:
        """What `forward` returns."""
        return self._weights.norm(self._collapsed(streams, self._weights.head))

    def draft(
        self,
        streams: torch.Tensor,
        next_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
    ) -> torch.Tensor:
        """The draft block over tokens whose followers are known: `logits` of the result guess what follows those.

        It has a window of its own, so a sequence's tokens are all to be passed, in order and each once; never one that
        may be taken back.

        Args:
            streams: [tokens or more, n, hidden_size] of these tokens, from `streams`.
            next_ids: [same] int64, the token behind each.
            positions, rows: of these tokens, as for `forward`.

        Returns:
            [len(next_ids), hidden_size].

        Raises:
            IndexError: no draft block is in use.
        """
        draft = self._weights.drafts[0]
        embedded = draft.embed_proj(draft.embed_norm(self._weights.embed[next_ids])).float()
        joined = embedded[:, None] + draft.streams_proj(draft.streams_norm(streams).flatten(0, 1)).view(streams.shape)
        step = self._step(next_ids, positions, pool, rows)
        return draft.norm(self._collapsed(self._layer(self.config.num_layers, draft.layer, joined, step), draft.head))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See family.RowDecoder."""
        return self._weights.lm_head(hidden).float()

    def _step(self, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan]) -> _Step:
        spans, at = [], 0
        for row in rows:
            end = row.start + row.num_new
            kept = CsaRows(pool.of(row.pages), self.config, row.start, end, row.num_drafts)
            spans.append(_Span(slice(at, at + row.num_new), kept))
            at += row.num_new
        turns, compressed = self._rotary(positions), self._compressed_rotary(positions)
        return _Step(ids, positions, turns, compressed, tuple(spans))

    def _collapsed(self, streams: torch.Tensor, weights: CollapseWeights) -> torch.Tensor:
        config = self.config
        return collapse(streams, collapse_weights(streams, weights, rms_eps=config.norm_eps, floor=config.hc_eps))

    def _layer(self, number: int, layer: LayerWeights, streams: torch.Tensor, step: _Step) -> torch.Tensor:
        """streams: [tokens, n, hidden] float32 before the layer -> behind it."""
        config = self.config
        settings = {
            "rms_eps": config.norm_eps,
            "floor": config.hc_eps,
            "iterations": config.sinkhorn_iterations,
        }
        mixed = mixing(streams, layer.attention_mixing, **settings)
        x = layer.attention_norm(collapse(streams, mixed.pre))
        streams = spread(streams, self._attention(number, layer.kind, layer.attention, x, step), mixed)
        mixed = mixing(streams, layer.experts_mixing, **settings)
        x = layer.experts_norm(collapse(streams, mixed.pre))
        return spread(streams, self._experts(layer.experts, x, step.ids), mixed)

    # ----------------------------------------------------------------------------------------------------- attention

    def _attention(
        self, number: int, kind: LayerKind, weights: AttentionWeights, x: torch.Tensor, step: _Step
    ) -> torch.Tensor:
        """x: [tokens, hidden] of the dtype -> the same."""
        config, row = self.config, self._formats.row
        turns = step.turns if kind is LayerKind.WINDOW else step.compressed_turns
        q_latent = weights.q_norm(weights.q_a_proj(x))
        q = weights.q_b_proj(q_latent).unflatten(1, (config.num_heads, config.head_dim)).float()
        q = apply_rotary_pairs(functional.rms_norm(q, q.shape[2:], None, config.norm_eps), turns)
        packed = pack(row, apply_rotary_pairs(weights.kv_norm(weights.kv_proj(x).float()), turns))
        if weights.compressor is not None:
            self._close(number, kind, weights.compressor, "hca" if kind is LayerKind.HCA else "csa", x, step)
        index = None
        if weights.indexer is not None:
            self._close(number, kind, weights.indexer.compressor, "csa_key", x, step)
            index = self._index_queries(weights.indexer, q_latent, x, turns)
        attended = q.new_zeros(q.shape)
        for span in step.spans:
            own = packed[span.at]
            window = unpack(row, torch.cat((span.rows.window(number), own)))
            for first in range(0, len(own), _QUERY_BLOCK):
                last = min(first + _QUERY_BLOCK, len(own))
                at = slice(span.at.start + first, span.at.start + last)
                parts: list[PickedRows | RowRange] = [self._window_part(window, len(own), first, last)]
                if kind is not LayerKind.WINDOW:
                    parts.append(self._entries_part(number, kind, span.rows, index, at, step.positions[at]))
                attended[at] = sparse_attention(q[at], parts, config.head_dim**-0.5, weights.sinks)
            span.rows.keep_window(number, own)
        attended = apply_rotary_pairs(attended, turns, inverse=True).to(self.dtype)
        grouped = steady_groups(attended.view(len(x), config.o_groups, -1), weights.o_a_proj)
        return weights.o_b_proj(grouped.flatten(1))

    def _window_part(self, window: torch.Tensor, num_own: int, first: int, last: int) -> RowRange:
        """window: [old + own, dim];  the rows that own tokens first .. last - 1 see as they are."""
        old = len(window) - num_own
        ends = torch.arange(old + first + 1, old + last + 1)
        begins = (ends - self.config.window).clamp_(min=0)
        least = int(begins[0])
        return RowRange(window[least : old + last], begins - least, ends - least)

    def _entries_part(
        self,
        number: int,
        kind: LayerKind,
        rows: CsaRows,
        index: tuple[torch.Tensor, torch.Tensor] | None,
        at: slice,
        positions: torch.Tensor,
    ) -> RowRange | PickedRows:
        """The entries that the queries `at` see: those of windows closed with or before the query's own token."""
        if index is None:
            visible = (positions + 1) // self.config.hca_rate
            entries = unpack(self._formats.row, rows.entries("hca", number).first(int(visible[-1])))
            return RowRange(entries, torch.zeros_like(visible), visible)
        visible = (positions + 1) // self.config.csa_rate
        keys = unpack(self._formats.key, rows.entries("csa_key", number).first(int(visible[-1])))
        q, weights = index
        picks = exact_topk(index_scores(q[at], keys, weights[at]), self.config.index_topk, visible)
        return _picked(rows.entries("csa", number), self._formats.row, picks)

    def _index_queries(
        self, weights: IndexerWeights, q_latent: torch.Tensor, x: torch.Tensor, turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Index queries [tokens, heads, dim], and their heads' weights [tokens, heads]; float32.

        Packed keys are rotated by a Hadamard matrix first, so queries are too, and rounded as keys are.
        """
        heads, dim = self.config.index_heads, self.config.index_dim
        q = apply_rotary_pairs(weights.q_proj(q_latent).unflatten(1, (heads, dim)).float(), turns)
        if self._rotate_index:
            q = rounded(self._formats.key, hadamard(q))
        return q, steady_linear(x.float(), weights.weights_proj) * (dim * heads) ** -0.5

    def _close(
        self, number: int, kind: LayerKind, weights: CompressorWeights, field: str, x: torch.Tensor, step: _Step
    ) -> None:
        """Write the entries of all windows that the step's tokens close, and what stays open."""
        values, gates = steady_linear(x.float(), weights.projection).chunk(2, 1)
        gates = gates + weights.position_bias[step.positions % len(weights.position_bias)]
        is_key = field == "csa_key"

        def finish(entries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            rows = apply_rotary_pairs(weights.norm(entries), self._compressed_rotary(positions))
            if is_key and self._rotate_index:
                rows = hadamard(rows)
            return pack(self._formats.key if is_key else self._formats.row, rows)

        for span in step.spans:
            close = span.rows.close_plain if kind is LayerKind.HCA else span.rows.close_overlapping
            close(field, number, values[span.at], gates[span.at], finish)

    # ------------------------------------------------------------------------------------------------------- experts

    def _experts(self, weights: ExpertsWeights, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] of the dtype -> [tokens, hidden] float32."""
        config = self.config
        scores = sqrt_softplus(steady_linear(x.float(), weights.gate))
        if weights.table is None:
            chosen, factors = top_k_routing(scores, config.experts_per_token, config.routed_scale, weights.bias)
        else:
            chosen, factors = hash_routing(scores, weights.table[ids], config.routed_scale)
        routed = grouped_swiglu(x, weights.gate_up, weights.down, chosen, factors, config.swiglu_limit)
        gate, up = weights.shared_gate_up(x).chunk(2, 1)
        return routed + weights.shared_down(swiglu(gate, up, config.swiglu_limit)).float()


def _picked(entries: HistoryRows, row: RowFormat, picks: torch.Tensor) -> PickedRows:
    """Only the entries that any query picked are unpacked.  picks: [queries, k] int64, -1 for none."""
    used = picks[picks >= 0].unique()
    places = torch.searchsorted(used, picks.contiguous()).masked_fill(picks < 0, -1)
    return PickedRows(unpack(row, entries.read(used)), places)
