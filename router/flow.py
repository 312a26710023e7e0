"""The flow of one request at its ingress, decided without I/O: frames and clock readings in, actions out.

    Place -> Placed(prefill) -> Submit to ctx -> first token -> Placed(decode) -> Renew to gen -> tokens -> Done
          -> Placed(local)   -> Submit to gen -> tokens -> Done
          -> Refused
    a worker is gone, or says Fail(retryable): Done(migrating), Cancel to the others, Place again with what came so far

The state is a projection of transfer/request_state.py: the ingress sees a request start, end its prefill or become
readable only through the tokens that follow. It owns the request: it alone makes attempts and ends it, and it sends
Done exactly once an attempt. The caller (ingress.py) carries out the actions, calls `tick` often and knows the sockets.

What a broken link or a dead worker means depends on what is already here:
    gen, before its first token   its pages were only read, so the router may bind another: wait `rebind_wait_s`
    gen, decoding                 a new attempt, continuing the same stream
    ctx, first tokens here, gen   gen can read on or says Fail: wait `rebind_wait_s`
    ctx, decoding                 nothing
    ctx, otherwise                a new attempt
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tailrace.model.sampling_params import SamplingParams
from tailrace.router.api_errors import Failure
from tailrace.router.sample import Receipt, Sample
from tailrace.transfer.messages import (
    Cancel,
    Delta,
    Done,
    Fail,
    Place,
    Placed,
    Refused,
    Renew,
    Submit,
    TokenLogprob,
    pack_ids,
)
from tailrace.transfer.request_state import TERMINAL, Event, State, advance

# Pauses before the second attempt, the third and so on; after the last one the request fails.
BACKOFF_S = (0.0, 0.1, 0.4, 1.0, 2.0)
GAP_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class FlowPolicy:
    """The operator's settings for all requests; names and meanings as in the configuration."""

    retries: bool = True
    max_worker_deaths_per_request: int = 2
    router_wait_s: float = 5.0
    rebind_wait_s: float = 10.0
    request_lease_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Spec:
    """What one request asks for; never changes.

    Attributes:
        hash_ids: packed block hashes of the full blocks of some ids, in this request's scope.
        hashes: the same of the prompt.
        deadline: clock reading after which the request fails, None for none.
    """

    request: str
    prompt_ids: Sequence[int]
    params: SamplingParams
    samples: int
    hashes: bytes
    hash_ids: Callable[[Sequence[int]], bytes]
    namespace: bytes
    tenant: str = ""
    priority: int = 0
    conversation: str | None = None
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class Leg:
    """A worker that this attempt uses."""

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


_BINDABLE = frozenset({State.PLACED, State.PREFILLING, State.PREFILLED_UNBOUND, State.READING})

_REFUSALS = {
    "no_gen": "no generation worker is available",
    "no_ctx": "no context worker is available",
    "no_pair": "no context worker is paired with a generation worker",
    "too_large": "the request does not fit into any worker's page pool",
    "queue_full": "too many requests are waiting",
    "deadline": "the request would not meet its timeout_s",
    "worker_deaths": "too many workers died while serving this request",
    "gen_lost": "the generation worker was lost before it took the request over",
    "bind_failed": "no generation worker could take the request over",
}


def refusal(refused: Refused) -> Failure:
    """A router's refusal in words for the client."""
    code = "rate_limited" if refused.status == 429 else "no_capacity"
    message = _REFUSALS.get(refused.reason, refused.reason)
    return Failure(refused.status, code, message, refused.retry_after_s)


@dataclass(slots=True)
class Stamps:
    """Clock readings of the request's edges, None until passed; `worker`: durations that the first delta told."""

    began: float
    placed: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    worker: dict[str, float] | None = None


