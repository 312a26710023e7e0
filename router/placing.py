"""Admission and the choice of the first leg: a ctx, or a gen that prefills itself, or refusal, or waiting.

Claims on both legs are made here, at the moment of choice, so that a burst sees its own picks. What cannot be placed
now waits in order (admission.py) unless it never can be, or would wait too long: then it is refused at once, with the
time to the next grant. Knows how much is free only by what the workers last said; a wrong guess costs a `not_now`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from tailrace.router.admission import MAX_RETRY_S, next_grant_s, retry_after_s
from tailrace.router.ledger import POOL
from tailrace.router.policies import POLICIES, PrefillCandidate, auto_local_tokens
from tailrace.router.records import Record, RouterState
from tailrace.router.workers import Worker
from tailrace.transfer.messages import Place
from tailrace.transfer.request_state import Event

log = logging.getLogger(__name__)

HANDOFF_OVERHEAD_S = 0.01  # what a hand-off costs beside its bytes: frames, bind, release
WANTED_BACKLOG_S = 0.5  # a ctx without a pair is given one if all that have one are behind by this much


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. why: starting | gen_lost | ctx_lost | pages | prefill | no_pair."""

    why: str


@dataclass(frozen=True, slots=True)
class Never:
    """Refuse. `retry_s`: when asking again makes sense."""

    reason: str
    retry_s: float


