"""Many page descriptors as columns: what a landing chunk's notification names, and what transports work on.

A message of sixteen thousand descriptors as objects costs more than the copy of their pages, so lists that go over the
wire or into a copy are kept as arrays. Knows no transport and no protocol; torch-free. Immutable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

_HEADER = struct.Struct("<IB")  # number of pages; which columns are given by their first value
_SAME_GROUP, _NEXT_ORDINALS, _SAME_GENERATION = 1, 2, 4


@dataclass(frozen=True, slots=True)
class PageDescriptor:
    """A page that may be read: what may cross the wire (a bare page id may not)."""

    group: int
    ordinal: int  # position in the sequence: covers tokens [ordinal * B, (ordinal + 1) * B)
    page: int
    generation: int


class PageList(Sequence[PageDescriptor]):
    """A sequence of descriptors, equal to any other sequence of the same ones.

    Attributes:
        groups, ordinals, pages: [n] int64.
        generations: [n] uint64.
    """

    __slots__ = ("_packed", "generations", "groups", "ordinals", "pages")

    def __init__(self, groups: np.ndarray, ordinals: np.ndarray, pages: np.ndarray, generations: np.ndarray) -> None:
        self.groups, self.ordinals, self.pages, self.generations = groups, ordinals, pages, generations
        self._packed: bytes | None = None

    @classmethod
    def of(cls, descriptors: Sequence[PageDescriptor]) -> PageList:
        """The same as columns; one that is already is returned as it is."""
        if isinstance(descriptors, PageList):
            return descriptors
        n = len(descriptors)
        return cls(
            np.fromiter((d.group for d in descriptors), np.int64, n),
            np.fromiter((d.ordinal for d in descriptors), np.int64, n),
            np.fromiter((d.page for d in descriptors), np.int64, n),
            np.fromiter((d.generation for d in descriptors), np.uint64, n),
        )

    def __len__(self) -> int:
        return len(self.pages)

    @overload
    def __getitem__(self, index: int) -> PageDescriptor: ...
    @overload
    def __getitem__(self, index: slice) -> PageList: ...
    def __getitem__(self, index: int | slice) -> PageDescriptor | PageList:
        if isinstance(index, slice):
            return self.take(index)
        at = self.pages[index], self.generations[index]
        return PageDescriptor(int(self.groups[index]), int(self.ordinals[index]), int(at[0]), int(at[1]))

    def take(self, which: np.ndarray | slice) -> PageList:
        """Those at these places, or those where a mask is true."""
        return PageList(self.groups[which], self.ordinals[which], self.pages[which], self.generations[which])

    def __iter__(self) -> Iterator[PageDescriptor]:
        columns = self.groups.tolist(), self.ordinals.tolist(), self.pages.tolist(), self.generations.tolist()
        return map(PageDescriptor, *columns)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PageList):
            if self is other or (self._packed is not None and self._packed == other._packed):
                return True
            return (
                np.array_equal(self.ordinals, other.ordinals)
                and np.array_equal(self.pages, other.pages)
                and np.array_equal(self.generations, other.generations)
                and np.array_equal(self.groups, other.groups)
            )
        if isinstance(other, list | tuple):
            return len(other) == len(self) and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed())

    def __repr__(self) -> str:
        return f"PageList({list(self)!r})"

    def packed(self) -> bytes:
        """As bytes: 4 a page where ordinals follow each other and generations are equal, at most 18.

        Raises:
            ValueError: a number is negative or over 16 (group) or 32 (ordinal, page) bits.
        """
        if self._packed is None:
            self._packed = self._pack()
        return self._packed

    def _pack(self) -> bytes:
        n, flags = len(self), 0
        groups, ordinals, generations = self.groups, self.ordinals, self.generations
        for column, bits in ((groups, 16), (ordinals, 32), (self.pages, 32)):
            if n and (int(column.min()) < 0 or int(column.max()) >= 1 << bits):
                raise ValueError(f"a number of a page descriptor does not fit {bits} bits")
        if n and (groups == groups[0]).all():
            flags, groups = flags | _SAME_GROUP, groups[:1]
        if n and (np.diff(ordinals) == 1).all():
            flags, ordinals = flags | _NEXT_ORDINALS, ordinals[:1]
        if n and (generations == generations[0]).all():
            flags, generations = flags | _SAME_GENERATION, generations[:1]
        columns = (groups, "<u2"), (ordinals, "<u4"), (self.pages, "<u4"), (generations, "<u8")
        return _HEADER.pack(n, flags) + b"".join(column.astype(kind).tobytes() for column, kind in columns)

    @classmethod
    def unpack(cls, data: bytes) -> PageList:
        """Inverse of `packed`. Raises ValueError if it is none."""
        if len(data) < _HEADER.size:
            raise ValueError(f"a list of pages of {len(data)} bytes")
        n, flags = _HEADER.unpack_from(data)
        lengths = [1 if flags & flag else n for flag in (_SAME_GROUP, _NEXT_ORDINALS, 0, _SAME_GENERATION)]
        sizes = (2, 4, 4, 8)
        expected = _HEADER.size + sum(length * size for length, size in zip(lengths, sizes, strict=True))
        if len(data) != expected or flags > 7 or (not n and flags):
            raise ValueError(f"a list of {n} pages of {len(data)} bytes, not {expected}")
        columns, at = [], _HEADER.size
        for length, size in zip(lengths, sizes, strict=True):
            columns.append(np.frombuffer(data, f"<u{size}", length, at))
            at += length * size
        groups, ordinals, pages, generations = columns
        first = int(ordinals[0]) if flags & _NEXT_ORDINALS else 0
        pages_list = cls(
            np.full(n, int(groups[0])) if flags & _SAME_GROUP else groups.astype(np.int64),
            np.arange(first, first + n) if flags & _NEXT_ORDINALS else ordinals.astype(np.int64),
            pages.astype(np.int64),
            np.full(n, generations[0]) if flags & _SAME_GENERATION else generations,
        )
        pages_list._packed = data
        return pages_list


class UnitList(Sequence[tuple[PageDescriptor, int]]):
    """Units of a read as columns: ctx's pages and, [n] int64, where each shall stand in ours."""

    __slots__ = ("dst", "src")

    def __init__(self, src: PageList, dst: np.ndarray) -> None:
        self.src, self.dst = src, dst

    @classmethod
    def of(cls, units: Sequence[tuple[PageDescriptor, int]]) -> UnitList:
        """The same as columns; one that is already is returned as it is."""
        if isinstance(units, UnitList):
            return units
        src = PageList.of([descriptor for descriptor, _ in units])
        return cls(src, np.fromiter((page for _, page in units), np.int64, len(units)))

    def __len__(self) -> int:
        return len(self.dst)

    @overload
    def __getitem__(self, index: int) -> tuple[PageDescriptor, int]: ...
    @overload
    def __getitem__(self, index: slice) -> UnitList: ...
    def __getitem__(self, index: int | slice) -> tuple[PageDescriptor, int] | UnitList:
        if isinstance(index, slice):
            return UnitList(self.src[index], self.dst[index])
        return self.src[index], int(self.dst[index])

    def __iter__(self) -> Iterator[tuple[PageDescriptor, int]]:
        return zip(self.src, self.dst.tolist(), strict=True)
