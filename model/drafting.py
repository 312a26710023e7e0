"""A decoder and its draft (multi-token prediction) block as one: what the block keeps goes wherever a sequence goes.

From the state behind the last layer at token t - 1 and from token t itself the block guesses token t + 1. Its rows are
numbered by t, so they are there when the token's other rows are: a chunk's first token finds the state in front of it
in a CARRY row, and neither chunks nor hand-offs nor prefix hits know of the block. In front of token 0 stand zeros.

Of guesses nothing is kept (RowSpan.num_drafts). The block itself guesses before the tokens that it guesses from are
computed again as known ones, over rows that the next step writes anew. DeepSeek-V3 report, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import csa2_decoder, csa_decoder, mla_mtp
from tailrace.model.csa2_config import Csa2Config
from tailrace.model.csa2_drafting import Csa2DraftingDecoder
from tailrace.model.csa_config import CsaConfig
from tailrace.model.csa_decoder import CsaDecoder
from tailrace.model.draft_rows import CARRIED, carried_group, drafting_config, state_width
from tailrace.model.errors import ConfigError
from tailrace.model.family import DraftingRowDecoder, FamilyConfig, Guessed, Progress
from tailrace.model.mla_config import MlaConfig
from tailrace.model.mla_decoder import MlaDecoder
from tailrace.model.mla_mtp import MlaDrafter
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorTable


class DraftBlock(Protocol):
    """A decoder's layers and its draft block.

    Attributes:
        decoder: whose logits are those of the block's outputs, too.
        width: elements of a token's state.
        goes_on: the block's output is a state to guess further from; else it guesses one token.
    """

    decoder: Any
    width: int
    goes_on: bool

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], num_layers: int | None
    ) -> torch.Tensor:
        """Behind the last layer: [tokens, width]."""
        ...

    def finish(self, states: torch.Tensor) -> torch.Tensor:
        """What the decoder's forward returns, and its logits take."""
        ...

    def guess(
        self,
        states: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
    ) -> torch.Tensor:
        """Run the block over tokens and the states in front of them, its rows standing at `positions`, those of the
        tokens -> [tokens, hidden_size] for logits."""
        ...


class MlaBlock:
    """Of DeepSeek V3 and V3.2."""

    goes_on = True

    def __init__(self, decoder: MlaDecoder, drafter: MlaDrafter) -> None:
        self.decoder, self._drafter, self.width = decoder, drafter, state_width(decoder.config)

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], num_layers: int | None
    ) -> torch.Tensor:
        return self.decoder.forward(ids, positions, pool, rows, num_layers)

    def finish(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def guess(
        self, states: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan]
    ) -> torch.Tensor:
        return self._drafter.forward(states, ids, positions, pool, rows)


