"""What the fault cases share: small pools, holds, and clusters that several cases use one after another.

A case that succeeds must leave its cluster as it found it: quiet, with no more open files or shared memory than before.
A case that fails ends its cluster, and the next one starts another.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from equal import Model, answer, answers, compare, prompt_of
from harness import READY_S, LocalCluster, until

PAGE, CHUNK = 16, 64  # tokens a page, tokens a prefill chunk
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE  # layers, K and V, heads, dims, bytes
CHUNK_PAGES = CHUNK // PAGE  # also pages in a landing chunk
CANARIES = 20
TRANSPORTS = ("shm", "nixl")
ON_A_GPU = pytest.param("peer", marks=pytest.mark.gpu)
NIXL_FIRST = (pytest.param("shm", marks=pytest.mark.soak), "nixl", ON_A_GPU)  # shm in `make soak`, for its time
SHM_FIRST = ("shm", pytest.param("nixl", marks=pytest.mark.soak))


def pool(pages: int) -> int:
    """kv_bytes of a pool with that many usable pages."""
    return (pages + 1) * PAGE_BYTES


def settings(transport: str, **more: Any) -> dict[str, Any]:
    base = {"transport": transport, "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": CHUNK}
    return base | {"landing_chunk_bytes": CHUNK_PAGES * PAGE_BYTES, "stats_period_s": 0.1} | more


def body(prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more


def hold(cluster: LocalCluster, before_page: int, *workers: str) -> None:
    """Pause every transfer before this page, at these workers (all of them by default)."""
    for name in workers or [n for n in cluster.processes if n.startswith(("ctx", "gen"))]:
        cluster.faults(name, hold_before_page=before_page)


def in_flight(cluster: LocalCluster, number: int = 1) -> None:
    """Until so many hand-offs are between bind and valid."""
    until(
        lambda: cluster.metric("tailrace_transfers_in_flight", role="gen") >= number, 10,
        lambda: f"not {number} transfers",
    )  # fmt: skip


def leave(cluster: LocalCluster, prompt: Sequence[int], after_s: float, max_tokens: int = 8, **more: Any) -> None:
    """Ask, and hang up after a while without an answer."""
    with pytest.raises(httpx.TimeoutException):
        json = body(prompt, max_tokens, **more)
        httpx.post(f"{cluster.base_url}/v1/completions", json=json, timeout=httpx.Timeout(10, read=after_s))


class Asked:
    """A completion that was asked for on a connection of its own, which may be left at any moment."""

    def __init__(self, cluster: LocalCluster, prompt: Sequence[int], max_tokens: int = 8, **more: Any) -> None:
        url = httpx.URL(cluster.base_url)
        data = json.dumps(body(prompt, max_tokens, **more)).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        head += "Connection: close\r\n"
        self._socket = socket.create_connection((url.host, url.port), 10)
        self._socket.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def leave(self) -> None:
        self._socket.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, and look at nothing more."""
        self._socket.shutdown(socket.SHUT_WR)

    def read(self, size: int, limit_s: float = 30.0) -> bytes:
        """The next bytes of the reply, at most that many."""
        self._socket.settimeout(limit_s)
        return self._socket.recv(size)

    def reply(self, limit_s: float = 60.0) -> tuple[int, dict[str, Any]]:
        """(status, JSON) once all is there; TimeoutError if nothing comes for so long."""
        text = b""
        with self._socket:
            while part := self.read(1 << 16, limit_s):
                text += part
        head, _, content = text.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), json.loads(content)


def assert_left_none(cluster: LocalCluster) -> None:
    """Each worker has its region of shared memory, and none is left of those that were killed."""
    workers = sum(n.startswith(("ctx", "gen")) for n in cluster.processes)
    assert len(cluster.shared_memory()) == workers, cluster.shared_memory()


def seconds(call: Callable[..., Any], *args: Any) -> float:
    started = time.monotonic()
    call(*args)
    return time.monotonic() - started


