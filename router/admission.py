"""The bounded queue of requests that wait for a place, and the predictions that admission and Retry-After share.

Order: the tenants' turns (tenants.py); inside a tenant the lower priority number, then arrival. Strictly in order: a
request that does not fit now is not overtaken by smaller ones, so it cannot starve. Later attempts have a queue of
their own, which goes first (migrations.py). Knows no workers; if the router dies the ingresses ask again.

Bounded also by tenant: the last part of the queue is kept for tenants that have less than their share of it, so a
flood of one cannot lock out the others.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace.router.tenants import Tenant, Tenants
from tailrace.transfer.loop_events import Key

MIN_RETRY_S = 0.5
MAX_RETRY_S = 120.0
KEPT_FREE = 8  # one in so many places is for tenants below their share


@dataclass(frozen=True, slots=True)
class Needs:
    """What a request takes, or several together.

    Attributes:
        prefill_s: predicted seconds of prefill, at one worker after the other.
        pages: gen pages.
        rows: of gens' batches.
        cost: prompt and expected output tokens, as its tenant is charged.
    """

    prefill_s: float = 0
    pages: float = 0
    rows: float = 0
    cost: float = 0

    def plus(self, other: Needs, part: float = 1.0) -> Needs:
        return Needs(
            self.prefill_s + part * other.prefill_s,
            self.pages + part * other.pages,
            self.rows + part * other.rows,
            self.cost + part * other.cost,
        )


@dataclass(order=True, slots=True)
class Entry:
    rank: tuple[int, int]
    key: Key
    since: float
    needs: Needs


class _Line:
    """Those of one tenant, in order. The sum is recomputed at zero, so that no rounding stays."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.entries: list[Entry] = []
        self.sum = Needs()

    def add(self, entry: Entry) -> None:
        bisect.insort(self.entries, entry)
        self.sum = self.sum.plus(entry.needs)

    def remove(self, rank: tuple[int, int]) -> None:
        entry = self.entries.pop(bisect.bisect_left(self.entries, rank, key=lambda e: e.rank))
        self.sum = self.sum.plus(entry.needs, -1.0) if self.entries else Needs()


