"""Bytes that follow from a family's declaration of its rows: a token, a prompt, a super-page, what is constant.

Pure arithmetic over row_groups.py, for `tailrace check` and docs/models.md; torch-free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from tailrace.model.row_groups import RowGroup, RowPages
from tailrace.model.state_groups import GroupKind

SUPER_PAGE_TOKENS = 128  # what every family's periods divide
PROMPTS = (8 << 10, 32 << 10, 128 << 10)


def bytes_per_token(groups: Sequence[RowGroup]) -> Fraction:
    """What each further token adds, all layers together; a row of several tokens counts in parts."""
    history = (g for g in groups if g.kind is GroupKind.HISTORY)
    return sum((Fraction(len(g.layers) * g.row_bytes, g.tokens_per_row) for g in history), Fraction(0))


@dataclass(frozen=True, slots=True)
class PromptSizes:
    """What a hand-off after `tokens` prompt tokens consists of.

    Attributes:
        history: bytes of HISTORY rows of closed periods.
        window: bytes of WINDOW and TOKENS rows; fewer than all of them after a short prompt.
        carry: bytes of CARRY rows.
        open: bytes of TAIL rows at this length.
        history_pages, state_pages: one descriptor each.
    """

    tokens: int
    history: int
    window: int
    carry: int
    open: int
    history_pages: int
    state_pages: int

    @property
    def kept(self) -> int:
        """History and windows: what the prompt's length decides, without what its last few tokens leave open."""
        return self.history + self.window


def prompt_sizes(layout: RowPages, tokens: int) -> PromptSizes:
    """Sizes after `tokens` tokens."""
    held = dict.fromkeys(GroupKind, 0)
    for group in layout.groups:
        row = len(group.layers) * group.row_bytes
        if group.kind is GroupKind.HISTORY:
            held[group.kind] += tokens // group.tokens_per_row * row
        elif group.kind is GroupKind.TAIL:
            held[group.kind] += min(tokens % group.period, group.rows) * row
        elif group.kind is GroupKind.CARRY:
            held[group.kind] += group.rows * row
        else:
            held[group.kind] += min(tokens, group.rows) * row
    return PromptSizes(
        tokens=tokens,
        history=held[GroupKind.HISTORY],
        window=held[GroupKind.WINDOW] + held[GroupKind.TOKENS],
        carry=held[GroupKind.CARRY],
        open=held[GroupKind.TAIL],
        history_pages=-(-tokens // layout.tokens_per_page),
        state_pages=layout.state_pages_needed(tokens),
    )


def most_open(groups: Sequence[RowGroup]) -> int:
    """Bytes of TAIL rows after the length that leaves most of them open."""
    return sum(group.constant_bytes for group in groups if group.kind is GroupKind.TAIL)


def constant_of(groups: Sequence[RowGroup], *kinds: GroupKind) -> int:
    """Bytes a request of groups of these kinds, however long its prompt is."""
    return sum(group.constant_bytes for group in groups if group.kind in kinds)


def layer_list(layers: Sequence[int]) -> str:
    """Numbers of layers, short: runs as `3-7`, runs of every second as `2,4..42`."""
    parts: list[str] = []
    rest = list(layers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        run = next((i for i in range(1, len(rest)) if rest[i] - rest[i - 1] != step), len(rest))
        if run < 3 or step > 2:
            run = 1
        if step == 1 and run > 1:
            parts.append(f"{rest[0]}-{rest[run - 1]}")
        elif run > 1:
            parts.append(f"{rest[0]},{rest[1]}..{rest[run - 1]}")
        else:
            parts.append(str(rest[0]))
        rest = rest[run:]
    return ",".join(parts)
