"""Draft (multi-token prediction) blocks of DeepSeek V3 and V3.2, and greedy decoding that uses one without loss.

A draft block stands at position p: from the model's hidden state there and the token at p + 1 it guesses the token at
p + 2 (DeepSeek-V3 report, section 2.2). Its rows stand in the same history pages as the layers', so they go along with
every hand-off; row p is there once the token at p + 1 is known, that of the last prompt token with the first sampled
one. Guesses are verified by the model in one step: what comes out is what plain greedy decoding gives, and a wrong
guess costs the room of a row, which the next step overwrites.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.draft_rows import num_accepted
from tailrace.model.errors import ConfigError
from tailrace.model.family import Progress
from tailrace.model.mla_block import Block, Step
from tailrace.model.mla_config import MlaConfig
from tailrace.model.mla_decoder import MlaDecoder, row_formats
from tailrace.model.mla_weights import WeightReader
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorTable


class MlaDrafter:
    """The first draft block of a checkpoint. Embedding and output projection are the decoder's.

    Args:
        reader: of the decoder's checkpoint.
        decoder: whose config uses a draft layer, so that its pages have room for the block's rows.

    Raises:
        ConfigError: the decoder's config uses no draft layer.
    """

    def __init__(self, reader: WeightReader, decoder: MlaDecoder) -> None:
        config = decoder.config
        if config.num_draft_layers < 1:
            raise ConfigError(f"num_draft_layers is {config.num_draft_layers}: pages have no rows of a draft block")
        self._decoder = decoder
        prefix = f"model.layers.{config.num_layers}."
        self._token_norm = reader.norm(prefix + "enorm.weight")
        self._hidden_norm = reader.norm(prefix + "hnorm.weight")
        self._join = reader.linear(reader.tensor(prefix + "eh_proj.weight"))
        formats = row_formats(config, decoder.kv_dtype)
        self._block = Block(config, reader.block(prefix, config.experts is not None), formats, config.num_layers)
        self._norm = reader.norm(prefix + "shared_head.norm.weight")

    def forward(
        self,
        hidden: torch.Tensor,
        next_ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
    ) -> torch.Tensor:
        """Run the block and store its rows.

        Args:
            hidden: [tokens, hidden_size] at `positions`, from the decoder's forward, or from this one to guess further.
            next_ids: [tokens] int64, the token behind each.
            positions, pool, rows: as the decoder's forward has them.

        Returns:
            [tokens, hidden_size]; the decoder's logits of it are of the token after next.
        """
        step = Step(self._decoder.config, self._decoder.frequencies, positions, pool, rows)
        both = (self._token_norm(self._decoder.embed(next_ids)), self._hidden_norm(hidden))
        x = self._join(torch.cat(both, 1)).float()
        self._block(x, step)
        return self._norm(x)


def load(
    tensors: TensorTable, config: MlaConfig, dtype: torch.dtype, tokens_per_page: int, progress: Progress | None = None
) -> tuple[MlaDecoder, MlaDrafter]:
    """A decoder whose pages hold a draft block's rows too, and that block.

    Raises:
        ConfigError: as mla_decoder.load, or the checkpoint has no draft block.
    """
    config = dataclasses.replace(config, num_draft_layers=1)
    with torch.no_grad():
        reader = WeightReader(tensors, config, dtype, progress)
        decoder = MlaDecoder(reader, tokens_per_page)
        drafter = MlaDrafter(reader, decoder)
    tensors.drop_pages()
    return decoder, drafter


class DraftedGreedy:
    """Greedy decoding of one sequence with drafts.

    Args:
        table: pages of the whole sequence; what they have room for is never passed.
        num_drafts: guesses a step, at least 0; from the second on the block guesses from its own guess.

    Attributes:
        length: tokens whose rows are stored.
        pending: the token that is known but not stored; None before the prompt is.
        num_drafted, num_accepted: over all steps.
    """

    def __init__(
        self, decoder: MlaDecoder, drafter: MlaDrafter, pool: RowPool, table: np.ndarray, num_drafts: int
    ) -> None:
        self._decoder, self._drafter, self._pool, self._table = decoder, drafter, pool, table
        self._num_drafts = num_drafts
        self._room = min(len(table) * decoder.layout.tokens_per_page, decoder.config.max_position)
        self._drafts: list[int] = []
        self.length, self.num_drafted, self.num_accepted = 0, 0, 0
        self.pending: int | None = None

    def prefill(self, ids: Sequence[int], chunk: int) -> int:
        """Store a prompt, `chunk` tokens a step; returns the first token after it."""
        for start in range(0, len(ids), chunk):
            new = list(ids[start : start + chunk])
            hidden = self._forward(new)
            following = list(ids[start + 1 : start + 1 + len(new)])
            if start + len(new) == len(ids):
                self.pending = self._best(hidden[-1:])[0]
                following.append(self.pending)
            self.length += len(new)
            self._guess(hidden, following)
        if self.pending is None:
            raise ValueError("a prompt has at least one token")
        return self.pending

    def resume(self, length: int, pending: int) -> None:
        """Go on with pages that hold `length` tokens, this block's rows included, and the token after them."""
        self.length, self.pending, self._drafts = length, pending, []

    def step(self) -> list[int]:
        """Verify the drafts; the new tokens, one more than were accepted."""
        if self.pending is None:
            raise ValueError("step before prefill")
        drafts = self._drafts
        hidden = self._forward([self.pending, *drafts])
        targets = self._best(hidden)
        accepted = num_accepted(drafts, targets)
        new = targets[: accepted + 1]
        self.num_drafted += len(drafts)
        self.num_accepted += accepted
        self.length += accepted + 1
        self.pending = new[-1]
        self._guess(hidden[: accepted + 1], new)
        return new

    def _forward(self, ids: list[int]) -> torch.Tensor:
        positions, span = self._span(self.length, len(ids))
        return self._decoder.forward(torch.tensor(ids), positions, self._pool, [span])

    def _guess(self, hidden: torch.Tensor, following: list[int]) -> None:
        """Store the block's rows of the newest tokens and guess what follows the pending one.

        hidden: [n, hidden_size] of the newest n stored tokens;  following: the token behind each.
        """
        # A guess is fed behind the pending token, and each must have room.
        wanted = 0 if self.pending is None else min(self._num_drafts, self._room - self.length - 1)
        start = self.length - len(following)
        self._drafts = []
        while True:
            positions, span = self._span(start, len(following))
            hidden = self._drafter.forward(hidden, torch.tensor(following), positions, self._pool, [span])
            if len(self._drafts) < wanted:
                self._drafts += self._best(hidden[-1:])
            if len(self._drafts) >= wanted:
                return
            start, hidden, following = start + len(following), hidden[-1:], self._drafts[-1:]

    def _span(self, start: int, count: int) -> tuple[torch.Tensor, RowSpan]:
        return torch.arange(start, start + count), RowSpan(start, count, self._table)

    def _best(self, hidden: torch.Tensor) -> list[int]:
        return self._decoder.logits(hidden).argmax(-1).tolist()
