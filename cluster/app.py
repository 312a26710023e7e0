"""The Ray Serve application: Ingress, Router, CtxPool and GenPool, from one mapping of settings.

    import_path: tailrace.cluster.app:build

Ray carries their life cycle, placement, discovery and health; requests, tokens and pages go over our own sockets. The
Ingress is bound to the other three so that Serve deploys them all; it never calls them. A replica here is small and
torch-free: a worker's replica supervises a rank process. When a replica dies Serve makes a new one, with a new boot id;
all that is needed then is found through the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from tailrace.cluster import log as logs
from tailrace.cluster.config import Placement, TailraceConfig, load_config
from tailrace.cluster.discovery import Directory, RayDirectory, shared_secret
from tailrace.cluster.front import IngressFront, RouterFront
from tailrace.cluster.progress import PhaseLimits
from tailrace.cluster.sizes import derive
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.supervisor import Supervisor
from tailrace.model.errors import WorkerError
from tailrace.model.source import open_source

log = logging.getLogger(__name__)

SHUTDOWN_MARGIN_S = 30.0
HEALTH_TIMEOUT_S = 10.0  # of the supervisor's own answer, which takes microseconds; a rank's limits are the config's
CONSTRUCTOR_RETRIES = 3
PREDECESSOR_S = 15.0  # a router that is being replaced may hold the operators' port for so long
SPARE_ONGOING = 256  # probes, metrics and refusals pass while the requests are at their bound


class Ingress:
    """One HTTP replica."""

    async def __init__(self, args: dict[str, Any], secret: str, *others: DeploymentHandle) -> None:
        config = _start("ingress", args)
        self._front = IngressFront(config, _directory(config), secret.encode(), name=f"ingress-{_rank()}", host=_host())
        await self._front.start()

    def __serve_build_asgi_app__(self) -> Any:
        return self._front.app

    def check_health(self) -> None:
        self._front.check()

    async def __del__(self) -> None:
        await self._front.stop()


class Router:
    """The router."""

    async def __init__(self, args: dict[str, Any], secret: str) -> None:
        config = _start("router", args)
        self._front = RouterFront(config, _directory(config), secret.encode(), name="router", host=_host())
        await self._front.start(PREDECESSOR_S)

    def check_health(self) -> None:
        self._front.check()

    async def __del__(self) -> None:
        await self._front.stop()


class _Worker:
    """A worker's replica: the supervisor of its rank processes."""

    role = ""
    _following: asyncio.Task[None] | None = None

    async def __init__(self, args: dict[str, Any], secret: str) -> None:
        name = f"{self.role}-{_rank()}"
        self._config = _start(name, args)
        address = ray.get_runtime_context().gcs_address
        spec = RankSpec(self.role, name, _host(), args, secret, ray_address=address)
        self._supervisor = Supervisor(spec, PhaseLimits.of(self._config), _directory(self._config))
        ready = await self._supervisor.start()
        log.info("worker_ready", extra={"fields": {"worker": name, "boot": ready.boot, "port": ready.port}})
        self._following = asyncio.create_task(self._follow_rank(), name="follow-rank")

    async def _follow_rank(self) -> None:
        """A replica whose rank has died ends with it: Serve replaces a dead actor at once, an unhealthy one only after
        its third failed check, and there is nothing left to drain. Cancelled before the rank is stopped on purpose."""
        status = await self._supervisor.wait()
        log.error("rank_died", extra={"fields": {"worker": self._supervisor.spec.name, "status": status}})
        with contextlib.suppress(WorkerError):
            self._supervisor.check()  # says which rank began it, and why
        os._exit(1)

    def check_health(self) -> None:
        self._supervisor.check()

    async def __del__(self) -> None:
        """Serve awaits this when it takes the replica away: the rank refuses new work, finishes what it
        holds for others, then ends in order."""
        if self._following is not None:
            self._following.cancel()
        if self._supervisor.well:
            await self._supervisor.drain(self._config.drain_limit_s)
        await self._supervisor.stop()


class CtxPool(_Worker):
    """One context worker a replica."""

    role = "ctx"


class GenPool(_Worker):
    """One generation worker a replica."""

    role = "gen"


def build(args: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and `tailrace serve`.

    Raises:
        ConfigError: the settings are wrong, or do not fit the model's shape; nothing has been started then.
    """
    config = load_config(args)
    derive(config, open_source(config.model).config)
    secret = _secret(config)
    router = _deployment(Router, config, config.router, 1).bind(args, secret)
    ctx = _deployment(CtxPool, config, config.ctx, config.ctx.replicas, gpus=config.gpus("ctx")).bind(args, secret)
    gen = _deployment(GenPool, config, config.gen, config.gen.replicas, gpus=config.gpus("gen")).bind(args, secret)
    ingress = _deployment(
        serve.ingress()(Ingress),
        config,
        config.ingress,
        config.ingress.replicas,
        max_ongoing_requests=config.max_active_requests + SPARE_ONGOING,
    )
    return ingress.bind(args, secret, router, ctx, gen)


def _deployment(
    kind: type, config: TailraceConfig, place: Placement, replicas: int, *, gpus: float = 0.0, **options: Any
) -> serve.Deployment:
    actor: dict[str, Any] = {"num_cpus": place.num_cpus}
    if gpus:
        actor["num_gpus"] = gpus
    if place.resources:
        actor["resources"] = place.resources
    if place.labels:
        actor["label_selector"] = place.labels
    decorate = serve.deployment(
        name=kind.__name__,
        num_replicas=replicas,
        ray_actor_options=actor,
        health_check_period_s=config.health_period_s,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=config.drain_limit_s + SHUTDOWN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        **options,
    )
    return decorate(kind)


def _secret(config: TailraceConfig) -> str:
    """The configured secret, or the application's own from the cluster, so that a second deployment changes nothing."""
    if config.cluster_secret is not None:
        return config.cluster_secret.get_secret_value()
    if not ray.is_initialized():  # `serve build` looks at the application without a cluster
        return secrets.token_hex(32)
    return shared_secret(_directory(config), None).decode()


def _start(name: str, args: dict[str, Any]) -> TailraceConfig:
    config = load_config(args)
    logs.configure(config.log_level, name)
    log.info("replica_starts", extra={"fields": logs.versions()})
    return config


def _directory(config: TailraceConfig) -> Directory:
    return RayDirectory(config.app_name)


def _rank() -> int:
    """Number of this replica among its deployment's: stable over restarts, so a worker keeps its name."""
    return serve.get_replica_context().rank.rank


def _host() -> str:
    return ray.util.get_node_ip_address()
