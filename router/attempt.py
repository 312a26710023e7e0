"""One attempt of a request at its ingress: the legs it uses, how far it is, and what it has to ask and send.

A request begins with one attempt for all its samples. What is lost in mid-stream goes on sample by sample: each sample
that has tokens and no end gets an attempt of its own, with its own number, which computes prompt and output anew and
continues at the next position. So (request, attempt) stays the one key, and no worker learns of the other samples.

Plain data and its projection of transfer/request_state.py; flow.py decides. Knows no clock but readings it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.router.sample import Sample
from tailrace.transfer.messages import Cancel, Done, Place, Placed, Renew, Submit
from tailrace.transfer.request_state import TERMINAL, Event, State, advance


@dataclass(frozen=True, slots=True)
class Leg:
    """A worker that an attempt uses."""

    worker: str
    boot: str
    host: str
    port: int

    @classmethod
    def of(cls, placed: Placed) -> Leg:
        return cls(placed.worker, placed.boot, placed.host, placed.port)


@dataclass(frozen=True, slots=True)
class ToRouter:
    frame: Place | Done


@dataclass(frozen=True, slots=True)
class ToWorker:
    leg: Leg
    frame: Submit | Renew | Cancel


Action = ToRouter | ToWorker

BINDABLE = frozenset({State.PLACED, State.PREFILLING, State.PREFILLED_UNBOUND, State.READING})


@dataclass(slots=True, eq=False)
class Attempt:
    """See the module.

    Attributes:
        number: unique in its request, 1 for the first.
        samples: those it works on: all of a request while none has a token, else one.
        tries: attempts for these samples that failed, and this one.
        given_back: of those before it, the ones that a gen gave back for want of pages.
        prefilled: the ctx's first tokens are here.
        left_to_gen: the last so many tokens of what it computes are gen's; None until it is placed first.
        place_at: when to ask for a place, of one that waits a little first.
        gap_since: later tokens are here, earlier ones are not.
        wait_until: for another gen, or for the gen that reads from a dead ctx.
    """

    number: int
    samples: list[Sample]
    tries: int = 1
    given_back: int = 0
    state: State = State.QUEUED
    ctx: Leg | None = None
    gen: Leg | None = None
    prefilled: bool = False
    left_to_gen: int | None = None
    place_at: float | None = None
    gap_since: float | None = None
    wait_until: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def awaits_place(self) -> bool:
        return self.state in (State.QUEUED, State.MIGRATING)

    @property
    def output_ids(self) -> list[int]:
        """What former attempts brought."""
        return self.samples[0].ids if len(self.samples) == 1 else []

    @property
    def unfinished(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.finish is None]

    @property
    def may_do_without_ctx(self) -> bool:
        """Whether a bound gen may have all that ctx could give. Where gen draws the first token it alone knows."""
        return self.prefilled or bool(self.left_to_gen)

    def sample(self, index: int) -> Sample | None:
        """Its sample with that index in the request, None if it has none."""
        at = index - self.samples[0].index
        return self.samples[at] if 0 <= at < len(self.samples) else None

    def legs(self) -> list[Leg]:
        """The workers that hold it now: where leases are renewed and cancels go."""
        ctx = self.ctx if self.state is not State.DECODING else None
        return [leg for leg in (ctx, self.gen) if leg is not None]

    def holds(self, boot: str) -> bool:
        return any(leg.boot == boot for leg in self.legs())

    # ---------------------------------------------------------------------------------------------------------- edges

    def move(self, *events: Event) -> None:
        """Raises UnlistedEvent if the table does not have one of them."""
        for event in events:
            self.state = advance(self.state, event)

    def placed(self, leg: str, at: Leg) -> None:
        self.move(Event.PLACE)
        self.ctx, self.gen = (None, at) if leg == "local" else (at, None)

    def bound(self, gen: Leg) -> None:
        """`gen` is None before, or one that the router replaced without our knowing that it was gone."""
        if self.state is State.READING:
            self.unbind()
        self.move(Event.BIND)
        self.gen, self.wait_until = gen, None

    def unbind(self) -> None:
        self.gen = None
        self.move(Event.UNBIND if self.prefilled else Event.UNBIND_EARLY)

    def arrived(self, from_gen: bool) -> None:
        """Move the state by what tokens prove."""
        if self.state is State.DECODING:
            return
        if from_gen:
            if self.state is State.PLACED:
                self.move(Event.START, Event.VALID)  # local
            elif self.state is State.READING:
                self.move(Event.READ_ALL, Event.VALID)
            self.wait_until = None
        else:
            self.prefilled = all(s.ids or s.finish is not None for s in self.samples)
            if self.state in (State.PLACED, State.PREFILLING):
                self.move(Event.START, Event.PREFILL_END)

    def note_gap(self, now: float) -> None:
        gap = any(sample.waits_for_gap for sample in self.samples)
        self.gap_since = (self.gap_since or now) if gap else None
