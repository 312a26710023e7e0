"""Copies spans of a peer's mapped memory into ours: whole pages, or the parts of pages that are wanted.

    dst[to * stride : + length] = src[at * stride : + length]   for each at, to of numbers [2, n]; all in units of bytes

So numbers are those of pages where stride and length are a page's. The plain twin of page_read_triton.py, for any
device that torch sees; `read_spans` takes the kernel on a GPU. Whoever calls it on a side stream learns by an event
that no load and no store of it is left. Knows no page and no peer.
"""

from __future__ import annotations

import numpy as np
import torch

from tailrace.kernels.device_memory import Memory

DEFAULT_PROGRAMS = 24
UNITS = (16, 8, 4, 2, 1)
_MOST_BYTES = 1 << 31


def unit_of(*numbers: int) -> int:
    """The largest unit, of UNITS, that divides all of them: what one access may take."""
    together = UNITS[0]
    for number in numbers:
        together |= number
    return together & -together


def check_spans(dst: Memory, src: Memory, numbers: np.ndarray, length: int, stride: int, unit: int) -> None:
    """Raises ValueError unless `read_spans` may be called so.

    Args:
        numbers: [2, n] int32 in host memory.
    """
    if numbers.dtype != np.int32 or numbers.ndim != 2 or len(numbers) != 2:
        raise ValueError(f"numbers of spans are [2, n] int32, not {list(numbers.shape)} {numbers.dtype}")
    if unit not in UNITS or (dst.address | src.address) % unit or not 0 < length * unit < _MOST_BYTES or stride < 1:
        where = f"from {src.address:#x} to {dst.address:#x}"
        raise ValueError(f"spans of {length} units of {unit} bytes, {stride} apart, cannot be copied {where}")
    for row, memory in zip(numbers, (src, dst), strict=True):
        if len(row) and (row.min() < 0 or (int(row.max()) * stride + length) * unit > memory.nbytes):
            reach = f"{row.min()} to {row.max()}, {stride} units of {unit} bytes apart"
            raise ValueError(f"spans of {length} units, {reach}, in a memory of {memory.nbytes} bytes")


def read_spans(
    dst: Memory,
    src: Memory,
    numbers: torch.Tensor,
    length: int,
    stride: int,
    unit: int,
    programs: int = DEFAULT_PROGRAMS,
) -> None:
    """Copy, in the current stream.

    Args:
        numbers: [2, n] int32 on dst's device: of src, of dst; destinations do not overlap. Unchecked here.
        length: of each span, in units.
        stride: from one number to the next, in units.
        unit: bytes of one, of UNITS; divides both addresses.
        programs: of the kernel at most, each of which keeps a processor of the GPU busy.
    """
    if dst.device.type == "cuda":
        from tailrace.kernels import page_read_triton  # only where there is a GPU

        page_read_triton.read_spans(dst, src, numbers, length, stride, unit, programs)
        return
    ours, theirs, nbytes, step = dst.tensor, src.tensor, length * unit, stride * unit
    for at, to in numbers.T.tolist():
        ours[to * step : to * step + nbytes] = theirs[at * step : at * step + nbytes]
