"""Predicted waits, from what is claimed and who waits: admission, Retry-After, deadlines and scaling all read these.

    wait for the first token  =  longest of {prefill ahead, gen pages, rows of gens' batches}  +  the prefill itself

Prefill ahead of a request at a worker is what goes before it there: a ctx computes the shortest first, so of each
prompt outstanding no more than the request's own length counts. Pages and rows come back at the rate of Little's law:
all there are, over the time that a request holds its own. Decides nothing; a wrong prediction costs an early refusal or
a longer wait, both bounded by the settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tailrace.router.admission import Needs, next_grant_s
from tailrace.router.records import Record, RouterState
from tailrace.router.worker import Usable, Worker

PASSES_AHEAD = 2  # one runs, one waits for it: then no ctx is idle between its passes
MIN_AHEAD_S = 0.05  # what word of a free ctx, and the next prompt's way to it, may take


@dataclass(frozen=True, slots=True)
class Prospect:
    """Seconds. `grant_s`: until it is placed. `wait_s`: until its own prefill begins. `prefill_s`: that prefill."""

    grant_s: float
    wait_s: float
    prefill_s: float

    @property
    def first_token_s(self) -> float:
        return self.wait_s + self.prefill_s


class Prospects:
    """Predictions over the shared state."""

    def __init__(self, state: RouterState) -> None:
        self.state = state

    def ahead_s(self, worker: Worker, num_tokens: int, all_s: float) -> float:
        """Predicted seconds until a prompt with so many tokens to compute would begin there. `all_s`: of all that is
        outstanding."""
        state = self.state
        claimed = state.prefill.total(worker.boot)
        if claimed <= num_tokens:
            return all_s
        before = sum(min(amount, num_tokens) for amount in state.prefill.amounts(worker.boot))
        return all_s - state.claimed_s(worker) * (1 - before / claimed)

    def given_ahead_s(self, worker: Worker) -> float:
        """Seconds of prefill that a worker is given before it needs them; what waits longer is ordered here."""
        passes_s = PASSES_AHEAD * self.state.workers.predicted_s(worker, worker.register.max_num_tokens)
        return min(self.state.settings.max_backlog_s, max(MIN_AHEAD_S, passes_s))

    def prefill_s(self, num_tokens: int, workers: Sequence[Worker], cached: int = 0) -> float:
        """Of a prompt alone of which so much is `cached`, the mean over these workers; 0 without any."""
        predicted_s = self.state.workers.predicted_s
        return sum(predicted_s(w, num_tokens - cached, cached) for w in workers) / max(len(workers), 1)

    def needs(self, record: Record, now: float) -> Needs:
        """What a request that waits will take."""
        gens = self.state.workers.decoders(now)
        workers = self.state.workers.prefillers(now) or gens
        prefill_s = self.prefill_s(record.place.num_tokens, workers, self._most_cached(record, workers))
        return Needs(prefill_s, self.pages(record, gens), record.rows, record.cost)

    def next_grant_s(self, now: float, record: Record | None = None) -> float:
        """Predicted time until a request that comes now is placed; what Retry-After and scaling read."""
        return self.of(now, record).grant_s

    def of(self, now: float, record: Record | None = None, ahead: Needs | None = None) -> Prospect:
        """For a request that comes now, or for one before which `ahead` waits; None: a small one, behind all others."""
        state = self.state
        gens = state.workers.decoders(now)
        workers = state.workers.prefillers(now) or gens
        if not workers or not gens:
            away_s = state.workers.back_in_s(("ctx", "gen", "both"), now)
            return Prospect(away_s, away_s, 0.0)
        if ahead is None:
            ahead = state.queue.needs if record is None else state.queue.ahead_of(record.tenant, record.place.priority)
        tokens = 1 if record is None else record.place.num_tokens
        held = self._held(record)
        backlogs = [
            (self.ahead_s(worker, tokens - held(worker.boot), state.backlog_s(worker)), worker) for worker in workers
        ]
        least_s, least = min(backlogs, key=lambda pair: pair[0])
        pages, rows = (1, 1) if record is None else (self.pages(record, gens), record.rows)
        free_rows = state.free_rows(gens)
        limits = {
            "waiting_s": ahead.prefill_s / len(workers),
            "missing_pages": pages + ahead.pages - state.pool_pages(gens) if pages else 0,
            "pages_per_s": self._back_per_s(sum(g.register.total_pages for g in gens)),
            "missing_rows": rows + ahead.rows - free_rows if rows else 0,
            "rows_per_s": self._back_per_s(state.row_capacity(gens)),
        }
        grant_s = next_grant_s(least_backlog_s=least_s, max_backlog_s=self.given_ahead_s(least), **limits)
        wait_s = next_grant_s(least_backlog_s=least_s, max_backlog_s=0.0, **limits)
        prefill_s = min(state.workers.predicted_s(w, tokens - (h := held(w.boot)), h) for w in workers)
        return Prospect(grant_s, wait_s, prefill_s)

    def _held(self, record: Record | None) -> Callable[[str], int]:
        """How many tokens of a request a worker holds, or will when it comes to it."""
        if record is None:
            return lambda boot: 0
        found, a_block = self.state.find_cached(record.place), self.state.block_tokens
        return lambda boot: found.blocks(boot) * a_block if found.levels else 0

    def _most_cached(self, record: Record, workers: Usable) -> int:
        """Of the tokens of a request, those that the worker holds which has most: it will likely be placed there."""
        state = self.state
        for level in state.find_cached(record.place).levels:
            if any(boot in workers.boots for boot in state.blocks.boots(level.mask)):
                return level.blocks * state.block_tokens
        return 0

    def pages(self, record: Record, gens: Usable) -> int:
        """Gen pages of a request, in the pool's page size; 0 if it needs no gen or none is there."""
        if not gens or not record.needs_gen:
            return 0
        return self.state.most_pages(record.place.num_tokens, record.place.samples, gens)

    def _back_per_s(self, capacity: float) -> float:
        """How fast something comes back of which requests hold `capacity` at most; 0: not known."""
        held_s = self.state.held_s.value
        if held_s is None or math.isinf(capacity):
            return 0.0
        return capacity / max(held_s, 1e-3)
