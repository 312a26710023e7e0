"""What one engine step takes and gives. Schedulers build plans, the engine runs them; neither knows the other.

A step is a mixed batch of rows: a prefill chunk is a row of many tokens, a decode row has one. A row whose last token
completes the known text also samples: once for a decode row, n times for the last chunk of a request with n samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tailrace.model.sampling_params import SamplingParams


@dataclass(slots=True)
class SamplerState:
    """Sampling state of one sample of one request; lives with the sequence, mutated only by `observe`.

    Attributes:
        num_prompt_tokens: prompt length; a token at absolute position p is output token p - num_prompt_tokens.
        prompt_counts: token id -> count in the prompt (empty unless params.needs_counts).
        output_counts: token id -> count in the output so far.
        num_output_tokens: output tokens so far.
        eos_ids: ids that end the sample unless ignore_eos.
    """

    params: SamplingParams
    sample: int
    num_prompt_tokens: int
    eos_ids: frozenset[int]
    prompt_counts: dict[int, int] = field(default_factory=dict)
    output_counts: dict[int, int] = field(default_factory=dict)
    num_output_tokens: int = 0

    def observe(self, token: int) -> None:
        """Count one accepted output token."""
        self.num_output_tokens += 1
        if self.params.needs_counts:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def finish_reason(self, token: int) -> str | None:
        """Why the sample ends with `token` (already observed), or None: `stop` for EOS and stop ids, else `length`."""
        is_stop = token in self.params.stop_token_ids or (not self.params.ignore_eos and token in self.eos_ids)
        if is_stop and self.num_output_tokens > self.params.min_tokens:
            return "stop"
        return "length" if self.num_output_tokens >= self.params.max_tokens else None


@dataclass(slots=True)
class Row:
    """One sequence's part in a step.

    Attributes:
        key: opaque to the engine; results are returned in plan order.
        ids: [num_new] int32, the new tokens.
        start: absolute position of ids[0]; state of positions < start is in the pages.
        pages: [num_pages] int32 page of each ordinal, long enough for start + num_new tokens; SCRATCH_PAGE where the
            group no longer needs that page.
        samplers: one a sample wanted from the last position; empty for a chunk that is not the last.
        prompt_logprobs: number of top alternatives wanted for every *next-token* position of ids that is followed by a
            known token; None for none. `next_ids` [num_new] then gives those tokens (-1 where unknown).
    """

    key: object
    ids: np.ndarray
    start: int
    pages: np.ndarray
    samplers: tuple[SamplerState, ...] = ()
    prompt_logprobs: int | None = None
    next_ids: np.ndarray | None = None


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
    """tokens, logprobs: one a sampler, in order. prompt_logprobs: one a known next token. error: of this row alone."""

    key: object
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob | None] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    error: str | None = None
