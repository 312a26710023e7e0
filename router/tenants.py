"""Tenants: whose turn it is, and who has used up its rate. Start-time fair queueing over prompt + output tokens.

Each tenant has a virtual time: tokens served over its weight. Among tenants that wait, the one with the least goes
next, so over any busy while they are served in the ratio of their weights, whatever the sizes of their requests. A
request is charged what it is expected to cost when it is placed, and the difference to what it did cost at its end. A
tenant that comes back from idling starts at the virtual time of those being served: it has saved up nothing, and is
owed nothing.

A rate is a bucket of tokens that refills at so many a second. Who finds it empty is refused; a request may overdraw
it, for its output is not known before, and what is overdrawn is waited for.

Knows no queue and no worker. Not shared between routers: in a new router all begin equal, with full buckets. Names
that the configuration lacks have weight 1 and no rate; of idle ones only the last KEPT_IDLE are remembered.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

KEPT_IDLE = 1024
BURST_S = 10.0  # a bucket holds what its rate brings in this time
GUESSED_OUTPUT = 128  # output tokens of a request, until one has ended
_REMEMBERED = 32  # requests that a mean looks back on, about


@dataclass(frozen=True, slots=True)
class Share:
    """What the operator gives a tenant. `rate`: prompt + output tokens a second at most; None: no limit."""

    weight: float = 1.0
    rate: float | None = None


class Mean:
    """A mean that follows the last values: of the first few exactly, then exponentially. None until there is one."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(self._count + 1, _REMEMBERED)
        self.value = value if self.value is None else self.value + (value - self.value) / self._count


class Tenant:
    """One tenant's account.

    Attributes:
        time: its virtual time, tokens over weight.
        running: requests placed and not ended.
        waiting: requests in the queue; kept by the queue.
        served: prompt and output tokens of ended requests.
    """

    def __init__(self, name: str, share: Share, time: float) -> None:
        self.name, self.weight, self.rate = name, share.weight, share.rate
        self.time = time
        self.running = self.waiting = self.served = 0
        self.output = Mean()
        self._level = self.burst
        self._filled_at = -math.inf

    @property
    def burst(self) -> float:
        return math.inf if self.rate is None else self.rate * BURST_S

    @property
    def idle(self) -> bool:
        return not (self.running or self.waiting)

    def wait_s(self, now: float) -> float:
        """Time until its bucket allows another request; 0: now."""
        if self.rate is None:
            return 0.0
        if now > self._filled_at:
            self._level = min(self.burst, self._level + self.rate * (now - self._filled_at))
            self._filled_at = now
        return 0.0 if self._level > 0 else (1.0 - self._level) / self.rate

    def draw(self, tokens: float) -> None:
        """Take tokens out of the bucket, or put them back (below 0)."""
        self._level = min(self.burst, self._level - tokens)


class Tenants:
    """All accounts.

    Args:
        shares: the configured tenants by name.
        kept: idle tenants beside those that are remembered.
    """

    def __init__(self, shares: Mapping[str, Share], kept: int = KEPT_IDLE) -> None:
        self._shares, self._kept = dict(shares), kept
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._output = Mean()
        self.time = 0.0  # the start of what was placed last

    def __len__(self) -> int:
        return len(self._tenants)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._tenants.values())

    def of(self, name: str) -> Tenant:
        """The tenant of that name, made if it is new."""
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = Tenant(name, self._shares.get(name, Share()), self.time)
            self._drop_idle()
        else:
            self._tenants.move_to_end(name)
        return tenant

    def expected(self, tenant: Tenant, prompt: int, max_new: int, samples: int) -> int:
        """Tokens that a request will likely cost: outputs are guessed from those that this tenant had last."""
        output = tenant.output.value
        if output is None:
            output = GUESSED_OUTPUT if self._output.value is None else self._output.value
        return prompt + samples * min(max_new, math.ceil(output))

    def wake(self, tenant: Tenant) -> None:
        """It has something to be placed again."""
        if not tenant.waiting:
            tenant.time = max(tenant.time, self.time)

    def begin(self, tenant: Tenant, cost: int, *, in_turn: bool = True) -> None:
        """A request of it was placed, after `wake`; out of turn if it is a later attempt."""
        tenant.running += 1
        if in_turn:
            self.time = max(self.time, tenant.time)
        tenant.time += cost / tenant.weight

    def end(self, tenant: Tenant, cost: int, served: int) -> None:
        """A request that was placed at `cost` is over and has `served` tokens behind it."""
        tenant.running -= 1
        tenant.served += served
        tenant.time += (served - cost) / tenant.weight
        tenant.draw(served - cost)

    def learn(self, tenant: Tenant, output: int, samples: int) -> None:
        """A request ended well, with so much output."""
        tenant.output.add(output / samples)
        self._output.add(output / samples)

    def _drop_idle(self) -> None:
        """Forget the idle ones that were here longest ago, but none that the configuration names."""
        surplus = len(self._tenants) - self._kept - len(self._shares)
        if surplus <= 0:
            return
        idle = [t.name for t in self._tenants.values() if t.idle and t.name not in self._shares]
        for name in idle[: min(surplus, len(idle) - 1)]:  # the newest has only just come
            del self._tenants[name]
