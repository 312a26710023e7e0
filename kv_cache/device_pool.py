"""A worker's pages in the memory of its device, where peers on the host map them; the numbers stay in its arena.

    [pages num_pages * bytes_per_page | pad to 4096 | known bytes 4096 | a peer's known bytes, fetched by a probe 4096]

One allocation outside torch's allocator (kernels/device_memory.py). Page p here and generation number p in the arena
belong together. What a dead boot of this worker had allocated stays until the last peer has closed its mapping of it,
so `create` waits for room, and says for how many mappings. Knows no transport.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tailrace.kernels.device_memory import DeviceError, Memory, MemoryProvider
from tailrace.kv_cache.arena import SHARED_MEMORY, Arena, arena_name, known_bytes, mapped_elsewhere
from tailrace.kv_cache.layout import Layout
from tailrace.model.errors import ConfigError

log = logging.getLogger(__name__)

KNOWN_BYTES = 4096
ROOM_LIMIT_S = 120.0  # peers close their mappings when the router has told them of the death, and reads have ended
UNEXPLAINED_LIMIT_S = 5.0  # the kernel takes a moment to take back what a killed process had
_POLL_S = 0.1

Waiting = Callable[[], None]
"""Called now and then while there is no room."""


class DevicePool:
    """See the module.

    Attributes:
        arena: our generation numbers; it has no pages.
        provider, memory: where the pages are.
        num_pages, bytes_per_page: scratch page 0 included.
        known_at, landing_at: offsets of the known bytes, and of the room for a peer's.
        pages: [num_pages, bytes_per_page] uint8 on the device.
    """

    def __init__(self, provider: MemoryProvider, memory: Memory, arena: Arena, bytes_per_page: int) -> None:
        self.provider, self.memory, self.arena = provider, memory, arena
        self.num_pages, self.bytes_per_page = arena.num_pages, bytes_per_page
        self.known_at = _known_at(self.num_pages, bytes_per_page)
        self.landing_at = self.known_at + KNOWN_BYTES
        self.pages: torch.Tensor = memory.tensor[: self.num_pages * bytes_per_page].view(self.num_pages, bytes_per_page)

    @classmethod
    def create(
        cls,
        provider: MemoryProvider,
        app: str,
        worker: str,
        boot: str,
        layout: Layout,
        num_pages: int,
        *,
        waiting: Waiting = lambda: None,
        directory: Path = SHARED_MEMORY,
    ) -> DevicePool:
        """Allocate, all pages zero.

        Args:
            layout: of one rank's pages.

        Raises:
            ConfigError: there is no room on the device, or none for the arena; it names the sizes.
        """
        name = arena_name(app, worker, boot)
        arena = Arena.create(name, layout, num_pages, directory, with_pages=False)
        try:
            nbytes = _known_at(num_pages, layout.bytes_per_page) + 2 * KNOWN_BYTES
            memory = _allocate(provider, nbytes, lambda: mapped_elsewhere(app, worker, name), waiting)
        except BaseException:
            arena.unlink()
            raise
        pool = cls(provider, memory, arena, layout.bytes_per_page)
        known = torch.frombuffer(bytearray(known_bytes(name, KNOWN_BYTES)), dtype=torch.uint8)
        pool.pages.zero_()
        memory.tensor[pool.known_at : pool.landing_at].copy_(known)
        if memory.device.type == "cuda":
            torch.cuda.synchronize(memory.device)  # at start: before a peer can read
        log.info(
            "device_pool",
            extra={"fields": {"device": str(memory.device), "bytes": nbytes, "pages": num_pages, "arena": name}},
        )
        return pool

    def unlink(self) -> None:
        """Remove the arena's name. The memory goes with the process: peers that map it may still be reading, and what
        they would read of memory that its owner has freed is undefined."""
        self.arena.unlink()

    def close(self) -> None:
        """Give the memory back, too: where no peer maps it, and nothing on the device uses a page."""
        self.unlink()
        self.pages = torch.empty(0, 0, dtype=torch.uint8)
        self.provider.close(self.memory)


def _known_at(num_pages: int, bytes_per_page: int) -> int:
    return -(-num_pages * bytes_per_page // KNOWN_BYTES) * KNOWN_BYTES


def _allocate(
    provider: MemoryProvider, nbytes: int, old_mappings: Callable[[], dict[int, set[str]]], waiting: Waiting
) -> Memory:
    """Wait for room as long as peers map the memory of an earlier boot, or the kernel may still be taking it back."""
    started, said = time.monotonic(), -1
    while True:
        try:
            return provider.allocate(nbytes)
        except DeviceError as error:
            if not error.is_full:
                raise
            old, waited = old_mappings(), time.monotonic() - started
            if waited >= (ROOM_LIMIT_S if old else UNEXPLAINED_LIMIT_S):
                behind = f"; {len(old)} processes still map what an earlier boot had" if old else ""
                raise ConfigError(f"kv_bytes: the page pool finds no room: {error}{behind}") from None
            if len(old) != said:
                said = len(old)
                fields = {"mappings": said, "pids": sorted(old), "bytes": nbytes, "reason": str(error)}
                log.warning("waiting_for_old_mappings", extra={"fields": fields})
        waiting()
        time.sleep(_POLL_S)
