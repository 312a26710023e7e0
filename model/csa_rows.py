"""What a DeepSeek V4 sequence has in its pages, as numbers: windows, entries of closed windows, and windows still open.

One object a sequence and step; it knows how far the sequence was at the step's start and so which rows exist: pages of
a fresh sequence hold garbage. Row formats and the field names of csa_config.py stand here; what rows mean to attention
stands in csa_decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tailrace.kernels.by_device import extend, pool, pool_overlapping
from tailrace.kernels.compressor import Overlap, Running, overlap_of
from tailrace.kernels.packed_rows import HistoryRows
from tailrace.kernels.row_formats import RowFormat, fp4_groups, fp8_tiles, plain
from tailrace.model.csa_config import FP8_TILE, CsaConfig
from tailrace.model.row_store import SequenceRows

# [n, dim] float32 entries and the numbers of their windows' first tokens -> what is kept of them.
Finish = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Formats:
    """Of window rows and entries, and of index keys."""

    row: RowFormat
    key: RowFormat


def formats(config: CsaConfig, kv_dtype: str) -> Formats:
    """The formats that `config.row_groups(kv_dtype)` names."""
    if kv_dtype == "float32":
        return Formats(plain(config.head_dim, torch.float32), plain(config.index_dim, torch.float32))
    return Formats(
        fp8_tiles(config.head_dim, FP8_TILE, "ue8m0", tail_dims=config.rope_dim, pad=config.fp8_pad),
        fp4_groups(config.index_dim, config.fp4_group, "ue8m0"),
    )


class CsaRows:
    """A sequence's rows during a step that takes it from `start` to `end` tokens, of which the last `num_drafts` are
    guesses: these close windows as others do, and leave nothing in a window, an overlap or an open window.

    A layer's new tokens are handed over once, in order: `close_overlapping` or `close_plain` before its entries are
    read, `keep_window` after its window was. Where a draft is used the last token of a step of several can be taken
    back: the next step then starts before it, and all that it needs is found by its `start` alone.
    """

    def __init__(self, rows: SequenceRows, config: CsaConfig, start: int, end: int, num_drafts: int = 0) -> None:
        self._rows, self._config = rows, config
        self.start, self.end, self.kept_end = start, end, end - num_drafts
        # The next step starts here at the earliest.
        self._least_start = max(start + 1, self.kept_end - config.num_draft_layers)

    # ------------------------------------------------------------------------------------------------------- windows

    def window(self, layer: int) -> torch.Tensor:
        """The last tokens before `start` that a new one sees: [at most window - 1, row_bytes], oldest first."""
        first = max(0, self.start - self._config.window + 1)
        return self._rows.state("window", layer).read(torch.arange(first, self.start) % self._config.window)

    def keep_window(self, layer: int, rows: torch.Tensor) -> None:
        """rows: [end - start, row_bytes] uint8, the new tokens'."""
        last = rows[: self.kept_end - self.start][-self._config.window :]
        index = torch.arange(self.kept_end - len(last), self.kept_end) % self._config.window
        self._rows.state("window", layer).write(index, last)

    # ------------------------------------------------------------------------------------------------------- entries

    def entries(self, field: str, layer: int) -> HistoryRows:
        """`csa`, `csa_key` or `hca`: row w is there if w < closed windows at `end`, once they were closed."""
        return self._rows.history(field, layer)

    def close_overlapping(
        self, field: str, layer: int, values: torch.Tensor, gates: torch.Tensor, finish: Finish
    ) -> None:
        """Close what windows the new tokens fill and keep the rest: of a CSA layer's `csa` or `csa_key`.

        Args:
            values, gates: [end - start, 2 dim] float32 of the new tokens, position bias included.
            finish: [n, dim] entries, [n] first positions -> [n, row_bytes] uint8.
        """
        m, width = self._config.csa_rate, values.shape[1]
        tail, carry = self._rows.state(f"{field}_open", layer), self._rows.state(f"{field}_overlap", layer)
        slots = carry.rows // m
        first, opened = self.start // m, self.start // m * m  # the window that is open, and its first token
        open_rows = _floats(tail.read(torch.arange(opened, self.start) % tail.rows))
        values = torch.cat((open_rows[:, :width], values))
        gates = torch.cat((open_rows[:, width:], gates))
        done = len(values) // m * m
        if done:
            before = None
            if first:
                place = torch.arange(m) + (first - 1) % slots * m
                before = Overlap(*_floats(carry.read(place)).split(width // 2, 1))
            windows = values[:done].unflatten(0, (-1, m)), gates[:done].unflatten(0, (-1, m))
            self._write(field, layer, first, m, pool_overlapping(*windows, before), finish)
            for closed in range(max(first, self._least_start // m - 1), self.kept_end // m):
                kept = overlap_of(*(rows[: closed - first + 1] for rows in windows))
                carry.write(torch.arange(m) + closed % slots * m, _bytes(torch.cat(kept, 1)))
        still = max(self.start, self._least_start // m * m)  # the first new token that a next step may find open
        rest = torch.cat((values, gates), 1)[still - opened : self.kept_end - opened]
        tail.write(torch.arange(still, self.kept_end) % tail.rows, _bytes(rest))

    def close_plain(self, field: str, layer: int, values: torch.Tensor, gates: torch.Tensor, finish: Finish) -> None:
        """The same of an HCA layer's `hca`.  values, gates: [end - start, dim] float32."""
        m, start = self._config.hca_rate, self.start
        tail = self._rows.state(f"{field}_open", layer)
        before = None
        if start % m:
            before = Running(*_floats(tail.read(torch.tensor([start % tail.rows]))).view(3, -1))

        def running(end: int) -> Running:
            """Of the window of token end - 1, up to that."""
            opened = (end - 1) // m * m
            if opened < start:
                return extend(before, values[: end - start], gates[: end - start])
            return extend(None, values[opened - start : end - start], gates[opened - start : end - start])

        for end in range(self._least_start, self.kept_end + 1):
            if end % m:
                tail.write(torch.tensor([end % tail.rows]), _bytes(torch.cat(running(end))[None]))
        first, done = -(-start // m), self.end // m  # windows that are wholly new
        entries = [running(first * m).entry()[None]] if start % m and done >= first else []
        if done > first:
            at = slice(first * m - start, done * m - start)
            entries.append(pool(values[at].unflatten(0, (-1, m)), gates[at].unflatten(0, (-1, m))))
        if entries:
            self._write(field, layer, start // m, m, torch.cat(entries), finish)

    def _write(self, field: str, layer: int, first: int, m: int, entries: torch.Tensor, finish: Finish) -> None:
        numbers = torch.arange(first, first + len(entries))
        self._rows.history(field, layer).write(first, finish(entries, numbers * m))


def _floats(rows: torch.Tensor) -> torch.Tensor:
    """[n, 4 dim] uint8 -> [n, dim] float32."""
    return rows.view(torch.float32)


def _bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8)
