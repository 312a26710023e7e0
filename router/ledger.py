"""Claims: what the router has promised and not got back. Integers, so that sums return to exactly zero.

A claim is made once for a (request, attempt), may be moved or reduced, and is returned once; returning it again gives
nothing. If the router dies the ledger is rebuilt from the workers' whole sets.
"""

from __future__ import annotations

from collections import Counter

from tailrace.model.errors import LedgerError
from tailrace.transfer.loop_events import Key

POOL = ""
"""Holder of a claim on a pool as a whole, before one worker is chosen."""


class Claims:
    """Claims of one kind (prefill tokens, pages, seats), each with one holder: a worker's boot id, or POOL."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._claims: dict[Key, tuple[str, int]] = {}
        self._totals: Counter[str] = Counter()

    def claim(self, key: Key, holder: str, amount: int) -> None:
        """Raises LedgerError if the key has a claim already, or the amount is negative."""
        if key in self._claims or amount < 0:
            raise LedgerError(f"claim of {amount} {self.kind} for {key}: it holds {self._claims.get(key)}")
        self._claims[key] = (holder, amount)
        self._totals[holder] += amount

    def holder(self, key: Key) -> str | None:
        entry = self._claims.get(key)
        return None if entry is None else entry[0]

    def amount(self, key: Key) -> int:
        entry = self._claims.get(key)
        return 0 if entry is None else entry[1]

    def reduce(self, key: Key, amount: int) -> None:
        """Lower a claim to `amount`; never raises it, and does nothing without one."""
        entry = self._claims.get(key)
        if entry is not None and amount < entry[1]:
            self._put(key, entry[0], max(amount, 0))

    def move(self, key: Key, holder: str, amount: int | None = None) -> None:
        """Give a claim another holder (and amount). Raises LedgerError if there is none."""
        entry = self._claims.get(key)
        if entry is None:
            raise LedgerError(f"no claim of {self.kind} for {key} to move to {holder!r}")
        self._put(key, holder, entry[1] if amount is None else amount)

    def give_back(self, key: Key) -> int:
        """End a claim; returns its amount, 0 if there was none."""
        holder, amount = self._claims.pop(key, (POOL, 0))
        self._subtract(holder, amount)
        return amount

    def total(self, holder: str) -> int:
        return self._totals[holder]

    @property
    def sum(self) -> int:
        return sum(self._totals.values())

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, key: Key) -> bool:
        return key in self._claims

    def check(self) -> None:
        """Raises LedgerError if a holder's total is not the sum of its claims."""
        totals: Counter[str] = Counter()
        for holder, amount in self._claims.values():
            totals[holder] += amount
        if +totals != +self._totals or any(amount < 0 for amount in self._totals.values()):
            raise LedgerError(f"claims of {self.kind}: totals {dict(self._totals)}, entries sum to {dict(totals)}")

    def _put(self, key: Key, holder: str, amount: int) -> None:
        old_holder, old_amount = self._claims[key]
        self._claims[key] = (holder, amount)
        self._subtract(old_holder, old_amount)
        self._totals[holder] += amount

    def _subtract(self, holder: str, amount: int) -> None:
        self._totals[holder] -= amount
        if not self._totals[holder]:
            del self._totals[holder]
