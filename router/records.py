"""What the router believes about each attempt, and all that its parts share. Pure data and its bookkeeping.

A record lives from Place to the first terminal report (Done, Refused, or the end of its ingress); `RouterState.forget`
is the one way out and returns every claim. Claims of an attempt, each made at the moment of choice:

    prefill   tokens still to compute, at the ctx (or at the gen, leg `local`)
    pages     gen pages: of the POOL while unbound, of one gen while its answer to Bind is awaited (leg `local`: until
              its whole set shows them); none once bound, for then they are that gen's own pages
    seats     one at the gen that was chosen, until it no longer has the request

If the router dies a new one rebuilds these from the workers' whole sets and from the ingresses' repeated Places.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.router.admission import Meter, WaitQueue
from tailrace.router.epochs import EpochRule
from tailrace.router.ledger import POOL, Claims
from tailrace.router.pairing import Pair
from tailrace.router.settings import RouterSettings
from tailrace.router.workers import Worker, WorkerTable
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Cancel, Place, Placed, Progress, Refused
from tailrace.transfer.request_state import TABLE, Event, State

TOMBSTONE_S = 3.0  # a worker's whole set may still name a request this long after its end
JUST_BOUND_S = 1.0  # an ingress that ended a request this soon may not have known its gen


@dataclass(frozen=True, slots=True)
class Send:
    """A frame for the link of a boot id, a worker's or an ingress's."""

    to: str
    frame: object


@dataclass(frozen=True, slots=True)
class Close:
    """Close that boot's link, after what was sent before."""

    to: str
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """Another router is in office: this process must end."""

    reason: str


Action = Send | Close | Exit


@dataclass(frozen=True, slots=True)
class PendingBind:
    gen: str
    seq: int
    since: float


@dataclass(slots=True)
class Record:
    """One attempt.

    Attributes:
        leg: prefill | local; empty while queued.
        worker: boot id of that leg's worker.
        gen: boot id of the bound gen; the worker itself for leg local.
        seen: the worker's whole set has named it.
        worker_done: that worker no longer has it, or is dead.
        bind_ready: it is time to bind.
        not_before: gen boot id -> time before which it is not asked again.
        failed_binds: gens that gave up after they were bound.
        gen_died_at: its gen died; ctx must say that the pages are still there.
        no_reader_at: ctx said so while a gen was bound.
        unpaired_since: it is time to bind, and since then no gen that may be asked is paired with its ctx.
        pages: gen pages, claimed or bound.
    """

    place: Place
    ingress: str
    since: float
    state: State = State.QUEUED
    leg: str = ""
    worker: str = ""
    gen: str = ""
    pending: PendingBind | None = None
    progress: Progress | None = None
    seen: bool = False
    worker_done: bool = False
    bind_ready: bool = False
    bound_at: float = 0.0
    bound_seq: int = 0
    not_before: dict[str, float] = field(default_factory=dict)
    failed_binds: int = 0
    gen_died_at: float | None = None
    no_reader_at: float | None = None
    unpaired_since: float | None = None
    pages: int = 0

    @property
    def key(self) -> Key:
        return (self.place.request, self.place.attempt)

    @property
    def needs_gen(self) -> bool:
        """False if the first token ends every sample, so that no hand-off follows."""
        return self.place.max_new_tokens > 1

    def note(self, event: Event) -> None:
        """The router sees only part of a request's life: an event that the table does not list leaves the state."""
        self.state = TABLE.get((self.state, event), self.state)


@dataclass(slots=True)
class Ingress:
    boot: str
    process: str
    linked: bool = True
    lost_at: float = 0.0
    keys: set[Key] = field(default_factory=set)


