"""`tailrace serve`: a local Ray cluster with the application, from nothing to an answered question, until Ctrl-C.

The steps: check the file and the ports, start Ray, deploy, show the workers' phases until the cluster is ready, print a
curl line, ask one question, wait. Whatever happens the cluster is removed again on the way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tailrace.cluster.client import Client, Samples
from tailrace.cluster.config import TailraceConfig, load_config, read_args, read_yaml
from tailrace.cluster.discovery import WORKER_PREFIX, Directory, RayDirectory
from tailrace.cluster.keys import bearer_keys
from tailrace.cluster.launcher import LocalCluster, check_port_free
from tailrace.cluster.sizes import derive
from tailrace.kv_cache.arena import SHARED_MEMORY
from tailrace.model.errors import ConfigError, PeerError, WorkerError
from tailrace.model.source import open_source

QUESTION = "What is the capital of France?"
POLL_S = 0.2
POSITIONS, OUTPUTS, BYTES = (
    "tailrace_prompt_positions_total", "tailrace_output_tokens_total", "tailrace_transfer_bytes_total",
)  # fmt: skip
PHASE_SHARE = {"load": (0.0, 0.6), "compile": (0.6, 0.3), "run": (0.9, 0.1), "ready": (1.0, 0.0), "failed": (0.0, 0.0)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to serve and where: the file with the command line's ports put in."""

    args: dict[str, Any]
    config: TailraceConfig
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    @property
    def operators_url(self) -> str:
        """Where /metrics is: on the operators' port, or on the clients' if that one is unknown."""
        host, port = self.config.operators_host, self.config.operators_port
        return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}" if port else self.url

    @property
    def key(self) -> str | None:
        """A key that our own question may use."""
        return next(iter(bearer_keys(self.config)), None)


def make_plan(file: Path, port: int | None, operators_port: int | None) -> Plan:
    """Reads and checks the file, the model's shape and both ports; ConfigError says what is wrong."""
    args = dict(read_args(file))
    if operators_port is not None:
        args["operators_port"] = operators_port
    host, said = _http_address(file)
    port = said if port is None else port
    config = load_config(args)
    derive(config, open_source(config.model).config)
    _check_shared_memory(config)
    check_port_free(host, port, "http_options.port (--port)")
    if config.operators_port:
        check_port_free(config.operators_host, config.operators_port, "operators_port (--operators-port)")
    if port == config.operators_port:
        raise ConfigError(f"operators_port: {port} is the clients' port too")
    return Plan(args, config, host, port)


def _http_address(file: Path) -> tuple[str, int]:
    """Host and port of the clients, from a Serve YAML's own section."""
    options = read_yaml(file).get("http_options") or {}
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: http_options is a {type(options).__name__}, not a mapping")
    port = options.get("port", 8000)
    if type(port) is not int or not 0 < port < 65536:
        raise ConfigError(f"{file}: http_options.port: {port!r} is no port")
    return str(options.get("host", "127.0.0.1")), port


def _check_shared_memory(config: TailraceConfig) -> None:
    """Of pools that are sure to stand there: on GPUs they take the GPUs' memory."""
    if config.device == "cuda":
        return
    needed = sum(config.pool(role).replicas * config.pool_bytes(role) for role in ("ctx", "gen"))
    room = os.statvfs(SHARED_MEMORY)
    free = room.f_bavail * room.f_frsize
    if needed > free:
        raise ConfigError(f"kv_bytes: all pools together take {needed} bytes, {SHARED_MEMORY} has {free} free")


def serve_until_stopped(plan: Plan, console: Console, *, ask: bool) -> None:
    """Blocks until SIGINT or SIGTERM; raises WorkerError if the application does not come up."""
    console.print("starting Ray on this machine ...")
    cluster = LocalCluster(plan.config.app_name, {"host": plan.host, "port": plan.port})
    with _stop_signals() as stop, cluster:
        stop.install()  # Ray has put its own handlers in place
        _deploy(plan, console, stop)
        with stop.breaking_off():
            if ask and not stop.asked:
                _ask(plan, console)
        if not stop.asked:
            console.print("\n[bold]serving[/bold]; Ctrl-C ends it")
        while not stop.asked and cluster.alive():
            time.sleep(POLL_S)
        failed = not stop.asked
        console.print("Ray has died; ending ..." if failed else "ending ...")
    console.print("ended; nothing is left running")
    if failed:
        raise WorkerError("a process of the local Ray cluster died")


class _Stop:
    """Set by SIGINT or SIGTERM; the clean-up, which is bounded, is not interrupted by another one."""

    def __init__(self) -> None:
        self.asked = False
        self._breaks_off = False

    @contextlib.contextmanager
    def breaking_off(self) -> Iterator[None]:
        """What stands inside, which may wait for long and asks nobody, is broken off by the signal."""
        self._breaks_off = True
        try:
            yield
        except KeyboardInterrupt:
            if not self.asked:
                raise
        finally:
            self._breaks_off = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._breaks_off:
            self._breaks_off = False
            raise KeyboardInterrupt


