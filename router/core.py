"""The router without I/O: frames, links and time in, frames out.

    admission and first leg   placing.py      late binding         binding.py
    claims and records        records.py      who is there         workers.py
    who is in office          epochs.py       who is paired        pairing.py
    what operators see        view.py

Clock injected, single-threaded, pure Python: server.py drives it with sockets, tests and simulations with scenarios.
It moves no token and no page: running streams do not need it. If its process dies a new one takes the next epoch number
and rebuilds its belief from the workers' whole sets and the ingresses' repeated Places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tailrace.model.errors import LedgerError, ProtocolError
from tailrace.router.binding import Binder
from tailrace.router.decisions import Entry
from tailrace.router.epochs import Verdict
from tailrace.router.pairing import assign_pairs
from tailrace.router.placing import Placer
from tailrace.router.records import INGRESS_LOST, Action, Close, Exit, Ingress, Record, RouterState
from tailrace.router.settings import RouterSettings
from tailrace.router.worker import Worker
from tailrace.transfer.messages import (
    Bound,
    CacheEvent,
    Deaths,
    Done,
    Drain,
    Epoch,
    EpochRefused,
    Heartbeat,
    Held,
    Holding,
    NotNow,
    PeerAddress,
    Peers,
    Place,
    Progress,
    Register,
    Unbind,
)
from tailrace.transfer.request_state import Event

log = logging.getLogger(__name__)

REPAIR_PERIOD_S = 1.0  # how often wanted pairs may replace idle ones


class RouterCore:
    """See the module. Every public method is an event; `take` gives the actions that follow, in order.

    Args:
        boot: this router's random boot id.
        settings: its limits.
        clock: monotonic seconds.
        log_decision: is told each decision when its request has ended; None: they are not kept.
    """

    def __init__(
        self, boot: str, settings: RouterSettings, clock: Callable[[], float],
        *, log_decision: Callable[[Entry], None] | None = None,
    ) -> None:  # fmt: skip
        self.clock, self.settings = clock, settings
        self.state = RouterState(boot, settings, clock)
        self.state.log_decision = log_decision
        self.placer = Placer(self.state)
        self.binder = Binder(self.state)
        self._repaired_at = clock()
        self._handlers: dict[type, Callable[[Worker, Any, float], None]] = {
            Heartbeat: self._heartbeat,
            Holding: self._holding,
            EpochRefused: self._epoch_refused,
            Progress: self._progress,
            Bound: self._bound,
            NotNow: self._not_now,
            Unbind: self._unbind,
            Drain: self._drain,
            CacheEvent: self._cache_event,
        }

    def take(self) -> list[Action]:
        """What has to be done since the last call."""
        actions, self.state.out = self.state.out, []
        return actions

    # ------------------------------------------------------------------------------------------------------------ links

    def link_up(self, role: str, process: str, boot: str) -> None:
        """A process has linked to the router. A worker is known only from its Register on."""
        state = self.state
        if role == "ingress":
            ingress = state.ingresses.setdefault(boot, Ingress(boot, process))
            ingress.linked = True
            if dead := state.workers.dead:  # it may have been without a link when they were declared so
                state.send(boot, Deaths(dead))

    def link_down(self, boot: str) -> None:
        """The last link of a boot id is gone. It may dial again; until then it gets no new work."""
        state, now = self.state, self.clock()
        state.workers.link_down(boot, now)
        state.feed.link_down(boot)
        self.binder.gen_link_down(boot, now)
        ingress = state.ingresses.get(boot)
        if ingress is not None:
            ingress.linked, ingress.lost_at = False, now
            for key in [k for k in ingress.keys if k in state.queue or k in state.migrations]:
                state.forget(state.records[key])  # it asks again when it is back

    def frame(self, boot: str, frame: object) -> None:
        """A frame from a boot id's link.

        Raises:
            ProtocolError: not a frame for a router, or not from this process; its link shall be closed.
        """
        state, now = self.state, self.clock()
        if isinstance(frame, Register):
            self._register(boot, frame, now)
        elif isinstance(frame, Place):
            self._place(boot, frame, now)
        elif isinstance(frame, Done):
            self._done(frame, now)
        elif isinstance(frame, Deaths):
            for dead in frame.boots:
                self.declare_dead(dead, f"said by {boot}")
        else:
            handler = self._handlers.get(type(frame))
            worker = state.workers.get(boot)
            if handler is None:
                raise ProtocolError(f"{type(frame).__name__} is no frame for a router")
            if worker is None:
                if state.workers.is_dead(boot):
                    return
                raise ProtocolError(f"{type(frame).__name__} before Register")
            state.workers.heard(worker, now)
            handler(worker, frame, now)
        state.refresh_shortlists()
        if len(state.queue) or len(state.migrations):
            self.placer.pump(now)

    def tick(self) -> None:
        """Time has passed; call it about every 50 ms."""
        state, now = self.state, self.clock()
        for boot in state.workers.overdue(now):
            self.declare_dead(boot, "silent")
        for ingress in [i for i in state.ingresses.values() if not i.linked]:
            if now - ingress.lost_at > self.settings.request_lease_s + 1.0:
                for key in tuple(ingress.keys):
                    state.forget(state.records[key], INGRESS_LOST)
                del state.ingresses[ingress.boot]
        self.binder.tick(now)
        state.feed.tick(now)
        state.refresh_shortlists()
        self.placer.look_ahead(now)
        self.placer.expire(now)
        self.placer.pump(now)
        if state.wanted and now - self._repaired_at >= REPAIR_PERIOD_S:
            self._pair(now)
        state.sweep(now)

    # ----------------------------------------------------------------------------------------------------------- deaths

    def declare_dead(self, boot: str, reason: str) -> None:
        """A boot id is gone for good: known from its link, from silence, or from whoever watches the process."""
        state, now = self.state, self.clock()
        if state.workers.is_dead(boot):
            return
        worker = state.workers.bury(boot, now)
        state.feed.died(boot)
        state.load_changed(boot)
        if worker is None:
            return
        if not worker.draining:
            state.workers.breakers.died(worker.name, now)
        log.warning("worker_dead", extra={"fields": {"worker": worker.name, "boot": boot, "reason": reason}})
        news = Deaths((boot,))
        for other in state.workers:
            if other.linked:
                state.send(other.boot, news)
        for ingress in state.ingresses.values():
            if ingress.linked:
                state.send(ingress.boot, news)
        if worker.linked:
            self._turn_away(boot)
        for record in list(state.records.values()):
            if record.worker == boot:
                self._first_leg_died(record)
        self.binder.gen_died(boot, now)
        state.pair_used = {pair: at for pair, at in state.pair_used.items() if boot not in pair}
        self._pair(now)

    def _turn_away(self, boot: str) -> None:
        """Its peers have dropped it: it must start anew, with a new boot id."""
        self.state.send(boot, Deaths((boot,)))
        self.state.out.append(Close(boot, "this boot id is dead"))

    def _first_leg_died(self, record: Record) -> None:
        """Its ingress makes a new attempt and reports this one; a gen that has all pages goes on."""
        state = self.state
        if record.leg == "local":
            state.pages.give_back(record.key)
            state.seats.give_back(record.key)
            record.gen, record.pages = "", 0
        self.binder.first_leg_over(record)

    # ---------------------------------------------------------------------------------------------------------- workers

    def _register(self, boot: str, frame: Register, now: float) -> None:
        state = self.state
        if frame.boot != boot:
            raise ProtocolError(f"Register of boot {frame.boot} on the link of boot {boot}")
        if frame.duty not in ("ctx", "gen", "both") or frame.tokens_per_page < 1:
            raise ProtocolError(f"Register with duty {frame.duty!r}, tokens_per_page {frame.tokens_per_page}")
        block, page = frame.compat.block_tokens, frame.tokens_per_page
        granule = max(block, page)
        if block < 1 or granule % min(block, page):
            raise ProtocolError(f"Register with {page} tokens a page and {block} a block: neither divides the other")
        if state.workers.is_dead(boot):
            self._told_epoch(frame.epoch, frame.router_boot)
            state.send(boot, Epoch(state.epoch.number, state.boot))  # else it would not believe what follows
            self._turn_away(boot)
            return
        if state.first_worker_at is None:
            state.first_worker_at = now
        replaced = state.workers.register(frame, now)
        log.info("worker_registered", extra={"fields": {"worker": frame.worker, "boot": boot, "duty": frame.duty}})
        if not self._told_epoch(frame.epoch, frame.router_boot):  # first of all: it drops what comes before
            state.send(boot, Epoch(state.epoch.number, state.boot))
        state.block_tokens = block
        for former in replaced:
            self.declare_dead(former, f"replaced by boot {boot}")
        if boot not in self._pair(now) and frame.duty in ("gen", "both"):
            self._send_peers(boot)
        state.feed.linked(boot, granule // block, now)
        state.load_changed(boot)

    def _told_epoch(self, number: int, router_boot: str) -> bool:
        """True if every worker has just been told a new number."""
        state = self.state
        verdict = state.epoch.told(number, router_boot)
        if verdict is Verdict.DEPOSED:
            mine = state.epoch.number
            reason = f"a worker follows epoch {number} of router {router_boot}, mine is {mine}"
            log.error("router_deposed", extra={"fields": {"reason": reason}})
            state.out.append(Exit(reason))
        elif verdict is Verdict.RAISED:
            for worker in state.workers:
                if worker.linked:
                    state.send(worker.boot, Epoch(state.epoch.number, state.boot))
        return verdict is Verdict.RAISED

    def _epoch_refused(self, worker: Worker, frame: EpochRefused, now: float) -> None:
        self._told_epoch(frame.number, frame.router_boot)

    def _heartbeat(self, worker: Worker, frame: Heartbeat, now: float) -> None:
        if frame.boot != worker.boot:
            raise ProtocolError(f"Heartbeat of boot {frame.boot} on the link of boot {worker.boot}")
        self.state.workers.heartbeat(worker, frame, now)
        self.state.feed.heartbeat(worker.boot, frame.cache_sequence, now)
        self.state.load_changed(worker.boot)
        if self.state.unbound:
            self.binder.pump(now)

    def _cache_event(self, worker: Worker, frame: CacheEvent, now: float) -> None:
        if frame.boot != worker.boot:
            raise ProtocolError(f"CacheEvent of boot {frame.boot} on the link of boot {worker.boot}")
        self.state.feed.event(worker.boot, frame, now)

    def _drain(self, worker: Worker, frame: Drain, now: float) -> None:
        self.state.workers.drain(worker)
        log.info("worker_draining", extra={"fields": {"worker": worker.name, "limit_s": frame.limit_s}})

    # -------------------------------------------------------------------------------------------------- workers' belief

    def _holding(self, worker: Worker, frame: Holding, now: float) -> None:
        """The whole set of a worker replaces what was believed of it, up to the last frame that it had handled."""
        state = self.state
        held = {(h.request, h.attempt): h for h in frame.requests}
        foreign = {key: h for key, h in held.items() if key not in state.records and key not in state.ended}
        state.workers.hold(worker, foreign)
        state.load_changed(worker.boot)
        worker.foreign_progress = {k: p for k, p in worker.foreign_progress.items() if k in worker.foreign}
        for record in [r for r in state.records.values() if worker.boot in (r.worker, r.gen)]:
            mine = held.get(record.key)
            if record.worker == worker.boot:
                self._first_leg_held(record, worker, mine, now)
            elif mine is not None:
                record.seen = True
            elif record.seen or record.bound_seq <= frame.seen:
                state.seats.give_back(record.key)  # ended there; its ingress will say so
        for key, mine in held.items():
            if mine.leg == "decode" and key in state.records:
                self.binder.adopt(state.records[key], worker, mine.pages, now)
        self.binder.lost_bind(worker, frame.seen, set(held), now)
        self.binder.pump(now)

    def _first_leg_held(self, record: Record, worker: Worker, held: Held | None, now: float) -> None:
        state = self.state
        if held is not None:
            record.seen = record.seen or record.leg == "local" or not record.gen
            if held.seconds_left is not None and (record.leg == "local" or record.gen):
                state.prefill.reduce(record.key, int(held.seconds_left * state.workers.rate(worker)))
            if record.leg == "local":
                if held.seconds_left == 0.0:
                    state.migrations.in_flight.give_back(record.key)
                state.pages.reduce(record.key, record.pages - held.pages)
                return
            record.worker_done = False
            if held.needs > 0:
                self.binder.reunited(record, now)
        elif record.leg == "local" and record.seen:
            state.migrations.in_flight.give_back(record.key)
            state.prefill.give_back(record.key)
            state.pages.give_back(record.key)
            state.seats.give_back(record.key)
        elif record.leg == "prefill" and (record.progress is not None or record.gen) and not record.worker_done:
            self.binder.first_leg_over(record)
            self.binder.released(record)
            if record.gen:  # a gen has taken all of it
                state.workers.breakers.success(worker.name, record.key)

    def _progress(self, worker: Worker, frame: Progress, now: float) -> None:
        self.binder.progress(worker, frame, now)

    def _bound(self, worker: Worker, frame: Bound, now: float) -> None:
        self.binder.bound(worker, frame, now)

    def _not_now(self, worker: Worker, frame: NotNow, now: float) -> None:
        self.binder.not_now(worker, frame, now)

    def _unbind(self, worker: Worker, frame: Unbind, now: float) -> None:
        self.binder.unbind(worker, frame, now)

    # --------------------------------------------------------------------------------------------------------- requests

    def _place(self, boot: str, frame: Place, now: float) -> None:
        state = self.state
        if boot not in state.ingresses:
            raise ProtocolError("Place from a process that is no ingress")
        if frame.num_tokens < 1 or frame.samples < 1 or frame.max_new_tokens < 0 or frame.left_to_gen < 0:
            raise ProtocolError(f"Place of {frame.num_tokens} tokens, {frame.samples} samples")
        self.placer.place(frame, boot, now)
        record = state.records.get((frame.request, frame.attempt))
        ctx = state.workers.get(frame.at)
        if record is not None and frame.at and record.progress is not None and ctx is not None:
            self.binder.progress(ctx, record.progress, now)

    def _done(self, frame: Done, now: float) -> None:
        record = self.state.records.get((frame.request, frame.attempt))
        if record is None:
            return  # the first terminal report has returned the claims
        for boot in frame.faults:
            self.state.at_fault(boot)
        self.state.counters[f"done_{frame.outcome}"] += 1
        record.note(Event.CANCEL)
        record.timing = frame.timing
        self.state.forget(record, frame.outcome, self._served(record, frame))
        self.binder.pump(now)

    def _served(self, record: Record, frame: Done) -> int:
        """Tokens that its tenant pays for: what its ingress got, and for a client that left, at least what was computed
        for it."""
        if frame.outcome == "finished" and not record.migrates:
            self.state.tenants.learn(record.tenant, frame.output_tokens, record.place.samples)
        served = frame.prompt_tokens + frame.output_tokens
        if frame.outcome == "cancelled" and record.leg and not record.migrates:
            served = max(served, record.place.num_tokens - self.state.prefill.amount(record.key))
        return served

    # ------------------------------------------------------------------------------------------------------------ pairs

    def _pair(self, now: float) -> list[str]:
        """Give each gen its peers anew. Returns those whose set changed; they have been told."""
        state = self.state
        self._repaired_at = now
        ctxs = [w.boot for w in state.workers if not w.decodes]
        gens = [w.boot for w in state.workers if w.decodes]
        busy = {
            (gen, record.worker)
            for record in state.records.values()
            if record.leg == "prefill" and not record.worker_done
            if (gen := record.gen or (record.pending.gen if record.pending else ""))
        }
        pairs = assign_pairs(
            gens, ctxs, state.pairs, self.settings.pairs_per_worker,
            last_used=state.pair_used, busy=busy, wanted=sorted(state.wanted),
        )  # fmt: skip
        state.wanted.clear()
        changed = [gen for gen, peers in pairs.items() if peers != state.pairs.get(gen)]
        state.pairs = pairs
        for gen in changed:
            self._send_peers(gen)
        return changed

    def _send_peers(self, gen: str) -> None:
        state = self.state
        peers = []
        for boot in state.pairs.get(gen, ()):
            worker = state.workers.get(boot)
            if worker is not None:
                at = worker.register
                peers.append(PeerAddress(at.worker, at.boot, at.host, at.port))
        state.send(gen, Peers(tuple(peers)))

    # -------------------------------------------------------------------------------------------------------------- law

    def check(self) -> None:
        """Raises LedgerError if a claim has no record, or a total is wrong. For tests, and when nothing is going on."""
        state = self.state
        books = (state.prefill, state.pages, state.seats, state.rows, state.migrations.in_flight)
        for claims in books:
            claims.check()
        waiting = len(state.queue) + len(state.migrations)
        if not state.records and (waiting or any(claims.sum for claims in books)):
            raise LedgerError("claims without a record")
