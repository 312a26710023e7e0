"""A Ray cluster of this machine alone, for `tailrace serve`: started, watched and removed without a trace.

Everything of it stands in one short temporary folder and carries that folder's name in its environment; every port
besides the two that the operator chose is a free one, so several can run side by side and beside other Rays. It never
runs `ray stop`, which would end other people's clusters. If the driver dies, the kernel ends Ray's processes, and the
watchdog (cluster/sweep.py) ends and removes the rest.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tailrace.cluster.sweep import MARKER, sweep
from tailrace.model.errors import ConfigError

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # neither tokens nor pages travel there
SERVE_SHUTDOWN_S = 8.0
LONGEST_STREAM_S = 24 * 3600
MAX_FOLDER_CHARS = 28  # HAProxy's socket path is FOLDER/<56 characters of node id>/admin.sock, at most 97 in all


def check_port_free(host: str, port: int, key: str) -> None:
    """Raise ConfigError if something listens there. Without it HAProxy would share the port with a stranger's."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{key}: port {port} on {host} cannot be used: {error.strerror}") from None


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def ray_environment(folder: Path) -> dict[str, str]:
    """What Ray and Serve are told, on purpose; docs/operations names the reasons. Read by them at import."""
    metrics, stats, fallback, fallback_grpc = free_ports(4)
    return {
        MARKER: str(folder),
        "RAY_AUTH_MODE": "disabled",  # one machine, loopback only
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # 7 times the request rate of the Python proxy
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(LONGEST_STREAM_S),  # the default cuts streams after two minutes
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(LONGEST_STREAM_S),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",  # else every shutdown takes 30 s
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(stats),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


def _max_connections() -> int:
    """HAProxy needs about two and a half files a connection and does not start if the limit is lower."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 8192 if limit == resource.RLIM_INFINITY else max(64, min(8192, limit // 4))


class LocalCluster:
    """One local Ray with Serve's proxy. Use as a context manager; leaving it removes everything within 20 s."""

    def __init__(self, app_name: str, http_options: dict[str, Any]) -> None:
        self.app_name, self.http_options = app_name, http_options
        self.folder = Path(tempfile.mkdtemp(prefix="tailrace-"))
        if len(str(self.folder)) > MAX_FOLDER_CHARS:
            self.folder.rmdir()
            raise ConfigError(f"TMPDIR: {self.folder.parent} is too long a path for the sockets that stand under it")
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> None:
        if "ray" in sys.modules:
            raise ConfigError("a local cluster must be started before Ray is imported: it reads its environment then")
        command = [sys.executable, "-m", "tailrace.cluster.sweep", str(self.folder), self.app_name]
        self._watchdog = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        os.environ.update(ray_environment(self.folder))
        import ray
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        ray.init(
            "local",  # whatever cluster RAY_ADDRESS names
            num_cpus=max(8, 2 * (os.cpu_count() or 1)),  # logical; the replicas ask for fractions
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.folder),
        )
        serve.start(http_options=self.http_options, logging_config={"log_level": "WARNING", "enable_access_log": False})

    def alive(self) -> bool:
        """Whether all of Ray's own processes live; its actors are Ray's to watch."""
        from ray._private import worker

        node = worker._global_node
        return node is not None and node.remaining_processes_alive()

    def stop(self) -> None:
        """End Serve, Ray and all that they started; then look that nothing is left."""
        if "ray" in sys.modules:
            import ray
            from ray import serve

            if ray.is_initialized():
                # Ray prints that a task failed when Serve ends its own controller: nothing that anybody need know.
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    ending = threading.Thread(target=serve.shutdown, daemon=True)
                    ending.start()
                    ending.join(SERVE_SHUTDOWN_S)  # open streams could hold it for minutes: they are cut
                    ray.shutdown()
        left = sweep(self.folder, self.app_name, spare=frozenset({os.getpid()}))
        if left:
            log.error("processes_left", extra={"fields": {"pids": left}})
        if self._watchdog is not None and self._watchdog.stdin is not None:
            self._watchdog.stdin.close()
            self._watchdog.wait(10)
            self._watchdog = None
        shutil.rmtree(self.folder, ignore_errors=True)
        os.environ.pop(MARKER, None)
