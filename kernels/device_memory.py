"""Memory of a device that other processes may map: ours in one allocation, its handle, and the mapping of a peer's.

    owner    allocate -> Memory, handle_of -> bytes, which travel to the peer
    peer     open(handle) -> Memory, read by kernels/page_read.py, close

Behind a Protocol, because there is more than one way to hand memory to another process: here is CUDA IPC, between
processes of one host. The allocation is made by the CUDA runtime that torch has loaded and not by torch's allocator,
which would hand out parts of it, and give none of it back while a peer's mapping stands. What a dead process had
allocated stays, and can be read, until the last mapping of it is closed; so its successor may have to wait for room.

Knows no page, no peer and no protocol. Nothing here waits for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

import torch

HANDLE_BYTES = 64
_WHOLE = 2 << 20  # cudaMalloc shares smaller blocks with others, and a handle would hand over those too
_LAZY_PEER_ACCESS = 1
OUT_OF_MEMORY = 2


class DeviceError(RuntimeError):
    """A call of the device's runtime failed.

    Attributes:
        code: of the runtime.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_full(self) -> bool:
        """Whether the device has not so much memory now."""
        return self.code == OUT_OF_MEMORY


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """One stretch of a device's memory, ours or a peer's that is mapped here.

    Attributes:
        address: in this process.
        is_mapped: it is a peer's.
        keeps: what must live as long as this does.
    """

    address: int
    nbytes: int
    device: torch.device
    is_mapped: bool = False
    keeps: object = None

    @property
    def tensor(self) -> torch.Tensor:
        """[nbytes] uint8 over it; whoever keeps the tensor keeps `keeps` and must not use it after `close`."""
        if isinstance(self.keeps, torch.Tensor):
            return self.keeps
        return torch.as_tensor(_Array(self), device=self.device)


class _Array:
    """Memory in the form from which torch makes a tensor without a copy."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


class MemoryProvider(Protocol):
    """One way to have memory that a peer can map.

    Attributes:
        name: both sides must have the same.
        device: where the memory is.
        identity: of the device, equal in every process that sees it.
    """

    name: str
    device: torch.device
    identity: str

    def allocate(self, nbytes: int) -> Memory:
        """Raises DeviceError, `is_full` where there is no room; it names the sizes."""
        ...

    def handle_of(self, memory: Memory) -> bytes:
        """What a peer needs to open this memory of ours. Raises DeviceError."""
        ...

    def open(self, handle: bytes, nbytes: int) -> Memory:
        """A peer's memory. Raises DeviceError if it is not there, or not a handle of this provider."""
        ...

    def close(self, memory: Memory) -> None:
        """Give up memory of ours, or a mapping; nothing on the device may use it any more. Raises DeviceError."""
        ...


class CudaIpc:
    """Memory of one CUDA device, mapped by peers on the same host through CUDA IPC.

    Args:
        index: of the device, among those that this process sees.

    Raises:
        DeviceError: torch has loaded no CUDA runtime.
    """

    name = "cuda_ipc"

    def __init__(self, index: int = 0) -> None:
        self._runtime = cuda_runtime()
        self.device = torch.device("cuda", index)
        self.identity = str(torch.cuda.get_device_properties(index).uuid)

    def allocate(self, nbytes: int) -> Memory:
        address = ctypes.c_void_p()
        room = -(-nbytes // _WHOLE) * _WHOLE

        def message() -> str:
            free, total = self.room()
            return f"cudaMalloc of {room} bytes on {self.device}, which has {free} of {total} free"

        self._call(message, "cudaMalloc", ctypes.byref(address), ctypes.c_size_t(room))
        return Memory(address.value or 0, nbytes, self.device)

    def handle_of(self, memory: Memory) -> bytes:
        handle = _Handle()
        what = f"the IPC handle of {memory.nbytes} bytes at {memory.address:#x}"
        self._call(lambda: what, "cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(memory.address))
        return bytes(handle)

    def open(self, handle: bytes, nbytes: int) -> Memory:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}", 1)
        address = ctypes.c_void_p()
        what = f"a peer's {nbytes} bytes cannot be mapped on {self.device}"
        self._call(
            lambda: what,
            "cudaIpcOpenMemHandle",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return Memory(address.value or 0, nbytes, self.device, is_mapped=True)

    def close(self, memory: Memory) -> None:
        name = "cudaIpcCloseMemHandle" if memory.is_mapped else "cudaFree"
        what = f"giving up {memory.nbytes} bytes at {memory.address:#x}"
        self._call(lambda: what, name, ctypes.c_void_p(memory.address))

    def room(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call(lambda: "free memory", "cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def _call(self, message: Callable[[], str], name: str, *arguments: object) -> None:
        with torch.cuda.device(self.device):  # the runtime's current device is each thread's own
            code = getattr(self._runtime, name)(*arguments)
        if code:
            self._runtime.cudaGetLastError()  # else torch's next call reports it as its own
            raise DeviceError(f"{message()}: {name} says {code}, {_text(self._runtime, code)}", code)


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


@cache
def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime library that torch runs on; another copy of it would have other current devices and errors.

    Raises:
        DeviceError: there is none.
    """
    if not torch.cuda.is_available():
        raise DeviceError("torch sees no CUDA device", 100)
    torch.cuda.init()
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libcudart"):
            library = ctypes.CDLL(str(path))
            library.cudaGetErrorString.restype = ctypes.c_char_p
            return library
    raise DeviceError("torch has loaded no libcudart", 100)


def _text(runtime: ctypes.CDLL, code: int) -> str:
    return runtime.cudaGetErrorString(code).decode()
