"""The bounded queue of requests that wait for a place, and the predictions that admission and Retry-After share.

Order: later attempts (their clients have waited already) before first ones, then the lower priority number, then
arrival. Strictly in order: a request that does not fit now is not overtaken by smaller ones, so it cannot starve.
Knows no workers; if the router dies the ingresses ask again.
"""

from __future__ import annotations

import bisect
from collections import deque
from dataclasses import dataclass

from tailrace.transfer.loop_events import Key

RATE_WINDOW_S = 10.0
MIN_RETRY_S = 0.5
MAX_RETRY_S = 120.0


@dataclass(order=True, slots=True)
class _Entry:
    rank: tuple[bool, int, int]
    key: Key
    since: float
    num_tokens: int
    needed_pages: int


class WaitQueue:
    """Requests in the order they will be placed. `limit`: entries at most."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._entries: list[_Entry] = []
        self._ranks: dict[Key, tuple[bool, int, int]] = {}
        self._arrivals = 0
        self.num_tokens = 0
        self.needed_pages = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._ranks

    @property
    def full(self) -> bool:
        return len(self._entries) >= self.limit

    def add(self, key: Key, priority: int, now: float, num_tokens: int, needed_pages: int) -> None:
        """Also beyond the limit: whether to refuse is the caller's decision."""
        self._arrivals += 1
        rank = (key[1] == 0, priority, self._arrivals)
        self._ranks[key] = rank
        bisect.insort(self._entries, _Entry(rank, key, now, num_tokens, needed_pages))
        self.num_tokens += num_tokens
        self.needed_pages += needed_pages

    def remove(self, key: Key) -> None:
        rank = self._ranks.pop(key, None)
        if rank is None:
            return
        at = bisect.bisect_left(self._entries, rank, key=lambda entry: entry.rank)
        entry = self._entries.pop(at)
        self.num_tokens -= entry.num_tokens
        self.needed_pages -= entry.needed_pages

    def head(self) -> Key | None:
        return self._entries[0].key if self._entries else None

    def waiting(self) -> list[tuple[Key, float]]:
        """(key, since when) of every entry, in order."""
        return [(entry.key, entry.since) for entry in self._entries]

    def age_s(self, now: float) -> float:
        """Age of the oldest entry."""
        return max((now - entry.since for entry in self._entries), default=0.0)


class Meter:
    """A rate over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._started: float | None = None

    def add(self, amount: int, now: float) -> None:
        if self._started is None:
            self._started = now
        self._counts.append((now, amount))
        self._sum += amount
        self._drop(now)

    def per_s(self, now: float) -> float:
        """0 while nothing was counted."""
        self._drop(now)
        if self._started is None or not self._sum:
            return 0.0
        return self._sum / max(1.0, min(RATE_WINDOW_S, now - self._started))

    def _drop(self, now: float) -> None:
        while self._counts and self._counts[0][0] < now - RATE_WINDOW_S:
            self._sum -= self._counts.popleft()[1]


def next_grant_s(
    *, least_backlog_s: float, max_backlog_s: float, waiting_s: float, missing_pages: int, pages_per_s: float
) -> float:
    """Predicted time until a request that comes now would be placed, over both legs.

    Args:
        least_backlog_s: predicted prefill outstanding on the least loaded worker.
        max_backlog_s: what one worker is given ahead of time.
        waiting_s: predicted prefill of all who wait before it, shared by the workers.
        missing_pages: gen pages still to be freed for it and for those before it.
        pages_per_s: rate at which gen pages come back; 0: not known, taken as one second for what is missing.
    """
    prefill_s = max(0.0, least_backlog_s - max_backlog_s + waiting_s)
    pages_s = 0.0 if missing_pages <= 0 else missing_pages / pages_per_s if pages_per_s > 0 else 1.0
    return max(prefill_s, pages_s)


def retry_after_s(seconds: float) -> float:
    """A Retry-After for the client."""
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
