"""What the router keeps up to date about its workers, computed anew from the workers themselves."""

from __future__ import annotations

import math

import pytest

from tailrace.router.ledger import POOL
from tailrace.router.prefill_fit import plain
from tailrace.router.records import MIN_ROWS_AHEAD, ROWS_AHEAD
from tailrace.router.shortlist import FAR
from tailrace.router.workers import DEFAULT_PREFILL_TOKENS_PER_S


def usable(table, now, duty):
    there = [w for w in table if getattr(w, duty) and table.breakers.admits(w.name, now)]
    ready = [w for w in there if w.condition(now, table.settings) == "ready"]
    return ready or [w for w in there if w.condition(now, table.settings) == "silent"]


def rate(table, worker):
    known = [w.measured_rate for w in table if w.register.duty == worker.register.duty if w.measured_rate]
    known = known or [w.measured_rate for w in table if w.measured_rate] or [DEFAULT_PREFILL_TOKENS_PER_S]
    mean, own = sum(known) / len(known), worker.measured_rate
    return mean, own if own and not mean / 2 <= own <= mean * 2 else mean


def coefficients(table, worker):
    if worker.fit.known:
        return worker.fit.known
    mean, own = rate(table, worker)
    fit = table._fits.get(worker.register.duty) or next(iter(table._fits.values()), None)
    if fit is None:
        return plain(own)
    return tuple(mean / own * each for each in fit.known or plain(own))


def assert_as_computed_anew(state, now):
    table = state.workers
    for duty, asked in (("decodes", table.decoders), ("prefills", table.prefillers)):
        assert list(asked(now)) == usable(table, now, duty)
    for worker in table:
        assert table.rate(worker) == pytest.approx(rate(table, worker)[1], rel=1e-9)
        assert table.coefficients(worker) == pytest.approx(coefficients(table, worker), rel=1e-9)
        assert (worker.boot in table.with_foreign) == bool(worker.foreign)
    for worker in table:
        known = bool(table._fits) or any(w.measured_rate for w in table)
        assert (table.measured(worker) is not None) == known
    assert all(worker in list(table) for worker in table.with_foreign.values())
    gens = table.decoders(now)
    needs = [held.needs for w in table for held in w.foreign.values() if held.needs > 0]
    foreign = sum(max((gen.pages_for(tokens, 1) for gen in gens), default=0) for tokens in needs)
    assert state.pool_pages(gens) == sum(map(state.free_pages, gens)) - state.pages.total(POOL) - foreign
    rows = math.inf
    if all(gen.register.max_batch_size for gen in gens):
        rows = sum(gen.register.max_batch_size for gen in gens)
        rows += max(MIN_ROWS_AHEAD, rows // ROWS_AHEAD)
    assert state.free_rows(gens) == rows - state.rows.sum - sum(len(gen.foreign) for gen in gens)
    for worker in table:
        assert set(table.readers(worker.boot)) == {w.boot for w in table if worker.boot in w.pairs}
        assert state.has_reader(worker, gens) == any(state.paired(gen, worker.boot) for gen in gens)
    state.refresh_shortlists()
    for each in state.shortlists:
        assert each._order == sorted(each._keys.values())
        assert each._bits == [each._bit_of[key[-1]] for key in each._order]
        assert each._window == sum(each._bits[:FAR])
        assert each._at == {bit.bit_length(): key for key, bit in zip(each._order, each._bits, strict=True) if bit}
        for boot, key in each._keys.items():
            told = each._key_of(boot) if not state.prefill.total(boot) else None  # else beliefs that change move it
            assert told is None or told == key
    shortlist = state.shortlist
    for boot, key in shortlist._keys.items():
        if (worker := table.get(boot)) is not None and (worker.fit.known or not state.prefill.total(boot)):
            assert key == state._load(boot)
