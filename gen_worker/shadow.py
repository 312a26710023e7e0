"""The shadow check: for one hand-off in N, gen computes the last full block again and compares with what it received.

    Admitted      offer: is it this one's turn, are the block's ids here, is the state before it here?
    a later pass  due: when the loop has nothing to compute, at the latest after PATIENCE_PASSES passes; never within a
                  pass that decodes, so no token of that pass waits for it, but those of the next one do
    run           one forward of block_tokens tokens, over the received pages before the block, into pages of its own;
                  then every row of the block is compared

It finds what page sums cannot: state that was wrong already when ctx summed it, or that changed after gen had compared
the sums. A difference in any earlier page shows too, if it is large enough to move the block. The bound is absolute for
float32 pages that crossed exactly, else an error relative to each row: a change smaller than that stays unseen.

Tokens may have been sent by the time it has found something, and cannot be taken back. So the loop ends the attempt
with the code `corrupt`: by `transfer_failure_policy` it is computed anew from the prompt and the tokens already sent,
without any cached page, or it fails. The pages are taken out of the prefix index either way, and the rest of a request
that has ended meanwhile is only counted and logged.

While a check waits or runs it holds the pages it reads; it gives way when the loop runs out of pages. Knows no socket
and no peer. Dies with its loop; nothing of it is worth saving.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tailrace.engine.step import Row, RowResult, StepPlan
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.codec_choice import lossy_of
from tailrace.transfer.loop_events import Key, LoopStats
from tailrace.transfer.messages import Handoff, unpack_ids

log = logging.getLogger(__name__)

PATIENCE_PASSES = 4
FLOAT32_BOUND = 1e-4  # of any element
# Of a row of one head, relative to its length: twice to three times the largest seen on SmolLM2 over real text, where
# the block is computed over the received pages. float16 and bfloat16 pages that crossed exactly count as `raw`.
RELATIVE_BOUNDS = {"raw": 0.12, "int8": 0.15, "fp8": 0.3, "int4": 0.8}


def relative_bound(dtype: str, codecs: Seq[str]) -> float | None:
    """The bound for pages of this dtype that any of these codecs may have made; None for FLOAT32_BOUND."""
    lossy = lossy_of(codecs)
    if dtype == "float32" and not lossy:
        return None
    return max(RELATIVE_BOUNDS[codec] for codec in (*lossy, "raw"))


class ShadowEngine(Protocol):
    """What a check needs of engine.Engine."""

    def step(self, plan: StepPlan) -> list[RowResult]: ...

    def copy_pages(self, src: Seq[int], dst: Seq[int]) -> None: ...

    def compare_rows(self, pages: Seq[int], others: Seq[int], span: range) -> tuple[float, float]: ...


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """When to check, and what counts as a difference.

    Attributes:
        every: one hand-off in this many.
        relative: largest error of a row of a head, relative to its length; None: FLOAT32_BOUND on each element.
        retry: whether a request that fails the check may be computed anew (policy `recompute`).
    """

    every: int
    relative: float | None = None
    retry: bool = True


@dataclass(slots=True)
class Check:
    """One that waits. `pages`: of the ordinals up to the block's end, held once more for it."""

    key: Key
    ids: np.ndarray
    start: int
    pages: list[int]
    waited: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class ShadowChecks:
    """The checks of one loop. Every method is called from its thread.

    Args:
        stats: `shadow_equal`, `shadow_different`, `shadow_skipped` and `shadow_seconds` are counted there by the loop.
    """

    def __init__(self, engine: ShadowEngine, kv: KvManager, config: ShadowConfig, stats: LoopStats) -> None:
        self.config = config
        self._engine, self._kv, self._stats = engine, kv, stats
        self._handoffs = 0
        self._waiting: list[Check] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, handoff: Handoff, pages: Seq[int]) -> None:
        """A hand-off has been admitted; the caller holds its pages."""
        self._handoffs += 1
        if self._handoffs % self.config.every:
            return
        block, layout = self._kv.block_tokens, self._kv.layout
        start = handoff.num_tokens // block * block - block
        tail = [*unpack_ids(handoff.tail_ids), *unpack_ids(handoff.output_ids)]
        first_known = handoff.num_tokens - len(tail)
        used = list(pages[: layout.num_pages(start + block)])
        if start < 0 or start < first_known or layout.is_windowed or SCRATCH_PAGE in used:
            self._stats.shadow_skipped += 1
            return
        ids = np.array(tail[start - first_known : start - first_known + block], np.int32)
        self._kv.hold(used)
        self._waiting.append(Check((handoff.request, handoff.attempt), ids, start, used))

    def due(self, busy: bool) -> Check | None:
        """The check to run now, taken out of the queue. `busy`: this pass has computed something."""
        if not self._waiting:
            return None
        check = self._waiting[0]
        check.waited += 1
        return self._waiting.pop(0) if not busy or check.waited >= PATIENCE_PASSES else None

    def run(self, check: Check) -> bool:
        """False if what was received differs from what is computed here. The check's hold is given back."""
        layout = self._kv.layout
        first = check.start // layout.tokens_per_page
        received = check.pages[first:]
        fresh = self._kv.allocate(len(received))
        if fresh is None:
            self._stats.shadow_skipped += 1
            self._kv.release(check.pages)
            return True
        if check.start % layout.tokens_per_page:
            self._engine.copy_pages(received[:1], fresh[:1])
        table = np.array([*check.pages[:first], *fresh], np.int32)
        (result,) = self._engine.step(StepPlan([Row(check, check.ids, check.start, table)]))
        offset = check.start - first * layout.tokens_per_page
        span = range(offset, offset + len(check.ids))
        largest, relative = self._engine.compare_rows(received, fresh, span)
        bound = self.config.relative
        equal = result.error is None and (largest <= FLOAT32_BOUND if bound is None else relative <= bound)
        if equal:
            self._stats.shadow_equal += 1
        else:
            self._stats.shadow_different += 1
            self._kv.retract(check.pages)
            fields = {"request": check.key[0], "attempt": check.key[1], "first_token": check.start}
            fields |= {"tokens": len(check.ids), "largest": largest, "relative": relative, "error": result.error}
            log.error("shadow_check_differs", extra={"fields": fields})
        self._kv.release([*check.pages, *fresh])
        return equal

    def give_way(self) -> bool:
        """The loop needs pages: the youngest waiting check gives its hold back. False if none waits."""
        if not self._waiting:
            return False
        self._stats.shadow_skipped += 1
        self._kv.release(self._waiting.pop().pages)
        return True
