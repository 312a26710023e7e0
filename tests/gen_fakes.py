"""A gen loop with its surroundings: real page pool, fake engine and node. POISON is on."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from loop_fakes import EOS_IDS, Clock, FakeEngine, FakeNode, expected_tokens, handoff_of, make_kv, submit_of

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.step import UNKNOWN, Row, RowResult, StepPlan
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.gen_worker.shadow import ShadowConfig
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, FaultsSet, Key
from tailrace.transfer.messages import Handoff


class LateEngine:
    """A fake engine whose launched steps run when they are collected, as late as a device may run them. A page that
    such a step will write must not be given up before that: poison, which comes with it, would find it."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.flights: deque[StepPlan] = deque()
        self.tokens: dict[object, int] = {}
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self, plan: StepPlan) -> list[RowResult]:
        assert not self.flights, "a step that does not wait for the one that flies"
        return self.engine.step(plan)

    def launch(self, plan: StepPlan) -> StepPlan:
        assert len(self.flights) < 2, "three steps at once"
        assert all(len(row.ids) == 1 and len(row.samplers) == 1 for row in plan.rows)
        self.launches += 1
        self.flights.append(plan)
        return plan

    def collect(self, plan: StepPlan) -> list[RowResult]:
        assert self.flights[0] is plan, "out of order"
        results = self.engine.step(StepPlan([self._fed(row) for row in plan.rows]))
        self.tokens = {r.key: r.tokens[0] for r in results if r.tokens}
        self.flights.popleft()
        return results

    def _fed(self, row: Row) -> Row:
        if row.ids[0] != UNKNOWN:
            return row
        return replace(row, ids=np.array([self.tokens.get(row.key, 0)], np.int32))

    def written(self) -> set[int]:
        """Pages that launched steps will write."""
        size = self.engine.kv.layout.tokens_per_page
        return {int(row.pages[row.start // size]) for plan in self.flights for row in plan.rows}

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        assert not self.written() & {*src, *dst}
        self.engine.copy_pages(src, dst)

    def poison(self, pages: Sequence[int]) -> None:
        assert not self.written() & set(pages), "a page is given up that a launched step will write"
        self.engine.poison(pages)


class Gen:
    def __init__(
        self,
        num_pages: int = 64,
        *,
        batch: int = 8,
        budget: int = 32,
        admissions: int = 4,
        prefill: bool = True,
        window: int | None = None,
        tokens_per_page: int = 4,
        shadow: ShadowConfig | None = None,
        hasher: BlockHasher | None = None,
        ahead: bool = False,
        replay: int = 0,
    ) -> None:
        self.clock = Clock()
        self.window = window
        self.kv = make_kv(num_pages, window=window, tokens_per_page=tokens_per_page)
        self.engine: Any = FakeEngine(self.kv, self.clock, seconds_per_token=0.001)
        if ahead:
            self.engine = LateEngine(self.engine)
        self.node = FakeNode(self.kv)
        self.prefill = PrefillScheduler(budget) if prefill else None
        self.scheduler = DecodeScheduler(
            self.kv.layout, max_batch_size=batch, max_num_tokens=budget, max_gen_init_admissions_per_pass=admissions
        )
        self.loop = GenLoop(
            self.engine, self.kv, self.node, self.scheduler, self.prefill,
            eos_ids=EOS_IDS, hasher=hasher, shadow=shadow, run_ahead=self.engine if ahead else None,
            replay_tokens=replay, clock=self.clock,
        )  # fmt: skip
        self.node.events.append(FaultsSet(True))
        self.loop.run_pass()
        self.handoffs: dict[Key, Handoff] = {}
        self.prompts: dict[Key, list[int]] = {}

    def read(self, handoff: Handoff, prompt: Sequence[int], output: Sequence[int] = ()) -> tuple[int, ...] | None:
        """What the node does at bind and read: pages with the prompt's state, held; None if they do not fit."""
        layout = self.kv.layout
        first = layout.first_needed_page(handoff.num_tokens)
        pages = self.kv.allocate(layout.num_pages(len(prompt) + len(output)) - first)
        if pages is None:
            return None
        table = [SCRATCH_PAGE] * first + pages
        ids = [*prompt, *output][: handoff.num_tokens]
        for position in range(first * layout.tokens_per_page, len(ids)):
            page, offset = divmod(position, layout.tokens_per_page)
            self.engine.memory[table[page], offset] = ids[position]
        return tuple(table)

    def admit(self, name: str, prompt: list[int], *, output: Sequence[int] = (), **options) -> Key:
        """Hand a request over now; it must fit."""
        forced = self.engine.forced
        handoff = handoff_of(name, prompt, output=output, forced=forced, window=self.window, **options)
        pages = self.read(handoff, prompt, output)
        assert pages is not None, "the test gave the pool too few pages"
        self.node.events.append(Admitted(handoff, pages, 0, 0.0))
        key = (name, 0)
        self.handoffs[key], self.prompts[key] = handoff, prompt
        return key

    def local(self, name: str, prompt: list[int], **options) -> Key:
        submit = submit_of(name, prompt, leg="local", **options)
        self.node.events.append(Arrived(submit, self.clock.now))
        return (submit.request, submit.attempt)

    def given_up(self) -> set[int]:
        """Pages that wait for a launched pass to land."""
        flights = () if self.loop._ahead is None else self.loop._ahead._flights
        return {page for flight in flights for page in flight.pages}

    def cancel(self, key: Key) -> None:
        self.node.events.append(Cancelled(key, "client"))

    def drain(self, limit: int = 2000) -> None:
        idle = 0
        for _ in range(limit):
            idle = 0 if self.loop.run_pass() or self.node.events else idle + 1
            if idle == 3:  # a pass that only frees pages computes nothing
                return
        raise AssertionError("the loop does not come to rest")

    def assert_equals_undisturbed(self, key: Key, sample: int = 0) -> None:
        """Everything after the handed first token is what an undisturbed run gives, and it is finished."""
        handoff = self.handoffs[key]
        tokens, finish = expected_tokens(
            self.prompts[key],
            handoff.params,
            sample=sample,
            forced=self.engine.forced,
            window=self.window,
        )
        assert self.node.output(key, sample) == tokens[1:]
        assert self.node.finish(key, sample) == finish
        assert self.node.ends[key] == "finished"

    def assert_local_equals_undisturbed(self, key: Key, prompt: list[int], sample: int = 0, **params) -> None:
        made = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
        tokens, finish = expected_tokens(prompt, made, sample=sample, forced=self.engine.forced, window=self.window)
        assert self.node.output(key, sample) == tokens
        assert self.node.finish(key, sample) == finish
        assert self.node.ends[key] == "finished"

    def assert_quiet(self) -> None:
        assert self.kv.counts().used == 0
        self.kv.check()
        assert not self.scheduler.running and not self.scheduler.waiting
        assert self.prefill is None or not len(self.prefill)
