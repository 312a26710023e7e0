"""What the router believes about each attempt, and all that its parts share. Pure data and its bookkeeping.

A record lives from Place to the first terminal report (Done, Refused, or the end of its ingress); `RouterState.forget`
is the one way out and returns every claim. Claims of an attempt, each made at the moment of choice:

    prefill   tokens still to compute, at the ctx (or at the gen, leg `local`)
    pages     gen pages: of the POOL while unbound, of one gen while its answer to Bind is awaited (leg `local`: until
              its whole set shows them); none once bound, for then they are that gen's own pages
    seats     one at the gen that was chosen, until it no longer has the request
    rows      of the POOL of all gens' batches, one a sample, as long as the record lives

If the router dies a new one rebuilds these from the workers' whole sets and from the ingresses' repeated Places.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tailrace.router.admission import WaitQueue
from tailrace.router.block_index import BlockIndex, Found
from tailrace.router.cache_feed import CacheFeed
from tailrace.router.conversations import Conversations
from tailrace.router.decisions import Decision, Entry, Outcome
from tailrace.router.epochs import EpochRule
from tailrace.router.ledger import POOL, Claims, PrefillClaims
from tailrace.router.migrations import Migrations
from tailrace.router.pairing import Pair
from tailrace.router.settings import RouterSettings
from tailrace.router.shortlist import MANY, Shortlist
from tailrace.router.tenants import Mean, Tenant, Tenants
from tailrace.router.worker import Usable, Worker
from tailrace.router.workers import WorkerTable
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Cancel, Place, Placed, Progress, Refused, Timing
from tailrace.transfer.request_state import TABLE, Event, State

MIN_ROWS_AHEAD, ROWS_AHEAD = 2, 4  # beside every four rows one more request is on its way to them
TOMBSTONE_S = 3.0  # a worker's whole set may still name a request this long after its end
TENANT_REASONS = frozenset({"rate", "fairness"})  # refusals that are about who asks: 429; others are 503
INGRESS_LOST = "ingress_lost"  # to this router: its streams may well go on, and if it is dead their lease ends them
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
        decision: how it was placed, if decisions are logged; timing: what came of it, if its ingress has told.
        cost: tokens that its tenant's bucket was charged when it came.
        placed_at: since when its tenant's turn is charged, too; None while it waits.
        expected_at: boot id of the worker on which its blocks are expected; empty: not (any more).
    """

    place: Place
    ingress: str
    since: float
    tenant: Tenant
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
    decision: Decision | None = None
    timing: Timing | None = None
    cost: int = 0
    placed_at: float | None = None
    expected_at: str = ""

    @property
    def key(self) -> Key:
        return (self.place.request, self.place.attempt)

    @property
    def migrates(self) -> bool:
        """A later attempt: its client has waited, and perhaps read, already."""
        return self.place.attempt > 1

    @property
    def needs_gen(self) -> bool:
        """False if ctx draws the first token and that ends every sample, so that no hand-off follows."""
        return self.place.max_new_tokens > (0 if self.place.left_to_gen else 1)

    @property
    def rows(self) -> int:
        return self.place.samples if self.needs_gen else 0

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
        self.tenants = Tenants(settings.tenants)
        self.queue = WaitQueue(settings.max_waiting, self.tenants)
        self.migrations = Migrations(settings.max_migrations_in_flight)
        self.unbound: dict[Key, Record] = {}  # those whose time to bind has come, in that order
        self.prefill, self.pages, self.seats = PrefillClaims(), Claims("pages"), Claims("seats")
        self.pages.on_total = lambda boot, change: self.workers.spare_changed(boot, -change)
        self.rows = Claims("rows")
        self.held_s = Mean()  # how long requests hold their rows and pages, from their place to their end
        self.pairs: dict[str, tuple[str, ...]] = {}
        self.pair_used: dict[Pair, float] = {}
        self.wanted: set[str] = set()
        self.ended: OrderedDict[Key, float] = OrderedDict()
        self.counters: Counter[str] = Counter()
        self.block_tokens = 1  # of the whole cluster; workers say it when they register
        self.blocks = BlockIndex()
        self.feed = CacheFeed(self.blocks, self.send, self.counters)
        self.conversations = Conversations()
        self.shortlist = Shortlist(self.blocks, self._load)
        self.shortlists = [self.shortlist]  # all that go by the load of a worker
        self.prefill.on_change = self.load_changed
        self.seats.on_total = lambda boot, change: self.load_changed(boot)
        self.choices = 0
        self.out: list[Action] = []
        self.log_decision: Callable[[Entry], None] | None = None

    # ------------------------------------------------------------------------------------------------------------ words

    def send(self, to: str, frame: object) -> None:
        self.out.append(Send(to, frame))

    def serving(self, now: float) -> bool:
        """False while a starting router still listens for workers, and for a higher epoch number."""
        since = self.started if self.first_worker_at is None else self.first_worker_at
        return now >= since + self.settings.settle_s

    def chosen(self, worker: Worker, key: Key) -> None:
        """A request is given to a worker."""
        self.choices += 1
        self.workers.breakers.given(worker.name, key, self.clock())
        worker.last_chosen = self.choices
        self.load_changed(worker.boot)
        self.epoch.served = True

    def tell_placed(self, record: Record, leg: str, worker: Worker) -> None:
        at = worker.register
        self.send(record.ingress, Placed(*record.key, leg, at.worker, at.boot, at.host, at.port))

    def refuse(self, record: Record, reason: str, retry_s: float) -> None:
        """The attempt is over here; its ingress is told."""
        self.counters[f"refused_{reason}"] += 1
        status = 429 if reason in TENANT_REASONS else 503
        self.send(record.ingress, Refused(*record.key, status, reason, retry_s))
        self.forget(record)

    def at_fault(self, boot: str) -> None:
        """A request failed by the fault of a worker; nothing if that boot is gone, for deaths count by themselves."""
        worker = self.workers.get(boot)
        if worker is not None:
            self.workers.breakers.fault(worker.name, boot, self.clock())

    def judge(self, record: Record, outcome: str) -> None:
        """What the end of an attempt says about its workers. After their faults were told."""
        for boot in {record.worker, record.gen}:
            worker = self.workers.get(boot)
            if worker is not None and outcome == "finished":
                self.workers.breakers.success(worker.name, record.key)
            elif worker is not None:
                self.workers.breakers.ended(worker.name, record.key)

    # ---------------------------------------------------------------------------------------------------------- records

    def keep(self, record: Record) -> None:
        self.records[record.key] = record
        if record.ingress in self.ingresses:
            self.ingresses[record.ingress].keys.add(record.key)
        for boot in self.workers.claimed(record.key):
            self.load_changed(boot)

    def forget(self, record: Record, outcome: str = "", served: int | None = None) -> None:
        """Every claim goes back, and a gen that may be at work on it unasked is told to stop; but none whose ingress
        only has no link to here (INGRESS_LOST): it may be served all the same.

        `served`: tokens to charge its tenant for; None: not known, so what was expected stands.
        """
        now, key = self.clock(), record.key
        if self.records.pop(key, None) is None:
            return
        self.judge(record, outcome)
        self.queue.remove(key)
        self.migrations.remove(key)
        self.migrations.in_flight.give_back(key)
        self.unbound.pop(key, None)
        self.prefill.give_back(key)
        self.unexpect(record)
        self.seats.give_back(key)
        self.rows.give_back(key)
        only_claimed = self.pages.give_back(key)
        if record.placed_at is None:
            record.tenant.draw(-record.cost)
        else:
            self.tenants.end(record.tenant, record.cost, record.cost if served is None else served)
            if record.rows:
                self.held_s.add(now - record.placed_at)
        if record.ingress in self.ingresses:
            self.ingresses[record.ingress].keys.discard(key)
        gen = self.workers.get(record.gen)
        if gen is not None:
            self.workers.set_free_pages(gen, gen.free_pages + record.pages - only_claimed)  # until its next heartbeat
            unasked = outcome != "finished" or now - record.bound_at < JUST_BOUND_S
            if record.leg == "prefill" and unasked and outcome != INGRESS_LOST:
                self.send(record.gen, Cancel(*key, outcome or "refused"))
        if record.decision is not None and self.log_decision is not None:
            self.log_decision(Entry(record.decision, Outcome.of(outcome or "refused", record.timing)))
        self.ended[key] = now
        self.ended.move_to_end(key)

    def sweep(self, now: float) -> None:
        """Drop tombstones that are old enough, and pairs of the dead."""
        while self.ended and next(iter(self.ended.values())) < now - TOMBSTONE_S:
            self.ended.popitem(last=False)

    # --------------------------------------------------------------------------------------------------------- tenants

    def charge(self, record: Record) -> None:
        """A request has come in: its tenant's bucket pays what it will likely cost. A later attempt computes its prompt
        once more, but that is no fault of the tenant."""
        place = record.place
        prompt = 0 if record.migrates else place.num_tokens
        record.cost = self.tenants.expected(record.tenant, prompt, place.max_new_tokens, place.samples)
        record.tenant.draw(record.cost)

    def begun(self, record: Record, now: float) -> None:
        """It is placed: its tenant's turn is over, and its rows are taken."""
        record.placed_at = now
        self.tenants.wake(record.tenant)
        self.tenants.begin(record.tenant, record.cost, in_turn=not record.migrates)
        if record.rows:
            self.rows.claim(record.key, POOL, record.rows)

    # ------------------------------------------------------------------------------------------------------------- rows

    def free_rows(self, gens: Usable) -> float:
        """Rows that may still be promised; infinite while a gen does not say how many it has."""
        capacity = self.row_capacity(gens)
        foreign = sum(len(w.foreign) for w in self.workers.with_foreign.values() if w.boot in gens.boots)
        return capacity - self.rows.sum - foreign

    @staticmethod
    def row_capacity(gens: Usable) -> float:
        """Rows of these gens' batches, and the hand-offs that must be under way to keep them full."""
        rows = gens.batch_rows
        if rows is None:
            return math.inf
        return rows + max(MIN_ROWS_AHEAD, rows // ROWS_AHEAD)

    # --------------------------------------------------------------------------------------------------------- prefixes

    def find_cached(self, place: Place) -> Found:
        """What of a prompt's blocks each worker has, or will have when it comes to it. Never all of the prompt: its
        last token is always computed."""
        return self.blocks.find(place.namespace, place.hashes, (place.num_tokens - 1) // self.block_tokens)

    def cached_tokens(self, place: Place) -> dict[str, int]:
        """Boot id -> tokens; 0 is left out."""
        blocks = self.blocks.cached_blocks(place.namespace, place.hashes, (place.num_tokens - 1) // self.block_tokens)
        return {boot: count * self.block_tokens for boot, count in blocks.items()}

    def expect(self, record: Record, boot: str) -> None:
        """Its blocks will be cached there before a later request's turn comes."""
        record.expected_at = boot
        self.blocks.expect(boot, record.place.namespace, record.place.hashes)

    def unexpect(self, record: Record) -> None:
        """They are there, and the worker has said so; or they will never be."""
        if record.expected_at:
            self.blocks.unexpect(record.expected_at, record.place.namespace, record.place.hashes)
            record.expected_at = ""

    def load_changed(self, boot: str) -> None:
        """What policies look at may have changed."""
        for shortlist in self.shortlists:
            shortlist.changed(boot)

    def refresh_shortlists(self) -> None:
        """After each event, so that the next choice need not. Few workers are all looked at, and nobody asks: then
        only so that the names of the dead do not add up."""
        many = len(self.workers) > MANY
        for shortlist in self.shortlists:
            if many or shortlist.num_changed > 2 * MANY:
                shortlist.refresh()

    def _load(self, boot: str) -> tuple[float, int, str] | None:
        """What the policy looks at first, for the shortlist; None for a worker that does not prefill, or is gone."""
        worker, policy = self.workers.get(boot), self.settings.placement
        if worker is None or not worker.prefills:
            return None
        if policy == "round_robin":
            return (worker.last_chosen, 0, boot)
        load = self.tokens_left(worker) if policy == "least_tokens" else self.backlog_s(worker)
        return (load, worker.last_chosen, boot)

    # ------------------------------------------------------------------------------------------------------------ pages

    def free_pages(self, worker: Worker) -> int:
        """Pages of a gen that nothing is promised."""
        return worker.free_pages - self.pages.total(worker.boot)

    def pool_pages(self, gens: Usable) -> int:
        """Free pages of these gens less all unbound claims, also those that only ctx workers' whole sets tell of."""
        foreign = sum(
            self.most_pages(held.needs, 1, gens)
            for worker in self.workers.with_foreign.values()
            for held in worker.foreign.values()
            if held.needs > 0
        )
        if gens.spare is None:
            gens.spare = sum(map(self.free_pages, gens))
        return gens.spare - self.pages.total(POOL) - foreign

    @staticmethod
    def most_pages(num_tokens: int, samples: int, gens: Usable) -> int:
        """Of a prompt at any of these gens; 0 without one."""
        gen = gens.smallest_pages
        return gen.pages_for(num_tokens, samples) if gen is not None else 0

    def tokens_left(self, worker: Worker) -> int:
        """Prompt tokens to be computed by a worker, those of unknown requests included."""
        if not worker.foreign:
            return self.prefill.total(worker.boot)
        foreign = sum(held.seconds_left or 0.0 for held in worker.foreign.values())
        return self.prefill.total(worker.boot) + int(foreign * self.workers.rate(worker))

    def backlog_s(self, worker: Worker) -> float:
        """Predicted seconds of prefill outstanding at a worker, those of unknown requests included."""
        if not worker.foreign:
            return self.claimed_s(worker)
        foreign = sum(held.seconds_left or 0.0 for held in worker.foreign.values())
        return foreign + self.claimed_s(worker)

    def claimed_s(self, worker: Worker) -> float:
        """Predicted seconds of the prefill that is claimed on a worker."""
        count, tokens, pairs = self.prefill.work(worker.boot)
        if not tokens:
            return 0.0
        each, a_token, a_pair, _ = self.workers.coefficients(worker)
        return each * count + a_token * tokens + a_pair * pairs

    def active(self, worker: Worker) -> int:
        """Requests that decode at a gen, or will."""
        return self.seats.total(worker.boot) + len(worker.foreign)

    def has_reader(self, ctx: Worker, gens: Usable) -> bool:
        """Whether any of these gens is paired with it."""
        return not gens.boots.isdisjoint(self.workers.readers(ctx.boot))

    def paired(self, gen: Worker, ctx: str) -> bool:
        return ctx in gen.pairs
