"""The context worker's loop: receive -> schedule -> run -> hand off.

A pass takes the events of the transfer thread, chooses prompt chunks, runs their forward, and tells the node which
pages are final. A page is told only after the forward that wrote it has returned. After a prompt's last chunk the loop
samples every sample's first token, publishes the full blocks and lets go of its hold: from then on the node's pins
keep the pages until a gen has read them.

Where tokens are left to gen (bounded replay, model/replay.py) the prompt ends before them here, its upper layers are
left out, and nothing is sampled. Its history is exact for all that; its state is found only by its like. A worker that
is there for nothing else has the lower half of the model only: what needs more is refused.

It knows no socket, no peer and no time but the injected clock. A row that fails ends only its own request. If the loop
dies, the process dies: its boot id goes, the router places its requests elsewhere.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.grammar import GrammarQueue, Grammars
from tailrace.engine.sequence import Chunk, Sequence, keep_snapshot, reserve
from tailrace.engine.step import Logprob, RowResult, StepPlan
from tailrace.kv_cache.manager import KvManager
from tailrace.model.replay_policy import LOWER_HALF
from tailrace.transfer.loop_events import (
    Arrived,
    Cancelled,
    FaultsSet,
    FirstToken,
    Key,
    LoopEvent,
    LoopPort,
    PrefillResult,
)
from tailrace.transfer.messages import ID_BYTES, PrefillSample, Submit, TokenLogprob, handed_tokens, unpack_ids

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2  # the progress stamp is renewed this often while there is nothing to do
BLOCKED_WAIT_S = 0.005  # requests wait for pages that another thread gives back


class StepEngine(Protocol):
    """What the loop needs of engine.Engine."""

    def step(self, plan: StepPlan) -> list[RowResult]: ...

    def copy_pages(self, src: Seq[int], dst: Seq[int]) -> None: ...

    def poison(self, pages: Seq[int]) -> None: ...


@dataclass(slots=True, eq=False)
class _Job:
    """One prefill leg. `started`: clock of its first chunk; `before`: tokens the worker had computed until then."""

    submit: Submit
    sequence: Sequence
    received: float
    started: float | None = None
    before: int = 0
    prompt_logprobs: list[Logprob] = field(default_factory=list)


class CtxLoop:
    """Runs prefill legs.

    Args:
        engine: runs a step and returns when its forward has completed.
        kv: the worker's page pool.
        node: the transfer thread.
        scheduler: chooses the chunks.
        eos_ids: ids that end a sample.
        grammars: None: requests with a grammar fail here.
        lower_half: the engine's model has no upper layers.
        clock: monotonic seconds, the same that stamps Arrived.
    """

    def __init__(
        self,
        engine: StepEngine,
        kv: KvManager,
        node: LoopPort,
        scheduler: PrefillScheduler,
        *,
        eos_ids: frozenset[int],
        grammars: Grammars | None = None,
        lower_half: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.kv, self.node, self.scheduler = engine, kv, node, scheduler
        self._eos_ids, self._lower_half = eos_ids, lower_half
        self._clock = clock
        self._jobs: dict[Key, _Job] = {}
        self._grammars: GrammarQueue[_Job] = GrammarQueue(grammars)  # of _jobs, those whose grammar is being compiled
        self._arrivals = self._computed = 0
        self._checked = True
        self._preempt, self._slow_pass_s = 0, 0.0  # faults, tests only
        node.loop_stats.phase = "run"

    def run(self, stop: threading.Event) -> None:
        """Passes until `stop` is set."""
        while not stop.is_set():
            if not self.run_pass() and not self.node.wait(BLOCKED_WAIT_S if self._jobs else IDLE_WAIT_S):
                self._check_books()

    def run_pass(self) -> bool:
        """One pass; False if there was nothing to compute."""
        self._receive()
        chunks = self._schedule()
        if chunks:
            self._hand_off(chunks, self._run(chunks))
        self._report()
        return bool(chunks)

    # -------------------------------------------------------------------------------------------------------- receive

    def _receive(self) -> None:
        for event in self.node.poll_events():
            self._handle(event)
        for job, why in self._grammars.ready():
            self._go_on(job) if why is None else self._fail(job, "grammar", why, False)

    def _handle(self, event: LoopEvent) -> None:
        match event:
            case Arrived():
                self._arrive(event)
            case Cancelled(key=key):
                job = self._jobs.get(key)
                if job is not None:
                    self._forget(job)
                    self.node.ended(key, "cancelled")
            case FaultsSet():
                self.kv.set_poison(self.engine.poison if event.poison else None)
                self._preempt, self._slow_pass_s = event.preempt, event.slow_pass_s
            case _:
                log.debug("event_ignored", extra={"fields": {"event": type(event).__name__}})

    def _arrive(self, event: Arrived) -> None:
        submit, key = event.submit, event.key
        if key in self._jobs:
            return
        self._checked = False
        why = why_refused(submit, self._lower_half)
        if why is not None:
            self.node.failed(key, "refused", why, False)
            return
        sequence = _sequence_of(submit, self._eos_ids, self._lower_half)
        needed, total = self.kv.layout.num_pages(sequence.num_known), self.kv.counts().total
        if needed > total:
            self.node.failed(key, "out_of_pages", f"the prompt needs {needed} pages, the pool has {total}", False)
            return
        self._arrivals += 1
        sequence.order, sequence.received, sequence.priority = self._arrivals, event.received, submit.priority
        sequence.hashes, sequence.namespace = submit.hashes, submit.namespace
        sequence.use_cache = sequence.use_cache and not submit.no_cache
        job = self._jobs[key] = _Job(submit, sequence, event.received)
        why = self._grammars.add(job, [sequence], self._go_on)
        if why is not None:
            self._fail(job, "grammar", why, False)

    def _go_on(self, job: _Job) -> None:
        self.scheduler.add(job.sequence)

    # ------------------------------------------------------------------------------------------------------- schedule

    def _schedule(self) -> list[Chunk]:
        chunks = self.scheduler.select(self.scheduler.max_num_tokens, self._clock(), self._reserve)
        return [chunk.up_to_cut() for chunk in chunks]

    def _reserve(self, sequence: Sequence) -> bool:
        if not reserve(self.kv, sequence, self.engine.copy_pages):
            return False
        self.node.loop_stats.prefix_hit_tokens += sequence.num_computed
        return True

    # ------------------------------------------------------------------------------------------------------------ run

    def _run(self, chunks: list[Chunk]) -> list[RowResult]:
        started = self._clock()
        for chunk in chunks:
            job = self._jobs[chunk.sequence.key]
            if job.started is None:
                job.started, job.before = started, self._computed
            self.node.chunk_launched(job.sequence.key, chunk.last, self.scheduler.seconds_left(job.sequence))
        plan = StepPlan([chunk.sequence.row(chunk.num_tokens) for chunk in chunks])
        results = self.engine.step(plan)
        if self._preempt or self._slow_pass_s:
            self._disturb(chunks)
        self.scheduler.measure(plan.num_tokens, self._clock() - started)
        self.node.loop_stats.prompt_positions += plan.num_tokens
        self._computed += plan.num_tokens
        return results

    def _disturb(self, chunks: list[Chunk]) -> None:
        """Faults that tests have set, while the step is still running for all who wait for it."""
        time.sleep(self._slow_pass_s)
        for chunk in chunks:
            if chunk.last and self._preempt:
                self._preempt -= 1
                self.preempt(chunk.sequence.key)

    # ------------------------------------------------------------------------------------------------------- hand off

    def _hand_off(self, chunks: list[Chunk], results: list[RowResult]) -> None:
        for chunk, result in zip(chunks, results, strict=True):
            job = self._jobs.get(chunk.sequence.key)
            if job is None or job.sequence is not chunk.sequence:
                continue  # it was preempted while the step ran: its pages are gone, and so is what they held
            last = chunk.last
            if result.error is not None or any(token < 0 for token in result.tokens):
                self._fail(job, result.code, result.error or "no token could be sampled", False)
                continue
            sequence = job.sequence
            sequence.num_computed += chunk.num_tokens
            job.prompt_logprobs += result.prompt_logprobs
            keep_snapshot(self.kv, sequence, self.engine.copy_pages)
            left = 0.0 if last else self.scheduler.seconds_left(sequence)
            self.node.chunk_done(sequence.key, sequence.pages, sequence.num_computed, left)
            if last:
                self._finish(job, result)

    def _finish(self, job: _Job, result: RowResult) -> None:
        sequence, submit = job.sequence, job.submit
        now = self._clock()
        started = job.received if job.started is None else job.started
        cached = sequence.num_cached or 0
        mine, queue_s, seconds = sequence.num_known - cached, started - job.received, now - started
        others = max(0, self._computed - job.before - mine)
        self.node.loop_stats.prefills.append(PrefillSample(mine, cached, others, seconds, queue_s))
        self.node.prefill_done(
            sequence.key,
            PrefillResult(
                firsts=self._firsts(job, result),
                num_tokens=sequence.num_known,
                prompt_logprobs=_echo(sequence, job.prompt_logprobs),
                cached_tokens=cached,
                stamps={"queue": queue_s, "prefill": seconds},
            ),
        )
        self.kv.publish(submit.namespace, submit.hashes, sequence.pages, sequence.num_known)
        self._forget(job)

    def _firsts(self, job: _Job, result: RowResult) -> tuple[FirstToken, ...]:
        states = job.sequence.samplers
        if job.submit.left_to_gen:
            return ()
        if not states:
            return (FirstToken(None, finish="length"),) * job.submit.samples
        firsts: list[FirstToken] = []
        for state, token, logprob in zip(states, result.tokens, result.logprobs, strict=True):
            state.observe(token)
            finish = state.finish_reason(token)
            entry = None if logprob is None else TokenLogprob(logprob.token, logprob.logprob, logprob.top)
            firsts.append(FirstToken(token, entry, finish, state.stop_id(token, finish)))
        self.node.loop_stats.output_tokens += len(firsts)
        return tuple(firsts)

    # ------------------------------------------------------------------------------------------------------------ ends

    def preempt(self, key: Key) -> None:
        """Take a prefill's pages away, also in the middle of a step: it fails here and may be tried elsewhere.

        It is not started again: pages that it has announced may be being read, and others must not take their place.
        """
        job = self._jobs.get(key)
        if job is not None:
            self.node.loop_stats.preemptions += 1
            self._fail(job, "out_of_pages", "the prefill was preempted", True)

    def _fail(self, job: _Job, code: str, message: str, retryable: bool) -> None:
        self._forget(job)
        self.node.failed(job.sequence.key, code, message, retryable)
        log.warning("prefill_failed", extra={"fields": {"request": job.submit.request, "code": code, "why": message}})

    def _forget(self, job: _Job) -> None:
        """Every trace of it, and the loop's hold on its pages."""
        del self._jobs[job.sequence.key]
        self._grammars.remove(job)
        self.scheduler.remove(job.sequence)
        pages = job.sequence.take_pages()
        if pages:
            self.kv.release(pages)

    # ----------------------------------------------------------------------------------------------------------- report

    def _report(self) -> None:
        now = self._clock()
        waiting = [job for job in self._jobs.values() if not job.sequence.pages]
        stats = self.node.loop_stats
        stats.running = len(self._jobs) - len(waiting)
        stats.queued = len(waiting)
        stats.queue_age_s = max((now - job.received for job in waiting), default=0.0)
        stats.prefill_tokens_queued = self.scheduler.num_queued_tokens
        stats.prefill_tokens_per_s = self.scheduler.tokens_per_s
        stats.stamp = now

    def _check_books(self) -> None:
        """Once after a busy time, and only when nothing has come for a while: the recount looks at every page."""
        if not self._jobs and not self._checked:
            self.kv.check()
            self._checked = True


