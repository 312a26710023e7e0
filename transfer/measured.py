"""What processes have measured of their work, on their own clocks: parts of Heartbeat and Done. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillSample:
    """One prefill as its worker has measured it, from its first chunk to its first token.

    `uncached`: tokens computed for it; `cached`: found in the prefix index before them; `others`: tokens of other
    requests that were computed meanwhile. `queue_s`: what it waited before.
    """

    uncached: int
    cached: int
    others: int
    seconds: float
    queue_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PairCost:
    """What a gen has measured of hand-offs from one ctx. `bytes_per_s`: page bytes before the codec; `overhead_s`: what
    one takes beside its reads, from both being bound and the prefill's end to valid. 0 until known."""

    boot: str
    bytes_per_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a request's first token: `ttft_s` from Place to the token at its ingress; of it `queue_s` and `prefill_s` on
    the worker's clock."""

    ttft_s: float
    queue_s: float
    prefill_s: float
    cached_tokens: int
