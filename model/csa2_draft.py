"""DSpark: DeepSeek V4.1's draft stages, which propose a block of tokens in one pass.

What the model computed for its context is read from it: the streams that enter the `targets` layers, each averaged, are
projected to one row a token, and each stage keeps keys of the last `window` of these rows, in bfloat16. To propose,
the stages run over the anchor (the last token, which the model has not seen yet) and noise tokens behind it; each of
them sees the context's rows and all of the block, in both directions. Their outputs give logits of all places at once;
what was proposed for a place then adds its share to the next one's (a Markov head of low rank), and a confidence says
how likely the model is to agree.

Proposals cost nothing but time if they are wrong: who verifies takes as many as equal what the model itself chooses,
which is a function of seed and position, and keeps the state of those only (csa2_drafting.py; Csa2Decoder.verify).
Sources: DeepSpec's report on DSpark and its published code for V4; that V4.1 takes the layers' *incoming* streams,
lags its mHC in the stages too and has no head of its own for collapsing them is what ports of V4.1 say and has no
oracle here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tailrace.kernels.by_device import collapse, pack, sparse_attention, spread, unpack
from tailrace.kernels.packed_rows import StateRows
from tailrace.kernels.rotary import rotary_pairs
from tailrace.kernels.row_formats import plain
from tailrace.kernels.sparse_attention import PickedRows
from tailrace.kernels.steady import steady_linear, steady_sigmoid
from tailrace.model.csa2_blocks import attended, experts, mix, queries, window_keys
from tailrace.model.csa2_config import Csa2Config, DraftConfig
from tailrace.model.csa2_step import SequencePart, write_ring
from tailrace.model.csa2_weights import Csa2LayerWeights, Csa2Weights
from tailrace.model.errors import ConfigError
from tailrace.model.rope import frequencies
from tailrace.model.row_store import SequenceRows


@dataclass(frozen=True, slots=True)
class Proposal:
    """ids: [sequences, block] int64;  confidence: [sequences, block] float32, of each given that those before hold."""

    ids: torch.Tensor
    confidence: torch.Tensor


class Csa2Draft:
    """The stages of one model."""

    def __init__(self, config: Csa2Config, weights: Csa2Weights) -> None:
        if config.draft is None or weights.draft is None or weights.head is None:
            raise ConfigError("the checkpoint has no draft stages, or they were not loaded")
        self.draft: DraftConfig = config.draft
        self._config, self._weights, self._all, self._head = config, weights.draft, weights, weights.head
        self._rows = plain(config.head_dim, torch.bfloat16)
        self._frequencies = frequencies(config.window_rope, config.rope_dims)

    def remember(
        self, incoming: Mapping[int, torch.Tensor], positions: torch.Tensor, sequences: Sequence[SequencePart]
    ) -> None:
        """Leave each stage's rows of the new tokens.  incoming: by layer, [tokens, hidden] float32."""
        packed_rows = self._packed_rows(self.features(incoming, len(positions)), positions)
        for stage, packed in enumerate(packed_rows):
            for sequence in sequences:
                if sequence.upper.are_kept:
                    _leave(sequence, sequence.rows.state("draft", stage), packed[sequence.at])

    def _packed_rows(self, features: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """By stage, [tokens, row_bytes]."""
        context = self._weights.context_norm(steady_linear(features, self._weights.context))
        turn = rotary_pairs(positions, self._frequencies)
        return [pack(self._rows, window_keys(context, w, turn)) for w in self._weights.stages]

    def _context_rows(self, features: torch.Tensor, length: int) -> list[torch.Tensor]:
        """By stage, rows as they would be read: of the last len(features) of `length` tokens."""
        positions = torch.arange(length - len(features), length)
        return [unpack(self._rows, packed) for packed in self._packed_rows(features, positions)]

    def features(self, incoming: Mapping[int, torch.Tensor], num_tokens: int) -> torch.Tensor:
        """What the stages read of each token: [tokens, targets x hidden]. Zeros of layers that did not run."""
        nothing = torch.zeros(num_tokens, self._config.hidden_size)
        return torch.cat([incoming.get(layer, nothing) for layer in self.draft.targets], 1).to(self._all.dtype)

    def propose(
        self,
        anchors: Sequence[int],
        lengths: Sequence[int],
        rows: Sequence[SequenceRows],
        ahead: Sequence[torch.Tensor] | None = None,
    ) -> Proposal:
        """The greedy block behind each sequence.

        Args:
            anchors: its last token.
            lengths: tokens in front of the anchor, which the model has processed.
            ahead: [n, targets x hidden] features of the last n of them whose rows are not kept; none if None.
        """
        unkept = [self._context_rows(features, length) for features, length in zip(ahead or (), lengths, strict=False)]
        config, block = self._config, self.draft.block
        ids = torch.full((len(anchors), block), self.draft.noise_id)
        ids[:, 0] = torch.tensor(anchors)
        positions = (torch.tensor(lengths)[:, None] + torch.arange(block)).flatten()
        turn = rotary_pairs(positions, self._frequencies)
        streams = self._all.embed[ids.flatten()][:, None].expand(-1, config.streams, -1)
        pre = functional.one_hot(torch.zeros(ids.numel(), dtype=torch.long), config.streams).float()
        for stage, w in enumerate(self._weights.stages):
            mixed = mix(streams, w.attn_mixing, config)
            x = w.attn_norm(collapse(streams, pre).to(self._all.dtype))
            more = [by_stage[stage] for by_stage in unkept] or [None] * len(rows)
            streams = spread(streams, self._attention(x, stage, w, turn, lengths, rows, more), mixed)
            pre, mixed = mixed.pre, mix(streams, w.ffn_mixing, config)
            x = w.ffn_norm(collapse(streams, pre).to(self._all.dtype))
            streams = spread(streams, experts(x, w.moe, self.draft.experts_per_token, config), mixed)
            pre = mixed.pre
        hidden = self._weights.norm(collapse(streams, pre).to(self._all.dtype)).float()
        return self._one_by_one(ids[:, 0], hidden.unflatten(0, (-1, block)))

    def _attention(
        self,
        x: torch.Tensor,
        stage: int,
        w: Csa2LayerWeights,
        turn: torch.Tensor,
        lengths: Sequence[int],
        rows: Sequence[SequenceRows],
        unkept: Sequence[torch.Tensor | None],
    ) -> torch.Tensor:
        """unkept: for each sequence the rows of its last tokens that are not in its pages."""
        config, block, window = self._config, self.draft.block, self._config.window
        _, q = queries(x, w, turn, config)
        own = window_keys(x, w, turn)
        out = torch.empty_like(q)
        for i, (length, state, more) in enumerate(zip(lengths, rows, unkept, strict=True)):
            at = slice(i * block, (i + 1) * block)
            kept = length - (0 if more is None else len(more))
            there = torch.arange(max(0, length - window), kept) % window
            old = unpack(self._rows, state.state("draft", stage).read(there))
            if more is not None:
                old = torch.cat((old, more))
            count = len(old) + block
            seen = functional.pad(torch.arange(count), (0, window + block - count), value=-1)
            picked = PickedRows(torch.cat((old, own[at])), seen.expand(block, -1))
            out[at] = sparse_attention(q[at], [picked], config.head_dim**-0.5, w.sink)
        return attended(out, w, turn, config)

    def _one_by_one(self, anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        """hidden: [sequences, block, hidden_size] float32."""
        w, before, ids, confidence = self._weights, anchors, [], []
        logits = steady_linear(hidden.flatten(0, 1), self._head).unflatten(0, hidden.shape[:2])
        for place in range(hidden.shape[1]):
            known = w.markov_in[before]
            agreed = steady_linear(torch.cat((hidden[:, place], known), 1), w.confidence) + w.confidence_bias
            confidence.append(steady_sigmoid(agreed)[:, 0])
            before = (logits[:, place] + steady_linear(known, w.markov_out)).argmax(-1)
            ids.append(before)
        return Proposal(torch.stack(ids, 1), torch.stack(confidence, 1))


def _leave(sequence: SequencePart, state: StateRows, rows: torch.Tensor) -> None:
    sequence.leave(lambda count: write_ring(state, sequence.start, rows[:count]))
