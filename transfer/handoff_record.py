"""What ctx makes of a prefill's result: the first delta of each sample, and the hand-off record. Pure functions.

The record is all that gen needs beside the pages; with a prompt tail it carries only the last prompt ids, so counts
travel if sampling needs them. Knows no reader and no page.
"""

from __future__ import annotations

from collections import Counter

from tailrace.model.errors import ConfigError
from tailrace.transfer.loop_events import FirstToken, PrefillResult
from tailrace.transfer.messages import ID_BYTES, Delta, Handoff, Submit, pack_ids, unpack_ids

MIN_PROMPT_TAIL_TOKENS = 256


def check_prompt_tail(tail_tokens: int | None, block_tokens: int) -> None:
    """Raises ConfigError, with the numbers, if the tail is shorter than gen's rules for it need."""
    least = max(MIN_PROMPT_TAIL_TOKENS, block_tokens)
    if tail_tokens is not None and tail_tokens < least:
        raise ConfigError(
            f"gen_prompt_tail_tokens {tail_tokens} is below {least} "
            f"(the larger of {MIN_PROMPT_TAIL_TOKENS} and block_tokens {block_tokens})"
        )


def handoff_record(submit: Submit, result: PrefillResult, tail_tokens: int | None) -> Handoff:
    """The record of a prefill; `tail_tokens`: prompt ids that it carries, None for all."""
    tail_ids = submit.prompt_ids if tail_tokens is None else submit.prompt_ids[-tail_tokens * ID_BYTES :]
    counts = Counter(unpack_ids(submit.prompt_ids)) if submit.params.needs_counts else {}
    return Handoff(
        request=submit.request,
        attempt=submit.attempt,
        num_prompt_tokens=len(submit.prompt_ids) // ID_BYTES,
        num_tokens=result.num_tokens,
        first_tokens=tuple(0 if first.token is None else first.token for first in result.firsts),
        finished=tuple(first.finish is not None for first in result.firsts),
        tail_ids=tail_ids,
        counts=dict(counts),
        output_ids=submit.output_ids,
        hashes=submit.hashes,
        namespace=submit.namespace,
        params=submit.params,
        samples=submit.samples,
        priority=submit.priority,
        lease_s=submit.lease_s,
        scope=submit.scope,
        first_sample=submit.first_sample,
        left_to_gen=submit.left_to_gen,
        stamps=result.stamps if submit.left_to_gen else {},
        cached_tokens=result.cached_tokens if submit.left_to_gen else 0,
    )


def first_deltas(submit: Submit, result: PrefillResult) -> list[Delta]:
    """One a sample, if ctx drew any; the first one's carries what belongs to the prompt."""
    return [_first_delta(submit, result, place, first) for place, first in enumerate(result.firsts)]


def _first_delta(submit: Submit, result: PrefillResult, place: int, first: FirstToken) -> Delta:
    return Delta(
        request=submit.request,
        attempt=submit.attempt,
        sample=submit.first_sample + place,
        start=len(submit.output_ids) // ID_BYTES,
        ids=b"" if first.token is None else pack_ids((first.token,)),
        logprobs=() if first.logprob is None else (first.logprob,),
        finish=first.finish,
        stop_id=first.stop_id,
        prompt_logprobs=result.prompt_logprobs if place == 0 else (),
        cached_tokens=result.cached_tokens,
        stamps=result.stamps if place == 0 else {},
    )
