"""The hand-off protocol of a context worker: who may read which pages, and until when. No I/O, no threads, no clock.

    Submit -> Arrived (loop)          chunk done: pages pinned here, final ones told to the bound reader (Ready)
    Want   -> Ready, Handoff          a reader is bound; it repeats Want while it waits (renews the pin lease)
    Release-> Valid | Expired         pages unpinned, entry gone
    Cancel, leases, reader's death    see `handle`; every path unpins each page exactly once

Page ownership: the loop holds the pages of a prompt while it prefills; from `ChunkDone` on this core owns one pin of
each page it was given, and gives it back on release, on the end of the request, or when the pin lease ends. It never
frees a page that the loop holds. After an early end of the pin lease a release is answered by comparing generation
numbers.

Knows no transport's inside and no model. If it dies its worker dies: gens see a new boot id and give up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.attempt import Attempt, Ended, Reader
from tailrace.transfer.core_events import (
    Action,
    ChunkDone,
    ChunkLaunched,
    CoreConfig,
    FromIngress,
    FromPeer,
    FromRouter,
    LoopEnded,
    LoopFailed,
    Measure,
    Metric,
    PrefillDone,
    RouterUp,
    StartPost,
    SumsDone,
    Tick,
    ToIngress,
    ToLoop,
    ToPeer,
    ToRouter,
)
from tailrace.transfer.handoff_record import check_prompt_tail, first_deltas, handoff_record
from tailrace.transfer.leases import Leases, Recent
from tailrace.transfer.loop_events import Arrived, Cancelled, Key
from tailrace.transfer.messages import (
    Cancel,
    Deaths,
    Drain,
    Expired,
    Fail,
    Held,
    Mistrust,
    PageDescriptor,
    Progress,
    Ready,
    Release,
    Renew,
    Submit,
    Valid,
    Want,
    WantSums,
)
from tailrace.transfer.request_state import Event, advance
from tailrace.transfer.source_sums import SourceSums
from tailrace.transfer.transports.base import PostDone, PostJob

LOST = "transfer"  # code of the Fail that says so of a landing write
MAX_EXPIRED = 256  # ended attempts whose generation numbers are kept for a late release
MAX_EARLY_WANTS = 1024


class CtxCore:
    """See the module. `handle` is the only way in; it returns what must be done, in order.

    Args:
        kv: the worker's page books; pins are given back here.

    Raises:
        ConfigError: a prompt tail that is too short.
    """

    def __init__(self, kv: KvManager, config: CoreConfig) -> None:
        check_prompt_tail(config.prompt_tail_tokens, kv.block_tokens)
        self._kv = kv
        self._config = config
        self._attempts: dict[Key, Attempt] = {}
        self._leases: Leases[Key] = Leases()
        self._recent: Recent[Key, Ended] = Recent(config.remember)
        self._expired: Recent[Key, Ended] = Recent(MAX_EXPIRED)
        self._early_wants: Recent[Key, tuple[str, Want]] = Recent(MAX_EARLY_WANTS)
        self._last_words: dict[tuple[Key, str], Any] = {}  # (key, boot) -> frame that waits for the posts under way
        self._lost: dict[str, dict[Key, str]] = {}  # boot -> keys with a lost landing write; until that boot's death
        self._draining = False
        self._sums = SourceSums(kv.layout, config.verify_pages)
        self._jobs = 0
        self._posts: dict[int, tuple[Key, str]] = {}
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            FromPeer: self._from_peer,
            FromIngress: self._from_ingress,
            FromRouter: self._from_router,
            RouterUp: self._router_up,
            ChunkLaunched: self._chunk_launched,
            ChunkDone: self._chunk_done,
            PrefillDone: self._prefill_done,
            LoopEnded: self._loop_ended,
            LoopFailed: self._loop_failed,
            PostDone: self._post_done,
            SumsDone: self._sums_done,
            Tick: self._tick,
        }

    # ---------------------------------------------------------------------------------------------------------- in, out

    def handle(self, event: Any, now: float) -> list[Action]:
        """Everything that follows from one event. Unknown, late and doubled frames are counted and change nothing."""
        return self._handlers[type(event)](event, now)

    def __contains__(self, key: Key) -> bool:
        return key in self._attempts

    @property
    def idle(self) -> bool:
        """True if no attempt has an entry and nothing is being posted."""
        return not self._attempts and not self._last_words and not self._posts

    def in_flight(self) -> int:
        """Attempts with a bound reader."""
        return sum(a.reader is not None for a in self._attempts.values())

    def jobs(self) -> int:
        """Posts that were started and have not ended."""
        return len(self._posts)

    def holding(self) -> list[Held]:
        """The whole set, for the router. An unbound request names the tokens it will need gen pages for."""
        return [
            Held(
                request=a.submit.request,
                attempt=a.submit.attempt,
                pages=len(a.pinned),
                needs=0 if a.reader else a.needs,
                leg="prefill",
                seconds_left=a.seconds_left if a.seconds_left is not None and math.isfinite(a.seconds_left) else None,
            )
            for a in self._attempts.values()
            if not a.cancelled
        ]

    # ---------------------------------------------------------------------------------------------------------- ingress

    def _from_ingress(self, event: FromIngress, now: float) -> list[Action]:
        frame = event.frame
        if isinstance(frame, Submit):
            return self._submit(frame, now)
        if isinstance(frame, Renew):
            for key in frame.keys:
                if key in self._attempts:
                    self._leases.renew(key, now, frame.lease_s)
            return []
        if isinstance(frame, Cancel):
            return self._cancel((frame.request, frame.attempt), frame.reason)
        return [Measure(Metric.STALE_FRAMES)]

    def _submit(self, submit: Submit, now: float) -> list[Action]:
        key = (submit.request, submit.attempt)
        if key in self._attempts or key in self._recent:
            return [Measure(Metric.STALE_FRAMES)]
        if self._draining:
            return [ToIngress(key, Fail(*key, "refused", "this worker is draining", True))]
        attempt = self._attempts[key] = Attempt.of(submit, now)
        self._leases.grant(key, now, submit.lease_s)
        actions: list[Action] = [ToLoop(Arrived(submit, now))]
        early = self._early_wants.pop(key)
        if early is not None:
            actions += self._want(attempt, *early, now)
        return actions

    def _cancel(self, key: Key, reason: str) -> list[Action]:
        attempt = self._attempts.get(key)
        if attempt is None:
            if key not in self._recent:  # before its Submit: that one must not start
                self._recent.put(key, Ended("cancelled"))
                self._early_wants.pop(key)
            return []
        if attempt.cancelled:
            return [Measure(Metric.STALE_FRAMES)]
        attempt.state = advance(attempt.state, Event.CANCEL)
        word = Fail(*key, "ended", f"cancelled: {reason}", False)
        if not attempt.in_loop:
            return self._end(attempt, "cancelled", word)
        attempt.cancelled = True
        self._leases.drop(key)
        return [ToLoop(Cancelled(key, reason)), *self._let_go(attempt, word)]

    # --------------------------------------------------------------------------------------------------------- the loop

    def _chunk_launched(self, event: ChunkLaunched, now: float) -> list[Action]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.cancelled:
            return []
        self._started(attempt)
        attempt.seconds_left, attempt.last_launched = event.seconds_left, event.last
        return self._progress(attempt)

    @staticmethod
    def _started(attempt: Attempt) -> None:
        if not attempt.started:
            attempt.started = True
            attempt.state = advance(attempt.state, Event.START)

    def _chunk_done(self, event: ChunkDone, now: float) -> list[Action]:
        attempt = self._attempts.get(event.key)
        if attempt is None or attempt.cancelled:
            self._kv.unpin([page for _, page in event.pinned])
            return []
        layout = self._kv.layout
        first = layout.first_needed_page(attempt.num_tokens)
        surplus: list[int] = []
        for ordinal, page in event.pinned:
            # Nobody reads what lies before the window; what is computed again after a preemption was told and stays.
            if ordinal < max(first, attempt.final):
                surplus.append(page)
            else:
                if ordinal in attempt.pinned:
                    surplus.append(attempt.pinned[ordinal])
                attempt.pinned[ordinal] = page
        if surplus:
            self._kv.unpin(surplus)
        self._started(attempt)
        attempt.tokens_ready = max(attempt.tokens_ready, event.tokens_ready)
        attempt.seconds_left = event.seconds_left
        final = attempt.final_pages(layout)
        new = range(attempt.final, final)
        for ordinal in new:
            page = attempt.pinned.get(ordinal)
            if page is not None:  # None: before the window
                attempt.pages[ordinal] = PageDescriptor(0, ordinal, page, self._kv.descriptor_generation(page))
        attempt.final = max(attempt.final, final)
        reader = attempt.reader
        actions = self._progress(attempt) if reader is None else self._tell(attempt, reader, again=())
        return actions + self._sums.became_final(attempt, new)

    def _prefill_done(self, event: PrefillDone, now: float) -> list[Action]:
        key, result = event.key, event.result
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        attempt.in_loop = False
        if attempt.cancelled:
            self._forget(attempt, Ended("cancelled"))
            return []
        actions: list[Action] = [ToIngress(key, delta) for delta in first_deltas(attempt.submit, result)]
        self._started(attempt)
        attempt.state = advance(attempt.state, Event.PREFILL_END)
        if result.finished:
            attempt.state = advance(attempt.state, Event.FINISH)
            return actions + self._end(attempt, "finished", Fail(*key, "ended", "its first token ended it", False))
        attempt.handoff = handoff_record(attempt.submit, result, self._config.prompt_tail_tokens)
        if attempt.reader is not None:
            attempt.reader.handoff_sent = now
            actions.append(ToPeer(attempt.reader.boot, attempt.handoff))
            total = attempt.num_tokens
            actions.append(ToRouter(Progress(*key, total, total, 0.0, True, read=True)))
        return actions

    def _loop_ended(self, event: LoopEnded, now: float) -> list[Action]:
        attempt = self._attempts.get(event.key)
        if attempt is None:
            return []
        attempt.in_loop = False
        if attempt.cancelled:
            self._forget(attempt, Ended("cancelled"))
            return []
        return self._end(attempt, event.outcome, Fail(*event.key, "ended", event.outcome, False))

    def _loop_failed(self, event: LoopFailed, now: float) -> list[Action]:
        attempt = self._attempts.get(event.key)
        if attempt is None:
            return []
        attempt.in_loop = False
        if attempt.cancelled:
            self._forget(attempt, Ended("cancelled"))
            return []
        attempt.state = advance(attempt.state, Event.FAIL)
        tell = ToIngress(event.key, Fail(*event.key, event.code, event.message, event.retryable))
        return [tell, *self._end(attempt, "failed", Fail(*event.key, "ended", event.message, False))]

    # ----------------------------------------------------------------------------------------------------------- reader

    def _from_peer(self, event: FromPeer, now: float) -> list[Action]:
        frame, boot = event.frame, event.boot
        if isinstance(frame, Want):
            return self._want_frame(boot, frame, now)
        if isinstance(frame, Release):
            return self._release(boot, frame)
        if isinstance(frame, Fail):
            return self._reader_gave_up(boot, frame)
        if isinstance(frame, WantSums | Mistrust):
            return self._about_sums(boot, frame)
        return [Measure(Metric.STALE_FRAMES)]

    def _about_sums(self, boot: str, frame: WantSums | Mistrust) -> list[Action]:
        attempt = self._attempts.get((frame.request, frame.attempt))
        reader = None if attempt is None else attempt.reader
        if attempt is None or reader is None or reader.boot != boot:
            return [Measure(Metric.STALE_FRAMES)]
        if isinstance(frame, WantSums):
            return self._sums.owe(attempt, frame.first_token, frame.ordinals)
        ordinals = [o for o in attempt.pages if _within(frame.ordinals, o)]
        if frame.again:
            reader.again += ordinals if reader.landing else []
            return self._post(attempt, reader)
        pages = [attempt.pages[o] for o in ordinals]
        self._sums.forget(pages)
        self._kv.retract([page.page for page in pages])
        return []

    def _sums_done(self, event: SumsDone, now: float) -> list[Action]:
        self._sums.done(event)
        return [action for attempt in self._attempts.values() for action in self._sums.pay(attempt)]

    def _want_frame(self, boot: str, want: Want, now: float) -> list[Action]:
        key = (want.request, want.attempt)
        attempt = self._attempts.get(key)
        if attempt is not None and boot in attempt.dismissed:  # no reader comes back: it may have landing writes out
            return [Measure(Metric.STALE_FRAMES), *self._last_word(key, boot, attempt.dismissed[boot])]
        if attempt is not None and not attempt.cancelled:
            return self._want(attempt, boot, want, now)
        ended = self._recent.get(key)
        if attempt is None and ended is None:  # it overtook the ingress's Submit
            self._early_wants.put(key, (boot, want))
            return []
        if ended is not None and ended.why == "released":
            if ended.reader == boot:  # sent before its Release; Valid is on its way
                return [Measure(Metric.STALE_FRAMES)]
            return self._last_word(key, boot, Fail(*key, "lost", "its pages went to another gen", True))
        if ended is not None and ended.why == "expired":  # what it reads now may still be valid: its Release will tell
            return self._last_word(key, boot, Expired(*key, "pin lease")) if want.ordinals or want.handoff else []
        word = Fail(*key, "ended", "not held here any more", False)
        return [Measure(Metric.STALE_FRAMES), *self._last_word(key, boot, word)]

    def _want(self, attempt: Attempt, boot: str, want: Want, now: float) -> list[Action]:
        actions: list[Action] = []
        reader = attempt.reader
        pin_until = now + self._config.pin_lease_s
        if reader is None or reader.boot != boot:
            if reader is not None:  # the router has bound another; the first may only be slow
                actions += self._lose_reader(attempt, Expired(*attempt.key, "reader"))
            attempt.state = advance(attempt.state, Event.BIND)
            reader = attempt.reader = Reader(boot, want.transport, want.ordinals, pin_until)
        reader.pin_until = pin_until
        reader.landing = reader.landing or bool(want.grants)
        for grant in want.grants:
            if (grant.chunk, grant.sequence) not in reader.granted:
                reader.granted.add((grant.chunk, grant.sequence))
                reader.grants.append(grant)
        actions += self._tell(attempt, reader, again=want.ordinals)
        if want.handoff and attempt.handoff is not None and self._may_send_handoff(reader, now):
            reader.handoff_sent = now
            actions.append(ToPeer(boot, attempt.handoff))
        return actions

    def _may_send_handoff(self, reader: Reader, now: float) -> bool:
        """Not again while the first may still be under way: it can be as long as the prompt."""
        return reader.handoff_sent is None or now - reader.handoff_sent >= self._config.renew_every_s / 2

    def _tell(self, attempt: Attempt, reader: Reader, again: tuple[tuple[int, int, int], ...]) -> list[Action]:
        """Ready over the final pages: those that the reader asks for now, and those it has not been told of yet."""
        low = min((first for _, first, _ in again), default=reader.told)
        pages = tuple(
            attempt.pages[o]
            for o in range(min(low, reader.told), attempt.final)
            if o in attempt.pages and (_within(again, o) or (o >= reader.told and _within(reader.wanted, o)))
        )
        reader.told = max(reader.told, attempt.final)
        told = () if reader.landing else pages  # what lands names its pages itself
        ready = Ready(*attempt.key, told, attempt.tokens_ready, attempt.all_ready)
        return [ToPeer(reader.boot, ready), *self._post(attempt, reader)]

    def _post(self, attempt: Attempt, reader: Reader) -> list[Action]:
        """Fill the granted landing chunks with final pages that were not posted yet, in order."""
        actions: list[Action] = []
        while reader.grants and (reader.again or reader.posted < attempt.final):
            room = reader.grants[0].units
            pages = [attempt.pages[o] for o in reader.again[:room]]
            del reader.again[:room]
            while reader.posted < attempt.final and len(pages) < room:
                if reader.posted in attempt.pages and _within(reader.wanted, reader.posted):
                    pages.append(attempt.pages[reader.posted])
                reader.posted += 1
            if not pages:
                break
            self._jobs += 1
            self._posts[self._jobs] = (attempt.key, reader.boot)
            job = PostJob(self._jobs, attempt.key, reader.boot, tuple(pages), reader.grants.popleft())
            actions.append(StartPost(job))
        return actions

    def _post_done(self, event: PostDone, now: float) -> list[Action]:
        posted = self._posts.pop(event.job, None)
        if posted is None:
            return []
        key, boot = posted
        word = self._last_words.pop(posted, None)
        if event.lost:
            self._lost.setdefault(boot, {})[key] = event.error or "a landing write was lost"
            word = word or Fail(*key, LOST, "", True)
        attempt = self._attempts.get(key)
        bound = attempt is not None and attempt.reader is not None and attempt.reader.boot == boot
        if attempt is not None and bound and event.error is not None:
            return self._lose_reader(attempt, word or Fail(*key, "not_posted", event.error, True))
        return self._last_word(key, boot, word)

    def _release(self, boot: str, release: Release) -> list[Action]:
        key = (release.request, release.attempt)
        attempt = self._attempts.get(key)
        if attempt is None or attempt.cancelled:
            return self._late_release(key, boot, release)
        reader = attempt.reader
        if reader is None or reader.boot != boot:
            return [Measure(Metric.STALE_FRAMES), *self._last_word(key, boot, Expired(*key, "reader"))]
        if attempt.handoff is None:  # nobody can have all it wants yet
            return [Measure(Metric.STALE_FRAMES)]
        valid = self._unchanged(attempt.pages, release)
        attempt.state = advance(advance(attempt.state, Event.READ_ALL), Event.VALID if valid else Event.EXPIRED)
        word = Valid(*key) if valid else Expired(*key, "generation")
        return self._end(attempt, "released" if valid else "expired", word)

    def _late_release(self, key: Key, boot: str, release: Release) -> list[Action]:
        """A release of what has ended here: only after an early end of the pin lease can it still be valid."""
        ended = self._expired.get(key) or self._recent.get(key)
        if ended is not None and ended.why == "expired" and ended.reader == boot:
            valid = self._unchanged(ended.pages, release)
            if valid:
                self._expired.pop(key)
                self._recent.put(key, Ended("released", boot))
            return self._last_word(key, boot, Valid(*key) if valid else Expired(*key, "pin lease"))
        if ended is None or ended.why not in ("released", "expired"):
            word: Any = Expired(*key, "unknown" if ended is None else ended.why)
        else:  # a repetition, or another gen's
            word = Valid(*key) if ended.why == "released" and ended.reader == boot else Expired(*key, "reader")
        return [Measure(Metric.STALE_FRAMES), *self._last_word(key, boot, word)]

    def _unchanged(self, pages: dict[int, PageDescriptor], release: Release) -> bool:
        """Whether each generation that the reader names is the one we told, and still the page's."""
        for group, ordinal, generation in release.seen:
            told = pages.get(ordinal)
            if told is None or told.group != group or told.generation != generation:
                return False
            if self._kv.descriptor_generation(told.page) != generation:
                return False
        return True

    def _reader_gave_up(self, boot: str, fail: Fail) -> list[Action]:
        key = (fail.request, fail.attempt)
        attempt = self._attempts.get(key)
        if attempt is None:
            return self._late_give_up(key, boot)
        if attempt.reader is None or attempt.reader.boot != boot:
            return []
        word = Fail(*attempt.key, "ended", "no more is posted", False) if attempt.reader.landing else None
        return self._lose_reader(attempt, word)

    def _late_give_up(self, key: Key, boot: str) -> list[Action]:
        """A reader that had no last word yet may have landing chunks out."""
        early, ended = self._early_wants.get(key), self._recent.get(key)
        if early is not None and early[0] == boot:
            self._early_wants.pop(key)
        elif ended is None or ended.why != "expired" or ended.reader != boot:
            return []
        return self._last_word(key, boot, Fail(*key, "ended", "no more is posted", False))

    def _lose_reader(self, attempt: Attempt, word: Any) -> list[Action]:
        """The attempt is unbound again; `word` tells the lost reader, once nothing is being posted to it."""
        reader = attempt.reader
        assert reader is not None
        attempt.reader = None
        attempt.dismissed[reader.boot] = word
        attempt.state = advance(attempt.state, Event.UNBIND_EARLY if attempt.handoff is None else Event.UNBIND)
        return [*self._last_word(attempt.key, reader.boot, word), *self._progress(attempt)]

    def _last_word(self, key: Key, boot: str, word: Any) -> list[Action]:
        """Tell a reader that nothing more will be posted for this key: only once that is true."""
        if word is None:
            return []
        if (key, boot) in self._posts.values():
            self._last_words[key, boot] = word
            return []
        lost = self._lost.get(boot, {}).get(key)
        if lost is not None:  # it may land yet: gen must not use its chunk again before it has ended the pair
            word = Fail(*key, LOST, lost, True)
        return [ToPeer(boot, word)]

    # ------------------------------------------------------------------------------------------------- router and time

    def _from_router(self, event: FromRouter, now: float) -> list[Action]:
        frame = event.frame
        if isinstance(frame, Cancel):
            return self._cancel((frame.request, frame.attempt), frame.reason)
        if isinstance(frame, Drain):
            self._draining = True
            return []
        if isinstance(frame, Deaths):
            return [action for boot in frame.boots for action in self._dead(boot)]
        return [Measure(Metric.STALE_FRAMES)]

    def _dead(self, boot: str) -> list[Action]:
        actions: list[Action] = []
        self._lost.pop(boot, None)
        for waiting in [w for w in self._last_words if w[1] == boot]:
            del self._last_words[waiting]
        for attempt in list(self._attempts.values()):
            if attempt.reader is not None and attempt.reader.boot == boot:
                actions += self._lose_reader(attempt, None)
        return actions

    def _router_up(self, event: RouterUp, now: float) -> list[Action]:
        return [
            action
            for attempt in self._attempts.values()
            if attempt.reader is None and not attempt.cancelled
            for action in self._progress(attempt)
        ]

    def _progress(self, attempt: Attempt) -> list[Action]:
        if attempt.reader is not None or attempt.seconds_left is None:
            return []
        return [
            ToRouter(
                Progress(
                    *attempt.key,
                    tokens_ready=attempt.tokens_ready,
                    tokens_total=attempt.num_tokens,
                    seconds_left=attempt.seconds_left,
                    last_launched=attempt.last_launched,
                )
            )
        ]

    def _tick(self, event: Tick, now: float) -> list[Action]:
        actions: list[Action] = []
        for key in self._leases.expired(now):  # an ingress that lives all the same is told, and makes another attempt
            actions.append(ToIngress(key, Fail(*key, "lost", "its request lease ended", True)))
            actions += self._cancel(key, "lease")
        for attempt in list(self._attempts.values()):
            if attempt.cancelled:
                continue
            reader = attempt.reader
            if attempt.deadline is not None and now >= attempt.deadline:
                actions.append(ToIngress(attempt.key, Fail(*attempt.key, "timeout", "deadline passed", False)))
                actions += self._cancel(attempt.key, "timeout")
            elif reader is not None and now >= reader.pin_until:
                actions += self._pin_lease_ended(attempt)
        return actions

    def _pin_lease_ended(self, attempt: Attempt) -> list[Action]:
        """A silent reader. While the prompt is being computed the loop holds the pages anyway: only the reader goes."""
        if attempt.handoff is None:
            return self._lose_reader(attempt, Expired(*attempt.key, "pin lease"))
        attempt.state = advance(attempt.state, Event.FAIL)
        return self._end(attempt, "expired", None)

    # ----------------------------------------------------------------------------------------------------------- ending

    def _let_go(self, attempt: Attempt, word: Any) -> list[Action]:
        """Give every pin back, once, and tell the reader."""
        reader, attempt.reader = attempt.reader, None
        pages, attempt.pinned = list(attempt.pinned.values()), {}
        if pages:
            self._kv.unpin(pages)
        return [] if reader is None else self._last_word(attempt.key, reader.boot, word)

    def _end(self, attempt: Attempt, why: str, word: Any) -> list[Action]:
        boot = attempt.reader.boot if attempt.reader is not None else None
        actions = self._let_go(attempt, word)
        self._forget(attempt, Ended(why, boot, attempt.pages if why == "expired" else {}))
        return actions

    def _forget(self, attempt: Attempt, ended: Ended) -> None:
        del self._attempts[attempt.key]
        self._leases.drop(attempt.key)
        if ended.pages:
            self._expired.put(attempt.key, ended)
        self._recent.put(attempt.key, Ended(ended.why, ended.reader))


def _within(ranges: tuple[tuple[int, int, int], ...], ordinal: int) -> bool:
    return any(group == 0 and first <= ordinal < end for group, first, end in ranges)
