"""Doubles around the two loops: an engine whose tokens depend on what the pages really hold, a node that writes down
what it is told, and a clock that only moves when told.

The fake engine stores token ids where a model would store their state, so a wrong, stale, shared or poisoned page makes
another token, and `expected_tokens` says what an undisturbed run gives.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from tailrace.engine.step import Logprob, RowResult, SamplerState, StepPlan
from tailrace.kv_cache.block_hash import BlockHasher, namespace
from tailrace.kv_cache.layout import SCRATCH_PAGE, PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.loop_events import Key, LoopEvent, LoopStats, PrefillResult, Turn
from tailrace.transfer.messages import Delta, Handoff, Submit, handed_tokens, pack_ids, unpack_ids

EOS = 3
EOS_IDS = frozenset({EOS})
POISON = -7
HASHER = BlockHasher(b"secret", 4)
SPACE = namespace("scope", "float32/exact")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_kv(num_pages: int, *, tokens_per_page: int = 4, window: int | None = None) -> KvManager:
    """A pool with `num_pages` pages beside the scratch page; blocks of 4 tokens."""
    kind = GroupKind.HISTORY if window is None else GroupKind.WINDOW
    group = StateGroup(kind, (0,), (Field("k", 1, 1), Field("v", 1, 1)), window)
    return KvManager(PageLayout(group, tokens_per_page, "float32"), num_pages + 1, 4)


def next_token(seen: Sequence[int], sample: int) -> int:
    """What the fake model says after `seen` tokens; never below 10."""
    return (zlib.crc32(np.array(seen, np.int32).tobytes()) + 7919 * sample) % 9973 + 10


class FakeEngine:
    """Memory [num_pages, tokens_per_page] of token ids. `forced`: absolute position -> token, for every request."""

    def __init__(self, kv: KvManager, clock: Clock | None = None, *, seconds_per_token: float = 0.0) -> None:
        self.kv, self.clock, self.seconds_per_token = kv, clock, seconds_per_token
        self.memory = np.full((kv.counts().total + 1, kv.layout.tokens_per_page), POISON, np.int32)
        self.forced: dict[int, int] = {}
        self.broken: set[Key] = set()
        self.broken_samples: set[tuple[Key, int]] = set()
        self.during_step: Callable[[StepPlan], None] | None = None
        self.steps: list[StepPlan] = []
        self.log: list[tuple] = []

    def step(self, plan: StepPlan) -> list[RowResult]:
        assert plan.rows, "an empty step"
        self.steps.append(plan)
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            self._write(row, written)
        if self.during_step is not None:
            self.during_step(plan)
        if self.clock is not None:
            self.clock.now += self.seconds_per_token * plan.num_tokens
        self.log.append(("returned", [row.key.key for row in plan.rows]))
        return [self._result(row) for row in plan.rows]

    def _write(self, row, written: set[tuple[int, int]]) -> None:
        size = self.kv.layout.tokens_per_page
        for i, token in enumerate(row.ids.tolist()):
            slot = (int(row.pages[(row.start + i) // size]), (row.start + i) % size)
            assert slot[0] != SCRATCH_PAGE and slot not in written, f"two rows write {slot}"
            written.add(slot)
            self.memory[slot] = token

    def _result(self, row) -> RowResult:
        if row.key.key in self.broken or any((row.key.key, s.sample) in self.broken_samples for s in row.samplers):
            return RowResult(row.key, error="this row is broken")
        end = row.start + len(row.ids)
        result = RowResult(row.key)
        for state in row.samplers:
            token = self.forced.get(end) or next_token(self._seen(row, end), state.sample)
            result.tokens.append(token)
            result.logprobs.append(None if state.params.logprobs is None else Logprob(token, -0.5, ()))
        if row.prompt_logprobs is not None:
            result.prompt_logprobs = [Logprob(t, -1.0, ()) for t in row.next_ids.tolist() if t >= 0]
        return result

    def _seen(self, row, end: int) -> list[int]:
        """The last token's view of the pages: everything before `end`, or the window."""
        size = self.kv.layout.tokens_per_page
        first = self.kv.layout.group.first_needed_token(end - 1)
        return [int(self.memory[row.pages[p // size], p % size]) for p in range(first, end)]

    def copy_pages(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.memory[list(dst)] = self.memory[list(src)]

    def compare_rows(self, pages: Sequence[int], others: Sequence[int], span: range) -> tuple[float, float]:
        rows = [self.memory[list(which)].reshape(-1)[span.start : span.stop] for which in (pages, others)]
        largest = float(np.abs(rows[0] - rows[1]).max())
        return largest, largest

    def poison(self, pages: Sequence[int]) -> None:
        self.memory[list(pages)] = POISON


class FakeNode:
    """Implements LoopPort. `pin`: as the real node of a ctx, pin what chunk_done names until `unpin_all`."""

    def __init__(self, kv: KvManager, *, pin: bool = False) -> None:
        self.kv, self.pin = kv, pin
        self.loop_stats = LoopStats()
        self.events: list[LoopEvent] = []
        self.log: list[tuple] = []
        self.turns: list[Turn] = []
        self.launched: list[tuple[Key, bool, float]] = []
        self.done: list[tuple[Key, tuple[int, ...], int, float]] = []
        self.prefilled: dict[Key, PrefillResult] = {}
        self.pages_at_end: dict[Key, tuple[int, ...]] = {}
        self.passes: list[list[Delta]] = []
        self.ends: dict[Key, str] = {}
        self.fails: dict[Key, tuple[str, str, bool]] = {}
        self.pinned: dict[Key, list[int]] = {}
        self.waits: list[float] = []

    def poll_events(self) -> list[LoopEvent]:
        events, self.events = self.events, []
        return events

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        return bool(self.events)

    def chunk_launched(self, key: Key, last: bool, seconds_left: float) -> None:
        self.log.append(("launched", key))
        self.launched.append((key, last, seconds_left))

    def chunk_done(self, key: Key, pages: Sequence[int], tokens_ready: int, seconds_left: float) -> None:
        self.log.append(("done", key))
        assert len(pages) * self.kv.layout.tokens_per_page >= tokens_ready > 0
        self.done.append((key, tuple(pages), tokens_ready, seconds_left))
        if self.pin:
            fresh = [p for p in pages if p not in self.pinned.get(key, ())]
            self.kv.pin(fresh)
            self.pinned.setdefault(key, []).extend(fresh)

    def prefill_done(self, key: Key, result: PrefillResult) -> None:
        assert key not in self.prefilled
        self.prefilled[key] = result
        self.pages_at_end[key] = self.done[-1][1]

    def tokens(self, deltas: Sequence[Delta]) -> None:
        assert deltas
        self.passes.append(list(deltas))

    def turn_ended(self, turn: Turn) -> None:
        self.turns.append(turn)

    def ended(self, key: Key, outcome: str) -> None:
        assert key not in self.ends and key not in self.fails
        self.ends[key] = outcome

    def failed(self, key: Key, code: str, message: str, retryable: bool) -> None:
        assert key not in self.ends and key not in self.fails
        self.fails[key] = (code, message, retryable)

    # -------------------------------------------------------------------------------------------------------- reading

    def unpin_all(self) -> None:
        for pages in self.pinned.values():
            self.kv.unpin(pages)
        self.pinned.clear()

    def deltas(self, key: Key, sample: int = 0) -> list[Delta]:
        return [d for made in self.passes for d in made if (d.request, d.attempt, d.sample) == (*key, sample)]

    def output(self, key: Key, sample: int = 0) -> list[int]:
        """The sample's tokens in order; repeats and gaps are errors."""
        tokens: list[int] = []
        start = None
        for delta in self.deltas(key, sample):
            start = delta.start if start is None else start
            assert delta.start == start + len(tokens), "a token is repeated or missing"
            tokens += unpack_ids(delta.ids)
        return tokens

    def finish(self, key: Key, sample: int = 0) -> str | None:
        reasons = [d.finish for d in self.deltas(key, sample)]
        assert all(r is None for r in reasons[:-1])
        return reasons[-1] if reasons else None


# ------------------------------------------------------------------------------------------------------------ requests


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 9000, length).tolist()


def submit_of(
    name: str,
    prompt: Sequence[int],
    *,
    leg: str = "prefill",
    output: Sequence[int] = (),
    samples: int = 1,
    priority: int = 0,
    no_cache: bool = False,
    attempt: int = 0,
    **params,
) -> Submit:
    made = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    hashes = HASHER.hash_blocks("scope", [*prompt, *output])
    return Submit(
        request=name,
        attempt=attempt,
        leg=leg,
        prompt_ids=pack_ids(list(prompt)),
        output_ids=pack_ids(list(output)),
        params=made,
        samples=samples,
        hashes=hashes,
        namespace=SPACE,
        priority=priority,
        lease_s=5.0,
        timeout_s=None,
        no_cache=no_cache,
    )


def expected_tokens(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    sample: int = 0,
    output: Sequence[int] = (),
    forced=None,
    window=None,
) -> tuple[list[int], str]:
    """Tokens and finish reason of an undisturbed run, after `output`."""
    state = SamplerState(params, sample, len(prompt), EOS_IDS)
    for token in output:
        state.observe(token)
    seen, made = [*prompt, *output], []
    while True:
        end = len(seen)
        first = 0 if window is None else max(0, end - 1 - window + 1)
        token = (forced or {}).get(end) or next_token(seen[first:], sample)
        seen.append(token)
        made.append(token)
        state.observe(token)
        finish = state.finish_reason(token)
        if finish is not None:
            return made, finish


def handoff_of(
    name: str,
    prompt: Sequence[int],
    *,
    samples: int = 1,
    tail: int | None = None,
    output: Sequence[int] = (),
    priority: int = 0,
    finished: Sequence[bool] | None = None,
    forced=None,
    window: int | None = None,
    left_to_gen: int = 0,
    **params,
) -> Handoff:
    """The record ctx makes: first tokens as `expected_tokens` has them, or none if gen is to draw them."""
    made = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params})
    firsts = [
        expected_tokens(prompt, made, sample=s, output=output, forced=forced, window=window)[0][0]
        for s in range(samples)
    ]
    tail_ids = list(prompt) if tail is None else list(prompt)[-tail:]
    return Handoff(
        request=name,
        attempt=0,
        num_prompt_tokens=len(prompt),
        num_tokens=handed_tokens(len(prompt) + len(output), left_to_gen),
        first_tokens=() if left_to_gen else tuple(firsts),
        finished=() if left_to_gen else tuple(finished or (False,) * samples),
        tail_ids=pack_ids(tail_ids),
        counts={},
        output_ids=pack_ids(list(output)),
        hashes=HASHER.hash_blocks("scope", [*prompt, *output]),
        namespace=SPACE,
        params=made,
        samples=samples,
        priority=priority,
        lease_s=5.0,
        left_to_gen=left_to_gen,
    )
