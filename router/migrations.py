"""The queue of migrations: later attempts of requests whose worker died, or gave them back, and their share of a ctx.

They go before new requests, for their clients have waited already; but one worker prefills at most `limit` of them at
once, so that the death of a gen with many streams drowns none, and new requests keep the rest of it. Among themselves:
the lower priority number, then arrival, strictly in order. While the first of them waits for gen pages no new request
is placed, or it would never get them; while it waits for its turn at a ctx, new ones are.

Pure bookkeeping; placing.py asks and decides. If the router dies the ingresses ask again.
"""

from __future__ import annotations

import bisect

from tailrace.router.ledger import Claims
from tailrace.transfer.loop_events import Key


class Migrations:
    """See the module.

    Args:
        limit: that one worker prefills at once.

    Attributes:
        blocked_by: why the first of those that wait was not placed when last tried (placing.Wait); empty if none waits.
        in_flight: one claim for each that is being prefilled, at its worker.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blocked_by = ""
        self.in_flight = Claims("migrations")
        self._order: list[tuple[int, int, Key]] = []
        self._entries: dict[Key, tuple[tuple[int, int, Key], float]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        """Those that wait."""
        return len(self._order)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def add(self, key: Key, priority: int, now: float) -> None:
        """It waits from now on."""
        self._arrivals += 1
        entry = (priority, self._arrivals, key)
        bisect.insort(self._order, entry)
        self._entries[key] = (entry, now)

    def remove(self, key: Key) -> None:
        """It waits no more; nothing happens if it did not."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            del self._order[bisect.bisect_left(self._order, entry[0])]
        if not self._order:
            self.blocked_by = ""

    def head(self) -> Key | None:
        return self._order[0][2] if self._order else None

    def waiting(self) -> list[tuple[Key, float]]:
        """(key, since when) of all that wait, in order."""
        return [(entry[2], self._entries[entry[2]][1]) for entry in self._order]

    def age_s(self, now: float) -> float:
        """Of the one that has waited longest."""
        return max((now - since for _, since in self._entries.values()), default=0.0)

    def may_begin(self, boot: str) -> bool:
        """Whether this worker may prefill one more."""
        return self.in_flight.total(boot) < self.limit
