"""State groups: what a model family declares that decode needs (docs/architecture.md). Torch-free.

Everything about pages (their bytes, hashes, wire plan, sizes) follows from these declarations; nothing outside `model/`
knows a family by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    HISTORY = "history"  # grows with the prompt, paged
    WINDOW = "window"  # only the last `window` rows are ever read again
    TAIL = "tail"  # only the open, not yet compressed rows
    CARRY = "carry"  # the last rows of the last closed block
    TOKENS = "tokens"  # the last ids


@dataclass(frozen=True, slots=True)
class Field:
    """One tensor of a layer's row, e.g. K: `kv_heads` x `dim` elements a token."""

    name: str
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class StateGroup:
    """One kind of state, for `num_layers` layers that share pages.

    A page holds `[layer, field, kv_head, token, dim]`; all fields of a group have the same `kv_heads` and `dim`.
    `window` is the number of rows that attention may look back (WINDOW only). Pages of a WINDOW group are numbered by
    absolute position as HISTORY's are; those wholly before the window are neither sent nor kept by the receiver.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    fields: tuple[Field, ...]
    window: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def elements_per_token(self) -> int:
        return self.num_layers * sum(f.kv_heads * f.dim for f in self.fields)

    def first_needed_token(self, num_tokens: int) -> int:
        """Absolute position of the first row that decoding token `num_tokens` may still read."""
        if self.kind is GroupKind.WINDOW and self.window is not None:
            return max(0, num_tokens - self.window + 1)
        return 0
