"""Late binding: which gen reads an attempt's pages, and when it is asked.

    Progress (near its end) -> unbound, in order -> Bind -> Bound: Placed(decode) to the ingress
                                                         -> NotNow: another gen, or later
    Unbind, death of the gen -> unbound again (after ctx has said that the pages are still there)

Elders first: pages that an older unbound request waits for at a gen are not given to a younger one. If a gen answers
for a request that nobody waits for any more it gets a Cancel. Knows of free pages only what gens last said.
"""

from __future__ import annotations

import logging
import math
from collections import Counter

from tailrace.router.admission import retry_after_s
from tailrace.router.ledger import POOL
from tailrace.router.policies import GenCandidate, choose_gen
from tailrace.router.records import PendingBind, Record, RouterState
from tailrace.router.worker import Worker
from tailrace.router.workers import DEFAULT_TRANSFER_BYTES_PER_S
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Bind, Bound, Cancel, NotNow, PeerAddress, Progress, Unbind
from tailrace.transfer.request_state import Event

log = logging.getLogger(__name__)

TRANSFER_MARGIN_S = 0.005
MIN_ASK_AGAIN_S, MAX_ASK_AGAIN_S = 0.02, 5.0
JUST_SAID_S = 1.0
UNPAIRED_PAIR_WAITS = 2  # a pair that broke is made anew meanwhile; after that the request is better placed elsewhere


PASSING = ("pages", "headroom", "pair", "draining", "busy", "decoding")  # why a gen says no that may say yes later


