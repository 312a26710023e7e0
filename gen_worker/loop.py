"""The generation worker's loop: admit -> schedule -> run -> stream.

A pass takes the events of the transfer thread, lets complete hand-offs join the batch, grows each running sequence by
a page where its next token needs one, runs one step over the decode rows and, where a prefill scheduler was given,
over chunks of local prompts (no larger than the streams bear: prefill_share.py), and streams all new tokens in one
call. With drafts (drafting.py) a decode row verifies guesses of the tokens to come, and may bring several at once.

A hand-off whose last tokens ctx has left to us (bounded replay) is a stem like a local prompt: its first token is drawn
here (stems.py).

Out of pages, the youngest gives way until the oldest fits: it loses its pages and is prefilled again over prompt and
output, here, when they fit. Where only the prompt's tail is here that is impossible, and the request fails with
`out_of_pages`, to be tried again elsewhere. A hand-off's pages came once and are never asked for again.

It knows no socket and no ctx. A row that fails ends only its own request. If the loop dies, the process dies and every
stream of it is placed anew or ends with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Protocol

from tailrace.engine.grammar import GrammarQueue, Grammars
from tailrace.engine.sequence import Chunk, Sequence, keep_snapshot, reserve
from tailrace.engine.step import RowResult, SamplerState, StepPlan
from tailrace.gen_worker.drafting import Drafting, count_unfit
from tailrace.gen_worker.prefill_share import PrefillShare
from tailrace.gen_worker.report import report
from tailrace.gen_worker.request import Request, request_of_handoff, token_delta, why_unusable
from tailrace.gen_worker.run_ahead import FlyingEngine, RunAhead
from tailrace.gen_worker.scheduler import DecodeScheduler, Prefill
from tailrace.gen_worker.shadow import ShadowChecks, ShadowConfig, ShadowEngine
from tailrace.gen_worker.stems import empty_deltas, end_of, request_of_rest, request_of_submit
from tailrace.gen_worker.turns import publish_turn
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, FaultsSet, Key, LoopEvent, LoopPort
from tailrace.transfer.messages import Delta

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.2  # the progress stamp is renewed this often while there is nothing to do
BLOCKED_WAIT_S = 0.005  # something waits for pages that another thread gives back


class StepEngine(ShadowEngine, Protocol):
    """What the loop needs of engine.Engine."""

    def poison(self, pages: Seq[int]) -> None: ...


class GenLoop:
    """Decodes hand-offs, and prefills local requests.

    Args:
        engine: runs a step and returns when it has completed.
        kv: the worker's page pool.
        node: the transfer thread.
        scheduler: the batch.
        prefill: chooses prompt chunks (local requests and recomputation); None: neither is done here.
        eos_ids: ids that end a sample.
        grammars: None: requests with a grammar fail here.
        hasher: with it, full blocks of what was generated are published and offered to ctx (back-flow).
        shadow: checks some hand-offs against a computation of our own; None: none.
        drafting: decides about guesses of tokens to come, which the engine can make; None: there are none.
        run_ahead: launches passes before the last one's tokens are known (run_ahead.py): the engine itself, if it is
            one on a device; None: each pass ends before the next. Not beside `shadow` and `drafting`.
        replay_tokens: of a prompt's end that ctx has left to us, how many go through the upper layers; 0: none is left.
        replay_step: what a state has lost behind that; empty: nothing.
        clock: monotonic seconds, the same that stamps Arrived.
    """

    def __init__(
        self,
        engine: StepEngine,
        kv: KvManager,
        node: LoopPort,
        scheduler: DecodeScheduler,
        prefill: Prefill | None,
        *,
        eos_ids: frozenset[int],
        grammars: Grammars | None = None,
        hasher: BlockHasher | None = None,
        shadow: ShadowConfig | None = None,
        drafting: Drafting | None = None,
        run_ahead: FlyingEngine | None = None,
        replay_tokens: int = 0,
        replay_step: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.kv, self.node, self.scheduler, self.prefill = engine, kv, node, scheduler, prefill
        self._eos_ids, self._hasher = eos_ids, hasher
        self._shadow = None if shadow is None else ShadowChecks(engine, kv, shadow, node.loop_stats)
        self._drafting, self._replay_tokens, self._replay_step = drafting, replay_tokens, replay_step
        self._clock = clock
        self._ahead = None if run_ahead is None else RunAhead(run_ahead, kv, self._take_landed, clock)
        self.share = PrefillShare()
        self._requests: dict[Key, Request] = {}
        self._grammars: GrammarQueue[Request] = GrammarQueue(grammars)  # of _requests, whose grammar is being compiled
        self._arrivals = self._computed = 0
        self._checked = True
        node.loop_stats.phase = "run"

    def run(self, stop: threading.Event) -> None:
        """Passes until `stop` is set."""
        while not stop.is_set():
            if not self.run_pass() and not self.node.wait(BLOCKED_WAIT_S if self._requests else IDLE_WAIT_S):
                self._check_books()

    def run_pass(self) -> bool:
        """One pass; False if there was nothing to compute."""
        self._admit()
        flew = self._ahead is not None and self._ahead.goes_on(self.scheduler.rows(), not self.prefill)
        chunks = self._schedule()
        launched = self._ahead is not None and not self.prefill and self._ahead.launch(chunks)
        if self._ahead is not None and flew:
            self._ahead.land()
        elif chunks and not launched:
            self._stream(chunks, self._run(chunks))
        checked = self._check_shadow(bool(chunks))
        self._report()
        return bool(chunks) or flew or checked

    # ---------------------------------------------------------------------------------------------------------- admit

    def _admit(self) -> None:
        for event in self.node.poll_events():
            self._handle(event)
        for request, why in self._grammars.ready():
            self._enqueue(request) if why is None else self._fail(request, "grammar", why, False)
        for request in self.scheduler.admissible(self._promised()):
            self._join(request)

    def _handle(self, event: LoopEvent) -> None:
        match event:
            case Admitted():
                self._take_handoff(event)
            case Arrived():
                self._arrive(event)
            case Cancelled(key=key):
                request = self._requests.get(key)
                if request is not None:
                    self._forget(request)
                    self.node.ended(key, "cancelled")
            case FaultsSet(poison=poison):
                self.kv.set_poison(self.engine.poison if poison else None)
            case _:
                log.debug("event_ignored", extra={"fields": {"event": type(event).__name__}})

    def _take_handoff(self, event: Admitted) -> None:
        key, handoff = event.key, event.handoff
        self._checked = False
        why = "this worker decodes the request already" if key in self._requests else None
        why = why or why_unusable(handoff, event.pages, self.kv.layout)
        if handoff.left_to_gen and (self.prefill is None or not self._replay_tokens):
            why = why or "this worker computes no prompt's end"
        if why is not None:
            self._release([page for page in event.pages if page != SCRATCH_PAGE])
            if key not in self._requests:
                self.node.failed(key, "transfer", f"hand-off refused: {why}", True)
            log.warning("handoff_refused", extra={"fields": {"request": handoff.request, "why": why}})
            return
        self._arrivals += 1
        of = (handoff, event.pages, self._arrivals, self._clock(), self._eos_ids)
        request = request_of_rest(*of, self._replay_tokens) if handoff.left_to_gen else request_of_handoff(*of)
        if not request.sequences:  # ctx finishes such a request itself; nothing is left to decode
            self._release([page for page in event.pages if page != SCRATCH_PAGE])
            self.node.ended(key, "finished")
            return
        self._requests[key] = request
        request.fidelity, request.ctx, request.moved = event.fidelity, event.ctx, event.moved
        if request.stem is None:
            self._publish(request, event.pages)
        elif request.moved is not None and request.stem.upper_from:
            request.moved = replace(request.moved, step=self._replay_step)
        if self._begin_request(request) and self._shadow is not None and request.stem is None:
            self._shadow.offer(handoff, event.pages)

    def _begin_request(self, request: Request) -> bool:
        """Enqueue it, once its grammar is compiled. False: it cannot be followed, so the request has failed."""
        if self._drafting is not None:
            count_unfit(request.sequences, self.node.loop_stats.undrafted)
        why = self._grammars.add(request, request.sequences, self._enqueue)
        if why is not None:
            self._fail(request, "grammar", why, False)
        return why is None

    def _enqueue(self, request: Request) -> None:
        if request.stem is None or request.handed is not None:
            self.scheduler.enqueue(request)
        elif self.prefill is not None:
            self.prefill.add(request.stem)

    def _arrive(self, event: Arrived) -> None:
        submit, key = event.submit, event.key
        if key in self._requests:
            return
        self._checked = False
        if self.prefill is None or not submit.prompt_ids:
            why = "no local prefill here" if submit.prompt_ids else "the prompt is empty"
            self.node.failed(key, "refused", why, False)
            return
        request = request_of_submit(event, self._arrivals + 1, self._eos_ids)
        needed, total = self.kv.layout.num_pages(request.num_tokens), self.kv.counts().total
        if needed > total:
            self.node.failed(key, "out_of_pages", f"the prompt needs {needed} pages, the pool has {total}", False)
            return
        self._arrivals += 1
        self._requests[key] = request
        self._begin_request(request)

    def _join(self, request: Request) -> None:
        """A waiting hand-off joins the batch; its samples share the full pages and copy the open one. Or its end is
        computed first."""
        if request.stem is not None and self.prefill is not None:
            self.scheduler.drop(request)
            self.prefill.add(request.stem)
            return
        others = request.live[1:]
        copies = self._allocate_copies(request.num_tokens, len(others))
        if copies is None and (self.scheduler.running or any(s.pages for s in self.prefill or ())):
            return  # it keeps its place and its pages: what runs will give some back
        self.scheduler.drop(request)
        first = request.live[0]
        self.scheduler.start(first)
        if copies is not None:
            self._fork(first, others, copies)
            return
        for sequence in others:
            if not self._recompute(sequence):
                return

    # ----------------------------------------------------------------------------------------------------------- forks

    def _allocate_copies(self, num_tokens: int, num_forks: int) -> list[int] | None:
        """Pages for the forks' own copies of what is still written to: the open page, if there is one, and the state
        pages; one fork's behind the other's. None if they do not fit."""
        layout = self.kv.layout
        each = layout.num_pages(num_tokens) - layout.full_pages(num_tokens)
        return self.kv.allocate(num_forks * each) if num_forks * each else []

    def _fork(self, source: Sequence, forks: list[Sequence], copies: list[int]) -> None:
        """Give each fork the source's state: a hold on the full pages, and its own copies of the others."""
        each = len(copies) // max(1, len(forks))
        full = len(source.pages) - each
        shared, private = source.pages[:full], source.pages[full:]
        if copies:
            self.engine.copy_pages(private * len(forks), copies)
        held = [page for page in shared if page != SCRATCH_PAGE]
        for i, fork in enumerate(forks):
            self.kv.hold(held)
            fork.pages = [*shared, *copies[i * each : (i + 1) * each]]
            fork.num_computed = source.num_computed
            self.scheduler.start(fork)

    # ------------------------------------------------------------------------------------------------------- schedule

    def _schedule(self) -> list[Chunk]:
        grown = [s for s in self.scheduler.rows() if not s.ends_in_flight and self._grow(s)]
        running = set(self.scheduler.running)
        chunks = [Chunk(sequence, sequence.remaining) for sequence in grown if sequence in running]
        if self._drafting is not None:
            budget = self.scheduler.decode_budget - sum(chunk.num_tokens for chunk in chunks)
            chunks = self._drafting.plan(chunks, self._draft_room, budget)
        if self.prefill is not None and len(self.prefill):
            left = self.scheduler.prefill_budget(sum(chunk.num_rows for chunk in chunks))
            selected = self.prefill.select(self.share.limit(len(chunks), left), self._clock(), self._reserve)
            prompts = [chunk.up_to_cut() for chunk in selected]
            chunks += prompts if self._drafting is None else map(self._drafting.asking, prompts)
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """Make room for the sequence's known tokens. False if it cannot run in this pass."""
        if sequence not in self.scheduler.running:  # it gave way to an older one
            return False
        while sequence.num_known > sequence.room(self.kv.layout):
            if not self._add_page(sequence):
                return False
        return True

    def _draft_room(self, sequence: Sequence, count: int) -> int:
        """How many of so many guesses its pages hold, one more page included if nobody is in need of it."""
        if sequence.num_known + count > sequence.room(self.kv.layout):
            needed = self.scheduler.oldest_growth(self._requests.values())
            fresh = self.kv.allocate(1) if self.kv.available() > needed else None
            if fresh is not None:
                sequence.add_history_pages(fresh, self.kv.layout.num_state_pages)
        return min(count, sequence.room(self.kv.layout) - sequence.num_known)

    def _add_page(self, sequence: Sequence) -> bool:
        """A further page for a running sequence, others give way if they must. False if it cannot run in this pass."""
        layout = self.kv.layout
        if layout.is_windowed:
            self._release(sequence.take_pages_before(layout.first_needed_page(sequence.num_computed)))
        while (fresh := self.kv.allocate(1)) is None:
            if self._ahead is not None and self._ahead.flying:  # it has landed before anybody gives way
                return False
            if self._shadow is not None and self._shadow.give_way():
                continue
            youngest = self.scheduler.youngest(self.prefill or ())
            if youngest is not None and youngest is not sequence:
                self._preempt(youngest)
            elif not self._alone(sequence):
                # An older one that runs will end, or take these pages when it needs them; else the slot must go, too.
                return False if self.scheduler.running[0] is not sequence else self._preempt(sequence)
            elif self._is_lent_out(sequence):
                return False
            else:
                self._fail_for_size(sequence)
                return False
            if sequence not in self.scheduler.running:  # its own request failed with the one that gave way
                return False
        sequence.add_history_pages(fresh, layout.num_state_pages)
        return True

    def _alone(self, sequence: Sequence) -> bool:
        """True if no other sequence of this loop has pages."""
        return not any(s.pages for r in self._requests.values() for s in r.sequences if s is not sequence)

    def _is_lent_out(self, sequence: Sequence) -> bool:
        """True if pages beside the sequence's own are in use: the transfer thread's, which will come back."""
        return self.kv.counts().used > len(set(sequence.pages) - {SCRATCH_PAGE})

    def _promised(self) -> int:
        """Rows that prefills which have their pages will decode with: as good as taken, whenever those end."""
        return sum(len(s.samplers) for s in self.prefill or () if s.pages)

    def _reserve(self, sequence: Sequence) -> bool:
        """Pages for a prefill, if the oldest request here keeps what it may still need."""
        holders = [r for r in self._requests.values() if any(s.pages for s in r.sequences)]
        if holders and not self.scheduler.has_slot(max(1, len(sequence.samplers)), self._promised()):
            return False
        if not reserve(self.kv, sequence, self.engine.copy_pages, spare=self.scheduler.oldest_growth(holders)):
            return False
        if sequence is self._requests[sequence.key].stem:
            self.node.loop_stats.prefix_hit_tokens += sequence.num_computed
        return True

    # ---------------------------------------------------------------------------------------------------- giving way

    def _preempt(self, sequence: Sequence) -> bool:
        """Take the sequence's pages. Returns False, for use as `cannot run now`."""
        self.node.loop_stats.preemptions += 1
        request = self._requests[sequence.key]
        if request in self.scheduler.waiting:
            self.scheduler.drop(request)
            for sample in list(request.sequences):
                if not self._recompute(sample):
                    return False
            return False
        self._recompute(sequence)
        return False

    def _recompute(self, sequence: Sequence) -> bool:
        """Back to the start of a prefill over all known tokens. False: impossible here, so its request has failed."""
        if self.prefill is None or not sequence.is_whole:
            message = "no pages left, and the whole prompt is not here to compute it again"
            self._fail(self._requests[sequence.key], "out_of_pages", message, True)
            return False
        if self.kv.layout.num_pages(sequence.num_known) > self.kv.counts().total:
            self._fail_for_size(sequence)
            return False
        self.scheduler.stop(sequence)
        self._release(sequence.take_pages())
        sequence.upper_from = 0
        self.prefill.add(sequence)
        return True

    def _fail_for_size(self, sequence: Sequence) -> None:
        message = f"{sequence.num_known} tokens and the next fill all {self.kv.counts().total} pages of the pool"
        self._fail(self._requests[sequence.key], "out_of_pages", message, False)

    # ------------------------------------------------------------------------------------------------------------ run

    def _run(self, chunks: list[Chunk]) -> list[RowResult]:
        started = self._clock()
        stats = self.node.loop_stats
        running = set(self.scheduler.running)
        prefilled = 0
        for chunk in chunks:
            sequence = chunk.sequence
            if sequence in running:
                continue
            prefilled += chunk.num_tokens
            request = self._requests[sequence.key]
            if sequence is not request.stem:
                stats.recomputed_positions += chunk.num_tokens
                continue
            if request.handed is not None:
                stats.replayed_positions += chunk.num_tokens
            if request.started is None:
                request.started, request.before = started, self._computed
        results = self.engine.step(StepPlan([chunk.row() for chunk in chunks]))
        if self._drafting is not None:
            self._drafting.measure(sum(chunk.num_rows for chunk in chunks), self._clock() - started)
        if self.prefill is not None:
            seconds = self._clock() - started
            self.prefill.measure(prefilled, seconds)
            self.share.measure(sum(chunk.sequence in running for chunk in chunks), prefilled, seconds)
        stats.prompt_positions += prefilled
        self._computed += sum(chunk.num_rows for chunk in chunks)
        return results

    def _take_landed(self, chunks: list[Chunk], results: list[RowResult], seconds: float) -> None:
        self.share.measure(len(chunks), 0, seconds)
        self._computed += len(chunks)
        self._stream(chunks, results)

    # --------------------------------------------------------------------------------------------------------- stream

    def _stream(self, chunks: list[Chunk], results: list[RowResult]) -> None:
        deltas: list[Delta] = []
        finished: list[Key] = []
        now = self._clock()
        for chunk, result in zip(chunks, results, strict=True):
            request = self._requests.get(chunk.sequence.key)
            if request is None:  # another sample of it has failed in this pass
                continue
            if result.error is not None or any(token < 0 for token in result.tokens):
                self._fail(request, result.code, result.error or "no token could be sampled", False)
                continue
            last = chunk.last
            if chunk.sequence.flying:
                chunk.sequence.flying -= 1
            else:
                chunk.sequence.num_computed += chunk.num_tokens
                keep_snapshot(self.kv, chunk.sequence, self.engine.copy_pages)
            if chunk.sequence is request.stem:
                request.prompt_logprobs += result.prompt_logprobs
                if last:
                    deltas += self._branch(request, chunk.sequence, result, now)
            elif last:
                deltas.append(self._advance(request, chunk, result, now))
            if not request.live and request.stem is None:
                finished.append(request.key)
        deltas = [delta for delta in deltas if (delta.request, delta.attempt) in self._requests]
        if deltas:
            self.node.tokens(deltas)
        for key in finished:
            self._forget(self._requests[key])
            self.node.ended(key, "finished")

    def _advance(self, request: Request, chunk: Chunk, result: RowResult, now: float) -> Delta:
        """The next tokens of a running sample, or of one whose recomputation ends here: one, and the guesses that were
        right in front of it, unless one of them ends the sample."""
        sequence, state = chunk.sequence, chunk.sequence.samplers[0]
        since = request.received if sequence.last_token_at is None else sequence.last_token_at
        if sequence not in self.scheduler.running:
            self._settle(sequence)
        finish, taken = None, 0
        while finish is None and taken < len(result.tokens):
            finish = self._accept(request, sequence, result.tokens[taken], now)
            taken += 1
        sequence.drafts, sequence.chances = result.drafts, result.chances
        stats = self.node.loop_stats
        stats.drafts_verified += chunk.num_drafts
        stats.drafts_accepted += min(taken, len(result.tokens) - 1)
        moved, request.moved = request.moved, None
        tokens, logprobs, stamps = result.tokens[:taken], result.logprobs[:taken], {"itl": now - since}
        return token_delta(request.key, state, tokens, logprobs, finish, stamps, moved=moved)

    def _settle(self, sequence: Sequence) -> None:
        """A recomputed sequence decodes again."""
        if self.prefill is not None:
            self.prefill.remove(sequence)
        self.scheduler.start(sequence)

    def _accept(self, request: Request, sequence: Sequence, token: int, now: float) -> str | None:
        """Append a sampled token; a sample that it ends gives its pages back."""
        self.node.loop_stats.output_tokens += 1
        sequence.output.append(token)
        sequence.last_token_at = now
        state = sequence.samplers[0]
        state.observe(token)
        finish = state.finish_reason(token)
        if finish is not None:
            self.scheduler.stop(sequence)
            request.live.remove(sequence)
            turn = None if self._hasher is None else publish_turn(self.kv, self._hasher, request, sequence)
            if turn is not None:
                self.node.turn_ended(turn)
            self._release(sequence.take_pages())
        return finish

    def _branch(self, request: Request, stem: Sequence, result: RowResult, now: float) -> list[Delta]:
        """A stem has ended: its samples begin. The first delta carries what belongs to the whole request."""
        if self.prefill is not None:
            self.prefill.remove(stem)
        self._publish(request, stem.pages)
        request.stem = None
        end = end_of(request, stem, now, self._computed)
        self.node.loop_stats.prefills.append(end.prefill)
        if not stem.samplers:
            self._release(stem.take_pages())
            return empty_deltas(request.key, range(request.samples), len(stem.output), end)
        deltas: list[Delta] = []
        for state, token, logprob in zip(stem.samplers, result.tokens, result.logprobs, strict=True):
            finish = self._begin(request, stem, state, token, now)
            if finish is None and len(stem.samplers) == 1:
                request.live[-1].drafts, request.live[-1].chances = result.drafts, result.chances
            once: dict[str, Any] = {}
            if not deltas:
                once = {"prompt_logprobs": end.prompt_logprobs, "cached_tokens": end.cached_tokens}
                once["moved"], request.moved = request.moved, None
            deltas.append(token_delta(request.key, state, [token], [logprob], finish, end.stamps, **once))
        self._hand_down(request, stem)
        return deltas

    def _begin(self, request: Request, stem: Sequence, state: SamplerState, token: int, now: float) -> str | None:
        self.node.loop_stats.output_tokens += 1
        state.observe(token)
        finish = state.finish_reason(token)
        if finish is None:
            sample = stem.sample(state, token)
            sample.last_token_at = now
            request.live.append(sample)
        return finish

    def _hand_down(self, request: Request, stem: Sequence) -> None:
        """The stem's pages go to its living samples: the first takes them over, the others fork or compute again."""
        if not request.live:
            self._release(stem.take_pages())
            return
        first, others = request.live[0], request.live[1:]
        first.pages, first.num_computed = stem.pages, stem.num_computed
        stem.pages = []
        self.scheduler.start(first)
        copies = self._allocate_copies(request.num_tokens, len(others))
        if copies is not None:
            self._fork(first, others, copies)
            return
        for sequence in others:
            if not self._recompute(sequence):
                return

    # --------------------------------------------------------------------------------------------------- shadow check

    def _check_shadow(self, busy: bool) -> bool:
        """Run a shadow check if one is due; what differs ends its request, whatever it has sent so far."""
        check = None if self._shadow is None else self._shadow.due(busy)
        if self._shadow is None or check is None:
            return False
        started = self._clock()
        equal = self._shadow.run(check)
        self.node.loop_stats.shadow_seconds += self._clock() - started
        request = self._requests.get(check.key)
        if not equal and request is not None:
            message = "the pages received are not those that this worker computes"
            self._fail(request, "corrupt", message, self._shadow.config.retry)
        return True

    # ------------------------------------------------------------------------------------------------------------ ends

    def _publish(self, request: Request, pages: Seq[int]) -> None:
        """The prompt's full blocks may serve other requests; without the pages before a window there is no prefix."""
        if request.hashes and SCRATCH_PAGE not in pages:
            self.kv.publish(request.namespace, request.hashes, pages, request.num_tokens, request.fidelity)

    def _fail(self, request: Request, code: str, message: str, retryable: bool) -> None:
        self._forget(request)
        self.node.failed(request.key, code, message, retryable)
        log.warning("request_failed", extra={"fields": {"request": request.key[0], "code": code, "why": message}})

    def _forget(self, request: Request) -> None:
        """Every trace of the request, and every page it holds."""
        del self._requests[request.key]
        self._grammars.remove(request)
        self.scheduler.drop(request)
        for sequence in request.sequences:
            self.scheduler.stop(sequence)
            if self.prefill is not None:
                self.prefill.remove(sequence)
            self._release(sequence.take_pages())

    def _release(self, pages: list[int]) -> None:
        if pages and (self._ahead is None or not self._ahead.keep(pages)):
            self.kv.release(pages)

    # ---------------------------------------------------------------------------------------------------------- report

    def _report(self) -> None:
        layout, requests = self.kv.layout, self._requests.values()
        report(self.node.loop_stats, requests, self.scheduler, self.prefill, layout, self._clock())

    def _check_books(self) -> None:
        """Once after a busy time, and only when nothing has come for a while: the recount looks at every page."""
        if not self._requests and not self._checked:
            self.kv.check()
            self._checked = True
