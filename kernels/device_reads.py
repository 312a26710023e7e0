"""Reads of mapped memory under way: each is one launch of page_read.py's kernel, answered by an event.

A *reader* belongs to one memory provider (device_memory.py): CudaReader launches on a stream of its own beside those
that compute, of high priority, because a few programs must find a place among the many that compute. The list of spans
goes over through pinned memory, which torch's pool of it gives out again only when the copy has run.

Nothing here waits, but for `fetch`, which is bounded. A read cannot be called back: until its ticket is done, both
memories must stay as they are.
"""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np
import torch

from tailrace.kernels.device_memory import DeviceError, Memory
from tailrace.kernels.page_read import DEFAULT_PROGRAMS, check_spans, read_spans

FETCH_LIMIT_S = 10.0
_FETCH_POLL_S = 0.0001


class Ticket(Protocol):
    """One read."""

    def done(self) -> bool:
        """Whether no load and no store of it is left; what it wrote is there. Raises what it died of."""
        ...


class Reader(Protocol):
    """What copies on the device, in the order in which it is told; from any thread."""

    def read(self, dst: Memory, src: Memory, spans: np.ndarray, length: int, unit: int) -> Ticket:
        """Begin to copy, behind the reads begun before.

        Args:
            spans: [n, 2] int64: (of src, of dst), in units; as page_read.read_spans, and checked here.

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

    def read(self, dst: Memory, src: Memory, spans: np.ndarray, length: int, unit: int) -> Ticket:
        check_spans(dst, src, spans, length, unit)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            read_spans(dst, src, self._there(spans), length, unit, self._programs)
            return self._ticket()

    def fetch(self, memory: Memory, start: int, nbytes: int) -> bytes:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            here.copy_(memory.tensor[start : start + nbytes], non_blocking=True)
            ticket = self._ticket()
        self._wait_for(ticket, nbytes)
        return here.numpy().tobytes()

    def store(self, memory: Memory, start: int, data: np.ndarray) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            memory.tensor[start : start + len(data)].copy_(self._there(data))
            ticket = self._ticket()
        self._wait_for(ticket, len(data))

    def _wait_for(self, ticket: Ticket, nbytes: int) -> None:
        end = time.monotonic() + FETCH_LIMIT_S
        while not ticket.done():
            if time.monotonic() > end:
                raise DeviceError(f"{nbytes} bytes of {self._device} did not come within {FETCH_LIMIT_S:g} s", 0)
            time.sleep(_FETCH_POLL_S)

    def _there(self, numbers: np.ndarray) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(numbers)).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def _ticket(self) -> Ticket:
        event = torch.cuda.Event()
        event.record(self._stream)
        return _CudaTicket(event)


class _CudaTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event.query()
