"""The ingress: it owns the requests of the clients connected to it, and drives their flows over the links.

    http_app -> open(prompt, body) -> Generation <- wakes <- flows <- frames of the router and the workers

Per request it keeps one Flow (flow.py decides, this module carries out). A clock of its own renews the request leases
every third of one, batched by worker, ends what ran out of time, and reports metrics to the router. Knows nothing of
HTTP. When this process dies its clients lose their connections, and the workers cancel its requests by their lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.model.errors import ProtocolError
from tailrace.model.sampling_params import SamplingParams
from tailrace.router.api_errors import Failure, RequestFailed
from tailrace.router.attempt import Action, Leg, ToRouter
from tailrace.router.detokenize import TextStream, TokenTable
from tailrace.router.flow import Flow, FlowPolicy, Spec
from tailrace.router.output_form import OutputForms
from tailrace.router.receipt import ttft_parts
from tailrace.router.router_link import RouterPort, check_task
from tailrace.router.sample import Sample
from tailrace.router.sampling import Limits
from tailrace.router.stop_strings import StopStrings
from tailrace.router.token_cache import PromptTokenCache
from tailrace.router.tokenization import Encoder, Prompt, Template, Tokenization
from tailrace.router.told import Told
from tailrace.router.tools import ToolSupport
from tailrace.router.worker_links import WorkerPort
from tailrace.transfer.messages import (
    NOT_HELD,
    Answer,
    Cancel,
    Deaths,
    Delta,
    Done,
    Fail,
    Placed,
    Query,
    Refused,
    Renew,
    Stats,
    Tokens,
)
from tailrace.transfer.metrics import Metrics
from tailrace.transfer.request_state import State, UnlistedEvent

log = logging.getLogger(__name__)

TICK_S = 0.1
QUERY_S = 2.0
LIMITS_S = 2.0  # how often the cluster's longest request is asked for
INTERNAL = Failure(500, "internal", "an internal error ended the request")


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """What the operator set; names and meanings as in the configuration.

    Attributes:
        process: this replica's name in metrics and logs.
        revision: hash of the served model, part of every scope.
        fidelity: storage class of exact pages, e.g. `bfloat16/exact`.
        vocab_size: ids below it have a row in the model.
        max_request_tokens: by this process's own reckoning; the router may know a smaller one.
        api_keys: accepted bearer keys -> the tenant that the key belongs to by name, empty for none.
        comment_s: a stream that sent nothing for this long sends an SSE comment.
        request_id_header: replies carry X-Request-Id; false where what is around the application adds it itself.
    """

    process: str
    model_name: str
    revision: str
    fidelity: str
    vocab_size: int
    max_request_tokens: int
    policy: FlowPolicy = FlowPolicy()
    api_keys: Mapping[str, str] = field(default_factory=dict)
    max_active_requests: int = 512
    max_body_bytes: int = 16 << 20
    header_wait_s: float = 20.0
    slow_reader_s: float = 30.0
    comment_s: float = 10.0
    stats_period_s: float = 1.0
    public_metrics: bool = True
    tokenizer_threads: int = 2
    tool_parser: str = "auto"
    request_id_header: bool = True
    cors_origins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt with its sampling; a batch is several."""

    prompt: Prompt
    params: SamplingParams
    samples: int
    stops: StopStrings | None


@dataclass(frozen=True, slots=True)
class Caller:
    """What of an HTTP request concerns all its prompts. `arrived`: clock reading when its head had come."""

    arrived: float
    tenant: str = ""
    priority: int = 0
    conversation: str | None = None
    deadline: float | None = None


@dataclass(slots=True)
class _Ticket:
    flow: Flow
    generation: Generation
    arrived: float
    last_token: float | None = None
    told_first: bool = False
    accounted: bool = field(default=False)


class Generation:
    """The flows of one HTTP request, in the order of its prompts, and one event for all of them."""

    def __init__(self, cancel: Callable[[Flow, str], None]) -> None:
        self.flows: list[Flow] = []
        self._cancel = cancel
        self._event = asyncio.Event()

    @property
    def failure(self) -> Failure | None:
        """Why the first of the flows that failed did; one failed flow fails the request."""
        return next((flow.failure for flow in self.flows if flow.failure is not None), None)

    @property
    def ended(self) -> bool:
        return all(flow.ended for flow in self.flows)

    @property
    def has_output(self) -> bool:
        """There is something to send to the client."""
        return any(sample.pieces or sample.finish for flow in self.flows for sample in flow.samples)

    def wake(self) -> None:
        self._event.set()

    async def changed(self) -> None:
        """Return once something has happened since the last call."""
        await self._event.wait()
        self._event.clear()

    async def done(self) -> None:
        """Return when every flow has finished; raises RequestFailed as soon as one has not."""
        while True:
            if (failure := self.failure) is not None:
                raise RequestFailed(failure)
            if self.ended:
                return
            await self.changed()

    def close(self, reason: str) -> None:
        """Cancel what still runs."""
        for flow in self.flows:
            if not flow.ended:
                self._cancel(flow, reason)


