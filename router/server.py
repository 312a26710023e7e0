"""The router as a process: links in, core, clock, and the operators' HTTP port.

    links (transfer/links.py) -> RouterCore -> links        every worker and every ingress dials here
    Stats of all processes -> /metrics; core -> /cluster, /ready; with `faults` POST /debug/faults -> SetFaults

No decision is made here. If it dies, running streams go on; ingresses and workers dial its successor, which takes a new
epoch. If a worker's books show that another router is in office, `serve_forever` ends with RouterDeposed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tailrace.model.errors import ProtocolError, WorkerError
from tailrace.router import view
from tailrace.router.core import RouterCore
from tailrace.router.decision_log import DecisionLog
from tailrace.router.decisions import Entry
from tailrace.router.records import Close, Exit, Send
from tailrace.router.settings import RouterSettings
from tailrace.transfer.links import Identity, Link, Listener, listen
from tailrace.transfer.messages import Answer, Query, SetFaults, Stats
from tailrace.transfer.metrics import Metrics, exposition

log = logging.getLogger(__name__)

TICK_S = 0.05
MAX_FAULTS_BYTES = 1 << 20
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RouterDeposed(WorkerError):
    """Another router is in office."""


class RouterServer:
    """One router. All methods belong to one event loop.

    Args:
        process: its name in logs and metrics.
        settings: for the core.
        secret: the cluster secret.
        model: served name, a metric label.
        faults: open POST /debug/faults (tests only).
        boot: its boot id; random if None.
        decisions: where placements are logged; closed by `stop`.
    """

    def __init__(
        self, process: str, settings: RouterSettings, secret: bytes, *,
        model: str = "", faults: bool = False, boot: str | None = None, clock: Callable[[], float] = time.monotonic,
        decisions: DecisionLog | None = None,
    ) -> None:  # fmt: skip
        self.me = Identity("router", process, boot or secrets.token_hex(8))
        self.core = RouterCore(self.me.boot, settings, clock, log_decision=decisions and self._log_decision)
        self._decisions = decisions
        self.metrics = Metrics("router", process, model)
        self._secret, self._faults, self._clock = secret, faults, clock
        self._links: dict[str, Link] = {}
        self._stats: dict[str, Stats] = {}
        self._listener: Listener | None = None
        self._operators: uvicorn.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._operating: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] | None = None  # its exception ends the process
        self.operators_port = 0

    @property
    def boot(self) -> str:
        return self.me.boot

    @property
    def port(self) -> int:
        """Port of the links; 0 before start."""
        return self._listener.port if self._listener else 0

    @property
    def num_workers(self) -> int:
        return len(self.core.state.workers)

    # ------------------------------------------------------------------------------------------------------- life cycle

    async def start(self, host: str, port: int = 0, *, operators: tuple[str, int] | None = None) -> None:
        """Listen for links on `host`:`port` and for operators on their own address (port 0: any free one).

        Raises:
            OSError: a port is taken; the message names it.
        """
        self._over = asyncio.get_running_loop().create_future()
        self._listener = await listen(
            host, port, self.me, self._secret,
            on_link=self._on_link, on_frame=self._on_frame, on_close=self._on_close,
        )  # fmt: skip
        self._ticking = asyncio.create_task(self._tick(), name="router-tick")
        if operators is not None:
            await self._start_operators(*operators)
        fields = {"host": host, "port": self.port, "boot": self.boot, "operators_port": self.operators_port}
        log.info("router_started", extra={"fields": fields})

    async def serve_forever(self) -> None:
        """Returns when `stop` is called.

        Raises:
            RouterDeposed: another router is in office; this process must end.
            LedgerError: the claims are wrong; this process must end.
        """
        parts = [part for part in (self._over, self._ticking, self._operating) if part is not None]
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            if not part.cancelled():
                part.result()

    async def stop(self) -> None:
        """Close all links and both ports. May be called more than once."""
        if self._ticking is not None:
            self._ticking.cancel()
        if self._listener is not None:
            self._listener.close()
        for link in tuple(self._links.values()):
            link.close("the router stops")
        if self._operators is not None and self._operating is not None:
            self._operators.should_exit = True
            await asyncio.wait([self._operating])
        if self._over is not None:
            self._over.cancel()
        if self._decisions is not None:
            await asyncio.to_thread(self._decisions.close)

    def report_dead(self, boot: str, reason: str) -> None:
        """Whoever watches a process (Ray, its supervisor) says that it is dead."""
        self.core.declare_dead(boot, reason)
        self._act()

    def _log_decision(self, entry: Entry) -> None:
        """The core's clock becomes that of the calendar."""
        if self._decisions is not None:
            at = entry.decision.at + time.time() - self._clock()
            self._decisions.put(replace(entry, decision=replace(entry.decision, at=at)))

    async def _tick(self) -> None:
        while True:  # a deadline of the core may be a tick late
            self.core.tick()
            self._act()
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------------------------------------------------------ links

    def _on_link(self, link: Link) -> None:
        before = self._links.get(link.peer.boot)
        self._links[link.peer.boot] = link
        if before is not None:
            before.close("dialled again")
        self.core.link_up(link.peer.role, link.peer.process, link.peer.boot)
        self._act()

    def _on_close(self, link: Link, reason: str) -> None:
        boot = link.peer.boot
        if self._links.get(boot) is not link:
            return
        del self._links[boot]
        self._stats.pop(boot, None)
        log.info("link_closed", extra={"fields": {"process": link.peer.process, "boot": boot, "reason": reason}})
        self.core.link_down(boot)
        self._act()

    def _on_frame(self, link: Link, frame: Any) -> None:
        if self._links.get(link.peer.boot) is not link:
            return
        if isinstance(frame, Stats):
            self._stats[link.peer.boot] = frame
        elif isinstance(frame, Query):
            link.send(Answer(frame.number, self._answer(frame.what)))
        else:
            try:
                self.core.frame(link.peer.boot, frame)
            except WorkerError as error:
                log.critical("router_broken", extra={"fields": {"error": str(error), "frame": type(frame).__name__}})
                self._end(error)
            self._act()

    def _end(self, error: WorkerError) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(error)

    def _act(self) -> None:
        for action in self.core.take():
            if isinstance(action, Exit):
                self._end(RouterDeposed(action.reason))
            elif (link := self._links.get(action.to)) is None:
                continue  # gone; the core is told by link_down
            elif isinstance(action, Send):
                link.send(action.frame)
            elif isinstance(action, Close):
                link.close(action.reason)

    # ---------------------------------------------------------------------------------------------------------- answers

    def _answer(self, what: str) -> str:
        if what == "ready":
            return json.dumps(self.ready())
        if what == "cluster":
            return json.dumps(self.cluster())
        if what == "metrics":
            return self.metrics_text()
        raise ProtocolError(f"query for {what[:40]!r}")

    def ready(self) -> dict[str, Any]:
        """As /ready answers."""
        return view.ready(self.core.state, self._clock())

    def cluster(self) -> dict[str, Any]:
        """As /cluster answers."""
        return view.cluster(self.core.state, self.core.placer, self._clock())

    def metrics_text(self) -> str:
        """The whole cluster's metrics, the router's own and the last of every linked process, in Prometheus' text."""
        view.update_metrics(self.metrics, self.core.state, self._clock())
        own = Stats("router", self.me.process, self.metrics.families())
        return exposition((own, *self._stats.values())).decode()

    def set_faults(self, faults: dict[str, Any], *, worker: str | None, role: str | None) -> list[str]:
        """Send a fault configuration to the workers of that name, home or duty (all, if neither is given).

        Returns their names.
        """
        told = []
        for each in self.core.state.workers:
            at = each.register
            fits = (worker is None or at.worker == worker) and (role is None or role in (at.home, at.duty))
            link = self._links.get(each.boot)
            if fits and link is not None:
                link.send(SetFaults(json.dumps(faults)))
                told.append(each.name)
        return told

    # -------------------------------------------------------------------------------------------------- operators' HTTP

    def operators_app(self) -> Starlette:
        """The operators' ASGI application: /health /ready /metrics /cluster; with faults /debug/..."""

        async def health(request: Request) -> Response:
            return JSONResponse({"status": "ok"})

        async def get_ready(request: Request) -> Response:
            answer = self.ready()
            return JSONResponse(answer, 503 if answer["status"] == "unready" else 200)

        async def get_metrics(request: Request) -> Response:
            return Response(self.metrics_text(), media_type=METRICS_TYPE)

        async def get_cluster(request: Request) -> Response:
            return JSONResponse(self.cluster())

        async def get_blocks(request: Request) -> Response:
            return JSONResponse(view.blocks(self.core.state))

        routes = [
            Route("/health", health),
            Route("/ready", get_ready),
            Route("/metrics", get_metrics),
            Route("/cluster", get_cluster),
        ]
        if self._faults:
            routes.append(Route("/debug/faults", self._post_faults, methods=["POST"]))
            routes.append(Route("/debug/blocks", get_blocks))
        return Starlette(routes=routes)

    async def _post_faults(self, request: Request) -> Response:
        """Body: {"worker": name or absent, "role": ctx | gen or absent, "faults": {...}}."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > MAX_FAULTS_BYTES:
                return JSONResponse({"error": f"body over {MAX_FAULTS_BYTES} bytes"}, 413)
        try:
            data = json.loads(body)
        except ValueError as error:
            return JSONResponse({"error": f"not JSON: {error}"}, 400)
        if not isinstance(data, dict) or not isinstance(data.get("faults"), dict):
            return JSONResponse({"error": "expected an object with an object `faults`"}, 400)
        worker, role = data.get("worker"), data.get("role")
        if any(not isinstance(name, str | None) for name in (worker, role)):
            return JSONResponse({"error": "`worker` and `role` are names"}, 400)
        unknown = sorted(set(data) - {"worker", "role", "faults"})
        if unknown:
            return JSONResponse({"error": f"unknown keys {unknown}"}, 400)
        told = self.set_faults(data["faults"], worker=worker, role=role)
        return JSONResponse({"told": told}, 200 if told else 404)

    async def _start_operators(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            raise OSError(error.errno, f"operators' port {host}:{port}: {error.strerror}") from error
        self.operators_port = sock.getsockname()[1]
        config = uvicorn.Config(
            self.operators_app(), log_config=None, lifespan="off", access_log=False,
            limit_concurrency=64, timeout_keep_alive=30, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._operators = _Uvicorn(config)
        self._operating = asyncio.create_task(_serve(self._operators, sock), name="router-operators")


class _Uvicorn(uvicorn.Server):
    """Leaves the process's signal handlers alone: they belong to whoever runs the router."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(server: uvicorn.Server, sock: socket.socket) -> None:
    try:
        await server.serve(sockets=[sock])
    finally:
        sock.close()
