"""The lower half of DeepSeek V4.1: all that a context worker needs which leaves the upper layers to gen (replay.py).

It is read from the same checkpoint, lays out the same pages and makes all rows that grow, open tails, ids and the lower
layers' windows, with the same bits as the whole model. The upper layers, the output projection and draft stages are not
in memory. So it can neither draw a token nor say how likely one was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import csa2_decoder
from tailrace.model.csa2_config import Csa2Config
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.engram import RowsAhead
from tailrace.model.family import Progress
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorTable


class Csa2LowerHalf:
    """See family.LowerHalfDecoder.

    Args:
        decoder: of weights that were loaded as a lower half.
    """

    def __init__(self, decoder: Csa2Decoder) -> None:
        self._decoder = decoder
        self.config, self.dtype, self.layout = decoder.config, decoder.dtype, decoder.layout
        self.boundary = decoder.config.boundary

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """As Csa2Decoder.forward of rows that end before their `upper_from`; what is returned means nothing.

        Raises:
            ValueError: a row needs the upper layers.
        """
        for row in rows:
            end = row.start + row.num_new
            if num_layers is None and row.upper_from < end:
                raise ValueError(f"tokens {row.upper_from} to {end} need the upper layers, which are not loaded")
        count = self.boundary if num_layers is None else min(num_layers, self.boundary)
        return self._decoder.forward(ids, positions, pool, rows, count)

    def rows_ahead(self) -> RowsAhead | None:
        """See family.ReadingAhead."""
        return self._decoder.rows_ahead()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises ValueError."""
        return self._decoder.logits(hidden)


def load(
    tensors: TensorTable,
    config: Csa2Config,
    dtype: torch.dtype,
    tokens_per_page: int,
    progress: Progress | None = None,
) -> Csa2LowerHalf:
    """As csa2_decoder.load, of what the lower half needs."""
    return Csa2LowerHalf(csa2_decoder.load(tensors, config, dtype, tokens_per_page, progress, lower=True))
