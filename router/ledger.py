"""Claims: what the router has promised and not got back. Integers, so that sums return to exactly zero.

A claim is made once for a (request, attempt), may be moved or reduced, and is returned once; returning it again gives
nothing. If the router dies the ledger is rebuilt from the workers' whole sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tailrace.model.errors import LedgerError
from tailrace.transfer.loop_events import Key

POOL = ""
"""Holder of a claim on a pool as a whole, before one worker is chosen."""


class Claims:
    """Claims of one kind (prefill tokens, pages, seats), each with one holder: a worker's boot id, or POOL."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._claims: dict[Key, tuple[str, int]] = {}
        self._keys: dict[str, dict[Key, None]] = {}
        self._totals: Counter[str] = Counter()
        self.on_total: Callable[[str, int], None] | None = None  # told by how much a holder's total has changed

    def claim(self, key: Key, holder: str, amount: int) -> None:
        """Raises LedgerError if the key has a claim already, or the amount is negative."""
        if key in self._claims or amount < 0:
            raise LedgerError(f"claim of {amount} {self.kind} for {key}: it holds {self._claims.get(key)}")
        self._claims[key] = (holder, amount)
        self._keys.setdefault(holder, {})[key] = None
        self._add(holder, amount)

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
        if key not in self._claims:
            return 0
        holder, amount = self._claims.pop(key)
        self._forget_key(holder, key)
        self._subtract(holder, amount)
        return amount

    def total(self, holder: str) -> int:
        return self._totals.get(holder, 0)

    def amounts(self, holder: str) -> list[int]:
        """What each of its claims is."""
        return [self._claims[key][1] for key in self._keys.get(holder, ())]

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
        holders = {key: holder for holder, keys in self._keys.items() for key in keys}
        wrong = holders != {key: holder for key, (holder, _) in self._claims.items()}
        if wrong or +totals != +self._totals or any(amount < 0 for amount in self._totals.values()):
            raise LedgerError(f"claims of {self.kind}: totals {dict(self._totals)}, entries sum to {dict(totals)}")

    def _put(self, key: Key, holder: str, amount: int) -> None:
        old_holder, old_amount = self._claims[key]
        self._claims[key] = (holder, amount)
        if holder != old_holder:
            self._forget_key(old_holder, key)
            self._keys.setdefault(holder, {})[key] = None
        self._subtract(old_holder, old_amount)
        self._add(holder, amount)

    def _forget_key(self, holder: str, key: Key) -> None:
        keys = self._keys[holder]
        del keys[key]
        if not keys:
            del self._keys[holder]

    def _add(self, holder: str, amount: int) -> None:
        self._totals[holder] += amount
        if self.on_total is not None:
            self.on_total(holder, amount)

    def _subtract(self, holder: str, amount: int) -> None:
        self._add(holder, -amount)
        if not self._totals[holder]:
            del self._totals[holder]


class PrefillClaims(Claims):
    """Claims of prompt tokens still to compute, which also know how much each token has to look back.

    Beside the tokens a holder's total has the number of its claims and their token pairs (prefill_fit.py), so that what
    is outstanding can be told in seconds with whatever is known of the worker at that moment.
    """

    def __init__(self) -> None:
        super().__init__("prefill tokens")
        self.on_change: Callable[[str], None] | None = None  # told of every holder whose claims change
        self._lengths: dict[Key, int] = {}
        self._pairs: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    def claim(self, key: Key, holder: str, amount: int, length: int | None = None) -> None:
        """`amount`: tokens to compute, the last of `length` (None: all of them)."""
        super().claim(key, holder, amount)
        self._lengths[key] = max(amount, amount if length is None else length)
        self._pairs[holder] += self._pairs_of(key, amount)
        self._counts[holder] += 1
        self._tell(holder)

    def give_back(self, key: Key) -> int:
        holder = self.holder(key)
        if holder is None:
            return 0
        self._tell(holder)
        self._take(holder, self._pairs_of(key, self.amount(key)))
        del self._lengths[key]
        return super().give_back(key)

    def _tell(self, holder: str) -> None:
        if self.on_change is not None:
            self.on_change(holder)

    def work(self, holder: str) -> tuple[int, int, int]:
        """What is outstanding: (claims, tokens, token pairs)."""
        count = self._counts.get(holder)
        return (count, self._totals.get(holder, 0), self._pairs[holder]) if count else (0, 0, 0)

    def check(self) -> None:
        super().check()
        pairs: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for key, (holder, amount) in self._claims.items():
            pairs[holder] += self._pairs_of(key, amount)
            counts[holder] += 1
        if +pairs != +self._pairs or counts != self._counts or self._lengths.keys() != self._claims.keys():
            raise LedgerError(
                f"{self.kind}: pairs {dict(self._pairs)} and not {dict(pairs)}, {dict(self._counts)} claims"
            )

    def _put(self, key: Key, holder: str, amount: int) -> None:
        old_holder, old_amount = self._claims[key]
        self._tell(old_holder)
        self._tell(holder)
        self._take(old_holder, self._pairs_of(key, old_amount))
        super()._put(key, holder, amount)
        self._lengths[key] = max(self._lengths[key], amount)
        self._pairs[holder] += self._pairs_of(key, amount)
        self._counts[holder] += 1

    def _pairs_of(self, key: Key, amount: int) -> int:
        """The last `amount` tokens of its prompt look back at all that is before them."""
        return amount * (2 * self._lengths[key] - amount) // 2

    def _take(self, holder: str, pairs: int) -> None:
        self._pairs[holder] -= pairs
        self._counts[holder] -= 1
        if not self._counts[holder]:
            del self._counts[holder], self._pairs[holder]
