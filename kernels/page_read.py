"""Copies spans of a peer's mapped memory into ours: whole pages, or the parts of pages that are wanted.

    dst[to : to + length] = src[at : at + length]   for each (at, to) of spans [n, 2], all in units of some bytes

The plain twin of page_read_triton.py, for any device that torch sees; `read_spans` takes the kernel on a GPU. Whoever
calls it on a side stream learns by an event that no load and no store of it is left. Knows no page and no peer.
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


def check_spans(dst: Memory, src: Memory, spans: np.ndarray, length: int, unit: int) -> None:
    """Raises ValueError unless `read_spans` may be called so.

    Args:
        spans: [n, 2] int64 in host memory.
    """
    if spans.dtype != np.int64 or spans.ndim != 2 or spans.shape[1] != 2:
        raise ValueError(f"spans are [n, 2] int64, not {list(spans.shape)} {spans.dtype}")
    if unit not in UNITS or (dst.address | src.address) % unit or not 0 < length * unit < _MOST_BYTES:
        where = f"from {src.address:#x} to {dst.address:#x}"
        raise ValueError(f"spans of {length} units of {unit} bytes cannot be copied {where}")
    if not len(spans):
        return
    low, high = int(spans.min()), ((spans.max(0) + length) * unit).tolist()
    if low < 0 or high[0] > src.nbytes or high[1] > dst.nbytes:
        raise ValueError(f"spans reach from {low} to {high} in memories of {src.nbytes} and {dst.nbytes} bytes")


def read_spans(
    dst: Memory, src: Memory, spans: torch.Tensor, length: int, unit: int, programs: int = DEFAULT_PROGRAMS
) -> None:
    """Copy, in the current stream.

    Args:
        spans: [n, 2] int64 on dst's device: (of src, of dst), in units; destinations do not overlap. Unchecked here.
        length: of each span, in units.
        unit: bytes of one, of UNITS; divides both addresses.
        programs: of the kernel at most, each of which keeps a processor of the GPU busy.
    """
    if dst.device.type == "cuda":
        from tailrace.kernels import page_read_triton  # only where there is a GPU

        page_read_triton.read_spans(dst, src, spans, length, unit, programs)
        return
    ours, theirs, nbytes = dst.tensor, src.tensor, length * unit
    for at, to in (spans * unit).tolist():
        ours[to : to + nbytes] = theirs[at : at + nbytes]
