"""One sequence's part of a step of DeepSeek V4.1: which window rows its tokens see, and what layers hand to later ones.

An ordinary step and a replay differ only in these plans (csa2_decoder.py runs both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tailrace.kernels.packed_rows import StateRows
from tailrace.kernels.sparse_attention import PickedRows
from tailrace.model.row_store import SequenceRows


class Windows(NamedTuple):
    """Which window rows the new tokens of a sequence see in some layers, and which they leave.

    Attributes:
        stored: positions whose rows are read from the pages.
        index: [new, window] into (stored rows | the step's own rows), -1 for none.
        are_kept: the step's own rows are left for later ones.
    """

    stored: range
    index: torch.Tensor
    are_kept: bool


def plan_windows(start: int, num_new: int, window: int, stored: range, *, are_kept: bool = True) -> Windows:
    """Windows of new tokens [start, start + num_new). Where a position is stored and new, the stored row is read."""
    position = torch.arange(start, start + num_new)[:, None] + torch.arange(1 - window, 1)
    own = torch.where(position >= start, position - start + len(stored), -1)
    is_stored = (position >= stored.start) & (position < stored.stop)
    return Windows(stored, torch.where(is_stored, position - stored.start, own), are_kept)


def write_ring(state: StateRows, start: int, rows: torch.Tensor) -> None:
    """The rows of positions start on, as many of the last of them as there is room for.  rows: [n, row_bytes]."""
    first = max(0, len(rows) - state.rows)
    state.write(torch.arange(start + first, start + len(rows)) % state.rows, rows[first:])


@dataclass(slots=True)
class SequencePart:
    """One sequence's part of a step.

    Attributes:
        at: its tokens among the step's.
        start: position of the first.
        lower, upper: windows of the layers below the boundary and of the others.
        before: [lookback] int64, token classes in front of `start`; None without Engram.
        writes: it leaves rows that grow, open tails and ids; if not, they are there already.
        num_drafts: the last so many tokens are guesses, which leave nothing but rows that grow.
        deferred: what overwrites rows of earlier tokens waits here for `commit`, which says how many of the new tokens
            count; None: it is done at once, for all of them.
    """

    at: slice
    start: int
    rows: SequenceRows
    lower: Windows
    upper: Windows
    before: torch.Tensor | None
    writes: bool = True
    deferred: list[Callable[[int], None]] | None = None
    num_drafts: int = 0
    # Handed from layer to layer within the step: rows in use, [n, head_dim], with each token's picks among them, and
    # the candidate blocks, [tokens, blocks].
    selected: PickedRows | None = field(default=None, init=False)
    blocks: torch.Tensor | None = field(default=None, init=False)

    @property
    def num_new(self) -> int:
        return self.at.stop - self.at.start

    @property
    def end(self) -> int:
        return self.start + self.num_new

    def leave(self, write: Callable[[int], None]) -> None:
        """`write` is told how many of the new tokens count."""
        if self.deferred is None:
            write(self.num_new - self.num_drafts)
        else:
            self.deferred.append(write)

    def commit(self, num_tokens: int) -> None:
        """The first `num_tokens` new tokens count, the others were never there. Rows that grow may be left behind the
        end: nobody reads them until they are written anew."""
        for write in self.deferred or ():
            write(num_tokens)
        self.deferred = None

    def last(self, num_tokens: int) -> SequencePart:
        """Its last tokens alone, as a step's only sequence."""
        return SequencePart(
            at=slice(0, num_tokens),
            start=self.end - num_tokens,
            rows=self.rows,
            lower=self.lower,
            upper=self.upper,
            before=self.before,
            writes=self.writes,
        )
