"""Page geometry: from a state group to bytes. Torch-free, equal on both sides of a wire.

A page is one contiguous super-page `[layer, field, kv_head, token, dim]`; page 0 of a pool is scratch for padding rows
and is never allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tailrace.model.errors import ConfigError
from tailrace.model.state_groups import StateGroup

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCRATCH_PAGE = 0


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

    def num_pages(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens occupy, the last one perhaps partly."""
        return -(-num_tokens // self.tokens_per_page)

    def full_pages(self, num_tokens: int) -> int:
        return num_tokens // self.tokens_per_page

    def first_needed_page(self, num_tokens: int) -> int:
        """Ordinal of the first page that decode after `num_tokens` tokens may read."""
        return self.group.first_needed_token(num_tokens) // self.tokens_per_page


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
