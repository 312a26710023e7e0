"""A request on a generation worker: the samples that still run, and what its first delta has to carry.

A request is in one of four places at a time: a hand-off that waits for a slot; a *stem*, the prefill that its samples
share (stems.py); running; or, sample by sample, being recomputed. Plain data, dies with its loop.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from tailrace.engine.sequence import Sequence, sampler_states
from tailrace.engine.step import Logprob, SamplerState
from tailrace.kv_cache.layout import SCRATCH_PAGE, Layout
from tailrace.kv_cache.manager import EXACT, Fidelity
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import ID_BYTES, Delta, Handoff, Moved, TokenLogprob, pack_ids, unpack_ids


@dataclass(slots=True, eq=False)
class Request:
    """One request of this worker.

    Attributes:
        received: clock when it came to the loop.
        live: samples that have not ended.
        stem: the shared prefill; None once the samples exist.
        handed: of a stem whose beginning was handed over, the record.
        started: clock of the stem's first chunk.
        before: tokens that the worker had computed until then.
        samples: number of samples asked for.
        num_tokens: tokens whose state was handed over, or is the stem's to compute.
        fidelity: of that state.
        scope: of its block hashes.
        tail: the last prompt ids, of a hand-off.
        ctx: boot id of the worker that prefilled it.
        moved: how its pages came; goes with the first delta.
    """

    key: Key
    order: int
    received: float
    priority: int
    samples: int
    num_tokens: int
    hashes: bytes
    namespace: bytes
    live: list[Sequence] = field(default_factory=list)
    stem: Sequence | None = None
    started: float | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    fidelity: Fidelity = EXACT
    scope: str = ""
    tail: list[int] = field(default_factory=list)
    ctx: str = ""
    before: int = 0
    moved: Moved | None = None
    handed: Handoff | None = None

    @property
    def sequences(self) -> list[Sequence]:
        return self.live if self.stem is None else [self.stem, *self.live]

    @property
    def num_rows(self) -> int:
        """Samples that decode, or will."""
        return len(self.live) if self.stem is None else self.samples


def request_of_handoff(
    handoff: Handoff, pages: tuple[int, ...], order: int, now: float, eos_ids: frozenset[int]
) -> Request:
    """The request that a hand-off record describes; its first living sample has the pages, the others none yet."""
    key = (handoff.request, handoff.attempt)
    tail, output = unpack_ids(handoff.tail_ids), unpack_ids(handoff.output_ids)
    whole = len(tail) == handoff.num_prompt_tokens
    prompt = np.array(tail, np.int32) if whole else None
    request = Request(
        key,
        order,
        now,
        handoff.priority,
        handoff.samples,
        handoff.num_tokens,
        handoff.hashes,
        handoff.namespace,
        scope=handoff.scope,
        tail=tail,
    )
    states = sampler_states(
        handoff.params,
        range(handoff.first_sample, handoff.first_sample + handoff.samples),
        handoff.num_prompt_tokens,
        eos_ids,
        handoff.counts,
        output,
    )
    for state, token, finished in zip(states, handoff.first_tokens, handoff.finished, strict=True):
        if finished:
            continue
        state.observe(token)
        request.live.append(
            Sequence(
                key,
                order=order,
                received=now,
                num_prompt_tokens=handoff.num_prompt_tokens,
                prompt=prompt,
                samplers=(state,),
                output=[*output, token],
                priority=handoff.priority,
                hashes=handoff.hashes,
                namespace=handoff.namespace,
                last_token_at=now,
            )
        )
    if request.live:
        request.live[0].pages = list(pages)
        request.live[0].num_computed = handoff.num_tokens
    return request


def why_unusable(handoff: Handoff, pages: tuple[int, ...], layout: Layout) -> str | None:
    """What makes a hand-off impossible to decode, or None. Without this, missing pages would become wrong tokens."""
    num_tokens = handoff.num_tokens
    if handoff.left_to_gen:
        num_tokens = handoff.num_prompt_tokens + len(handoff.output_ids) // ID_BYTES
    expected = layout.num_pages(num_tokens)
    if handoff.num_tokens < 1 or len(pages) != expected:
        return f"{len(pages)} pages for {num_tokens} tokens, which need {expected}"
    first = layout.first_needed_page(handoff.num_tokens)
    missing = [ordinal for ordinal in range(first, expected) if pages[ordinal] == SCRATCH_PAGE]
    if missing:
        return f"no page for ordinals {missing[:8]}"
    drawn = 0 if handoff.left_to_gen else handoff.samples
    if not len(handoff.first_tokens) == len(handoff.finished) == drawn:
        return f"{len(handoff.first_tokens)} first tokens for {drawn} samples"
    if handoff.left_to_gen and first_left(handoff) < handoff.num_prompt_tokens - len(handoff.tail_ids) // ID_BYTES:
        return f"{handoff.left_to_gen} tokens are left to be computed, of which not all ids are here"
    return None


def first_left(handoff: Handoff) -> int:
    """Position of the first token that is computed here. If all were to be left, the one that was not is done again."""
    num_known = handoff.num_prompt_tokens + len(handoff.output_ids) // ID_BYTES
    return 0 if handoff.left_to_gen >= num_known else handoff.num_tokens


def token_delta(
    key: Key,
    state: SamplerState,
    tokens: Seq[int],
    logprobs: Seq[Logprob | None],
    finish: str | None,
    stamps: dict[str, float],
    *,
    prompt_logprobs: tuple[TokenLogprob, ...] = (),
    cached_tokens: int = 0,
    moved: Moved | None = None,
) -> Delta:
    """New tokens, at least one, already observed by `state`; the last may end its sample: it is in `ids` and named by
    `stop_id`."""
    return Delta(
        request=key[0],
        attempt=key[1],
        sample=state.sample,
        start=state.num_output_tokens - len(tokens),
        ids=pack_ids(tokens),
        logprobs=tuple(TokenLogprob(p.token, p.logprob, p.top) for p in logprobs if p is not None),
        finish=finish,
        stop_id=state.stop_id(tokens[-1], finish),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        stamps=stamps,
        moved=moved,
    )
