"""Removes what a local cluster may leave: processes, its temporary folder, shared memory; and the watchdog for it.

A process belongs to a session if its environment names the session's folder as Ray's temporary directory (every process
that Ray starts inherits that, HAProxy and our rank processes too), or if it has a file of that folder open (a process
that renames itself overwrites its environment). The watchdog is a small process of its own group
that holds a pipe from the driver: when the driver is gone, however it went, the pipe ends and the watchdog sweeps.

    python -m tailrace.cluster.sweep FOLDER APP        (run by cluster/launcher.py, stdin is the pipe)

It touches only processes with that marker, that folder, and page arenas of that application whose owner is dead.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from tailrace.kv_cache.arena import SHARED_MEMORY

MARKER = "RAY_TMPDIR"
PROC = Path("/proc")
KILL_LIMIT_S = 5.0
ARENA_CALM_S = 0.5


def members(folder: Path) -> list[int]:
    """Process ids that belong to the session of `folder`, this process left out."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if not _zombie(entry) and (_marked(entry, folder) or _has_open(entry, folder)):
                    found.append(int(entry.name))
    return found


def _marked(entry: Path, folder: Path) -> bool:
    return f"{MARKER}={folder}".encode() in (entry / "environ").read_bytes().split(b"\0")


def _has_open(entry: Path, folder: Path) -> bool:
    inside = f"{folder}/"
    for link in (entry / "fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(inside):
                return True
    return False


def _zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def kill_members(folder: Path, spare: frozenset[int] = frozenset(), limit_s: float = KILL_LIMIT_S) -> list[int]:
    """SIGKILL every member but `spare` until none is left; returns those that would not go within the limit."""
    end = time.monotonic() + limit_s
    while left := [pid for pid in members(folder) if pid not in spare]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return []


def orphan_arenas(app: str, directory: Path = SHARED_MEMORY) -> list[Path]:
    """Page arenas of the application that no living process has mapped for writing."""
    names = {str(path): path for path in directory.glob(f"tailrace-{app}-*")}
    if not names:
        return []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for line in (entry / "maps").read_text().splitlines():
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and parts[5] in names and "w" in parts[1]:
                    del names[parts[5]]
    return list(names.values())


def unlink_orphans(app: str, directory: Path = SHARED_MEMORY) -> list[str]:
    """Unlink arenas without an owner. Looked at twice: one that is being made is not mapped yet."""
    first = set(orphan_arenas(app, directory))
    if not first:
        return []
    time.sleep(ARENA_CALM_S)
    gone = sorted(first.intersection(orphan_arenas(app, directory)))
    for path in gone:
        path.unlink(missing_ok=True)
    return [path.name for path in gone]


def sweep(folder: Path, app: str, spare: frozenset[int] = frozenset()) -> list[int]:
    """Everything of the session: processes, folder, arenas. Returns processes that would not die."""
    left = kill_members(folder, spare)
    unlink_orphans(app)
    shutil.rmtree(folder, ignore_errors=True)
    return left


def main() -> None:
    folder, app = Path(sys.argv[1]), sys.argv[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its pipe, after its work
    while os.read(0, 4096):
        continue
    if folder.exists():
        sweep(folder, app)


if __name__ == "__main__":
    main()
