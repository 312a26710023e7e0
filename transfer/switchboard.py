"""Frames in, cores, actions out: everything of a worker's node that happens on the transfer thread's event loop.

    an ingress   Submit Renew Cancel  ->  cores        Tokens, Fail through the outbox, which merges
    the router   Bind Cancel Deaths Drain Peers SetFaults  ->  cores, pairing (link: router_session.py)
    a gen        Hello Want Release Fail  ->  ctx core        a ctx  Ready Handoff Valid Expired Fail  ->  gen core
    transports   ReadDone PostDone LandedIn  ->  cores

Decides nothing of the protocol. Not thread-safe: node.py carries calls over. An exception out of it ends the process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ProtocolError, WorkerError
from tailrace.transfer import core_events as ce
from tailrace.transfer.backflow_port import BackflowPort
from tailrace.transfer.cache_report import CacheReport
from tailrace.transfer.codec_choice import Choice
from tailrace.transfer.ctx_core import CtxCore
from tailrace.transfer.faults import FaultPlan, Faults
from tailrace.transfer.gen_core import GenCore
from tailrace.transfer.ledger_watch import LedgerWatch
from tailrace.transfer.links import Link
from tailrace.transfer.loop_events import DrainAsked, FaultsSet, Key, LoopEvent, LoopStats
from tailrace.transfer.messages import (
    Bind,
    Cancel,
    CompatRecord,
    Deaths,
    Delta,
    Drain,
    Expired,
    Fail,
    Handoff,
    Heartbeat,
    Hello,
    Holding,
    LandingGrant,
    Notice,
    Offer,
    Peers,
    Ready,
    Refuse,
    Register,
    Release,
    Renew,
    SetFaults,
    Stats,
    Submit,
    Sums,
    Tokens,
    Valid,
    Want,
)
from tailrace.transfer.metrics import Metrics
from tailrace.transfer.node_config import NodeConfig
from tailrace.transfer.node_stats import (
    set_chunk_gauges,
    set_loop_gauges,
    set_pair_gauges,
    set_transfer_gauges,
)
from tailrace.transfer.outbox import Outbox
from tailrace.transfer.page_proof import PageSummer
from tailrace.transfer.pair_costs import PairCosts
from tailrace.transfer.pairing import PairDialer, answer_hello, codec_used, steps_between
from tailrace.transfer.reports import heartbeat_frame, register_frame
from tailrace.transfer.router_session import RouterSession
from tailrace.transfer.transports.base import LandedIn, PeerNotice, PostDone, ReadDone, ReadJob, Transport
from tailrace.transfer.ways import Ways

log = logging.getLogger(__name__)

POLL_S = 0.001  # while a transfer is under way; at once after one that brought something
FULL_LINK_BYTES = 1 << 20  # an ingress link with this much unsent gets no more until it drains
FULL_LINK_RETRY_S = 0.01
CHECK_AFTER_S = 0.25  # idle for so long: the recount looks at every page, and frames that come meanwhile wait for it
_FAULT_KINDS: dict[type, str] = {Ready: "ready", Handoff: "handoff", Release: "release"}


class DeclaredDead(WorkerError):
    """The router and the peers have dropped this boot id: the process must end, so that a new one can take over."""


class Switchboard:
    """See the module.

    Args:
        kv: the worker's page books.
        transports: those that may be used, in order of preference.
        to_loop: hands an event to the worker's loop.
        loop_stats: overwritten by the loop, read here.
        faults: None unless the config allows them.
        news: set whenever a transport, or the summer, may have something.
        summer: sums pages, for `verify_pages`.
    """

    def __init__(
        self,
        config: NodeConfig,
        kv: KvManager,
        transports: Sequence[Transport],
        metrics: Metrics,
        loop_stats: LoopStats,
        to_loop: Callable[[LoopEvent], None],
        faults: Faults | None,
        news: asyncio.Event,
        clock: Callable[[], float],
        summer: PageSummer | None = None,
    ) -> None:
        self.config, self.kv, self.metrics = config, kv, metrics
        self.port = config.port
        self._transports, self._to_loop, self._faults, self._clock = transports, to_loop, faults, clock
        self._loop_stats, self._news, self._summer = loop_stats, news, summer
        self.ledger = LedgerWatch(config, kv, transports, metrics)
        self._ctx, self._gen = self.ledger.cores(self, lambda: loop_stats.headroom_pages)
        self._cores: list[CtxCore | GenCore] = [core for core in (self._ctx, self._gen) if core is not None]
        me = config.identity
        self.pairs = PairDialer(config.worker, me, config.secret, config.compat, transports, self, news)
        self._back = BackflowPort(kv, transports, config.compat, clock) if config.backflow and self._ctx else None
        self.session = RouterSession(
            me, config.secret, self, heartbeat_s=config.heartbeat_s, report_s=config.report_s,
            cache=CacheReport(config, kv, faults, clock),
        )  # fmt: skip
        self.outbox = Outbox(config.core.request_lease_s)
        self._links: set[Link] = set()
        self._gens: dict[str, Link] = {}  # boot of a gen that said Hello -> its link
        self._by_boot: dict[str, Transport] = {}  # how each ctx is read
        self._ways = Ways(transports, self.stale_frame, news.set)
        self._codecs: dict[str, Choice] = {}  # of each peer, either way
        self._reads: dict[int, Key] = {}
        self._swallowed: list[LandedIn] = []  # by the fault DROP landed: given back when their pair ends
        self._abandoned: dict[int, str] = {}  # reads that nobody wants -> boot
        self._costs = PairCosts()
        self._drain_s: float | None = None
        self._flush_due, self._flush_late, self._checked, self._fed_at = False, False, True, 0.0

    # --------------------------------------------------------------------------------------------------- cores, actions

    def feed(self, core: CtxCore | GenCore | None, event: Any) -> None:
        """One event into one core, and everything that follows."""
        if core is None:
            self.stale_frame()
            return
        self._checked, self._fed_at = False, self._clock()
        for action in self.ledger.handle(core, event, self._fed_at):
            self._act(action, core)

    def feed_all(self, event: Any) -> None:
        for core in self._cores:
            self.feed(core, event)

    def _owner_of(self, key: Key) -> CtxCore | GenCore | None:
        return next((core for core in self._cores if key in core), None)

    def _act(self, action: ce.Action, core: CtxCore | GenCore) -> None:
        if self._faults is not None and self._summer is not None and core is self._ctx:
            for page in self._faults.in_pool(action, self.config.core.verify_pages):
                self._summer.flip(page, self._faults.plan.flip_byte, self._faults.plan.flip_mask)
        match action:
            case ce.ToPeer():
                self._to_peer(action.boot, action.frame, to_gen=core is self._ctx)
            case ce.ToRouter():
                self.session.send(action.frame)
            case ce.ToIngress():
                self._tell(action.key, action.item)
            case ce.ToLoop():
                self._to_loop(self._costs.told(action.event, self._clock()))
            case ce.Measure():
                self.metrics.add(action.metric, action.value, **action.labels)
            case ce.StartRead():
                self._reads[action.job.job] = action.job.key
                self._costs.started(action.job, self._clock())
                self._reader(action.job).read(action.job)
                self._news.set()
            case ce.AbandonRead():
                self._abandoned[action.job] = action.boot
                if action.boot in self._by_boot:
                    self._by_boot[action.boot].abandon(action.boot, action.job)
                    self._news.set()
            case ce.StartPost():
                self._ways.post(action.job)
                self._news.set()
            case ce.StartSums():
                assert self._summer is not None, "this node was given no pages to sum"
                self._summer.submit(action.job)
            case ce.DropLanded():
                self._ways.drop_landed(action.boot, action.landed)
            case ce.ClosePair():
                self._end_pair(action.boot)
                self.pairs.retire(action.boot)
            case ce.ResetPair():
                self._end_pair(action.boot)
                self.pairs.reset(action.boot)

    def _reader(self, job: ReadJob) -> Transport:
        """What carries a read out: of a hand-off, or of a finished turn."""
        back = None if self._back is None or job.job >= 0 else self._back.transport(job.boot)
        return back or self._by_boot[job.boot]

    def _flow_back(self, actions: Sequence[ce.Action]) -> None:
        for action in actions:
            self._act(action, self._cores[0])

    def _tell(self, key: Key, item: Delta | Fail) -> None:
        self.outbox.put(key, item)
        self._flush_soon()

    def _end_pair(self, boot: str) -> None:
        transport = self._by_boot.pop(boot, None)
        if transport is None:
            return
        transport.disconnect(boot)
        self._news.set()
        for event in [e for e in self._swallowed if e.boot == boot]:
            self._swallowed.remove(event)
            transport.drop_landed(boot, event.landed)

    def _to_peer(self, boot: str, frame: Any, *, to_gen: bool) -> None:
        copies, delay = 1, 0.0
        if self._faults is not None:
            if isinstance(frame, Want) and self._faults.hushes(frame):
                return
            kind = _FAULT_KINDS.get(type(frame))
            if kind is not None:
                copies, delay = self._faults.frame(kind)
        for _ in range(copies):
            if delay:
                asyncio.get_running_loop().call_later(delay, self._send_peer, boot, frame, to_gen)
            else:
                self._send_peer(boot, frame, to_gen)

    def _send_peer(self, boot: str, frame: Any, to_gen: bool) -> None:
        """To a gen that reads here, or to a ctx that is read."""
        if not to_gen:
            self.pairs.send(boot, frame)
        elif boot in self._gens:
            self._gens[boot].send(frame)

    # -------------------------------------------------------------------------------------------------------- the loop

    def from_loop(self, event: Any) -> None:
        """An event of core_events, or a tuple of deltas."""
        if isinstance(event, tuple):
            for delta in event:
                key = (delta.request, delta.attempt)
                if self._gen is not None and self._gen.runs(key):  # else it was cancelled meanwhile
                    self._gen.token_sent(key)
                    self.outbox.put(key, delta)
            self._flush_soon()
        elif isinstance(event, ce.TurnEnded):
            turn = event.turn
            offer = Offer(*turn.key, turn.namespace, turn.hashes, turn.num_tokens, turn.pages)
            self._send_peer(turn.ctx, offer, to_gen=False)
        elif isinstance(event, ce.LoopEnded | ce.LoopFailed):
            core = self._owner_of(event.key)
            if core is not None:
                self.feed(core, event)
        else:
            self.feed(self._ctx, event)

    # ------------------------------------------------------------------------------------------------- accepted links

    def link_opened(self, link: Link) -> None:
        self._links.add(link)

    def link_closed(self, link: Link, reason: str) -> None:
        self._links.discard(link)
        self.outbox.detach(link)
        if self._gens.get(link.peer.boot) is link:
            del self._gens[link.peer.boot]

    def link_frame(self, link: Link, frame: Any) -> None:
        """A frame of an ingress or of a gen."""
        if isinstance(frame, Submit | Renew | Cancel):
            self._ingress_frame(link, frame)
        elif isinstance(frame, Hello):
            self._hello(link, frame)
        elif isinstance(frame, Refuse):
            fields = {"worker": link.peer.process, "field": frame.field, "mine": frame.theirs, "theirs": frame.mine}
            log.error("pair_refused", extra={"fields": fields})
            link.close("the pair was refused")
        elif isinstance(frame, Offer):
            if self._back is not None:
                self._flow_back(self._back.offered(link.peer.boot, frame))
        elif isinstance(frame, Notice):
            self._ways.noticed(link.peer.boot, frame)
        elif self._gens.get(link.peer.boot) is link:
            self.feed(self._ctx, ce.FromPeer(link.peer.boot, frame))
        else:
            self.stale_frame()

    def _ingress_frame(self, link: Link, frame: Submit | Renew | Cancel) -> None:
        event = ce.FromIngress(frame)
        if isinstance(frame, Submit):
            key = (frame.request, frame.attempt)
            core = self._gen if frame.leg == "local" else self._ctx
            self.outbox.attach(key, link)
            if core is None:
                message = f"a worker of duty {self.config.duty} takes no leg {frame.leg!r}"
                self._tell(key, Fail(*key, "refused", message, True))
            else:
                self.feed(core, event)
            return
        if isinstance(frame, Renew):
            for key in frame.keys:
                if self._owner_of(key) is not None:
                    self.outbox.attach(key, link)
                elif not self.outbox.reattach(key, link):  # whoever renews it waits for it, perhaps in vain
                    self.outbox.deny(key, link, self._clock())
            self._flush_soon()
        else:
            self.outbox.drop((frame.request, frame.attempt))
        self.feed_all(event)

    def _hello(self, link: Link, hello: Hello) -> None:
        config = self.config
        if self._ctx is None or hello.boot != link.peer.boot:
            answer: Hello | Refuse = Refuse("duty", config.duty, "a worker to read from")
        else:
            answer = answer_hello(hello, config.worker, config.boot, config.compat, self._transports, self._chose_codec)
        link.send(answer)
        if isinstance(answer, Refuse):
            fields = {"worker": hello.worker, "field": answer.field, "mine": answer.mine, "theirs": answer.theirs}
            log.error("pair_refused", extra={"fields": fields})
            link.close("the pair was refused")
            return
        self._gens[link.peer.boot] = link
        self._ways.gen_chose(hello.boot, tuple(answer.transports))
        if self._back is not None:
            self._back.hello(hello)
        self._news.set()

    def _chose_codec(self, boot: str, choice: Choice) -> None:
        """Comes with each post of a pair whose codec is auto, from a helper thread."""
        before = self._codecs.get(boot)
        self._codecs[boot] = choice
        if before is None or before.codec != choice.codec:
            log.info("codec_chosen", extra={"fields": {"boot": boot, "codec": choice.codec, "reason": choice.reason}})

    # ------------------------------------------------------------------------------------------- pairs (PairEvents)

    def pair_up(self, boot: str, transport: Transport, compat: CompatRecord) -> None:
        self._by_boot[boot] = transport
        self._ways.lands(boot, transport)
        landing, units = transport.units_per_grant > 0, transport.units_in_grant(boot)
        survives, tokens = transport.reads_survive_death, compat.tokens_per_page
        steps = steps_between(compat, self.config.compat, landing=landing)
        self._codecs[boot] = codec_used(compat, self.config.compat, landing=landing)
        self.feed(self._gen, ce.PairUp(boot, transport.name, landing, survives, units, tokens, steps))

    def pair_down(self, boot: str) -> None:
        self.feed(self._gen, ce.PairDown(boot))

    def peer_frame(self, link: Link, frame: Any) -> None:
        """A frame of a ctx that is paired."""
        if isinstance(frame, Ready | Handoff | Valid | Expired | Fail | Sums):
            self.feed(self._gen, ce.FromPeer(link.peer.boot, frame))
        elif isinstance(frame, Notice):
            self._ways.noticed(link.peer.boot, frame)
        else:
            self.stale_frame()

    # --------------------------------------------------------------------------------------------- the gen core's Wire

    def grants(self, key: Key, boot: str, n: int) -> tuple[LandingGrant, ...]:
        transport = self._by_boot.get(boot)
        if transport is None:
            return ()
        self._news.set()
        return transport.grants(key, boot, n)

    def reclaim(self, key: Key, boot: str) -> None:
        transport = self._by_boot.get(boot)
        if transport is not None:
            transport.reclaim(key, boot)

    def still_valid(self, boot: str, seen: tuple[tuple[int, int], ...]) -> bool:
        transport = self._by_boot.get(boot)
        return transport is not None and transport.still_valid(boot, seen)

    # ---------------------------------------------------------------------------------------------------- transports

    def poll(self) -> float | None:
        """Take what the transports have; seconds until there may be more, None if only they know."""
        moved, naps = False, []
        for transport in self._transports:
            for event in transport.poll():
                moved = True
                self._transport_event(event)
            naps.append(transport.busy())
        if self._summer is not None:
            for done in self._summer.poll():
                self.feed(self._gen if done.equal else self._ctx, done)
        busy = [min(nap, POLL_S) for nap in naps if nap]
        if not busy:
            return None
        return 0.0 if moved else min(busy)

    def _transport_event(self, event: ReadDone | PostDone | LandedIn | PeerNotice) -> None:
        if isinstance(event, PeerNotice):
            self._send_peer(event.boot, Notice(event.transport, event.to_gen, event.data), event.to_gen)
            return
        if not isinstance(event, LandedIn) and event.codec_s:
            self.metrics.add("tailrace_codec_seconds_total", event.codec_s)
        if isinstance(event, PostDone):
            self.feed(self._ctx, event)
            return
        if isinstance(event, ReadDone):
            self._reads.pop(event.job, None)
            self._abandoned.pop(event.job, None)
            self._costs.ended(event, self._clock())
            if self._back is not None and event.job < 0:
                self._flow_back(self._back.done(event))
            else:
                self.feed(self._gen, event)
            return
        copies, delay = (1, 0.0) if self._faults is None else self._faults.frame("landed")
        if not copies:
            self._swallowed.append(event)
        elif delay:
            asyncio.get_running_loop().call_later(delay, self.feed, self._gen, event)
        else:
            self.feed(self._gen, event)

    # ------------------------------------------------------------------------------------------------ outbox to ingress

    def _flush_soon(self) -> None:
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """One Tokens frame a link; what waits for a full link is tried again soon."""
        self._flush_due = False
        for link, frame in list(self.outbox.flush(_takes)):
            self._send_ingress(link, frame)
        if self.outbox.waits_for_link and not self._flush_late:
            self._flush_late = True
            asyncio.get_running_loop().call_later(FULL_LINK_RETRY_S, self._flush_again)

    def _send_ingress(self, link: Link, frame: Tokens | Fail) -> None:
        try:
            link.send(frame)
        except ProtocolError as error:  # too long, or of a wrong type: what is in it cannot be delivered
            log.error("tokens_not_sent", extra={"fields": {"reason": str(error)}})
            for delta in frame.deltas if isinstance(frame, Tokens) else ():
                link.send(Fail(delta.request, delta.attempt, "internal", "its tokens cannot be sent", False))

    def _flush_again(self) -> None:
        self._flush_late = False
        self.flush()

    # ------------------------------------------------------------------------------------ the router (SessionOwner)

    def register(self, epoch: int, router_boot: str) -> Register:
        return register_frame(self.config, self.port, self.kv, epoch, router_boot)

    def heartbeat(self) -> Heartbeat:
        age_s = max(0.0, self._clock() - self._loop_stats.stamp)
        pairs = tuple(self.pairs.ready)
        codecs = tuple(
            (boot, choice.codec, choice.reason)
            for boot, choice in list(self._codecs.items())
            if boot in pairs or boot in self._gens
        )
        rate, costs, counts = self._costs.all.bytes_per_s, self._costs.costs(pairs), self.kv.counts()
        return heartbeat_frame(self.config, self._loop_stats, counts, age_s, rate, pairs, codecs, costs)

    def whole_set(self) -> Holding:
        seen = self._gen.last_bind_seq(self.session.epoch[1]) if self._gen is not None else 0
        held = tuple(held for core in self._cores for held in core.holding())
        return Holding(self.config.worker, self.config.boot, seen, held)

    def stats(self) -> Stats:
        metrics, now = self.metrics, self._clock()
        self.ledger.measure()
        set_loop_gauges(metrics, self._loop_stats)
        oldest = self._gen.oldest_bound_at() if self._gen is not None else None
        in_flight, queued = sum(core.in_flight() for core in self._cores), sum(core.jobs() for core in self._cores)
        set_transfer_gauges(metrics, in_flight, queued, 0.0 if oldest is None else now - oldest)
        set_chunk_gauges(metrics, (transport.counts() for transport in self._transports))
        if self._gen is not None:
            set_pair_gauges(metrics, len(self.pairs.ready), len(self.pairs.refused), self.pairs.num_wanted)
        metrics.add("tailrace_draining", 0 if self._drain_s is None else 1)
        return Stats(self.config.home, self.config.worker, metrics.families())

    def router_up(self) -> None:
        self.feed_all(ce.RouterUp(self.session.epoch[1]))
        if self._drain_s is not None:
            self.session.send(Drain(self._drain_s))

    def router_frame(self, frame: Any) -> None:
        """A frame of the router that is obeyed (or Peers of any)."""
        match frame:
            case Peers():
                self.pairs.want(frame.peers)
            case Bind():
                self.pairs.also(frame.ctx)
                self.feed(self._gen, ce.FromRouter(frame))
            case Deaths():
                self._deaths(frame)
            case Drain():
                self.drain(frame.limit_s)
            case Cancel():
                self.outbox.drop((frame.request, frame.attempt))
                self.feed_all(ce.FromRouter(frame))
            case SetFaults():
                self._set_faults(frame.faults)
            case _:
                self.stale_frame()

    def stale_frame(self) -> None:
        self.metrics.add(ce.Metric.STALE_FRAMES)

    def _deaths(self, frame: Deaths) -> None:
        if self.config.boot in frame.boots:
            raise DeclaredDead(f"boot {self.config.boot} was declared dead")
        for boot in frame.boots:
            if self._faults is not None:
                for job in [job for job, peer in self._abandoned.items() if peer == boot]:
                    self._faults.lift(self._reads[job])
            if (link := self._gens.pop(boot, None)) is not None:
                link.close("the peer is dead")
            if self._ctx is not None and boot not in self._by_boot:  # a gen, whose link may be gone already
                if self._back is not None:
                    self._back.gone(boot)
                for transport in self._transports:
                    transport.disconnect(boot)
            self.pairs.retire(boot)
            self._codecs.pop(boot, None)
        self.feed_all(ce.FromRouter(frame))
        self._ways.dead(frame.boots)

    def drain(self, limit_s: float) -> None:
        """Take nothing new; what runs goes on. The router is told, so that it binds elsewhere."""
        if self._drain_s is None:
            self._drain_s = limit_s
            self.feed_all(ce.FromRouter(Drain(limit_s)))
            self._to_loop(DrainAsked(limit_s))
            self.session.send(Drain(limit_s))

    def _set_faults(self, text: str) -> None:
        if self._faults is None:
            log.error("faults_not_allowed", extra={"fields": {"faults": text}})
            return
        try:
            plan = FaultPlan.parse(text)
        except ValueError as error:
            log.error("faults_refused", extra={"fields": {"reason": str(error)}})
            return
        log.warning("faults_set", extra={"fields": {"faults": text}})
        self._faults.set(plan)
        self.ledger.obey(plan)
        self._news.set()
        self._to_loop(FaultsSet(plan.poison, plan.preempt, plan.slow_pass_s))

    # ------------------------------------------------------------------------------------------------------------- time

    def tick(self) -> None:
        """Time has passed; at least ten times a second."""
        for core in self._cores:
            for action in self.ledger.handle(core, ce.Tick(), self._clock()):
                self._act(action, core)
        if self._back is not None:
            self._flow_back(self._back.advance(any(core.in_flight() for core in self._cores)))
        self.outbox.expire(self._clock(), lambda key: self._owner_of(key) is not None)
        for boot in self.pairs.surplus():
            if self._gen is None or not self._gen.uses(boot):
                self._end_pair(boot)
                self.pairs.retire(boot)
        if not self._checked and self._clock() - self._fed_at >= CHECK_AFTER_S and self.idle:
            self._checked = self.ledger.at_rest(self._clock(), self._fed_at)

    @property
    def idle(self) -> bool:
        """Nothing is held here for anybody."""
        reads = self._back is not None and not self._back.idle
        return all(core.idle for core in self._cores) and not self.outbox.pending and not reads

    async def close(self) -> None:
        """Every link, pair and transport."""
        await self.pairs.close()
        self.flush()
        for link in tuple(self._links):
            link.close("the worker stops")
        for transport in self._transports:
            transport.close()
        if self._summer is not None:
            self._summer.close()


def _takes(link: Link) -> bool:
    return not link.closed and link.buffered < FULL_LINK_BYTES
