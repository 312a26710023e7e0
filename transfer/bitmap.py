"""Which units of a hand-off have arrived. Plain data; knows no page id and no transport."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Unit(NamedTuple):
    """The smallest thing whose arrival is counted. `rank`: of the sender's tensor-parallel group."""

    group: int
    ordinal: int
    rank: int = 0


class UnitBitmap:
    """The units that one hand-off expects, and those that are in on the receiver's own evidence."""

    def __init__(self, expected: Iterable[Unit]) -> None:
        self._missing = set(expected)
        self._arrived: set[Unit] = set()

    @property
    def full(self) -> bool:
        return not self._missing

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def lacks(self, unit: Unit) -> bool:
        """True if the unit is expected and not in yet."""
        return unit in self._missing

    def missing(self) -> list[Unit]:
        """In order of group, ordinal and rank."""
        return sorted(self._missing)

    def set(self, unit: Unit) -> bool:
        """Mark a unit as in; False if it was in before or is not expected."""
        if unit not in self._missing:
            return False
        self._missing.remove(unit)
        self._arrived.add(unit)
        return True


def ranges(units: Iterable[Unit]) -> tuple[tuple[int, int, int], ...]:
    """(group, first ordinal, past-the-last) of sorted units, ranks set aside."""
    out: list[tuple[int, int, int]] = []
    for unit in units:
        if out and out[-1][0] == unit.group and out[-1][2] >= unit.ordinal:
            out[-1] = (unit.group, out[-1][1], max(out[-1][2], unit.ordinal + 1))
        else:
            out.append((unit.group, unit.ordinal, unit.ordinal + 1))
    return tuple(out)