class CsaBlock:
    """Of DeepSeek V4. A token's state is its streams."""

    goes_on = False

    def __init__(self, decoder: CsaDecoder) -> None:
        config = decoder.config
        if config.num_draft_layers < 1:
            raise ConfigError(f"num_draft_layers is {config.num_draft_layers}: pages have no rows of a draft block")
        self.decoder, self.width = decoder, state_width(config)

    def states(
        self, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], num_layers: int | None
    ) -> torch.Tensor:
        return self.decoder.streams(ids, positions, pool, rows, num_layers).flatten(1)

    def finish(self, states: torch.Tensor) -> torch.Tensor:
        return self.decoder.finish(self._streams(states))

    def guess(
        self, states: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan]
    ) -> torch.Tensor:
        return self.decoder.draft(self._streams(states), ids, positions, pool, rows)

    def _streams(self, states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(1, (self.decoder.config.streams, -1))


class DraftingDecoder:
    """See family.DraftingRowDecoder; what `forward` returns are the block's states, and `logits` takes them.

    Attributes:
        max_drafts: tokens that `propose` can guess; None: as many as wanted.
    """

    def __init__(self, block: DraftBlock) -> None:
        inner = block.decoder
        self.config, self.dtype, self._block = inner.config, inner.dtype, block
        self.layout = RowPages((*inner.layout.groups, carried_group(inner.config)), inner.layout.tokens_per_page)
        self.max_drafts = None if block.goes_on else 1

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """-> [tokens, width]. The block's rows are written too, unless only the first layers are asked for."""
        states = self._block.states(ids, positions, pool, rows, num_layers)
        if num_layers is None:
            before = self._before(states, pool, rows)
            self._block.guess(before, ids, positions, pool, rows)
        return states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._block.decoder.logits(self._block.finish(hidden))

    def _before(self, states: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan]) -> torch.Tensor:
        """The state in front of each token; the last kept one stays for the next step."""
        before = torch.zeros_like(states)
        at, index = 0, torch.zeros(1, dtype=torch.int64)
        for row in rows:
            carried = pool.of(row.pages).state(CARRIED, 0)
            before[at + 1 : at + row.num_new] = states[at : at + row.num_new - 1]
            if row.start:
                before[at] = carried.read(index).view(torch.float32)[0].to(states.dtype)
            carried.write(index, states[at + row.num_kept - 1][None].float().contiguous().view(torch.uint8))
            at += row.num_new
        return before

    def propose(
        self, hidden: torch.Tensor, ids: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], counts: Sequence[int]
    ) -> list[Guessed]:
        """See family.DraftingRowDecoder; hidden: [tokens, width]."""
        made = [Guessed([], []) for _ in rows]
        first = 0
        asked: list[tuple[int, RowSpan, torch.Tensor, torch.Tensor]] = []
        for i, row in enumerate(rows):
            at = slice(first, first + row.num_new)
            asked.append((i, row, hidden[at], ids[at]))
            first = at.stop
        while asked := [a for a in asked if len(made[a[0]].tokens) < counts[a[0]] and self._fits(a[1])]:
            spans = [span for _, span, _, _ in asked]
            positions = torch.cat([torch.arange(s.start, s.start + s.num_new) for s in spans])
            out = self._block.guess(
                torch.cat([s for _, _, s, _ in asked]), torch.cat([n for *_, n in asked]), positions, pool, spans
            )
            ends = torch.tensor([s.num_new for s in spans]).cumsum(0) - 1
            chances, tokens = self._block.decoder.logits(out[ends]).softmax(-1).max(-1)
            following = []
            for place, (i, span, _, _) in enumerate(asked):
                made[i].tokens.append(int(tokens[place]))
                made[i].chances.append(float(chances[place]))
                behind = RowSpan(span.start + span.num_new, 1, span.pages, 1)
                following.append((i, behind, out[ends[place]][None], tokens[place][None]))
            asked = following if self._block.goes_on else []
        return made

    def _fits(self, span: RowSpan) -> bool:
        history = len(span.pages) - self.layout.num_state_pages
        room = min(history * self.layout.tokens_per_page, self.config.max_position)
        return span.start + span.num_new <= room


def load(
    tensors: TensorTable,
    config: FamilyConfig,
    dtype: torch.dtype,
    tokens_per_page: int,
    progress: Progress | None = None,
) -> DraftingRowDecoder:
    """A model with its draft block, from a checkpoint's tensors by their stored names. Raises ConfigError as
    draft_rows.drafting_config and the family's own `load`."""
    config = drafting_config(config)
    if isinstance(config, MlaConfig):
        return DraftingDecoder(MlaBlock(*mla_mtp.load(tensors, config, dtype, tokens_per_page, progress)))
    if isinstance(config, CsaConfig):
        return DraftingDecoder(CsaBlock(csa_decoder.load(tensors, config, dtype, tokens_per_page, progress)))
    if isinstance(config, Csa2Config):
        return Csa2DraftingDecoder(csa2_decoder.load(tensors, config, dtype, tokens_per_page, progress))
    raise ConfigError(f"family {config.family} has no draft block that is served")
