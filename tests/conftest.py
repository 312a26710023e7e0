"""What every test session is held to: it leaves no process, no shared memory and no temporary Ray session behind."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import forked_process
import psutil
import pytest

SHM = Path("/dev/shm")
ALONE = ("e2e", "cluster", "soak")  # folders whose tests start several processes of ours, and time much of what they do
SIDE_BY_SIDE = (  # what of them compares answers and bytes, or starts nothing
    "test_cli", "test_config", "test_device", "test_discovery", "test_log", "test_made_transports", "test_manifests",
    "test_api", "test_backflow", "test_codecs", "test_equality", "test_grammars", "test_hand_off_cases",
    "test_model_view", "test_models_page", "test_placement", "test_tensor_parallel", "test_tokens",
    "test_unequal_pairs", "test_verify",
)  # fmt: skip
IN_PAIRS = (  # what starts processes and mostly waits for them, with bounds of a second or more
    "test_cases_operability", "test_deaths", "test_front", "test_local_serve", "test_other_transports", "test_pairs",
    "test_rank_group", "test_ray_directory", "test_serve_command", "test_supervisor", "test_sweep",
    "test_transfer_faults",
)  # fmt: skip
COLLECTED = pytest.StashKey[dict[str, set[str]]]()
BEFORE = pytest.StashKey[tuple[set[str], set[str]]]()


def _ours_in_shm() -> set[str]:
    return {p.name for p in SHM.iterdir() if p.name.startswith("tailrace-")} if SHM.is_dir() else set()


def _ray_sessions() -> set[str]:
    return {str(p) for p in Path(tempfile.gettempdir()).glob("tailrace*/session_*")}


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name in ALONE and item.path.stem not in SIDE_BY_SIDE:
            item.add_marker("in_pairs" if item.path.stem in IN_PAIRS else "alone")
    config.stash[COLLECTED] = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> dict[str, set[str]]:
    """Every test that was found, by its id, with the names of its marks; also those that -m left out."""
    return pytestconfig.stash[COLLECTED]


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = (_ours_in_shm(), _ray_sessions())


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What `nothing_is_left_behind` cannot say in one of several processes, their parent does."""
    several = session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput")
    if several and os.environ.get("CI") is not None:
        shm, sessions = session.config.stash[BEFORE]
        left = sorted((_ours_in_shm() - shm) | (_ray_sessions() - sessions))
        if left:
            sys.stderr.write(f"left behind: {left}\n")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """The last check of the session; it names what is left."""
    shm, sessions = _ours_in_shm(), _ray_sessions()
    yield
    started = psutil.Process().children(recursive=True)
    forked_process.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    processes = [f"{p.pid}: {' '.join(p.cmdline())[:120]}" for p in alive if _is_ours(p)]
    assert not processes, f"processes are left: {processes}"
    # Elsewhere another cluster, or the other half of the tests, may run beside these.
    alone = os.environ.get("CI") is not None and "PYTEST_XDIST_WORKER" not in os.environ
    left = {name for name in _ours_in_shm() - shm if alone or f"-t{os.getpid()}_" in name}
    assert not left, f"shared memory is left: {sorted(left)}"
    if alone:
        assert not _ray_sessions() - sessions, f"temporary Ray sessions are left: {sorted(_ray_sessions() - sessions)}"


def _is_ours(process: psutil.Process) -> bool:
    try:
        return any("tailrace" in word or "ray" in word for word in process.cmdline())
    except psutil.Error:
        return False