class WaitQueue:
    """Requests in the order they will be placed.

    Args:
        limit: entries at most.
        tenants: whose turn it is.
    """

    def __init__(self, limit: int, tenants: Tenants) -> None:
        self.limit, self.tenants = limit, tenants
        self._lines: dict[str, _Line] = {}
        self._where: dict[Key, tuple[_Line, tuple[int, int]]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: Key) -> bool:
        return key in self._where

    @property
    def full(self) -> bool:
        return len(self._where) >= self.limit

    @property
    def needs(self) -> Needs:
        """Of all that wait."""
        total = Needs()
        for line in self._lines.values():
            total = total.plus(line.sum)
        return total

    def add(self, key: Key, tenant: Tenant, priority: int, now: float, needs: Needs) -> None:
        """Also beyond the limit: whether to refuse is the caller's decision."""
        self._arrivals += 1
        self.tenants.wake(tenant)
        tenant.waiting += 1
        line = self._lines.setdefault(tenant.name, _Line(tenant))
        rank = (priority, self._arrivals)
        self._where[key] = (line, rank)
        line.add(Entry(rank, key, now, needs))

    def remove(self, key: Key) -> None:
        line, rank = self._where.pop(key, (None, (0, 0)))
        if line is None:
            return
        line.remove(rank)
        line.tenant.waiting -= 1
        if not line.entries:
            del self._lines[line.tenant.name]

    def head(self) -> Key | None:
        first = min(self._lines.values(), key=_turn, default=None)
        return None if first is None else first.entries[0].key

    def in_order(self) -> Iterator[Entry]:
        """Every entry in the order in which they will be placed, if nobody comes and nobody leaves."""
        turns = [(*_turn(line), 0, name) for name, line in self._lines.items()]
        heapq.heapify(turns)
        while turns:
            time, _, index, name = turns[0]
            line = self._lines[name]
            entry = line.entries[index]
            yield entry
            if index + 1 < len(line.entries):
                after = time + entry.needs.cost / line.tenant.weight
                heapq.heapreplace(turns, (after, line.entries[index + 1].rank[1], index + 1, name))
            else:
                heapq.heappop(turns)

    def waiting(self) -> list[tuple[Key, float]]:
        """(key, since when) of every entry."""
        return [(entry.key, entry.since) for line in self._lines.values() for entry in line.entries]

    def by_tenant(self) -> dict[str, int]:
        """How many of each tenant wait."""
        return {name: len(line.entries) for name, line in self._lines.items()}

    def age_s(self, now: float) -> float:
        """Age of the oldest entry."""
        return max((now - since for _, since in self.waiting()), default=0.0)

    # ------------------------------------------------------------------------------------------------------- predicted

    def ahead_of(self, tenant: Tenant, priority: int) -> Needs:
        """What would be placed before a request of this tenant that comes now: those of its own that are no less
        urgent, and of the others' what their weights give them by then."""
        own = Needs()
        line = self._lines.get(tenant.name)
        if line is not None:
            last = line.entries[-1].rank[0]
            if priority >= last:
                own = line.sum
            else:
                for entry in line.entries[: bisect.bisect(line.entries, (priority, math.inf), key=lambda e: e.rank)]:
                    own = own.plus(entry.needs)
        begins = tenant.time if tenant.waiting else max(tenant.time, self.tenants.time)
        begins += own.cost / tenant.weight
        total = own
        for other in self._lines.values():
            if other is not line and other.sum.cost:
                turns = (begins - other.tenant.time) * other.tenant.weight
                if turns > 0:
                    total = total.plus(other.sum, min(1.0, turns / other.sum.cost))
        return total

    def no_room(self, tenant: Tenant) -> str | None:
        """Why no further request of this tenant may wait: queue_full | fairness; None if it may."""
        over = tenant.waiting >= self._share(tenant)
        if len(self._where) < self.limit - (self.limit // KEPT_FREE if over else 0):
            return None
        return "fairness" if self.over_share(tenant) else "queue_full"

    def over_share(self, tenant: Tenant) -> bool:
        """Others wait too, and it has more of the queue than its weight gives it."""
        length = len(self._where)
        return tenant.waiting < length and tenant.waiting >= length * self._share(tenant) / self.limit

    def _share(self, tenant: Tenant) -> float:
        """Places that its weight gives it beside the tenants that wait; alone, as if one more waited."""
        others = sum(line.tenant.weight for line in self._lines.values() if line.tenant is not tenant)
        return self.limit * tenant.weight / (tenant.weight + (others or 1.0))


def _turn(line: _Line) -> tuple[float, int]:
    return (line.tenant.time, line.entries[0].rank[1])


def next_grant_s(
    *, least_backlog_s: float, max_backlog_s: float, waiting_s: float, missing_pages: float, pages_per_s: float,
    missing_rows: float = 0, rows_per_s: float = 0.0,
) -> float:  # fmt: skip
    """Predicted time until a request that comes now would be placed, over both legs.

    Args:
        least_backlog_s: predicted prefill outstanding on the least loaded worker.
        max_backlog_s: what one worker is given ahead of time.
        waiting_s: predicted prefill of all who wait before it, shared by the workers.
        missing_pages, missing_rows: gen pages, and rows of gens' batches, still to be freed for it and its elders.
        pages_per_s, rows_per_s: rates at which they come back; 0: not known, taken as one second for what is missing.
    """
    prefill_s = max(0.0, least_backlog_s - max_backlog_s + waiting_s)
    return max(prefill_s, _freed_s(missing_pages, pages_per_s), _freed_s(missing_rows, rows_per_s))


def _freed_s(missing: float, per_s: float) -> float:
    return 0.0 if missing <= 0 else missing / per_s if per_s > 0 else 1.0


def retry_after_s(seconds: float) -> float:
    """A Retry-After for the client."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
