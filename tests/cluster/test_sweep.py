"""What is swept away after a local cluster, and what is left alone."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace.cluster.launcher import check_port_free, free_ports
from tailrace.cluster.sweep import MARKER, kill_members, members, orphan_arenas, sweep, unlink_orphans
from tailrace.model.errors import ConfigError

SLEEP = "import time; time.sleep(60)"
OWNER = """
import sys, time
from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.layout import PageLayout
from tailrace.model.state_groups import Field, GroupKind, StateGroup
layout = PageLayout(StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, 8),)), 16, "float32")
arena = Arena.create(arena_name(sys.argv[1], "ctx-0", sys.argv[2]), layout, 4)
print(arena.name, flush=True)
time.sleep(60)
"""


@pytest.fixture
def started():
    """Starts python processes; whatever is left of them is killed at the end."""
    processes: list[subprocess.Popen] = []

    def start(code: str, *arguments: str, **options) -> subprocess.Popen:
        processes.append(subprocess.Popen([sys.executable, "-c", code, *arguments], **options))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def until(condition, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def test_members_are_known_by_environment_or_open_file_and_strangers_are_not(tmp_path, started):
    folder, other = tmp_path / "session", tmp_path / "session2"
    folder.mkdir()
    marked = started(SLEEP, env={**os.environ, MARKER: str(folder)})
    holder = started(
        f"f = open({str(folder / 'log')!r}, 'w'); print('open', flush=True); {SLEEP}", stdout=subprocess.PIPE
    )
    stranger = started(SLEEP, env={**os.environ, MARKER: str(other)})
    holder.stdout.readline()
    until(lambda: set(members(folder)) == {marked.pid, holder.pid})
    assert kill_members(folder) == []
    assert marked.wait() == holder.wait() == -signal.SIGKILL
    assert stranger.poll() is None


def test_a_spared_process_stays(tmp_path, started):
    spared = started(SLEEP, env={**os.environ, MARKER: str(tmp_path)})
    until(lambda: members(tmp_path) == [spared.pid])
    assert kill_members(tmp_path, frozenset({spared.pid})) == []
    assert spared.poll() is None


def test_an_arena_is_unlinked_only_when_its_owner_is_dead(started):
    app = f"sweeptest{os.getpid()}"
    living, dead = (started(OWNER, app, boot, stdout=subprocess.PIPE, text=True) for boot in ("a", "b"))
    names = [process.stdout.readline().strip() for process in (living, dead)]
    assert orphan_arenas(app) == []
    dead.kill()
    dead.wait()
    assert [path.name for path in orphan_arenas(app)] == [names[1]]
    assert unlink_orphans(app) == [names[1]]
    assert Path("/dev/shm", names[0]).exists()
    living.kill()
    living.wait()
    assert unlink_orphans(app) == [names[0]]


def test_another_applications_arena_is_left_alone(started):
    app = f"sweeptest{os.getpid()}x"
    process = started(OWNER, app, "a", stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    process.kill()
    process.wait()
    assert unlink_orphans("somethingelse") == []
    assert Path("/dev/shm", name).exists()
    assert unlink_orphans(app) == [name]


def test_the_watchdog_sweeps_when_its_driver_is_killed(tmp_path, started):
    folder = tmp_path / "session"
    folder.mkdir()
    driver = (
        "import subprocess, sys, time\n"
        "w = subprocess.Popen([sys.executable, '-m', 'tailrace.cluster.sweep', sys.argv[1], 'none'],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "print(w.pid, flush=True)\ntime.sleep(60)"
    )
    process = started(driver, str(folder), stdout=subprocess.PIPE, text=True)
    watchdog = int(process.stdout.readline())
    member = started(SLEEP, env={**os.environ, MARKER: str(folder)})
    time.sleep(0.5)
    assert member.poll() is None
    process.kill()
    assert member.wait(5) == -signal.SIGKILL
    until(lambda: not folder.exists())
    until(lambda: not Path(f"/proc/{watchdog}").exists())


def test_the_watchdog_does_nothing_when_the_driver_has_cleaned_up(tmp_path, started):
    folder = tmp_path / "gone"
    process = subprocess.Popen(
        [sys.executable, "-m", "tailrace.cluster.sweep", str(folder), "none"], stdin=subprocess.PIPE
    )
    member = started(SLEEP, env={**os.environ, MARKER: str(folder)})
    process.stdin.close()
    assert process.wait(5) == 0
    assert member.poll() is None


def test_sweeping_removes_the_folder(tmp_path):
    folder = tmp_path / "session"
    (folder / "logs").mkdir(parents=True)
    assert sweep(folder, "none") == []
    assert not folder.exists()


def test_a_port_in_use_is_refused_by_name_and_number():
    (port,) = free_ports(1)
    check_port_free("127.0.0.1", port, "operators_port")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=f"operators_port: port {port} on 127.0.0.1 cannot be used"):
            check_port_free("127.0.0.1", port, "operators_port")
    assert len(set(free_ports(8))) == 8
