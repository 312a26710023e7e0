"""Which worker: pure functions over a snapshot. They know no liveness, no excluded worker and no limit: whoever builds
the snapshot leaves those out. Used by the router core and, with the same objects, by a simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Found by replaying a conversation trace at 0.7 of the workers' rate: flat between 30 and 300, and 30 and 50.
WORTH, MOST_WORTH = 100.0, 50.0
KEEP_S = 0.05  # of a conversation: predictions are no better, and its next turn would pay for the move as well


class PrefillCandidate(NamedTuple):
    """A worker that could prefill one request. A tuple, for one is made for every worker that a choice looks at.

    Attributes:
        boot: its boot id.
        tokens_left: prompt tokens claimed on it and not computed yet.
        wait_s: predicted seconds of prefill outstanding on it.
        prefill_s: predicted seconds of this request's own prefill there, less what is cached.
        last_chosen: number of the choice that last fell on it; 0: never.
        cached_tokens: of this request that it holds, or will hold by the time that it comes to it.
    """

    boot: str
    tokens_left: int
    wait_s: float
    prefill_s: float
    last_chosen: int
    cached_tokens: int = 0

    @property
    def ready_s(self) -> float:
        """Predicted seconds until the request's prefill would be over there."""
        return self.wait_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class PlaceView:
    """What a policy may know of a request.

    Attributes:
        num_tokens: to be prefilled, were nothing cached.
        bound: boot id of the worker that had the last turn of its conversation; empty: none is known.
        crowd_wait_s: mean wait over all workers that could be chosen but the busiest; None: the candidates are all.
    """

    num_tokens: int
    bound: str = ""
    crowd_wait_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenCandidate:
    """A worker that could decode. `free_pages`: after all that is promised; `needed`: pages of the request there;
    `cached_share`: of the prompt, that need not be transferred."""

    boot: str
    free_pages: int
    needed: int
    active: int
    last_chosen: int
    cached_share: float = 0.0


Policy = Callable[[Sequence[PrefillCandidate], PlaceView], str]
"""(candidates, at least one; the request) -> boot id of the chosen one."""


def round_robin(candidates: Sequence[PrefillCandidate], request: PlaceView) -> str:
    """The one whose last turn is longest ago."""
    return min(candidates, key=lambda c: (c.last_chosen, c.boot)).boot


def least_tokens(candidates: Sequence[PrefillCandidate], request: PlaceView) -> str:
    """The one with the fewest outstanding prompt tokens, whatever its speed and whatever it has cached."""
    return min(candidates, key=lambda c: (c.tokens_left, c.last_chosen, c.boot)).boot


def least_prefill(candidates: Sequence[PrefillCandidate], request: PlaceView) -> str:
    """The one that would have this prompt ready first: what it has cached of it need not be computed."""
    return min(candidates, key=_soonest).boot


def prefix(candidates: Sequence[PrefillCandidate], request: PlaceView) -> str:
    """The one that would have the prompt ready first, where what must be computed counts more the more all are waiting.

    While others are idle a holder of the prefix is left as soon as its wait exceeds another's by more than the prefix
    would cost to compute again. The longer all wait, the more others are delayed by what is computed twice, and evicted
    by what is stored twice: then the request itself waits longer, so that they need not. Its extra wait is never more
    than MOST_WORTH times what it spares.
    """
    waits = [c.wait_s for c in candidates]
    crowd_s = request.crowd_wait_s
    if crowd_s is None:
        crowd_s = (sum(waits) - max(waits)) / max(1, len(waits) - 1)
    fresh = min(candidates, key=lambda c: c.cached_tokens)
    whole_s = fresh.prefill_s * request.num_tokens / max(1, request.num_tokens - fresh.cached_tokens)
    worth = min(MOST_WORTH, 1.0 + WORTH * crowd_s / whole_s) if whole_s > 0 else 1.0
    return min(candidates, key=lambda c: (c.wait_s + worth * c.prefill_s, c.last_chosen, c.boot)).boot


def _soonest(candidate: PrefillCandidate) -> tuple[float, int, str]:
    return (candidate.ready_s, candidate.last_chosen, candidate.boot)


POLICIES: dict[str, Policy] = {
    "round_robin": round_robin,
    "least_tokens": least_tokens,
    "least_prefill": least_prefill,
    "prefix": prefix,
}


def choose(policy: Policy, candidates: Sequence[PrefillCandidate], request: PlaceView) -> str:
    """A conversation stays at its worker until another would have its turn ready sooner, by more than KEEP_S, though it
    must compute the conversation again; else the policy decides."""
    bound = next((c for c in candidates if c.boot == request.bound), None) if request.bound else None
    if bound is not None and bound.ready_s <= min(c.ready_s for c in candidates) + KEEP_S:
        return bound.boot
    return policy(candidates, request)


def choose_gen(candidates: Sequence[GenCandidate]) -> str | None:
    """The gen with the fewest requests among those with room, then with the longest prefix, then with the most room;
    None if none has room. What holds most of the prompt may have one request more: it spares the transfer."""
    fitting = [c for c in candidates if c.free_pages >= c.needed]
    if not fitting:
        return None

    def order(gen: GenCandidate) -> tuple[float, float, int, int, str]:
        held = gen.cached_share > 0.5
        return (gen.active - held, -gen.cached_share, gen.needed - gen.free_pages, gen.last_chosen, gen.boot)

    return min(fitting, key=order).boot
