"""Rows of the other transports: the same pages over ucx, and over Ray, the baseline.

    transfer.ucx.16k    64 MiB in pages of 16 KiB, random order, over UCX's tcp     against copy, nixl_one_block
    transfer.ray.16k    the same as whole arrays through Ray's object store         against copy, nixl_one_block

A part of bench/transfer.py, which runs them. Ray is started for its row and ended after it.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
from typing import Any

from harness import Options, Row, identity, interleaved, row_of
from transfer_pair import CHUNKS, CTX, GEN, GRANTS, KEY, TOTAL, Pair

from tailrace.kv_cache.arena import Arena
from tailrace.transfer.transports.base import PeerNotice, Transport, Wake
from tailrace.transfer.transports.nixl import ChunkConfig
from tailrace.transfer.transports.ray import RayTransport
from tailrace.transfer.transports.ray_objects import RayObjects
from tailrace.transfer.transports.ucx import UcxTransport

PAGE_BYTES = 16384
PACKAGES = {"ucx": "ucxx", "ray": "ray"}
NAMES = tuple(f"transfer.{kind}.16k" for kind in PACKAGES)
STORE_BYTES = 512 << 20
DATAGRAM = 1 << 20


def make_peer(kind: str, boot: str, arena: Arena, chunks: ChunkConfig, wake: Wake) -> Any:
    if kind == "ucx":
        return UcxTransport("127.0.0.1", arena, chunks, wake=wake)
    objects = RayObjects(os.environ["RAY_ADDRESS"])
    return Noticing(RayTransport(arena, objects, chunks.landing_chunks, wake=wake), boot)


class Noticing:
    """A transport whose halves talk by datagrams, as the pair's link carries them in a worker."""

    def __init__(self, transport: RayTransport, boot: str) -> None:
        self._transport = transport
        owner = os.getpid() if boot == GEN else os.getppid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * DATAGRAM)
        self._socket.bind(f"\0tailrace-bench-{owner}-{boot}")
        self._socket.setblocking(False)
        self._peer = CTX if boot == GEN else GEN
        self._there = f"\0tailrace-bench-{owner}-{self._peer}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def poll(self) -> list[Any]:
        while True:
            try:
                self._transport.noticed(self._peer, self._socket.recv(DATAGRAM))
            except BlockingIOError:
                break
        events = self._transport.poll()
        for event in events:
            if isinstance(event, PeerNotice):
                self._socket.sendto(event.data, self._there)
        return [event for event in events if not isinstance(event, PeerNotice)]

    def close(self) -> None:
        self._transport.close()
        self._socket.close()


def measure(kind: str, pairs: int) -> Row:
    name = f"transfer.{kind}.16k"
    n = TOTAL // PAGE_BYTES
    what = identity(transport=kind, page_bytes=PAGE_BYTES, pages=n)
    if kind == "ucx":
        what |= {"TLS": "tcp", "chunk_bytes": CHUNKS.chunk_bytes, "grants": GRANTS}
    nixl = Pair("nixl", PAGE_BYTES, n)
    pair = Pair(kind, PAGE_BYTES, n)
    try:
        transport: Transport = pair.transport
        assert transport.name == kind and not transport.grants(KEY, "nobody", 1)
        pair.move()
        if not pair.is_right():
            reason = "bytes differ; when they agree"
            return Row(name, None, "GB/s", "higher", status="held", reason=reason, identity=what)
        measures = {
            "ours": lambda: TOTAL / pair.move() / 1e9,
            "nixl_one_block": lambda: TOTAL / nixl.one_block() / 1e9,
            "copy": lambda: TOTAL / pair.copy() / 1e9,
        }
        return row_of(name, "GB/s", "higher", interleaved(measures, pairs, warm_ups=2), what)
    finally:
        pair.close()
        nixl.close()


def measure_ray(pairs: int) -> Row:
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        try:
            started = ray.init(
                num_cpus=1, include_dashboard=False, object_store_memory=STORE_BYTES, log_to_driver=False,
                configure_logging=False, _temp_dir=folder,
            )  # fmt: skip
            os.environ["RAY_ADDRESS"] = started.address_info["gcs_address"]
            return measure("ray", pairs)
        finally:
            os.environ.pop("RAY_ADDRESS", None)
            ray.shutdown()


def rows(options: Options) -> list[Row]:
    found = []
    for kind, package in PACKAGES.items():
        name = f"transfer.{kind}.16k"
        if not options.wants(name):
            continue
        if importlib.util.find_spec(package) is None:
            reason = f"the package {package} is not installed"
            found.append(Row(name, None, "GB/s", "higher", status="unsupported", reason=reason))
        else:
            found.append(measure("ucx", options.pairs) if kind == "ucx" else measure_ray(options.pairs))
    return found
