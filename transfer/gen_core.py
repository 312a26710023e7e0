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

from collections.abc import Callable
from typing import Any

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.bitmap import Unit, UnitBitmap, ranges
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
    Tick,
    ToIngress,
    ToLoop,
    ToPeer,
    ToRouter,
    Wire,
)
from tailrace.transfer.hand import Hand, ReadUnderWay, real_pages
from tailrace.transfer.leases import Leases, Recent
from tailrace.transfer.loop_events import Admitted, Key
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
    NotNow,
    PageDescriptor,
    Ready,
    Release,
    Renew,
    Submit,
    Valid,
    Want,
)
from tailrace.transfer.request_state import Event, State, advance
from tailrace.transfer.runs import Runs
from tailrace.transfer.transports.base import LandedIn, ReadDone, ReadJob

CORRUPT = "corrupt"  # ReadDone.error of a landing chunk that is not as it was announced
RETRY_S = 0.1  # when a refused bind may fit, as far as this worker can know


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
        self._orphans: dict[tuple[str, Key], tuple[int, float]] = {}  # grants out for ended requests: (number, since)
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
            or any(orphan == boot for orphan, _ in self._orphans)
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
        hit = self._kv.match_prefix(bind.namespace, bind.hashes, bind.num_tokens, whole=True)
        self._kv.release(hit.pages[:first])  # before the window
        held = hit.pages[first:]
        missing = num_pages - max(first, len(hit.pages))
        available = self._kv.available()
        roomy = missing > available or available - missing >= self._headroom_pages()
        new = self._kv.allocate(missing) if roomy else None
        if new is None:
            self._kv.release(held)
            return [ToRouter(NotNow(*key, "pages" if roomy else "headroom", missing, available, RETRY_S))]
        pages = [SCRATCH_PAGE] * first + held + new
        expected = [Unit(0, ordinal) for ordinal in range(num_pages - missing, num_pages)]
        matched = min(len(hit.pages) * layout.tokens_per_page, bind.num_tokens)
        hand = Hand(bind, pair, pages, matched, UnitBitmap(expected), now, now, now)
        self._hands[key] = hand
        self._leases.grant(key, now, self._config.request_lease_s)
        return [ToRouter(Bound(*key, len(held) + len(new))), *self._ask(hand, now)]

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
        for orphan in [o for o in self._orphans if o[0] == boot]:
            del self._orphans[orphan]
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
        return [self._want(hand, now)]

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
        if isinstance(frame, Valid):
            return self._valid(hand, now) if hand.state is State.RELEASING else [Measure(Metric.STALE_FRAMES)]
        if isinstance(frame, Expired):
            return self._expired(hand, frame.reason)
        if isinstance(frame, Fail):
            return self._ctx_failed(hand, frame)
        return [Measure(Metric.STALE_FRAMES)]

    def _ready(self, hand: Hand, ready: Ready, now: float) -> list[Action]:
        if not self._stalled(hand) and hand.final_at is None:
            hand.progress_at = now  # all it announced is here: it is still computing
        hand.tokens_ready = max(hand.tokens_ready, ready.tokens_ready)
        if ready.final and hand.final_at is None:
            hand.final_at = now
        if hand.pair.landing:
            return []
        new = [d for d in ready.pages if self._wants(hand, d)]
        if not new:
            return [Measure(Metric.STALE_FRAMES)] if ready.pages else []
        return [self._start_read(hand, new, None)]

    @staticmethod
    def _wants(hand: Hand, descriptor: PageDescriptor) -> bool:
        unit = Unit(descriptor.group, descriptor.ordinal)
        return hand.units.lacks(unit) and unit not in hand.told

    def _stalled(self, hand: Hand) -> bool:
        """Whether something that ctx has declared final is not here yet."""
        layout = self._kv.layout
        num_tokens = hand.bind.num_tokens
        whole = hand.tokens_ready >= num_tokens
        final = layout.num_pages(num_tokens) if whole else layout.full_pages(hand.tokens_ready)
        missing = hand.units.missing()
        return bool(missing) and missing[0].ordinal < final

    def _start_read(self, hand: Hand, descriptors: list[PageDescriptor], landed: Landed | None) -> StartRead:
        self._num_jobs += 1
        units = {Unit(d.group, d.ordinal): hand.pages[d.ordinal] for d in descriptors}
        self._jobs[self._num_jobs] = ReadUnderWay(hand.key, hand.pair.boot, units)
        hand.jobs.add(self._num_jobs)
        hand.told.update(units)
        pairs = tuple((d, hand.pages[d.ordinal]) for d in descriptors)
        return StartRead(ReadJob(self._num_jobs, hand.key, hand.pair.boot, pairs, landed))

    def _landed(self, event: LandedIn, now: float) -> list[Action]:
        landed = event.landed
        key = (landed.request, landed.attempt)
        hand = self._hands.get(key)
        if hand is None or hand.pair.boot != event.boot:
            self._orphan_back(event.boot, key)
            return [Measure(Metric.STALE_FRAMES), DropLanded(event.boot, landed)]
        hand.grants.pop(landed.chunk, None)
        new = [d for d in landed.pages if self._wants(hand, d)]
        if not new:
            return [Measure(Metric.STALE_FRAMES), DropLanded(event.boot, landed)]
        return [self._start_read(hand, new, landed)]

    def _read_done(self, done: ReadDone, now: float) -> list[Action]:
        job = self._jobs.pop(done.job, None)
        if job is None:
            return []
        if job.quarantined:
            self._kv.end_quarantine(list(job.units.values()))
            return self._close_if_unused(job.boot)
        hand = self._hands[job.key]
        hand.jobs.discard(done.job)
        hand.progress_at = now
        for descriptor in done.units_ok:
            unit = Unit(descriptor.group, descriptor.ordinal)
            if unit in job.units and hand.units.set(unit):
                hand.seen[unit] = descriptor
        actions = self._measure_bytes(hand.pair, len(done.units_ok))
        if done.error == CORRUPT:
            actions.append(Measure(Metric.CORRUPT_PAGES))
        if done.units_stale:
            return actions + self._expired(hand, "generation")
        if done.error is not None or any(hand.units.lacks(unit) for unit in job.units):
            return actions + self._give_up(hand, "transfer", done.error or "a read returned without its pages")
        return actions + self._advance(hand, now)

    def _measure_bytes(self, pair: PairUp, num_pages: int) -> list[Action]:
        if not num_pages:
            return []
        nbytes = num_pages * self._kv.layout.bytes_per_page
        return [
            Measure(Metric.TRANSFER_BYTES, nbytes, {"kind": kind, "transport": pair.transport, "codec": "raw"})
            for kind in ("logical", "wire")
        ]

    # ------------------------------------------------------------------------------------------------- release, valid

    def _handed_off(self, hand: Hand, handoff: Handoff, now: float) -> list[Action]:
        if hand.handoff is not None:
            return [Measure(Metric.STALE_FRAMES)]
        if handoff.num_tokens != hand.bind.num_tokens:
            message = f"the hand-off record is about {handoff.num_tokens} tokens, the bind about {hand.bind.num_tokens}"
            return self._give_up(hand, "internal", message)
        hand.handoff = handoff
        hand.progress_at = now
        return self._advance(hand, now)

    def _advance(self, hand: Hand, now: float) -> list[Action]:
        """Release once all is here; with a dead ctx, look at its generation numbers instead."""
        if not hand.complete:
            if hand.ctx_dead and not hand.jobs:
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
            ToLoop(Admitted(hand.handoff, tuple(hand.pages), hand.num_matched_tokens, wire_s)),
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
            busy.update(job.units.values())
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
            self._orphans[hand.pair.boot, hand.key] = (len(hand.grants), since)

    def _orphan_back(self, boot: str, key: Key) -> None:
        out, since = self._orphans.pop((boot, key), (0, 0.0))
        if out > 1:
            self._orphans[boot, key] = (out - 1, since)

    def _chunks_out(self, key: Key, boot: str, hand: Hand | None) -> bool:
        return (boot, key) in self._orphans or (hand is not None and hand.pair.boot == boot and bool(hand.grants))

    def _reclaim(self, key: Key, boot: str, hand: Hand | None) -> None:
        orphan = self._orphans.pop((boot, key), None)
        if hand is not None and hand.pair.boot == boot and hand.grants:
            hand.grants = {}
            orphan = orphan or (0, 0.0)
        if orphan is not None:
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
        limit = self._config.kv_transfer_timeout_s
        boots = {boot for (boot, _), (_, since) in self._orphans.items() if now - since >= limit}
        return [action for boot in sorted(boots) for action in self._reset(boot)]

    def _reset(self, boot: str) -> list[Action]:
        """End every transfer of a pair with the agent that receives them."""
        self._pairs.pop(boot, None)
        self._usable.discard(boot)
        for orphan in [o for o in self._orphans if o[0] == boot]:
            del self._orphans[orphan]
        actions: list[Action] = []
        for hand in [h for h in self._hands.values() if h.pair.boot == boot]:
            hand.grants = {}
            actions += self._give_up(hand, "transfer", "the pair was reset")
        return [*actions, ResetPair(boot)]
