"""What a client asked of its tokens. Plain data, torch-free: ingress checks it, ctx and gen obey it, frames carry it.

Bounds are checked at the edge (router/api.py); this class only refuses what would make sampling undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request; its samples differ only in `sample index`.

    Attributes:
        max_tokens: output tokens at most, a sample. 0 only with prompt logprobs / echo (prefill only).
        min_tokens: until this many output tokens exist, EOS and stop ids have logit -inf.
        temperature: 0 is greedy.
        top_k: 0 is off.  top_p: 1 is off.  min_p: 0 is off.
        presence_penalty, frequency_penalty: on counts of *output* tokens.
        repetition_penalty: 1 is off; on tokens of prompt and output.
        logit_bias: token id to added logit.
        seed: 64-bit; the ingress draws one when the client gave none.
        logprobs: number of top alternatives a token; None is none at all, 0 is the sampled token's only.
        prompt_logprobs: the same for prompt tokens (echo).
        stop_token_ids: end the sample (finish reason `stop`); the id is not part of the text.
        ignore_eos: the tokenizer's EOS ids do not end the sample.
        grammar: what the output must look like (model/grammar_text.py), "" for anything. Its end ends the sample
            whatever min_tokens and ignore_eos say.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_counts(self) -> bool:
        """True if sampling depends on which tokens came before, so that counts travel in the hand-off record."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
