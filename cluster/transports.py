"""The transports of a worker, as its configuration says. Part of the composition root; decides nothing later."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.spec import RankSpec
from tailrace.kv_cache.arena import ArenaGroup
from tailrace.transfer.transports.base import PageHook, Transport, Wake
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.ray import RayTransport
from tailrace.transfer.transports.ray_objects import RayObjects
from tailrace.transfer.transports.shm import ShmTransport
from tailrace.transfer.transports.ucx import UcxTransport
from tailrace.transfer.transports.ucx_thread import Library

STAGING_CHUNKS = 4


def make_transports(
    config: TailraceConfig,
    spec: RankSpec,
    boot: str,
    arenas: ArenaGroup,
    wake: Wake,
    hook: PageHook | None,
    page_bytes: Iterable[int] = (),
) -> list[Transport]:
    """In order of preference: within a host shared memory, between hosts nixl, then ucx, where they are installed.

    Args:
        page_bytes: of a page of a ctx and of a gen worker, all ranks together.

    Raises:
        ConfigError: the one that is asked for cannot work here; the message says why.
    """
    choice, reads = config.transport, spec.role == "gen"
    made: list[Transport] = []
    chunks = ChunkConfig(
        landing_chunks=config.landing_chunks if reads else 0,
        staging_chunks=0 if reads else STAGING_CHUNKS,
        chunk_bytes=chunk_bytes(config.landing_chunk_bytes, page_bytes),
    )
    if choice in ("auto", "shm"):
        made.append(ShmTransport(arenas, wake=wake, hook=hook))
    if choice == "nixl" or (choice == "auto" and importlib.util.find_spec("nixl")):
        made.append(NixlTransport(boot, arenas, chunks, wake=wake, hook=hook))
    if choice == "ucx" or (choice == "auto" and importlib.util.find_spec("ucxx")):
        if choice == "ucx":
            Library()  # says now, and not with the first pair, if it cannot be loaded
        made.append(UcxTransport(spec.host, arenas, chunks, wake=wake, hook=hook))
    if choice == "ray":
        objects = RayObjects(spec.ray_address)
        made.append(RayTransport(arenas, objects, chunks.landing_chunks, wake=wake, hook=hook))
    return made


def chunk_bytes(configured: int, page_bytes: Iterable[int]) -> int:
    """Size of a chunk, the same at ctx and gen: where their pages differ it takes two of the larger.

    One of them would not do: a chunk takes whole pages of gen, which may be fewer bytes, and a page that its codec
    could not shorten is a little longer than itself.
    """
    sizes = set(page_bytes)
    return max(configured, 2 * max(sizes)) if len(sizes) > 1 else configured
