"""What a gen core keeps of one hand-off, from Bind to Valid, and of one read. Plain data; gen_core.py decides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import EXACT, Fidelity
from tailrace.transfer.bitmap import Unit, UnitBitmap
from tailrace.transfer.core_events import Action, Measure, Metric, PairUp, SumPart
from tailrace.transfer.loop_events import Admitted, Key
from tailrace.transfer.messages import Bind, Handoff, LandingGrant, Moved, PageDescriptor
from tailrace.transfer.page_plan import Destination, overlapping, unit_segments
from tailrace.transfer.request_state import State
from tailrace.transfer.transports.base import ReadDone
from tailrace.transfer.verify import Parts, Proof


@dataclass(slots=True)
class Hand:
    """One hand-off, from Bind to Valid.

    Units are ctx's pages, by its ordinals; `pages` are ours, by ours: they may hold another number of tokens.

    Attributes:
        pages: one an ordinal of ours, SCRATCH_PAGE where the group needs none.
        into: the same, and which of the tokens we lack.
        unit_tokens: tokens a page of ctx.
        held: how true the pages are that we had.
        num_state_units: those of the units, behind the others, that ctx overwrites until its last token is computed.
        num_state_pages: of ours, behind those of the tokens handed over.
        num_ahead: pages behind them, for the tokens that are left to us.
        is_opaque: pages are taken whole, and ours are like ctx's.
        steps: what those that we read came through, and lost something.
    """

    bind: Bind
    pair: PairUp
    pages: list[int]
    into: Destination
    unit_tokens: int
    num_matched_tokens: int
    units: UnitBitmap
    bound_at: float
    progress_at: float
    asked_at: float
    state: State = State.READING
    seen: dict[Unit, PageDescriptor] = field(default_factory=dict)
    told: set[Unit] = field(default_factory=set)  # a read of it was started
    jobs: set[int] = field(default_factory=set)
    handoff: Handoff | None = None
    tokens_ready: int = 0
    final_at: float | None = None
    grants: dict[int, LandingGrant] = field(default_factory=dict)  # by chunk: out, and not landed
    ctx_dead: bool = False
    proof: Proof | None = None  # of its pages, if they are verified
    held: Fidelity = EXACT
    steps: set[str] = field(default_factory=set)
    codec: str = ""
    logical_bytes: int = 0
    wire_bytes: int = 0
    num_state_units: int = 0
    num_state_pages: int = 0
    num_ahead: int = 0
    is_opaque: bool = False

    @property
    def num_tokens(self) -> int:
        """Those whose state is handed over."""
        return self.into.num_tokens

    @property
    def key(self) -> Key:
        return (self.bind.request, self.bind.attempt)

    @property
    def complete(self) -> bool:
        return self.units.full and self.handoff is not None

    @property
    def fidelity(self) -> Fidelity:
        """Of all its pages: what is read behind lossy ones counts as lossy."""
        exact = self.num_matched_tokens if self.held.exact_tokens is None else self.held.exact_tokens
        return Fidelity.of(exact, [step for step in self.pair.steps if step in self.steps or step == self.held.step])

    def pages_under(self, ordinal: int, tokens_per_page: int) -> tuple[int, ...]:
        """Our pages, of so many tokens each, that the part we lack of ctx's page reaches into."""
        if tokens_per_page == self.unit_tokens:
            return (self.pages[ordinal],)
        first = max(self.into.first_token, ordinal * self.unit_tokens)
        end = min(self.into.num_tokens, (ordinal + 1) * self.unit_tokens)
        return tuple(self.pages[o] for o in overlapping(tokens_per_page, first, end))

    def admitted(self, wire_s: float, exposed_s: float) -> Admitted:
        """What the loop is told when it may decode."""
        assert self.handoff is not None
        pages, boot = self._pages_in_order(), self.pair.boot
        moved = self._moved(wire_s)
        return Admitted(self.handoff, pages, self.num_matched_tokens, wire_s, self.fidelity, boot, exposed_s, moved)

    def _pages_in_order(self) -> tuple[int, ...]:
        """As a layout orders those of all tokens: the state stands behind what is ahead of it."""
        ahead = len(self.pages) - self.num_ahead
        state = ahead - self.num_state_pages
        return (*self.pages[:state], *self.pages[ahead:], *self.pages[state:ahead])

    def _moved(self, wire_s: float) -> Moved:
        read, total = len(self.seen), self._num_units
        return Moved(
            self.pair.transport, self.codec, self.logical_bytes, self.wire_bytes, read, total - read,
            self.proof is not None, wire_s,
        )  # fmt: skip

    @property
    def _num_units(self) -> int:
        """All that ctx has of it."""
        return -(-self.num_tokens // self.unit_tokens) + self.num_state_units

    @property
    def stalled(self) -> bool:
        """Whether something that ctx has declared final is not here yet."""
        whole = self.tokens_ready >= self.num_tokens
        final = self._num_units if whole else self.tokens_ready // self.unit_tokens
        missing = self.units.missing()
        return bool(missing) and missing[0].ordinal < final

    def wants(self, page: PageDescriptor) -> bool:
        """Whether this page of ctx is still to be read."""
        unit = Unit(page.group, page.ordinal)
        return self.units.lacks(unit) and unit not in self.told

    def arrived(self, pages: Iterable[PageDescriptor]) -> None:
        """These are in our pages, and they are right."""
        for page in pages:
            unit = Unit(page.group, page.ordinal)
            if self.units.set(unit):
                self.seen[unit] = page

    def parts(self, tokens_per_page: int) -> Parts:
        """Where a unit's tokens stand in our pages, of so many tokens each."""

        def of(unit: Unit) -> tuple[SumPart, ...]:
            into = self.into
            if self.is_opaque:
                return (SumPart(into.pages[unit.ordinal], 0, 1, 0),)
            return tuple(
                SumPart(into.pages[s.dst_ordinal], s.dst_token, s.n, s.src_token)
                for s in unit_segments(self.unit_tokens, tokens_per_page, unit.ordinal, into)
            )

        return of


@dataclass(slots=True)
class ReadUnderWay:
    """A read under way into our `pages`. `quarantined`: its request is gone, its pages wait for its end."""

    key: Key
    boot: str
    units: frozenset[Unit]
    pages: frozenset[int]
    quarantined: bool = False


def real_pages(pages: list[int]) -> list[int]:
    return [page for page in pages if page != SCRATCH_PAGE]


def took(hand: Hand, done: ReadDone) -> list[Action]:
    """Remember what a read's pages lost on their way; measure what came into our pages, and what crossed for it."""
    if not len(done.units_ok):
        return []
    if done.step:
        hand.steps.add(done.step)
    hand.codec = done.codec
    hand.logical_bytes += done.logical_bytes
    hand.wire_bytes += done.wire_bytes
    labels = {"transport": hand.pair.transport, "codec": done.codec}
    return [
        Measure(Metric.TRANSFER_BYTES, done.logical_bytes, {"kind": "logical", **labels}),
        Measure(Metric.TRANSFER_BYTES, done.wire_bytes, {"kind": "wire", **labels}),
    ]
