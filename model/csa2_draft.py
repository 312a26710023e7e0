"""DSpark: DeepSeek V4.1's draft stages, which propose a block of tokens in one pass.

What the model computed for its context is read from it: the streams that enter the `targets` layers, each averaged, are
projected to one row a token, and each stage keeps keys of the last `window` of these rows, in bfloat16. To propose,
the stages run over the anchor (the last token, which the model has not seen yet) and noise tokens behind it; each of
them sees the context's rows and all of the block, in both directions. Their outputs give logits of all places at once;
what was proposed for a place then adds its share to the next one's (a Markov head of low rank), and a confidence says
how likely the model is to agree.

Proposals cost nothing but time if they are wrong: `verify` takes as many as equal what the model itself chooses, which
is a function of seed and position, and commits the state of those only. Sources: DeepSpec's report on DSpark and its
published code for V4; that V4.1 takes the layers' *incoming* streams, lags its mHC in the stages too and has no head of
its own for collapsing them is what ports of V4.1 say and has no oracle here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tailrace.kernels.hyper_connections import collapse, spread
from tailrace.kernels.packed_rows import StateRows
from tailrace.kernels.rotary import rotary_pairs
from tailrace.kernels.row_formats import plain
from tailrace.kernels.sparse_attention import PickedRows, sparse_attention
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
        if config.draft is None or weights.draft is None:
            raise ConfigError("the checkpoint has no draft stages, or they were not loaded")
        self.draft: DraftConfig = config.draft
        self._config, self._weights, self._all = config, weights.draft, weights
        self._rows = plain(config.head_dim, torch.bfloat16)
        self._frequencies = frequencies(config.window_rope, config.rope_dims)

    def remember(
        self, incoming: Mapping[int, torch.Tensor], positions: torch.Tensor, sequences: Sequence[SequencePart]
    ) -> None:
        """Leave each stage's rows of the new tokens.  incoming: by layer, [tokens, hidden] float32."""
        features = torch.cat([incoming[layer] for layer in self.draft.targets], 1).to(self._all.dtype)
        context = self._weights.context_norm(steady_linear(features, self._weights.context))
        turn = rotary_pairs(positions, self._frequencies)
        for stage, w in enumerate(self._weights.stages):
            packed = self._rows.pack(window_keys(context, w, turn))
            for sequence in sequences:
                if sequence.upper.are_kept:
                    _leave(sequence, sequence.rows.state("draft", stage), packed[sequence.at])

    def propose(self, anchors: Sequence[int], lengths: Sequence[int], rows: Sequence[SequenceRows]) -> Proposal:
        """The greedy block behind each sequence.

        Args:
            anchors: its last token.
            lengths: tokens in front of the anchor, which the model has processed.
        """
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
            streams = spread(streams, self._attention(x, stage, w, turn, lengths, rows), mixed)
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
    ) -> torch.Tensor:
        config, block, window = self._config, self.draft.block, self._config.window
        _, q = queries(x, w, turn, config)
        own = window_keys(x, w, turn)
        out = torch.empty_like(q)
        for i, (length, state) in enumerate(zip(lengths, rows, strict=True)):
            at = slice(i * block, (i + 1) * block)
            there = torch.arange(max(0, length - window), length) % window
            old = self._rows.unpack(state.state("draft", stage).read(there))
            count = len(old) + block
            seen = functional.pad(torch.arange(count), (0, window + block - count), value=-1)
            picked = PickedRows(torch.cat((old, own[at])), seen.expand(block, -1))
            out[at] = sparse_attention(q[at], [picked], config.head_dim**-0.5, w.sink)
        return attended(out, w, turn, config)

    def _one_by_one(self, anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        """hidden: [sequences, block, hidden_size] float32."""
        w, before, ids, confidence = self._weights, anchors, [], []
        logits = steady_linear(hidden.flatten(0, 1), self._all.head).unflatten(0, hidden.shape[:2])
        for place in range(hidden.shape[1]):
            known = w.markov_in[before]
            agreed = steady_linear(torch.cat((hidden[:, place], known), 1), w.confidence) + w.confidence_bias
            confidence.append(steady_sigmoid(agreed)[:, 0])
            before = (logits[:, place] + steady_linear(known, w.markov_out)).argmax(-1)
            ids.append(before)
        return Proposal(torch.stack(ids, 1), torch.stack(confidence, 1))


def _leave(sequence: SequencePart, state: StateRows, rows: torch.Tensor) -> None:
    sequence.leave(lambda count: write_ring(state, sequence.start, rows[:count]))


# ------------------------------------------------------------------------------------------------------- verification


def verification_lengths(confidence: Sequence[Sequence[float]], speed: Callable[[int], float]) -> list[int]:
    """How many proposed tokens of each sequence are worth verifying in one step.

    A token comes out only if all before it hold, so its share is the product of confidences up to it. Shares are taken
    in falling order while expected tokens a second, (sequences + shares) * speed(tokens in the step), can grow: the
    best of all such prefixes is returned.

    Args:
        confidence: of each sequence's proposed tokens, in order.
        speed: steps a second with so many tokens in a step.
    """
    shares: list[tuple[float, int, int]] = []
    for i, row in enumerate(confidence):
        share = 1.0
        for place, one in enumerate(row):
            share *= one
            shares.append((-share, place, i))
    shares.sort()
    expected, batch = float(len(confidence)), len(confidence)
    best, taken = expected * speed(batch), 0
    for count, (share, _, _) in enumerate(shares, 1):
        expected -= share
        if expected * speed(batch + count) > best:
            best, taken = expected * speed(batch + count), count
    lengths = [0] * len(confidence)
    for _, _, i in shares[:taken]:
        lengths[i] += 1
    return lengths


def num_accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many proposed tokens equal what the model chose at their places; it chose at one place more."""
    for count, (mine, its) in enumerate(zip(proposed, chosen, strict=False)):
        if mine != its:
            return count
    return len(proposed)
