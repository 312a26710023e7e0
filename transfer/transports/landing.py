"""Landing chunks: gen's memory that a ctx may write once a grant. The ledger of them, and the form of what lands.

    free --grant--> granted --notification--> landed --read--> unpacking --> free
                       |                         \\--drop--> free
                       \\--reclaim (ctx said that it posts no more), disconnect (receiving agent destroyed)--> free

`free + granted + unpacking == total`, landed chunks counted with unpacking. Time, end of file and a missed heartbeat
are no edges: a write may still come. A grant's sequence number is never used again, so whatever names an earlier grant
is recognized. Pure: knows no NIXL and no clock; dies with its worker.

What lands: [header 4096 bytes | pages as they stand in the notification's list]. The checksum covers the pages' bytes
and, by its seed, what the notification says they are.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import xxhash

from tailrace.model.errors import LedgerError
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Landed, LandingGrant
from tailrace.transfer.page_list import PageList
from tailrace.transfer.transports.base import ChunkCounts

HEADER_BYTES = 4096
CODED_PAGE_EXTRA = 64  # by which a page that a codec cannot shorten may take more than itself
_MAGIC = b"landed 1"
_HEADER = struct.Struct("<8s16sQQQ")  # magic, digest of the key, sequence, bytes of pages, checksum


class ChunkState(Enum):
    FREE = "free"
    GRANTED = "granted"
    LANDED = "landed"  # announced, nobody unpacks it yet
    UNPACKING = "unpacking"


@dataclass(slots=True)
class _Chunk:
    state: ChunkState = ChunkState.FREE
    boot: str = ""
    key: Key = ("", 0)
    sequence: int = 0


class LandingBook:
    """Who may write which chunk.

    Args:
        num_chunks: chunks of this worker; 0 if it never receives.
        nbytes: bytes of pages that a chunk takes (its header apart).
    """

    def __init__(self, num_chunks: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._chunks = [_Chunk() for _ in range(num_chunks)]
        self._free = deque(range(num_chunks))  # the one that rested longest goes first
        self._sequence = 0

    def grant(self, key: Key, boot: str, n: int, units: int = 0) -> tuple[LandingGrant, ...]:
        """At most n free chunks for (boot, key), each of which takes so many of its pages."""
        grants = []
        for _ in range(min(n, len(self._free))):
            index = self._free.popleft()
            self._sequence += 1
            self._chunks[index] = _Chunk(ChunkState.GRANTED, boot, key, self._sequence)
            grants.append(LandingGrant(index, self._sequence, self.nbytes, units))
        return tuple(grants)

    def announce(self, boot: str, landed: Landed) -> bool:
        """Take a notification; False if it names no chunk that is granted to this boot and key under this sequence."""
        chunk = self._named(landed)
        right = chunk is not None and chunk.boot == boot and landed.nbytes <= self.nbytes
        if chunk is None or not right or chunk.state is not ChunkState.GRANTED:
            return False
        chunk.state = ChunkState.LANDED
        return True

    def begin_unpack(self, landed: Landed) -> bool:
        """False if this chunk has been given back, or is being unpacked already."""
        chunk = self._named(landed)
        if chunk is None or chunk.state is not ChunkState.LANDED:
            return False
        chunk.state = ChunkState.UNPACKING
        return True

    def end_unpack(self, landed: Landed) -> None:
        chunk = self._named(landed)
        if chunk is None or chunk.state is not ChunkState.UNPACKING:
            raise LedgerError(f"landing chunk {landed.chunk} ({landed.sequence}) was not being unpacked")
        self._set_free(landed.chunk)

    def drop(self, landed: Landed) -> None:
        """What landed is not wanted; ignored if it is being unpacked or was given back already."""
        chunk = self._named(landed)
        if chunk is not None and chunk.state is ChunkState.LANDED:
            self._set_free(landed.chunk)

    def reclaim(self, key: Key, boot: str) -> None:
        """Ctx said that nothing it posted for this key is under way."""
        self._free_if(lambda chunk: chunk.boot == boot and chunk.key == key)

    def disconnect(self, boot: str) -> None:
        """The agent that received from this boot is destroyed."""
        self._free_if(lambda chunk: chunk.boot == boot and chunk.state is ChunkState.GRANTED)

    def has_out(self, boot: str) -> bool:
        """Whether a write or its notification may come from this boot."""
        return any(c.state is ChunkState.GRANTED and c.boot == boot for c in self._chunks)

    def counts(self) -> ChunkCounts:
        states = [chunk.state for chunk in self._chunks]
        return ChunkCounts(
            free=states.count(ChunkState.FREE),
            granted=states.count(ChunkState.GRANTED),
            unpacking=states.count(ChunkState.LANDED) + states.count(ChunkState.UNPACKING),
            total=len(states),
        )

    def check(self) -> None:
        """Raises LedgerError if the free list and the chunks' states disagree."""
        free = sorted(i for i, chunk in enumerate(self._chunks) if chunk.state is ChunkState.FREE)
        if free != sorted(self._free):
            raise LedgerError(f"landing chunks {free} are free, the free list has {sorted(self._free)}")

    def _named(self, landed: Landed) -> _Chunk | None:
        if not 0 <= landed.chunk < len(self._chunks):
            return None
        chunk = self._chunks[landed.chunk]
        right = chunk.sequence == landed.sequence and chunk.key == (landed.request, landed.attempt)
        return chunk if right and chunk.state is not ChunkState.FREE else None

    def _free_if(self, wanted: Callable[[_Chunk], bool]) -> None:
        for index, chunk in enumerate(self._chunks):
            if chunk.state in (ChunkState.GRANTED, ChunkState.LANDED) and wanted(chunk):
                self._set_free(index)

    def _set_free(self, index: int) -> None:
        self._chunks[index].state = ChunkState.FREE
        self._free.append(index)


class Checksum:
    """Of a chunk's pages, fed in the order in which they stand there; its seed is what the notification says of them.

    Fed while the pages are still in the cache it costs a tenth of their copy.
    """

    def __init__(self, pages: PageList) -> None:
        self._hash = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(pages.packed()))

    def feed(self, data: np.ndarray) -> None:
        """The next bytes, contiguous."""
        self._hash.update(data.data)

    @property
    def value(self) -> int:
        return self._hash.intdigest()


def seal(chunk: np.ndarray, key: Key, grant: LandingGrant, pages: PageList, nbytes: int, checksum: int) -> Landed:
    """Write the header of a packed chunk ([HEADER_BYTES + room] uint8); returns what its notification says."""
    header = _HEADER.pack(_MAGIC, _digest(key), grant.sequence, nbytes, checksum)
    chunk[: _HEADER.size] = np.frombuffer(header, np.uint8)
    return Landed(*key, grant.chunk, grant.sequence, nbytes, checksum, pages)


def is_sound(chunk: np.ndarray, landed: Landed) -> bool:
    """Whether a chunk holds what its notification says: key, sequence, length and checksum."""
    expected = _HEADER.pack(
        _MAGIC, _digest((landed.request, landed.attempt)), landed.sequence, landed.nbytes, landed.checksum
    )
    if chunk[: _HEADER.size].tobytes() != expected or landed.nbytes > len(chunk) - HEADER_BYTES:
        return False
    checksum = Checksum(PageList.of(landed.pages))
    checksum.feed(chunk[HEADER_BYTES : HEADER_BYTES + landed.nbytes])
    return checksum.value == landed.checksum


def _digest(key: Key) -> bytes:
    return hashlib.sha256(f"{key[0]}:{key[1]}".encode()).digest()[:16]
