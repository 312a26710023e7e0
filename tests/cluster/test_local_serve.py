"""Parts of `tailrace serve` that need no Ray: what it refuses, its one question, how Ctrl-C ends a wait."""

import http.server
import io
import json
import os
import signal
import socket
import threading

import pytest
from rich.console import Console

from tailrace.cluster import local_serve
from tailrace.cluster.client import Client
from tailrace.cluster.config import load_config
from tailrace.cluster.discovery import FileDirectory
from tailrace.cluster.local_serve import Plan, make_plan
from tailrace.model.errors import ConfigError, PeerError, WorkerError


def plan_at(port: int, **args) -> Plan:
    return Plan(args, load_config({"operators_port": 0, **args}), "127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("http_options: [1]\napplications: [{args: {}}]\n", "http_options is a list, not a mapping"),
        ("http_options: {port: abc}\napplications: [{args: {}}]\n", "http_options.port: 'abc' is no port"),
        ("http_options: {port: 0}\napplications: [{args: {}}]\n", "http_options.port: 0 is no port"),
    ],
)
def test_a_wrong_address_in_serves_own_section_is_refused(tmp_path, text, complaint):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        make_plan(file, None, None)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        make_plan(file, None, None)


def test_pools_on_gpus_take_no_shared_memory():
    local_serve._check_shared_memory(load_config({"device": "cuda", "kv_bytes": 2**50}))
    with pytest.raises(ConfigError, match="all pools together take"):
        local_serve._check_shared_memory(load_config({"device": "cpu", "kv_bytes": 2**50}))


def test_an_address_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"http://\[::"):
        Client("http://[::")


def test_a_port_that_another_program_has_on_another_address_is_free_for_the_operators(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        taken = other.getsockname()[1]
        file = tmp_path / "serve.yaml"
        args = f"{{operators_host: 127.0.0.1, operators_port: {taken}, kv_bytes: 64MiB}}"
        file.write_text(f"http_options: {{port: {free_port()}}}\napplications: [{{args: {args}}}]\n")
        plan = make_plan(file, None, None)
        assert plan.operators_url == f"http://127.0.0.1:{taken}"
        with pytest.raises(ConfigError, match="operators_port"):
            file.write_text(file.read_text().replace("operators_host: 127.0.0.1", "operators_host: 127.0.0.2"))
            make_plan(file, None, None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class OnlyChat(http.server.BaseHTTPRequestHandler):
    """Answers questions, shows no metrics."""

    def do_POST(self):  # noqa: N802
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [{"message": {"content": "Paris."}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):  # noqa: N802
        self.send_error(404)

    def log_message(self, *args):
        pass


def test_the_answer_is_shown_where_no_metrics_can_be_seen():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), OnlyChat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    shown = io.StringIO()
    local_serve._ask(plan_at(server.server_port), Console(file=shown, width=200))
    server.shutdown()
    server.server_close()
    assert "Paris." in shown.getvalue() and "no /metrics at" in shown.getvalue()
    assert "not answered" not in shown.getvalue()


def test_ctrl_c_breaks_off_a_question_that_nobody_answers():
    with socket.socket() as silent, local_serve._stop_signals() as stop:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        stop.install()
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with stop.breaking_off():
            local_serve._ask(plan_at(silent.getsockname()[1]), Console(file=io.StringIO()))
        timer.join()
        assert stop.asked


def test_a_fault_that_ends_deploying_ends_the_command(monkeypatch, tmp_path):
    from tailrace.cluster import app

    def build(args):
        raise PeerError("Ray's key-value store does not answer")

    monkeypatch.setattr(app, "build", build)
    monkeypatch.setattr(local_serve, "RayDirectory", lambda app_name: FileDirectory(tmp_path))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    stop = local_serve._Stop()
    with pytest.raises(WorkerError, match="did not come up"):
        local_serve._deploy(plan_at(free_port()), Console(file=io.StringIO()), stop)
