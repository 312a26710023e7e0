"""A supervisor of several ranks: they start, serve and end together. Stand-ins for ranks, then the product's own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from checkpoints import write_tiny_checkpoint

from tailrace.cluster.discovery import FileDirectory
from tailrace.cluster.progress import PhaseLimits
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.supervisor import Supervisor
from tailrace.kv_cache.arena import SHARED_MEMORY
from tailrace.model.errors import WorkerError

HERE = Path(__file__).parent
LIMITS = PhaseLimits(load=30, compile=30, run=2.0)


def supervisor(tmp_path: Path, behaviour: str, tp: int = 4, limits: PhaseLimits = LIMITS) -> Supervisor:
    spec = RankSpec("ctx", "ctx-0", "127.0.0.1", {"model": "smollm2", "ctx": {"tp": tp}}, "s" * 32)
    command = (sys.executable, str(HERE / "fake_rank.py"), behaviour, str(tmp_path))
    return Supervisor(spec, limits, FileDirectory(tmp_path / "dir"), command=command)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def gone(pids: list[int], limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def test_the_ranks_of_a_worker_share_a_boot_id_and_end_together(tmp_path):
    s = supervisor(tmp_path, "lives")
    ready = await s.start()
    pids = s.pids
    heard = [tmp_path / f"heard.{rank}" for rank in (1, 2, 3)]
    specs = [json.loads(path.read_text().splitlines()[0]) for path in (tmp_path / "heard", *heard)]
    assert [spec["rank"] for spec in specs] == [0, 1, 2, 3] and {spec["boot"] for spec in specs} == {ready.boot}
    assert len(set(pids)) == 4 and ready.pid == pids[0] == s.pid
    s.check()
    await s.stop()
    assert await s.wait() == 0 and not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("rank", [0, 3])
async def test_one_dead_rank_ends_the_others_at_once(tmp_path, rank):
    s = supervisor(tmp_path, "lives")
    await s.start()
    pids = s.pids
    os.kill(pids[rank], signal.SIGKILL)
    await gone(pids)
    assert await s.wait() == -signal.SIGKILL and not s.well
    with pytest.raises(WorkerError, match=f"rank {rank}: dead: the rank process was killed by signal 9 in phase run"):
        s.check()
    await s.stop()


async def test_one_stopped_rank_is_stuck_and_so_is_the_worker(tmp_path):
    s = supervisor(tmp_path, "lives")
    await s.start()
    pids = s.pids
    os.kill(pids[2], signal.SIGSTOP)
    with pytest.raises(WorkerError, match="rank 2: stuck: no progress for"):
        async with asyncio.timeout(20):
            while True:
                s.check()
                await asyncio.sleep(0.05)
    await gone(pids)
    await s.stop()


async def test_all_ranks_that_stand_still_are_told(tmp_path):
    """One that is stopped stops the others at their next sum, and nobody can tell which it was."""
    s = supervisor(tmp_path, "stuck", tp=2)
    await s.start()
    with pytest.raises(WorkerError, match=r"rank (0|1): stuck: .* s \(rank (1|0): none for \d"):
        async with asyncio.timeout(20):
            while True:
                s.check()
                await asyncio.sleep(0.05)
    await s.stop()


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("fails@1", "did not start: rank 1: kv_bytes: too small for this model"),
        ("dies@2", "did not start: rank 2: dead: the rank process was killed by signal 9 in phase load"),
        ("hangs_in_load@3", "did not start: rank 3: stuck: no progress for .* in phase load"),
    ],
)
async def test_a_rank_that_does_not_start_is_named_and_no_rank_is_left(tmp_path, behaviour, reason):
    s = supervisor(tmp_path, behaviour, limits=PhaseLimits(load=2.0, compile=20, run=20))
    with pytest.raises(WorkerError, match=reason):
        await s.start()
    await s.stop(0.0)
    assert not any(alive(pid) for pid in s.pids)


async def test_only_rank_0_is_told_where_the_router_is(tmp_path):
    s = supervisor(tmp_path, "lives", tp=2)
    await s.start()
    s.directory.publish("router", {"host": "127.0.0.1", "port": 1, "boot": "a"})
    async with asyncio.timeout(10):
        while "router" not in (tmp_path / "heard").read_text():
            await asyncio.sleep(0.02)
    assert len((tmp_path / "heard.1").read_text().splitlines()) == 1
    await s.stop()


# ------------------------------------------------------------------------------------------------ the product's ranks


def real(tmp_path: Path, *command: str) -> Supervisor:
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    args = {
        "model": str(model), "dtype": "float32", "kv_bytes": 2**22, "max_num_tokens": 32, "max_batch_size": 4,
        "app_name": f"t{os.getpid()}_ranks", "gen": {"tp": 2, "threads": 1}, "transport": "shm",
    }  # fmt: skip
    spec = RankSpec("gen", "gen-0", "127.0.0.1", args, "s" * 32)
    return Supervisor(
        spec, PhaseLimits(60, 60, 30), FileDirectory(tmp_path / "dir"), command=(sys.executable, *command)
    )


def arenas() -> list[str]:
    return sorted(path.name for path in SHARED_MEMORY.glob(f"tailrace-t{os.getpid()}_ranks-*"))


async def test_real_ranks_start_and_end_and_the_next_boot_removes_what_a_kill_left(tmp_path, capfd):
    """B20 for a group: each rank has an arena of one boot id; SIGKILL leaves them, the next start does not."""
    first = real(tmp_path, "-m", "tailrace.cluster.rank")
    ready = await first.start()
    pids, left = first.pids, arenas()
    assert len(left) == 2 and all(ready.boot in name for name in left) and left[1] == f"{left[0]}_r1"
    os.kill(pids[0], signal.SIGKILL)
    await gone(pids)
    await first.stop()
    assert arenas() == left and "Traceback" not in capfd.readouterr().err
    second = real(tmp_path, "-m", "tailrace.cluster.rank")
    again = await second.start()
    assert again.boot != ready.boot and len(arenas()) == 2 and not set(arenas()) & set(left)
    pids = second.pids
    await second.stop()
    assert arenas() == [] and await second.wait() == 0 and not any(alive(pid) for pid in pids)
    said = capfd.readouterr().err
    assert [said.count(f'"event": "{event}"') for event in ("rank_starts", "rank_ready", "rank_ends")] == [2, 1, 1]


async def test_a_rank_that_cannot_load_votes_no_and_its_reason_is_the_workers(tmp_path):
    s = real(tmp_path, str(HERE / "sabotaged_rank.py"))
    with pytest.raises(WorkerError, match="did not start: rank .*layers.1.up_proj.weight: the file ends before it"):
        await s.start()
    assert not any(alive(pid) for pid in s.pids)
    for name in arenas():
        (SHARED_MEMORY / name).unlink()  # rank 0 was killed with the others, as its successor would find them
