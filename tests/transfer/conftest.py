"""Gens for the transports' conformance suite, ended with everything they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from transport_peers import Gen, end_server

MakeGen = Callable[..., Gen]


@pytest.fixture(scope="module")
def server_ends() -> Iterator[None]:
    yield
    end_server()


@pytest.fixture
def make_gen(server_ends: None) -> Iterator[MakeGen]:
    made: list[Gen] = []

    def make(kind: str, page_bytes: int = 16384, num_pages: int = 64, **options: Any) -> Gen:
        if kind == "nixl":
            pytest.importorskip("nixl", reason="the package nixl is not installed")
        made.append(Gen(kind, page_bytes, num_pages, **options))
        return made[-1]

    yield make
    for gen in made:
        gen.close()
