"""What a router process and an ingress process are made of: the composition of the torch-free roles.

Used alike by Serve replicas (cluster/app.py) and by processes without Ray (cluster/process.py). Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.discovery import ROUTER, Directory
from tailrace.cluster.keys import bearer_keys
from tailrace.cluster.sizes import derive
from tailrace.cluster.spec import new_boot
from tailrace.kv_cache.arena import SHARED_MEMORY
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.model.errors import ConfigError, PeerError
from tailrace.model.source import ModelSource, open_source
from tailrace.router.decision_log import DecisionLog
from tailrace.router.flow import FlowPolicy
from tailrace.router.heap import Heap
from tailrace.router.http_app import build_app
from tailrace.router.http_limits import LimitedProtocol
from tailrace.router.ingress import IngressConfig, IngressService
from tailrace.router.router_link import Address, RouterLink
from tailrace.router.server import TICK_S, RouterServer
from tailrace.router.settings import RouterSettings
from tailrace.router.tenants import Share
from tailrace.router.text_cuts import exact_cuts
from tailrace.router.token_cache import PromptTokenCache
from tailrace.router.token_store import TokenStore
from tailrace.router.worker_links import WorkerLinks
from tailrace.transfer.links import Identity

log = logging.getLogger(__name__)

BACKLOG = 2048
HTTP_GRACE_S = 1
TOKEN_CACHE_BYTES = TOKEN_STORE_BYTES = 64 << 20  # about 60 MB of text each
PORT_POLL_S = 0.2


def ingress_config(config: TailraceConfig, source: ModelSource, process: str) -> IngressConfig:
    """The ingress's view of the configuration."""
    sizes = derive(config, source.config)
    return IngressConfig(
        process=process,
        model_name=config.model_name or source.name,
        revision=source.revision,
        fidelity=f"{config.dtype}/exact",
        vocab_size=source.config.vocab_size,
        max_request_tokens=sizes.max_request_tokens,
        policy=FlowPolicy(
            retries=config.retries,
            max_worker_deaths_per_request=config.max_worker_deaths_per_request,
            router_wait_s=config.router_wait_s,
            request_lease_s=config.request_lease_s,
            left_to_gen=0 if sizes.replay is None else sizes.replay.encoder,
        ),
        api_keys=bearer_keys(config),
        max_active_requests=config.max_active_requests,
        max_body_bytes=config.max_body_bytes,
        header_wait_s=config.header_wait_s,
        slow_reader_s=config.slow_reader_s,
        stats_period_s=config.stats_period_s,
        public_metrics=config.public_metrics,
        tokenizer_threads=config.ingress.tokenizer_threads,
        tool_parser=config.tool_parser,
        cors_origins=config.cors_origins,
    )


def token_cache(config: TailraceConfig, source: ModelSource) -> PromptTokenCache | None:
    """The prompt-token cache, shared with this node's other ingress processes if there are to be any."""
    if not config.prompt_token_cache:
        return None
    cuts = exact_cuts(source.tokenizer, source.tokenizer.added_tokens())
    if cuts is None:
        log.warning("prompt_token_cache_off", extra={"fields": {"reason": "this tokenizer's texts have no exact cuts"}})
        return None
    store = None
    if config.ingress.replicas > 1:
        store = TokenStore(SHARED_MEMORY / f"tailrace-{config.app_name}-tokens", TOKEN_STORE_BYTES)
    return PromptTokenCache(source.tokenizer, cuts, revision=source.revision, max_bytes=TOKEN_CACHE_BYTES, store=store)


def router_settings(config: TailraceConfig) -> RouterSettings:
    """The router's view of the configuration."""
    threshold = config.local_prefill_max_tokens
    return RouterSettings(
        placement=config.placement,
        local_prefill=config.local_prefill,
        local_prefill_max_tokens=None if threshold == "auto" else threshold,
        pairs_per_worker=config.pairs_per_worker,
        max_waiting=config.max_queued_requests,
        max_wait_s=config.max_queue_wait_s,
        tenants={name: Share(tenant.weight, tenant.rate) for name, tenant in config.tenants.items()},
        max_migrations_in_flight=config.max_migrations_in_flight,
        breaker_faults=config.breaker_faults,
        breaker_probe_s=config.breaker_probe_s,
        max_worker_deaths_per_request=config.max_worker_deaths_per_request,
        request_lease_s=config.request_lease_s,
        heartbeat_s=config.heartbeat_s,
        ctx_replicas=config.ctx.replicas,
        gen_replicas=config.gen.replicas,
    )


