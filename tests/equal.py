"""Hold what a cluster answers over HTTP against REF (EQ in cases.md): ids, text, finish reason, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import VOCAB_SIZE
from harness import LocalCluster
from oracle import TOP, Comparison, Reference, greedy, reference


@dataclass(frozen=True)
class Model:
    """A checkpoint on disk (or an embedded name) and its REF."""

    spec: str
    num_pages: int = 512

    @cached_property
    def ref(self) -> Reference:
        return reference(self.spec, num_pages=self.num_pages)

    def text(self, ids: Sequence[int]) -> str:
        return self.ref.source.tokenizer.decode(list(ids), skip_special=True)


def prompt_of(length: int, seed: int) -> list[int]:
    """Random ids without the special ones; prompts of different seeds share no block."""
    return np.random.default_rng(seed).integers(4, VOCAB_SIZE, length).tolist()


def answer(cluster: LocalCluster, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> dict[str, Any]:
    """One greedy completion with ids and logprobs; its first choice with the usage beside it."""
    wanted = {"ignore_eos": True, "logprobs": TOP, "return_token_ids": True} | options
    reply = cluster.complete(list(prompt), max_tokens, **wanted)
    return reply["choices"][0] | {"usage": reply["usage"]}


def answers(
    cluster: LocalCluster, prompts: Sequence[Sequence[int]], max_tokens: int = 16, *, at_once: int = 8, **options: Any
) -> list[dict[str, Any]]:
    """Many, `at_once` at a time, in the order of the prompts."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda p: answer(cluster, p, max_tokens, **options), prompts))


def compare(
    model: Model, prompts: Sequence[Sequence[int]], choices: Sequence[dict[str, Any]], max_tokens: int = 16
) -> Comparison:
    """EQ for each answer, margin rule applied; the caller asks `.check()` once it has added all it wants."""
    comparison = Comparison()
    for _, choice, expected in zip(prompts, choices, model.ref.generate(prompts, greedy(max_tokens)), strict=True):
        sample = expected.samples[0]
        before = comparison.compared
        comparison.add(sample.logprobs, choice["token_ids"])
        compared = comparison.compared - before
        for position in range(compared):
            found = choice["logprobs"]["token_logprobs"][position]
            assert abs(found - sample.logprobs[position].logprob) <= 1e-4, (position, found, sample.logprobs[position])
        if compared == len(sample.ids):
            assert choice["text"] == model.text(sample.ids)
            assert choice["finish_reason"] == sample.finish_reason
    return comparison


def assert_equal(
    cluster: LocalCluster, model: Model, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **options: Any
) -> list[dict[str, Any]]:
    """Ask, compare with REF, and return the choices."""
    choices = answers(cluster, prompts, max_tokens, **options)
    compare(model, prompts, choices, max_tokens).check()
    return choices


def tiny(path: Path, family: str = "llama", **overrides: Any) -> Model:
    """A tiny random checkpoint and its REF."""
    from checkpoints import write_tiny_checkpoint

    return Model(str(write_tiny_checkpoint(path, family, **overrides)))