def back_at_its_port(cluster: LocalCluster, *names: str) -> None:
    """Start successors of processes, each where its predecessor listened; returns when all serve."""
    for name in names:
        cluster.options[name] = [*cluster.options.get(name, []), "--port", str(cluster.processes[name].ready["port"])]
        cluster.launch(name.split("-")[0], name)
    for name in names:
        cluster.processes[name].await_ready(time.monotonic() + READY_S)


def said(cluster: LocalCluster, process: str, *words: str) -> bool:
    """Whether one line of its log has all these words."""
    return any(all(word in line for word in words) for line in cluster.processes[process].log.read_text().splitlines())


def router_sees(cluster: LocalCluster, state: str, number: int = 1) -> None:
    """Until the router believes so many requests to be in this state."""
    until(
        lambda: cluster.info()["requests"].get(state, 0) >= number, 10,
        lambda: f"not {number} {state}: {cluster.info()['requests']}",
    )  # fmt: skip


def prefilled(cluster: LocalCluster, worker: str) -> float:
    """Prompt positions that this worker has computed since it started."""
    return cluster.settled_metric("tailrace_prompt_positions_total", worker=worker, kind="computed")


def canary(cluster: LocalCluster, model: Model, idle_s: float, seed: int = 1000) -> None:
    """CANARY: fresh short requests are EQ, and take at most twice the best idle latency again.

    At least three are asked. Up to `CANARIES`, because other tests may run beside these: what a case left behind slows
    every canary, a neighbour only some.
    """
    prompts, choices, times = [], [], []
    while len(times) < 3 or (min(times) > 2 * idle_s + 0.02 and len(times) < CANARIES):
        prompts.append(prompt_of(PAGE + 5, 100 * seed + len(times)))
        started = time.monotonic()
        choices.append(answer(cluster, prompts[-1], 8))
        times.append(time.monotonic() - started)
    compare(model, prompts, choices, 8).check()
    assert min(times) <= 2 * idle_s + 0.02, (times, idle_s)


def idle_latency(cluster: LocalCluster) -> float:
    """Of a canary, the best of three."""
    return min(seconds(answer, cluster, prompt_of(PAGE + 5, 910 + s), 8) for s in range(3))


class Shared:
    """Clusters by name, each started when its first case needs it and closed with the module."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._clusters: dict[str, LocalCluster] = {}
        self._started = 0
        self._files: dict[int, int] = {}

    @contextlib.contextmanager
    def cluster(self, name: str, make: Callable[[Path], LocalCluster]) -> Iterator[LocalCluster]:
        """The cluster of this name for one case, with freed pages poisoned."""
        cluster = self._clusters.get(name)
        if cluster is None:
            self._started += 1
            cluster = make(self._path / f"{name}{self._started}")
            cluster.__enter__()
            self._clusters[name] = cluster
            cluster.poison()
            answers(
                cluster, [prompt_of(3 * CHUNK, s) for s in range(990, 998)], 2
            )  # links and landing memory are there
        names = set(cluster.processes)
        files = self._note_files(cluster)
        try:
            yield cluster
            cluster.poison()
            cluster.quiet()
            assert set(cluster.processes) == names and all(p.alive for p in cluster.processes.values())
            until(lambda: not self._more_files(cluster, files), 5, lambda: self._more_files(cluster, files))
            assert_left_none(cluster)
        except BaseException:
            del self._clusters[name]
            cluster.close()
            raise

    def _note_files(self, cluster: LocalCluster) -> dict[int, int]:
        """pid -> open files when it was first seen; what leaks a little in each case adds up."""
        now = cluster.open_files()
        for name, process in cluster.processes.items():
            self._files.setdefault(process.pid, now[name])
        return self._files

    @staticmethod
    def _more_files(cluster: LocalCluster, before: dict[int, int]) -> str:
        """Processes with more open files than before and a link to each other process; empty if there is none."""
        links = len(cluster.processes)
        now = {(n, p.pid): cluster.open_files()[n] for n, p in cluster.processes.items()}
        return " ".join(
            f"{name}: {number} open files, before {before[pid]}"
            for (name, pid), number in now.items()
            if number > before.get(pid, number) + links
        )

    def close(self) -> None:
        for cluster in self._clusters.values():
            cluster.close()
