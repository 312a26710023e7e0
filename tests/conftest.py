"""What every test session is held to: it leaves no process, no shared memory and no temporary Ray session behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SHM = Path("/dev/shm")


def _ours_in_shm() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith("tailrace-")} if SHM.is_dir() else set()


def _ray_sessions() -> set[str]:
    return {str(p) for p in Path(tempfile.gettempdir()).glob("tailrace*/session_*")}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """The last check of the session; it names what is left."""
    shm, sessions = _ours_in_shm(), _ray_sessions()
    yield
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=10)
    processes = [f"{p.pid}: {' '.join(p.cmdline())[:120]}" for p in alive if _is_ours(p)]
    assert not processes, f"processes are left: {processes}"
    alone = os.environ.get("CI") is not None  # elsewhere another cluster may run beside the tests
    left = {name for name in _ours_in_shm() - shm if alone or f"-t{os.getpid()}_" in name}
    assert not left, f"shared memory is left: {sorted(left)}"
    if alone:
        assert not _ray_sessions() - sessions, f"temporary Ray sessions are left: {sorted(_ray_sessions() - sessions)}"


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any("tailrace" in word or "ray" in word for word in process.cmdline())
    except psutil.Error:
        return False
