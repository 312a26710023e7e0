"""One step over a mixed batch on the CPU: lay out, forward, sample. The only room where tensors meet sequences' pages.

It does not know requests, schedulers or peers: rows come in a StepPlan and go out as RowResults. A row that cannot be
computed (its pages hold NaN, say) fails alone. Of several ranks this is rank 0's engine; the others run each forward in
step with it. When the process dies nothing here is worth saving: pages stand in the arena, all else is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tailrace.engine.drafts import Ask, BlockDrafter, Drafter
from tailrace.engine.forward import Forward, padded_rows
from tailrace.engine.group import Followers
from tailrace.engine.pages import compare_rows, copy_pages, poison
from tailrace.engine.row_forward import RowForward
from tailrace.engine.sampler import NO_TOKEN, Sampler, logprobs_of
from tailrace.engine.sequence import Sequence as SequenceOfIds
from tailrace.engine.step import Logprob, Row, RowResult, SamplerState, StepPlan
from tailrace.kv_cache.layout import SCRATCH_PAGE, PageLayout, RowLayout
from tailrace.model.decoder import Decoder
from tailrace.model.draft_rows import num_accepted
from tailrace.model.errors import ConfigError
from tailrace.model.family import DraftingRowDecoder, ReadingAhead, RowDecoder

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_FINITE = "the state of this request is not finite: a page it read holds NaN or infinity"
NOTHING_TO_DRAW = "no token can be drawn: every logit is -inf or NaN after penalties and bias"

_IDS_BEFORE = 16  # ids in front of those that are read ahead; n-grams reach over fewer
_PROMPT_LOGPROB_ROWS = 64  # positions whose logits exist at once when a prompt's logprobs are wanted


def pool_tensor(pages: np.ndarray, layout: PageLayout | RowLayout) -> torch.Tensor:
    """Pages [num_pages, bytes_per_page] uint8 as [num_pages, layer, field, kv_head, token, dim], shared; those of a
    family with rows of its own as they are."""
    if isinstance(layout, RowLayout):
        return torch.from_numpy(pages)
    return torch.from_numpy(pages).view(TORCH_DTYPES[layout.dtype]).view(len(pages), *layout.shape)


class Engine:
    """Runs steps of one decoder over one pool.

    Args:
        decoder: the model, or rank 0's share of it; or a family's whole model.
        kv: [num_pages, layer, field, kv_head, token, dim] in the decoder's dtype; page 0 is scratch. For a RowDecoder:
            [num_pages, bytes_per_page] uint8.
        threads: of large steps and the output projection; those that torch has now if None. Small steps use one.
        followers: the other ranks; None if there are none.
        drafter: guesses tokens; None: the decoder's own, if it has any.
    """

    def __init__(
        self,
        decoder: Decoder | RowDecoder,
        kv: torch.Tensor,
        *,
        threads: int | None = None,
        followers: Followers | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self._run: Forward | RowForward
        if isinstance(decoder, Decoder):
            self._run = Forward(decoder, kv, threads=threads)
        elif followers is None:
            self._run = RowForward(decoder, kv)
        else:
            raise ConfigError(f"family {decoder.config.family} runs on one rank, not on {1 + len(followers.pools)}")
        self._decoder, self._followers = decoder, followers
        self._pools = (kv,) if followers is None else (kv, *followers.pools)
        self._sampler = Sampler()
        self._drafter = drafter
        self._rows_ahead = decoder.rows_ahead() if isinstance(decoder, ReadingAhead) else None
        if drafter is None and isinstance(decoder, DraftingRowDecoder) and isinstance(self._run, RowForward):
            self._drafter = BlockDrafter(decoder, self._run.pool)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> list[RowResult]:
        """Write the state of all rows' tokens, sample where asked.

        Results are in plan order. A row's failure stands in its RowResult.error and touches no other row.
        """
        if not plan.rows:
            return []
        order = sorted(range(len(plan.rows)), key=lambda i: _layout_order(plan.rows[i]))
        rows = [plan.rows[i] for i in order]
        for row in rows:
            for state in row.samplers:
                if state.grammar is not None:
                    state.grammar.begin()
        hidden = self._forward(rows)
        results = self._results(rows, hidden)
        by_plan = dict(zip(order, results, strict=True))
        return [by_plan[i] for i in range(len(order))]

    @property
    def reads_ahead(self) -> bool:
        """Whether `read_ahead` does anything for this model."""
        return self._rows_ahead is not None

    def read_ahead(self, sequence: SequenceOfIds, num_soon: int) -> None:
        """Begin to fetch what steps over a prompt will look up by its ids (Engram's tables, model/engram.py), on a
        thread of its own. Returns at once.

        Args:
            num_soon: as many of its tokens are about to be computed, and are left to their step.
        """
        if self._rows_ahead is None:
            return
        start = max(sequence.num_computed, sequence.prompt_from) + num_soon
        before = max(sequence.prompt_from, start - _IDS_BEFORE)
        if start < sequence.num_known:
            self._rows_ahead.ask(sequence.ids(before, sequence.num_known).tolist(), start - before)

    @torch.inference_mode()
    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole pages; all of src is read before dst is written."""
        copy_pages(self._pools, src, dst)

    @torch.inference_mode()
    def compare_rows(self, pages: Sequence[int], others: Sequence[int], span: range) -> tuple[float, float]:
        """How far two runs of pages are apart in the rows (tokens) of `span`, counted from the first page's start.

        Returns:
            The largest difference of two elements, and the largest length of a difference relative to the row
            (of one head of one field) in `others`. Infinite where one is not finite.

        Raises:
            ConfigError: the rows have formats of their own.
        """
        if isinstance(self._run, RowForward):
            raise ConfigError(f"pages of family {self._decoder.config.family} are not compared row by row")
        return compare_rows(self._pools, pages, others, span)

    @torch.inference_mode()
    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN (rows of their own formats: with bytes 0xFF), so that who reads them unwritten is found
        out."""
        poison(self._pools, pages)

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, max_batch_size: int) -> None:
        """Run what steps of up to these sizes will run, on the scratch page, so that no request waits for it."""
        if isinstance(self._run, RowForward):
            self._run.warm_up(max_num_tokens, max_batch_size)
        else:
            self._warm_up(self._run, max_num_tokens, max_batch_size)
        for kv in self._pools:
            kv[SCRATCH_PAGE].zero_()

    def _warm_up(self, run: Forward, max_num_tokens: int, max_batch_size: int) -> None:
        page = np.full(-(-max_num_tokens // run.pool.tokens_per_page), SCRATCH_PAGE, np.int32)
        for tokens in sorted({padded_rows(n) for n in range(1, max_num_tokens + 1)}):
            self._forward([Row(None, np.zeros(min(tokens, max_num_tokens), np.int32), 0, page)], num_layers=1)
        token = Row(None, np.zeros(1, np.int32), 0, page)
        for rows in range(1, max_batch_size + 1):
            self._decoder.logits(self._forward([token] * rows, num_layers=1))
        self._forward([token])

    def _forward(self, rows: Sequence[Row], num_layers: int | None = None) -> torch.Tensor:
        """Hidden states [padded rows, hidden_size]; rows one behind the other."""
        if self._followers is not None:
            self._followers.run(rows, num_layers)
        return self._run(rows, num_layers)

    def _results(self, rows: Sequence[Row], hidden: torch.Tensor) -> list[RowResult]:
        ends = np.cumsum([len(row.ids) for row in rows])
        lasts = ends - 1 - np.array([row.num_drafts for row in rows])
        last = hidden[torch.from_numpy(lasts)]
        finite = last.sum(-1, dtype=torch.float32).isfinite().tolist()
        results = [RowResult(row.key, error=None if ok else NOT_FINITE) for row, ok in zip(rows, finite, strict=True)]
        wanted = [i for i, row in enumerate(rows) if row.samplers and finite[i]]
        if wanted:
            self._sample(rows, results, wanted, hidden, lasts)
        if self._drafter is not None:
            self._draft(self._drafter, rows, results, hidden, lasts)
        for row, result, end in zip(rows, results, ends.tolist(), strict=True):
            if row.prompt_logprobs is not None and result.error is None:
                first = end - len(row.ids)
                result.prompt_logprobs.extend(self._prompt_logprobs(row, hidden[first : first + row.num_kept]))
        return results

    def _sample(
        self,
        rows: Sequence[Row],
        results: Sequence[RowResult],
        wanted: Sequence[int],
        hidden: torch.Tensor,
        lasts: np.ndarray,
    ) -> None:
        """Draw for the rows numbered `wanted`: behind the last known token, for each sampler, and behind each draft.

        lasts: [rows] index into `hidden` of each row's last known token.
        """
        states: list[SamplerState] = []
        at, places, positions = [], [], []
        for i in wanted:
            row = rows[i]
            for behind in range(row.num_drafts + 1):
                for state in row.samplers:
                    states.append(state.after(behind))
                    places.append(len(at))
                    positions.append(row.start + row.num_kept + behind)
                at.append(int(lasts[i]) + behind)
        logits = self._decoder.logits(hidden[torch.tensor(at)])
        if len(places) != len(at):
            logits = logits[torch.tensor(places)]
        drawn = iter(self._sampler.sample(logits, states, positions))
        for i in wanted:
            row, result = rows[i], results[i]
            mine = [next(drawn) for _ in range(len(row.samplers) * (row.num_drafts + 1))]
            if row.num_drafts:
                mine = mine[: 1 + num_accepted(row.ids[row.num_kept :].tolist(), [token for token, _ in mine])]
            result.tokens = [token for token, _ in mine]
            result.logprobs = [logprob for _, logprob in mine]
            if NO_TOKEN in result.tokens:
                fail_undrawn(row, result)

    def _draft(
        self,
        drafter: Drafter,
        rows: Sequence[Row],
        results: Sequence[RowResult],
        hidden: torch.Tensor,
        lasts: np.ndarray,
    ) -> None:
        """Have what follows the drawn tokens guessed, for the rows that want it."""
        asked, asks = [], []
        for row, result, last in zip(rows, results, lasts.tolist(), strict=True):
            if row.want_drafts and len(row.samplers) == 1 and result.error is None:
                states = hidden[last : last + len(result.tokens)]
                asks.append(Ask(row, states, result.tokens, row.want_drafts))
                asked.append(result)
        if asks:
            vocab = self._decoder.config.vocab_size
            for result, guess in zip(asked, drafter.propose(asks), strict=True):
                if all(0 <= token < vocab for token in guess.tokens):
                    result.drafts, result.chances = guess.tokens, guess.chances

    def _prompt_logprobs(self, row: Row, hidden: torch.Tensor) -> Iterator[Logprob]:
        """hidden: [num_new, hidden_size] of this row."""
        if row.next_ids is None or row.prompt_logprobs is None:
            raise ValueError(f"row {row.key!r} wants prompt logprobs and gives no next_ids")
        known = np.flatnonzero(row.next_ids >= 0)
        for at in range(0, len(known), _PROMPT_LOGPROB_ROWS):
            positions = known[at : at + _PROMPT_LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[torch.from_numpy(positions)])
            yield from logprobs_of(logits, row.next_ids[positions].tolist(), row.prompt_logprobs)


def fail_undrawn(row: Row, result: RowResult) -> None:
    """Fail a row of which a token could not be drawn, and say why."""
    result.error = NOTHING_TO_DRAW
    for state in row.samplers:
        if state.grammar is not None and state.grammar.error is not None:
            result.error, result.code = f"the grammar failed: {state.grammar.error}", "grammar"
    result.tokens, result.logprobs = [], []


def _layout_order(row: Row) -> tuple[int, int]:
    """Decode rows first, longest first, so that neighbours share an attention group; then chunks as they came."""
    return (0, -row.start) if len(row.ids) == 1 else (1, 0)
