"""Gens for the transports' conformance suite, and rigs of two nodes, ended with everything they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from node_rig import Rig
from small_ray import small_ray
from transport_peers import PACKAGES, Gen, end_server

MakeGen = Callable[..., Gen]


@pytest.fixture(scope="module")
def server_ends() -> Iterator[None]:
    yield
    end_server()


@pytest.fixture(scope="session")
def one_ray() -> Iterator[None]:
    """Ctx processes join it as drivers."""
    with small_ray():
        end_server()  # what it forks shall know the address
        yield


@pytest.fixture
def make_gen(server_ends: None, request: pytest.FixtureRequest) -> Iterator[MakeGen]:
    made: list[Gen] = []

    def make(kind: str, page_bytes: int = 16384, num_pages: int = 64, **options: Any) -> Gen:
        if kind in PACKAGES:
            pytest.importorskip(PACKAGES[kind], reason=f"the package {PACKAGES[kind]} is not installed")
        if kind == "peer_cuda" and not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
        if kind == "ray":
            request.getfixturevalue("one_ray")
        made.append(Gen(kind, page_bytes, num_pages, **options))
        return made[-1]

    yield make
    for gen in made:
        gen.close()


@pytest.fixture(params=["in_process", "shm", "peer", "nixl"])
def rig(request):
    rig = Rig(request.param)
    yield rig
    rig.close()


@pytest.fixture
def one_rig():
    rigs = []

    def make(kind="shm", **changes):
        rigs.append(Rig(kind, **changes))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
