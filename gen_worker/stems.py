"""Stems: what a gen prefills for all samples of a request before they go apart. Plain data and pure functions.

    of a Submit     a local prefill: the whole prompt
    of a hand-off   the prompt's end, which ctx has left to gen (bounded replay): its upper layers begin a fixed number
                    of tokens before its end and know nothing of what stands in front (model/replay.py)

The history of either is exact. State behind a replay is not, so no snapshot of it is kept for others. A stem that loses
its pages is computed again from the start, all layers of it, if its whole prompt is here.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from tailrace.engine.sequence import Sequence, sampler_states
from tailrace.engine.step import Logprob
from tailrace.gen_worker.request import Request, first_left
from tailrace.transfer.loop_events import Arrived, Key
from tailrace.transfer.messages import Delta, Handoff, PrefillSample, TokenLogprob, unpack_ids


def request_of_submit(event: Arrived, order: int, eos_ids: frozenset[int]) -> Request:
    """A local prefill, which has no pages yet."""
    submit, key = event.submit, event.key
    prompt, output = np.array(unpack_ids(submit.prompt_ids), np.int32), unpack_ids(submit.output_ids)
    stem = Sequence.for_prefill(key, prompt, output, submit.params, submit.samples, eos_ids, submit.first_sample)
    stem.order, stem.received, stem.priority = order, event.received, submit.priority
    stem.hashes, stem.namespace = submit.hashes, submit.namespace
    stem.use_cache = stem.use_cache and not submit.no_cache
    return Request(
        key, order, event.received, submit.priority, submit.samples, stem.num_known, submit.hashes, submit.namespace,
        stem=stem,
    )  # fmt: skip


def request_of_rest(
    handoff: Handoff, pages: Seq[int], order: int, now: float, eos_ids: frozenset[int], upper_tokens: int
) -> Request:
    """A replay, over pages for all its tokens.

    Args:
        upper_tokens: the last so many go through the upper layers.
    """
    key, output, tail = (handoff.request, handoff.attempt), unpack_ids(handoff.output_ids), unpack_ids(handoff.tail_ids)
    num_prompt, start = handoff.num_prompt_tokens, first_left(handoff)
    samples = range(handoff.first_sample, handoff.first_sample + handoff.samples)
    stem = Sequence(
        key,
        order=order,
        received=now,
        num_prompt_tokens=num_prompt,
        prompt=np.array(tail, np.int32),
        prompt_from=num_prompt - len(tail),
        samplers=sampler_states(handoff.params, samples, num_prompt, eos_ids, handoff.counts, output),
        output=output,
        priority=handoff.priority,
        hashes=handoff.hashes,
        namespace=handoff.namespace,
        pages=list(pages),
        num_computed=start,
        num_cached=start,
    )
    stem.upper_from = max(start, stem.num_known - upper_tokens)
    return Request(
        key, order, now, handoff.priority, handoff.samples, stem.num_known, handoff.hashes, handoff.namespace,
        stem=stem, scope=handoff.scope, tail=tail, handed=handoff,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StemEnd:
    """What is told of a stem that has ended: `prefill` to the router, the rest with the first delta."""

    prefill: PrefillSample
    stamps: dict[str, float]
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...]


def end_of(request: Request, stem: Sequence, now: float, num_computed: int) -> StemEnd:
    """`num_computed`: tokens that the worker has computed so far, of whatever request."""
    started = request.received if request.started is None else request.started
    cached, queue_s, seconds = stem.num_cached or 0, started - request.received, now - started
    mine = stem.num_known - cached
    others = max(0, num_computed - request.before - mine)
    prefill = PrefillSample(mine, cached, others, seconds, queue_s)
    echo = _echo(stem, request.prompt_logprobs)
    if request.handed is None:
        return StemEnd(prefill, {"queue": queue_s, "prefill": seconds}, cached, echo)
    return StemEnd(prefill, request.handed.stamps | {"replay": queue_s + seconds}, request.handed.cached_tokens, echo)


def empty_deltas(key: Key, samples: Seq[int], start: int, end: StemEnd) -> list[Delta]:
    """The only delta of each sample with max_tokens 0: all there are, from 0, since without tokens nothing was lost
    midway. The first carries what belongs to the whole request."""
    deltas = []
    for sample in samples:
        once = ((), 0) if sample else (end.prompt_logprobs, end.cached_tokens)
        deltas.append(Delta(key[0], key[1], sample, start, b"", (), "length", None, *once, end.stamps))
    return deltas


def _echo(stem: Sequence, logprobs: list[Logprob]) -> tuple[TokenLogprob, ...]:
    """Prompt logprobs, one a prompt token; the first token has none."""
    if stem.prompt_logprobs is None or stem.prompt is None:
        return ()
    first = TokenLogprob(int(stem.prompt[0]), None, ())
    return (first, *(TokenLogprob(p.token, p.logprob, p.top) for p in logprobs))
