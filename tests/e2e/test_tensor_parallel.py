"""A9: prefill and decode over 1, 2 and 4 ranks each with 2 key-value heads, so that 4 ranks hold each of them twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from equal import Model, assert_equal, prompt_of, tiny
from harness import LocalCluster, until

TPS = {"gen-0": 1, "gen-1": 2, "gen-2": 4}
PAGE, CHUNK = 16, 64
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, CHUNK + 5, 3 * CHUNK + 3]
ROUNDS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


def ranks(role: str, tp: int) -> dict[str, object]:
    return {role: {"threads": 1, "tp": tp}}


@pytest.fixture(scope="module")
def over_shm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Gens of 1, 2 and 4 ranks; each test brings the ctx that they read from."""
    each = {name: ranks("gen", tp) for name, tp in TPS.items()} | {f"ctx-{tp}": ranks("ctx", tp) for tp in (1, 2, 4)}
    config = {"transport": "shm", "tokens_per_page": PAGE, "max_num_tokens": CHUNK, "local_prefill": "never"}
    with LocalCluster(
        tmp_path_factory.mktemp("shm"), model.spec, ctx=0, gen=3, per_process=each, kv_bytes=16 * 2**20, **config
    ) as cluster:
        cluster.poison()
        yield cluster


def with_ctx(cluster: LocalCluster, tp: int) -> None:
    """Let exactly the ctx of `tp` ranks live."""
    for name, process in cluster.processes.items():
        if name.startswith("ctx") and name != f"ctx-{tp}" and process.alive:
            process.popen.terminate()
            assert process.popen.wait(15) == 0, process.log.read_text()[-2000:]
    if f"ctx-{tp}" not in cluster.processes or not cluster.processes[f"ctx-{tp}"].alive:
        cluster.start("ctx", f"ctx-{tp}")
    until(lambda: len(cluster.info()["pairs"]) == len(TPS), 20, lambda: f"pairs: {cluster.info()['pairs']}")
    cluster.faults(f"ctx-{tp}")


def moved(cluster: LocalCluster) -> dict[str, float]:
    """Bytes of pages that each gen has read."""
    return {gen: cluster.settled_metric("tailrace_transfer_bytes_total", kind="logical", worker=gen) for gen in TPS}


def ask_until_all_have_read(cluster: LocalCluster, model: Model, seed: int) -> None:
    """Fresh prompts, EQ each, until every gen has read pages of this ctx."""
    before = moved(cluster)
    for round_number in range(ROUNDS):
        prompts = [prompt_of(n, seed + 100 * round_number + i) for i, n in enumerate(LENGTHS)]
        assert_equal(cluster, model, prompts, 10)
        after = moved(cluster)
        if all(after[gen] > before[gen] for gen in TPS):
            return
    raise AssertionError(f"some gens read nothing: {before}, {after}")


@pytest.mark.parametrize("tp", [*(pytest.param(tp, marks=pytest.mark.soak) for tp in (1, 2)), 4])
def test_a_ctx_of_any_number_of_ranks_hands_off_to_gens_of_1_2_and_4(over_shm: LocalCluster, model: Model, tp: int):
    with_ctx(over_shm, tp)
    ask_until_all_have_read(over_shm, model, 1000 * tp)
    assert over_shm.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
    over_shm.quiet()


def rank_processes(cluster: LocalCluster, name: str) -> list[int]:
    """Of a worker, rank 0 first."""
    pids = [child.pid for child in psutil.Process(cluster.processes[name].pid).children()]
    first = cluster.processes[name].ready["pid"]
    assert first in pids
    return sorted(pids, key=lambda pid: (pid != first, pid))


@pytest.mark.parametrize(
    ("worker", "tp"),
    [pytest.param("gen-2", 4, marks=pytest.mark.soak), pytest.param("ctx-2", 2, marks=pytest.mark.soak)],
)
def test_a_killed_rank_takes_its_worker_with_it_which_serves_again_as_a_new_boot(
    over_shm: LocalCluster, model: Model, worker: str, tp: int
):
    with_ctx(over_shm, 2)
    before, pids = over_shm.processes[worker].ready["boot"], rank_processes(over_shm, worker)
    arenas = [name for name in over_shm.shared_memory() if before in name]
    assert len(pids) == len(arenas) == tp
    os.kill(pids[-1], signal.SIGKILL)
    process = over_shm.processes[worker]
    assert process.popen.wait(15) != 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert f"rank {tp - 1}: dead: the rank process was killed by signal 9" in process.log.read_text()
    again = over_shm.start(worker.split("-")[0], worker)
    assert again.ready["boot"] != before
    assert not [name for name in over_shm.shared_memory() if before in name]
    until(lambda: len(over_shm.info()["pairs"]) == len(TPS), 20, lambda: f"pairs: {over_shm.info()['pairs']}")
    over_shm.faults(worker)
    ask_until_all_have_read(over_shm, model, 5000 if worker == "gen-2" else 6000)
    over_shm.quiet()


def test_e10_a_killed_supervisor_takes_all_ranks_along(over_shm: LocalCluster, model: Model):
    pids = rank_processes(over_shm, "gen-1")
    over_shm.kill("gen-1")
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    over_shm.start("gen", "gen-1")
    with_ctx(over_shm, 2)
    assert_equal(over_shm, model, [prompt_of(40, 7)], 4)


@pytest.mark.soak
def test_pages_of_several_ranks_cross_in_landing_chunks_too(model: Model, tmp_path: Path):
    """Over nixl: from 2 ranks to 4, and to 1."""
    each = {"gen-0": ranks("gen", 4), "gen-1": ranks("gen", 1)}
    config = {"transport": "nixl", "tokens_per_page": PAGE, "max_num_tokens": CHUNK, "local_prefill": "never"}
    with LocalCluster(
        tmp_path, model.spec, gen=2, ctx_config={"tp": 2}, per_process=each, kv_bytes=16 * 2**20, **config
    ) as cluster:
        cluster.poison()
        for round_number in range(ROUNDS):
            prompts = [prompt_of(n, 9000 + 100 * round_number + i) for i, n in enumerate(LENGTHS)]
            assert_equal(cluster, model, prompts, 10)
            read = [cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire", worker=gen) for gen in each]
            if all(read):
                break
        assert all(read), read
        cluster.quiet()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("transport", ["shm", "nixl"])
def test_ranks_page_sizes_and_chunks_that_fit_nothing_together(tmp_path: Path, family: str, transport: str):
    """The nine pairs with ctx pages of 8 tokens, gen pages of 64, chunks of 20, and with mistral a window of 24."""
    model = tiny(tmp_path / "model", family)
    pages = {"ctx": {"threads": 1, "tokens_per_page": 8}, "gen": {"threads": 1, "tokens_per_page": 64}}
    each = {name: {**pages, "gen": {**pages["gen"], "tp": tp}} for name, tp in TPS.items()}
    each |= {f"ctx-{tp}": {**pages, "ctx": {**pages["ctx"], "tp": tp}} for tp in (1, 2, 4)}
    config = {"transport": transport, "max_num_tokens": 20, "max_batch_size": 8, "local_prefill": "never"}
    with LocalCluster(
        tmp_path / "c", model.spec, ctx=0, gen=3, per_process=each, kv_bytes=16 * 2**20,
        ctx_config=pages["ctx"], gen_config=pages["gen"], **config,
    ) as cluster:  # fmt: skip
        cluster.poison()
        for tp in (1, 2, 4):
            with_ctx(cluster, tp)
            ask_until_all_have_read(cluster, model, 1000 * tp)
            cluster.quiet()
