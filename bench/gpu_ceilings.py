"""What the GPU can do at most, measured in the same run as what is held against it: memory, matrix products."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch

_COPY_BYTES = 4 << 30
_SIDE = 8192
_REPEATS = 20


def seconds_of(run: Callable[[], object], repeats: int, *, warm_ups: int = 3) -> list[float]:
    """Seconds of each of so many runs, by the device's clock."""
    for _ in range(warm_ups):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in zip(marks, marks[1:], strict=False)]


@cache
def bandwidth() -> float:
    """bytes/s of a large copy inside the device, read and written bytes counted."""
    src = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    return 2 * _COPY_BYTES / statistics.median(seconds_of(lambda: dst.copy_(src), _REPEATS))


@cache
def matrix_rate() -> float:
    """FLOP/s of an 8192 x 8192 x 8192 bfloat16 product of random numbers."""
    a, b = (torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * _SIDE**3 / statistics.median(seconds_of(lambda: torch.mm(a, b, out=out), _REPEATS))


def card() -> str:
    """The GPU's name and what of it counts."""
    about = torch.cuda.get_device_properties(0)
    return f"{about.name}, {about.multi_processor_count} SMs, {about.total_memory / 2**30:.0f} GiB"
