"""Continuous batching in one process, both phases: the reference of the tests and the engine's own rows in the benches.

It does not know peers, leases, clocks or prefix reuse: every request computes all of its tokens. Pages for a request's
whole life are reserved before it starts, so nothing is ever preempted. Dies with its caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tailrace.engine.grammar import Grammars, attach
from tailrace.engine.sequence import Chunk, Sequence
from tailrace.engine.step import Logprob, RowResult, StepPlan
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ConfigError
from tailrace.model.sampling_params import SamplingParams


class StepEngine(Protocol):
    """What the generator needs of engine.Engine."""

    def step(self, plan: StepPlan) -> list[RowResult]: ...

    def copy_pages(self, src: Seq[int], dst: Seq[int]) -> None: ...


@dataclass(slots=True)
class Sample:
    """One sample's output. finish_reason: stop | length; a stop id stands in `ids`. logprobs: one a token, if asked."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Generated:
    """A request's samples; prompt_logprobs start at the prompt's second token. error: why it failed, else None."""

    samples: list[Sample]
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    error: str | None = None

    @property
    def ids(self) -> list[int]:
        """The first sample's tokens."""
        return self.samples[0].ids


@dataclass(slots=True)
class _Request:
    """`shared`: whole prompt pages that all samples read; `private`: a list of further pages for each sample, those of
    its state last."""

    number: int
    params: SamplingParams
    result: Generated
    shared: list[int] = field(default_factory=list)
    private: list[list[int]] = field(default_factory=list)
    running: int = 0


