"""What one engine step takes and gives. Schedulers build plans, the engine runs them; neither knows the other.

A step is a mixed batch of rows: a prefill chunk is a row of many tokens, a decode row has one. A row whose last token
completes the known text also samples: once for a decode row, n times for the last chunk of a request with n samples.

Behind the known text a row of one sampler may carry *drafts*, guesses of the tokens to come. The sampler draws behind
the last known token and behind each draft; a draft counts if it is what was drawn in its place. Draws depend on seed
and position alone, so what comes out is what plain decoding gives, however many drafts were right. Of drafts nothing
is kept (kernels/paged_attention.RowSpan); those that count are known tokens of the next step and computed again there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from tailrace.model.sampling_params import SamplingParams

UNKNOWN = -1  # as a row's id: the token that the step launched before draws for the same key


class GrammarPlace(Protocol):
    """A sample's place in its grammar (engine/grammar.py), as a step sees it."""

    ended: bool
    error: str | None

    def accept(self, token: int) -> None: ...

    def allowed(self) -> np.ndarray: ...

    def begin(self) -> None: ...


@dataclass(slots=True)
class SamplerState:
    """Sampling state of one sample of one request; lives with the sequence, mutated only by `observe`.

    Attributes:
        num_prompt_tokens: prompt length; a token at absolute position p is output token p - num_prompt_tokens.
        prompt_counts: token id -> count in the prompt (empty unless params.needs_counts).
        output_counts: token id -> count in the output so far.
        num_output_tokens: output tokens so far.
        eos_ids: ids that end the sample unless ignore_eos.
        grammar: the sample's place in params.grammar, once it is compiled; None without one.
    """

    params: SamplingParams
    sample: int
    num_prompt_tokens: int
    eos_ids: frozenset[int]
    prompt_counts: dict[int, int] = field(default_factory=dict)
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0
    grammar: GrammarPlace | None = None

    def observe(self, token: int) -> None:
        """Count one accepted output token."""
        self.num_output_tokens += 1
        if self.grammar is not None:
            self.grammar.accept(token)
        if self.params.needs_counts:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def after(self, num_tokens: int) -> SamplerState:
        """The state behind so many more tokens, of parameters that ask how many there are and not which."""
        if not num_tokens or self.num_output_tokens >= self.params.min_tokens:
            return self
        return replace(self, num_output_tokens=self.num_output_tokens + num_tokens)

    def finish_reason(self, token: int) -> str | None:
        """Why the sample ends with `token` (already observed), or None: `stop` for EOS, stop ids and the end of its
        grammar, else `length`."""
        if self.grammar is not None and self.grammar.ended:
            return "stop"
        is_stop = token in self.params.stop_token_ids or (not self.params.ignore_eos and token in self.eos_ids)
        if is_stop and self.num_output_tokens > self.params.min_tokens:
            return "stop"
        return "length" if self.num_output_tokens >= self.params.max_tokens else None

    def stop_id(self, token: int, finish: str | None) -> int | None:
        """`token` if it ended the sample as an EOS or stop id, which is no text; the last token of a grammar may be."""
        is_stop = finish == "stop" and (token in self.params.stop_token_ids or token in self.eos_ids)
        return token if is_stop else None


@dataclass(slots=True)
class Row:
    """One sequence's part in a step.

    Attributes:
        key: opaque to the engine; results are returned in plan order.
        ids: [num_new] int32, the new tokens, drafts last.
        start: absolute position of ids[0]; state of positions < start is in the pages.
        pages: [num_pages] int32 page of each ordinal, long enough for start + num_new tokens; SCRATCH_PAGE where the
            group no longer needs that page.
        samplers: one a sample wanted from the last position; empty for a chunk that is not the last.
        prompt_logprobs: number of top alternatives wanted for every *next-token* position of ids that is followed by a
            known token; None for none. `next_ids` [num_new] then gives those tokens (-1 where unknown).
        num_drafts: how many of ids are drafts.
        want_drafts: drafts wanted for the next step, at most.
        upper_from: see kernels/paged_attention.RowSpan; 0 but where a family's upper layers begin late.
    """

    key: object
    ids: np.ndarray
    start: int
    pages: np.ndarray
    samplers: tuple[SamplerState, ...] = ()
    prompt_logprobs: int | None = None
    next_ids: np.ndarray | None = None
    num_drafts: int = 0
    want_drafts: int = 0
    upper_from: int = 0

    @property
    def num_kept(self) -> int:
        """Known tokens among ids: those whose state stays."""
        return len(self.ids) - self.num_drafts


@dataclass(slots=True)
class StepPlan:
    rows: list[Row]

    @property
    def num_tokens(self) -> int:
        return sum(len(r.ids) for r in self.rows)


@dataclass(frozen=True, slots=True)
class Logprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # by falling logprob, then rising id


@dataclass(slots=True)
class RowResult:
    """tokens, logprobs: one a sampler, in order; of a row with drafts those that count, and the token drawn behind
    them. prompt_logprobs: one a known next token. drafts: guesses of what follows `tokens`. chances: of each draft to
    count if those before it do. error: of this row alone; code: what it is called in messages.Fail."""

    key: object
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    drafts: Sequence[int] = ()
    chances: Sequence[float] = ()
    error: str | None = None
    code: str = "internal"