class RouterState:
    """Everything the router's parts share; see the module."""

    def __init__(self, boot: str, settings: RouterSettings, clock: Callable[[], float]) -> None:
        self.boot, self.settings, self.clock = boot, settings, clock
        self.started = clock()
        self.first_worker_at: float | None = None
        self.epoch = EpochRule(boot)
        self.workers = WorkerTable(settings)
        self.ingresses: dict[str, Ingress] = {}
        self.records: dict[Key, Record] = {}
        self.queue = WaitQueue(settings.max_waiting)
        self.unbound: dict[Key, Record] = {}  # those whose time to bind has come, in that order
        self.prefill, self.pages, self.seats = Claims("prefill tokens"), Claims("pages"), Claims("seats")
        self.pages_back = Meter()
        self.pairs: dict[str, tuple[str, ...]] = {}
        self.pair_used: dict[Pair, float] = {}
        self.wanted: set[str] = set()
        self.ended: OrderedDict[Key, float] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self.choices = 0
        self.out: list[Action] = []

    # ------------------------------------------------------------------------------------------------------------ words

    def send(self, to: str, frame: object) -> None:
        self.out.append(Send(to, frame))

    def serving(self, now: float) -> bool:
        """False while a starting router still listens for workers, and for a higher epoch number."""
        since = self.started if self.first_worker_at is None else self.first_worker_at
        return now >= since + self.settings.settle_s

    def chosen(self, worker: Worker) -> None:
        self.choices += 1
        worker.last_chosen = self.choices
        self.epoch.served = True

    def tell_placed(self, record: Record, leg: str, worker: Worker) -> None:
        at = worker.register
        self.send(record.ingress, Placed(*record.key, leg, at.worker, at.boot, at.host, at.port))

    def refuse(self, record: Record, reason: str, retry_s: float) -> None:
        """The attempt is over here; its ingress is told."""
        self.counters[f"refused_{reason}"] += 1
        self.send(record.ingress, Refused(*record.key, 503, reason, retry_s))
        self.forget(record)

    # ---------------------------------------------------------------------------------------------------------- records

    def keep(self, record: Record) -> None:
        self.records[record.key] = record
        if record.ingress in self.ingresses:
            self.ingresses[record.ingress].keys.add(record.key)
        for worker in self.workers:
            worker.foreign.pop(record.key, None)

    def forget(self, record: Record, outcome: str = "") -> None:
        """Every claim goes back, and a gen that may be at work on it unasked is told to stop."""
        now, key = self.clock(), record.key
        if self.records.pop(key, None) is None:
            return
        self.queue.remove(key)
        self.unbound.pop(key, None)
        self.prefill.give_back(key)
        self.seats.give_back(key)
        only_claimed = self.pages.give_back(key)
        if record.ingress in self.ingresses:
            self.ingresses[record.ingress].keys.discard(key)
        gen = self.workers.get(record.gen)
        if gen is not None:
            gen.free_pages += record.pages - only_claimed  # until its next heartbeat says it
            self.pages_back.add(record.pages, now)
            if record.leg == "prefill" and (outcome != "finished" or now - record.bound_at < JUST_BOUND_S):
                self.send(record.gen, Cancel(*key, outcome or "refused"))
        self.ended[key] = now
        self.ended.move_to_end(key)

    def sweep(self, now: float) -> None:
        """Drop tombstones that are old enough, and pairs of the dead."""
        while self.ended and next(iter(self.ended.values())) < now - TOMBSTONE_S:
            self.ended.popitem(last=False)

    # ------------------------------------------------------------------------------------------------------------ pages

    def free_pages(self, worker: Worker) -> int:
        """Pages of a gen that nothing is promised."""
        return worker.free_pages - self.pages.total(worker.boot)

    def pool_pages(self, gens: list[Worker]) -> int:
        """Free pages of these gens less all unbound claims, also those that only ctx workers' whole sets tell of."""
        foreign = sum(held.needs for worker in self.workers for held in worker.foreign.values())
        return sum(map(self.free_pages, gens)) - self.pages.total(POOL) - foreign

    def tokens_left(self, worker: Worker, rate: float) -> int:
        """Prompt tokens to be computed by a worker, those of unknown requests included."""
        foreign = sum(held.seconds_left or 0.0 for held in worker.foreign.values())
        return self.prefill.total(worker.boot) + int(foreign * rate)

    def active(self, worker: Worker) -> int:
        """Requests that decode at a gen, or will."""
        return self.seats.total(worker.boot) + len(worker.foreign)

    def paired(self, gen: Worker, ctx: str) -> bool:
        return ctx in gen.pairs
