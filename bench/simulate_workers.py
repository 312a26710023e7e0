"""Simulated workers that decode, and the making of a whole cluster.

Gen: one link on which hand-offs follow each other, a batch that steps until it changes. Both: passes of decode rows
and, beside them, chunks of prompts. Either reserves all blocks of prompt and output at once, so nothing is preempted; a
gen's own prefix hits are not counted as saved bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulate_prefill import Ctx, Prefill, Worker
from simulate_trace import BLOCK, Request
from simulate_world import GAP_LIMITS_S, Key, Outcome, Setup, SimWorker, World

from tailrace.transfer.messages import Bind, Bound, Cancel, Held, Holding, NotNow, Register

LUMP_STEPS = 64  # decode steps computed at once while the batch stays as it is


@dataclass(order=True, slots=True)
class _Row:
    """A request that decodes: it ends with the worker's step number `last`."""

    last: int
    number: int
    outcome: Outcome = field(compare=False)
    since: int = field(compare=False)
    slow: tuple[int, ...] = field(compare=False)
    context: int = field(compare=False)
    release: Callable[[], None] = field(compare=False)


class Batch:
    """The decode side of a worker: rows, steps that were made, how many of them were slow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rows: list[_Row] = []
        self.waiting: list[tuple[Outcome, Callable[[], None]]] = []
        self.steps = 0
        self.context = 0
        self._slow = [0] * len(GAP_LIMITS_S)

    def join(self) -> None:
        """Everybody who waits takes part from the next step on."""
        for outcome, release in self.waiting:
            tokens = outcome.request.tokens + 1
            row = _Row(
                self.steps + outcome.request.output - 1, outcome.number, outcome, self.steps, tuple(self._slow), tokens,
                release,
            )  # fmt: skip
            heapq.heappush(self.rows, row)
            self.context += tokens
        self.waiting.clear()

    @property
    def step_s(self) -> float:
        return self.world.setup.times.decode_s(len(self.rows), self.context)

    def until_end(self) -> int:
        """Steps until the first row ends."""
        return self.rows[0].last - self.steps

    def made(self, steps: int, step_s: float) -> None:
        """So many steps of that length are over."""
        count = len(self.rows)
        if not count or not steps:
            return
        for row in self.rows:
            if row.since == self.steps and row.outcome.first_gap < 0:
                row.outcome.first_gap = self.world.now - (steps - 1) * step_s - row.outcome.first_at
        self.steps += steps
        self.context += steps * count
        for i, limit in enumerate(GAP_LIMITS_S):
            if step_s > limit:
                self._slow[i] += steps
        self.world.stepped[round(step_s, 4)] += steps * count
        while self.rows and self.rows[0].last <= self.steps:
            self._end(heapq.heappop(self.rows))

    def _end(self, row: _Row) -> None:
        outcome = row.outcome
        self.context -= row.context + self.steps - row.since
        outcome.gaps = outcome.request.output - 1
        first = [outcome.first_gap > limit for limit in GAP_LIMITS_S]
        inside = [now - then for now, then in zip(self._slow, row.slow, strict=True)]
        # The first gap is the wait for the hand-off and one step; that step itself was counted as a gap too.
        outcome.slow = tuple(min(outcome.gaps, max(n, int(f))) for n, f in zip(inside, first, strict=True))
        row.release()
        self.world.finish(outcome, "finished")


class Gen(Worker):
    """Reads prompts over one link, then decodes them in one batch."""

    duty = "gen"

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.batch = Batch(world)
        self._free = world.setup.gen_blocks
        self._bound: dict[Key, int] = {}
        self._link_free = 0.0
        self._lump = 0  # number of the running lump; another number in its event means that it was cut short
        self._lump_at = self._lump_step = 0.0
        self._lump_steps = 0

    @property
    def all_blocks(self) -> int:
        return self.world.setup.gen_blocks

    @property
    def free_blocks(self) -> int:
        return self._free

    def submit(self, outcome: Outcome) -> None:
        raise RuntimeError("a gen was given a prompt in a world without local prefill")

    def cancel(self, key: Key) -> None:
        self._free += self._bound.pop(key, 0)

    def frame(self, frame: object) -> None:
        if isinstance(frame, Bind):
            self._bind(frame)
        elif isinstance(frame, Cancel):
            pass  # an end that the router hears of as soon as it was bound: it is over here too
        else:
            super().frame(frame)

    def _bind(self, frame: Bind) -> None:
        key = (frame.request, frame.attempt)
        outcome = self.world.outcomes[key]
        needed = -(-(frame.num_tokens + frame.max_new_tokens) // BLOCK)
        if needed > self._free:
            retry_s = self.batch.until_end() * self.batch.step_s if self.batch.rows else 0.05
            self.world.to_router(self.boot, NotNow(*key, "pages", needed, self._free, min(max(retry_s, 0.01), 0.5)))
            return
        if outcome.status:
            return
        self._free -= needed
        self._bound[key] = needed
        self.world.to_router(self.boot, Bound(*key, -(-(frame.num_tokens + 1) // BLOCK)))
        ctx = self.world.workers[frame.ctx.boot]
        assert isinstance(ctx, Ctx)
        prefill = ctx.prefills.get(key)
        if prefill is None:
            return
        prefill.decoder = self
        if not prefill.remaining and prefill.lease is not None:
            self.fetch(prefill)

    def fetch(self, prefill: Prefill) -> None:
        """The prompt is computed. What was ready before has been read beside prefill, as far as the link was free."""
        now, times = self.world.now, self.times
        last = min(prefill.tokens, self.world.setup.budget)
        whole_s, last_s = times.transfer_s(prefill.tokens), times.transfer_s(last)
        self._link_free = max(now + last_s, self._link_free + whole_s)
        self.world.at(self._link_free, self._arrived, prefill)

    def _arrived(self, prefill: Prefill) -> None:
        key = prefill.key
        ctx = self.world.workers[prefill.outcome.worker]
        assert isinstance(ctx, Ctx)
        ctx.read(key)
        self.batch.waiting.append((prefill.outcome, lambda: self._release(key)))
        self.running = len(self.batch.rows) + len(self.batch.waiting)
        if not self.batch.rows:
            self._start()
        elif self._lump_steps > 1:  # the step that runs is the last before it joins
            done = math.ceil((self.world.now - self._lump_at) / self._lump_step)
            steps = min(max(done, 1), self._lump_steps)
            if steps < self._lump_steps:
                self._schedule(self._lump_at, steps, self._lump_step)

    def _release(self, key: Key) -> None:
        self._free += self._bound.pop(key, 0)

    def _start(self) -> None:
        self.batch.join()
        self.running = len(self.batch.rows)
        if self.batch.rows:
            steps = min(self.batch.until_end(), LUMP_STEPS)
            middle = self.batch.context + (steps - 1) / 2 * len(self.batch.rows)
            self._schedule(self.world.now, steps, self.times.decode_s(len(self.batch.rows), middle))

    def _schedule(self, begun: float, steps: int, step_s: float) -> None:
        self._lump += 1
        self._lump_at, self._lump_steps, self._lump_step = begun, steps, step_s
        self.world.at(max(begun + steps * step_s, self.world.now), self._stepped, self._lump)

    def _stepped(self, lump: int) -> None:
        if lump == self._lump:
            self.batch.made(self._lump_steps, self._lump_step)
            self._start()


class Both(Worker):
    """Aggregated serving: each pass decodes every row and computes a chunk of prompt beside them.

    The router learns from whole sets which prompts are computed. The product sends one a second; here one follows each
    prompt at once, for claims that linger for a second would make the router hold back work that there is room for.
    """

    duty = "both"

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        self.batch = Batch(world)
        self._pass_number = 0
        self._at = self._step = 0.0
        self._steps = 0
        self._chunks: list[Any] = []
        self._streams: dict[Key, int] = {}  # blocks of those that decode

    def _tell_whole_set(self) -> None:
        waiting = [Held(*key, 0, 0, "local", None) for key in self.prefills]
        streams = [Held(*key, blocks, 0, "local", 0.0) for key, blocks in self._streams.items()]
        self.world.to_router(self.boot, Holding(self.boot, self.boot, 0, (*waiting, *streams)))

    def submit(self, outcome: Outcome) -> None:
        self.take(outcome)
        if not self._steps:
            self._pass()
        elif self._steps > 1:  # a lump of decode steps is cut at the next boundary
            done = min(max(math.ceil((self.world.now - self._at) / self._step), 1), self._steps)
            if done < self._steps:
                self._schedule(self._at, done, self._step)

    def _pass(self) -> None:
        world = self.world
        self.batch.join()
        more = lambda p: self.reserve(p, p.outcome.request.output)  # noqa: E731
        self._chunks = self.scheduler.select(world.setup.budget, world.now, more) if len(self.scheduler) else []
        self.tell_cache()
        self.running = len(self.batch.rows)
        if self._chunks:
            seconds = self.prefill_s(self._chunks) + max(0.0, self.batch.step_s - self.times.step_s)
            self._schedule(world.now, 1, seconds)
        elif self.batch.rows:
            # A prompt that waits for blocks is looked at again whenever a row ends.
            steps = min(self.batch.until_end(), LUMP_STEPS)
            middle = self.batch.context + (steps - 1) / 2 * len(self.batch.rows)
            self._schedule(world.now, steps, self.times.decode_s(len(self.batch.rows), middle))
        else:
            self._steps = 0

    def _schedule(self, begun: float, steps: int, step_s: float) -> None:
        self._pass_number += 1
        self._at, self._steps, self._step = begun, steps, step_s
        self.world.at(max(begun + steps * step_s, self.world.now), self._passed, self._pass_number)

    def _passed(self, number: int) -> None:
        if number != self._pass_number:
            return
        chunks, self._chunks = self._chunks, []
        self.batch.made(self._steps, self._step)
        ended = self.advance(chunks, self._step) if chunks else []
        for prefill in ended:
            self.prefills.pop(prefill.key)
            self.world.first_token(prefill.outcome)
            release = self._releaser(prefill)
            request = prefill.outcome.request
            self._streams[prefill.key] = -(-(request.tokens + request.output) // BLOCK)
            if prefill.outcome.request.output <= 1:
                release()
            else:
                self.batch.waiting.append((prefill.outcome, release))
        if ended:
            self._tell_whole_set()
        self._pass()

    def _releaser(self, prefill: Prefill) -> Callable[[], None]:
        lease, key = prefill.lease, prefill.key
        assert lease is not None

        def release() -> None:
            self._streams.pop(key, None)
            self.cache.release(lease)

        return release


def make_workers(world: World) -> Iterator[tuple[SimWorker, Register]]:
    """Each worker and its Register."""
    setup = world.setup
    for kind, count in ((Ctx, setup.ctx), (Gen, setup.gen), (Both, setup.both)):
        for number in range(count):
            worker = kind(world, number)
            yield worker, worker.register()


def replay(setup: Setup, requests: Sequence[Request]) -> tuple[World, list[Outcome]]:
    """A world of its own for one trace."""
    world = World(setup)
    return world, world.run(requests, make_workers(world))
