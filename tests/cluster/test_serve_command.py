"""`tailrace serve` for real: a local Ray cluster with a tiny model, asked, hurt, interrupted and killed.

One cluster serves the first tests; the last ones end it by Ctrl-C, start it again at once, and kill its driver.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from checkpoints import write_tiny_checkpoint

from tailrace.cluster.launcher import free_ports

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]

READY_S = 150
PAGE_TOKENS = 16


QUESTION = "What is the capital of France?"


class Served:
    """One run of `tailrace serve` in a session of its own."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.app = f"t{os.getpid()}"
        self.port, self.operators_port = free_ports(2)
        self.file = folder / "serve.yaml"
        args = {
            "model": str(model), "model_name": "tiny", "dtype": "float32", "app_name": self.app, "kv_bytes": "8MiB",
            "max_num_tokens": 64, "max_batch_size": 8, "tokens_per_page": PAGE_TOKENS, "local_prefill_max_tokens": 0,
            "operators_port": self.operators_port, "ctx": {"threads": 1}, "gen": {"threads": 1},
            "ingress": {"replicas": 2},
        }  # fmt: skip
        application = {"name": "x", "import_path": "tailrace.cluster.app:build", "args": args}
        options = {"host": "127.0.0.1", "port": self.port}
        self.file.write_text(yaml.safe_dump({"http_options": options, "applications": [application]}))
        self.start()

    def start(self) -> None:
        self.errors = self.file.with_name(f"serve-{time.monotonic_ns()}.log")
        self.lines: list[str] = []
        self.pids: set[int] = set()
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tailrace.cluster.cli", "serve", str(self.file)],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"},  # the user's other cluster, which is none of ours
            )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen) -> None:
        self.lines.extend(iter(process.stdout.readline, ""))

    @property
    def text(self) -> str:
        return "".join(self.lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_for(self, words: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while words not in self.text:
            story = self.text + self.errors.read_text()[-4000:]
            assert self.process.poll() is None and time.monotonic() < end, story
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        """Everything that hangs below the driver now; remembered for the search for traces."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.pids |= {process.pid for process in found}
        return found

    def find(self, *words: str) -> list[int]:
        """Pids of processes whose command line has all the words."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if all(word in command for word in words):
                    found.append(process.pid)
        return found

    def ranks(self, role: str) -> list[int]:
        """Pids of the rank processes of a pool: children of its replicas."""
        found = []
        for replica in self.find("ServeReplica", "CtxPool" if role == "ctx" else "GenPool"):
            with contextlib.suppress(psutil.Error):
                children = psutil.Process(replica).children()
                found += [p.pid for p in children if "tailrace.cluster.rank" in p.cmdline()]
        return found

    def rank(self, role: str) -> int:
        """Pid of the rank process of the only worker of a pool."""
        (pid,) = self.ranks(role)
        return pid

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a name that carry these labels."""
        total = 0.0
        for line in httpx.get(f"http://127.0.0.1:{self.operators_port}/metrics", timeout=10).text.splitlines():
            if line.startswith((name + "{", name + " ")) and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def complete(self, prompt: str = "once upon a time there was", **options) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **options}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def ready(self) -> str:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).json()["status"]
        except (httpx.HTTPError, ValueError, KeyError):
            return "silent"

    def traces(self) -> list[str]:
        """What is left of the run: processes, ports, shared memory, temporary sessions."""
        left = [f"pid {pid}: {command_of(pid)}" for pid in sorted(self.pids) if command_of(pid)]
        left += [str(path) for path in Path("/dev/shm").glob(f"tailrace-{self.app}-*")]
        left += [str(path) for path in Path(tempfile.gettempdir()).glob("tailrace-*/session_*") if self.ours(path)]
        ports = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
        return left + [f"port {port}" for port in (self.port, self.operators_port) if port in ports]

    def ours(self, session: Path) -> bool:
        """Ray names a session's folder after the pid of its driver."""
        return session.name.endswith(f"_{self.process.pid}")


def command_of(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return "" if process.status() == psutil.STATUS_ZOMBIE else " ".join(process.cmdline())[:100]
    except psutil.Error:
        return ""


def until(condition, limit_s: float, what: str) -> float:
    """Seconds until the condition held."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, f"{what}: not within {limit_s} s"
        time.sleep(0.1)
    return time.monotonic() - start


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    write_tiny_checkpoint(folder / "tiny", "llama")
    made = Served(folder, folder / "tiny")
    try:
        made.wait_for("Ctrl-C ends it", READY_S)
        made.processes()
        until(lambda: made.metric("tailrace_transfer_bytes_total", kind="wire") > 0, 5, "the question's own transfer")
        made.first_wire_bytes = made.metric("tailrace_transfer_bytes_total", kind="wire")
        yield made
    finally:
        if made.process.poll() is None:
            made.processes()
            made.process.send_signal(signal.SIGINT)
            made.process.wait(30)


def test_it_asks_one_question_and_says_where_it_was_answered(served: Served):
    text = served.text
    assert QUESTION in text
    after = text.split(f"\n{QUESTION}\n")[1]
    assert "ctx-0" in after and "gen-0" in after


def test_its_own_question_moved_exactly_the_prompts_pages(served: Served):
    body = {"messages": [{"role": "user", "content": QUESTION}]}
    count = httpx.post(f"{served.url}/tokenize", json=body).json()["count"]
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, float32
    assert served.first_wire_bytes == -(-count // PAGE_TOKENS) * PAGE_TOKENS * bytes_per_token


def test_every_process_has_written_that_it_started(served: Served):
    """Serve has put something else in place of its replicas' stderr."""
    folder = psutil.Process(served.rank("ctx")).environ()["RAY_TMPDIR"]
    lines = [x for f in Path(folder).glob("session_latest/logs/worker-*.err") for x in f.read_text().splitlines()]
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    started = {row["process"] for row in rows if row["event"] in ("replica_starts", "rank_starts")}
    assert started == {"router", "ingress", "ctx-0", "gen-0"}
    assert {row["process"] for row in rows if row["event"] == "worker_ready"} == {"ctx-0", "gen-0"}


def test_prefill_and_decode_run_in_different_processes(served: Served):
    assert served.rank("ctx") != served.rank("gen")
    assert served.metric("tailrace_local_prefills_total") == 0


def test_the_printed_curl_line_answers(served: Served):
    (line,) = [line for line in served.lines if line.startswith("curl ")]
    result = subprocess.run(["bash", "-c", line.replace("curl ", "curl -s ", 1)], capture_output=True, timeout=60)
    answer = json.loads(result.stdout)
    assert answer["choices"][0]["message"]["role"] == "assistant", answer


def test_status_and_cluster_tell_the_same(served: Served):
    for port in (served.port, served.operators_port):
        command = [sys.executable, "-m", "tailrace.cluster.cli", "status", "--url", f"http://127.0.0.1:{port}"]
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"}
        )
        boots = [
            worker["boot"]
            for pool in httpx.get(f"{served.url}/cluster").json()["pools"].values()
            for worker in pool["workers"]
        ]
        assert len(boots) == 2 and all(boot in shown.stdout for boot in boots), shown.stdout + shown.stderr


def test_chat_in_the_terminal_streams_an_answer(served: Served):
    command = [sys.executable, "-m", "tailrace.cluster.cli", "chat", "--url", served.url, "--max-tokens", "8"]
    talk = subprocess.run(command, input="hello\n\n", capture_output=True, text=True, timeout=60)
    assert talk.returncode == 0, talk.stderr
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0.7}
    assert httpx.post(f"{served.url}/v1/chat/completions", json=body).status_code == 200
    assert len(talk.stdout) > len("you> you> ")


def test_a_connection_through_the_proxy_serves_stream_after_stream_and_closes_with_one_that_fails(served: Served):
    def ask(**options) -> None:
        body = json.dumps(
            {"prompt": "once upon", "stream": True, "temperature": 0, "ignore_eos": True} | options
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)

    def read(until_end: bool) -> bytes:
        raw = b""
        while until_end or not raw.endswith(b"0\r\n\r\n"):
            if not (piece := connection.recv(65536)):
                break
            raw += piece
        return raw

    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        for _ in range(3):
            ask(max_tokens=4)
            raw = read(until_end=False)
            assert (
                raw.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in raw and b"connection: close" not in raw.lower()
            )
        ask(max_tokens=400, n=8, timeout_s=0.5)  # more than it can compute by then
        raw = read(until_end=True)
        assert raw.count(b'"error"') == 1 and b"[DONE]" not in raw, raw[-500:]
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nx-much: " + b"a" * 70_000 + b"\r\n\r\n")
        assert read(until_end=True).startswith(b"HTTP/1.1 4")  # HAProxy's own bound


def test_a_killed_ctx_comes_back_by_itself_and_gen_prefills_meanwhile(served: Served):
    wanted = served.complete().json()["choices"][0]["text"]
    old = served.rank("ctx")
    os.kill(old, signal.SIGKILL)
    assert served.complete("a first prompt while the worker is away").status_code == 200
    assert served.metric("tailrace_local_prefills_total", reason="fallback") >= 1
    until(lambda: served.ready() == "ready", 60, "recovery of ctx")
    assert served.rank("ctx") != old
    fallbacks = served.metric("tailrace_local_prefills_total", reason="fallback")
    assert served.complete().json()["choices"][0]["text"] == wanted
    assert served.metric("tailrace_local_prefills_total", reason="fallback") == fallbacks


def test_a_killed_gen_comes_back_by_itself_and_requests_are_refused_meanwhile(served: Served):
    wanted = served.complete().json()["choices"][0]["text"]
    os.kill(served.rank("gen"), signal.SIGKILL)
    until(lambda: served.ready() == "unready", 10, "readiness saying so")
    refused = served.complete()
    assert refused.status_code == 503 and float(refused.headers["Retry-After"]) > 0, refused.text
    until(lambda: served.ready() == "ready", 60, "recovery of gen")
    assert served.complete().json()["choices"][0]["text"] == wanted


def test_a_killed_router_is_replaced_and_no_worker_restarts(served: Served):
    ranks = served.rank("ctx"), served.rank("gen")
    (router,) = served.find("ServeReplica", ":Router")
    os.kill(router, signal.SIGKILL)
    until(lambda: served.ready() != "ready", 10, "readiness saying so")
    until(lambda: served.ready() == "ready", 60, "a new router")
    assert served.complete().status_code == 200
    assert (served.rank("ctx"), served.rank("gen")) == ranks


def test_one_killed_ingress_of_two_leaves_the_service_up(served: Served):
    victims = served.find("ServeReplica", ":Ingress")
    assert len(victims) == 2
    os.kill(victims[0], signal.SIGKILL)
    codes = [served.complete().status_code for _ in range(10)]
    assert codes[2:] == [200] * 8, codes
    until(lambda: len(served.find("ServeReplica", ":Ingress")) == 2, 60, "a new ingress")


def test_a_killed_replica_takes_its_rank_along_and_both_come_back(served: Served):
    rank = served.rank("ctx")
    (replica,) = served.find("ServeReplica", ":CtxPool")
    os.kill(replica, signal.SIGKILL)
    until(lambda: not command_of(rank), 5, "the end of the orphaned rank")
    until(lambda: served.ranks("ctx") not in ([], [rank]), 60, "a new rank")
    until(lambda: served.ready() == "ready", 60, "a new worker")
    assert served.complete().status_code == 200


def test_ctrl_c_leaves_nothing_within_20_seconds_and_it_starts_again_at_once(served: Served):
    served.processes()
    os.killpg(served.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert served.process.wait(20) == 0
    assert "nothing is left running" in served.text
    assert served.traces() == []
    served.start()
    served.wait_for("Ctrl-C ends it", READY_S)


@pytest.mark.soak
def test_a_dead_ray_ends_it_and_leaves_nothing(served: Served):
    (raylet,) = served.find("/raylet/raylet")
    os.kill(raylet, signal.SIGKILL)
    assert served.process.wait(20) == 1
    until(lambda: served.traces() == [], 10, "an empty machine")
    served.start()
    served.wait_for("Ctrl-C ends it", READY_S)


def test_killing_the_driver_leaves_nothing_within_10_seconds(served: Served):
    served.processes()
    served.process.kill()
    served.process.wait()
    until(lambda: served.traces() == [], 10, "an empty machine")


@pytest.mark.soak
def test_ctrl_c_while_it_starts_leaves_nothing(served: Served):
    served.start()
    served.wait_for("starting Ray", 30)
    until(lambda: any("cluster.rank" in command_of(p.pid) for p in served.processes()), READY_S, "a rank")
    os.killpg(served.process.pid, signal.SIGINT)
    served.process.wait(20)
    until(lambda: served.traces() == [], 10, "an empty machine")


def test_a_taken_port_is_named_at_once(served: Served):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may linger there
        taken.bind(("127.0.0.1", served.port))
        taken.listen()
        start = time.monotonic()
        command = [sys.executable, "-m", "tailrace.cluster.cli", "serve", str(served.file)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 2 and f"port {served.port}" in result.stderr
    assert time.monotonic() - start < 5
