"""The hand-off protocol of a generation worker: from bind to the moment it may decode. No I/O, no threads, no clock.

    Bind    -> Bound, Want            all missing pages reserved at once, prefix hits held; or NotNow
    Ready   -> StartRead              (over landing transports: LandedIn -> StartRead, which unpacks)
    ReadDone, Handoff                 bitmap full and record there -> Release
    Valid   -> Admitted (loop)        the hold on every page passes to the loop
    Expired, Fail, Cancel, leases     every page is released, or quarantined while a copy of ours may write it

Also the request leases of what the loop runs here, and of local prefills, which need no hand-off.

Page ownership: from Bind to Valid this core owns one hold of each page of the hand-off. A page into which a read of
ours is under way is never released: it is quarantined until that read's ReadDone, whatever happened to the request.

Knows no transport's inside and no model. If it dies its worker dies: ctx's pins return by lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.bitmap import Unit, ranges
from tailrace.transfer.core_events import (
    AbandonRead,
    Action,
    ClosePair,
    CoreConfig,
    DropLanded,
    FromIngress,
    FromPeer,
    FromRouter,
    LoopEnded,
    LoopFailed,
    Measure,
    Metric,
    PairDown,
    PairUp,
    ResetPair,
    RouterUp,
    StartRead,
    SumsDone,
    Tick,
    ToIngress,
    ToLoop,
    ToPeer,
    ToRouter,
    Wire,
)
from tailrace.transfer.hand import Hand, ReadUnderWay, real_pages, took
from tailrace.transfer.leases import Leases, Recent
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import (
    ID_BYTES,
    Bind,
    Bound,
    Cancel,
    Deaths,
    Drain,
    Expired,
    Fail,
    Handoff,
    Held,
    Landed,
    Mistrust,
    NotNow,
    PageDescriptor,
    Ready,
    Release,
    Renew,
    Submit,
    Sums,
    Valid,
    Want,
)
from tailrace.transfer.orphans import Orphans
from tailrace.transfer.request_state import Event, State, advance
from tailrace.transfer.reservation import RETRY_S, reserve
from tailrace.transfer.runs import Runs
from tailrace.transfer.transports.base import LandedIn, ReadDone, ReadJob
from tailrace.transfer.verify import PageProofs, Proof

CORRUPT = "corrupt"  # ReadDone.error of a landing chunk that is not as it was announced


class GenCore:
    """See the module. `handle` is the only way in; it returns what must be done, in order.

    Args:
        kv: the worker's page books.
        wire: landing chunks and generation numbers, without waiting.
        headroom_pages: what the oldest running request may still need.
    """

    def __init__(self, kv: KvManager, wire: Wire, config: CoreConfig, headroom_pages: Callable[[], int]) -> None:
        self._kv, self._wire, self._config = kv, wire, config
        self._headroom_pages = headroom_pages
        self._pairs: dict[str, PairUp] = {}  # every peer that was ever paired, until its death or reset
        self._usable: set[str] = set()  # those with a link
        self._dead: dict[str, PairUp] = {}  # until nothing refers to them
        self._hands: dict[Key, Hand] = {}
        self._jobs: dict[int, ReadUnderWay] = {}
        self._num_jobs = 0
        self._leases: Leases[Key] = Leases()
        self._recent: Recent[Key, str] = Recent(config.remember)
        self._runs = Runs(self._leases, self._recent)
        self._orphans = Orphans()
        self._proofs = PageProofs()
        self._draining = False
        self._last_bind_seq = 0
        self._router_boot = ""
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            FromPeer: self._from_peer,
            FromIngress: self._from_ingress,
            FromRouter: self._from_router,
            RouterUp: self._router_up,
            PairUp: self._pair_up,
            PairDown: self._pair_down,
            LandedIn: self._landed,
            ReadDone: self._read_done,
            SumsDone: self._sums_done,
            LoopEnded: self._loop_ended,
            LoopFailed: self._loop_failed,
            Tick: self._tick,
        }

    # ---------------------------------------------------------------------------------------------------------- in, out

    def handle(self, event: Any, now: float) -> list[Action]:
        """Everything that follows from one event. Unknown, late and doubled frames are counted and change nothing."""
        return self._handlers[type(event)](event, now)

    def __contains__(self, key: Key) -> bool:
        return key in self._hands or key in self._runs

    @property
    def idle(self) -> bool:
        """True if there is no hand-off, no read under way, nothing in the loop and no landing chunk out."""
        return not (self._hands or self._jobs or self._runs or self._orphans)

    def runs(self, key: Key) -> bool:
        """Whether the loop works on this key and its ingress still wants it."""
        return self._runs.wanted(key)

    def token_sent(self, key: Key) -> None:
        """The loop has drawn a token of a key that it runs."""
        self._runs.token_sent(key)

    def last_bind_seq(self, router_boot: str) -> int:
        """Number of the last Bind of this router that was handled."""
        return self._last_bind_seq if router_boot == self._router_boot else 0

    def in_flight(self) -> int:
        """Hand-offs between Bind and Valid."""
        return len(self._hands)

    def jobs(self) -> int:
        """Reads that were started and have not ended."""
        return len(self._jobs)

    def oldest_bound_at(self) -> float | None:
        return min((hand.bound_at for hand in self._hands.values()), default=None)

    def uses(self, boot: str) -> bool:
        """Whether a hand-off, a read or a landing chunk refers to this peer."""
        return (
            any(hand.pair.boot == boot for hand in self._hands.values())
            or any(job.boot == boot for job in self._jobs.values())
            or self._orphans.of(boot)
        )

    def holding(self) -> list[Held]:
        """The whole set, for the router."""
        hands = [
            Held(*key, pages=len(real_pages(hand.pages)), needs=0, leg="decode", seconds_left=0.0)
            for key, hand in self._hands.items()
        ]
        return hands + self._runs.holding()

    # ---------------------------------------------------------------------------------------------------------- ingress

    def _from_ingress(self, event: FromIngress, now: float) -> list[Action]:
        frame = event.frame
        if isinstance(frame, Submit):
            return self._submit(frame, now)
        if isinstance(frame, Renew):
            for key in frame.keys:
                self._leases.renew(key, now, frame.lease_s)
            return []
        if isinstance(frame, Cancel):
            return self._cancel((frame.request, frame.attempt), frame.reason)
        return [Measure(Metric.STALE_FRAMES)]

    def _submit(self, submit: Submit, now: float) -> list[Action]:
        key = (submit.request, submit.attempt)
        if key in self or key in self._recent:
            return [Measure(Metric.STALE_FRAMES)]
        if self._draining:
            return [ToIngress(key, Fail(*key, "refused", "this worker is draining", True))]
        num_tokens = (len(submit.prompt_ids) + len(submit.output_ids)) // ID_BYTES
        return self._runs.arrive(submit, self._kv.layout.num_pages(num_tokens), now)

    def _cancel(self, key: Key, reason: str) -> list[Action]:
        hand = self._hands.get(key)
        if hand is not None:
            hand.state = advance(hand.state, Event.CANCEL)
            return self._drop(hand, "cancelled", tell_ctx=True)
        if key in self._runs:
            return self._runs.cancel(key, reason)
        if key not in self._recent:  # before its Submit or Bind: that one must not start
            self._recent.put(key, "cancelled")
        return []

    def _loop_ended(self, event: LoopEnded, now: float) -> list[Action]:
        self._runs.ended(event.key, event.outcome)
        return []

    def _loop_failed(self, event: LoopFailed, now: float) -> list[Action]:
        if not self._runs.ended(event.key, "failed"):
            return []
        return [ToIngress(event.key, Fail(*event.key, event.code, event.message, event.retryable))]

    # ------------------------------------------------------------------------------------------------------ bind, pairs

    def _from_router(self, event: FromRouter, now: float) -> list[Action]:
        frame = event.frame
        if isinstance(frame, Bind):
            return self._bind(frame, now)
        if isinstance(frame, Cancel):
            return self._cancel((frame.request, frame.attempt), frame.reason)
        if isinstance(frame, Drain):
            self._draining = True
            return []
        if isinstance(frame, Deaths):
            return [action for boot in frame.boots for action in self._death(boot, now)]
        return [Measure(Metric.STALE_FRAMES)]

    def _bind(self, bind: Bind, now: float) -> list[Action]:
        key = (bind.request, bind.attempt)
        self._last_bind_seq = max(self._last_bind_seq, bind.seq)
        if key in self._hands:
            return [Measure(Metric.STALE_FRAMES), ToRouter(Bound(*key, len(real_pages(self._hands[key].pages))))]
        layout, counts = self._kv.layout, self._kv.counts()
        num_pages, first = layout.num_pages(bind.num_tokens), layout.first_needed_page(bind.num_tokens)
        pair = self._pairs.get(bind.ctx.boot) if bind.ctx.boot in self._usable else None
        why = self._cannot_bind(key, bind, pair, num_pages - first, counts.total)
        if why is not None or pair is None:
            return [ToRouter(NotNow(*key, why or "pair", num_pages, counts.free + counts.cached, RETRY_S))]
        hand = reserve(self._kv, bind, pair, self._headroom_pages(), now)
        if isinstance(hand, NotNow):
            return [ToRouter(hand)]
        hand.proof = Proof(pair.exact, hand.into.first_token) if self._config.verify_pages else None
        self._hands[key] = hand
        self._leases.grant(key, now, self._config.request_lease_s)
        return [ToRouter(Bound(*key, len(real_pages(hand.pages)))), *self._ask(hand, now)]

    def _cannot_bind(self, key: Key, bind: Bind, pair: PairUp | None, needed: int, total: int) -> str | None:
        """Why a bind is refused whatever the pages, or None."""
        if key in self._recent or key in self._runs:
            return self._recent.get(key) or "decoding"
        if bind.num_tokens < 1:
            return "empty"
        if needed > total:
            return "too_large"
        if self._draining:
            return "draining"
        return "pair" if pair is None else None

    def _router_up(self, event: RouterUp, now: float) -> list[Action]:
        if event.router_boot != self._router_boot:
            self._router_boot, self._last_bind_seq = event.router_boot, 0
        return []

    def _pair_up(self, event: PairUp, now: float) -> list[Action]:
        self._pairs[event.boot] = event
        self._usable.add(event.boot)
        actions: list[Action] = []
        for hand in self._hands.values():
            if hand.pair.boot == event.boot and not hand.ctx_dead:
                actions += self._repeat(hand, now)  # what was on its way when the link broke is lost
        return actions

    def _pair_down(self, event: PairDown, now: float) -> list[Action]:
        self._usable.discard(event.boot)
        return []

    def _death(self, boot: str, now: float) -> list[Action]:
        """A ctx is gone for good. What it announced can still be read where its memory outlives it."""
        pair = self._pairs.pop(boot, None)
        self._usable.discard(boot)
        actions: list[Action] = []
        for hand in [h for h in self._hands.values() if h.pair.boot == boot]:
            hand.ctx_dead = True
            readable = hand.pair.outlives_peer and hand.handoff is not None
            if readable and all(unit in hand.told for unit in hand.units.missing()):
                actions += self._advance(hand, now)
            else:
                actions += self._give_up(hand, "lost", "the context worker died")
        self._orphans.forget(boot)
        if pair is not None:
            self._dead[boot] = pair
        return actions + self._close_if_unused(boot)

    def _close_if_unused(self, boot: str) -> list[Action]:
        """Reads from memory that outlives its owner come to their end first; a landing agent is destroyed at once."""
        pair = self._dead.get(boot)
        if pair is None or (pair.outlives_peer and self.uses(boot)):
            return []
        del self._dead[boot]
        return [ClosePair(boot)]

    # ---------------------------------------------------------------------------------------------------- ask, read

    def _ask(self, hand: Hand, now: float) -> list[Action]:
        self._grant(hand)
        sums = self._proofs.ask(hand.key, hand.proof, hand.units.missing())
        return [self._want(hand, now), *(ToPeer(hand.pair.boot, frame) for frame in sums)]

    def _want(self, hand: Hand, now: float) -> ToPeer:
        hand.asked_at = now
        missing = [unit for unit in hand.units.missing() if unit not in hand.told]
        grants = tuple(hand.grants.values())  # those that ctx has seen before it knows by their sequence numbers
        want = Want(*hand.key, hand.pair.transport, ranges(missing), grants, hand.handoff is None)
        return ToPeer(hand.pair.boot, want)

    def _grant(self, hand: Hand) -> bool:
        """Reserve landing chunks for what is still to come; True if there are new ones."""
        pair = hand.pair
        lacking = sum(unit not in hand.told for unit in hand.units.missing())
        if not pair.landing or not lacking:
            return False
        useful = -(-lacking // max(1, pair.units_per_grant))
        n = min(self._config.max_grants_per_request, useful) - len(hand.grants)
        grants = self._wire.grants(hand.key, pair.boot, n) if n > 0 else ()
        hand.grants.update({grant.chunk: grant for grant in grants})
        return bool(grants)

    def _from_peer(self, event: FromPeer, now: float) -> list[Action]:
        frame, boot = event.frame, event.boot
        key = (frame.request, frame.attempt)
        hand = self._hands.get(key)
        if isinstance(frame, Fail) and frame.code == "transfer" and self._chunks_out(key, boot, hand):
            return self._reset(boot)  # a write of that peer was lost, and may land yet
        if isinstance(frame, Fail | Valid | Expired):  # its sender posts no more for this key
            self._reclaim(key, boot, hand)
        if hand is None or hand.pair.boot != boot:
            return [Measure(Metric.STALE_FRAMES)]
        if isinstance(frame, Ready):
            return self._ready(hand, frame, now)
        if isinstance(frame, Handoff):
            return self._handed_off(hand, frame, now)
        if isinstance(frame, Sums) and self._proofs.told(hand.proof, frame):
            return self._copied(hand, ())
        if isinstance(frame, Valid):
            return self._valid(hand, now) if hand.state is State.RELEASING else [Measure(Metric.STALE_FRAMES)]
        if isinstance(frame, Expired):
            return self._expired(hand, frame.reason)
        if isinstance(frame, Fail):
            return self._ctx_failed(hand, frame)
        return [Measure(Metric.STALE_FRAMES)]

    def _ready(self, hand: Hand, ready: Ready, now: float) -> list[Action]:
        if not hand.stalled and hand.final_at is None:
            hand.progress_at = now  # all it announced is here: it is still computing
        hand.tokens_ready = max(hand.tokens_ready, ready.tokens_ready)
        if ready.final and hand.final_at is None:
            hand.final_at = now
        if hand.pair.landing:
            return []
        new = [d for d in ready.pages if hand.wants(d)]
        if not new:
            return [Measure(Metric.STALE_FRAMES)] if ready.pages else []
        return [self._start_read(hand, new, None)]

    def _start_read(self, hand: Hand, descriptors: list[PageDescriptor], landed: Landed | None) -> StartRead:
        self._num_jobs += 1
        units = frozenset(Unit(d.group, d.ordinal) for d in descriptors)
        under = [hand.pages_under(d.ordinal, self._kv.layout.tokens_per_page) for d in descriptors]
        pages = frozenset(page for reached in under for page in reached)
        self._jobs[self._num_jobs] = ReadUnderWay(hand.key, hand.pair.boot, units, pages)
        hand.jobs.add(self._num_jobs)
        hand.told.update(units)
        pairs = tuple((d, reached[0]) for d, reached in zip(descriptors, under, strict=True))
        return StartRead(ReadJob(self._num_jobs, hand.key, hand.pair.boot, pairs, landed, hand.into))

    def _landed(self, event: LandedIn, now: float) -> list[Action]:
        landed = event.landed
        key = (landed.request, landed.attempt)
        hand = self._hands.get(key)
        if hand is None or hand.pair.boot != event.boot:
            self._orphans.landed(event.boot, key)
            return [Measure(Metric.STALE_FRAMES), DropLanded(event.boot, landed)]
        hand.grants.pop(landed.chunk, None)
        new = [d for d in landed.pages if hand.wants(d)]
        if not new:
            return [Measure(Metric.STALE_FRAMES), DropLanded(event.boot, landed)]
        return [self._start_read(hand, new, landed)]

    def _read_done(self, done: ReadDone, now: float) -> list[Action]:
        job = self._jobs.pop(done.job, None)
        if job is None:
            return []
        if job.quarantined:
            others = [j.pages for j in self._jobs.values() if j.quarantined and j.key == job.key]
            self._kv.end_quarantine(sorted(job.pages.difference(*others)))
            return self._close_if_unused(job.boot)
        hand = self._hands[job.key]
        hand.jobs.discard(done.job)
        hand.progress_at = now
        here = {Unit(d.group, d.ordinal): d for d in done.units_ok}
        actions = took(hand, done)
        actions += self._copied(hand, [page for unit, page in here.items() if unit in job.units])
        if len(done.units_stale):
            return actions + self._expired(hand, "generation")
        if done.error == CORRUPT:
            actions.append(Measure(Metric.CORRUPT_PAGES))
            if hand.proof is not None and self._proofs.doubt(hand.proof, job.units) == job.units:
                return actions + self._ask_again(hand, job.units, now)
        if done.error is not None or not here.keys() >= job.units:
            return actions + self._give_up(hand, "transfer", done.error or "a read returned without its pages")
        return actions + self._advance(hand, now)

    # -------------------------------------------------------------------------------------------- page sums (verify.py)

    def _copied(self, hand: Hand, pages: Iterable[PageDescriptor]) -> list[Action]:
        """These stand in our pages: they are set at once, or once they are proven."""
        hand.arrived(self._proofs.copied(hand.proof, pages))
        return [*self._proofs.check(hand.key, hand.proof, hand.parts(self._kv.layout.tokens_per_page))]

    def _sums_done(self, event: SumsDone, now: float) -> list[Action]:
        key = self._proofs.key_of(event.job)
        hand = None if key is None else self._hands.get(key)
        verdict = self._proofs.done(None if hand is None else hand.proof, event)
        if hand is None:
            return []
        hand.progress_at = now
        hand.arrived(verdict.proven)
        number = len(verdict.again) + len(verdict.wrong)
        actions: list[Action] = [Measure(Metric.CORRUPT_PAGES, number)] if number else []
        if verdict.wrong:
            units = [Unit(page.group, page.ordinal) for page in verdict.wrong]
            actions.append(ToPeer(hand.pair.boot, Mistrust(*hand.key, ranges(sorted(units)), False)))
            return actions + self._give_up(hand, "corrupt", f"{len(units)} pages were wrong twice")
        if verdict.again and hand.pair.landing:
            return actions + self._ask_again(hand, [Unit(page.group, page.ordinal) for page in verdict.again], now)
        if verdict.again:
            actions.append(self._start_read(hand, list(verdict.again), None))
        return actions + self._advance(hand, now)

    def _ask_again(self, hand: Hand, units: Iterable[Unit], now: float) -> list[Action]:
        """Ctx must post these once more."""
        hand.told.difference_update(units)
        return [ToPeer(hand.pair.boot, Mistrust(*hand.key, ranges(sorted(units)), True)), *self._ask(hand, now)]

    # ------------------------------------------------------------------------------------------------- release, valid

    def _handed_off(self, hand: Hand, handoff: Handoff, now: float) -> list[Action]:
        if hand.handoff is not None:
            return [Measure(Metric.STALE_FRAMES)]
        if handoff.num_tokens != hand.num_tokens:
            message = f"the hand-off record is about {handoff.num_tokens} tokens, the bind about {hand.num_tokens}"
            return self._give_up(hand, "internal", message)
        hand.handoff = handoff
        hand.progress_at = now
        return self._advance(hand, now)

    def _advance(self, hand: Hand, now: float) -> list[Action]:
        """Release once all is here; with a dead ctx, look at its generation numbers instead."""
        if not hand.complete:
            if hand.ctx_dead and not hand.jobs and not (hand.proof is not None and hand.proof.jobs):
                return self._give_up(hand, "lost", "the context worker died")
            return [self._want(hand, now)] if not hand.ctx_dead and self._grant(hand) else []
        if hand.ctx_dead:
            seen = tuple((d.page, d.generation) for d in hand.seen.values())
            if not self._wire.still_valid(hand.pair.boot, seen):
                return self._expired(hand, "the context worker died")
            if hand.state is State.READING:
                hand.state = advance(hand.state, Event.READ_ALL)
            return self._valid(hand, now)
        if hand.state is State.RELEASING:
            return []
        hand.state = advance(hand.state, Event.READ_ALL)
        hand.progress_at = now
        return [self._release(hand, now)]

    def _release(self, hand: Hand, now: float) -> ToPeer:
        hand.asked_at = now
        seen = tuple((unit.group, unit.ordinal, d.generation) for unit, d in sorted(hand.seen.items()))
        return ToPeer(hand.pair.boot, Release(*hand.key, seen))

    def _valid(self, hand: Hand, now: float) -> list[Action]:
        assert hand.handoff is not None
        hand.state = advance(hand.state, Event.VALID)
        key, wire_s = hand.key, now - hand.bound_at
        del self._hands[key]
        self._orphan(hand, now)
        self._runs.admit(key, len(real_pages(hand.pages)))
        exposed_s = now - (hand.final_at if hand.final_at is not None else hand.bound_at)
        return [
            ToLoop(hand.admitted(wire_s, exposed_s)),
            Measure(Metric.TRANSFER_SECONDS, wire_s, {"part": "total"}),
            Measure(Metric.TRANSFER_SECONDS, exposed_s, {"part": "exposed"}),
            *self._close_if_unused(hand.pair.boot),
        ]

    # ------------------------------------------------------------------------------------------------------- giving up

    def _expired(self, hand: Hand, reason: str) -> list[Action]:
        if reason == "reader":  # another gen was bound: its tokens come from there, ours must not
            hand.state = advance(hand.state, Event.CANCEL)
            return [Measure(Metric.STALE_FRAMES), *self._drop(hand, "another reader", tell_ctx=False)]
        return [Measure(Metric.EXPIRED_READS), *self._give_up(hand, "expired", f"pages expired: {reason}")]

    def _ctx_failed(self, hand: Hand, fail: Fail) -> list[Action]:
        if fail.code == "ended":  # the ingress knows: it was told by ctx, or told ctx
            hand.state = advance(hand.state, Event.CANCEL)
            return self._drop(hand, "ended", tell_ctx=False)
        return self._give_up(hand, "transfer" if fail.code == "not_posted" else fail.code, fail.message)

    def _give_up(self, hand: Hand, code: str, message: str) -> list[Action]:
        """End the attempt from here: the ingress makes another, or tells its client, by policy."""
        hand.state = advance(hand.state, Event.FAIL)
        retryable = self._config.retry_failed_transfers
        tell = ToIngress(hand.key, Fail(*hand.key, code, message, retryable))
        return [tell, *self._drop(hand, code, tell_ctx=True)]

    def _drop(self, hand: Hand, why: str, *, tell_ctx: bool) -> list[Action]:
        """Give every page back: at once, or through quarantine where a read of ours may still write."""
        key, boot = hand.key, hand.pair.boot
        actions: list[Action] = []
        busy: set[int] = set()
        for number in sorted(hand.jobs):
            job = self._jobs[number]
            job.quarantined = True
            busy.update(job.pages)
            actions.append(AbandonRead(boot, number))
        self._kv.quarantine(sorted(busy))
        self._kv.release([page for page in real_pages(hand.pages) if page not in busy])
        del self._hands[key]
        self._leases.drop(key)
        self._recent.put(key, why)
        self._orphan(hand, hand.progress_at)
        if tell_ctx and not hand.ctx_dead:
            actions.append(ToPeer(boot, Fail(*key, "transfer", why, False)))
        return actions + self._close_if_unused(boot)

    def _orphan(self, hand: Hand, since: float) -> None:
        if hand.grants and not hand.ctx_dead:
            self._orphans.add(hand.pair.boot, hand.key, len(hand.grants), since)

    def _chunks_out(self, key: Key, boot: str, hand: Hand | None) -> bool:
        return (boot, key) in self._orphans or (hand is not None and hand.pair.boot == boot and bool(hand.grants))

    def _reclaim(self, key: Key, boot: str, hand: Hand | None) -> None:
        out = self._orphans.take(boot, key)
        if hand is not None and hand.pair.boot == boot and hand.grants:
            hand.grants, out = {}, True
        if out:
            self._wire.reclaim(key, boot)

    # ------------------------------------------------------------------------------------------------------------- time

    def _tick(self, event: Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in self._leases.expired(now):  # an ingress that lives all the same is told, and makes another attempt
            actions.append(ToIngress(key, Fail(*key, "lost", "its request lease ended", True)))
            actions += self._cancel(key, "lease")
        actions += self._runs.overdue(now)
        for hand in list(self._hands.values()):
            if now - hand.progress_at >= self._config.kv_transfer_timeout_s:
                message = f"no new unit for {self._config.kv_transfer_timeout_s:g} s"
                actions += self._give_up(hand, "timeout", message)
            elif not hand.ctx_dead and now - hand.asked_at >= self._config.renew_every_s:
                actions += self._repeat(hand, now)
            elif not hand.grants and not hand.ctx_dead and self._grant(hand):
                actions.append(self._want(hand, now))
        return actions + self._reset_stalled(now)

    def _repeat(self, hand: Hand, now: float) -> list[Action]:
        """Say again what is waited for: renews the pin lease, and mends what was lost with a link."""
        return [self._release(hand, now)] if hand.state is State.RELEASING else self._ask(hand, now)

    def _reset_stalled(self, now: float) -> list[Action]:
        """Landing chunks that a silent peer does not give back: only the end of the agent that receives frees them."""
        boots = self._orphans.stalled(now - self._config.kv_transfer_timeout_s)
        return [action for boot in boots for action in self._reset(boot)]

    def _reset(self, boot: str) -> list[Action]:
        """End every transfer of a pair with the agent that receives them."""
        self._pairs.pop(boot, None)
        self._usable.discard(boot)
        self._orphans.forget(boot)
        actions: list[Action] = []
        for hand in [h for h in self._hands.values() if h.pair.boot == boot]:
            hand.grants = {}
            actions += self._give_up(hand, "transfer", "the pair was reset")
        return [*actions, ResetPair(boot)]
