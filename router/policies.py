"""Which worker: pure functions over a snapshot. They know no liveness, no excluded worker and no limit: whoever builds
the snapshot leaves those out. Used by the router core and, with the same objects, by a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCandidate:
    """A worker that could prefill.

    Attributes:
        boot: its boot id.
        tokens_left: prompt tokens claimed on it and not computed yet.
        tokens_per_s: predicted prefill rate, above 0.
        last_chosen: number of the choice that last fell on it; 0: never.
    """

    boot: str
    tokens_left: int
    tokens_per_s: float
    last_chosen: int

    @property
    def seconds_left(self) -> float:
        """Predicted seconds of prefill outstanding."""
        return self.tokens_left / self.tokens_per_s


@dataclass(frozen=True, slots=True)
class GenCandidate:
    """A worker that could decode. `free_pages`: after all that is promised; `needed`: pages of the request there."""

    boot: str
    free_pages: int
    needed: int
    active: int
    last_chosen: int


Policy = Callable[[Sequence[PrefillCandidate], int], str]
"""(candidates, at least one; uncached tokens of the request) -> boot id of the chosen one."""


def round_robin(candidates: Sequence[PrefillCandidate], num_tokens: int) -> str:
    """The one whose last turn is longest ago."""
    return min(candidates, key=lambda c: (c.last_chosen, c.boot)).boot


def least_tokens(candidates: Sequence[PrefillCandidate], num_tokens: int) -> str:
    """The one with the fewest outstanding prompt tokens, whatever its speed."""
    return min(candidates, key=lambda c: (c.tokens_left, c.last_chosen, c.boot)).boot


def least_prefill(candidates: Sequence[PrefillCandidate], num_tokens: int) -> str:
    """The one that would have this prompt ready first."""

    def ready_s(candidate: PrefillCandidate) -> float:
        return (candidate.tokens_left + num_tokens) / candidate.tokens_per_s

    return min(candidates, key=lambda c: (ready_s(c), c.last_chosen, c.boot)).boot


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_tokens": least_tokens,
    "least_prefill": least_prefill,
}


def choose_gen(candidates: Sequence[GenCandidate]) -> str | None:
    """The gen with the fewest requests among those with room, then with the most room; None if none has room."""
    fitting = [c for c in candidates if c.free_pages >= c.needed]
    if not fitting:
        return None
    return min(fitting, key=lambda c: (c.active, c.needed - c.free_pages, c.last_chosen, c.boot)).boot


def auto_local_tokens(
    prefill_tokens_per_s: float, transfer_bytes_per_s: float, bytes_per_token: float, overhead_s: float, most: int
) -> int:
    """Longest prompt that a gen computes itself sooner than its hand-off would take.

    A hand-off costs `overhead_s` and its bytes over the wire; a local prefill costs tokens over the rate. 0 while
    either rate is unknown (0); `most` bounds it where the wire is slower than the arithmetic.
    """
    if prefill_tokens_per_s <= 0 or transfer_bytes_per_s <= 0:
        return 0
    per_token_s = 1 / prefill_tokens_per_s - bytes_per_token / transfer_bytes_per_s
    return most if per_token_s <= 0 else min(most, int(overhead_s / per_token_s))
