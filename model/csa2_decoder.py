"""DeepSeek V4.1's forward over rows in pages: windows, owners' compressed rows, shared selections, lagged mHC, Engram.

Per layer and token, x being the collapsed and normed residual:

    window row   K = V = rope(norm(W x)), 8 bits
    owner        every `ratio` tokens a latent: norm(softmax-pooled W x); its rope is the main row, 4 bits; the rope of
                 norm(W latent) is the index key, 4 bits
    selection    the top-k visible rows by sum_h w_h relu(q_h . key); handed to the layers behind within the step
    attention    softmax over window and selected rows with a sink a head; the output's rope is turned back

Rows are attended to as they are stored, rounded, the step's own too: a token's result is the same wherever its prompt
was cut, in float32 to the bit (steady.py). The residual is `streams` wide; each block is read with the weights
that the block before computed (single-pass mHC). Source: DeepSeek V4.1's model card and inference code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import torch
from torch.nn import functional

from tailrace.kernels import by_device
from tailrace.kernels.by_device import (
    best_blocks,
    collapse,
    exact_topk,
    index_scores,
    pack,
    rounded,
    sparse_attention,
    spread,
    unpack,
    within_blocks,
)
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kernels.rotary import apply_rotary_pairs, rotary_pairs
from tailrace.kernels.row_formats import fp4_groups, fp8_tiles
from tailrace.kernels.sparse_attention import PickedRows
from tailrace.kernels.steady import steady_linear
from tailrace.model.csa2_blocks import attended, experts, mix, queries, window_keys
from tailrace.model.csa2_config import (
    KEY_GROUP,
    MAIN_GROUP,
    WINDOW_TILE,
    Csa2Config,
    key_field,
    main_field,
    pending_field,
)
from tailrace.model.csa2_draft import Csa2Draft
from tailrace.model.csa2_layers import Role
from tailrace.model.csa2_step import SequencePart, Windows, plan_windows, write_ring
from tailrace.model.csa2_weights import Csa2Weights, load_weights
from tailrace.model.draft_rows import num_accepted
from tailrace.model.engram import NOTHING, EngramHash, EngramWeights, RowsAhead, read_token_map, write_memory
from tailrace.model.errors import ConfigError
from tailrace.model.family import Progress
from tailrace.model.rope import frequencies
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool, SequenceRows
from tailrace.model.tensors import TensorTable


class Csa2Decoder:
    """One model, whole.

    Args:
        tokens_per_page: of a history page; a multiple of every ratio.
        add_up: sums a tensor over the ranks that share Engram's tables, called alike on each; None: there is one.

    Raises:
        ConfigError: tokens_per_page does not fit.
    """

    def __init__(
        self,
        weights: Csa2Weights,
        tokens_per_page: int,
        add_up: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        config = weights.config
        self.config: Csa2Config = config
        self.dtype, self._weights = weights.dtype, weights
        self.layout = RowPages(config.row_groups(), tokens_per_page)
        self._window_rows = fp8_tiles(config.head_dim, WINDOW_TILE, "ue8m0")
        self._main_rows = fp4_groups(config.head_dim, MAIN_GROUP, "e4m3")
        self._key_rows = fp4_groups(config.index_dim, KEY_GROUP, "ue8m0")
        self._window_frequencies = frequencies(config.window_rope, config.rope_dims)
        self._history_frequencies = frequencies(config.history_rope, config.rope_dims)
        self.engram: EngramHash | None = None
        if config.engram is not None:
            if weights.token_map is None:
                raise ConfigError("the config has Engram layers, but there is no token map")
            self.engram = EngramHash(config.engram, weights.token_map)
        self._add_up = add_up
        self.draft = None if weights.draft is None else Csa2Draft(config, weights)

    # ------------------------------------------------------------------------------------------------------- a step

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
        *,
        with_features: bool = False,
    ) -> torch.Tensor:
        """As RowDecoder says. With num_layers = config.boundary the boundary's rows are made as well: all that grows
        with the prompt is then there, and the windows of the layers below; the others can be had by replay. So it is
        for rows that end before their `upper_from`, too, and what is returned for them means nothing.

        Args:
            with_features: behind each token's result stand its draft features (Csa2Draft.features).
        """
        below = [row.start + row.num_new <= row.upper_from for row in rows]
        if num_layers is not None or not any(below):
            return self.run(ids, positions, self.sequences(pool, rows), num_layers, with_features=with_features)
        ends = list(accumulate(row.num_new for row in rows))
        places = [torch.arange(end - row.num_new, end) for row, end in zip(rows, ends, strict=True)]
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for stops, layers in ((True, self.config.boundary), (False, None)):
            chosen = [i for i, is_below in enumerate(below) if is_below is stops]
            if chosen:
                at = torch.cat([places[i] for i in chosen])
                sequences = self.sequences(pool, [rows[i] for i in chosen])
                parts.append((at, self.run(ids[at], positions[at], sequences, layers, with_features=with_features)))
        hidden = parts[0][1].new_zeros(len(ids), parts[0][1].shape[1])
        for at, of_part in parts:
            hidden[at] = of_part
        return hidden

    def sequences(self, pool: RowPool, rows: Sequence[RowSpan], *, deferred: bool = False) -> list[SequencePart]:
        """The parts of an ordinary step, or of the upper layers' first ones (RowSpan.upper_from).

        Args:
            deferred: rows of earlier tokens are overwritten by `commit` of each part, not before.

        Raises:
            ValueError: a row's upper layers would begin in the middle of it.
        """
        window, made, first = self.config.window, [], 0
        for row in rows:
            if row.start < row.upper_from < row.start + row.num_new:
                raise ValueError(f"upper layers begin at {row.upper_from}, within the {row.num_new} at {row.start}")
            low = max(0, row.start - window + 1)
            lower = plan_windows(row.start, row.num_new, window, range(low, row.start))
            there = range(max(low, min(row.start, row.upper_from)), row.start)
            upper = lower if there == lower.stored else plan_windows(row.start, row.num_new, window, there)
            state = pool.of(row.pages)
            at = slice(first, first + row.num_new)
            before = self._classes_before(state, row.start)
            waiting = [] if deferred else None
            drafts = row.num_drafts
            made.append(SequencePart(at, row.start, state, lower, upper, before, deferred=waiting, num_drafts=drafts))
            first = at.stop
        return made

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        sequences: Sequence[SequencePart],
        num_layers: int | None = None,
        num_upper: int | None = None,
        *,
        with_features: bool = False,
    ) -> torch.Tensor:
        """The layers over prepared sequences -> [tokens, hidden_size] after the final norm.

        Args:
            num_upper: of the one sequence, only the last so many tokens go through the boundary and the layers behind.
            with_features: as `forward` has it.
        """
        config = self.config
        count = config.num_layers if num_layers is None else num_layers
        memory = self._recall(ids, sequences)
        for sequence in sequences:
            if sequence.writes:
                self.keep_classes(ids, sequence)
        streams = self._weights.embed[ids][:, None].expand(-1, config.streams, -1).contiguous()
        pre = functional.one_hot(torch.zeros(len(ids), dtype=torch.long), config.streams).float()
        turns = self._turns(positions)
        incoming: dict[int, torch.Tensor] = {}
        for layer in range(count):
            if layer == config.boundary and num_upper is not None and num_upper < len(ids):
                streams, pre, positions = streams[-num_upper:], pre[-num_upper:], positions[-num_upper:]
                sequences = [sequence.last(num_upper) for sequence in sequences]
                turns = self._turns(positions)
            w = self._weights.layers[layer]
            if self.draft is not None and layer in self.draft.draft.targets:
                incoming[layer] = streams.float().mean(1)
            if w.engram is not None:
                streams = write_memory(streams, *memory[layer], config.norm_eps)
            mixed = mix(streams, w.attn_mixing, config)
            x = w.attn_norm(collapse(streams, pre).to(self.dtype))
            streams = spread(streams, self._attention(x, layer, positions, turns, sequences), mixed)
            pre, mixed = mixed.pre, mix(streams, w.ffn_mixing, config)
            x = w.ffn_norm(collapse(streams, pre).to(self.dtype))
            streams = spread(streams, experts(x, w.moe, config.experts_per_token, config), mixed)
            pre = mixed.pre
        if self.draft is not None and len(incoming) == len(self.draft.draft.targets):
            self.draft.remember(incoming, positions, sequences)
        if count == config.boundary:
            boundary = self._weights.boundary
            if boundary.engram is not None:
                streams = write_memory(streams, *memory[count], config.norm_eps)
            x = boundary.attn_norm(collapse(streams, pre).to(self.dtype))
            self._make_rows(x, count, sequences)
        hidden = self._weights.norm(collapse(streams, pre).to(self.dtype))
        if not with_features or self.draft is None:
            return hidden
        return torch.cat((hidden, self.draft.features(incoming, len(hidden))), 1)

    def verify(
        self,
        proposed: Sequence[Sequence[int]],
        pool: RowPool,
        rows: Sequence[RowSpan],
        choose: Callable[[torch.Tensor, int], Sequence[int]] | None = None,
    ) -> list[list[int]]:
        """One step over each sequence's last token and the tokens proposed behind it; only what holds is kept.

        Args:
            proposed: of each sequence, the last token first.
            rows: start: tokens in front of that; num_new: as many as proposed.
            choose: (logits [n, vocabulary], position of the first chosen token) -> n tokens; greedy if None.

        Returns:
            For each sequence the proposed tokens that the model chose too, and the one that it chose behind them.
        """
        ids = torch.tensor([i for some in proposed for i in some])
        positions = torch.cat([torch.arange(row.start, row.start + row.num_new) for row in rows])
        sequences = self.sequences(pool, rows, deferred=True)
        logits = self.logits(self.run(ids, positions, sequences))
        out = []
        for some, sequence in zip(proposed, sequences, strict=True):
            mine = logits[sequence.at]
            chosen = mine.argmax(-1).tolist() if choose is None else list(choose(mine, sequence.start + 1))
            count = num_accepted(some[1:], chosen)
            sequence.commit(count + 1)
            out.append(chosen[: count + 1])
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32. ValueError in a lower half (csa2_lower.py)."""
        if self._weights.head is None:
            raise ValueError("a lower half has no output projection")
        return steady_linear(hidden.float(), self._weights.head)

    def _turns(self, positions: torch.Tensor) -> Mapping[bool, torch.Tensor]:
        """By whether a layer reads rows that grow."""
        return {
            False: rotary_pairs(positions, self._window_frequencies),
            True: rotary_pairs(positions, self._history_frequencies),
        }

    # ---------------------------------------------------------------------------------------------------- attention

    def _attention(
        self,
        x: torch.Tensor,
        layer: int,
        positions: torch.Tensor,
        turns: Mapping[bool, torch.Tensor],
        sequences: Sequence[SequencePart],
    ) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]; zero for padding."""
        config, plan, w = self.config, self.config.layers[layer], self._weights.layers[layer]
        turn = turns[plan.role is not Role.SWA]
        reduced, q = queries(x, w, turn, config)
        packed = pack(self._window_rows, window_keys(x, w, turn))
        if plan.role is Role.FULL:
            self._make_rows(x, layer, sequences)
        if plan.selects:
            self._select(x, reduced, layer, positions, turn, sequences)
        out = torch.zeros_like(q)
        for sequence in sequences:
            windows = sequence.lower if layer < config.boundary else sequence.upper
            parts = [self._window(packed[sequence.at], layer, sequence, windows)]
            if plan.role is not Role.SWA:
                assert sequence.selected is not None
                parts.append(sequence.selected)
            out[sequence.at] = sparse_attention(q[sequence.at], parts, config.head_dim**-0.5, w.sink)
        return attended(out, w, turn, config)

    def _window(self, own: torch.Tensor, layer: int, sequence: SequencePart, windows: Windows) -> PickedRows:
        """Old window rows and the step's own, which are then written.  own: [new, row_bytes]."""
        state, size = sequence.rows.state("window", layer), self.config.window
        old = state.read(torch.arange(windows.stored.start, windows.stored.stop) % size)
        if windows.are_kept:
            sequence.leave(lambda count: write_ring(state, sequence.start, own[:count]))
        return PickedRows(unpack(self._window_rows, torch.cat((old, own))), windows.index)

    def _make_rows(self, x: torch.Tensor, layer: int, sequences: Sequence[SequencePart]) -> None:
        """An owner's main rows and index keys of all blocks that the new tokens close."""
        w, ratio = self._weights.owner(layer), self.config.layers[layer].ratio
        sequences = [sequence for sequence in sequences if sequence.writes]
        if not sequences:
            return
        x = x.to(w.values.dtype)
        values = steady_linear(x, w.values)
        gates = None if w.gates is None else steady_linear(x, w.gates)
        for sequence in sequences:
            latent = values[sequence.at]
            if gates is not None:
                latent = self._pooled(latent, gates[sequence.at], layer, sequence)
            if not len(latent):
                continue
            latent = w.norm(latent.to(self.dtype))
            first = sequence.start // ratio
            turn = rotary_pairs(torch.arange(first, first + len(latent)) * ratio, self._history_frequencies)
            main = apply_rotary_pairs(latent, turn)
            sequence.rows.history(main_field(ratio), layer).write(first, pack(self._main_rows, main.float()))
            key = apply_rotary_pairs(w.key_norm(steady_linear(latent, w.keys)), turn)
            sequence.rows.history(key_field(ratio), layer).write(first, pack(self._key_rows, key.float()))

    def _pooled(self, values: torch.Tensor, gates: torch.Tensor, layer: int, sequence: SequencePart) -> torch.Tensor:
        """Latents of the closed blocks; what is left open goes to the tail.  values, gates: [new, head_dim] float32."""
        ratio = self.config.layers[layer].ratio
        tail = sequence.rows.state(pending_field(ratio), layer)
        both = torch.stack((values, gates), 1)
        num_open = sequence.start % ratio
        if num_open:
            old = tail.read(torch.arange(num_open)).view(torch.float32).unflatten(1, (2, -1))
            both = torch.cat((old, both))

        def write(count: int) -> None:
            end = num_open + count
            left = both[end - end % ratio : end].flatten(1).contiguous()
            tail.write(torch.arange(len(left)), left.view(torch.uint8))

        sequence.leave(write)
        blocks = both[: len(both) - len(both) % ratio].unflatten(0, (-1, ratio))
        return by_device.pool(blocks[:, :, 0], blocks[:, :, 1])

    def _select(
        self,
        x: torch.Tensor,
        reduced: torch.Tensor,
        layer: int,
        positions: torch.Tensor,
        turn: torch.Tensor,
        sequences: Sequence[SequencePart],
    ) -> None:
        """Choose each token's rows and unpack them for this layer and those that take over its choice."""
        config, plan, w = self.config, self.config.layers[layer], self._weights.layers[layer].selector
        assert w is not None
        q = steady_linear(reduced, w.queries).unflatten(1, (config.index_heads, config.index_dim))
        q = rounded(self._key_rows, apply_rotary_pairs(q, turn))
        scale = (config.index_heads * config.index_dim) ** -0.5
        head_weights = steady_linear(x, w.head_weights).float() * scale
        for sequence in sequences:
            visible = (positions[sequence.at] + 1) // plan.ratio
            keys = sequence.rows.history(key_field(plan.ratio), plan.owner).first(sequence.end // plan.ratio)
            scores = index_scores(q[sequence.at], unpack(self._key_rows, keys), head_weights[sequence.at])
            candidates = config.candidates
            if plan.restricted and sequence.blocks is not None and candidates is not None:
                scores = within_blocks(scores, sequence.blocks, candidates.block_rows)
            elif candidates is not None and candidates.layer == layer:
                sequence.blocks = best_blocks(scores, visible, candidates.blocks, candidates.block_rows)
            picked = exact_topk(scores, config.index_topk, visible)
            sequence.selected = self._unpacked(picked, plan.ratio, plan.owner, sequence)

    def _unpacked(self, picked: torch.Tensor, ratio: int, owner: int, sequence: SequencePart) -> PickedRows:
        """The rows that any token picked. As many columns always, so that the order of summation stays."""
        used, index = picked.unique(return_inverse=True)
        if used[0] < 0:  # stands for none, and so do places from -1 on
            used, index = used[1:], index - 1
        if not len(used):
            return PickedRows(torch.zeros(1, self.config.head_dim), picked)
        rows = sequence.rows.history(main_field(ratio), owner).read(used)
        return PickedRows(unpack(self._main_rows, rows), index)

    # ------------------------------------------------------------------------------------------------------- Engram

    def _classes_before(self, state: SequenceRows, start: int) -> torch.Tensor | None:
        """Classes of the lookback positions in front of `start`, from the pages."""
        if self.engram is None:
            return None
        lookback = self.engram.config.lookback
        there = torch.arange(max(0, start - lookback), start) % lookback
        stored = state.state("ids", 0).read(there).view(torch.int32)[:, 0].long()
        return functional.pad(stored, (lookback - len(stored), 0), value=NOTHING)

    def _recall(
        self, ids: torch.Tensor, sequences: Sequence[SequencePart]
    ) -> dict[int, tuple[torch.Tensor, EngramWeights, torch.Tensor]]:
        """What the Engram layers need, before the first of them comes: rows found, weights, which tokens are masked."""
        if self.engram is None:
            return {}
        config = self.engram.config
        classes = self.engram.classes(ids)
        is_masked = classes == NOTHING
        found = {}
        for layer, w in self._weights.engrams().items():
            read = torch.zeros(len(ids), config.row_width)
            for sequence in sequences:
                assert sequence.before is not None
                around = torch.cat((sequence.before, classes[sequence.at]))
                read[sequence.at] = w.table.read(self.engram.rows(layer, around))
            found[layer] = (read if self._add_up is None else self._add_up(read), w, is_masked)
        return found

    def rows_ahead(self) -> RowsAhead | None:
        """A reader of Engram's rows for prompts that wait; None without Engram. Its owner closes it."""
        if self.engram is None:
            return None
        return RowsAhead(self.engram, {i: w.table for i, w in self._weights.engrams().items()})

    def keep_classes(self, ids: torch.Tensor, sequence: SequencePart) -> None:
        """Write what the next tokens' n-grams look back at.  ids: of the whole step."""
        if self.engram is None:
            return
        classes = self.engram.classes(ids[sequence.at]).to(torch.int32)[:, None].view(torch.uint8)
        state = sequence.rows.state("ids", 0)
        sequence.leave(lambda count: write_ring(state, sequence.start, classes[:count]))


def load(
    tensors: TensorTable,
    config: Csa2Config,
    dtype: torch.dtype,
    tokens_per_page: int,
    progress: Progress | None = None,
    *,
    lower: bool = False,
) -> Csa2Decoder:
    """The decoder of an opened checkpoint; with Engram its token map lies beside the tensors.

    Args:
        lower: only what stands in front of the boundary, for csa2_lower.py.

    Raises:
        ConfigError: a tensor is missing or has another shape, the token map does not fit, or tokens_per_page does not.
    """
    RowPages(config.row_groups(), tokens_per_page)  # refused before a checkpoint is read, not behind it
    token_map = None
    if config.engram is not None:
        token_map = read_token_map(tensors.directory, config.engram)
    weights = load_weights(tensors, config, dtype, token_map, progress, lower=lower)
    tensors.drop_pages()
    return Csa2Decoder(weights, tokens_per_page)
