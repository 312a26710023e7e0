"""Reading and writing rows of bytes in a pool of packed pages. Plain PyTorch, the CPU path.

It knows where rows stand (by the regions it is given) and nothing of what they mean: kernels/row_formats.py reads them.
A wrong page number reads another's page, so tables are the caller's duty.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch


class _History(Protocol):
    @property
    def offset(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def rows_per_page(self) -> int: ...


class _State(Protocol):
    @property
    def row_bytes(self) -> int: ...
    @property
    def rows(self) -> int: ...

    def places(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


class HistoryRows:
    """One field of one layer of one sequence: row w of the sequence, by number from 0.

    Args:
        pages: [num_pages, bytes_per_page] uint8, the pool.
        table: [num_history_pages] int64, the page of each ordinal.
    """

    def __init__(self, pages: torch.Tensor, table: torch.Tensor, region: _History) -> None:
        self._pages, self._table = pages, table
        self.row_bytes, self._each, self._offset = region.row_bytes, region.rows_per_page, region.offset
        end = region.offset + region.rows_per_page * region.row_bytes
        self._rows = pages[:, region.offset : end].unflatten(1, (region.rows_per_page, region.row_bytes))

    def first(self, number: int) -> torch.Tensor:
        """Rows 0..number-1: [number, row_bytes] uint8, a copy."""
        pages = self._table[: -(-number // self._each)]
        return self._rows[pages].flatten(0, 1)[:number]

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> [n, row_bytes] uint8, a copy."""
        return self._rows[self._table[index // self._each], index % self._each]

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Rows start, start + 1, ..  rows: [n, row_bytes] uint8."""
        index = torch.arange(start, start + len(rows))
        self._rows[self._table[index // self._each], index % self._each] = rows


class StateRows:
    """One field of one layer of one sequence that does not grow: row i, by number from 0; for a window p % rows."""

    def __init__(self, pages: torch.Tensor, table: np.ndarray, region: _State) -> None:
        """table: [num_state_pages] int64, the sequence's state pages."""
        self._flat, self._size = pages.view(-1), pages.shape[1]
        self._table, self._region = table, region
        self.rows, self.row_bytes = region.rows, region.row_bytes

    def _bytes(self, index: torch.Tensor) -> torch.Tensor:
        page, offset = self._region.places(index.numpy())
        begin = torch.from_numpy(self._table[page] * self._size + offset)
        return begin[:, None] + torch.arange(self.row_bytes)

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """index: [n] int64 -> [n, row_bytes] uint8, a copy."""
        return self._flat[self._bytes(index)]

    def write(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """index: [n] int64, no number twice;  rows: [n, row_bytes] uint8."""
        self._flat[self._bytes(index)] = rows
