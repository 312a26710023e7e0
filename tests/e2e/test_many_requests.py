"""Case B26: many clients and few files. The cluster runs as operators run it: without any fault hook."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from equal import Model, assert_equal, prompt_of, tiny
from fault_cases import PAGE, Asked, settings
from harness import LocalCluster, until

MAX_OPEN_FILES = 256
WAVES, WAVE, ABORTS = 10, 100, 20  # 1000 requests and 200 more that are left


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module", params=["nixl", pytest.param("shm", marks=pytest.mark.soak)])
def cluster(request: pytest.FixtureRequest, model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    config = settings(request.param, max_request_tokens=500) | {"faults": False}
    folder = tmp_path_factory.mktemp("cluster")
    with LocalCluster(folder, model.spec, max_open_files=MAX_OPEN_FILES, **config) as running:
        yield running


def one_more(cluster: LocalCluster, number: int) -> int:
    status, reply = Asked(cluster, prompt_of(PAGE + number % 40, 10_000 + number)).reply()
    assert "choices" in reply if status == 200 else reply["error"]["code"], reply
    return status


def left(cluster: LocalCluster, number: int) -> None:
    asked = Asked(cluster, prompt_of(2 * PAGE, 30_000 + number), 100)
    time.sleep(random.Random(number).uniform(0, 0.5))
    asked.leave()


def test_b26_waves_of_clients_with_few_files_are_served_or_refused_and_every_file_comes_back(cluster, model):
    assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(8)])
    cluster.quiet()
    before, statuses = cluster.open_files(), Counter[int]()
    for wave in range(WAVES):
        with ThreadPoolExecutor(WAVE + ABORTS) as threads:
            gone = [threads.submit(left, cluster, wave * ABORTS + n) for n in range(ABORTS)]
            statuses.update(threads.map(lambda n: one_more(cluster, n), range(wave * WAVE, (wave + 1) * WAVE)))
            for each in gone:
                each.result()
    assert sum(statuses.values()) == WAVES * WAVE
    assert set(statuses) <= {200, 429, 503}, statuses
    assert statuses[200] >= WAVES * WAVE / 2, statuses
    cluster.quiet()
    until(lambda: _more(cluster, before) == {}, 10, lambda: f"open files {_more(cluster, before)}, before {before}")
    assert all(process.alive for process in cluster.processes.values())


def test_b26_more_connections_than_files_do_not_close_the_door_for_good(cluster, model):
    assert one_more(cluster, 4) == 200  # the ingress has dialled its workers
    before = cluster.open_files()
    url = httpx.URL(cluster.base_url)
    with contextlib.ExitStack() as idle:
        for _ in range(MAX_OPEN_FILES + 50):
            idle.enter_context(contextlib.closing(_connected(url)))
        time.sleep(1.0)
    until(lambda: one_more(cluster, 5) == 200, 10, lambda: "the listener is dead")
    assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(20, 28)])
    cluster.quiet()
    until(lambda: _more(cluster, before) == {}, 10, lambda: f"open files {_more(cluster, before)}, before {before}")


def _connected(url: httpx.URL) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(0.5)
    with contextlib.suppress(OSError):
        sock.connect((url.host, url.port))
    return sock


def _more(cluster: LocalCluster, before: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in cluster.open_files().items() if number > before[name]}


def test_no_fault_hook_is_there_unless_it_is_configured(cluster):
    """Neither port knows the path. That a worker obeys no frame either is held in tests/transfer/test_node.py."""
    for base in (cluster.operators, cluster.base_url):
        for plan in ({"hold_before_page": 0}, {"preempt": 1}, {"poison": True}):
            reply = httpx.post(f"{base}/debug/faults", json={"worker": "gen-0", "faults": plan}, timeout=5)
            assert reply.status_code == 404, reply.text
    assert "faults_set" not in cluster.processes["gen-0"].log.read_text()
