"""What the fault cases share: small pools, holds, and clusters that several cases use one after another.

A case that succeeds must leave its cluster as it found it: quiet, with no more open files or shared memory than before.
A case that fails ends its cluster, and the next one starts another.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from equal import Model, answer, answers, compare, prompt_of
from harness import LocalCluster, until

PAGE, CHUNK = 16, 64  # tokens a page, tokens a prefill chunk
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE  # layers, K and V, heads, dims, bytes
CHUNK_PAGES = CHUNK // PAGE  # also pages in a landing chunk
TRANSPORTS = ("shm", "nixl")


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


def seconds(call: Callable[..., Any], *args: Any) -> float:
    started = time.monotonic()
    call(*args)
    return time.monotonic() - started


def canary(cluster: LocalCluster, model: Model, idle_s: float, seed: int = 1000) -> None:
    """CANARY: fresh short requests are EQ and take at most twice their idle latency (both the best of three)."""
    prompts = [prompt_of(PAGE + 5, 10 * seed + s) for s in range(3)]
    choices, times = [], []
    for prompt in prompts:
        started = time.monotonic()
        choices.append(answer(cluster, prompt, 8))
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
            workers = sum(n.startswith(("ctx", "gen")) for n in cluster.processes)
            assert len(cluster.shared_memory()) == workers, cluster.shared_memory()
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
