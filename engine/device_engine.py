"""One step over a mixed batch on a device: engine.Engine's methods over a DeviceForward, so that loops run on either.

Tokens are drawn on the device; only rows that need penalties, bias, masks, a grammar or logprobs bring their logits to
the host and its sampler. A row that cannot be computed fails alone. Pages stand in the device's memory and die with the
process, as all else here does.

It does not know requests, schedulers or peers. There are no drafts on a device: families that have them run on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.engine.device_forward import DeviceForward, Flight, Pick
from tailrace.engine.engine import NOT_FINITE, fail_undrawn
from tailrace.engine.pages import compare_rows, copy_pages, poison
from tailrace.engine.sampler import NO_TOKEN, Sampler, changes_logits, logprobs_of
from tailrace.engine.step import UNKNOWN, Logprob, Row, RowResult, SamplerState, StepPlan
from tailrace.kernels.device_sampling import RowSampling

_PROMPT_LOGPROB_ROWS = 64  # positions whose logits exist at once when a prompt's logprobs are wanted


@dataclass(slots=True)
class Launched:
    """A part of a step under way. order: of its rows, their numbers in the plan."""

    order: list[int]
    rows: list[Row]
    picks: list[Pick]
    states: list[SamplerState]
    flight: Flight


class DeviceEngine:
    """Runs steps of one decoder over one pool on a device; the methods are those of Engine."""

    def __init__(self, forward: DeviceForward) -> None:
        self._run, self._sampler = forward, Sampler()
        self._drawn: dict[object, int] = {}  # by key of the last launched rows, which pick draws their token

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> list[RowResult]:
        """Write the state of all rows' tokens, sample where asked; returns when that has ended.

        Results are in plan order. A row's failure stands in its RowResult.error and touches no other row.
        """
        results: dict[int, RowResult] = {}
        for order in self._parts(plan.rows):
            results |= self._finish(self._launch(plan.rows, order))
        return [results[i] for i in range(len(plan.rows))]

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step of rows of one token, each drawn once and by the device (gen_worker/run_ahead.py), and do not
        wait. Ids may be UNKNOWN. Between it and `collect` nothing else may be run but one more launch."""
        launched = self._launch(plan.rows, list(range(len(plan.rows))))
        self._drawn = {row.key: i for i, row in enumerate(launched.rows)}
        return launched

    @torch.inference_mode()
    def collect(self, launched: Launched) -> list[RowResult]:
        """Wait for the end of a launched step; in the order of launches. Results are in plan order."""
        results = self._finish(launched)
        return [results[i] for i in range(len(results))]

    @torch.inference_mode()
    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole pages; all of src is read before dst is written. Returns when that has ended: they may be given up
        next, and a read from a peer, on a stream of its own, may write to them then."""
        copy_pages((self._run.kv,), src, dst)
        self._run.wait()

    @torch.inference_mode()
    def compare_rows(self, pages: Sequence[int], others: Sequence[int], span: range) -> tuple[float, float]:
        """As Engine.compare_rows."""
        return compare_rows((self._run.kv,), pages, others, span)

    @torch.inference_mode()
    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, so that who reads them unwritten is found out."""
        poison((self._run.kv,), pages)
        self._run.wait()  # as above

    def warm_up(self, max_num_tokens: int, max_batch_size: int) -> None:
        """Capture what steps will run, so that no request waits for it. The sizes are those of the DeviceForward."""
        self._run.warm_up()

    # ------------------------------------------------------------------------------------------------------------ step

    def _parts(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        """The rows' numbers in launches that fit, rows of one token first."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].ids) > 1)
        if not order or self._run.fits(rows):
            yield from [order] if order else []
            return
        part: list[int] = []
        for i in order:
            if part and not self._run.fits([rows[j] for j in (*part, i)]):
                yield part
                part = []
            part.append(i)
        yield part

    def _launch(self, all_rows: Sequence[Row], order: list[int]) -> Launched:
        rows = [all_rows[i] for i in order]
        picks: list[Pick] = []
        states: list[SamplerState] = []
        for number, row in enumerate(rows):
            if row.num_drafts:
                raise ValueError(f"row {row.key!r} carries drafts, and there are none on a device")
            for state in row.samplers:
                if state.grammar is not None:
                    state.grammar.begin()
                picks.append(Pick(number, _draw_of(state, row.start + len(row.ids))))
                states.append(state)
        feed = [(i, self._drawn[row.key]) for i, row in enumerate(rows) if row.ids[0] == UNKNOWN]
        return Launched(order, rows, picks, states, self._run.launch(rows, picks, feed))

    def _finish(self, part: Launched) -> dict[int, RowResult]:
        """By number in the plan."""
        tokens, finite = self._run.fetch(part.flight)
        results = [
            RowResult(row.key, error=None if ok else NOT_FINITE) for row, ok in zip(part.rows, finite, strict=True)
        ]
        drawn: list[tuple[int, Logprob | None]] = [(token, None) for token in tokens]
        self._draw_on_host(part, drawn, [i for i, p in enumerate(part.picks) if p.draw is None and finite[p.row]])
        for pick, (token, logprob) in zip(part.picks, drawn, strict=True):
            if finite[pick.row]:
                results[pick.row].tokens.append(token)
                results[pick.row].logprobs.append(logprob)
        for row, result, last in zip(part.rows, results, part.flight.lasts.tolist(), strict=True):
            if NO_TOKEN in result.tokens:
                fail_undrawn(row, result)
            if row.prompt_logprobs is not None and result.error is None:
                result.prompt_logprobs.extend(self._prompt_logprobs(row, last + 1 - len(row.ids)))
        return dict(zip(part.order, results, strict=True))

    def _draw_on_host(self, part: Launched, drawn: list[tuple[int, Logprob | None]], at: Sequence[int]) -> None:
        """Draw for the picks numbered `at`, from their logits, into `drawn`."""
        if not at:
            return
        logits = self._run.logits[torch.tensor(at, device=self._run.kv.device)].cpu()
        rows = [part.rows[part.picks[i].row] for i in at]
        positions = [row.start + len(row.ids) for row in rows]
        found = self._sampler.sample(logits, [part.states[i] for i in at], positions)
        for i, token in zip(at, found, strict=True):
            drawn[i] = token

    def _prompt_logprobs(self, row: Row, first: int) -> Iterator[Logprob]:
        """first: where the row's first token stands in the hidden states."""
        if row.next_ids is None or row.prompt_logprobs is None:
            raise ValueError(f"row {row.key!r} wants prompt logprobs and gives no next_ids")
        known = np.flatnonzero(row.next_ids >= 0)
        hidden = self._run.hidden
        for at in range(0, len(known), _PROMPT_LOGPROB_ROWS):
            positions = known[at : at + _PROMPT_LOGPROB_ROWS]
            states = hidden[torch.from_numpy(first + positions).to(hidden.device)]
            logits = self._run.decoder.logits(states).cpu()
            yield from logprobs_of(logits, row.next_ids[positions].tolist(), row.prompt_logprobs)


def _draw_of(state: SamplerState, position: int) -> RowSampling | None:
    """How the device draws the token at `position`; None: it is the host's to draw."""
    params = state.params
    if params.logprobs is not None or changes_logits(state):
        return None
    if params.greedy:
        return _GREEDY
    return RowSampling(
        params.temperature, params.top_k, params.top_p, params.min_p, params.seed, position, state.sample
    )


_GREEDY = RowSampling()
