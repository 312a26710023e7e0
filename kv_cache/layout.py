"""Page geometry: from state groups to bytes and to a sequence's page table. Torch-free, equal on both sides of a wire.

    PageLayout   one group of plain K and V rows: a page is one super-page `[layer, field, kv_head, token, dim]`
    RowLayout    groups whose rows have formats of their own (model/row_groups.py)

A sequence's table is [history pages | state pages]. History pages hold `tokens_per_page` tokens each, are written once
and may be shared; state pages, of which a PageLayout has none, belong to one sequence and are overwritten in place.
What is asked of either stands in `Layout`. Page 0 of a pool is scratch for padding rows and is never allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowGroup, RowPages
from tailrace.model.state_groups import GroupKind, StateGroup

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCRATCH_PAGE = 0


class Layout(Protocol):
    """What pools, ledgers, loops and transceivers know of pages. `num_tokens`: those whose state is there.

    Attributes:
        dtype: of plain rows, and of what computes them.
        num_state_pages: of each sequence, at the end of its table.
        is_windowed: pages before a window are given up.
        is_opaque: only the model knows where in a page which token's rows stand; others take it as a whole.
    """

    @property
    def tokens_per_page(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bytes_per_page(self) -> int: ...
    @property
    def num_state_pages(self) -> int: ...
    @property
    def is_windowed(self) -> bool: ...
    @property
    def is_opaque(self) -> bool: ...

    def num_pages(self, num_tokens: int) -> int:
        """The whole table's length: history pages, the last one perhaps partly filled, and state pages."""
        ...

    def history_pages(self, num_tokens: int) -> int: ...

    def full_pages(self, num_tokens: int) -> int:
        """History pages that nothing will be written to any more."""
        ...

    def moved_pages(self, num_tokens: int) -> int:
        """The first so many of the table have something in them that decode needs: what crosses in a hand-off."""
        ...

    def first_needed_token(self, num_tokens: int) -> int:
        """Position of the first token whose rows decode after `num_tokens` tokens may read."""
        ...

    def first_needed_page(self, num_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape and size of the pages of one state group on one rank."""

    group: StateGroup
    tokens_per_page: int
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[layer, field, kv_head, token, dim] of one page."""
        first = self.group.fields[0]
        return (self.group.num_layers, len(self.group.fields), first.kv_heads, self.tokens_per_page, first.dim)

    @property
    def bytes_per_page(self) -> int:
        return self.group.elements_per_token() * self.tokens_per_page * DTYPE_BYTES[self.dtype]

    @property
    def num_state_pages(self) -> int:
        return 0

    @property
    def is_windowed(self) -> bool:
        return self.group.kind is GroupKind.WINDOW

    @property
    def is_opaque(self) -> bool:
        return False

    def num_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.tokens_per_page)

    def history_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_page)

    def full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.tokens_per_page

    def moved_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_page)

    def first_needed_token(self, num_tokens: int) -> int:
        return self.group.first_needed_token(num_tokens)

    def first_needed_page(self, num_tokens: int) -> int:
        """Ordinal of the first page that decode after `num_tokens` tokens may read."""
        return self.group.first_needed_token(num_tokens) // self.tokens_per_page


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Pages of a family whose rows have formats of their own.

    Args:
        dtype: of what computes the rows; with it the family has declared `groups`.

    Raises:
        ConfigError: tokens_per_page is no multiple of what the groups need.
    """

    groups: tuple[RowGroup, ...]
    tokens_per_page: int
    dtype: str
    bytes_per_page: int = field(init=False)
    num_state_pages: int = field(init=False)
    _periods: tuple[int, ...] = field(init=False, repr=False)
    _without_tail: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        pages = self.rows
        periods = sorted({g.period for g in self.groups if g.kind is GroupKind.TAIL})
        for name, value in {
            "bytes_per_page": pages.bytes_per_page,
            "num_state_pages": pages.num_state_pages,
            "_periods": tuple(periods),
            "_without_tail": pages.state_pages_needed(0),
        }.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> RowPages:
        """Where each row stands."""
        return _row_pages(self.groups, self.tokens_per_page)

    @property
    def is_windowed(self) -> bool:
        return False

    @property
    def is_opaque(self) -> bool:
        return True

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_page) + self.num_state_pages

    def history_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.tokens_per_page)

    def full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.tokens_per_page

    def moved_pages(self, num_tokens: int) -> int:
        """Pages that hold nothing but rows of an empty TAIL stay where they are."""
        is_open = any(num_tokens % period for period in self._periods)
        needed = self.num_state_pages if is_open else self._without_tail
        return -(-num_tokens // self.tokens_per_page) + needed

    def first_needed_token(self, num_tokens: int) -> int:
        return 0

    def first_needed_page(self, num_tokens: int) -> int:
        return 0


@lru_cache(maxsize=64)
def _row_pages(groups: tuple[RowGroup, ...], tokens_per_page: int) -> RowPages:
    return RowPages(groups, tokens_per_page)


def single_layout(groups: Sequence[StateGroup], tokens_per_page: int, dtype: str) -> PageLayout:
    """Geometry of a family's one state group.

    Raises:
        ConfigError: the family has another number of groups, or a dtype or size that has no pages.
    """
    if len(groups) != 1:
        raise ConfigError(
            f"the model declares {len(groups)} state groups; a page pool holds 1 (several: not built yet)"
        )
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"pages of dtype {dtype!r} are not supported; supported are {', '.join(DTYPE_BYTES)}")
    if tokens_per_page < 1:
        raise ConfigError(f"tokens_per_page must be at least 1, not {tokens_per_page}")
    return PageLayout(groups[0], tokens_per_page, dtype)
