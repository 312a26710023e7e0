"""Durations that end waiting, and a bounded memory of what has ended. No clock of its own, no I/O.

A lease is granted and renewed as a duration on its holder's monotonic clock. Its end cancels work or frees pages that
only their owner writes; it is never evidence about a buffer that another process may write.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Leases(Generic[K]):
    """Deadlines by key. Nothing happens by itself: the owner asks `expired` on its own tick."""

    def __init__(self) -> None:
        self._until: dict[K, float] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._until

    def __len__(self) -> int:
        return len(self._until)

    def grant(self, key: K, now: float, lease_s: float) -> None:
        """Start or restart a lease; it may also become shorter."""
        self._until[key] = now + lease_s

    def renew(self, key: K, now: float, lease_s: float) -> bool:
        """Extend a lease that exists; False if there is none."""
        if key not in self._until:
            return False
        self._until[key] = max(self._until[key], now + lease_s)
        return True

    def drop(self, key: K) -> None:
        self._until.pop(key, None)

    def left_s(self, key: K, now: float) -> float:
        """Seconds left, negative once it has ended; raises KeyError if there is no such lease."""
        return self._until[key] - now

    def expired(self, now: float) -> list[K]:
        """Keys whose lease has ended, oldest grant first; they stay until dropped or renewed."""
        return [key for key, until in self._until.items() if until <= now]


class Recent(Generic[K, V]):
    """The last `capacity` keys that ended and how, so that late frames are recognized. Forgets the oldest first."""

    def __init__(self, capacity: int, on_forget: Callable[[K, V], None] | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"a memory of {capacity} keys remembers nothing")
        self._capacity = capacity
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._on_forget = on_forget

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        return self._kept.get(key)

    def put(self, key: K, value: V) -> None:
        self._kept[key] = value
        self._kept.move_to_end(key)
        while len(self._kept) > self._capacity:
            old = self._kept.popitem(last=False)
            if self._on_forget is not None:
                self._on_forget(*old)

    def pop(self, key: K) -> V | None:
        return self._kept.pop(key, None)
