"""Reads of mapped memory under way: each is one launch of page_read.py's kernel, answered by an event.

A *reader* belongs to one memory provider (device_memory.py): CudaReader launches on a stream of its own beside those
that compute, of high priority, because a few programs must find a place among the many that compute. The numbers of
the spans go over through pinned memory, a slot a read; a slot is used again only when its read has ended.

Nothing here waits, but for `fetch`, which is bounded. A read cannot be called back: until its ticket is done, both
memories must stay as they are.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

import numpy as np
import torch

from tailrace.kernels.device_memory import DeviceError, Memory
from tailrace.kernels.page_read import DEFAULT_PROGRAMS, check_spans, read_spans

FETCH_LIMIT_S = 10.0
SLOT_SPANS = 64 << 10
_SLOTS = 8
_FETCH_POLL_S = 0.0001


Numbers = tuple[np.ndarray, np.ndarray]


class Ticket(Protocol):
    """One read."""

    def done(self) -> bool:
        """Whether no load and no store of it is left; what it wrote is there. Raises what it died of."""
        ...


class Reader(Protocol):
    """What copies on the device, in the order in which it is told; from any thread."""

    def read(self, dst: Memory, src: Memory, numbers: Numbers, length: int, stride: int, unit: int) -> Ticket:
        """Begin to copy, behind the reads begun before.

        Args:
            numbers: of src's and of dst's spans, [n] each; the rest as page_read.read_spans, and checked here.

        Raises:
            ValueError: a span lies outside.
        """
        ...

    def fetch(self, memory: Memory, start: int, nbytes: int) -> bytes:
        """What stands there, after the reads begun before. Raises DeviceError if that takes FETCH_LIMIT_S."""
        ...

    def store(self, memory: Memory, start: int, data: np.ndarray) -> None:
        """Write [n] uint8 there. Raises as `fetch`. Tests only."""
        ...


class CudaReader:
    """On one CUDA device.

    Args:
        programs: of the kernel, at most.
    """

    def __init__(self, device: torch.device, programs: int = DEFAULT_PROGRAMS) -> None:
        self._device, self._programs = device, programs
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._lock = threading.Lock()
        self._slots = [_Slot(device) for _ in range(_SLOTS)]

    def read(self, dst: Memory, src: Memory, numbers: Numbers, length: int, stride: int, unit: int) -> Ticket:
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            slot = self._slot_for(len(numbers[0]))
            here = slot.fill(*numbers)
            check_spans(dst, src, here, length, stride, unit)
            read_spans(dst, src, slot.send(), length, stride, unit, self._programs)
            slot.ticket = self._ticket()
            return slot.ticket

    def _slot_for(self, n: int) -> _Slot:
        if n <= SLOT_SPANS:
            for i, slot in enumerate(self._slots):
                if slot.ticket is None or slot.ticket.done():
                    self._slots.append(self._slots.pop(i))  # the one used longest ago is looked at first
                    return slot
        return _Slot(self._device, n)  # many reads are under way: memory of its own, which torch's pools keep

    def fetch(self, memory: Memory, start: int, nbytes: int) -> bytes:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            here.copy_(memory.tensor[start : start + nbytes], non_blocking=True)
            ticket = self._ticket()
        self._wait_for(ticket, nbytes)
        return here.numpy().tobytes()

    def store(self, memory: Memory, start: int, data: np.ndarray) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            memory.tensor[start : start + len(data)].copy_(torch.from_numpy(data).pin_memory(), non_blocking=True)
            ticket = self._ticket()
        self._wait_for(ticket, len(data))

    def _wait_for(self, ticket: Ticket, nbytes: int) -> None:
        end = time.monotonic() + FETCH_LIMIT_S
        while not ticket.done():
            if time.monotonic() > end:
                raise DeviceError(f"{nbytes} bytes of {self._device} did not come within {FETCH_LIMIT_S:g} s", 0)
            time.sleep(_FETCH_POLL_S)

    def _ticket(self) -> _CudaTicket:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaTicket(event)


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()


class _Slot:
    """Room for the numbers of one read, pinned and on the device. `ticket`: of the read that used it last."""

    def __init__(self, device: torch.device, capacity: int = SLOT_SPANS) -> None:
        self._pinned = torch.empty(2 * capacity, dtype=torch.int32, pin_memory=True)
        self._there = torch.empty(2 * capacity, dtype=torch.int32, device=device)
        self._array = self._pinned.numpy()
        self._n = 0
        self.ticket: _CudaTicket | None = None

    def fill(self, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
        """[2, n] int32 in the pinned part. Numbers beyond 32 bits come out wrong, and outside of any memory."""
        self._n = len(src)
        here = self._array[: 2 * self._n].reshape(2, self._n)
        here[0], here[1] = src, dst
        return here

    def send(self) -> torch.Tensor:
        """The same on the device, behind what the current stream has to do."""
        there = self._there[: 2 * self._n]
        there.copy_(self._pinned[: 2 * self._n], non_blocking=True)
        return there.view(2, self._n)
