"""State groups of families whose rows have a format of their own: what decode needs, and where it stands in pages.

A *history page* is one super-page of `tokens_per_page` tokens: the rows of every HISTORY group, of all its layers.
What does not grow with the prompt (WINDOW, CARRY, TAIL and TOKENS rows) stands in a fixed number of *state pages* of
the same size, which belong to one sequence and are overwritten in place. A sequence's page table is

    [history page 0, 1, .. | state page 0, 1, .. num_state_pages - 1]

so pools, ledger and transceiver see pages only, and nothing outside `model/` knows a family. Torch-free; pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tailrace.model.errors import ConfigError
from tailrace.model.state_groups import GroupKind


@dataclass(frozen=True, slots=True)
class RowField:
    """One tensor of a layer's row, whose format fixes its bytes.

    Attributes:
        name: unique in its family: with a layer it finds a region.
        row_bytes: of one row of one layer.
        row_format: how those bytes are to be read, for messages and for pairing, e.g. `float32x512`, `fp8-448+bf16-64`.
    """

    name: str
    row_bytes: int
    row_format: str


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One kind of state of some layers.

    Attributes:
        layers: numbers of the layers; what belongs to no layer takes layer 0.
        tokens_per_row: HISTORY: a row for so many tokens; row w is there once token (w + 1) * tokens_per_row - 1 is.
        rows: of any other kind: how many there are. WINDOW and TOKENS: the row of position p is p % rows.
        period: TAIL: there is nothing in it after a multiple of so many tokens.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    fields: tuple[RowField, ...]
    tokens_per_row: int = 1
    rows: int = 0
    period: int = 0

    @property
    def row_bytes(self) -> int:
        """All fields of one row of one layer."""
        return sum(field.row_bytes for field in self.fields)

    @property
    def constant_bytes(self) -> int:
        """What a request keeps of it however long its prompt is; 0 for HISTORY."""
        return 0 if self.kind is GroupKind.HISTORY else len(self.layers) * self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class HistoryRegion:
    """Rows of one field of one layer in each history page: `rows_per_page` of `row_bytes`, contiguous from `offset`."""

    offset: int
    row_bytes: int
    rows_per_page: int


@dataclass(frozen=True, slots=True)
class StateRegion:
    """Rows of one field of one layer over the state pages. No row crosses a page's end.

    `first_rows` rows stand from (`page`, `offset`) on, each further page holds `rows_per_page` from its start.
    """

    page: int
    offset: int
    row_bytes: int
    rows: int
    first_rows: int
    rows_per_page: int

    def places(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(state page, byte offset) of each row. index: [n] int64, each below `rows`."""
        page, at = np.divmod(index - self.first_rows, self.rows_per_page)
        is_first = index < self.first_rows
        return (
            np.where(is_first, self.page, self.page + 1 + page),
            np.where(is_first, self.offset + index * self.row_bytes, at * self.row_bytes),
        )


# What a hand-off always needs comes first, so that an empty TAIL leaves whole pages out of it.
_STATE_ORDER = (GroupKind.WINDOW, GroupKind.TOKENS, GroupKind.CARRY, GroupKind.TAIL)


class RowPages:
    """Where every row of a family stands.

    Args:
        groups: of the family.
        tokens_per_page: a multiple of every HISTORY group's tokens_per_row and every TAIL's period.

    Attributes:
        bytes_per_page: of history and state pages alike.
        num_state_pages: of each sequence.

    Raises:
        ConfigError: tokens_per_page does not fit the groups, or two fields have one name.
    """

    def __init__(self, groups: Sequence[RowGroup], tokens_per_page: int) -> None:
        self.groups = tuple(groups)
        self.tokens_per_page = tokens_per_page
        history = [g for g in self.groups if g.kind is GroupKind.HISTORY]
        state = sorted(
            (g for g in self.groups if g.kind is not GroupKind.HISTORY), key=lambda g: _STATE_ORDER.index(g.kind)
        )
        period = self.period_of(self.groups)
        if tokens_per_page < 1 or tokens_per_page % period:
            raise ConfigError(f"tokens_per_page is {tokens_per_page}, this model needs a multiple of {period}")
        names = [field.name for group in self.groups for field in group.fields]
        if len(set(names)) != len(names):
            raise ConfigError(f"state groups name a field twice: {', '.join(sorted(names))}")
        self.period = period
        self.history: dict[tuple[str, int], HistoryRegion] = {}
        self.state: dict[tuple[str, int], StateRegion] = {}
        offset = 0
        for group in history:
            rows = tokens_per_page // group.tokens_per_row
            for layer in group.layers:
                for field in group.fields:
                    self.history[field.name, layer] = HistoryRegion(offset, field.row_bytes, rows)
                    offset += rows * field.row_bytes
        self.history_bytes = offset
        self.bytes_per_page = max([offset, *(field.row_bytes for group in state for field in group.fields)])
        self._tail_pages = self._place(state)

    @staticmethod
    def period_of(groups: Sequence[RowGroup]) -> int:
        """What tokens_per_page must be a multiple of."""
        rows = (g.tokens_per_row for g in groups if g.kind is GroupKind.HISTORY)
        return math.lcm(*rows, *(g.period for g in groups if g.period))

    def _place(self, state: Sequence[RowGroup]) -> int:
        """Fill `state` and `num_state_pages`; returns the number of pages that hold more than TAIL rows."""
        page, offset, without_tail = 0, 0, 0
        for group in state:
            for layer in group.layers:
                for field in group.fields:
                    each = self.bytes_per_page // field.row_bytes
                    room = (self.bytes_per_page - offset) // field.row_bytes
                    first = min(group.rows, room)
                    self.state[field.name, layer] = StateRegion(page, offset, field.row_bytes, group.rows, first, each)
                    if group.rows <= room:
                        offset += group.rows * field.row_bytes
                    else:
                        more = group.rows - first
                        page += -(-more // each)
                        offset = (more - (-(-more // each) - 1) * each) * field.row_bytes
            if group.kind is not GroupKind.TAIL:
                without_tail = page + (offset > 0)
        self.num_state_pages = page + (offset > 0)
        return without_tail

    def state_pages_needed(self, num_tokens: int) -> int:
        """The first so many state pages matter after `num_tokens` tokens; the others hold only empty tails."""
        return self.num_state_pages if self.is_open(num_tokens) else self._tail_pages

    def is_open(self, num_tokens: int) -> bool:
        """After so many tokens there is something in a TAIL."""
        return any(g.kind is GroupKind.TAIL and num_tokens % g.period for g in self.groups)

    @property
    def constant_bytes(self) -> int:
        """Rows of all groups that do not grow, without what rounding to pages adds."""
        return sum(group.constant_bytes for group in self.groups)

    def describe(self) -> str:
        """One line that is equal wherever pages are laid out alike; two workers compare it when they pair."""
        return "; ".join(
            f"{g.kind} {g.tokens_per_row}/{g.rows}/{g.period} layers {','.join(map(str, g.layers))}: "
            + ", ".join(f"{f.name} {f.row_format} {f.row_bytes}" for f in g.fields)
            for g in self.groups
        )
