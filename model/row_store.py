"""A sequence's rows in the pool, by field and layer: what a family's decoder reads and writes.

It joins a layout (row_groups.py) and a pool of bytes (kernels/packed_rows.py). Nothing here knows a format or a family.
"""

from __future__ import annotations

import numpy as np
import torch

from tailrace.kernels.packed_rows import HistoryRows, StateRows
from tailrace.model.row_groups import RowPages


class RowPool:
    """All pages of one rank.

    Args:
        pages: [num_pages, layout.bytes_per_page] uint8; page 0 is scratch.
    """

    def __init__(self, pages: torch.Tensor, layout: RowPages) -> None:
        if pages.dtype is not torch.uint8 or pages.dim() != 2 or pages.shape[1] != layout.bytes_per_page:
            raise ValueError(f"pages are {tuple(pages.shape)} {pages.dtype}, not [n, {layout.bytes_per_page}] uint8")
        if not pages.is_contiguous():
            raise ValueError("pages must be contiguous")
        self.pages, self.layout = pages, layout

    def of(self, table: np.ndarray) -> SequenceRows:
        """table: [num_history_pages + num_state_pages] int, as row_groups.py orders it."""
        return SequenceRows(self, np.asarray(table, np.int64))


class SequenceRows:
    """One sequence's rows. Cheap to make; holds for one step."""

    def __init__(self, pool: RowPool, table: np.ndarray) -> None:
        self._pool = pool
        history = len(table) - pool.layout.num_state_pages
        self._history, self._state = torch.from_numpy(table[:history]), table[history:]

    def history(self, field: str, layer: int) -> HistoryRows:
        """Raises KeyError if no HISTORY group has this field for this layer."""
        return HistoryRows(self._pool.pages, self._history, self._pool.layout.history[field, layer])

    def state(self, field: str, layer: int) -> StateRows:
        """Raises KeyError if no other group has it."""
        return StateRows(self._pool.pages, self._state, self._pool.layout.state[field, layer])
