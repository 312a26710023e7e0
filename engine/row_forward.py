"""The forward pass of a family whose rows have formats of their own: lay out, run its decoder over the pool's bytes.

It does not know samplers, requests or formats. Such a decoder is whole on one rank. Dies with its rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tailrace.engine.step import Row
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.errors import ConfigError
from tailrace.model.family import LowerHalfDecoder, RowDecoder
from tailrace.model.row_store import RowPool


class RowForward:
    """Runs a decoder over its pages.

    Args:
        pages: [num_pages, bytes_per_page of decoder.layout] uint8; page 0 is scratch.
    """

    def __init__(self, decoder: RowDecoder, pages: torch.Tensor) -> None:
        try:
            self.pool = RowPool(pages, decoder.layout)
        except ValueError as error:
            raise ConfigError(f"the pool does not fit the model: {error}") from None
        self.decoder = decoder
        pages[SCRATCH_PAGE].zero_()

    def __call__(self, rows: Sequence[Row], num_layers: int | None = None) -> torch.Tensor:
        """Write the state of all rows' tokens -> [tokens or more, hidden_size], rows one behind the other."""
        spans = [RowSpan(row.start, len(row.ids), row.pages, row.num_drafts, row.upper_from) for row in rows]
        ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, s.start + s.num_new, dtype=np.int64) for s in spans])
        return self.decoder.forward(torch.from_numpy(ids), torch.from_numpy(positions), self.pool, spans, num_layers)

    def scratch_table(self, num_tokens: int) -> np.ndarray:
        """[num_pages] int32, the page table of a sequence of so many tokens that keeps nothing."""
        layout = self.decoder.layout
        history = -(-num_tokens // layout.tokens_per_page)
        return np.full(history + layout.num_state_pages, SCRATCH_PAGE, np.int32)

    def warm_up(self, max_num_tokens: int, max_batch_size: int) -> None:
        """The largest chunk and the largest batch, so that no request waits for what is made once."""
        self(
            [Row(None, np.zeros(max_num_tokens, np.int32), 0, self.scratch_table(max_num_tokens))],
            num_layers=1,
        )
        if isinstance(self.decoder, LowerHalfDecoder):
            self([Row(None, np.zeros(1, np.int32), 0, self.scratch_table(1), upper_from=1)])
            return
        token = Row(None, np.zeros(1, np.int32), 0, self.scratch_table(1))
        self.decoder.logits(self([token] * max_batch_size, num_layers=1))
        self([token])
