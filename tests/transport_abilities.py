"""What the transports do not do, and why: the one table by which the conformance suite skips."""

from __future__ import annotations

import pytest

UNSUPPORTED: dict[tuple[str, str], str] = {
    ("in_process", "another process"): "in_process has no other process",
    ("nixl", "reads after death"): "the memory of a dead peer cannot be seen from another host",
    ("ucx", "reads after death"): "the memory of a dead peer cannot be seen from another host",
    ("ray", "reads after death"): "an object that was not got dies with its owner",
    ("in_process", "landing chunks"): "gen reads: nothing is granted",
    ("shm", "landing chunks"): "gen reads: nothing is granted",
    ("peer", "landing chunks"): "gen reads: nothing is granted",
    ("peer_cuda", "landing chunks"): "gen reads: nothing is granted",
    ("peer_cuda", "one process"): "a process cannot map its own memory through CUDA IPC",
    ("ray", "bounded chunks"): "an object takes as many pages as there are",
    ("ray", "bytes at rest"): "an object in the store is read-only: nobody can flip a byte of it",
    ("shm", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("peer", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("peer_cuda", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("nixl", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("ucx", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("ray", "any order"): "the test draws the order of ends, and only in_process lets it",
    ("ray", "unlike pages"): "Ray moves whole tensors as they are",
    ("ucx", "a receiver that takes nothing"): "a thread of its own receives, whoever polls",
    ("ray", "a receiver that takes nothing"): "the store takes an object, whoever polls",
}


def needs(kind: str, ability: str) -> None:
    """Skip, with the reason, if this transport does not do that."""
    assert any(known == ability for _, known in UNSUPPORTED), f"{ability!r} is not in the table"
    if (kind, ability) in UNSUPPORTED:
        pytest.skip(f"{kind}: {UNSUPPORTED[kind, ability]}")
