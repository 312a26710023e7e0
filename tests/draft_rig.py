"""A gen loop on a real engine whose drafts come from a list of what is right, and the same engine without drafts.

rig = DraftRig(make_side(decoder), pattern="partly")
key = rig.ask("a", prompt, greedy(64))
rig.drain()
rig.output(key)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from loop_fakes import FakeNode, submit_of

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.drafts import Ask, Guess
from tailrace.engine.engine import Engine, pool_tensor
from tailrace.engine.offline import Generated, Generator
from tailrace.engine.step import RowResult, StepPlan
from tailrace.gen_worker.drafting import Drafting
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.kv_cache.layout import PageLayout, RowLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.loop_events import Arrived, Key

Pattern = Callable[[random.Random, int], int]
"""(a source of chance, guesses) -> how many of them, from the first on, are right."""

PATTERNS: dict[str, Pattern] = {
    "right": lambda rng, count: count,
    "wrong": lambda rng, count: 0,
    "partly": lambda rng, count: rng.randrange(count + 1),
    "first": lambda rng, count: min(1, count),
}


@dataclass
class Side:
    """A decoder with pages of its own; freed pages are poisoned."""

    kv: KvManager
    engine: Engine
    pool: torch.Tensor
    vocab_size: int
    eos_ids: frozenset[int] = frozenset()

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams, samples: int = 1) -> list[Generated]:
        """Plain decoding."""
        generator = Generator(self.engine, self.kv, eos_ids=self.eos_ids, max_num_tokens=64)
        return generator.generate(prompts, [params] * len(prompts), samples)


def make_side(decoder: Any, tokens_per_page: int, num_pages: int = 128, drafter: Any = None) -> Side:
    if isinstance(decoder, Decoder):
        layout: Any = PageLayout(state_groups(decoder.config)[0], tokens_per_page, "float32")
    else:
        assert decoder.layout.tokens_per_page == tokens_per_page
        layout = RowLayout(decoder.layout.groups, tokens_per_page, "float32")
    kv = KvManager(layout, num_pages, tokens_per_page)
    pool = pool_tensor(np.zeros((num_pages, layout.bytes_per_page), np.uint8), layout)
    engine = Engine(decoder, pool, drafter=drafter)
    engine.poison(range(1, num_pages))
    kv.set_poison(engine.poison)
    return Side(kv, engine, pool, decoder.config.vocab_size)


@dataclass
class KnownAnswers:
    """A drafter that knows what comes: `texts` has every token from position 0 on, by request and sample."""

    vocab_size: int
    pattern: Pattern
    seed: int = 0
    texts: dict[tuple[Key, int], list[int]] = field(default_factory=dict)
    asked: int = 0

    def propose(self, asks: Sequence[Ask]) -> list[Guess]:
        return [self._guess(ask) for ask in asks]

    def _guess(self, ask: Ask) -> Guess:
        sequence: Any = ask.row.key
        text = self.texts[sequence.key, ask.row.samplers[0].sample]
        known = text[ask.start : ask.start + len(ask.ids)]  # what stands behind a sample's end is not in the list
        assert list(ask.ids[: len(known)]) == known, "asked behind tokens that were never drawn"
        assert len(ask.hidden) == len(ask.ids) and ask.count > 0
        self.asked += 1
        rng = random.Random(f"{self.seed}{ask.start}{sequence.key}")
        at = ask.start + len(ask.ids)
        truth = text[at : at + ask.count]
        truth += [rng.randrange(self.vocab_size) for _ in range(ask.count - len(truth))]
        right = self.pattern(rng, ask.count)
        guess = [token if i < right else (token + 1) % self.vocab_size for i, token in enumerate(truth)]
        return Guess(guess, [0.9] * len(guess))


class DraftRig:
    """The loop, and what it says.

    Args:
        side: whose engine gets the drafter.
        pattern: None: the engine's own drafter guesses.
        num_drafts: 0: no drafts.
    """

    def __init__(
        self,
        side: Side,
        pattern: str | Pattern | None = "right",
        *,
        num_drafts: int = 4,
        batch: int = 8,
        budget: int = 64,
        seed: int = 0,
    ) -> None:
        chosen = PATTERNS[pattern] if isinstance(pattern, str) else pattern
        self._is_own = chosen is None
        self.side, self.node = side, FakeNode(side.kv)
        self.drafter = KnownAnswers(side.vocab_size, chosen or PATTERNS["wrong"], seed)
        self.steps: list[StepPlan] = []
        self.results: list[list[RowResult]] = []
        self.scheduler = DecodeScheduler(
            side.kv.layout,
            max_batch_size=batch,
            max_num_tokens=budget,
            max_gen_init_admissions_per_pass=4,
            max_drafts=num_drafts,
        )
        self.loop = GenLoop(
            self,
            side.kv,
            self.node,
            self.scheduler,
            PrefillScheduler(budget),
            eos_ids=side.eos_ids,
            drafting=Drafting(num_drafts) if num_drafts else None,
            clock=lambda: 0.0,
        )
        self.copy_pages, self.compare_rows = side.engine.copy_pages, side.engine.compare_rows
        self.poison = side.engine.poison

    def step(self, plan: StepPlan) -> list[RowResult]:
        """As the engine that the loop sees."""
        self.steps.append(plan)
        before = self.side.engine._drafter
        self.side.engine._drafter = before if self._is_own else self.drafter
        results = self.side.engine.step(plan)
        self.side.engine._drafter = before
        self.results.append(results)
        return results

    def ask(self, name: str, prompt: Sequence[int], params: SamplingParams, expected: Sequence[Sequence[int]]) -> Key:
        """A request whose samples will say `expected` (the drafter is told, nobody else)."""
        submit = replace(submit_of(name, prompt, leg="local", samples=len(expected)), params=params)
        self.node.events.append(Arrived(submit, 0.0))
        for sample, output in enumerate(expected):
            self.drafter.texts[(name, 0), sample] = [*prompt, *output]
        return (name, 0)

    def drain(self, limit: int = 3000) -> None:
        idle = 0
        for _ in range(limit):
            idle = 0 if self.loop.run_pass() or self.node.events else idle + 1
            if idle == 3:
                assert self.side.kv.counts().used == 0
                self.side.kv.check()
                return
        raise AssertionError("the loop does not come to rest")

    def output(self, key: Key, sample: int = 0) -> list[int]:
        assert key not in self.node.fails, self.node.fails
        return self.node.output(key, sample)

    @property
    def decode_steps(self) -> int:
        def decodes(row: Any) -> bool:
            return bool(row.samplers) and row.start >= row.key.num_prompt_tokens

        return sum(any(map(decodes, plan.rows)) for plan in self.steps)
