"""Of many workers the few that a policy could want, found without looking at all of them.

Kept in order while nobody asks: each worker stands in a list sorted by what the policy looks at (its wait, its tokens,
its last turn), and is put in its place anew when that changes. Asked for a request it gives the first of that order,
and of those who have some of the request's prefix the first few at each length, longest first. Of workers that have
equally much of a prefix no policy wants another than the first; the others stand in for those that may not be used.

Knows no liveness and no limit: its user says of each whether it may be used, and looks at all workers if nobody is
found. If the router dies its successor begins with an empty list.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Callable, Sequence

from tailrace.router.block_index import BlockIndex, Level, places

MANY = 48  # workers; up to so many are all looked at
FIRST = 4  # of the whole order
HOLDERS = 2  # of each length of prefix
LENGTHS = 6  # the longest ones
FEW_HOLDERS = 32  # of a length: so many are all looked at; of more, those in the first part of the order
FAR = 128  # that part; if none of them is there, a few wherever they stand

Key = tuple[float, int, str] | tuple[float, int, int, str]
"""(what the policy looks at first, what it looks at then, the last of it the number of the last choice; boot id). All
keys of one list have the same length."""


class Shortlist:
    """See the module.

    Args:
        index: who has which prefix.
        key_of: the key of a worker now; None: it is gone.
    """

    def __init__(self, index: BlockIndex, key_of: Callable[[str], Key | None]) -> None:
        self._index, self._key_of = index, key_of
        self._order: list[Key] = []
        self._bits: list[int] = []  # in the same order: each worker as the index's sets have it
        self._keys: dict[str, Key] = {}
        self._bit_of: dict[str, int] = {}
        self._at: dict[int, Key] = {}  # a worker's number in the index's sets -> its key
        self._window = 0  # the first FAR of them as one set
        self._sum = 0.0
        self._changed: set[str] = set()

    def __len__(self) -> int:
        return len(self._order)

    def changed(self, boot: str) -> None:
        """What a policy looks at may have changed."""
        self._changed.add(boot)

    @property
    def num_changed(self) -> int:
        """Those that are not in their places yet, the dead included."""
        return len(self._changed)

    def refresh(self) -> None:
        """Put those that have changed in their places."""
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        for boot in changed:
            old, new, bit = self._keys.get(boot), self._key_of(boot), self._index.mask(boot)
            if old == new and self._bit_of.get(boot) == bit:
                continue
            if old is not None:
                self._take_out(old)
            if new is not None:
                self._put_in(new, bit)
            if not self._order:
                self._sum = 0.0

    def _take_out(self, key: Key) -> None:
        at, boot, bits = bisect.bisect_left(self._order, key), key[-1], self._bits
        if at < FAR:  # each worker has a bit of its own, so that to take one out of a set, or put it in, is the same
            self._window ^= bits[at]
            if len(bits) > FAR:
                self._window ^= bits[FAR]
        number = bits[at].bit_length()
        if self._at.get(number) == key:  # else another has that number by now
            del self._at[number]
        del self._order[at], bits[at], self._keys[boot], self._bit_of[boot]
        self._sum -= key[0]

    def _put_in(self, key: Key, bit: int) -> None:
        at, boot, bits = bisect.bisect_left(self._order, key), key[-1], self._bits
        if at < FAR:
            self._window ^= bit
            if len(bits) >= FAR:
                self._window ^= bits[FAR - 1]
        self._order.insert(at, key)
        bits.insert(at, bit)
        if bit:
            self._at[bit.bit_length()] = key
        self._keys[boot], self._bit_of[boot] = key, bit
        self._sum += key[0]

    @property
    def mean_of_all_but_the_last(self) -> float:
        """Of what the order goes by; 0 for less than two."""
        return max(0.0, self._sum - self._order[-1][0]) / (len(self._order) - 1) if len(self._order) > 1 else 0.0

    def boots(self, levels: Sequence[Level], usable: Callable[[str], bool], also: Sequence[str] = ()) -> list[str]:
        """Who could be wanted of those that are `usable`, the holders of the longest prefixes first. `also`: these too,
        if they are there. Looks at no more than the first part of the order, and then at none."""
        self.refresh()
        found: dict[str, None] = {}
        for level in levels[:LENGTHS]:
            for boot in self._holders(level, usable):
                found[boot] = None
        first = (key[-1] for key in itertools.islice(self._order, FAR))
        for boot in itertools.islice(filter(usable, first), FIRST):
            found[boot] = None
        for boot in also:
            if boot in self._keys and usable(boot):
                found[boot] = None
        return list(found)

    def _holders(self, level: Level, usable: Callable[[str], bool]) -> list[str]:
        """The first of those who have so much."""
        mask = level.mask
        if mask.bit_count() > FEW_HOLDERS and (near := mask & self._window):
            if near.bit_count() > FEW_HOLDERS:  # then the first of them stand far in front
                along = (self._order[at][-1] for at, bit in enumerate(self._bits[:FAR]) if bit & near)
                found = list(itertools.islice(filter(usable, along), HOLDERS))
            else:
                found = self._first(near, usable)
            if found:
                return found
        return self._first(mask, usable)

    def _first(self, mask: int, usable: Callable[[str], bool]) -> list[str]:
        """Of the first few of a set those that stand first in the order."""
        numbers = itertools.islice(places(mask), FEW_HOLDERS)
        keys = [key for number in numbers if (key := self._at.get(number + 1)) is not None]
        heapq.heapify(keys)
        found: list[str] = []
        while keys and len(found) < HOLDERS:
            if usable(boot := heapq.heappop(keys)[-1]):
                found.append(boot)
        return found
