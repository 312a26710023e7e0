"""What a peer tells of its device pool, and the mapping of it here, closed by whoever lets go of it last.

A mapping is held by its pair, by each read under way and by a probe. Closing it while a kernel reads would take the
memory from under the kernel, and until it is closed a dead owner's memory stays allocated. Knows no job.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass

import msgpack
import numpy as np

from tailrace.kernels.device_memory import DeviceError, Memory, MemoryProvider
from tailrace.kv_cache.arena import Arena
from tailrace.kv_cache.device_pool import KNOWN_BYTES, DevicePool
from tailrace.model.errors import PeerError

log = logging.getLogger(__name__)

VERSION = 1
_KINDS = [int, str, str, bytes, str, int, int, int, int]  # of PoolInfo's fields


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What a peer needs to read a pool: said when a pair is made.

    Attributes:
        provider, device, handle: of the memory; the device so that a pair can be told apart from one across cards.
        arena: name of the generation numbers.
        num_pages, bytes_per_page, known_at, nbytes: as DevicePool has them.
    """

    version: int
    provider: str
    device: str
    handle: bytes
    arena: str
    num_pages: int
    bytes_per_page: int
    known_at: int
    nbytes: int

    @classmethod
    def of(cls, pool: DevicePool) -> PoolInfo:
        memory = pool.memory
        return cls(
            VERSION, pool.provider.name, pool.provider.identity, pool.provider.handle_of(memory), pool.arena.name,
            pool.num_pages, pool.bytes_per_page, pool.known_at, memory.nbytes,
        )  # fmt: skip

    def packed(self) -> bytes:
        data = msgpack.packb(list(asdict(self).values()))
        assert data is not None
        return data

    @classmethod
    def unpack(cls, data: bytes) -> PoolInfo:
        """Raises PeerError if it is none of this version, or its numbers cannot be."""
        try:
            values = msgpack.unpackb(data)
        except (ValueError, msgpack.UnpackException) as error:
            raise PeerError(f"what the peer says of its memory cannot be read: {error!r}") from None
        if not isinstance(values, list) or [type(value) for value in values] != _KINDS or values[0] != VERSION:
            raise PeerError(f"what the peer says of its memory is not of version {VERSION}")
        info = cls(*values)
        pages, known = info.num_pages * info.bytes_per_page, info.known_at
        if info.num_pages < 1 or not 0 < pages <= known or known + KNOWN_BYTES > info.nbytes or known % KNOWN_BYTES:
            raise PeerError(
                f"{info.num_pages} pages of {info.bytes_per_page} bytes and, from {known} on, {KNOWN_BYTES} known ones "
                f"in memory of {info.nbytes} bytes"
            )
        return info


class PeerMapping:
    """A peer's pool as it is mapped here: opened by the first who needs it, closed when the last lets go.

    To open takes 0.1 s, and to close waits for what the device has been given to do, so neither is done by the transfer
    thread: a probe opens, a thread of its own closes.

    Attributes:
        info: by which it was made.
        generations: [num_pages] uint64, read-only; stays while somebody keeps it.
    """

    def __init__(self, provider: MemoryProvider, info: PoolInfo) -> None:
        """Held by the caller. Raises PeerError if the numbers are not there, or the memory cannot be ours to map."""
        if info.provider != provider.name:
            raise PeerError(f"the peer's memory is handed over by {info.provider}, ours by {provider.name}")
        self.info, self._provider = info, provider
        self._arena = Arena.open_read_only(info.arena)
        self.generations: np.ndarray = self._arena.generations
        if len(self.generations) != info.num_pages:
            raise PeerError(f"{info.arena} has {len(self.generations)} generation numbers for {info.num_pages} pages")
        self._memory: Memory | None = None
        self._lock = threading.Lock()
        self._holds = 1
        self._closing: threading.Thread | None = None

    def hold(self) -> Memory:
        """Keep it open until `let_go`. Raises PeerError if the memory is not there; nothing is held then."""
        with self._lock:
            assert self._holds > 0, "the mapping is closed"
            if self._memory is None:
                self._memory = self._open()
            self._holds += 1
            return self._memory

    def let_go(self) -> None:
        """Nothing of this holder reads it any more."""
        with self._lock:
            self._holds -= 1
            if self._holds == 0:
                self._closing = threading.Thread(target=self._close, name="peer-unmap", daemon=True)
                self._closing.start()

    def wait_closed(self, limit_s: float) -> bool:
        """Whether it is closed within this time."""
        if self._closing is not None:
            self._closing.join(limit_s)
        return self._closing is not None and not self._closing.is_alive()

    def _open(self) -> Memory:
        info = self.info
        try:
            memory = self._provider.open(info.handle, info.nbytes)
        except DeviceError as error:
            raise PeerError(str(error)) from None
        same = info.device == self._provider.identity
        log.info("peer_mapped", extra={"fields": {"arena": info.arena, "bytes": info.nbytes, "same_card": same}})
        return memory

    def _close(self) -> None:
        memory, self._memory = self._memory, None
        fields = {"arena": self.info.arena, "bytes": self.info.nbytes}
        if memory is not None:
            try:
                self._provider.close(memory)
                log.info("peer_unmapped", extra={"fields": fields})
            except DeviceError as error:  # it stays mapped until this process ends
                log.error("peer_not_unmapped", extra={"fields": {**fields, "reason": str(error)}})
        self.generations = np.empty(0, np.uint64)
        self._arena.close()  # last: by this mapping a successor that waits for the memory sees that it is not back yet