@contextlib.contextmanager
def _stop_signals() -> Iterator[_Stop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = _Stop()
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _deploy(plan: Plan, console: Console, stop: _Stop) -> None:
    """Deploys in a thread and shows progress until /ready says so."""
    from ray import serve

    from tailrace.cluster.app import build

    failure: list[BaseException] = []
    deployed = threading.Event()

    def run() -> None:
        try:
            serve.run(build(plan.args), name=plan.config.app_name, route_prefix="/")
            deployed.set()
        except RuntimeError as error:  # what serve.run raises when a deployment fails
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="deploy")
    thread.start()
    directory = RayDirectory(plan.config.app_name)
    with _progress(console) as bar, Client(plan.url) as client:
        shown: dict[str, Any] = {}
        for role in ("ctx", "gen"):
            for number in range(plan.config.pool(role).replicas):
                shown[f"{role}-{number}"] = bar.add_task(f"{role}-{number}", total=1.0, phase="waiting for Ray")
        whole = bar.add_task("cluster", total=1.0, phase="deploying")
        while not stop.asked:
            over = not thread.is_alive()
            if failure or (over and not deployed.is_set()):
                why = failure[0] if failure else "deploying ended with the fault that stands above"
                raise WorkerError("\n".join([f"the application did not come up: {why}", *_reasons(directory)]))
            _show_workers(directory, bar, shown)
            if over:
                status, reasons = client.ready()
                bar.update(whole, phase=status if status == "ready" else "; ".join(reasons)[:60])
                if status == "ready":
                    bar.update(whole, completed=1.0)
                    return
            time.sleep(POLL_S)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[phase]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _show_workers(directory: Directory, bar: Progress, shown: dict[str, Any]) -> None:
    for name, task in shown.items():
        entry = directory.lookup(WORKER_PREFIX + name)
        if entry is not None:
            start, share = PHASE_SHARE[entry["phase"]]
            bar.update(task, completed=start + share * float(entry["fraction"]), phase=entry["phase"])


def _reasons(directory: Directory) -> list[str]:
    """The workers' own last words."""
    entries = {name: directory.lookup(name) or {} for name in directory.names(WORKER_PREFIX)}
    return [f"{name.removeprefix(WORKER_PREFIX)}: {e['reason']}" for name, e in entries.items() if "reason" in e]


def curl_line(plan: Plan) -> str:
    """A command that asks the question from another terminal."""
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    key = " -H 'Authorization: Bearer YOUR_KEY'" if plan.key else ""
    return f"curl {plan.url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'"


def _ask(plan: Plan, console: Console) -> None:
    console.print("\nask it yourself:\n")
    console.print(curl_line(plan), style="cyan", soft_wrap=True, markup=False, highlight=False)
    with Client(plan.url, plan.key) as client, Client(plan.operators_url) as operators:
        before = _counters(operators)
        try:
            answer = client.chat([{"role": "user", "content": QUESTION}], temperature=0)
        except PeerError as error:
            console.print(f"\n[red]the question was not answered[/red]: {escape(str(error))}")
            return
        console.print(f"\n[bold]{QUESTION}[/bold]")
        console.print(answer, markup=False, highlight=False)
        console.print(_where(before, operators, plan), style="dim", highlight=False)


def _counters(operators: Client) -> Samples | None:
    """None if nobody shows them at that address: they may be switched off, or bound to another."""
    try:
        return operators.metrics()
    except PeerError:
        return None


def _where(before: Samples | None, operators: Client, plan: Plan) -> str:
    """Who computed the prompt and who the answer, from the workers' own counters, which come once a period."""
    end = time.monotonic() + 3 * plan.config.stats_period_s + 1
    while True:
        after = _counters(operators)
        if before is None or after is None:
            return f"who computed it is not known: there is no /metrics at {operators.url}"
        prefill = _grown(before, after, POSITIONS)
        decode = {name: n for name, n in _grown(before, after, OUTPUTS).items() if n > 1}  # a ctx samples just one
        moved = sum(_grown(before, after, BYTES, kind="wire").values())
        if (prefill and decode and (moved or set(prefill) == set(decode))) or time.monotonic() > end:
            break
        time.sleep(POLL_S)
    directory = RayDirectory(plan.config.app_name)
    sides = (f"prefill: {_named(prefill, directory)}", f"decode: {_named(decode, directory)}")
    return "; ".join((*sides, f"{moved / 1e6:.2f} MB of pages moved"))


def _grown(before: Samples, after: Samples, name: str, **labels: str) -> dict[str, float]:
    """Worker -> by how much its counter has grown."""
    grown: dict[str, float] = {}
    for sign, samples in ((-1, before), (1, after)):
        for found, value in samples.get(name, []):
            if labels.items() <= found.items():
                grown[found["worker"]] = grown.get(found["worker"], 0.0) + sign * value
    return {worker: value for worker, value in grown.items() if value > 0}


def _named(workers: dict[str, float], directory: Directory) -> str:
    names = []
    for worker in workers:
        entry = directory.lookup(WORKER_PREFIX + worker) or {}
        names.append(f"{worker} (pid {entry.get('pid', '?')} on {entry.get('host', '?')})")
    return ", ".join(names) or "unknown"
