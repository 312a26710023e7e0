"""A supervisor against rank processes that live, fail, die, hang and will not go."""

import asyncio
import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tailrace.cluster.discovery import FileDirectory
from tailrace.cluster.progress import PhaseLimits, Progress, ProgressStamp, verdict
from tailrace.cluster.rank import ThreadDeaths, set_thread_environment
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.supervisor import Supervisor
from tailrace.model.errors import ConfigError, WorkerError

FAKE = Path(__file__).parent / "fake_rank.py"
LIMITS = PhaseLimits(load=20, compile=20, run=1.0)


def supervisor(tmp_path: Path, behaviour: str, limits: PhaseLimits = LIMITS) -> Supervisor:
    spec = RankSpec("ctx", "ctx-0", "127.0.0.1", {"model": "smollm2"}, "s" * 32)
    command = (sys.executable, str(FAKE), behaviour, str(tmp_path))
    return Supervisor(spec, limits, FileDirectory(tmp_path / "dir"), command=command)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def until(condition, limit_s: float = 5.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_a_rank_is_started_reported_and_ended_in_order(tmp_path):
    s = supervisor(tmp_path, "lives")
    ready = await s.start()
    assert ready.port == 4711 and ready.pid == s.pid
    assert s.directory.lookup("worker.ctx-0")["phase"] == "ready"
    s.check()
    await s.stop()
    assert await s.wait() == 0
    assert not alive(ready.pid)
    assert s.directory.names("worker.") == []


async def test_the_secret_reaches_the_rank_but_no_command_line(tmp_path):
    s = supervisor(tmp_path, "lives")
    ready = await s.start()
    assert json.loads((tmp_path / "heard").read_text().splitlines()[0])["secret"] == "s" * 32
    assert "s" * 32 not in Path(f"/proc/{ready.pid}/cmdline").read_text()
    assert "s" * 32 not in Path(f"/proc/{ready.pid}/environ").read_text()
    await s.stop()


async def test_a_failed_start_tells_the_ranks_own_reason(tmp_path):
    s = supervisor(tmp_path, "fails")
    with pytest.raises(WorkerError, match="did not start: kv_bytes: too small for this model"):
        await s.start()
    await s.stop()
    assert s.directory.lookup("worker.ctx-0")["reason"] == "kv_bytes: too small for this model"


class Broken(FileDirectory):
    """A store whose answers nobody foresaw, once `breaks` is set."""

    breaks = False

    def lookup(self, name):
        if self.breaks:
            raise TypeError("an answer of no known kind")
        return super().lookup(name)


async def test_a_worker_that_is_no_longer_told_where_the_router_is_is_replaced(tmp_path):
    s = supervisor(tmp_path, "lives")
    s.directory = Broken(tmp_path / "dir")
    await s.start()
    s.check()
    s.directory.breaks = True
    await until(lambda: s._following.done())
    with pytest.raises(WorkerError, match="following the router failed: TypeError"):
        s.check()
    await s.stop()
    s.check()


async def test_no_file_stays_open_behind_a_rank_whether_it_started_or_not(tmp_path):
    def files() -> set[str]:
        gc.collect()
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return {os.readlink(link) for link in links if os.path.lexists(link)}

    await asyncio.to_thread(time.sleep, 0)  # its thread has files of its own
    before = files()
    s = supervisor(tmp_path, "lives")
    await s.start()
    await s.stop()
    del s
    s = supervisor(tmp_path, "lives")
    s.command = ("/no/such/program",)
    with pytest.raises(FileNotFoundError):
        await s.start()
    del s
    await until(lambda: files() <= before)


def test_a_thread_that_dies_of_a_fault_ends_its_rank(monkeypatch, caplog):
    stop = threading.Event()
    deaths = ThreadDeaths(stop)
    deaths.raise_first()
    monkeypatch.setattr(threading, "excepthook", deaths)
    for end in (SystemExit(0), KeyError("host")):
        thread = threading.Thread(target=_raise, args=(end,), name="follow")
        thread.start()
        thread.join()
        assert stop.is_set() == isinstance(end, KeyError)
    with pytest.raises(WorkerError, match="thread 'follow' failed: KeyError"):
        deaths.raise_first()
    (record,) = caplog.records
    assert record.msg == "thread_failed" and record.fields["thread"] == "follow" and record.exc_info


def _raise(error: BaseException) -> None:
    raise error


async def test_a_rank_that_dies_in_load_is_a_failed_start(tmp_path):
    with pytest.raises(WorkerError, match="killed by signal 9 in phase load"):
        await supervisor(tmp_path, "dies").start()


async def test_a_rank_that_hangs_in_load_is_killed_at_the_limit_of_load(tmp_path):
    s = supervisor(tmp_path, "hangs_in_load", PhaseLimits(load=1.0, compile=20, run=20))
    with pytest.raises(WorkerError, match="stuck: no progress for 1.* s in phase load, whose limit is 1 s"):
        await s.start()
    assert not alive(s.pid)


async def test_a_start_with_progress_may_take_longer_than_the_limit(tmp_path):
    s = supervisor(tmp_path, "slow", PhaseLimits(load=0.9, compile=20, run=20))
    await s.start()
    await s.stop()


async def test_a_dead_rank_is_unhealthy(tmp_path):
    s = supervisor(tmp_path, "lives")
    await s.start()
    os.kill(s.pid, signal.SIGKILL)
    await s.wait()
    with pytest.raises(WorkerError, match="dead: the rank process was killed by signal 9 in phase run"):
        s.check()
    await s.stop()


async def test_a_busy_rank_is_healthy_and_a_stuck_one_is_not(tmp_path):
    busy = supervisor(tmp_path, "busy_once")
    await busy.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        busy.check()
        await asyncio.sleep(0.05)
    await busy.stop()
    stuck = supervisor(tmp_path, "stuck")
    await stuck.start()
    await asyncio.sleep(1.1)
    with pytest.raises(WorkerError, match="stuck: no progress"):
        stuck.check()
    await until(lambda: not alive(stuck.pid))
    await stuck.stop()


async def test_a_stopped_rank_is_stuck(tmp_path):
    s = supervisor(tmp_path, "lives")
    await s.start()
    os.kill(s.pid, signal.SIGSTOP)
    await asyncio.sleep(1.2)
    with pytest.raises(WorkerError, match="stuck"):
        s.check()
    await s.stop()
    assert not alive(s.pid)


async def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(tmp_path):
    s = supervisor(tmp_path, "deaf")
    await s.start()
    await s.stop(0.3)
    assert await s.wait() == -signal.SIGKILL


async def test_the_ranks_own_children_go_with_it(tmp_path):
    s = supervisor(tmp_path, "child")
    await s.start()
    children = Path(f"/proc/{s.pid}/task/{s.pid}/children").read_text().split()
    assert len(children) == 1
    os.kill(s.pid, signal.SIGKILL)
    await s.wait()
    await s.stop()
    await until(lambda: not alive(int(children[0])))


async def test_the_router_is_told_when_known_and_again_when_it_changes(tmp_path):
    s = supervisor(tmp_path, "lives")
    await s.start()

    def heard() -> list:
        return [json.loads(line) for line in (tmp_path / "heard").read_text().splitlines()[1:]]

    first, second = ({"host": "127.0.0.1", "port": 1, "boot": b} for b in ("a", "b"))
    s.directory.publish("router", first)
    await until(lambda: heard() == [{"router": first}])
    s.directory.publish("router", second)
    await until(lambda: heard() == [{"router": first}, {"router": second}])
    await s.stop()


async def test_a_drain_ends_when_the_rank_says_so_or_at_its_limit(tmp_path):
    s = supervisor(tmp_path, "drains")
    await s.start()
    assert await s.drain(5.0)
    await s.stop()
    s = supervisor(tmp_path, "lives")
    await s.start()
    started = time.monotonic()
    assert not await s.drain(0.3)
    assert time.monotonic() - started < 2
    await s.stop()


@pytest.mark.parametrize(
    ("progress", "code", "wanted"),
    [
        (Progress("load", 0.0, 0.5), None, None),
        (Progress("load", -21.0, 0.5), None, "stuck: no progress for 21.0 s in phase load"),
        (Progress("compile", -19.0, 0.0), None, None),
        (Progress("run", -0.9, 0.0), None, None),
        (Progress("run", -1.1, 0.0), None, "in phase run, whose limit is 1 s"),
        (Progress("run", 0.0, 0.0), 3, "dead: the rank process exited with status 3"),
        (Progress("run", 0.0, 0.0), -11, "was killed by signal 11"),
    ],
)
def test_busy_is_not_dead_and_stuck_is(progress, code, wanted):
    said = verdict(progress, code, LIMITS, now=0.0)
    assert (said is None) if wanted is None else wanted in said


def test_a_stamp_is_read_as_written():
    stamp = ProgressStamp.create()
    assert stamp.read().phase == "load"
    stamp.write("compile", 0.25, at=12.5)
    other = ProgressStamp(os.dup(stamp.fd))
    assert other.read() == Progress("compile", 12.5, 0.25)
    stamp.close_file()
    other.write("run", 0.0, at=13.0)
    assert stamp.read().stamp == 13.0
    other.close_file()


def test_a_worker_without_a_role_is_refused():
    with pytest.raises(ConfigError, match="role: '' is neither ctx nor gen"):
        RankSpec("", "w", "127.0.0.1", {}, "s" * 32)


def test_a_torch_that_has_read_other_thread_settings_is_refused_and_one_that_has_read_these_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("torch")
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(RuntimeError, match="has read other settings"):
        set_thread_environment(3)
    assert os.environ["OMP_NUM_THREADS"] == "0"
    settings = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert set_thread_environment(3) == 3
    with pytest.raises(RuntimeError):
        set_thread_environment(2)
