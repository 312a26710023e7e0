"""A gen loop with its surroundings: real page pool, fake engine and node. POISON is on."""

from __future__ import annotations

from collections.abc import Sequence

from loop_fakes import EOS_IDS, Clock, FakeEngine, FakeNode, expected_tokens, handoff_of, make_kv, submit_of

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.gen_worker.shadow import ShadowConfig
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.sampling_params import SamplingParams
from tailrace.transfer.loop_events import Admitted, Arrived, Cancelled, FaultsSet, Key
from tailrace.transfer.messages import Handoff


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
    ) -> None:
        self.clock = Clock()
        self.window = window
        self.kv = make_kv(num_pages, window=window, tokens_per_page=tokens_per_page)
        self.engine = FakeEngine(self.kv, self.clock, seconds_per_token=0.001)
        self.node = FakeNode(self.kv)
        self.prefill = PrefillScheduler(budget) if prefill else None
        self.scheduler = DecodeScheduler(
            self.kv.layout, max_batch_size=batch, max_num_tokens=budget, max_gen_init_admissions_per_pass=admissions
        )
        self.loop = GenLoop(
            self.engine, self.kv, self.node, self.scheduler, self.prefill,
            eos_ids=EOS_IDS, hasher=hasher, shadow=shadow, clock=self.clock,
        )  # fmt: skip
        self.node.events.append(FaultsSet(True))
        self.loop.run_pass()
        self.handoffs: dict[Key, Handoff] = {}
        self.prompts: dict[Key, list[int]] = {}

    def read(self, handoff: Handoff, prompt: Sequence[int], output: Sequence[int] = ()) -> tuple[int, ...] | None:
        """What the node does at bind and read: pages with the prompt's state, held; None if they do not fit."""
        layout = self.kv.layout
        first = layout.first_needed_page(handoff.num_tokens)
        pages = self.kv.allocate(layout.num_pages(handoff.num_tokens) - first)
        if pages is None:
            return None
        table = [SCRATCH_PAGE] * first + pages
        ids = [*prompt, *output]
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
