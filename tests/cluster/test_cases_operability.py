"""Cases B14, E2, E3 and E5 on real processes without Ray; E10 stands in test_serve_command.py."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from checkpoints import write_tiny_checkpoint
from harness import LocalCluster

from tailrace.cluster.discovery import FileDirectory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_checkpoint(folder, "llama")
    return str(folder)


def process(role: str, tmp_path: Path, config: dict, *options: str, **popen) -> subprocess.Popen:
    file = tmp_path / f"{role}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "tailrace.cluster.process", *([role] if role else []), "--config", str(file)]
    return subprocess.Popen(
        [*command, "--directory", str(tmp_path / "d"), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **popen,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- B14


def test_b14_two_workers_of_each_kind_on_one_host_start_with_defaults(tmp_path, model):
    with LocalCluster(tmp_path / "c", model, ctx=2, gen=2, kv_bytes=2**22) as cluster:
        ports = [p.ready["port"] for p in cluster.processes.values()]
        assert len(set(ports)) == len(ports) == 6
        assert cluster.complete("hello")["choices"][0]["text"]


@pytest.mark.parametrize("role", ["router", "ingress", "ctx", "gen"])
def test_b14_a_taken_port_ends_the_process_at_once_and_is_named(tmp_path, model, role):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = {"model": model, "operators_port": port if role == "router" else 0, "operators_host": "127.0.0.1"}
        started = time.monotonic()
        run = process(role, tmp_path, config, *(() if role == "router" else ("--port", str(port))))
        out, err = run.communicate(timeout=30)
    assert run.returncode not in (0, None)
    assert (f"port {port} " in err or f"127.0.0.1:{port}" in err) and out == ""
    assert "Traceback" not in err or role in ("ctx", "gen")  # a rank's end is one record with its root cause
    assert time.monotonic() - started < 5


# -------------------------------------------------------------------------------------------------------------- E5


def test_e5_a_process_without_a_role_does_not_start(tmp_path):
    run = process("", tmp_path, {})
    _, err = run.communicate(timeout=30)
    assert run.returncode == 2 and "role" in err


@pytest.mark.parametrize("role", ["router", "ingress", "ctx", "gen"])
@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"tokens_per_pag": 8}, "unknown key 'tokens_per_pag'; did you mean 'tokens_per_page'?"),
        ({"ctx": {"replica": 1}}, "ctx: unknown key 'replica'; did you mean 'replicas'?"),
        (
            {"ctx": {"max_gen_init_admissions_per_pass": 1}},
            "'max_gen_init_admissions_per_pass' is a decode-only option",
        ),
    ],
)
def test_e5_a_wrong_key_is_refused_by_every_role(tmp_path, role, config, complaint):
    run = process(role, tmp_path, config)
    _, err = run.communicate(timeout=30)
    assert run.returncode == 2 and complaint in err


# ---------------------------------------------------------------------------------------------------------- E2, E3


def supervised(tmp_path: Path, model: str, **config) -> tuple[subprocess.Popen, dict]:
    """A ctx worker under its supervisor: (the supervisor's process, its ready line)."""
    settings = {"model": model, "dtype": "float32", "kv_bytes": 2**22, "ctx": {"threads": 1}, **config}
    run = process("ctx", tmp_path, settings, "--supervised")
    line = run.stdout.readline()
    assert line, run.stderr.read()
    return run, json.loads(line)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_e2_a_dead_or_stopped_rank_is_noticed_and_ended(tmp_path, model, number):
    run, ready = supervised(tmp_path, model, run_limit_s=1.5, app_name=f"t{os.getpid()}_e2")
    try:
        os.kill(ready["pid"], number)
        started = time.monotonic()
        assert run.wait(15) == 1
        assert time.monotonic() - started < 1.5 + 4
        said = run.stderr.read()
        assert ("dead" if number == signal.SIGKILL else "stuck") in said
        assert not alive(ready["pid"])
    finally:
        run.kill()
        run.wait()
        for left in Path("/dev/shm").glob(f"tailrace-t{os.getpid()}_e2-*"):
            left.unlink()  # the next boot would: this one is not started again


def test_e10_a_killed_supervisor_takes_its_rank_along(tmp_path, model):
    run, ready = supervised(tmp_path, model, app_name=f"t{os.getpid()}_e10")
    run.kill()
    run.wait()
    end = time.monotonic() + 5
    while alive(ready["pid"]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(ready["pid"])
    arenas = list(Path("/dev/shm").glob(f"tailrace-t{os.getpid()}_e10-*"))
    assert len(arenas) == 1
    again, _ = supervised(tmp_path, model, app_name=f"t{os.getpid()}_e10")
    assert len(list(Path("/dev/shm").glob(f"tailrace-t{os.getpid()}_e10-*"))) == 1
    again.terminate()
    assert again.wait(15) == 0
    assert not list(Path("/dev/shm").glob(f"tailrace-t{os.getpid()}_e10-*"))


def test_e3_a_busy_worker_is_not_restarted(tmp_path, model):
    directory = tmp_path / "c"
    with LocalCluster(directory, model, max_num_tokens=512, run_limit_s=5, kv_bytes=2**25) as cluster:
        boots = {name: p.ready["boot"] for name, p in cluster.processes.items()}
        prompt = " ".join(f"word{i}" for i in range(300))

        def ask(i: int) -> int:
            body = {"prompt": f"{i} {prompt}", "max_tokens": 1, "temperature": 0}
            return cluster.post("/v1/completions", body).status_code

        with concurrent.futures.ThreadPoolExecutor(100) as pool:
            codes = list(pool.map(ask, range(100)))
        assert set(codes) <= {200, 503}, codes  # what would wait too long may be refused
        assert codes.count(200) >= 20
        for name, started in cluster.processes.items():
            assert started.alive and started.ready["boot"] == boots[name]
        assert FileDirectory(directory / "directory").lookup("router")["boot"] == boots["router"]
        assert cluster.metric("tailrace_worker_restarts_total") == 0
