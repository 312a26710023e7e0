"""What the router core is told at construction. Frozen; the composition root fills it from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.model.errors import ConfigError
from tailrace.router.policies import POLICIES
from tailrace.router.tenants import Share


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Limits and choices of one router. Times in seconds.

    Attributes:
        placement: a name of policies.POLICIES.
        local_prefill: `auto`, or `never`: then no gen ever prefills for a ctx.
        local_prefill_max_tokens: prompts up to this length are prefilled by a gen itself; None: by predicted cost.
        pairs_per_worker: peers that one worker is paired with at once.
        max_waiting: requests that wait here for a place, at most.
        max_wait_s: longest wait for the first token beside the prefill itself, predicted or real.
        max_backlog_s: a worker where a request would have to wait longer than this is none to choose.
        tenants: shares by name; others have weight 1 and no rate.
        max_worker_deaths_per_request: a request that saw this many workers die is refused.
        max_binds_per_attempt: gens that may give up reading one attempt.
        max_migrations_in_flight: later attempts that one worker, ctx or gen, prefills at once.
        breaker_faults: faults in a row, or deaths in a row, that open a worker's breaker.
        breaker_probe_s: time until an open one lets a probe through.
        request_lease_s: requests of an ingress that is gone this long are forgotten.
        heartbeat_s: period of the workers' heartbeats; a worker is suspect after three of them in silence.
        dead_after_s: silence after which a worker whose link stands is dead.
        redial_grace_s: a worker whose link dropped is dead unless it dials again within this time.
        stuck_after_s: a running loop whose progress stamp is older takes no new work.
        settle_s: how long a starting router listens before it places anything.
        pair_wait_s: a request for which ctx and gen are there but no pair is usable waits this long.
        bind_timeout_s: a gen that has not answered a bind by then is passed over.
        reunite_s: how long a request whose gen died waits for ctx's word that its pages can still be read; longer than
            the period of the workers' whole sets.
        ctx_replicas, gen_replicas: workers that the operator asked for; 0: unknown.
    """

    placement: str = "least_prefill"
    local_prefill: str = "auto"
    local_prefill_max_tokens: int | None = None
    pairs_per_worker: int = 8
    max_waiting: int = 256
    max_wait_s: float = 20.0
    max_backlog_s: float = 5.0
    max_worker_deaths_per_request: int = 2
    max_binds_per_attempt: int = 3
    max_migrations_in_flight: int = 8
    breaker_faults: int = 5
    breaker_probe_s: float = 2.0
    request_lease_s: float = 10.0
    heartbeat_s: float = 0.5
    dead_after_s: float = 15.0
    redial_grace_s: float = 2.0
    stuck_after_s: float = 5.0
    settle_s: float = 1.0
    pair_wait_s: float = 1.5
    bind_timeout_s: float = 2.0
    reunite_s: float = 2.5
    ctx_replicas: int = 0
    gen_replicas: int = 0
    tenants: Mapping[str, Share] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.placement not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise ConfigError(f"placement: {self.placement!r} is not available; known are {known}")
        if self.local_prefill not in ("auto", "never"):
            raise ConfigError(f"local_prefill: {self.local_prefill!r} is neither 'auto' nor 'never'")

    @property
    def suspect_after_s(self) -> float:
        return 3 * self.heartbeat_s
