"""One role of the application without Ray: what tests and benches start, made of the same parts as under Ray.

    python -m tailrace.cluster.process {router,ingress,ctx,gen} --config FILE --directory DIR [--name NAME] [--port N]

Processes that share a directory are one application. When it serves, one JSON line stands on stdout:
{"ready": true, "role": .., "name": .., "host": .., "port": .., "boot": .., "pid": ..}. A failure is a line on stderr
and a non-zero status. SIGTERM ends it in order. ctx and gen run their rank in this very process, unless --supervised
puts the supervisor in between as under Ray; a worker of several ranks always has its supervisor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from tailrace.cluster import log as logs
from tailrace.cluster.config import TailraceConfig, load_config, read_args
from tailrace.cluster.discovery import ROUTER, FileDirectory, shared_secret
from tailrace.cluster.progress import PhaseLimits
from tailrace.cluster.spec import RankSpec
from tailrace.model.errors import ConfigError, TailraceError

if TYPE_CHECKING:
    from tailrace.cluster.worker import Worker

log = logging.getLogger(__name__)

ROUTER_POLL_S = 0.05
CHECK_S = 0.5
BAD_CONFIG, FAILED = 2, 1


class Place:
    """Where this process stands: its application, its name, its address."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.role: str = options.role
        self.name: str = options.name or (options.role if options.role == "router" else f"{options.role}-0")
        self.host: str = options.host
        self.port: int = options.port
        self.args = read_args(options.config)
        self.config: TailraceConfig = load_config(self.args)
        self.directory = FileDirectory(options.directory)
        configured = self.config.cluster_secret
        self.secret = shared_secret(self.directory, None if configured is None else configured.get_secret_value())

    @property
    def spec(self) -> RankSpec:
        return RankSpec(self.role, self.name, self.host, self.args, self.secret.decode(), self.port)

    def say_ready(self, **fields: Any) -> None:
        line = {"ready": True, "role": self.role, "name": self.name, "pid": os.getpid(), **fields}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def run_worker(place: Place) -> None:
    """A ctx or gen worker's rank in this process."""
    from tailrace.cluster.rank import run_rank

    def report(message: dict[str, Any]) -> None:
        if "ready" in message:
            place.say_ready(**message["ready"])

    def follow(worker: Worker) -> None:
        told = None
        while True:
            found = place.directory.lookup(ROUTER)
            if found is not None and found != told:
                worker.set_router(found)
                told = found
            time.sleep(ROUTER_POLL_S)

    run_rank(place.spec, report, lambda phase, done, at: None, follow)


async def run_supervised(place: Place) -> None:
    """A worker under its supervisor, as a Serve replica has it; ends with a failure when the rank is dead or stuck."""
    from tailrace.cluster.supervisor import Supervisor

    logs.configure(place.config.log_level, f"{place.name}/supervisor")
    supervisor = Supervisor(place.spec, PhaseLimits.of(place.config), place.directory)
    stop = _stop_event()
    try:
        ready = await supervisor.start()
        place.say_ready(**asdict(ready))
        while not stop.is_set():
            supervisor.check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CHECK_S)
    finally:
        await supervisor.stop()


async def run_front(place: Place) -> None:
    """The router, or one ingress with its HTTP server."""
    from tailrace.cluster.front import IngressFront, RouterFront

    logs.configure(place.config.log_level, place.name)
    stop = _stop_event()
    kind = RouterFront if place.role == "router" else IngressFront
    front = kind(place.config, place.directory, place.secret, name=place.name, host=place.host)
    await front.start()
    try:
        port = front.port if isinstance(front, RouterFront) else await front.listen(place.host, place.port)
        place.say_ready(host=place.host, port=port, **front.described)
        while not stop.is_set():
            front.check()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), CHECK_S)
    finally:
        await front.stop()


def _stop_event() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tailrace.cluster.process", description=__doc__)
    parser.add_argument("role", choices=("router", "ingress", "ctx", "gen"))
    parser.add_argument("--config", type=Path, required=True, help="a configuration or Serve YAML")
    parser.add_argument("--directory", type=Path, required=True, help="folder that the application's processes share")
    parser.add_argument("--name", default=None, help="the process's name; default ROLE-0, or router")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind and to tell others")
    parser.add_argument("--port", type=int, default=0, help="ingress: the HTTP port; ctx and gen: of its links")
    parser.add_argument("--supervised", action="store_true", help="ctx and gen: run the rank in a child process")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse(sys.argv[1:])
    try:
        place = Place(options)
        if place.role in ("ctx", "gen"):
            if options.supervised or place.config.pool(place.role).tp > 1:
                uvloop.run(run_supervised(place))
            else:
                run_worker(place)
        else:
            uvloop.run(run_front(place))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(BAD_CONFIG)
    except TailraceError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