class Flow:
    """One request. Every method that takes an event returns the actions that follow, in order.

    Attributes:
        state: of the present attempt.
        failure: why it ended, where it did not end well.
        delivered: tokens of it were given to the client, so they can no longer be taken back. Set by the caller.
        prompt_logprobs, cached_tokens: as the first delta that had them said.
        stale: frames and deltas that came for another attempt or said nothing new.
    """

    def __init__(self, spec: Spec, policy: FlowPolicy, new_samples: Callable[[], list[Sample]], now: float) -> None:
        self.spec, self.policy = spec, policy
        self.samples = new_samples()
        self.state = State.QUEUED
        self.failure: Failure | None = None
        self.reason = ""
        self.delivered = False
        self.attempt = 1
        self.deaths = 0
        self.stale = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.cached_tokens = 0
        self.stamps = Stamps(began=now)
        self._new_samples = new_samples
        self._ctx: Leg | None = None
        self._gen: Leg | None = None
        self._prefilled = False  # the ctx's first tokens are here
        self._dead: set[str] = set()
        self._lost: set[str] = set()  # boots that this request was on when they, or the link to them, went
        self._counted: set[str] = set()  # boots whose death is in `deaths`, or never will be
        self._excluded: dict[str, None] = {}  # boots that failed it, in order
        self._place_at: float | None = None  # a later attempt that waits a little
        self._no_router_since: float | None = None
        self._gap_since: float | None = None
        self._wait_until: float | None = None  # for another gen, or for the gen that reads from a dead ctx
        self._actions: list[Action] = []

    # ---------------------------------------------------------------------------------------------------------- asked

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def key(self) -> tuple[str, int]:
        return (self.spec.request, self.attempt)

    @property
    def awaits_place(self) -> bool:
        return self.state in (State.QUEUED, State.MIGRATING)

    @property
    def completion_tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    def legs(self) -> list[Leg]:
        """The workers that hold this attempt now: where leases are renewed and cancels go."""
        ctx = self._ctx if self.state is not State.DECODING else None
        return [leg for leg in (ctx, self._gen) if leg is not None]

    # --------------------------------------------------------------------------------------------------------- events

    def start(self) -> list[Action]:
        self._place(self.stamps.began)
        return self._take()

    def router_up(self, now: float) -> list[Action]:
        """The router can be spoken to (again), perhaps a new one: ask again what it may not know (messages.Place)."""
        self._no_router_since = None
        if self.awaits_place:
            self._place(now)
        elif self._ctx is not None and self._gen is None and not self.ended:
            self._place(now, at=self._ctx.boot)
        return self._take()

    def on_placed(self, placed: Placed, now: float) -> list[Action]:
        leg = Leg.of(placed)
        if self.ended or placed.attempt != self.attempt:
            self.stale += 1
            self._cancel_leg(leg, placed.attempt)
        elif placed.leg == "decode":
            self._bound(leg, now)
        elif not self.awaits_place:
            self.stale += 1
        elif leg.boot in self._dead:  # the router does not know it yet
            self._done("migrating", "lost")
            self._place_later(now)
        else:
            self.state = advance(self.state, Event.PLACE)
            self.stamps.placed = self.stamps.placed or now
            self._ctx, self._gen = (None, leg) if placed.leg == "local" else (leg, None)
            self._actions.append(ToWorker(leg, self._submit(placed.leg, now)))
        return self._take()

    def on_refused(self, refused: Refused, now: float) -> list[Action]:
        if self.ended or refused.attempt != self.attempt:
            self.stale += 1
            return []
        failure = refusal(refused)
        if not self.awaits_place and refused.reason in ("gen_lost", "bind_failed"):
            self._again(failure, now)
        else:
            self.failure = failure
            self._end(Event.REFUSE if self.awaits_place else Event.FAIL, refused.reason)
        return self._take()

    def on_delta(self, boot: str, delta: Delta, now: float) -> list[Action]:
        """Tokens from the worker with that boot id; raises ValueError if they are malformed."""
        from_ctx = self._ctx is not None and boot == self._ctx.boot
        from_gen = self._gen is not None and boot == self._gen.boot
        known = delta.attempt == self.attempt and 0 <= delta.sample < len(self.samples)
        if self.ended or not known or not (from_ctx or from_gen):
            self.stale += 1
            return []
        sample = self.samples[delta.sample]
        receipt = sample.receive(delta)
        self.stale += receipt is Receipt.STALE
        if delta.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if self.stamps.first_token is None and receipt is Receipt.NEW:
            self.stamps.first_token, self.stamps.worker = now, delta.stamps
            self.cached_tokens = delta.cached_tokens
        self.stamps.last_token = now
        self._arrived(from_gen)
        if receipt is Receipt.EARLY or self._gap_since is not None:
            self._note_gap(now)
        if sample.finish is not None and all(s.finish is not None for s in self.samples):
            self._finish(boot)
        return self._take()

    def on_fail(self, boot: str, fail: Fail, now: float) -> list[Action]:
        if self.ended or fail.attempt != self.attempt or all(leg.boot != boot for leg in self.legs()):
            self.stale += 1
            return []
        failure = Failure.of_code(fail.code, fail.message)
        if fail.retryable:
            self._excluded[boot] = None
            self._again(failure, now, told_by=boot)
        else:
            self._fail(failure, told_by=boot)
        return self._take()

    def on_gone(self, boot: str, now: float, *, dead: bool, reached: bool = True) -> list[Action]:
        """The worker died, or (not `dead`) the link to it broke, with frames perhaps lost on the way.

        `reached` is False if it never got anything from here: its death says nothing about this request.
        """
        if self.ended:
            return []
        holds = any(leg.boot == boot for leg in self.legs())
        counts = dead and reached and (holds or boot in self._lost) and boot not in self._counted
        self.deaths += counts
        if counts or not reached:
            self._counted.add(boot)
        if dead:
            self._dead.add(boot)
        if holds:
            self._lost.add(boot)
            self._left(boot, now, died=counts)
        return self._take()

    def cancel(self, reason: str) -> list[Action]:
        """The client is gone, or the caller wants it ended."""
        if not self.ended:
            self._end(Event.CANCEL, reason)
        return self._take()

    def fail(self, failure: Failure) -> list[Action]:
        """The caller found a fault (malformed tokens)."""
        if not self.ended:
            self._fail(failure)
        return self._take()

    def tick(self, now: float, *, router_up: bool) -> list[Action]:
        """Deadlines and waits that ran out; call it several times a second."""
        if self.ended:
            return []
        if self.spec.deadline is not None and now >= self.spec.deadline:
            self._fail(Failure(504, "timeout", "the request's timeout_s is over"))
        elif self._place_at is not None and now >= self._place_at:
            self._place(now)
        elif self.awaits_place and not router_up:
            if self._no_router_since is None:
                self._no_router_since = now
            elif now - self._no_router_since >= self.policy.router_wait_s:
                self.failure = Failure(503, "no_router", "no router is reachable", self.policy.router_wait_s)
                self._end(Event.REFUSE, "no_router")
        elif self._gap_since is not None and now - self._gap_since >= GAP_WAIT_S:
            self._again(Failure.of_code("lost", "tokens were lost on the way"), now)
        elif self._wait_until is not None and now >= self._wait_until:
            self._again(Failure.of_code("lost", "a worker died and nobody took over"), now)
        return self._take()

    # ------------------------------------------------------------------------------------------------------- decisions

    def _bound(self, leg: Leg, now: float) -> None:
        """A gen was bound. `_gen` is None before, or one that the router replaced without our knowing it was gone."""
        if leg.boot in self._dead:  # the router will find out and bind another
            self.stale += 1
            self._wait_until = self._wait_until or now + self.policy.rebind_wait_s
            return
        if self.state not in _BINDABLE or self._ctx is None:
            self.stale += 1
            if self._gen is None or self._gen.boot != leg.boot:
                self._cancel_leg(leg, self.attempt)
            return
        if self.state is State.READING:
            self._unbind()
        self.state = advance(self.state, Event.BIND)
        self._gen, self._wait_until = leg, None
        self._actions.append(ToWorker(leg, Renew((self.key,), self.policy.request_lease_s)))

    def _unbind(self) -> None:
        self._gen = None
        self.state = advance(self.state, Event.UNBIND if self._prefilled else Event.UNBIND_EARLY)

    def _arrived(self, from_gen: bool) -> None:
        """Move the state by what these tokens prove."""
        if self.state is State.DECODING:
            return
        if from_gen:
            if self.state is State.PLACED:
                self._move(Event.START, Event.VALID)  # local
            elif self.state is State.READING:
                self._move(Event.READ_ALL, Event.VALID)
            self._wait_until = None
        else:
            self._prefilled = all(s.ids or s.finish is not None for s in self.samples)
            if self.state in (State.PLACED, State.PREFILLING):
                self._move(Event.START, Event.PREFILL_END)

    def _move(self, *events: Event) -> None:
        for event in events:
            self.state = advance(self.state, event)

    def _note_gap(self, now: float) -> None:
        gap = any(sample.waits_for_gap for sample in self.samples)
        self._gap_since = (self._gap_since or now) if gap else None

    def _finish(self, boot: str) -> None:
        """All samples ended. Whoever did not say so itself is told: a gen that the first token made needless, or any
        worker where it was a stop string, which only the ingress sees."""
        cut = any(sample.cut for sample in self.samples)
        legs = [leg for leg in self.legs() if cut or (leg is self._gen and leg.boot != boot)]
        self._end(Event.FINISH, "stop_string" if cut else "", legs=legs)

    def _left(self, boot: str, now: float, *, died: bool) -> None:
        """A worker of this attempt is gone (the module's table)."""
        failure = Failure.of_code("lost", "the worker serving this request is gone")
        reads = self.state is State.READING and self.policy.retries
        if died and self.deaths >= self.policy.max_worker_deaths_per_request:
            self._fail(Failure.of_code("lost", f"{self.deaths} workers died while serving this request"))
            self.reason = "worker_deaths"
        elif reads and self._gen is not None and boot == self._gen.boot:
            self._unbind()
            self._wait_until = now + self.policy.rebind_wait_s
        elif reads and self._ctx is not None and boot == self._ctx.boot and self._prefilled:
            self._wait_until = now + self.policy.rebind_wait_s
        else:
            self._excluded[boot] = None
            self._again(failure, now)

    def _again(self, failure: Failure, now: float, *, told_by: str = "") -> None:
        """Another attempt, or the end if there may be none. `told_by`: the worker that has ended this one itself."""
        one_stream = self.spec.samples == 1 or not self.delivered
        if not (self.policy.retries and one_stream and self.attempt <= len(BACKOFF_S)):
            self._fail(failure, told_by=told_by)
            return
        self._tell(self.legs(), "superseded", told_by=told_by)
        self._done("migrating", failure.code)
        self.state = advance(self.state, Event.LOST)
        if self.spec.samples > 1:
            self.samples = self._new_samples()
        for sample in self.samples:
            sample.forget_early()
        self._ctx = self._gen = self._gap_since = self._wait_until = None
        self._prefilled = False
        self._place_later(now)

    def _place_later(self, now: float) -> None:
        """The next attempt: the first one at once, later ones after a pause, for whatever is wrong to be noticed."""
        pause = BACKOFF_S[min(self.attempt, len(BACKOFF_S)) - 1]
        self.attempt += 1
        if pause:
            self._place_at = now + pause
        else:
            self._place(now)

    def _fail(self, failure: Failure, *, told_by: str = "") -> None:
        self.failure = failure
        self._end(Event.FAIL, failure.code, told_by=told_by)

    def _end(self, event: Event, reason: str, *, legs: Sequence[Leg] | None = None, told_by: str = "") -> None:
        self._tell(self.legs() if legs is None else legs, reason, told_by=told_by)
        self.state = advance(self.state, event)
        self.reason = reason
        self._done(self.state.value, reason)

    def _tell(self, legs: Sequence[Leg], reason: str, *, told_by: str) -> None:
        for leg in legs:
            if leg.boot != told_by and leg.boot not in self._dead:
                self._cancel_leg(leg, self.attempt, reason)

    # ---------------------------------------------------------------------------------------------------------- frames

    def _place(self, now: float, at: str = "") -> None:
        spec, output = self.spec, self._output_ids()
        self._place_at = None
        self._actions.append(
            ToRouter(
                Place(
                    request=spec.request,
                    attempt=self.attempt,
                    num_tokens=len(spec.prompt_ids) + len(output),
                    max_new_tokens=spec.params.max_tokens - len(output),
                    samples=spec.samples,
                    hashes=self._hashes(output),
                    tenant=spec.tenant,
                    priority=spec.priority,
                    deadline_s=None if spec.deadline is None else max(0.0, spec.deadline - now),
                    conversation=spec.conversation,
                    deaths=self.deaths,
                    namespace=spec.namespace,
                    exclude=tuple(self._excluded),
                    at=at,
                )
            )
        )

    def _submit(self, leg: str, now: float) -> Submit:
        spec, output = self.spec, self._output_ids()
        params = replace(spec.params, prompt_logprobs=None) if self.prompt_logprobs else spec.params
        return Submit(
            request=spec.request,
            attempt=self.attempt,
            leg=leg,
            prompt_ids=pack_ids(list(spec.prompt_ids)),
            output_ids=pack_ids(output),
            params=params,
            samples=spec.samples,
            hashes=self._hashes(output),
            namespace=spec.namespace,
            priority=spec.priority,
            lease_s=self.policy.request_lease_s,
            timeout_s=None if spec.deadline is None else max(0.0, spec.deadline - now),
            no_cache=params.prompt_logprobs is not None,
        )

    def _output_ids(self) -> list[int]:
        return self.samples[0].ids if self.spec.samples == 1 else []

    def _hashes(self, output: list[int]) -> bytes:
        return self.spec.hash_ids([*self.spec.prompt_ids, *output]) if output else self.spec.hashes

    def _cancel_leg(self, leg: Leg, attempt: int, reason: str = "superseded") -> None:
        """Also for a leg of an attempt that is over: what was reserved there is let go."""
        self._actions.append(ToWorker(leg, Cancel(self.spec.request, attempt, reason)))

    def _done(self, outcome: str, reason: str) -> None:
        self._actions.append(ToRouter(Done(self.spec.request, self.attempt, outcome, reason)))

    def _take(self) -> list[Action]:
        taken, self._actions = self._actions, []
        return taken
