"""What passes between a rank process's loop and its transfer thread. Frozen data and two ports, torch-free.

The transfer thread (`transfer/node.py`) turns frames into loop events; the loop answers through a port, whose methods
are thread-safe and do not block. Neither knows how the other works: the loop knows no socket, the node no forward.

Rules that both sides keep:
    * Events of one key come in the order of their causes: never Admitted or Arrived after that key's Cancelled.
    * The loop's calls for a key that the node has closed meanwhile (cancelled, failed) are dropped there.
    * Cancelled is answered with `ended(key, "cancelled")` once the loop has released every page of the key. A key that
      the loop does not know any more (prefill done, finished) gets no answer.
    * `chunk_done` has pinned the pages when it returns: the loop may release its own hold right after it.
    * Admitted passes the hold of every page in it (but SCRATCH_PAGE) to the loop.

If either thread dies, the process ends: pages and requests die with it and the peers see its boot id go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.transfer.messages import Delta, Handoff, Submit, TokenLogprob, pack_ids

Key = tuple[str, int]  # (request, attempt)


# ------------------------------------------------------------------------------------------------------ node to loop


@dataclass(frozen=True, slots=True)
class Arrived:
    """A leg of an attempt for this worker: `prefill` on ctx, `local` on gen. `at`: this process's monotonic clock."""

    submit: Submit
    at: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """Every page is here and ctx has said `valid`. `pages`: one an ordinal, SCRATCH_PAGE where none is needed."""

    handoff: Handoff
    pages: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Stop working on this key: the ingress's cancel, its lease's end, or a peer's failure. `reason` is for the log."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """No new work will come; what runs is finished within `limit_s`."""

    limit_s: float


@dataclass(frozen=True, slots=True)
class FaultsSet:
    """Tests only: the part of a fault plan that is the loop's. `preempt_last`: so many coming last chunks are preempted."""

    preempt_last: int


LoopEvent = Arrived | Admitted | Cancelled | DrainAsked | FaultsSet


# ------------------------------------------------------------------------------------------------------ loop to node


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What the last chunk of a prompt gave.

    Attributes:
        deltas: one a sample, for the ingress at once; the first carries prompt logprobs, cached tokens and stamps.
        handoff: for gen; None if every sample ended with its first token, then the key is finished and the loop
            calls no `ended`.
    """

    deltas: tuple[Delta, ...]
    handoff: Handoff | None


@dataclass(frozen=True, slots=True)
class LoopStats:
    """The loop's state after a pass; a new object each pass, so that readers need no lock. Counters only grow.

    Attributes:
        stamp: monotonic clock at the end of the pass (progress stamp).
        phase: load | compile | run.
        running, queued: sequences in the batch; requests that wait for pages, a slot or their first chunk.
        queue_age_s: age of the oldest queued request, 0 if there is none.
        headroom_pages: gen: pages that must stay available when a bind is granted.
        prefill_tokens_queued: prompt tokens not yet computed.
        prefill_tokens_per_s: smoothed, 0 until measured.
        prompt_positions: prompt positions computed here; on gen only local prefill and recompute raise it.
        cached_tokens: prompt tokens found in the prefix index.
        output_tokens: tokens sampled.
        local_prefills, preemptions, recomputed_positions: counts.
    """

    stamp: float
    phase: str = "run"
    running: int = 0
    queued: int = 0
    queue_age_s: float = 0.0
    headroom_pages: int = 0
    prefill_tokens_queued: int = 0
    prefill_tokens_per_s: float = 0.0
    prompt_positions: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    local_prefills: int = 0
    preemptions: int = 0
    recomputed_positions: int = 0


class LoopPort(Protocol):
    """What both loops need of the node."""

    loop_stats: LoopStats

    def poll_events(self) -> list[LoopEvent]:
        """Everything that came since the last call, in order; empty if nothing did."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until an event is there, at most `timeout_s`."""
        ...

    def ended(self, key: Key, outcome: str) -> None:
        """The loop has let go of the key: `finished` or `cancelled`."""
        ...

    def failed(self, key: Key, code: str, message: str, retryable: bool) -> None:
        """The attempt failed here (a code of messages.Fail); its pages are already released by the loop."""
        ...


class CtxPort(LoopPort, Protocol):
    """The node as the ctx loop sees it."""

    def chunk_launched(self, key: Key, last: bool, seconds_left: float) -> None:
        """Just before a chunk's forward. `seconds_left`: of this key's prefill, infinite until the rate is measured."""
        ...

    def chunk_done(self, key: Key, pages: Sequence[int], tokens_ready: int, seconds_left: float) -> None:
        """After a chunk's forward has returned. `pages`: of the whole prompt; state of tokens < tokens_ready is final."""
        ...

    def prefill_done(self, key: Key, result: PrefillResult) -> None:
        """After the final chunk_done. The loop forgets the key with this call."""
        ...


class GenPort(LoopPort, Protocol):
    """The node as the gen loop sees it."""

    def tokens(self, deltas: Sequence[Delta]) -> None:
        """All of a pass's new tokens, once a pass."""
        ...


# ---------------------------------------------------------------------------------------------------------- deltas


class LogprobLike(Protocol):
    """engine.step.Logprob, which this room does not import."""

    @property
    def token(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def top(self) -> tuple[tuple[int, float], ...]: ...


def token_delta(
    key: Key,
    sample: int,
    start: int,
    token: int,
    logprob: LogprobLike | None,
    finish: str | None,
    *,
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
    cached_tokens: int = 0,
    stamps: dict[str, float] | None = None,
) -> Delta:
    """One new token of a sample as a frame part. A token that ends the sample is in `ids` and is named by `stop_id`."""
    return Delta(
        request=key[0],
        attempt=key[1],
        sample=sample,
        start=start,
        ids=pack_ids((token,)),
        logprobs=() if logprob is None else (TokenLogprob(logprob.token, logprob.logprob, logprob.top),),
        finish=finish,
        stop_id=token if finish == "stop" else None,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        stamps=stamps or {},
    )


def prefill_only_delta(
    key: Key,
    sample: int,
    start: int,
    *,
    prompt_logprobs: tuple[TokenLogprob, ...],
    cached_tokens: int,
    stamps: dict[str, float],
) -> Delta:
    """The only delta of a sample with max_tokens 0: no token, finish `length`."""
    return Delta(
        request=key[0],
        attempt=key[1],
        sample=sample,
        start=start,
        ids=b"",
        logprobs=(),
        finish="length",
        stop_id=None,
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        stamps=stamps,
    )


def echo_logprobs(first_token: int, rest: Sequence[LogprobLike]) -> tuple[TokenLogprob, ...]:
    """Prompt logprobs for a delta: one a prompt token, the first of which has none."""
    tail = tuple(TokenLogprob(p.token, p.logprob, p.top) for p in rest)
    return (TokenLogprob(first_token, None, ()), *tail)
