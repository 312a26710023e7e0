"""Who decodes in the next pass, who is admitted, and who gives way. Pure.

Age is everything here: rows go to the oldest first, pages are taken from the youngest, so the oldest request always
progresses and every request becomes the oldest. Priority only orders admission.

It knows no pool (numbers of pages are arguments) and no clock. Dies with its loop.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tailrace.engine.sequence import Chunk, Sequence
from tailrace.gen_worker.request import Request
from tailrace.kv_cache.layout import Layout


class Prefill(Protocol):
    """ctx_worker.scheduler.PrefillScheduler, which the composition root passes in: rooms of one rank do not import
    each other."""

    tokens_per_s: float

    def __iter__(self) -> Iterator[Sequence]: ...

    def __len__(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...

    def add(self, sequence: Sequence) -> None: ...

    def remove(self, sequence: Sequence) -> None: ...

    def measure(self, num_tokens: int, seconds: float) -> None: ...

    def select(self, budget: int, now: float, reserve: Callable[[Sequence], bool]) -> list[Chunk]: ...


def decode_rows(max_batch_size: int, max_num_tokens: int, max_drafts: int = 0) -> int:
    """Decode rows of a pass at most, so that three quarters of it hold all their known tokens."""
    return max(1, min(max_batch_size, max_num_tokens * 3 // 4 // (1 + max_drafts)))


class DecodeScheduler:
    """The batch of one gen worker.

    Args:
        layout: page geometry.
        max_batch_size: decode rows of a pass at most.
        max_num_tokens: tokens of a pass; at least a quarter of them is left to prefill, so decode rows are limited to
            three quarters of it.
        max_drafts: guesses that a row may verify; as many known tokens may stand in its next row.
        max_gen_init_admissions_per_pass: hand-offs that may join the batch in one pass.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        max_gen_init_admissions_per_pass: int,
        max_drafts: int = 0,
    ) -> None:
        self.decode_budget = max_num_tokens * 3 // 4
        self.max_rows = decode_rows(max_batch_size, max_num_tokens, max_drafts)
        self.running: list[Sequence] = []  # oldest first
        self.waiting: list[Request] = []  # hand-offs, in order of admission
        self._layout = layout
        self._max_num_tokens = max_num_tokens
        self._max_admissions = max_gen_init_admissions_per_pass

    def enqueue(self, request: Request) -> None:
        """A hand-off waits for its slot, the most urgent priority first, then the oldest."""
        insort(self.waiting, request, key=lambda r: (r.priority, r.order))

    def start(self, sequence: Sequence) -> None:
        """The sequence has its pages and decodes from the next pass on."""
        insort(self.running, sequence, key=lambda s: s.age)

    def stop(self, sequence: Sequence) -> None:
        """It decodes no more; nothing happens if it did not."""
        if sequence in self.running:
            self.running.remove(sequence)

    def drop(self, request: Request) -> None:
        """Forget a waiting hand-off; nothing happens if it is none."""
        if request in self.waiting:
            self.waiting.remove(request)

    def admissible(self, promised: int = 0) -> list[Request]:
        """Hand-offs that may join now. One with more samples than slots joins an empty batch.

        Args:
            promised: rows that what is being prefilled here will decode with.
        """
        taken = len(self.running) + promised
        chosen: list[Request] = []
        for request in self.waiting[: self._max_admissions]:
            if taken and taken + request.num_rows > self.max_rows:
                break
            chosen.append(request)
            taken += request.num_rows
        return chosen

    def has_slot(self, num_samples: int, promised: int = 0) -> bool:
        """Whether a prefill may start whose samples will decode here. `promised` as above."""
        taken = len(self.running) + promised
        return not taken or taken + num_samples <= self.max_rows

    def rows(self) -> list[Sequence]:
        """Sequences that decode in this pass, oldest first."""
        return self.running[: self.max_rows]

    def prefill_budget(self, num_tokens: int) -> int:
        """Prompt tokens of a pass whose decode rows have so many tokens."""
        return self._max_num_tokens - num_tokens

    def youngest(self, prefilling: Iterable[Sequence]) -> Sequence | None:
        """The youngest sequence that has pages: it gives way when the pool is full."""
        holders = [s for s in prefilling if s.pages]
        holders += [s for request in self.waiting for s in request.sequences if s.pages]
        holders += self.running[-1:]
        return max(holders, key=lambda s: s.age, default=None)

    def growth(self, sequence: Sequence) -> int:
        """Pages that the sequence may still need until max_tokens. Its very last token's state is never computed."""
        state = sequence.samplers[0]
        end = sequence.num_known + max(0, state.params.max_tokens - state.num_output_tokens) - 1
        return max(0, self._layout.num_pages(end) - len(sequence.pages))

    def oldest_growth(self, candidates: Iterable[Request]) -> int:
        """Pages that the oldest request with pages may still need."""
        holders = [r for r in candidates if any(s.pages for s in r.sequences)]
        oldest = min(holders, key=lambda r: r.order, default=None)
        return 0 if oldest is None else sum(self.growth(s) for s in oldest.sequences if s.pages and s.samplers)