class Placer:
    """Places requests on the shared state. `place` and `pump` are called by the core."""

    def __init__(self, state: RouterState) -> None:
        self.state = state
        self.policy = POLICIES[state.settings.placement]

    # ------------------------------------------------------------------------------------------------------------ place

    def place(self, frame: Place, ingress: str, now: float) -> None:
        state, key = self.state, (frame.request, frame.attempt)
        known = state.records.get(key)
        if known is not None:
            self._answer_again(known, frame, ingress)
            return
        record = Record(frame, ingress, now)
        if frame.at:
            self._take_over(record)
            return
        state.keep(record)
        if frame.deaths >= state.settings.max_worker_deaths_per_request:
            shape = {"tokens": frame.num_tokens, "max_new_tokens": frame.max_new_tokens, "samples": frame.samples}
            log.error("request_killed_workers", extra={"fields": {"request": frame.request, **shape}})
            state.refuse(record, "worker_deaths", 1.0)
            return
        result = Wait("prefill") if len(state.queue) else self._try(record, now)
        if isinstance(result, Never):
            state.refuse(record, result.reason, retry_after_s(result.retry_s))
        elif isinstance(result, Wait):
            self._enqueue(record, now)

    def _answer_again(self, record: Record, frame: Place, ingress: str) -> None:
        """The ingress lost our answer, or its link: no second claim."""
        state = self.state
        if ingress != record.ingress:
            return
        first, gen = state.workers.get(record.worker), state.workers.get(record.gen)
        if record.leg and first is not None and not frame.at:
            state.tell_placed(record, record.leg, first)
        if record.leg == "prefill" and gen is not None:
            state.tell_placed(record, "decode", gen)

    def _take_over(self, record: Record) -> None:
        """A former router placed it and bound no gen: go on from what its ctx says."""
        state, at = self.state, record.place.at
        if state.workers.is_dead(at):
            state.keep(record)
            state.refuse(record, "bind_failed", retry_after_s(0.0))
            return
        record.leg, record.worker = "prefill", at
        record.note(Event.PLACE)
        ctx = state.workers.get(at)
        progress = ctx.foreign_progress.pop(record.key, None) if ctx is not None else None
        state.keep(record)
        state.prefill.claim(record.key, at, record.place.num_tokens)
        if record.needs_gen:
            self._claim_pages(record, self.state.workers.decoders(state.clock()), POOL)
        record.progress = progress

    def _enqueue(self, record: Record, now: float) -> None:
        state = self.state
        wait_s = self.next_grant_s(now, record)
        deadline_s = record.place.deadline_s
        if state.queue.full or wait_s > state.settings.max_wait_s:
            state.refuse(record, "queue_full", retry_after_s(wait_s))
        elif deadline_s is not None and wait_s > deadline_s:
            state.refuse(record, "deadline", retry_after_s(wait_s))
        else:
            frame = record.place
            pages = self._pages(record, state.workers.decoders(now))
            state.queue.add(record.key, frame.priority, now, frame.num_tokens, pages)

    def pump(self, now: float) -> None:
        """Place from the head of the queue as long as it fits."""
        state = self.state
        while (key := state.queue.head()) is not None:
            record = state.records[key]
            result = self._try(record, now)
            if isinstance(result, Wait):
                return
            state.queue.remove(key)
            if isinstance(result, Never):
                state.refuse(record, result.reason, retry_after_s(result.retry_s))

    def expire(self, now: float) -> None:
        """Refuse those who have waited too long, or whose deadline has passed."""
        state = self.state
        for key, since in state.queue.waiting():
            record = state.records[key]
            deadline_s = record.place.deadline_s
            if deadline_s is not None and now - since > deadline_s:
                state.refuse(record, "deadline", retry_after_s(self.next_grant_s(now, record)))
            elif now - since > state.settings.max_wait_s:
                state.refuse(record, "queue_full", retry_after_s(self.next_grant_s(now, record)))

    # ------------------------------------------------------------------------------------------------------- one choice

    def _try(self, record: Record, now: float) -> Wait | Never | None:
        """Place a record (None), or say why not."""
        state = self.state
        if not state.serving(now):
            return Wait("starting")
        gens = state.workers.decoders(now)
        if not gens:
            if any(w.decodes and not w.linked for w in state.workers):
                return Wait("gen_lost")
            return Never("no_gen", state.workers.back_in_s(("gen", "both"), now))
        needed = self._pages(record, gens)
        if record.needs_gen and all(self._too_large(record, gen) for gen in gens):
            return Never("too_large", MAX_RETRY_S)
        if record.needs_gen and state.pool_pages(gens) < needed:
            return Wait("pages")
        if self._local_is_better(record, gens):
            of_duty_gen = [g for g in gens if not g.prefills]
            if of_duty_gen and self._place_local(record, of_duty_gen, "chosen") is None:
                return None
        return self._place_prefill(record, gens, now)

    def _too_large(self, record: Record, worker: Worker) -> bool:
        samples = record.place.samples if worker.decodes else 1
        return worker.pages_for(record.place.num_tokens, samples) > worker.register.total_pages

    def _place_prefill(self, record: Record, gens: list[Worker], now: float) -> Wait | Never | None:
        state, settings = self.state, self.state.settings
        workers = state.workers.prefillers(now)
        ctxs = [w for w in workers if not w.decodes]
        boths = [w for w in workers if w.decodes]
        usable = ctxs
        if record.needs_gen:
            usable = [c for c in ctxs if any(state.paired(g, c.boot) for g in gens)]
            if min(map(self.backlog_s, usable), default=math.inf) > WANTED_BACKLOG_S:
                state.wanted.update(c.boot for c in ctxs if c not in usable)
        candidates = usable + boths
        if not candidates:
            if ctxs:
                no_pair = now - record.since >= settings.pair_wait_s
                return Never("no_pair", settings.pair_wait_s) if no_pair else Wait("no_pair")
            if any(w.prefills and not w.linked for w in state.workers):
                return Wait("ctx_lost")
            if settings.local_prefill == "never":
                return Never("no_ctx", state.workers.back_in_s(("ctx", "both"), now))
            return self._place_local(record, gens, "fallback")
        candidates = [w for w in candidates if not self._too_large(record, w)]
        if not candidates:
            return Never("too_large", MAX_RETRY_S)
        candidates = [w for w in candidates if w.boot not in record.place.exclude] or candidates
        candidates = [w for w in candidates if self.backlog_s(w) <= settings.max_backlog_s]
        chosen = self._choose(candidates, record.place.num_tokens)
        if chosen is None:
            return Wait("prefill")
        if chosen.decodes:
            return self._place_local(record, [chosen], "")
        self._claim(record, "prefill", chosen, gens)
        return None

    def _local_is_better(self, record: Record, gens: list[Worker]) -> bool:
        settings = self.state.settings
        if settings.local_prefill == "never" or not record.needs_gen:
            return False
        most = settings.local_prefill_max_tokens
        if most is None:
            gen = max(gens, key=lambda g: g.transfer_rate)
            most = auto_local_tokens(
                gen.measured_rate or self._known_rate(), gen.transfer_rate, gen.bytes_per_token,
                HANDOFF_OVERHEAD_S, gen.register.max_num_tokens,
            )  # fmt: skip
        return record.place.num_tokens <= most

    def _known_rate(self) -> float:
        return max((w.measured_rate for w in self.state.workers), default=0.0)

    def _place_local(self, record: Record, gens: list[Worker], reason: str) -> Wait | None:
        """One gen does both legs. reason: chosen | fallback, counted; empty for a worker of duty both."""
        state, frame = self.state, record.place
        gens = [g for g in gens if g.boot not in frame.exclude] or gens
        roomy = [g for g in gens if state.free_pages(g) >= g.pages_for(frame.num_tokens, frame.samples)]
        if not roomy:
            return Wait("pages")
        if self.backlog_s(min(roomy, key=self.backlog_s)) > state.settings.max_backlog_s:
            return Wait("prefill")
        chosen = min(roomy, key=lambda g: (self.backlog_s(g), state.active(g), g.last_chosen))
        if reason:
            state.counters[f"local_{reason}"] += 1
            if reason == "fallback":
                log.warning("local_prefill_fallback", extra={"fields": {"request": frame.request, "gen": chosen.name}})
        self._claim(record, "local", chosen, [chosen])
        return None

    def _choose(self, workers: list[Worker], num_tokens: int) -> Worker | None:
        if not workers:
            return None
        candidates = []
        for worker in workers:
            rate = self.state.workers.rate(worker)
            left = self.state.tokens_left(worker, rate)
            candidates.append(PrefillCandidate(worker.boot, left, rate, worker.last_chosen))
        return self.state.workers.get(self.policy(candidates, num_tokens))

    def _claim(self, record: Record, leg: str, worker: Worker, gens: list[Worker]) -> None:
        state, key = self.state, record.key
        record.leg, record.worker = leg, worker.boot
        record.note(Event.PLACE)
        state.prefill.claim(key, worker.boot, record.place.num_tokens)
        if leg == "local":
            record.gen = worker.boot
            state.seats.claim(key, worker.boot, 1)
            self._claim_pages(record, gens, worker.boot)
        elif record.needs_gen:
            self._claim_pages(record, gens, POOL)
        state.chosen(worker)
        state.tell_placed(record, leg, worker)

    def _claim_pages(self, record: Record, gens: list[Worker], holder: str) -> None:
        frame = record.place
        record.pages = max((g.pages_for(frame.num_tokens, frame.samples) for g in gens), default=0)
        self.state.pages.claim(record.key, holder, record.pages)

    def _pages(self, record: Record, gens: list[Worker]) -> int:
        """Gen pages of a request, in the pool's page size; 0 if it needs no gen or none is there."""
        if not gens or not record.needs_gen:
            return 0
        return max(w.pages_for(record.place.num_tokens, record.place.samples) for w in gens)

    # ------------------------------------------------------------------------------------------------------ predictions

    def backlog_s(self, worker: Worker) -> float:
        """Predicted seconds of prefill outstanding at a worker."""
        rate = self.state.workers.rate(worker)
        return self.state.tokens_left(worker, rate) / rate

    def next_grant_s(self, now: float, record: Record | None = None) -> float:
        """Predicted time until a request that comes now is placed; what Retry-After and scaling read."""
        state = self.state
        gens = state.workers.decoders(now)
        workers = state.workers.prefillers(now) or gens
        if not workers or not gens:
            return state.workers.back_in_s(("ctx", "gen", "both"), now)
        rate = sum(map(state.workers.rate, workers))
        needed = self._pages(record, gens) if record is not None else 1
        pages_per_s = state.pages_back.per_s(now)
        if pages_per_s:  # few pages have come back where few were taken: that alone must refuse nobody
            total = sum(g.register.total_pages for g in gens)
            pages_per_s = max(pages_per_s, total / state.settings.max_wait_s)
        return next_grant_s(
            least_backlog_s=min(map(self.backlog_s, workers)),
            max_backlog_s=state.settings.max_backlog_s,
            waiting_s=state.queue.num_tokens / rate if rate > 0 else math.inf,
            missing_pages=needed + state.queue.needed_pages - state.pool_pages(gens),
            pages_per_s=pages_per_s,
        )
