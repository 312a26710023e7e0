"""One step over a mixed batch on the CPU: lay out, forward, sample. The only room where tensors meet sequences' pages.

It does not know requests, schedulers or peers: rows come in a StepPlan and go out as RowResults. A row that cannot be
computed (its pages hold NaN, say) fails alone. When the process dies nothing here is worth saving: pages stand in the
arena, all else is rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from tailrace.engine.sampler import NO_TOKEN, Sampler, logprobs_of
from tailrace.engine.step import Logprob, Row, RowResult, SamplerState, StepPlan
from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.kv_cache.layout import SCRATCH_PAGE, PageLayout
from tailrace.model.decoder import Decoder
from tailrace.model.errors import ConfigError
from tailrace.model.linear import ONE_THREAD_ROWS

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NOT_FINITE = "the state of this request is not finite: a page it read holds NaN or infinity"
NOTHING_TO_DRAW = "no token can be drawn: every logit is -inf or NaN after penalties and bias"

_PROMPT_LOGPROB_ROWS = 64  # positions whose logits exist at once when a prompt's logprobs are wanted
# Threads sleep between operators (cluster/rank.py), and waking two for a small one costs more than the second saves;
# the products of a large step wake them themselves (model/linear.py).
_FEW_THREADS = 2


def pool_tensor(pages: np.ndarray, layout: PageLayout) -> torch.Tensor:
    """Pages [num_pages, bytes_per_page] uint8 as [num_pages, layer, field, kv_head, token, dim], shared."""
    return torch.from_numpy(pages).view(TORCH_DTYPES[layout.dtype]).view(len(pages), *layout.shape)


def padded_rows(rows: int) -> int:
    """Rows a step is padded to. Matrix kernels are compiled for each number of rows, some ms each, so there are few."""
    if rows <= 4:
        return rows
    step = 2 if rows <= 8 else 4 if rows <= 32 else 32
    return -(-rows // step) * step


class Engine:
    """Runs steps of one decoder over one pool.

    Args:
        decoder: the model.
        kv: [num_pages, layer, field, kv_head, token, dim] in the decoder's dtype; page 0 is scratch.
        threads: of large steps and the output projection; those that torch has now if None. Small steps use one.
    """

    def __init__(self, decoder: Decoder, kv: torch.Tensor, *, threads: int | None = None) -> None:
        config = decoder.config
        want = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        have = (*kv.shape[1:4], kv.shape[5])
        if have != want or kv.dtype != decoder.dtype:
            raise ConfigError(f"pages are {have} {kv.dtype}, the model needs {want} {decoder.dtype}")
        self._decoder, self._pool = decoder, PagedPool(kv)
        self._sampler = Sampler()
        self._threads = threads or torch.get_num_threads()
        kv[SCRATCH_PAGE].zero_()

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> list[RowResult]:
        """Write the state of all rows' tokens, sample where asked.

        Results are in plan order. A row's failure stands in its RowResult.error and touches no other row.
        """
        if not plan.rows:
            return []
        order = sorted(range(len(plan.rows)), key=lambda i: _layout_order(plan.rows[i]))
        rows = [plan.rows[i] for i in order]
        hidden = self._forward(rows)
        results = self._results(rows, hidden)
        by_plan = dict(zip(order, results, strict=True))
        return [by_plan[i] for i in range(len(order))]

    @torch.inference_mode()
    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole pages; all of src is read before dst is written."""
        self._pool.kv[torch.tensor(dst, dtype=torch.int64)] = self._pool.kv[torch.tensor(src, dtype=torch.int64)]

    @torch.inference_mode()
    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that who reads them unwritten is found out."""
        for page in pages:
            self._pool.kv[page].fill_(torch.nan)

    @torch.inference_mode()
    def warm_up(self, max_num_tokens: int, max_batch_size: int) -> None:
        """Run what steps of up to these sizes will run, on the scratch page, so that no request waits for it."""
        page = np.full(-(-max_num_tokens // self._pool.tokens_per_page), SCRATCH_PAGE, np.int32)
        for tokens in sorted({padded_rows(n) for n in range(1, max_num_tokens + 1)}):
            self._forward([Row(None, np.zeros(min(tokens, max_num_tokens), np.int32), 0, page)], num_layers=1)
        token = Row(None, np.zeros(1, np.int32), 0, page)
        for rows in range(1, max_batch_size + 1):
            self._decoder.logits(self._forward([token] * rows, num_layers=1))
        self._forward([token])
        self._pool.kv[SCRATCH_PAGE].zero_()

    def _forward(self, rows: Sequence[Row], num_layers: int | None = None) -> torch.Tensor:
        """Hidden states [padded rows, hidden_size]; rows one behind the other."""
        spans = [RowSpan(row.start, len(row.ids), row.pages) for row in rows]
        attention = plan_attention(self._pool, spans, self._decoder.windows)
        num_tokens = attention.num_tokens
        ids = np.zeros(padded_rows(num_tokens), np.int64)
        positions = np.zeros(len(ids), np.int64)
        np.concatenate([row.ids for row in rows], out=ids[:num_tokens])
        np.concatenate([np.arange(s.start, s.start + s.num_new) for s in spans], out=positions[:num_tokens])
        self._pool.clear_fresh(spans)
        one = num_tokens <= ONE_THREAD_ROWS or self._threads <= _FEW_THREADS
        torch.set_num_threads(1 if one else self._threads)
        hidden = self._decoder.forward(
            torch.from_numpy(ids), torch.from_numpy(positions), self._pool, attention, num_layers
        )
        torch.set_num_threads(self._threads)
        return hidden

    def _results(self, rows: Sequence[Row], hidden: torch.Tensor) -> list[RowResult]:
        ends = np.cumsum([len(row.ids) for row in rows])
        last = hidden[torch.from_numpy(ends - 1)]
        finite = last.sum(-1, dtype=torch.float32).isfinite().tolist()
        results = [RowResult(row.key, error=None if ok else NOT_FINITE) for row, ok in zip(rows, finite, strict=True)]
        wanted = [i for i, row in enumerate(rows) if row.samplers and finite[i]]
        if wanted:
            self._sample(rows, results, wanted, last)
        for row, result, end in zip(rows, results, ends.tolist(), strict=True):
            if row.prompt_logprobs is not None and result.error is None:
                result.prompt_logprobs.extend(self._prompt_logprobs(row, hidden[end - len(row.ids) : end]))
        return results

    def _sample(
        self, rows: Sequence[Row], results: Sequence[RowResult], wanted: Sequence[int], last: torch.Tensor
    ) -> None:
        """Draw for the rows numbered `wanted`; each row's samplers share its logits."""
        logits = self._decoder.logits(last if len(wanted) == len(last) else last[torch.tensor(wanted)])
        states: list[SamplerState] = []
        repeats, positions = [], []
        for at, i in enumerate(wanted):
            row = rows[i]
            states += row.samplers
            repeats += [at] * len(row.samplers)
            positions += [row.start + len(row.ids)] * len(row.samplers)
        if len(repeats) != len(logits):
            logits = logits[torch.tensor(repeats)]
        drawn = iter(self._sampler.sample(logits, states, positions))
        for i in wanted:
            for _ in rows[i].samplers:
                token, logprob = next(drawn)
                if token == NO_TOKEN:
                    results[i].error = NOTHING_TO_DRAW
                results[i].tokens.append(token)
                results[i].logprobs.append(logprob)
            if results[i].error is not None:
                results[i].tokens.clear()
                results[i].logprobs.clear()

    def _prompt_logprobs(self, row: Row, hidden: torch.Tensor) -> Iterator[Logprob]:
        """hidden: [num_new, hidden_size] of this row."""
        if row.next_ids is None or row.prompt_logprobs is None:
            raise ValueError(f"row {row.key!r} wants prompt logprobs and gives no next_ids")
        known = np.flatnonzero(row.next_ids >= 0)
        for at in range(0, len(known), _PROMPT_LOGPROB_ROWS):
            positions = known[at : at + _PROMPT_LOGPROB_ROWS]
            logits = self._decoder.logits(hidden[torch.from_numpy(positions)])
            yield from logprobs_of(logits, row.next_ids[positions].tolist(), row.prompt_logprobs)


def _layout_order(row: Row) -> tuple[int, int]:
    """Decode rows first, longest first, so that neighbours share an attention group; then chunks as they came."""
    return (0, -row.start) if len(row.ids) == 1 else (1, 0)
