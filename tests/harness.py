"""A whole application made of real processes, without Ray: what end-to-end and fault tests talk to.

    with LocalCluster(tmp_path, model, tokens_per_page=16) as cluster:
        cluster.openai().completions.create(...)
        cluster.kill("ctx-0"); cluster.start("ctx", "ctx-0"); cluster.quiet()

Every process is the product's own `tailrace.cluster.process`; only discovery is a folder instead of Ray. What serves on
one CPU thread is forked from a process that has imported it (tests/forked_process.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forked_process
import httpx
import pytest
import torch
import yaml
from forked_process import Forked
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from openai import OpenAI

READY_S = 150.0  # on a busy machine a process may take a minute to import torch
USED_STATES = ("held", "pinned", "quarantined")
DEFAULTS: dict[str, Any] = {
    "device": "cpu",  # also on a host with a GPU
    "dtype": "float32",
    "faults": True,
    "operators_port": 0,
    "local_prefill_max_tokens": 0,
    "kv_bytes": 64 * 2**20,
    "heartbeat_s": 0.1,
    "stats_period_s": 0.2,
    "ctx": {"threads": 1},
    "gen": {"threads": 1},
}


class Process:
    """One started role; `ready` is the JSON line it printed."""

    def __init__(self, name: str, popen: subprocess.Popen[str] | Forked, log: Path) -> None:
        self.name, self.popen, self.log = name, popen, log
        self.ready: dict[str, Any] = {}

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def await_ready(self, deadline: float) -> dict[str, Any]:
        """Wait for the ready line; AssertionError with the end of the log if the process ends first."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline() if time.monotonic() < deadline else ""
        assert line, f"{self.name} did not become ready:\n{self.log.read_text()[-3000:]}"
        self.ready = json.loads(line)
        return self.ready


