"""Which transports a worker makes of its configuration, in which order, and what it says if it cannot."""

from __future__ import annotations

import importlib.util
import os

import pytest
from transport_peers import layout, new_arena, worker_name

from tailrace.cluster.config import load_config
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.transports import chunk_bytes, make_transports
from tailrace.kv_cache.arena import ArenaGroup
from tailrace.model.errors import ConfigError
from tailrace.transfer.transports.landing import CODED_PAGE_EXTRA
from tailrace.transfer.transports.nixl import ChunkConfig


@pytest.fixture
def arenas():
    arena = new_arena(worker_name("made"), "b0", 4096, 8)
    assert layout(4096).bytes_per_page == 4096
    yield ArenaGroup([arena])
    arena.unlink()


def make(arenas: ArenaGroup, role: str = "gen", **args):
    spec = RankSpec(role, f"{role}-0", "127.0.0.1", args, "secret" * 4, ray_address="127.0.0.1:1")
    return make_transports(load_config(args), spec, "b0", arenas, lambda: None, None)


def names(transports) -> list[str]:
    found = [transport.name for transport in transports]
    for transport in transports:
        transport.close()
    return found


def test_auto_prefers_shared_memory_then_nixl_then_ucx_as_they_are_installed(arenas, monkeypatch):
    pytest.importorskip("nixl")
    pytest.importorskip("ucxx")
    assert names(make(arenas)) == ["shm", "nixl", "ucx"]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "nixl" else find(name, *rest))
    assert names(make(arenas)) == ["shm", "ucx"]


def test_a_transport_that_is_asked_for_by_name_is_alone_and_only_gen_grants_chunks(arenas):
    pytest.importorskip("ucxx")
    (gen,) = made = make(arenas, transport="ucx", landing_chunks=3)
    assert (gen.name, gen.counts().total) == ("ucx", 3)
    assert names(made) == ["ucx"]
    (ctx,) = made = make(arenas, "ctx", transport="ucx")
    assert ctx.counts().total == 0 and ctx.info_for("gen") == b""
    assert names(made) == ["ucx"]


def test_ucx_without_its_package_is_an_error_at_start_that_names_it(arenas, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ucxx._lib.libucxx", None)
    with pytest.raises(ConfigError, match="transport ucx needs the package ucxx-cu12, the extra `ucx`"):
        make(arenas, transport="ucx")


def test_ray_without_a_ray_is_an_error_at_start(arenas):
    if "RAY_ADDRESS" in os.environ:
        pytest.skip("this process has joined a Ray already")
    with pytest.raises(ConfigError, match="transport ray needs a running Ray, none answers at 127.0.0.1:1"):
        make(arenas, transport="ray", transceiver_runtime="ray")


@pytest.mark.parametrize("sizes", [(8, 64), (64, 8), (16, 64), (24, 64)])
def test_chunks_of_both_sides_take_the_pages_of_either_however_small_they_are_configured(sizes):
    """What gen's chunk holds, whole pages of its own, takes a page of ctx and fits ctx's staging."""
    ctx, gen = (512 * tokens for tokens in sizes)
    chunks = ChunkConfig(chunk_bytes=chunk_bytes(1, (ctx, gen)))
    room = max(chunks.pages_per_chunk(gen) * gen, gen + CODED_PAGE_EXTRA)
    assert ctx + CODED_PAGE_EXTRA <= room <= chunks.staging_room(ctx)


def test_the_configured_size_of_chunks_stands_where_it_does():
    assert chunk_bytes(4096, (512, 512)) == chunk_bytes(4096, (512, 2048)) == 4096
    assert chunk_bytes(256, (512, 512)) == 256, "a chunk takes one page at least"
