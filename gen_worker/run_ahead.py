"""Passes launched before the last one's tokens are known: while the device decodes, the loop does its own work.

A pass can fly if all its rows are single tokens that the device draws by itself; what it draws is fed to the next one
there. While pass n flies, pass n + 1 is laid out as if nobody stopped, and launched; only then are n's tokens fetched.
So a stop or a cancel acts one pass late: the row that was launched too much is computed and forgotten, its token never
sent, hashed or counted. Pages given up meanwhile are held until the passes that may still write them have landed.

    flying      launched passes, oldest first; two for a moment, one between the loop's passes
    landing     the oldest's tokens are fetched; the pages that waited for it are given back

Knows sequences and pages, not requests. It is one loop's, and dies with it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

from tailrace.engine.sequence import Chunk, Sequence
from tailrace.engine.step import RowResult, StepPlan
from tailrace.kv_cache.manager import KvManager
from tailrace.model.sampling_params import SamplingParams


class FlyingEngine(Protocol):
    """What is needed of engine.DeviceEngine beside what the loop needs."""

    def launch(self, plan: StepPlan) -> Any:
        """Launch a step that fits one launch. A row's id UNKNOWN is what the step launched before draws for its key."""
        ...

    def collect(self, launched: Any) -> list[RowResult]:
        """Wait for the end of a launched step; in the order of launches, at most one launch behind."""
        ...


@dataclass(slots=True)
class _Flight:
    chunks: list[Chunk]
    launched: Any
    since: float
    pages: list[int] = field(default_factory=list)  # given up meanwhile


def draws_alone(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether the device draws without the host, whatever the tokens in flight turn out to be."""
    return not (
        params.needs_counts
        or params.logit_bias
        or params.grammar
        or params.logprobs is not None
        or num_output_tokens < params.min_tokens
    )


Landed = Callable[[list[Chunk], list[RowResult], float], None]
"""Takes the tokens of a pass, and the seconds that it took."""


class RunAhead:
    """See the module.

    Args:
        engine: on a device.
        landed: is told of each pass, of those of its sequences that still run.
        clock: monotonic seconds.
    """

    def __init__(self, engine: FlyingEngine, kv: KvManager, landed: Landed, clock: Callable[[], float]) -> None:
        self._engine, self._kv, self._tell, self._clock = engine, kv, landed, clock
        self._flights: deque[_Flight] = deque()
        self._landed_at = 0.0

    @property
    def flying(self) -> int:
        return len(self._flights)

    def goes_on(self, rows: Seq[Sequence], alone: bool) -> bool:
        """Whether a launched pass flies on while the next one, of `rows`, is laid out; one that may not is landed now.
        `alone`: no prompt is to be computed beside them. In the next pass nobody has to give way for a page."""
        if not self._flights:
            return False
        grown = sum(s.num_known > s.room(self._kv.layout) for s in rows)
        if alone and grown <= self._kv.available() and all(_may_fly(s) for s in rows):
            return True
        self.land()
        return False

    def launch(self, chunks: list[Chunk]) -> bool:
        """Launch a pass if it can fly; its sequences are then one token further."""
        if not chunks or not all(chunk.num_rows == 1 and _may_fly(chunk.sequence) for chunk in chunks):
            return False
        launched = self._engine.launch(StepPlan([chunk.row() for chunk in chunks]))
        self._flights.append(_Flight(chunks, launched, self._clock()))
        for chunk in chunks:
            chunk.sequence.num_computed += 1
            chunk.sequence.flying += 1
        return True

    def keep(self, pages: list[int]) -> bool:
        """Take pages that are given up while a pass flies, and give them back when it has landed."""
        if self._flights:
            self._flights[-1].pages += pages
        return bool(self._flights)

    def land(self) -> None:
        """Fetch the oldest pass's tokens and hand them on; what waited for it is given back."""
        flight = self._flights[0]
        results = self._engine.collect(flight.launched)
        now = self._clock()
        seconds, self._landed_at = now - max(flight.since, self._landed_at), now
        self._flights.popleft()
        alive = [(c, r) for c, r in zip(flight.chunks, results, strict=True) if c.sequence.flying]
        self._tell([c for c, _ in alive], [r for _, r in alive], seconds)
        if flight.pages:
            self._kv.release(flight.pages)


def _may_fly(sequence: Sequence) -> bool:
    states = sequence.samplers
    return len(states) == 1 and not sequence.drafts and draws_alone(states[0].params, states[0].num_output_tokens)
