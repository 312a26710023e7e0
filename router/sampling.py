"""From a checked body to SamplingParams: what depends on the vocabulary and on how long a request may be."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace.model.errors import ClientError
from tailrace.model.sampling_params import SamplingParams
from tailrace.router.api_types import ChatBody, CompletionBody, SamplingBody

MAX_CHOICES = 2048
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """vocab_size: ids below it exist. max_request_tokens: prompt and output of one request together.
    prompt_logprobs: whether the workers that compute prompts have all layers, which these need."""

    vocab_size: int
    max_request_tokens: int
    prompt_logprobs: bool = True


def check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Raise ClientError unless every id is in the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ClientError(
                f"{param}: token id {token} is not in the vocabulary of {vocab_size} ids",
                param=param,
                code="invalid_id",
            )


def prompt_too_long(num_tokens: int, limit: int, param: str, *, at_least: bool = False) -> ClientError:
    """The 400 for a prompt that leaves no room for even one token."""
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return ClientError(
        f"{param}: the prompt has {count} tokens, but prompt and output together may have at most {limit}",
        param=param,
        code="context_length_exceeded",
    )


def check_before_tokenizing(body: SamplingBody, limits: Limits) -> None:
    """What can be refused without knowing the prompt's length."""
    check_ids(body.stop_token_ids, limits.vocab_size, "stop_token_ids")
    check_ids((token for token, _ in body.logit_bias), limits.vocab_size, "logit_bias")
    wanted = asked_tokens(body)
    if wanted is not None and body.min_tokens > wanted[0]:
        raise ClientError(
            f"min_tokens: {body.min_tokens} is more than {wanted[1]} ({wanted[0]})",
            param="min_tokens",
            code="invalid_value",
        )
    if isinstance(body, CompletionBody):
        if body.best_of is not None and body.best_of != body.n:
            raise ClientError("best_of: only the value of n is supported", param="best_of", code="invalid_value")
        choices = len(body.prompt) * body.n
        if choices > MAX_CHOICES:
            message = (
                f"n: {body.n} for each of {len(body.prompt)} prompts are {choices} choices, more than {MAX_CHOICES}"
            )
            raise ClientError(message, param="n", code="invalid_value")
        if body.max_tokens == 0 and not body.echo:
            raise ClientError("max_tokens: 0 needs echo", param="max_tokens", code="invalid_value")
    if isinstance(body, ChatBody) and body.top_logprobs is not None and not body.logprobs:
        raise ClientError("top_logprobs: needs logprobs to be true", param="top_logprobs", code="invalid_value")


def asked_tokens(body: SamplingBody) -> tuple[int, str] | None:
    """The output limit that the client set, and the field it set it with."""
    newer = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if newer is not None and body.max_tokens not in (None, newer):
        raise ClientError(
            "max_tokens: differs from max_completion_tokens, which replaces it",
            param="max_tokens",
            code="invalid_value",
        )
    if newer is not None:
        return newer, "max_completion_tokens"
    return None if body.max_tokens is None else (body.max_tokens, "max_tokens")


def sampling_params(
    body: SamplingBody, num_prompt_tokens: int, limits: Limits, prompt_param: str, grammar: str = ""
) -> SamplingParams:
    """Checked sampling parameters; raises ClientError naming both numbers where the request is too long.

    `grammar`: as grammar_spec.py made it.
    """
    limit = limits.max_request_tokens
    if num_prompt_tokens >= limit:
        raise prompt_too_long(num_prompt_tokens, limit, prompt_param)
    room = limit - num_prompt_tokens
    max_tokens, param = asked_tokens(body) or (room, "")
    if max_tokens > room:
        raise ClientError(
            f"{param}: {num_prompt_tokens} prompt tokens + {max_tokens} are {num_prompt_tokens + max_tokens}, "
            f"but prompt and output together may have at most {limit}",
            param=param,
            code="context_length_exceeded",
        )
    if body.min_tokens > max_tokens:
        raise ClientError(
            f"min_tokens: {body.min_tokens} is more than the {max_tokens} tokens of output that fit",
            param="min_tokens",
            code="invalid_value",
        )
    logprobs, prompt_logprobs = wanted_logprobs(body)
    if prompt_logprobs is not None and not limits.prompt_logprobs:
        raise ClientError(
            "logprobs: with echo they are the prompt's too, which need the upper layers of every token; with "
            "handoff_mode bounded_replay_on_generation those are computed for a prompt's end only",
            param="logprobs",
            code="invalid_value",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=secrets.randbits(64) if body.seed is None else body.seed & _SEED_MASK,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        stop_token_ids=tuple(dict.fromkeys(body.stop_token_ids)),
        ignore_eos=body.ignore_eos,
        grammar=grammar,
    )


def wanted_logprobs(body: SamplingBody) -> tuple[int | None, int | None]:
    """(alternatives an output token, alternatives a prompt token), None for none at all."""
    if isinstance(body, ChatBody):
        return ((body.top_logprobs or 0) if body.logprobs else None), None
    if isinstance(body, CompletionBody):
        return body.logprobs, (body.logprobs if body.echo else None)
    return None, None
