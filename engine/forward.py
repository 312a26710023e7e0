"""The forward pass of one rank over a mixed batch: lay out, run the decoder. Every rank of a worker runs the same one.

It does not know samplers, requests or other ranks: the decoder adds the ranks' parts up by itself. Dies with its rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from tailrace.engine.halves import Between, Halves, in_halves
from tailrace.engine.step import Row
from tailrace.engine.thread_choice import ThreadChoice
from tailrace.kernels.paged_attention import PagedPool, RowSpan, plan_attention
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.decoder import Decoder
from tailrace.model.errors import ConfigError
from tailrace.model.linear import ONE_THREAD_ROWS

# Threads sleep between operators (cluster/rank.py), and waking two for a small one may cost more than the second saves;
# the products of a middling step wake them themselves (model/linear.py), a large step runs in halves.
_FEW_THREADS = 2


def padded_rows(rows: int) -> int:
    """Rows a step is padded to. Matrix kernels are compiled for each number of rows, some ms each, so there are few."""
    if rows <= 4:
        return rows
    step = 2 if rows <= 8 else 4 if rows <= 32 else 32
    return -(-rows // step) * step


class Forward:
    """Runs one rank's decoder over its pages.

    Args:
        decoder: the model, or this rank's share of it.
        kv: [num_pages, layer, field, kv_head of this rank, token, dim] in the decoder's dtype; page 0 is scratch.
        threads: of large steps; those that torch has now if None. Small steps use one or all, by what is faster.
    """

    def __init__(self, decoder: Decoder, kv: torch.Tensor, *, threads: int | None = None) -> None:
        config = decoder.config
        want = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        have = (*kv.shape[1:4], kv.shape[5])
        if have != want or kv.dtype != decoder.dtype:
            raise ConfigError(f"pages are {have} {kv.dtype}, the model needs {want} {decoder.dtype}")
        self.decoder, self.pool = decoder, PagedPool(kv)
        self._threads = threads or torch.get_num_threads()
        self._small = ThreadChoice(1, self._threads)
        # The sums over ranks come in one order in all ranks, so there are no halves that would mix theirs.
        self._halves = Halves() if self._threads == _FEW_THREADS and decoder.is_whole else None
        kv[SCRATCH_PAGE].zero_()

    def __call__(self, rows: Sequence[Row], num_layers: int | None = None) -> torch.Tensor:
        """Write the state of all rows' tokens.

        Args:
            rows: those of one token first. Their samplers play no part.
            num_layers: as in Decoder.forward.

        Returns:
            [tokens or more, hidden_size], rows one behind the other.
        """
        halves = None if self._halves is None else in_halves(rows)
        for part in halves or (rows,):  # before either half writes: they may share a page
            self.pool.clear_fresh(_spans(part))
        if self._halves is None or halves is None:
            return self._run(rows, None, num_layers)[0]

        def run_half(half: Sequence[Row], between: Between) -> torch.Tensor:
            hidden, num_tokens = self._run(half, between, num_layers)
            return hidden[:num_tokens]

        return self._halves.run(halves, run_half)

    def _run(self, rows: Sequence[Row], between: Between | None, num_layers: int | None) -> tuple[torch.Tensor, int]:
        """[padded rows, hidden_size] and the number of rows that count. `between` as in Decoder.forward."""
        spans = _spans(rows)
        num_tokens = sum(span.num_new for span in spans)
        few = num_tokens <= self.decoder.max_few
        ids = np.zeros(num_tokens if few else padded_rows(num_tokens), np.int64)
        np.concatenate([row.ids for row in rows], out=ids[:num_tokens])
        if few:
            return self._run_few(torch.from_numpy(ids), spans, num_layers), num_tokens
        attention = plan_attention(self.pool, spans, self.decoder.windows)
        positions = np.zeros(len(ids), np.int64)
        np.concatenate([np.arange(s.start, s.start + s.num_new) for s in spans], out=positions[:num_tokens])
        small = num_tokens <= ONE_THREAD_ROWS
        threads = self._small.threads if small else 1 if self._threads <= _FEW_THREADS else self._threads
        torch.set_num_threads(threads)
        began = time.perf_counter()
        hidden = self.decoder.forward(
            torch.from_numpy(ids), torch.from_numpy(positions), self.pool, attention, num_layers, between
        )
        if small and num_layers is None:
            self._small.took(num_tokens, time.perf_counter() - began)
        torch.set_num_threads(self._threads)
        return hidden, num_tokens

    def _run_few(self, ids: torch.Tensor, spans: Sequence[RowSpan], num_layers: int | None) -> torch.Tensor:
        """A step that the decoder runs in one native call. One row is one thread's work."""
        threads = self._small.threads if len(spans) > 1 else 1
        began = time.perf_counter()
        hidden = self.decoder.forward_few(ids, spans, self.pool, num_layers, threads)
        if len(spans) > 1 and num_layers is None:
            self._small.took(len(ids), time.perf_counter() - began)
        return hidden


def _spans(rows: Sequence[Row]) -> list[RowSpan]:
    return [RowSpan(row.start, len(row.ids), row.pages, row.num_drafts) for row in rows]
