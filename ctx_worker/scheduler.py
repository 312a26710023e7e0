"""Which prompt chunks run in the next pass: shortest remaining first, with ageing and priorities. Pure.

A pass has a budget of tokens. Half of it belongs to the *elder*, the longest waiting of the requests that have aged;
the other half, and what the elder leaves, goes to the most urgent priority, therein to the shortest remaining prompt.
So a short prompt behind a huge one waits a few chunks, and the huge one advances by half a budget a pass under any
stream of short ones. A request ages after `ageing_s`; each step of priority below the most urgent one present takes as
long again. Priority: lower is more urgent.

Prompts share a pass only while that makes it cheaper: where a pass is full, a second prompt would just hold up the
first. How many tokens fill a pass depends on the hardware and is told.

A sequence gets pages for its whole prompt when it is first chosen, or none: what has started can always finish, so
prefills cannot wait for each other. While the elder does not fit, nothing else is started, so it is not overtaken for
ever; a younger one that does not fit is stepped over.

It knows no pages (a callback reserves them) and no clock (the time is an argument). Dies with its loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from tailrace.engine.sequence import Chunk, Sequence

_RATE_WEIGHT = 0.2  # of the newest pass in the smoothed rate
_MAX_REFUSALS = 4  # reservations that may fail in one pass before the rest is left for the next


class PrefillScheduler:
    """The prefills of one worker.

    Args:
        max_num_tokens: token budget of a pass.
        max_rows: sequences in a pass at most.
        ageing_s: waiting time after which a request may be the elder.
        elder_share: part of the budget that the elder gets.
        full_tokens: prompts beside the elder run in one pass only if they have no more tokens than this together; None:
            as many as the budget allows. For a machine where a token costs the same in a larger pass.
        read_ahead: told of a prompt that comes, and of how many of its tokens the next pass may take: later ones wait,
            so what they will look up can be fetched meanwhile.
    """

    def __init__(
        self,
        max_num_tokens: int,
        *,
        max_rows: int = 64,
        ageing_s: float = 1.0,
        elder_share: float = 0.5,
        full_tokens: int | None = None,
        read_ahead: Callable[[Sequence, int], None] | None = None,
    ) -> None:
        self.max_num_tokens = max_num_tokens
        self.tokens_per_s = 0.0
        self._max_rows = max_rows
        self._ageing_s = ageing_s
        self._elder_share = elder_share
        self._full_tokens = math.inf if full_tokens is None else full_tokens
        self._read_ahead = read_ahead
        self._sequences: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(tuple(self._sequences))

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        if self._read_ahead is not None:
            self._read_ahead(sequence, 0 if self._sequences else self.max_num_tokens)
        self._sequences[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Forget it; nothing happens if it is not here."""
        self._sequences.pop(sequence, None)

    @property
    def num_queued_tokens(self) -> int:
        return sum(s.remaining for s in self._sequences)

    def measure(self, num_tokens: int, seconds: float) -> None:
        """A pass computed `num_tokens` prompt positions in `seconds`."""
        if num_tokens and seconds > 0:
            rate = num_tokens / seconds
            self.tokens_per_s += (rate - self.tokens_per_s) * (_RATE_WEIGHT if self.tokens_per_s else 1.0)

    def seconds_left(self, sequence: Sequence) -> float:
        """Predicted seconds until its prefill ends, running ones that go first included; infinite until measured."""
        if not self.tokens_per_s:
            return math.inf
        mine = _urgency(sequence)
        ahead = sum(s.remaining for s in self._sequences if s.pages and _urgency(s) < mine)
        return (sequence.remaining + ahead) / self.tokens_per_s

    def select(self, budget: int, now: float, reserve: Callable[[Sequence], bool]) -> list[Chunk]:
        """The chunks of the next pass, at most `budget` tokens in all.

        Args:
            now: on the clock of Sequence.received.
            reserve: gives a sequence its pages; False if they do not fit now.
        """
        granted: dict[Sequence, int] = {}
        elder = self._elder(now)
        may_start = True
        if elder is not None and budget > 0:
            if elder.pages or reserve(elder):
                share = budget if len(self._sequences) == 1 else math.ceil(budget * self._elder_share)
                granted[elder] = min(share, elder.remaining)
                budget -= granted[elder]
            else:
                may_start = False
        refusals = taken = 0
        for sequence in sorted(self._sequences, key=_urgency):
            if budget <= 0:
                break
            already = granted.get(sequence, 0)
            if taken and taken + sequence.remaining > self._full_tokens:
                continue
            if not already and len(granted) >= self._max_rows:
                continue
            if not sequence.pages:
                if not may_start or refusals >= _MAX_REFUSALS:
                    continue
                if not reserve(sequence):
                    refusals += 1
                    continue
            more = min(sequence.remaining - already, budget)
            if more > 0:
                granted[sequence] = already + more
                budget -= more
                taken += more
        return [Chunk(sequence, num_tokens) for sequence, num_tokens in granted.items()]

    def _elder(self, now: float) -> Sequence | None:
        if not self._sequences:
            return None
        most_urgent = min(s.priority for s in self._sequences)
        aged = (s for s in self._sequences if now - s.received >= self._ageing_s * (1 + s.priority - most_urgent))
        return min(aged, key=lambda s: s.age, default=None)


def _urgency(sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
    return (sequence.priority, sequence.remaining, sequence.age)
