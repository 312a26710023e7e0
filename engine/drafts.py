"""Drafts: guesses of the tokens to come, which the next step verifies (engine/step.py says how).

    step n      computes the known tokens and the drafts of step n - 1, draws, and so knows which drafts count
    propose     what follows the tokens drawn, guessed from the hidden states of the tokens that count
    step n + 1  computes those tokens, known by now, and the new drafts

A wrong guess costs a row of a step and never a token, so a drafter owes nobody anything but ids of the vocabulary: its
own state may be missing, stale or another's. It dies with its rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tailrace.engine.step import Row
from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.family import DraftingRowDecoder
from tailrace.model.row_store import RowPool


@dataclass(frozen=True, slots=True)
class Ask:
    """What follows these tokens?

    Attributes:
        row: as it has just been computed.
        hidden: [n, width] from the decoder's forward, of the last known token and of the drafts that count.
        ids: the token behind each of them; only the last is not among the row's own.
        count: guesses wanted, at most.
    """

    row: Row
    hidden: torch.Tensor
    ids: Sequence[int]
    count: int

    @property
    def start(self) -> int:
        """Absolute position of ids[0]."""
        return self.row.start + self.row.num_kept


@dataclass(frozen=True, slots=True)
class Guess:
    """tokens: at most as many as were wanted. chances: of each to be right if those before it are, 0 to 1."""

    tokens: Sequence[int]
    chances: Sequence[float]


class Drafter(Protocol):
    def propose(self, asks: Sequence[Ask]) -> list[Guess]:
        """One an ask, in order. Called under torch.inference_mode."""
        ...


class BlockDrafter:
    """Asks a decoder's own draft block, whose state is rows of the sequence."""

    def __init__(self, decoder: DraftingRowDecoder, pool: RowPool) -> None:
        self._decoder, self._pool = decoder, pool

    def propose(self, asks: Sequence[Ask]) -> list[Guess]:
        made = self._decoder.propose(
            torch.cat([ask.hidden for ask in asks]),
            torch.tensor([token for ask in asks for token in ask.ids]),
            self._pool,
            [RowSpan(ask.start, len(ask.ids), ask.row.pages, len(ask.ids)) for ask in asks],
            [ask.count for ask in asks],
        )
        return [Guess(guess.tokens, guess.chances) for guess in made]