class IngressService:
    """See the module. Belongs to one event loop.

    Args:
        encoder, template: of the model, see tokenization.py.
        hasher: keyed with the cluster secret.
        token_cache: of this encoder; closed with this.
        router, workers: the links; not started yet.
    """

    def __init__(
        self, config: IngressConfig, encoder: Encoder, template: Template | None, hasher: BlockHasher,
        router: RouterPort, workers: WorkerPort, *, token_cache: PromptTokenCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.config, self.clock = config, clock
        self.metrics = Metrics("ingress", config.process, config.model_name)
        self.table = TokenTable(encoder)
        self.tokenization = Tokenization(
            encoder, template, self.table, hasher, revision=config.revision, fidelity=config.fidelity,
            vocab_size=config.vocab_size, threads=config.tokenizer_threads, cache=token_cache,
        )  # fmt: skip
        text, knows = (None, False) if template is None else (template.text, template.reads_tools)
        self.forms = OutputForms(ToolSupport(text, knows, self.table, config.tool_parser), self.tokenization)
        self.limits = Limits(config.vocab_size, config.max_request_tokens, not config.policy.left_to_gen)
        self.watchers: set[Callable[[float], None]] = set()  # called each tick: streams look after their readers
        self._router, self._workers = router, workers
        self._tickets: dict[str, _Ticket] = {}
        self._active = 0
        self._stale = 0
        self._ends = Told(config.policy.request_lease_s)
        self._queries: dict[int, asyncio.Future[str]] = {}
        self._query_number = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._renewed = self._told = clock()
        self.created = int(time.time())

    # ------------------------------------------------------------------------------------------------------ life cycle

    async def start(self) -> None:
        self._workers.start(self)
        self._router.start(self)
        self._tasks = [
            asyncio.create_task(self._ticks(), name="ingress-ticks"),
            asyncio.create_task(self._watch_limits(), name="ingress-limits"),
        ]

    def check(self) -> None:
        """Return while all that time and the router ask of it goes on.

        Raises:
            WorkerError: a fault has ended it: leases would no longer be renewed, or no router found any more.
        """
        for task in self._tasks:
            check_task(task)
        self._router.check()

    async def close(self) -> None:
        """Cancel every request and leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for ticket in tuple(self._tickets.values()):
            self._cancel(ticket.flow, "ingress_stops")
        await self._router.close()
        await self._workers.close()
        self.tokenization.close()

    # -------------------------------------------------------------------------------------------------- asked by HTTP

    @property
    def active(self) -> int:
        return self._active

    @property
    def has_router(self) -> bool:
        return self._router.connected

    @contextlib.contextmanager
    def slots(self, count: int) -> Iterator[None]:
        """Room for that many requests, held while the block runs; raises RequestFailed (503) if there is none."""
        if self._active + count > self.config.max_active_requests:
            self.metrics.add("tailrace_requests_total", count, outcome="refused", reason="ingress_full")
            raise RequestFailed(Failure(503, "overloaded", "this server has too many open requests", 1.0))
        self._active += count
        self.metrics.add("tailrace_active_requests", self._active)
        try:
            yield
        finally:
            self._active -= count
            self.metrics.add("tailrace_active_requests", self._active)

    def open(self, asks: Sequence[Ask], caller: Caller) -> Generation:
        """Begin the requests. The caller must `close` the generation whatever happens."""
        generation = Generation(self._cancel)
        for ask in asks:
            spec = Spec(
                request=self.new_id(),
                prompt_ids=ask.prompt.ids,
                packed_ids=ask.prompt.packed,
                params=ask.params,
                samples=ask.samples,
                hashes=ask.prompt.hashes,
                hash_ids=ask.prompt.hash_ids,
                namespace=ask.prompt.namespace,
                tenant=caller.tenant,
                priority=caller.priority,
                conversation=caller.conversation,
                deadline=caller.deadline,
                scope=ask.prompt.scope,
            )
            flow = Flow(spec, self.config.policy, self._samples(ask), self.clock())
            generation.flows.append(flow)
            ticket = self._tickets[spec.request] = _Ticket(flow, generation, caller.arrived)
            self._perform(ticket, flow.start())
        return generation

    async def query(self, what: str) -> str | None:
        """The router's answer to ready | cluster | metrics; None if it cannot be asked or does not answer."""
        self._query_number += 1
        number = self._query_number
        answer = self._queries[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._router.send(Query(number, what)):
                return None
            return await asyncio.wait_for(answer, QUERY_S)
        except TimeoutError:
            return None
        finally:
            del self._queries[number]

    @staticmethod
    def new_id() -> str:
        """A name that nobody can guess: of an internal request, or of a reply."""
        return secrets.token_hex(16)

    def count_refused(self, reason: str) -> None:
        """A request that was answered without ever being placed."""
        self.metrics.add("tailrace_requests_total", outcome="refused", reason=reason)

    def _samples(self, ask: Ask) -> list[Sample]:
        open_bytes = ask.prompt.echo.open_bytes if ask.prompt.echo is not None else b""
        minimum = ask.params.min_tokens
        return [
            Sample(i, TextStream(self.table, ask.stops, min_tokens=minimum, open_bytes=open_bytes))
            for i in range(ask.samples)
        ]

    def _cancel(self, flow: Flow, reason: str) -> None:
        ticket = self._tickets.get(flow.spec.request)
        if ticket is not None:
            self._perform(ticket, flow.cancel(reason))

    # ---------------------------------------------------------------------------------------- told by the router's link

    def router_up(self) -> None:
        now = self.clock()
        if dead := self._workers.dead:  # a new router must not take back who cannot be used from here
            self._router.send(Deaths(dead))
        for done in self._ends.again(now):
            self._router.send(done)
        for ticket in tuple(self._tickets.values()):
            self._perform(ticket, ticket.flow.router_up(now))

    def router_down(self) -> None:
        """Nothing to do: what waits for an answer is asked again in `router_up`, or runs out in `tick`."""

    def router_frame(self, frame: object) -> None:
        now = self.clock()
        match frame:
            case Placed():
                ticket = self._tickets.get(frame.request)
                if ticket is not None:
                    self._guarded(ticket, lambda: ticket.flow.on_placed(frame, now))
                elif frame.leg == "decode":  # it ended meanwhile: that gen holds pages for nobody
                    self._workers.send(Leg.of(frame), Cancel(frame.request, frame.attempt, "ended"))
            case Refused():
                ticket = self._tickets.get(frame.request)
                if ticket is not None:
                    self._guarded(ticket, lambda: ticket.flow.on_refused(frame, now))
            case Deaths():
                for boot in frame.boots:
                    self._lost(boot, dead=True, reached=True)
                    self._workers.drop(boot)
            case Answer():
                future = self._queries.get(frame.number)
                if future is not None and not future.done():
                    future.set_result(frame.text)
            case _:
                self._stale += 1

    # --------------------------------------------------------------------------------------- told by the workers' links

    def worker_frame(self, boot: str, frame: object) -> None:
        if type(frame) is Tokens:
            now = self.clock()
            for delta in frame.deltas:
                ticket = self._tickets.get(delta.request)
                if ticket is None:
                    self._stale += 1
                else:
                    self._feed(ticket, boot, delta, now)
        elif type(frame) is Fail:
            ticket = self._tickets.get(frame.request)
            if ticket is None:
                self._stale += 1
                return
            fields = {"request": frame.request, "attempt": frame.attempt, "boot": boot, "code": frame.code}
            level = logging.INFO if frame.code == NOT_HELD else logging.WARNING  # of a ctx it may mean nothing
            log.log(level, "attempt_failed", extra={"fields": fields | {"reason": frame.message}})
            now = self.clock()
            self._guarded(ticket, lambda: ticket.flow.on_fail(boot, frame, now))
        else:
            self._stale += 1

    def worker_gone(self, boot: str, *, dead: bool, reached: bool) -> None:
        if dead:
            self._router.send(Deaths((boot,)))  # its port refuses: the router need not wait whether it dials again
        self._lost(boot, dead=dead, reached=reached)

    def _lost(self, boot: str, *, dead: bool, reached: bool) -> None:
        now = self.clock()
        for ticket in tuple(self._tickets.values()):
            self._guarded(ticket, lambda f=ticket.flow: f.on_gone(boot, now, dead=dead, reached=reached))

    def _feed(self, ticket: _Ticket, boot: str, delta: Delta, now: float) -> None:
        """The path of every token: as `_guarded`, but nothing is made for what seldom happens."""
        flow = ticket.flow
        try:
            actions = flow.on_delta(boot, delta, now)
        except (ValueError, UnlistedEvent) as error:
            actions = self._broken(ticket, error)
        if actions or flow.ended:
            self._perform(ticket, actions)
        ticket.generation.wake()
        if delta.sample == 0 and delta.ids:
            if ticket.last_token is not None:
                self.metrics.add("tailrace_itl_seconds", now - ticket.last_token)
            ticket.last_token = now
        if not ticket.told_first and flow.stamps.first_token is not None:
            ticket.told_first = True
            self._account_first_token(ticket)

    # ---------------------------------------------------------------------------------------------------------- doing

    def _guarded(self, ticket: _Ticket, decide: Callable[[], list[Action]]) -> None:
        """Let the flow decide; a frame that makes no sense ends that request alone."""
        try:
            actions = decide()
        except (ValueError, UnlistedEvent) as error:
            actions = self._broken(ticket, error)
        self._perform(ticket, actions)
        ticket.generation.wake()

    def _broken(self, ticket: _Ticket, error: Exception) -> list[Action]:
        fields = {"request": ticket.flow.spec.request, "attempt": ticket.flow.attempt, "reason": str(error)}
        log.error("flow_broken", extra={"fields": fields})
        return ticket.flow.fail(INTERNAL)

    def _perform(self, ticket: _Ticket, actions: list[Action]) -> None:
        flow = ticket.flow
        for action in actions:
            try:
                if isinstance(action, ToRouter):
                    if isinstance(action.frame, Done):
                        self._ends.note(action.frame, self.clock())
                        if action.frame.outcome == "migrating":
                            self.metrics.add("tailrace_migrations_total")
                    self._router.send(action.frame)
                else:
                    self._workers.send(action.leg, action.frame)
            except ProtocolError as error:
                log.error("frame_not_sent", extra={"fields": {"request": flow.spec.request, "reason": str(error)}})
                if not flow.ended:
                    self._perform(ticket, flow.fail(INTERNAL))
        if flow.ended and not ticket.accounted:
            ticket.accounted = True
            self._tickets.pop(flow.spec.request, None)
            self._account_end(flow)
            ticket.generation.wake()

    def _account_first_token(self, ticket: _Ticket) -> None:
        for part, seconds in ttft_parts(ticket.flow.stamps, ticket.arrived).items():
            if part == "whole" or ticket.flow.attempt == 1:
                self.metrics.add("tailrace_ttft_seconds", seconds, part=part)

    def _account_end(self, flow: Flow) -> None:
        reason = flow.reason
        if flow.state is State.FINISHED:
            reason = flow.samples[0].finish or ""
        self.metrics.add("tailrace_requests_total", outcome=flow.state.value, reason=reason)
        if flow.stale:
            self.metrics.add("tailrace_stale_frames_total", flow.stale)
        if flow.state is State.FAILED:
            fields = {"request": flow.spec.request, "reason": flow.reason} | flow.shape()
            log.warning("request_failed", extra={"fields": fields})

    # ----------------------------------------------------------------------------------------------------------- clocks

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick(self.clock())

    def tick(self, now: float) -> None:
        """Everything that time alone brings about."""
        up = self._router.connected
        for ticket in tuple(self._tickets.values()):
            actions = ticket.flow.tick(now, router_up=up)
            if actions:
                self._perform(ticket, actions)
                ticket.generation.wake()
        for watch in tuple(self.watchers):
            watch(now)
        if now - self._renewed >= self.config.policy.request_lease_s / 3:
            self._renewed = now
            self._renew()
        if now - self._told >= self.config.stats_period_s:
            self._told = now
            if self._stale:
                self.metrics.add("tailrace_stale_frames_total", self._stale)
                self._stale = 0
            self.tokenization.measure(self.metrics)
            self._router.send(Stats("ingress", self.config.process, self.metrics.families()))

    def _renew(self) -> None:
        keys: dict[str, list[tuple[str, int]]] = {}
        legs: dict[str, Leg] = {}
        for ticket in self._tickets.values():
            for leg, key in ticket.flow.held():
                legs[leg.boot] = leg
                keys.setdefault(leg.boot, []).append(key)
        for boot, leg in legs.items():
            self._workers.send(leg, Renew(tuple(keys[boot]), self.config.policy.request_lease_s))

    async def _watch_limits(self) -> None:
        """Keep the longest request that every pool can serve; the router knows the workers."""
        while True:
            text = await self.query("ready")
            known = json.loads(text).get("max_request_tokens") if text else None
            if isinstance(known, int) and known > 0:
                limit = min(known, self.config.max_request_tokens)
                self.limits = replace(self.limits, max_request_tokens=limit)
            await asyncio.sleep(LIMITS_S)
