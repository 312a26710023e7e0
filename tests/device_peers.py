"""Device memory for the transport suites: on a GPU, or a stand-in whose memory, handles and queue behave as one's do.

The stand-in: memory is an unnamed file, a handle finds it while its owner lives, a mapping outlives the owner, and one
thread copies in the order of the launches while the caller goes on. So all but CUDA's own calls is the real thing.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import warnings
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from tailrace.kernels.device_memory import OUT_OF_MEMORY, CudaIpc, DeviceError, Memory, MemoryProvider
from tailrace.kernels.device_reads import CudaReader, Numbers, Reader, Ticket
from tailrace.kernels.page_read import check_spans, read_spans
from tailrace.kv_cache.arena import Arena
from tailrace.kv_cache.device_pool import DevicePool
from tailrace.kv_cache.layout import PageLayout

DEVICE_KINDS = ("peer", "peer_cuda")


class SharedDevice:
    """A MemoryProvider over unnamed shared memory.

    Attributes:
        room: bytes that it has; counts those that a peer still maps after their owner gave them up as used.
        closed: addresses given up.
    """

    name = "shared"
    device = torch.device("cpu")
    identity = "shared-0"

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.closed: list[int] = []
        self._files: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Memory:
        if nbytes > self.room:
            raise DeviceError(f"{nbytes} bytes, {self.room} are free", OUT_OF_MEMORY)
        self.room -= nbytes
        file = os.memfd_create("tailrace-device")
        os.ftruncate(file, nbytes)
        memory = _memory(file, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, is_mapped=False)
        self._files[memory.address] = file
        return memory

    def handle_of(self, memory: Memory) -> bytes:
        return f"{os.getpid()}/fd/{self._files[memory.address]}".encode()

    def open(self, handle: bytes, nbytes: int) -> Memory:
        try:
            file = os.open(f"/proc/{handle.decode()}", os.O_RDONLY)
        except (OSError, ValueError) as error:
            raise DeviceError(f"no memory behind {handle!r}: {error}", 201) from None
        try:
            return _memory(file, nbytes, mmap.PROT_READ, is_mapped=True)  # a write of ours would end the process
        finally:
            os.close(file)

    def close(self, memory: Memory) -> None:
        assert memory.address not in self.closed, "given up twice"
        self.closed.append(memory.address)
        file = self._files.pop(memory.address, None)
        if file is not None:
            os.close(file)
            self.room += memory.nbytes


def _memory(file: int, nbytes: int, protection: int, *, is_mapped: bool) -> Memory:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        tensor = torch.frombuffer(mmap.mmap(file, nbytes, prot=protection), dtype=torch.uint8)
    return Memory(tensor.data_ptr(), nbytes, tensor.device, is_mapped, tensor)


class SharedReader:
    """The Reader of a SharedDevice.

    Attributes:
        gate: closed, no copy begins.
        launched: copies so far.
    """

    def __init__(self) -> None:
        self.launched = 0
        self.gate = threading.Event()
        self.gate.set()
        self._queue: SimpleQueue[tuple[Callable[[], None], _Ticket]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def read(self, dst: Memory, src: Memory, numbers: Numbers, length: int, stride: int, unit: int) -> Ticket:
        rows = np.stack(numbers).astype(np.int32)
        check_spans(dst, src, rows, length, stride, unit)
        return self._launch(lambda: read_spans(dst, src, torch.from_numpy(rows), length, stride, unit))

    def fetch(self, memory: Memory, start: int, nbytes: int) -> bytes:
        found: list[bytes] = []
        self._finish(lambda: found.append(memory.tensor[start : start + nbytes].numpy().tobytes()))
        return found[0]

    def store(self, memory: Memory, start: int, data: np.ndarray) -> None:
        self._finish(lambda: memory.tensor[start : start + len(data)].copy_(torch.from_numpy(data)))

    def _finish(self, work: Callable[[], Any]) -> None:
        ticket = self._launch(work)
        while not ticket.done():
            time.sleep(0.0001)

    def _launch(self, work: Callable[[], Any]) -> _Ticket:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="shared-device")
            self._thread.start()
        ticket = _Ticket()
        self.launched += 1
        self._queue.put((work, ticket))
        return ticket

    def _run(self) -> None:
        while True:
            work, ticket = self._queue.get()
            self.gate.wait()
            work()
            ticket.is_done = True


class _Ticket:
    is_done = False

    def done(self) -> bool:
        return self.is_done


class _DevicePages:
    """Pages on a GPU, looked at and written as if they were an array [num_pages, page_bytes] uint8."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages

    def __getitem__(self, which: Any) -> np.ndarray:
        return self._pages[which].cpu().numpy()

    def __setitem__(self, which: Any, values: Any) -> None:
        self._pages[which] = torch.as_tensor(values, dtype=torch.uint8, device=self._pages.device)
        torch.cuda.synchronize()


class PoolArena:
    """A device pool with the attributes that the suites use of an Arena."""

    def __init__(self, pool: DevicePool) -> None:
        self.pool = pool
        self.name, self.num_pages = pool.arena.name, pool.num_pages
        self.generations = pool.arena.generations
        self.pages: Any = pool.pages.numpy() if pool.pages.device.type == "cpu" else _DevicePages(pool.pages)

    def unlink(self) -> None:
        self.pool.unlink()

    def close(self) -> None:
        """Where nobody maps it."""
        self.pages = None
        self.pool.close()


def new_pool(
    kind: str, app: str, worker: str, boot: str, layout: PageLayout, num_pages: int
) -> tuple[PoolArena, Reader]:
    provider: MemoryProvider = CudaIpc() if kind == "peer_cuda" else SharedDevice()
    pool = DevicePool.create(provider, app, worker, boot, layout, num_pages)
    reader: Reader = CudaReader(provider.device) if kind == "peer_cuda" else SharedReader()
    return PoolArena(pool), reader


AnyArena = Arena | PoolArena