class RouterFront:
    """The router with both its ports, published in the directory while it runs."""

    def __init__(self, config: TailraceConfig, directory: Directory, secret: bytes, *, name: str, host: str) -> None:
        self._config, self._directory, self._host = config, directory, host
        model = config.model_name or open_source(config.model).name
        decisions = DecisionLog(Path(config.decision_log), config.decision_log_bytes) if config.decision_log else None
        self._server = RouterServer(
            name, router_settings(config), secret, model=model, faults=config.faults, boot=new_boot(),
            decisions=decisions,
        )  # fmt: skip
        self._watch: asyncio.Task[None] | None = None
        self._heap: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """Port of the links."""
        return self._server.port

    @property
    def described(self) -> dict[str, Any]:
        return {"boot": self._server.boot, "operators_port": self._server.operators_port}

    async def start(self, port_wait_s: float = 0.0) -> None:
        """Listen and publish. A predecessor on this host may still hold the operators' port for `port_wait_s`.

        Raises:
            ConfigError: the port is taken; it is named.
        """
        end = time.monotonic() + port_wait_s
        operators = (self._config.operators_host, self._config.operators_port)
        while not _can_bind(*operators):
            if time.monotonic() > end:
                raise ConfigError(f"operators_port: port {operators[1]} on {operators[0]} is in use")
            await asyncio.sleep(PORT_POLL_S)
        try:
            await self._server.start(self._host, operators=operators)
        except OSError as error:
            await self._server.stop()
            raise ConfigError(f"operators_port: {error}") from None
        self._watch = asyncio.create_task(self._server.serve_forever(), name="router")
        self._heap = asyncio.create_task(_collect_garbage(lambda: self._server.num_workers), name="router-heap")
        entry = {"host": self._host, "port": self._server.port, "boot": self._server.boot}
        await asyncio.to_thread(self._directory.publish, ROUTER, entry)

    def check(self) -> None:
        """Raise if the router has ended: deposed by another, or its books are broken."""
        if self._watch is not None and self._watch.done():
            self._watch.result()
            raise PeerError("the router has ended")

    async def stop(self) -> None:
        entry = await asyncio.to_thread(self._directory.lookup, ROUTER)
        if entry is not None and entry.get("boot") == self._server.boot:
            await asyncio.to_thread(self._directory.withdraw, ROUTER)
        if self._heap is not None:
            self._heap.cancel()
        await self._server.stop()
        if self._watch is not None:
            await asyncio.wait([self._watch])


class IngressFront:
    """One ingress. `app` is its ASGI application, whose lifespan starts and ends everything."""

    def __init__(self, config: TailraceConfig, directory: Directory, secret: bytes, *, name: str, host: str) -> None:
        _leave_a_core()
        source = open_source(config.model)
        me = Identity("ingress", name, new_boot())
        self.described = {"boot": me.boot}
        self._directory = directory
        service = IngressService(
            ingress_config(config, source, name),
            source.tokenizer,
            source.chat_template,
            BlockHasher(secret, config.block_tokens),
            RouterLink(self._find_router, me, secret),
            WorkerLinks(me, secret),
            token_cache=token_cache(config, source),
        )
        self.app = build_app(service)
        self._service = service
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._heap: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """All but garbage is the matter of the application's lifespan. What is kept for long is here by now."""
        self._heap = asyncio.create_task(_collect_garbage(lambda: 1), name="ingress-heap")

    async def listen(self, host: str, port: int) -> int:
        """Serve HTTP here (without Ray, whose Serve does it otherwise); returns the port.

        Raises:
            ConfigError: the port is taken; it is named.
        """
        sock = _bound(host, port)
        self._server = _Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=HTTP_GRACE_S,
                lifespan="on",
                http=LimitedProtocol,
                ws="none",
                proxy_headers=False,
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]), name="http")
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise PeerError("the HTTP server ended before it served")
            await asyncio.sleep(0.005)
        return sock.getsockname()[1]

    def check(self) -> None:
        """Raise if the HTTP server has ended by itself, or a fault has ended what keeps its requests."""
        self._service.check()
        if self._serving is not None and self._serving.done():
            self._serving.result()
            raise PeerError("the HTTP server has ended")

    async def stop(self) -> None:
        if self._heap is not None:
            self._heap.cancel()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def _find_router(self) -> Address | None:
        entry = await asyncio.to_thread(self._directory.lookup, ROUTER)
        return None if entry is None else (entry["host"], entry["port"], entry["boot"])


async def _collect_garbage(kept: Callable[[], int]) -> None:
    """Between a process's events, as long as it runs. `kept`: as Heap.tick has it."""
    heap = Heap()
    heap.begin()
    try:
        while True:
            await asyncio.sleep(TICK_S)
            heap.tick(kept())
    finally:
        heap.end()


def _leave_a_core() -> None:
    """The tokenizers library takes as many threads as there are cores, and while it has a long prompt the event loop
    would have to share one. Where that would be one thread it uses its caller's instead: the way to a thread and back
    is a tenth of a short prompt. Read when it tokenizes; what the operator has set stands."""
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    if threads == 1:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to the process around it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _can_bind(host: str, port: int) -> bool:
    try:
        _bound(host, port).close()
    except ConfigError:
        return False
    return True


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"port {port} on {host} cannot be used: {error.strerror}") from None
    return sock