class LocalCluster:
    """Processes of one application.

    Args:
        path: an empty folder for directory, config and logs.
        model: model spec for the config.
        ctx, gen, ingress: how many of each.
        config: settings over DEFAULTS; `ctx_config`, `gen_config`: over the `ctx` and `gen` sections of DEFAULTS.
        per_process: process name -> settings over the common ones (pairs that must not fit together).
        programs: process name -> what stands in for `-m tailrace.cluster.process` (tests/odd_process.py and its words).
        options: process name -> more arguments of its command line (--host, --port).
        max_open_files: of each process.
    """

    def __init__(
        self, path: Path, model: str, *, ctx: int = 1, gen: int = 1, ingress: int = 1,
        per_process: dict[str, dict[str, Any]] | None = None, app: str | None = None,
        programs: dict[str, list[str]] | None = None, options: dict[str, list[str]] | None = None,
        max_open_files: int | None = None, **config: Any,
    ) -> None:  # fmt: skip
        if config.get("transport") == "peer":
            if not torch.cuda.is_available():
                pytest.skip("needs an NVIDIA GPU")
            config["device"] = "cuda"
        self.path = path
        self.app = app or f"t{os.getpid()}_{abs(hash(str(path))) % 100000}"
        pools = {role: DEFAULTS[role] | config.pop(f"{role}_config", {}) for role in ("ctx", "gen")}
        self.config = {**DEFAULTS, **pools, "app_name": self.app, "model": model, **config}
        self.per_process, self.programs, self.options = per_process or {}, programs or {}, options or {}
        self.max_open_files = max_open_files
        self.counts = {"router": 1, "ctx": ctx, "gen": gen, "ingress": ingress}
        self.processes: dict[str, Process] = {}
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "directory").mkdir(exist_ok=True)

    # ------------------------------------------------------------------------------------------------------- life cycle

    def __enter__(self) -> LocalCluster:
        try:
            started = [self.launch("router", "router")]
            for role in ("ctx", "gen", "ingress"):
                started += [self.launch(role, f"{role}-{i}") for i in range(self.counts[role])]
            deadline = time.monotonic() + READY_S
            for process in started:
                process.await_ready(deadline)
            if self.counts["ctx"] and self.counts["gen"]:
                self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def launch(self, role: str, name: str) -> Process:
        """Start a process without waiting for it."""
        settings = {**self.config, **self.per_process.get(name, {})}
        config = self.path / f"{name}.yaml"
        config.write_text(yaml.safe_dump(settings))
        log = self.path / f"{name}.log"
        arguments = ["--config", str(config), "--directory", str(self.path / "directory"), "--name", name]
        arguments += self.options.get(name, [])
        if self._may_fork(role, name, settings):
            popen = forked_process.start(role, arguments, log, self.max_open_files)
        else:
            command = [sys.executable, *self.programs.get(name, ["-m", "tailrace.cluster.process"]), role, *arguments]
            if self.max_open_files is not None:
                command = ["prlimit", f"--nofile={self.max_open_files}", *command]
            with log.open("a") as sink:
                popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, text=True)
        process = self.processes[name] = Process(name, popen, log)
        return process

    def _may_fork(self, role: str, name: str, settings: dict[str, Any]) -> bool:
        """Whether it imports what tests/forked_process.py has imported, in the same environment, and nothing else."""
        if name in self.programs or settings["device"] != "cpu":
            return False
        pool = settings.get(role, {})
        return role not in ("ctx", "gen") or (pool.get("threads") == 1 and pool.get("tp", 1) == 1)

    def start(self, role: str, name: str) -> Process:
        """Start a process (again) and wait until it serves."""
        process = self.launch(role, name)
        process.await_ready(time.monotonic() + READY_S)
        return process

    def close(self) -> None:
        """SIGCONT and SIGTERM to all, SIGKILL to what stays."""
        for process in self.processes.values():
            if process.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGCONT)
                    process.popen.terminate()
        deadline = time.monotonic() + 10
        for process in self.processes.values():
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.popen.kill()
                process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()
        for leftover in self.shared_memory():
            (Path("/dev/shm") / leftover).unlink()  # of processes that a test killed and did not start again

    # ----------------------------------------------------------------------------------------------------------- faults

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        self.processes[name].popen.kill()
        self.processes[name].popen.wait()

    def stop(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGSTOP)

    def cont(self, name: str) -> None:
        os.kill(self.processes[name].pid, signal.SIGCONT)

    def faults(self, worker: str, **plan: Any) -> None:
        """Set a worker's whole fault plan (transfer/faults.py); none: all faults end. Poison stays on unless said."""
        body = {"worker": worker, "faults": {"poison": True, **plan}}
        reply = httpx.post(f"{self.operators}/debug/faults", json=body, timeout=5)
        assert reply.status_code == 200, reply.text
        time.sleep(0.05)

    def poison(self) -> None:
        """Poison freed pages of every worker."""
        for name in self.processes:
            if name.startswith(("ctx", "gen")):
                self.faults(name)

    # ---------------------------------------------------------------------------------------------------------- talking

    @property
    def base_url(self) -> str:
        return self.url("ingress-0")

    def url(self, ingress: str) -> str:
        return f"http://127.0.0.1:{self.processes[ingress].ready['port']}"

    @property
    def operators(self) -> str:
        return f"http://127.0.0.1:{self.processes['router'].ready['operators_port']}"

    def openai(self, ingress: str = "ingress-0", **options: Any) -> OpenAI:
        from openai import OpenAI

        return OpenAI(
            base_url=f"{self.url(ingress)}/v1", api_key="none", **{"max_retries": 0, "timeout": 60, **options}
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.base_url}{path}", json=body, timeout=60, **options)

    def complete(self, prompt: Any, max_tokens: int = 16, **options: Any) -> dict[str, Any]:
        """A greedy completion by default; the JSON answer."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        reply = self.post("/v1/completions", body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    @contextlib.contextmanager
    def streaming(self, prompt: Any, max_tokens: int = 16, **options: Any) -> Iterator[httpx.Response]:
        """An open streaming completion, to be read or dropped."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **options}
        with httpx.stream("POST", f"{self.base_url}/v1/completions", json=body, timeout=60) as reply:
            yield reply

    def ready(self) -> dict[str, Any]:
        return httpx.get(f"{self.base_url}/ready", timeout=5).json()

    def wait_ready(self, limit_s: float = 20.0) -> None:
        """Until the cluster answers ready (not degraded)."""
        until(lambda: self.ready().get("status") == "ready", limit_s, lambda: f"not ready: {self.ready()}")

    def info(self) -> dict[str, Any]:
        return httpx.get(f"{self.operators}/cluster", timeout=5).json()

    def workers(self) -> dict[str, dict[str, Any]]:
        """Worker name -> its entry in /cluster."""
        return {w["name"]: w for pool in self.info()["pools"].values() for w in pool["workers"]}

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = httpx.get(f"{self.operators}/metrics", timeout=5).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def metric(self, name: str, **labels: str) -> float:
        """Sum over all processes of the samples with these labels."""
        return sum(
            value for (sample, found), value in self.metrics().items()
            if sample == name and labels.items() <= dict(found).items()
        )  # fmt: skip

    def settled_metric(self, name: str, **labels: str) -> float:
        """The value after every process has reported again."""
        time.sleep(2.5 * self.config["stats_period_s"])
        return self.metric(name, **labels)

    def pages(self, worker: str, state: str) -> float:
        return self.metric("tailrace_pages", worker=worker, state=state)

    # ------------------------------------------------------------------------------------------------------------ leaks

    def shared_memory(self) -> list[str]:
        return [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(f"tailrace-{self.app}-")]

    def open_files(self) -> dict[str, int]:
        return {n: len(os.listdir(f"/proc/{p.pid}/fd")) for n, p in self.processes.items() if p.alive}

    def disquiet(self) -> list[str]:
        """What still holds something; empty when QUIET (cases.md)."""
        found = []
        for (name, labels), value in self.metrics().items():
            at = dict(labels)
            if value and (
                (name == "tailrace_pages" and at["state"] in USED_STATES)
                or (name == "tailrace_landing_chunks" and at["state"] != "free" and at["state"] != "total")
                or name in ("tailrace_transfers_in_flight", "tailrace_active_requests", "tailrace_claims")
            ):
                found.append(f"{name}{at} = {value}")
        return found

    def quiet(self, limit_s: float | None = None) -> None:
        """Until QUIET, no later than the longer lease + 2 s (and one stats period)."""
        lease = max(self.config.get("pin_lease_s", 30.0), self.config.get("request_lease_s", 10.0))
        limit = lease + 2 if limit_s is None else limit_s
        time.sleep(2.5 * self.config["stats_period_s"])  # gauges are as old as the last report
        until(
            lambda: not self.disquiet(), limit + self.config["stats_period_s"], lambda: f"not quiet: {self.disquiet()}"
        )


def until(condition: Callable[[], bool], limit_s: float, message: Callable[[], str]) -> None:
    """Poll until the condition holds; AssertionError with the message after limit_s. A dead HTTP peer is waited for."""
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline, message()
        time.sleep(0.05)


def sse_events(reply: httpx.Response) -> Iterator[str]:
    """The `data:` payloads of a stream, [DONE] included."""
    for line in reply.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
