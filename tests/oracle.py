"""References to hold outputs against: the margin rule of greedy comparisons, REF in one process, and transformers.

ref = reference("smollm2")                                   # or a checkpoint directory
results = ref.generate(prompts, greedy(64))                  # each position with its five best
comparison = Comparison()
comparison.add(results[0].samples[0].logprobs, ids_from_elsewhere)
comparison.check()                                           # at least 90 % of positions were compared
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tailrace.engine.engine import Engine, pool_tensor
from tailrace.engine.grammar import Grammars
from tailrace.engine.offline import Generated, Generator
from tailrace.engine.step import Logprob
from tailrace.kv_cache.layout import PageLayout, RowLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.family import RowDecoder
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import ModelSource, open_source
from tailrace.model.weights import Weights, load_weights

MARGIN = 1e-3  # of a logprob, between the reference's best two; nearer ones may change places by float noise
TOLERANCE = 1e-4  # between logprobs of the same token
TOP = 5


class Mismatch(AssertionError):
    """An output differs from its reference at a position where the reference is clear."""


def compare_greedy(
    reference: Sequence[Logprob],
    ids: Sequence[int],
    tops: Sequence[Sequence[tuple[int, float]]] | None = None,
    *,
    unclear: Collection[int] | None = None,
) -> int:
    """Apply the margin rule to one output.

    Args:
        reference: one a position, with at least two alternatives each (unless `unclear` is given).
        ids: the output to be judged.
        tops: the output's own best alternatives (id, logprob), one list a position, if they are known.
        unclear: positions where the reference is not clear, for seeded sampling; worked out from the margins if None.

    Returns:
        Positions compared: all of them, or those before the first unclear one.

    Raises:
        Mismatch: tokens differ, or the lengths do with no unclear position before the shorter one's end.
    """
    for at, expected in enumerate(reference):
        is_clear = at not in unclear if unclear is not None else expected.top[0][1] - expected.top[1][1] > MARGIN
        if not is_clear:
            if tops is not None and at < len(tops):
                same_logprobs(expected.top, tops[at])
            return at
        if at >= len(ids) or ids[at] != expected.token:
            raise Mismatch(f"position {at}: {list(ids[at : at + 1])}, reference {expected.token}, top {expected.top}")
    if len(ids) != len(reference):
        raise Mismatch(f"{len(ids)} tokens, reference {len(reference)}")
    return len(reference)


def same_logprobs(
    expected: Sequence[tuple[int, float]], found: Sequence[tuple[int, float]], tolerance: float = TOLERANCE
) -> None:
    """The best alternatives agree: by rank, and by token where both lists name it."""
    for (_, a), (_, b) in zip(expected, found, strict=False):
        assert abs(a - b) <= tolerance, f"logprobs {list(found)}, reference {list(expected)}"
    by_token = dict(expected)
    for token, logprob in found:
        assert abs(by_token.get(token, logprob) - logprob) <= tolerance, f"token {token}: {logprob} in {list(expected)}"


@dataclass(slots=True)
class Comparison:
    """Sums compare_greedy over many outputs and holds them to the share that must have been compared."""

    compared: int = 0
    total: int = 0

    def add(
        self,
        reference: Sequence[Logprob],
        ids: Sequence[int],
        tops: Sequence[Sequence[tuple[int, float]]] | None = None,
        *,
        unclear: Collection[int] | None = None,
    ) -> None:
        """See compare_greedy."""
        self.compared += compare_greedy(reference, ids, tops, unclear=unclear)
        self.total += len(reference)

    def check(self, share: float = 0.9) -> None:
        """At least `share` of all positions were compared."""
        assert self.total and self.compared >= share * self.total, f"compared {self.compared} of {self.total} positions"


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    """Greedy to the full length, with the five best of each position."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "logprobs": TOP} | more)


@dataclass(slots=True)
class Reference:
    """REF: one process that does both phases; no prefix cache; freed pages are poisoned."""

    source: ModelSource
    weights: Weights | RowDecoder
    layout: PageLayout | RowLayout
    kv: KvManager
    engine: Engine
    pool: torch.Tensor
    generator: Generator = field(repr=False)
    grammars: Grammars = field(repr=False)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], samples: int = 1
    ) -> list[Generated]:
        """As Generator.generate; one set of parameters may stand for all. Leaves no page behind."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        results = self.generator.generate(prompts, each, samples)
        self.kv.check()
        assert self.kv.counts().used == 0
        return results


def reference(
    model: str | Path | ModelSource,
    *,
    dtype: str = "float32",
    tokens_per_page: int = 16,
    num_pages: int = 256,
    max_num_tokens: int = 512,
    max_batch_size: int = 32,
    quantized: bool = False,
    weights: Any = None,
    block_tokens: int = 64,
) -> Reference:
    """Load a model (or take loaded weights or a family's decoder) and put an engine on a poisoned pool of its own."""
    source = model if isinstance(model, ModelSource) else open_source(str(model))
    torch_dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    if source.family is None:
        loaded: Any = weights or load_weights(source, dtype=torch_dtype, quantized=quantized)
        layout: Any = PageLayout(state_groups(source.config)[0], tokens_per_page, dtype)
        decoder: Any = Decoder(loaded)
    else:
        loaded = decoder = weights or source.family.load(source.tensors, source.config, torch_dtype, tokens_per_page)
        layout = RowLayout(loaded.layout.groups, tokens_per_page, dtype)
    kv = KvManager(layout, num_pages, block_tokens)
    pool = pool_tensor(np.zeros((num_pages, layout.bytes_per_page), np.uint8), layout)
    engine = Engine(decoder, pool)
    engine.poison(range(1, num_pages))
    kv.set_poison(engine.poison)
    grammars = Grammars(lambda: source.tokenizer, source.config.vocab_size, source.eos_ids)
    generator = Generator(
        engine, kv, eos_ids=source.eos_ids, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size,
        grammars=grammars,
    )  # fmt: skip
    return Reference(source, loaded, layout, kv, engine, pool, generator, grammars)


@torch.inference_mode()
def transformers_reference(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[Logprob]:
    """What a transformers model would choose greedily at each position of `output`, given what stands before it.

    One forward over prompt and output without a cache. If output[i] is its choice at every i then, by induction,
    `output` is its greedy generation.
    """
    logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    best = logits.float().log_softmax(-1).topk(TOP)
    return [
        Logprob(int(ids[0]), float(values[0]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
        for values, ids in zip(best.values, best.indices, strict=True)
    ]
