"""The progress stamp: a few bytes of memory that a rank process writes and its supervisor reads at any time.

It needs no thread, no pipe and no cooperation of the reader, so a rank that is stopped, dead or deep in one long kernel
is seen as it is: its stamp ages. Whether that means stuck depends on the phase, each of which has its own limit.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from typing import Literal

from tailrace.cluster.config import TailraceConfig

Phase = Literal["load", "compile", "run"]
PHASES: tuple[Phase, ...] = ("load", "compile", "run")
_ROW = struct.Struct("<ddQ")  # monotonic time of the stamp, part of the phase done (0..1), index of the phase


@dataclass(frozen=True, slots=True)
class Progress:
    """What the stamp says. `fraction`: part of the phase that is done, as far as it is known."""

    phase: Phase
    stamp: float
    fraction: float


class ProgressStamp:
    """One stamp; `create` in the supervisor, `open` in the rank with the file descriptor that it inherited."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)

    @classmethod
    def create(cls) -> ProgressStamp:
        fd = os.memfd_create("tailrace-progress", os.MFD_CLOEXEC)
        os.ftruncate(fd, mmap.PAGESIZE)
        stamp = cls(fd)
        stamp.write("load", 0.0)
        return stamp

    def write(self, phase: Phase, fraction: float = 0.0, at: float | None = None) -> None:
        """Stamp with the time `at` (this host's monotonic clock), now if None."""
        row = _ROW.pack(time.monotonic() if at is None else at, fraction, PHASES.index(phase))
        self._memory[: _ROW.size] = row

    def read(self) -> Progress:
        stamp, fraction, index = _ROW.unpack(self._memory[: _ROW.size])
        return Progress(PHASES[index], stamp, fraction)

    def close_file(self) -> None:
        """Whoever is to open it has it by now; what is mapped here stays until this object goes."""
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class PhaseLimits:
    """Seconds without a new stamp after which a rank is stuck, by phase."""

    load: float
    compile: float
    run: float

    @classmethod
    def of(cls, config: TailraceConfig) -> PhaseLimits:
        return cls(config.load_limit_s, config.compile_limit_s, config.run_limit_s)


def verdict(progress: Progress, exit_code: int | None, limits: PhaseLimits, now: float) -> str | None:
    """Why the rank must be replaced, or None: it is idle, busy or still starting, all of which are well."""
    if exit_code is not None:
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with status {exit_code}"
        return f"dead: the rank process {how} in phase {progress.phase}"
    age, limit = now - progress.stamp, getattr(limits, progress.phase)
    if age > limit:
        return f"stuck: no progress for {age:.1f} s in phase {progress.phase}, whose limit is {limit:g} s"
    return None
