"""Admission and the choice of the first leg: a ctx, or a gen that prefills itself, or refusal, or waiting.

Claims on both legs are made here, at the moment of choice, so that a burst sees its own picks. What cannot be placed
now waits in order (admission.py) unless it never can be, or would wait too long: then it is refused at once, with the
time to the next grant. Knows how much is free only by what the workers last said; a wrong guess costs a `not_now`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from tailrace.router.admission import MAX_RETRY_S, MIN_RETRY_S, Needs, retry_after_s
from tailrace.router.alone import Alone
from tailrace.router.decisions import Decision, snapshot
from tailrace.router.ledger import POOL
from tailrace.router.policies import POLICIES, PlaceView, PrefillCandidate, choose
from tailrace.router.prefill_fit import predict_s
from tailrace.router.prospects import Prospect, Prospects
from tailrace.router.records import Record, RouterState
from tailrace.router.shortlist import MANY
from tailrace.router.worker import Usable, Worker
from tailrace.transfer.messages import Place
from tailrace.transfer.request_state import Event

log = logging.getLogger(__name__)

LIKELY_WAIT = 0.8  # of a predicted wait: who waits already is refused only if a somewhat shorter one is too long
LOST_WAIT_S = 0.5  # for the only workers of a duty, whose links have dropped, to dial again
LOOK_AHEAD_S = 0.1  # two ticks
WANTED_BACKLOG_S = 0.5  # a ctx without a pair is given one if all that have one are behind by this much


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now. why: starting | turn | gen_lost | ctx_lost | pages | rows | prefill | no_pair."""

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
        self.prospects = Prospects(state)
        self.alone = Alone(state)
        self._cached = state.blocks.find(b"", b"", 0)  # of the request that is being placed
        self._crowd_s: float | None = None  # mean wait of all, while only a few are looked at

    # ------------------------------------------------------------------------------------------------------------ place

    def place(self, frame: Place, ingress: str, now: float) -> None:
        state, key = self.state, (frame.request, frame.attempt)
        known = state.records.get(key)
        if known is not None:
            self._answer_again(known, frame, ingress)
            return
        record = Record(frame, ingress, now, state.tenants.of(frame.tenant))
        if frame.at:
            self._take_over(record)
            return
        state.keep(record)
        over_rate_s = 0.0 if record.migrates else record.tenant.wait_s(now)
        if over_rate_s:
            state.refuse(record, "rate", max(over_rate_s, MIN_RETRY_S))
            return
        state.charge(record)
        if frame.deaths >= state.settings.max_worker_deaths_per_request:
            shape = {"tokens": frame.num_tokens, "max_new_tokens": frame.max_new_tokens, "samples": frame.samples}
            log.error("request_killed_workers", extra={"fields": {"request": frame.request, **shape}})
            state.refuse(record, "worker_deaths", 1.0)
            return
        migrations = state.migrations
        waits = len(migrations) if record.migrates else len(state.queue) or migrations.blocked_by == "pages"
        result = Wait("turn") if waits else self._try(record, now)
        if isinstance(result, Never):
            state.refuse(record, result.reason, retry_after_s(result.retry_s))
        elif isinstance(result, Wait) and record.migrates:
            migrations.add(key, frame.priority, now)
            migrations.blocked_by = migrations.blocked_by or result.why
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
        state.charge(record)
        state.begun(record, state.clock())
        state.prefill.claim(record.key, at, record.place.num_tokens)
        if record.needs_gen:
            self._claim_pages(record, self.state.workers.decoders(state.clock()), POOL)
        record.progress = progress

    def _enqueue(self, record: Record, now: float) -> None:
        """Let it wait in line, or refuse it at once."""
        state, frame = self.state, record.place
        prospect = self.prospects.of(now, record)
        reason = self._no_wait(record, prospect)
        if frame.deadline_s is not None and prospect.first_token_s > frame.deadline_s:
            reason = "deadline"
        if reason is not None:
            state.refuse(record, reason, retry_after_s(prospect.grant_s))
            return
        state.queue.add(record.key, record.tenant, frame.priority, now, self.prospects.needs(record, now))

    def _no_wait(self, record: Record, prospect: Prospect) -> str | None:
        """Why it may not wait in line: queue_full | fairness."""
        queue = self.state.queue
        if prospect.wait_s > self.state.settings.max_wait_s:
            return "fairness" if queue.over_share(record.tenant) else "queue_full"
        return queue.no_room(record.tenant)

    def _pump_migrations(self, now: float) -> None:
        migrations, state = self.state.migrations, self.state
        while (key := migrations.head()) is not None:
            result = self._try(state.records[key], now)
            if isinstance(result, Wait):
                migrations.blocked_by = result.why
                return
            migrations.remove(key)
            if isinstance(result, Never):
                state.refuse(state.records[key], result.reason, retry_after_s(result.retry_s))

    def pump(self, now: float) -> None:
        """Place from the head of the queue as long as it fits, migrations first."""
        state = self.state
        self._pump_migrations(now)
        if state.migrations.blocked_by == "pages":
            return
        while (key := state.queue.head()) is not None:
            record = state.records[key]
            result = self._try(record, now)
            if isinstance(result, Wait):
                return
            state.queue.remove(key)
            if isinstance(result, Never):
                state.refuse(record, result.reason, retry_after_s(result.retry_s))

    def look_ahead(self, now: float) -> None:
        """Called now and then, so that what a choice asks about all workers is there already."""
        state = self.state
        state.workers.look_ahead(now, LOOK_AHEAD_S)
        gens = state.workers.decoders(now)
        if gens.boots:
            state.pool_pages(gens)
            state.row_capacity(gens)
            state.most_pages(1, 1, gens)

    def expire(self, now: float) -> None:
        """Refuse those who have waited too long, or can no longer meet their deadline."""
        state = self.state
        for key, since in state.migrations.waiting():
            record = state.records[key]
            deadline_s = record.place.deadline_s
            if deadline_s is not None and now - since > deadline_s:
                state.refuse(record, "deadline", retry_after_s(self.next_grant_s(now, record)))
            elif now - since > state.settings.max_wait_s:
                state.refuse(record, "queue_full", retry_after_s(self.next_grant_s(now, record)))
        ahead = Needs()
        for entry in list(state.queue.in_order()):
            record = state.records[entry.key]
            prospect = None
            if record.place.deadline_s is not None:
                prospect = self.prospects.of(now, record, ahead)
                least_s = LIKELY_WAIT * prospect.wait_s + prospect.prefill_s
                if now - record.since + least_s > record.place.deadline_s:
                    state.refuse(record, "deadline", retry_after_s(prospect.grant_s))
                    continue
            if now - entry.since > state.settings.max_wait_s:
                prospect = prospect or self.prospects.of(now, record, ahead)
                state.refuse(record, "queue_full", retry_after_s(prospect.grant_s))
                continue
            ahead = ahead.plus(entry.needs)

    # ------------------------------------------------------------------------------------------------------- one choice

    def _try(self, record: Record, now: float) -> Wait | Never | None:
        """Place a record (None), or say why not."""
        state = self.state
        if not state.serving(now):
            return Wait("starting")
        gens = state.workers.decoders(now)
        if not gens:
            if self._may_dial_again("decodes", now):
                return Wait("gen_lost")
            if (probe_s := state.workers.breaker_wait_s(now, "decodes")) is not None:
                return Never("breaker_open", probe_s)
            return Never("no_gen", state.workers.back_in_s(("gen", "both"), now))
        self._cached = state.find_cached(record.place)
        needed = self.prospects.pages(record, gens)
        if record.needs_gen and all(self._too_large(record, gen) for gen in gens):
            return Never("too_large", MAX_RETRY_S)
        if record.needs_gen and state.pool_pages(gens) < needed:
            return Wait("pages")
        if not record.migrates and state.rows.sum and state.free_rows(gens) < record.rows:
            return Wait("rows")
        better = self.alone.better(record, gens, self._cached.levels, self.cached_tokens)
        if better and self._place_local(record, better, "chosen") is None:
            return None
        return self._place_prefill(record, gens, now)

    def _may_dial_again(self, duty: str, now: float) -> bool:
        """Whether a worker of this duty (attribute's name) has lost its link so lately that it is worth a wait."""
        lost = [w for w in self.state.workers if getattr(w, duty) and not w.linked]
        return any(now - w.lost_at < LOST_WAIT_S for w in lost)

    def _too_large(self, record: Record, worker: Worker) -> bool:
        samples = record.place.samples if worker.decodes else 1
        return worker.pages_for(record.place.num_tokens, samples) > worker.register.total_pages

    def _place_prefill(self, record: Record, gens: Usable, now: float) -> Wait | Never | None:
        workers = self.state.workers.prefillers(now)
        if len(workers) > MANY and (few := self._few(record, gens, now)):
            self._crowd_s = self.state.shortlist.mean_of_all_but_the_last
            refused = self._place_among(record, gens, few, now)
            self._crowd_s = None
            if refused is None:
                return None
        return self._place_among(record, gens, workers, now)

    def _few(self, record: Record, gens: Usable, now: float) -> list[Worker]:
        """Those of many workers that the policy could want, as far as they may be used."""
        place, state, found = record.place, self.state, {}
        bound = state.conversations.worker(place.tenant, place.conversation, now) if place.conversation else ""

        def usable(boot: str) -> bool:
            if boot in found:
                return True
            worker = state.workers.get(boot)
            if worker is None or boot in place.exclude or not state.workers.is_ready(worker, now):
                return False
            if record.needs_gen and not worker.decodes and not state.has_reader(worker, gens):
                return False
            found[boot] = worker
            return True

        return [found[boot] for boot in state.shortlist.boots(self._cached.levels, usable, (bound,))]

    def _place_among(self, record: Record, gens: Usable, workers: list[Worker], now: float) -> Wait | Never | None:
        state, settings = self.state, self.state.settings
        ctxs = [w for w in workers if not w.decodes]
        boths = [w for w in workers if w.decodes]
        usable = ctxs
        if record.needs_gen and self._crowd_s is None:  # else only those with a reader are among the few
            usable = [c for c in ctxs if state.has_reader(c, gens)]
            lonely = [c.boot for c in ctxs if c not in usable] if len(usable) < len(ctxs) else ()
            if lonely and min(map(self.backlog_s, usable), default=math.inf) > WANTED_BACKLOG_S:
                state.wanted.update(lonely)
        candidates = usable + boths
        if not candidates:
            if ctxs:
                no_pair = now - record.since >= settings.pair_wait_s
                return Never("no_pair", settings.pair_wait_s) if no_pair else Wait("no_pair")
            if self._may_dial_again("prefills", now):
                return Wait("ctx_lost")
            if settings.local_prefill == "never":
                if (probe_s := state.workers.breaker_wait_s(now, "prefills")) is not None:
                    return Never("breaker_open", probe_s)
                return Never("no_ctx", state.workers.back_in_s(("ctx", "both"), now))
            return self._place_local(record, gens, "fallback")
        candidates = [w for w in candidates if not self._too_large(record, w)]
        if not candidates:
            return Never("too_large", MAX_RETRY_S)
        candidates = [w for w in candidates if w.boot not in record.place.exclude] or candidates
        if record.migrates and not (candidates := [w for w in candidates if state.migrations.may_begin(w.boot)]):
            return Wait("turn")
        chosen = self._choose(record, self._with_room(record, candidates), now)
        if chosen is None:
            return Wait("prefill")
        if (late := self._too_late(record, chosen)) is not None:
            return late
        if chosen.decodes:
            return self._place_local(record, [chosen], "")
        self._claim(record, "prefill", chosen, gens)
        return None

    def cached_tokens(self, record: Record, worker: Worker) -> int:
        """Of the tokens of the request that is being placed, those whose pages a worker holds."""
        return self._cached.blocks(worker.boot) * self.state.block_tokens

    def _place_local(self, record: Record, gens: list[Worker], reason: str) -> Wait | Never | None:
        """One gen does both legs. reason: chosen | fallback, counted; empty for a worker of duty both."""
        state, frame = self.state, record.place
        gens = [g for g in gens if g.boot not in frame.exclude] or gens
        roomy = [g for g in gens if state.free_pages(g) >= g.pages_for(frame.num_tokens, frame.samples)]
        if not roomy:
            return Wait("pages")
        if record.migrates and not (roomy := [g for g in roomy if state.migrations.may_begin(g.boot)]):
            return Wait("turn")
        # One of duty both was chosen among those with room, and may be the busy one that is preferred.
        seen = self._with_room(record, roomy) if reason else [self._candidate(g, frame.num_tokens) for g in roomy]
        if not seen:
            return Wait("prefill")
        by_boot = {gen.boot: gen for gen in roomy}
        best = min(seen, key=lambda c: (c.ready_s, state.active(by_boot[c.boot]), c.last_chosen, c.boot))
        chosen = by_boot[best.boot]
        if (late := self._too_late(record, chosen)) is not None:
            return late
        if reason:
            state.counters[f"local_{reason}"] += 1
            if reason == "fallback":
                log.warning("local_prefill_fallback", extra={"fields": {"request": frame.request, "gen": chosen.name}})
        if state.log_decision is not None and reason:
            self._note(record, "", reason, chosen.boot, best.ready_s)
        self._claim(record, "local", chosen, Usable([chosen]))
        return None

    def _with_room(self, record: Record, workers: list[Worker]) -> list[PrefillCandidate]:
        """Those to choose from, if at least one is about to be free. What would only wait there waits here, where order
        and shares hold; but a policy may prefer a worker that is busy to the one that is not."""
        tokens, prospects = record.place.num_tokens, self.prospects
        seen = [self._candidate(worker, tokens) for worker in workers]
        waits = [prospects.ahead_s(w, tokens - c.cached_tokens, c.wait_s) for w, c in zip(workers, seen, strict=True)]
        if not any(wait_s <= prospects.given_ahead_s(w) for wait_s, w in zip(waits, workers, strict=True)):
            return []
        most_s = self.state.settings.max_backlog_s
        return [c for wait_s, c in zip(waits, seen, strict=True) if wait_s <= most_s]

    def _too_late(self, record: Record, worker: Worker) -> Never | None:
        """At that worker it would not have its first token in time."""
        tokens, deadline_s = record.place.num_tokens, record.place.deadline_s
        held = self.cached_tokens(record, worker)
        wait_s = self.prospects.ahead_s(worker, tokens - held, self.backlog_s(worker))
        left_s = math.inf if deadline_s is None else deadline_s - (self.state.clock() - record.since)
        if wait_s + self.predicted_prefill_s(worker, tokens - held, held) > left_s:
            return Never("deadline", wait_s)
        if not record.migrates and wait_s > self.state.settings.max_wait_s:
            return Never("queue_full", wait_s)
        return None

    def _choose(self, record: Record, candidates: list[PrefillCandidate], now: float) -> Worker | None:
        if not candidates:
            return None
        place, talks = record.place, self.state.conversations
        bound = talks.worker(place.tenant, place.conversation, now) if place.conversation else ""
        view = PlaceView(place.num_tokens, bound, self._crowd_s)
        chosen = choose(self.policy, candidates, view)
        if self.state.log_decision is not None:
            seen = snapshot(candidates, view, chosen)
            ready_s = next(c.ready_s for c in seen if c.boot == chosen)
            waits = [c.wait_s for c in candidates]
            crowd_s = view.crowd_wait_s
            if crowd_s is None and len(seen) < len(waits):
                crowd_s = (sum(waits) - max(waits)) / (len(waits) - 1)
            self._note(
                record, self.state.settings.placement, "", chosen, ready_s, len(candidates), seen, bound, crowd_s
            )
        return self.state.workers.get(chosen)

    def _note(
        self, record: Record, policy: str, why: str, chosen: str, predicted_s: float,
        count: int = 0, seen: tuple[PrefillCandidate, ...] = (), bound: str = "", crowd_wait_s: float | None = None,
    ) -> None:  # fmt: skip
        """Keep a decision for the log, until its request ends."""
        now, tokens, worker = self.state.clock(), record.place.num_tokens, self.state.workers.get(chosen)
        leg = "local" if worker is not None and worker.decodes else "prefill"
        record.decision = Decision(
            now,
            *record.key,
            tokens,
            policy,
            leg,
            why,
            now - record.since,
            chosen,
            predicted_s,
            count,
            seen,
            bound,
            crowd_wait_s,
        )

    def _candidate(self, worker: Worker, num_tokens: int) -> PrefillCandidate:
        state, boot = self.state, worker.boot
        cached_tokens = self._cached.blocks(boot) * state.block_tokens
        prefill_s = predict_s(state.workers.coefficients(worker), num_tokens - cached_tokens, cached_tokens)
        left, wait_s = state.tokens_left(worker), state.backlog_s(worker)
        return PrefillCandidate(boot, left, wait_s, prefill_s, worker.last_chosen, cached_tokens)

    def _claim(self, record: Record, leg: str, worker: Worker, gens: Usable) -> None:
        state, key = self.state, record.key
        record.leg, record.worker = leg, worker.boot
        record.note(Event.PLACE)
        state.begun(record, state.clock())
        place, cached = record.place, self.cached_tokens(record, worker)
        state.prefill.claim(key, worker.boot, place.num_tokens - cached, place.num_tokens)
        state.counters["predicted_hit_tokens"] += cached
        state.expect(record, worker.boot)
        if place.conversation and worker.prefills:
            state.conversations.bind(place.tenant, place.conversation, worker.boot, state.clock())
        if record.migrates:
            state.migrations.in_flight.claim(key, worker.boot, 1)
        if leg == "local":
            record.gen = worker.boot
            state.seats.claim(key, worker.boot, 1)
            self._claim_pages(record, gens, worker.boot)
        elif record.needs_gen:
            self._claim_pages(record, gens, POOL)
        state.chosen(worker, key)
        state.tell_placed(record, leg, worker)

    def _claim_pages(self, record: Record, gens: Usable, holder: str) -> None:
        frame = record.place
        record.pages = self.state.most_pages(frame.num_tokens, frame.samples, gens)
        self.state.pages.claim(record.key, holder, record.pages)

    # ------------------------------------------------------------------------------------------------------ predictions

    def predicted_prefill_s(self, worker: Worker, uncached_tokens: int, cached_tokens: int) -> float:
        """Predicted seconds of one prompt's prefill alone on a worker, behind tokens that it has cached."""
        return self.state.workers.predicted_s(worker, uncached_tokens, cached_tokens)

    def backlog_s(self, worker: Worker) -> float:
        """Predicted seconds of prefill outstanding at a worker."""
        return self.state.backlog_s(worker)

    def next_grant_s(self, now: float, record: Record | None = None) -> float:
        """Predicted time until a request that comes now is placed; what Retry-After and scaling read."""
        return self.prospects.next_grant_s(now, record)
