"""The flow of one request at its ingress, decided without I/O: frames and clock readings in, actions out.

    Place -> Placed(prefill) -> Submit to ctx -> first token -> Placed(decode) -> Renew to gen -> tokens -> Done
          -> Placed(local)   -> Submit to gen -> tokens -> Done
          -> Refused
    a worker is gone, or says Fail(retryable): Done(migrating), Cancel to the others, Place again with what came so far

A flow has one attempt (attempt.py), or after a loss in mid-stream one for each sample that has not ended; samples that
have ended stay as they are. Penalties, seeds and grammars go on exactly, for sampling depends on the ids so far, the
position and the sample's index alone. It owns the request: it alone makes attempts and ends it, and it sends Done
exactly once an attempt. The caller (ingress.py) carries out the actions, calls `tick` often and knows the sockets.

What a broken link or a dead worker means depends on what is already here:
    gen, before its first token   its pages were only read, so the router may bind another: wait `rebind_wait_s`
    gen, decoding                 a new attempt, continuing the same stream
    ctx, first tokens here, gen   gen can read on or says Fail: wait `rebind_wait_s`
    ctx, gen draws the first      the same: gen alone knows whether it has been handed all that it needs
    ctx, decoding                 nothing
    ctx, otherwise                a new attempt

A worker that does not have what is renewed there says so (Fail `not_held`): so an attempt that was lost without a word
is placed anew after a third of the request lease, or `rebind_wait_s` later if ctx may have handed it over.

An attempt that a gen gives back for want of pages is no fault of anybody: it is placed again after a pause, and counts
only against GIVEN_BACK. All other losses count against BACKOFF_S.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tailrace.model.sampling_params import SamplingParams
from tailrace.router.api_errors import Failure
from tailrace.router.attempt import BINDABLE, Action, Attempt, Leg, ToRouter, ToWorker
from tailrace.router.sample import Receipt, Sample
from tailrace.transfer.messages import (
    NOT_HELD,
    Cancel,
    Delta,
    Done,
    Fail,
    Moved,
    Place,
    Placed,
    Refused,
    Renew,
    Submit,
    Timing,
    TokenLogprob,
    pack_ids,
)
from tailrace.transfer.request_state import Event, State

# Pauses before the second attempt, the third and so on; after the last one the request fails.
BACKOFF_S = (0.0, 0.1, 0.4, 1.0, 2.0)
GAP_WAIT_S = 2.0
TOGETHER_S = 0.5  # deaths so soon after a counted one are the same event (a host, a pool), and no fault of the request
GIVEN_BACK = 50  # times that a gen may give a request back for want of pages
GIVEN_BACK_PAUSE_S, MAX_GIVEN_BACK_PAUSE_S = 0.1, 1.0

# Fail.code -> who is at fault: the worker that says so, or either end of its pair. Others are nobody's: want of pages,
# a lease that ended, a deadline, a request that the worker cannot take.
_OWN_FAULTS = frozenset({"internal"})
_PAIR_FAULTS = frozenset({"transfer", "corrupt", "not_posted"})


@dataclass(frozen=True, slots=True)
class FlowPolicy:
    """The operator's settings for all requests; names and meanings as in the configuration. `left_to_gen`: tokens at a
    prompt's end that ctx leaves to gen (handoff_mode); 0: none."""

    retries: bool = True
    max_worker_deaths_per_request: int = 2
    router_wait_s: float = 5.0
    rebind_wait_s: float = 10.0
    request_lease_s: float = 10.0
    left_to_gen: int = 0


@dataclass(frozen=True, slots=True)
class Spec:
    """What one request asks for; never changes.

    Attributes:
        packed_ids: the prompt's ids as pack_ids gives them; a megabyte of text takes the event loop too long to pack.
        hash_ids: packed block hashes of the full blocks of some ids, in this request's scope.
        hashes: the same of the prompt.
        deadline: clock reading after which the request fails, None for none.
    """

    request: str
    prompt_ids: Sequence[int]
    packed_ids: bytes
    params: SamplingParams
    samples: int
    hashes: bytes
    hash_ids: Callable[[Sequence[int]], bytes]
    namespace: bytes
    tenant: str = ""
    priority: int = 0
    conversation: str | None = None
    deadline: float | None = None
    scope: str = ""


