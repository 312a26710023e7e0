"""DeepSeek V4.1 with its draft stages (DSpark, csa2_draft.py), as a step with drafts needs them.

A token's result is its hidden state and, behind it, the features that the stages read of it. The features of the tokens
that a step keeps become rows of the sequence (its `draft` windows), so they go along with every hand-off and prefix
hit. Drafts that turn out to count are computed again by the next step; until then the stages read their features from
this step's results. Nothing of what is proposed is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.engram import RowsAhead
from tailrace.model.errors import ConfigError
from tailrace.model.family import Guessed
from tailrace.model.row_store import RowPool


class Csa2DraftingDecoder:
    """See family.DraftingRowDecoder.

    Attributes:
        max_drafts: tokens that `propose` can guess: a block of the stages.

    Raises:
        ConfigError: the decoder has no draft stages.
    """

    def __init__(self, decoder: Csa2Decoder) -> None:
        if decoder.draft is None:
            raise ConfigError("the checkpoint has no draft stages, or they were not loaded")
        self._decoder, self._draft = decoder, decoder.draft
        self.config, self.dtype, self.layout = decoder.config, decoder.dtype, decoder.layout
        self.max_drafts = decoder.draft.draft.block

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """-> [tokens, hidden_size + targets x hidden_size]."""
        return self._decoder.forward(ids, positions, pool, rows, num_layers, with_features=True)

    def rows_ahead(self) -> RowsAhead | None:
        """See family.ReadingAhead."""
        return self._decoder.rows_ahead()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden[:, : self.config.hidden_size])

    def propose(
        self, hidden: torch.Tensor, ids: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], counts: Sequence[int]
    ) -> list[Guessed]:
        """The rows of the first of `hidden`, a known token, are in the pages; those of the others are not."""
        ends = torch.tensor([row.num_new for row in rows]).cumsum(0).tolist()
        features = hidden[:, self.config.hidden_size :]
        made = self._draft.propose(
            [int(ids[end - 1]) for end in ends],
            [row.start + row.num_new - 1 for row in rows],
            [pool.of(row.pages) for row in rows],
            [features[end - row.num_new + 1 : end] for row, end in zip(rows, ends, strict=True)],
        )
        guessed = []
        for row, count, tokens, chances in zip(rows, counts, made.ids.tolist(), made.confidence.tolist(), strict=True):
            room = self.config.max_position - row.start - row.num_new
            fitting = max(0, min(count, len(tokens), room))
            guessed.append(Guessed(tokens[:fitting], chances[:fitting]))
        return guessed