def why_refused(submit: Submit, lower_half: bool) -> str | None:
    """Why a worker cannot compute it, whatever its pool; None if it can."""
    if not submit.prompt_ids:
        return "the prompt has no tokens"
    if not lower_half or submit.left_to_gen:
        return None
    if submit.params.prompt_logprobs is not None:
        return "prompt logprobs need the upper layers, which are not here"
    if submit.params.max_tokens > len(submit.output_ids) // ID_BYTES:
        return "nothing is left to gen, and to draw a token needs the upper layers, which are not here"
    return None


def _sequence_of(submit: Submit, eos_ids: frozenset[int], lower_half: bool) -> Sequence:
    """What of the prompt, and of earlier output, is computed here."""
    key, prompt = (submit.request, submit.attempt), np.array(unpack_ids(submit.prompt_ids), np.int32)
    output = unpack_ids(submit.output_ids)
    if not submit.left_to_gen and not lower_half:
        return Sequence.for_prefill(key, prompt, output, submit.params, submit.samples, eos_ids, submit.first_sample)
    num_tokens = handed_tokens(len(prompt) + len(output), submit.left_to_gen)
    mine = prompt[:num_tokens]
    return Sequence(
        key, order=0, received=0.0, num_prompt_tokens=len(mine), prompt=mine, samplers=(),
        output=output[: num_tokens - len(mine)], upper_from=num_tokens, state_step=LOWER_HALF,
    )  # fmt: skip


def _echo(sequence: Sequence, logprobs: list[Logprob]) -> tuple[TokenLogprob, ...]:
    """Prompt logprobs, one a prompt token; the first token has none."""
    if sequence.prompt_logprobs is None or sequence.prompt is None:
        return ()
    first = TokenLogprob(int(sequence.prompt[0]), None, ())
    return (first, *(TokenLogprob(p.token, p.logprob, p.top) for p in logprobs))