@dataclass(slots=True)
class Stamps:
    """Clock readings of the request's edges, None until passed; `worker`: durations that the first delta told."""

    began: float
    placed: float | None = None
    first_token: float | None = None
    first_attempt: int = 0
    last_token: float | None = None
    worker: dict[str, float] | None = None


class Flow:
    """One request. Every method that takes an event returns the actions that follow, in order.

    Attributes:
        samples: in order of their index.
        failure: why it ended, where it did not end well.
        attempts: those that have not ended, by number.
        deaths: times that workers died while serving it; those that die together count once.
        prompt_logprobs, cached_tokens: as the first delta that had them said.
        workers: names of the ctx and the gen that were used last, None where there was none.
        moved: how the pages came between them.
        stale: frames and deltas that came for another attempt or said nothing new.
    """

    def __init__(self, spec: Spec, policy: FlowPolicy, samples: list[Sample], now: float) -> None:
        self.spec, self.policy, self.samples = spec, policy, samples
        self.failure: Failure | None = None
        self.reason = ""
        self.deaths = 0
        self._died_at = float("-inf")  # when a death was last counted
        self.stale = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.cached_tokens = 0
        self.workers: tuple[str | None, str | None] = (None, None)
        self.moved: Moved | None = None
        self.stamps = Stamps(began=now)
        self.attempts = {1: Attempt(1, samples)}
        self._numbers = 1
        self._end_state: State | None = None
        self._told_prompt, self._told_output = False, 0  # to the router, for the tenant's account
        self._dead: set[str] = set()
        self._lost: set[str] = set()  # boots that this request was on when they, or the link to them, went
        self._counted: set[str] = set()  # boots whose death is in `deaths`, or never will be
        self._excluded: dict[str, None] = {}  # boots that failed it, in order
        self._distrusts = False  # pages of it were wrong: later attempts compute all of them
        self._no_router_since: float | None = None
        self._actions: list[Action] = []

    # ---------------------------------------------------------------------------------------------------------- asked

    @property
    def state(self) -> State:
        """Of the eldest attempt that has not ended, or of the whole once it has."""
        return self._end_state or next(iter(self.attempts.values())).state

    @property
    def ended(self) -> bool:
        return self._end_state is not None

    @property
    def attempt(self) -> int:
        """Number of the latest attempt."""
        return self._numbers

    @property
    def completion_tokens(self) -> int:
        return sum(len(sample.ids) for sample in self.samples)

    def held(self) -> list[tuple[Leg, tuple[str, int]]]:
        """The workers that hold an attempt now, and its key: where leases are renewed."""
        return [(leg, (self.spec.request, a.number)) for a in self.attempts.values() for leg in a.legs()]

    def shape(self) -> dict[str, Any]:
        """What of the request may matter to a worker that dies of it, without its content; for the log."""
        spec, params = self.spec, self.spec.params
        usual = SamplingParams(max_tokens=params.max_tokens)
        unusual = {}
        for name in params.__dataclass_fields__:
            value = getattr(params, name)
            if value != getattr(usual, name) and name != "seed":
                unusual[name] = value if isinstance(value, int | float) else f"{len(value)} given"
        return {
            "prompt_tokens": len(spec.prompt_ids), "output_tokens": self.completion_tokens, "samples": spec.samples,
            "max_tokens": params.max_tokens, "params": unusual, "attempt": self.attempt, "deaths": self.deaths,
        }  # fmt: skip

    # --------------------------------------------------------------------------------------------------------- events

    def start(self) -> list[Action]:
        self._place(self.attempts[1], self.stamps.began)
        return self._take()

    def router_up(self, now: float) -> list[Action]:
        """The router can be spoken to (again), perhaps a new one: ask again what it may not know (messages.Place)."""
        self._no_router_since = None
        for attempt in self.attempts.values():
            if attempt.awaits_place:
                self._place(attempt, now)
            elif attempt.ctx is not None and attempt.gen is None:
                self._place(attempt, now, at=attempt.ctx.boot)
        return self._take()

    def on_placed(self, placed: Placed, now: float) -> list[Action]:
        leg, attempt = Leg.of(placed), self.attempts.get(placed.attempt)
        if attempt is None:
            self.stale += 1
            self._cancel_leg(leg, placed.attempt)
        elif placed.leg == "decode":
            self._bound(attempt, leg, now)
        elif not attempt.awaits_place or attempt.place_at is not None:
            self.stale += 1
        elif leg.boot in self._dead:  # the router does not know it yet
            self._done(attempt, "migrating", "lost")
            self._succeed(attempt, now)
        else:
            attempt.placed(placed.leg, leg)
            self.moved = None
            self._note_workers(attempt)
            self.stamps.placed = self.stamps.placed or now
            self._actions.append(ToWorker(leg, self._submit(attempt, placed.leg, now)))
        return self._take()

    def on_refused(self, refused: Refused, now: float) -> list[Action]:
        attempt = self.attempts.get(refused.attempt)
        if attempt is None:
            self.stale += 1
            return []
        failure = Failure.of_refusal(refused.status, refused.reason, refused.retry_after_s)
        if not attempt.awaits_place and refused.reason in ("gen_lost", "bind_failed"):
            self._again(attempt, failure, now)
        else:
            self.failure = failure
            self._end(attempt, Event.REFUSE if attempt.awaits_place else Event.FAIL, refused.reason)
        return self._take()

    def on_delta(self, boot: str, delta: Delta, now: float) -> list[Action]:
        """Tokens from the worker with that boot id; raises ValueError if they are malformed."""
        attempt = self.attempts.get(delta.attempt)
        sample = None if attempt is None else attempt.sample(delta.sample)
        from_gen = attempt is not None and attempt.gen is not None and boot == attempt.gen.boot
        from_ctx = attempt is not None and attempt.ctx is not None and boot == attempt.ctx.boot
        if attempt is None or sample is None or not (from_ctx or from_gen):
            self.stale += 1
            return []
        receipt = sample.receive(delta)
        self.stale += receipt is Receipt.STALE
        if delta.prompt_logprobs and not self.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.moved is not None:
            self.moved = delta.moved
        if self.stamps.first_token is None and receipt is Receipt.NEW:
            self.stamps.first_token, self.stamps.worker = now, delta.stamps
            self.stamps.first_attempt = attempt.number
            self.cached_tokens = delta.cached_tokens
        self.stamps.last_token = now
        attempt.arrived(from_gen)
        if receipt is Receipt.EARLY or attempt.gap_since is not None:
            attempt.note_gap(now)
        if sample.finish is not None and not attempt.unfinished:
            self._finish(attempt, boot)
        return self._take()

    def on_fail(self, boot: str, fail: Fail, now: float) -> list[Action]:
        attempt = self.attempts.get(fail.attempt)
        if attempt is None or not attempt.holds(boot):
            self.stale += 1
            return []
        if fail.code == NOT_HELD:
            self._not_held(attempt, boot, now)
            return self._take()
        failure = Failure.of_code(fail.code, fail.message)
        self._distrusts = self._distrusts or fail.code == "corrupt"
        faults = self._faults(attempt, boot, "transfer" if fail.code == "timeout" and fail.retryable else fail.code)
        ctx = attempt.ctx
        if fail.code == "lost" and attempt.left_to_gen and ctx is not None and ctx.boot in self._lost:
            self._excluded[ctx.boot] = None  # it died before gen had all: no transfer failed, gen did nothing wrong
            self._again(attempt, failure, now, told_by=boot)
        elif fail.retryable:
            gives_back = fail.code == "out_of_pages" and attempt.gen is not None and boot == attempt.gen.boot
            if not gives_back:
                self._excluded[boot] = None
            self._again(attempt, failure, now, told_by=boot, faults=faults, given_back=gives_back)
        else:
            self._fail(attempt, failure, told_by=boot, faults=faults)
        return self._take()

    def on_gone(self, boot: str, now: float, *, dead: bool, reached: bool = True) -> list[Action]:
        """The worker died, or (not `dead`) the link to it broke, with frames perhaps lost on the way.

        `reached` is False if it never got anything from here: its death says nothing about this request.
        """
        if self.ended:
            return []
        hit = [attempt for attempt in self.attempts.values() if attempt.holds(boot)]
        counts = dead and reached and (bool(hit) or boot in self._lost) and boot not in self._counted
        if counts and now - self._died_at > TOGETHER_S:
            self.deaths, self._died_at = self.deaths + 1, now
        if counts or not reached:
            self._counted.add(boot)
        if dead:
            self._dead.add(boot)
        if hit:
            self._lost.add(boot)
        if hit and counts and self.deaths >= self.policy.max_worker_deaths_per_request:
            self._fail(hit[0], Failure.of_code("lost", f"workers died {self.deaths} times while serving this request"))
            self.reason = "worker_deaths"
        for attempt in hit:
            if not self.ended:
                self._left(attempt, boot, now, dead=dead)
        return self._take()

    def cancel(self, reason: str) -> list[Action]:
        """The client is gone, or the caller wants it ended."""
        if not self.ended:
            self._end(next(iter(self.attempts.values())), Event.CANCEL, reason)
        return self._take()

    def fail(self, failure: Failure) -> list[Action]:
        """The caller found a fault (malformed tokens)."""
        if not self.ended:
            self._fail(next(iter(self.attempts.values())), failure)
        return self._take()

    def tick(self, now: float, *, router_up: bool) -> list[Action]:
        """Deadlines and waits that ran out; call it several times a second."""
        if self.ended:
            return []
        if self.spec.deadline is not None and now >= self.spec.deadline:
            return self.fail(Failure(504, "timeout", "the request's timeout_s is over"))
        for attempt in tuple(self.attempts.values()):
            if attempt.place_at is not None and now >= attempt.place_at:
                self._place(attempt, now)
            elif attempt.awaits_place and not router_up:
                self._wait_for_router(attempt, now)
            elif attempt.gap_since is not None and now - attempt.gap_since >= GAP_WAIT_S:
                self._again(attempt, Failure.of_code("lost", "tokens were lost on the way"), now)
            elif attempt.wait_until is not None and now >= attempt.wait_until:
                self._again(attempt, Failure.of_code("lost", "a worker died and nobody took over"), now)
            if self.ended:
                break
        return self._take()

    # ------------------------------------------------------------------------------------------------------- decisions

    def _bound(self, attempt: Attempt, leg: Leg, now: float) -> None:
        if leg.boot in self._dead:  # the router will find out and bind another
            self.stale += 1
            attempt.wait_until = attempt.wait_until or now + self.policy.rebind_wait_s
        elif attempt.state in BINDABLE and attempt.ctx is not None:
            attempt.bound(leg)
            self._note_workers(attempt)
            self._actions.append(ToWorker(leg, Renew(((self.spec.request, attempt.number),), self._lease_s)))
        else:
            self.stale += 1
            if attempt.gen is None or attempt.gen.boot != leg.boot:
                self._cancel_leg(leg, attempt.number)

    def _note_workers(self, attempt: Attempt) -> None:
        self.workers = (attempt.ctx and attempt.ctx.worker, attempt.gen and attempt.gen.worker)

    def _wait_for_router(self, attempt: Attempt, now: float) -> None:
        if self._no_router_since is None:
            self._no_router_since = now
        elif now - self._no_router_since >= self.policy.router_wait_s:
            self.failure = Failure(503, "no_router", "no router is reachable", self.policy.router_wait_s)
            self._end(attempt, Event.REFUSE, "no_router")

    def _finish(self, attempt: Attempt, boot: str) -> None:
        """All its samples ended. Whoever did not say so itself is told: a gen that the first token made needless, or
        any worker where it was a stop string, which only the ingress sees."""
        cut = any(sample.cut for sample in attempt.samples)
        reason = "stop_string" if cut else ""
        legs = [leg for leg in attempt.legs() if cut or (leg is attempt.gen and leg.boot != boot)]
        self._close(attempt, Event.FINISH, reason, legs=legs)
        if not self.attempts:
            self._end_state, self.reason = attempt.state, reason

    def _left(self, attempt: Attempt, boot: str, now: float, *, dead: bool) -> None:
        """A worker of this attempt is gone (the module's table)."""
        reads, until = attempt.state is State.READING and self.policy.retries, now + self.policy.rebind_wait_s
        if reads and attempt.gen is not None and boot == attempt.gen.boot:
            attempt.unbind()
            attempt.wait_until = until
        elif reads and attempt.ctx is not None and boot == attempt.ctx.boot and attempt.may_do_without_ctx:
            attempt.wait_until = until
        else:
            self._excluded[boot] = None
            faults = () if dead else (boot,)  # of a death the router hears by itself
            self._again(attempt, Failure.of_code("lost", "the worker serving this request is gone"), now, faults=faults)

    def _not_held(self, attempt: Attempt, boot: str, now: float) -> None:
        """A worker that was renewed has nothing of this attempt. A ctx may have handed it over: then gen speaks for it,
        or the word of which gen it is comes soon, or was lost with a router."""
        from_ctx = attempt.ctx is not None and boot == attempt.ctx.boot
        if from_ctx and attempt.state is State.READING:
            return
        if from_ctx and attempt.state is State.PREFILLED_UNBOUND:
            attempt.wait_until = attempt.wait_until or now + self.policy.rebind_wait_s
            return
        self._again(attempt, Failure.of_code("lost", "the worker no longer has this request"), now, told_by=boot)

    def _faults(self, attempt: Attempt, boot: str, code: str) -> tuple[str, ...]:
        if code in _PAIR_FAULTS:
            return tuple(leg.boot for leg in attempt.legs())
        return (boot,) if code in _OWN_FAULTS else ()

    def _again(
        self, attempt: Attempt, failure: Failure, now: float, *,
        told_by: str = "", faults: tuple[str, ...] = (), given_back: bool = False,
    ) -> None:  # fmt: skip
        """What it has not finished goes to new attempts, or the request ends if there may be none.

        `told_by`: the worker that has ended this attempt itself. `faults`: boots whose fault it was.
        """
        spent = attempt.given_back >= GIVEN_BACK if given_back else attempt.tries > len(BACKOFF_S)
        if spent or not self.policy.retries:
            self._fail(attempt, failure, told_by=told_by, faults=faults)
            return
        self._tell(attempt, attempt.legs(), "superseded", told_by=told_by)
        self._done(attempt, "migrating", failure.code, faults)
        attempt.move(Event.LOST)
        self._succeed(attempt, now, given_back=given_back)

    def _succeed(self, attempt: Attempt, now: float, *, given_back: bool = False) -> None:
        """Attempts in its place: the first one at once, later ones after a pause, for what is wrong to be noticed."""
        del self.attempts[attempt.number]
        left = attempt.unfinished
        whole = len(left) == len(attempt.samples) and not any(sample.ids for sample in left)
        pause = BACKOFF_S[min(attempt.tries, len(BACKOFF_S)) - 1]
        if given_back:
            pause = min(GIVEN_BACK_PAUSE_S * (attempt.given_back + 1), MAX_GIVEN_BACK_PAUSE_S)
        for samples in [left] if whole else [[sample] for sample in left]:
            for sample in samples:
                sample.forget_early()
            self._numbers += 1
            successor = Attempt(
                self._numbers, samples, attempt.tries + (not given_back), attempt.given_back + given_back,
                State.QUEUED if attempt.state is State.QUEUED else State.MIGRATING,
            )  # fmt: skip
            self.attempts[successor.number] = successor
            if pause:
                successor.place_at = now + pause
            else:
                self._place(successor, now)

    def _fail(self, attempt: Attempt, failure: Failure, *, told_by: str = "", faults: tuple[str, ...] = ()) -> None:
        self.failure = failure
        self._end(attempt, Event.FAIL, failure.code, told_by=told_by, faults=faults)

    def _end(
        self, attempt: Attempt, event: Event, reason: str, *, told_by: str = "", faults: tuple[str, ...] = ()
    ) -> None:
        """The request is over, and so are all its attempts. `attempt`: the one that the event is about."""
        self._close(attempt, event, reason, told_by=told_by, faults=faults)
        self._end_state, self.reason = attempt.state, reason
        for other in tuple(self.attempts.values()):
            self._close(other, Event.CANCEL if event is Event.CANCEL else Event.FAIL, reason)

    def _close(
        self, attempt: Attempt, event: Event, reason: str, *,
        legs: Sequence[Leg] | None = None, told_by: str = "", faults: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._tell(attempt, attempt.legs() if legs is None else legs, reason, told_by=told_by)
        attempt.move(event)
        del self.attempts[attempt.number]
        self._done(attempt, attempt.state.value, reason, faults)

    def _tell(self, attempt: Attempt, legs: Sequence[Leg], reason: str, *, told_by: str) -> None:
        for leg in legs:
            if leg.boot != told_by and leg.boot not in self._dead:
                self._cancel_leg(leg, attempt.number, reason)

    # ---------------------------------------------------------------------------------------------------------- frames

    def _place(self, attempt: Attempt, now: float, at: str = "") -> None:
        spec, output = self.spec, attempt.output_ids
        attempt.place_at = None
        if attempt.left_to_gen is None:
            attempt.left_to_gen = self._left_to_gen(attempt, output)
        self._actions.append(
            ToRouter(
                Place(
                    request=spec.request,
                    attempt=attempt.number,
                    num_tokens=len(spec.prompt_ids) + len(output),
                    max_new_tokens=spec.params.max_tokens - len(output),
                    samples=len(attempt.samples),
                    hashes=self._hashes(output),
                    tenant=spec.tenant,
                    priority=spec.priority,
                    deadline_s=None if spec.deadline is None else max(0.0, spec.deadline - now),
                    conversation=spec.conversation,
                    deaths=self.deaths,
                    namespace=spec.namespace,
                    exclude=tuple(self._excluded),
                    at=at,
                    left_to_gen=attempt.left_to_gen,
                )
            )
        )

    def _left_to_gen(self, attempt: Attempt, output: list[int]) -> int:
        """Prompt logprobs need all layers of every token, and who wants no token has nothing that gen could draw."""
        params = self.spec.params
        if params.max_tokens <= len(output) or self._brings_echo(attempt, output):
            return 0
        return self.policy.left_to_gen

    def _brings_echo(self, attempt: Attempt, output: list[int]) -> bool:
        """Prompt logprobs are wanted, are not here, and no other attempt brings them."""
        known = self.prompt_logprobs or output or attempt.samples[0].index
        return self.spec.params.prompt_logprobs is not None and not known

    def _submit(self, attempt: Attempt, leg: str, now: float) -> Submit:
        spec, output = self.spec, attempt.output_ids
        params = spec.params
        if params.prompt_logprobs is not None and not self._brings_echo(attempt, output):
            params = replace(params, prompt_logprobs=None)
        return Submit(
            request=spec.request,
            attempt=attempt.number,
            leg=leg,
            prompt_ids=spec.packed_ids,
            output_ids=pack_ids(output),
            params=params,
            samples=len(attempt.samples),
            hashes=self._hashes(output),
            namespace=spec.namespace,
            priority=spec.priority,
            lease_s=self._lease_s,
            timeout_s=None if spec.deadline is None else max(0.0, spec.deadline - now),
            no_cache=params.prompt_logprobs is not None or self._distrusts,
            scope=spec.scope,
            first_sample=attempt.samples[0].index,
            left_to_gen=(attempt.left_to_gen or 0) if leg == "prefill" else 0,
        )

    @property
    def _lease_s(self) -> float:
        return self.policy.request_lease_s

    def _hashes(self, output: list[int]) -> bytes:
        return self.spec.hash_ids([*self.spec.prompt_ids, *output]) if output else self.spec.hashes

    def _cancel_leg(self, leg: Leg, attempt: int, reason: str = "superseded") -> None:
        """Also for a leg of an attempt that is over: what was reserved there is let go."""
        self._actions.append(ToWorker(leg, Cancel(self.spec.request, attempt, reason)))

    def _done(self, attempt: Attempt, outcome: str, reason: str, faults: tuple[str, ...] = ()) -> None:
        timing = self._timing() if attempt.number == self.stamps.first_attempt else None
        key, served = (self.spec.request, attempt.number), self._served()
        self._actions.append(ToRouter(Done(*key, outcome, reason, faults, timing, *served)))

    def _timing(self) -> Timing | None:
        stamps, worker = self.stamps, self.stamps.worker or {}
        if stamps.first_token is None:
            return None
        queue_s, prefill_s = worker.get("queue", 0.0), worker.get("prefill", 0.0)
        return Timing(stamps.first_token - stamps.began, queue_s, prefill_s, self.cached_tokens)

    def _served(self) -> tuple[int, int]:
        """Prompt and output tokens that no Done has told yet, of all samples."""
        if self.stamps.first_token is None:
            return 0, 0
        prompt = 0 if self._told_prompt else len(self.spec.prompt_ids)
        output = self.completion_tokens - self._told_output
        self._told_prompt, self._told_output = True, self.completion_tokens
        return prompt, output

    def _take(self) -> list[Action]:
        taken, self._actions = self._actions, []
        return taken