class Generator:
    """Serves lists of prompts with one engine.

    Args:
        engine: whose pool the manager's pages belong to.
        kv: only `allocate` and `release` are used.
        eos_ids: ids that end a sample unless its parameters say otherwise.
        max_num_tokens: tokens a step; longer prompts are prefilled in chunks.
        max_batch_size: requests under way at once.
        grammars: None: prompts with a grammar fail.
    """

    def __init__(
        self,
        engine: StepEngine,
        kv: KvManager,
        *,
        eos_ids: frozenset[int] = frozenset(),
        max_num_tokens: int = 512,
        max_batch_size: int = 32,
        grammars: Grammars | None = None,
    ) -> None:
        self._engine, self._kv, self._eos_ids = engine, kv, eos_ids
        self._max_num_tokens, self._max_batch_size = max_num_tokens, max_batch_size
        self._requests: dict[tuple[str, int], _Request] = {}
        self._grammars = grammars
        self._prefilling: list[Sequence] = []
        self._decoding: list[Sequence] = []

    def generate(self, prompts: Seq[Seq[int]], params: Seq[SamplingParams], samples: int = 1) -> list[Generated]:
        """Results in the order of the prompts.

        Args:
            prompts: token ids, none empty.
            params: one a prompt.
            samples: samples a prompt, numbered from 0 for the sampler.

        Raises:
            ConfigError: a request needs more pages than the pool has.
        """
        results = [Generated([Sample() for _ in range(samples)]) for _ in prompts]
        waiting: deque[tuple[Sequence, _Request]] = deque()
        for number, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            key = (str(number), 0)
            ids = np.array(prompt, np.int32)
            sequence = Sequence.for_prefill(key, ids, [], wanted, samples, self._eos_ids)
            results[number].error = self._follow(sequence, wanted.grammar)
            if results[number].error is None:
                waiting.append((sequence, _Request(number, wanted, results[number])))
        try:
            while waiting or self._requests:
                self._admit(waiting)
                self._run_pass()
        finally:
            for request in self._requests.values():
                self._give_back(request)
            self._requests.clear()
            self._prefilling, self._decoding = [], []
        return results

    def _follow(self, sequence: Sequence, grammar: str) -> str | None:
        """Compile the grammar, if there is one; returns why it cannot be followed."""
        if not grammar:
            return None
        if self._grammars is None:
            return "no grammars are followed here"
        return attach([sequence], self._grammars.begin(grammar, [sequence.output for _ in sequence.samplers]))

    def _admit(self, waiting: deque[tuple[Sequence, _Request]]) -> None:
        while waiting and len(self._requests) < self._max_batch_size:
            sequence, request = waiting[0]
            if not self._reserve(sequence, request):
                if not self._requests:
                    raise ConfigError(
                        f"prompt {request.number} of {sequence.num_prompt_tokens} tokens needs more pages"
                    )
                return
            waiting.popleft()
            self._requests[sequence.key] = request
            self._prefilling.append(sequence)

    def _reserve(self, sequence: Sequence, request: _Request) -> bool:
        layout = self._kv.layout
        shared = layout.full_pages(sequence.num_prompt_tokens)
        each = layout.num_pages(sequence.num_prompt_tokens + request.params.max_tokens) - shared
        pages = self._kv.allocate(shared + each * len(request.result.samples))
        if pages is None:
            return False
        request.shared, rest = pages[:shared], pages[shared:]
        request.private = [rest[i * each : (i + 1) * each] for i in range(len(request.result.samples))]
        sequence.pages = request.shared + request.private[0]
        return True

    def _run_pass(self) -> None:
        chunks = [Chunk(sequence, 1) for sequence in self._decoding]
        left = self._max_num_tokens - len(chunks)
        for sequence in self._prefilling:
            if left < 1:
                break
            chunks.append(Chunk(sequence, min(left, sequence.remaining)))
            left -= chunks[-1].num_tokens
        results = self._engine.step(StepPlan([chunk.row() for chunk in chunks]))
        for chunk, result in zip(chunks, results, strict=True):
            self._take(chunk, result)

    def _take(self, chunk: Chunk, result: RowResult) -> None:
        sequence, request = chunk.sequence, self._requests.get(chunk.sequence.key)
        if request is None:  # another sample of this request has failed in this pass
            return
        if result.error is not None:
            request.result.error = result.error
            self._end(sequence.key, request)
            return
        was_last = chunk.last
        sequence.num_computed += chunk.num_tokens
        request.result.prompt_logprobs += result.prompt_logprobs
        if not was_last:
            return
        if sequence in self._decoding:
            sequence.output.append(result.tokens[0])
            going_on = self._accept(request, sequence, result.tokens[0], result.logprobs[0])
            if not going_on:
                self._decoding.remove(sequence)
        else:
            self._prefilling.remove(sequence)
            self._start_samples(sequence, request, result)
        if not request.running:
            self._end(sequence.key, request)

    def _start_samples(self, prefill: Sequence, request: _Request, result: RowResult) -> None:
        """Each sample goes on in pages of its own; what is still written to is copied for all but the first."""
        if not prefill.samplers:
            request.result.samples[0].finish_reason = "length"
        layout, each = self._kv.layout, len(request.private[0])
        open_pages = layout.history_pages(prefill.num_prompt_tokens) - layout.full_pages(prefill.num_prompt_tokens)
        copied = [*range(open_pages), *range(each - layout.num_state_pages, each)]
        for state, token, logprob in zip(prefill.samplers, result.tokens, result.logprobs, strict=True):
            sequence = prefill.sample(state, token)
            sequence.pages = request.shared + request.private[state.sample]
            sequence.num_computed = prefill.num_computed
            if copied and state.sample:
                source, fork = request.private[0], request.private[state.sample]
                self._engine.copy_pages([source[i] for i in copied], [fork[i] for i in copied])
            request.running += 1
            if self._accept(request, sequence, token, logprob):
                self._decoding.append(sequence)

    def _accept(self, request: _Request, sequence: Sequence, token: int, logprob: Logprob | None) -> bool:
        """Note a drawn token; False if it ends the sample."""
        state = sequence.samplers[0]
        state.observe(token)
        sample = request.result.samples[state.sample]
        sample.ids.append(token)
        if logprob is not None:
            sample.logprobs.append(logprob)
        sample.finish_reason = state.finish_reason(token)
        if sample.finish_reason is not None:
            request.running -= 1
        return sample.finish_reason is None

    def _end(self, key: tuple[str, int], request: _Request) -> None:
        self._prefilling = [s for s in self._prefilling if s.key != key]
        self._decoding = [s for s in self._decoding if s.key != key]
        del self._requests[key]
        self._give_back(request)

    def _give_back(self, request: _Request) -> None:
        self._kv.release(request.shared + [page for pages in request.private for page in pages])
