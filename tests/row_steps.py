"""Steps of a family with rows of its own over a small pool: shuffled page numbers, every page poisoned at first.

world = RowWorld(decoder, num_pages=40)
a, b = world.sequence(100), world.sequence(60)
logits = world.step((a, ids), (b, other_ids))          # all rows of both, one behind the other
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.family import RowDecoder
from tailrace.model.row_store import RowPool


@dataclass
class RowSequence:
    """One sequence: its page table and how many tokens it has."""

    table: np.ndarray
    length: int = 0


class RowWorld:
    """A decoder and a pool that sequences take their pages from.

    Args:
        num_pages: page 0, the scratch page, among them.
        poison: the byte that pages are filled with at first.
    """

    def __init__(self, decoder: RowDecoder, num_pages: int, *, poison: int = 0xFF, seed: int = 1) -> None:
        self.decoder = decoder
        size = decoder.layout.bytes_per_page
        self.pool = RowPool(torch.full((num_pages, size), poison, dtype=torch.uint8), decoder.layout)
        self._free = list(np.random.default_rng(seed).permutation(np.arange(1, num_pages)))

    def sequence(self, max_tokens: int) -> RowSequence:
        """A fresh one with room for so many tokens."""
        layout = self.decoder.layout
        count = -(-max_tokens // layout.tokens_per_page) + layout.num_state_pages
        return RowSequence(np.array([self._free.pop() for _ in range(count)], np.int64))

    def step(self, *rows: tuple[RowSequence, list[int]], padding: int = 0) -> torch.Tensor:
        """New tokens of each sequence -> logits of all of them [tokens, vocab]; what is padded is cut off."""
        ids = torch.tensor([i for _, new in rows for i in new] + [0] * padding)
        positions = torch.cat(
            [torch.arange(s.length, s.length + len(new)) for s, new in rows] + [torch.zeros(padding, dtype=torch.int64)]
        )
        spans = [RowSpan(s.length, len(new), s.table) for s, new in rows]
        with torch.inference_mode():
            hidden = self.decoder.forward(ids, positions, self.pool, spans)
            logits = self.decoder.logits(hidden[: len(hidden) - padding])
        for sequence, new in rows:
            sequence.length += len(new)
        return logits

    def in_chunks(self, sequence: RowSequence, ids: list[int], *cuts: int) -> torch.Tensor:
        """Feed ids in chunks that end at `cuts` and at the end -> logits of all of them."""
        bounds = [0, *cuts, len(ids)]
        return torch.cat([self.step((sequence, ids[a:b])) for a, b in zip(bounds, bounds[1:], strict=False)])