class Binder:
    """Binds requests on the shared state. The core calls it with frames, deaths and time."""

    def __init__(self, state: RouterState) -> None:
        self.state = state
        self._seq = 0

    # ---------------------------------------------------------------------------------------------------- frames of ctx

    def progress(self, ctx: Worker, frame: Progress, now: float) -> None:
        """Ctx says how far an attempt without a reader is."""
        state, key = self.state, (frame.request, frame.attempt)
        record = state.records.get(key)
        if record is None:
            if key not in state.ended and not frame.read:
                ctx.foreign_progress[key] = frame
            return
        if record.worker != ctx.boot or record.leg != "prefill":
            state.counters["stale_frames"] += 1
            return
        state.prefill.reduce(key, frame.tokens_total - frame.tokens_ready)
        if frame.read:
            return
        record.progress, record.worker_done = frame, False
        record.note(Event.START)
        if frame.tokens_ready >= frame.tokens_total:
            record.note(Event.PREFILL_END)
            state.migrations.in_flight.give_back(key)
            state.unexpect(record)
        self.reunited(record, now)
        if self._is_time(record, ctx):
            self._make_ready(record)
            self.pump(now)

    def _is_time(self, record: Record, ctx: Worker) -> bool:
        """True from the chunk on in which the predicted rest of prefill falls to the predicted transfer."""
        frame = record.progress
        if frame is None or record.gen or record.pending or not record.needs_gen:
            return False
        if record.bind_ready or frame.last_launched or frame.tokens_ready >= frame.tokens_total:
            return True
        gens = [g for g in self.state.workers.readers(ctx.boot).values() if g.decodes]
        wire = min((r for g in gens if (r := g.transfer_rate)), default=DEFAULT_TRANSFER_BYTES_PER_S)
        transfer_s = frame.tokens_total * ctx.bytes_per_token / wire + TRANSFER_MARGIN_S
        chunk_s = ctx.register.max_num_tokens / self.state.workers.rate(ctx)
        return frame.seconds_left <= transfer_s + chunk_s

    # ---------------------------------------------------------------------------------------------------- frames of gen

    def bound(self, gen: Worker, frame: Bound, now: float) -> None:
        state, key = self.state, (frame.request, frame.attempt)
        record = state.records.get(key)
        if record is not None and record.gen == gen.boot:
            return
        if record is None or record.pending is None or record.pending.gen != gen.boot:
            state.counters["unwanted_binds"] += 1
            state.send(gen.boot, Cancel(*key, "unwanted"))
            return
        record.gen, record.bound_at, record.bound_seq = gen.boot, now, record.pending.seq
        record.pending, record.seen, record.pages, record.no_reader_at = None, False, frame.pages, None
        state.pages.give_back(key)
        state.migrations.in_flight.give_back(key)  # its prefill is near its end, and ctx says no more of it
        state.workers.set_free_pages(gen, gen.free_pages - frame.pages)
        state.pair_used[gen.boot, record.worker] = now
        record.note(Event.BIND)
        state.tell_placed(record, "decode", gen)

    def adopt(self, record: Record, gen: Worker, pages: int, now: float) -> None:
        """A gen's whole set has a request that was taken over and of which ctx says nothing: a former router bound it
        there, and died before its ingress heard of it."""
        state, key = self.state, record.key
        if not record.place.at or record.gen or record.pending is not None or record.progress is not None:
            return
        record.gen, record.bound_at, record.seen, record.pages = gen.boot, now, True, pages
        state.pages.give_back(key)
        state.migrations.in_flight.give_back(key)
        state.seats.claim(key, gen.boot, 1)
        state.pair_used[gen.boot, record.worker] = now
        record.note(Event.BIND)
        state.tell_placed(record, "decode", gen)

    def not_now(self, gen: Worker, frame: NotNow, now: float) -> None:
        state = self.state
        state.counters["not_now"] += 1
        if frame.why in ("pages", "headroom"):
            state.workers.set_free_pages(gen, frame.free)
        elif frame.why == "pair":
            record = state.records.get((frame.request, frame.attempt))
            if record is not None:
                state.workers.unpair(gen, record.worker)
        elif frame.why == "draining":
            state.workers.drain(gen)
        retry_s = frame.retry_s if math.isfinite(frame.retry_s) else MAX_ASK_AGAIN_S
        record = state.records.get((frame.request, frame.attempt))
        self._passed_over(record, gen.boot, retry_s, now)
        if record is not None and record.gen != gen.boot and frame.why not in PASSING:
            self._never(record, gen, frame.why, now)
        self.pump(now)

    def _never(self, record: Record, gen: Worker, why: str, now: float) -> None:
        """This gen will not take this attempt, today or tomorrow; if no other may, its ingress makes another."""
        record.not_before[gen.boot] = math.inf
        reason = f"{gen.name} says {why}"
        if all(record.not_before.get(g.boot) == math.inf for g in self.state.workers.decoders(now)):
            self._give_up(record, reason)
        else:
            self._count_failure(record, reason)

    def unbind(self, gen: Worker, frame: Unbind, now: float) -> None:
        """A gen gave up after it was bound, and the pages are still at ctx."""
        state, record = self.state, self.state.records.get((frame.request, frame.attempt))
        if record is None:
            return
        if record.pending is not None and record.pending.gen == gen.boot:
            self._passed_over(record, gen.boot, 1.0, now)
        elif record.gen == gen.boot and record.leg == "prefill":
            state.workers.set_free_pages(gen, gen.free_pages + record.pages)
            record.not_before[gen.boot] = now + 1.0
            self._lose_gen(record)
            if record.worker_done:
                state.refuse(record, "gen_lost", retry_after_s(0.0))
            else:
                self._unbound_again(record)
                self._count_failure(record, frame.reason)
        self.pump(now)

    def _count_failure(self, record: Record, reason: str) -> None:
        record.failed_binds += 1
        if record.failed_binds >= self.state.settings.max_binds_per_attempt:
            self._give_up(record, reason)

    def _give_up(self, record: Record, reason: str) -> None:
        log.error("bind_failed", extra={"fields": {"request": record.place.request, "reason": reason}})
        self.state.refuse(record, "bind_failed", retry_after_s(0.0))

    # ---------------------------------------------------------------------------------------------------- deaths, time

    def gen_died(self, boot: str, now: float) -> None:
        """Unbound requests go to another gen; for bound ones ctx's word is awaited, for gen may have released them."""
        state = self.state
        for record in list(state.records.values()):
            if record.pending is not None and record.pending.gen == boot:
                self._passed_over(record, boot, MAX_ASK_AGAIN_S, now)
            elif record.gen == boot and record.leg == "prefill":
                self._lose_gen(record)
                record.gen_died_at = now
                if record.worker_done:
                    state.refuse(record, "gen_lost", retry_after_s(0.0))
        self.pump(now)

    def tick(self, now: float) -> None:
        """Gens that do not answer are passed over; requests whose gen died and that ctx no longer has are over.

        So are all that no gen has, when none lives: nobody knows whether one comes that could read them, and while the
        ingresses wait, the pages stay pinned. The same goes for one whose ctx no living gen can read any more.
        """
        state, settings = self.state, self.state.settings
        nobody = state.serving(now) and not any(worker.decodes for worker in state.workers)
        for record in list(state.records.values()):
            if record.pending is not None and now - record.pending.since > settings.bind_timeout_s:
                state.counters["bind_timeouts"] += 1
                state.at_fault(record.pending.gen)
                self._passed_over(record, record.pending.gen, settings.bind_timeout_s, now)
            elif record.gen_died_at is not None and now - record.gen_died_at > settings.reunite_s:
                state.refuse(record, "gen_lost", retry_after_s(0.0))
            elif nobody and record.leg == "prefill" and record.needs_gen and not record.gen and record.pending is None:
                state.refuse(record, "no_gen", retry_after_s(state.workers.back_in_s(("gen", "both"), now)))
        if state.unbound:
            self.pump(now)
        for record in list(state.unbound.values()):
            since = record.unpaired_since
            if since is not None and now - since > UNPAIRED_PAIR_WAITS * settings.pair_wait_s:
                log.warning("unpaired", extra={"fields": {"request": record.place.request, "ctx": record.worker}})
                state.refuse(record, "bind_failed", retry_after_s(settings.pair_wait_s))

    # ---------------------------------------------------------------------------------------------------------- changes

    def _make_ready(self, record: Record) -> None:
        record.bind_ready = True
        self.state.unbound.setdefault(record.key, record)

    def _lose_gen(self, record: Record) -> None:
        record.gen, record.bound_seq = "", 0
        self.state.seats.give_back(record.key)
        record.note(Event.UNBIND if self._complete(record) else Event.UNBIND_EARLY)

    def _complete(self, record: Record) -> bool:
        return record.progress is not None and record.progress.tokens_ready >= record.progress.tokens_total

    def _unbound_again(self, record: Record) -> None:
        """Ctx still has the pages: the pool owes it a place again."""
        record.gen_died_at = None
        if record.key not in self.state.pages:
            self.state.pages.claim(record.key, POOL, record.pages)
        self._make_ready(record)

    def first_leg_over(self, record: Record) -> None:
        """Its ctx no longer has the request, or is dead: nothing is left to compute there, nor to bind."""
        state = self.state
        record.worker_done = True
        state.prefill.give_back(record.key)
        state.migrations.in_flight.give_back(record.key)
        state.unexpect(record)
        state.unbound.pop(record.key, None)
        if not record.gen and record.pending is None:
            state.pages.give_back(record.key)

    def _reader_gone(self, record: Record) -> bool:
        """Its gen is dead, or has lost its link here too: then ctx's word that it has no reader is believed at once."""
        gen = self.state.workers.get(record.gen)
        return record.gen_died_at is not None or (gen is not None and not gen.linked)

    def reunited(self, record: Record, now: float) -> None:
        """Ctx says that a request has no reader. If its gen is not gone as well, this was said before it had one."""
        if record.gen:
            record.no_reader_at = now
        if self._reader_gone(record):
            if record.gen:
                self._lose_gen(record)
            self._unbound_again(record)

    def gen_link_down(self, boot: str, now: float) -> None:
        """When a gen dies, ctx's word that its reader is gone may come before we see our own link to it drop."""
        for record in list(self.state.records.values()):
            said = record.no_reader_at
            reads = record.gen == boot and record.leg == "prefill" and not record.worker_done
            if reads and said is not None and now - said < JUST_SAID_S:
                self.reunited(record, now)
        self.pump(now)

    def released(self, record: Record) -> None:
        """Ctx no longer has the request: if its gen died it had all pages, and nothing can be read again."""
        if record.gen_died_at is not None:
            self.state.refuse(record, "gen_lost", retry_after_s(0.0))

    def _passed_over(self, record: Record | None, boot: str, retry_s: float, now: float) -> None:
        """This gen did not take it: the claim goes back to the pool, and it is asked again no sooner than `retry_s`."""
        if record is None or record.pending is None or record.pending.gen != boot:
            return
        record.pending = None
        gen = self.state.workers.get(boot)
        if gen is not None:
            self.state.workers.breakers.ended(gen.name, record.key)
        self.state.seats.give_back(record.key)
        if record.worker_done:
            self.state.pages.give_back(record.key)
            return
        self.state.pages.move(record.key, POOL)
        record.not_before[boot] = now + min(max(retry_s, MIN_ASK_AGAIN_S), MAX_ASK_AGAIN_S)
        self._make_ready(record)

    def lost_bind(self, gen: Worker, seq_handled: int, present: set[Key], now: float) -> None:
        """A gen's whole set, made after our Bind was handled, lacks a request, and no answer came: ask anew."""
        for record in list(self.state.records.values()):
            pending = record.pending
            if pending and pending.gen == gen.boot and pending.seq <= seq_handled and record.key not in present:
                self._passed_over(record, gen.boot, MIN_ASK_AGAIN_S, now)

    # ----------------------------------------------------------------------------------------------------------- choice

    def pump(self, now: float) -> None:
        """Ask gens for every unbound request that can be bound now, elders first."""
        state = self.state
        promised: Counter[str] = Counter()  # pages that elders wait for
        usable = state.workers.decoders(now).boots if state.unbound else frozenset()
        for key, record in list(state.unbound.items()):
            ctx = state.workers.get(record.worker)
            if ctx is None:
                continue
            cached, size = state.find_cached(record.place), state.block_tokens / record.place.num_tokens
            paired = [
                GenCandidate(
                    g.boot,
                    state.free_pages(g) - promised[g.boot],
                    g.pages_for(record.place.num_tokens, record.place.samples),
                    state.active(g),
                    g.last_chosen,
                    cached.blocks(g.boot) * size,
                )
                for g in sorted(state.workers.readers(ctx.boot).values(), key=lambda gen: gen.order)
                if g.boot in usable
            ]
            paired = [c for c in paired if c.boot not in record.place.exclude] or paired
            if paired:
                record.unpaired_since = None
            askable = [c for c in paired if record.not_before.get(c.boot, 0.0) <= now]
            boot = choose_gen([c for c in askable if self._admitted(c.boot, now)])
            if boot is not None:
                self._ask(record, ctx, boot, now)
                del state.unbound[key]
            elif paired:
                roomiest = max(paired, key=lambda c: c.free_pages)
                promised[roomiest.boot] += roomiest.needed
            else:
                state.wanted.add(ctx.boot)
                record.unpaired_since = record.unpaired_since or now

    def _admitted(self, boot: str, now: float) -> bool:
        """Asked again for each request, for a half open breaker lets one through."""
        gen = self.state.workers.get(boot)
        return gen is not None and self.state.workers.breakers.admits(gen.name, now)

    def _ask(self, record: Record, ctx: Worker, boot: str, now: float) -> None:
        state, frame = self.state, record.place
        gen = state.workers.get(boot)
        if gen is None:
            return
        self._seq += 1
        record.pending = PendingBind(boot, self._seq, now)
        needed = gen.pages_for(frame.num_tokens, frame.samples)
        record.pages = needed
        if record.key in state.pages:
            state.pages.move(record.key, boot, needed)
        else:
            state.pages.claim(record.key, boot, needed)
        state.seats.claim(record.key, boot, 1)
        state.pair_used[boot, ctx.boot] = now
        state.chosen(gen, record.key)
        at = ctx.register
        state.send(
            boot,
            Bind(
                self._seq, *record.key, PeerAddress(at.worker, at.boot, at.host, at.port),
                frame.num_tokens, frame.max_new_tokens, frame.samples, frame.hashes, frame.namespace, frame.left_to_gen,
            ),
        )  # fmt: skip
