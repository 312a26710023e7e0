"""Block hashes: the same in every process, different for whatever must not be mixed up."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tailrace.kv_cache.block_hash import HASH_BYTES, BlockHasher, namespace, split_hashes

IDS = [(7 * i) % 50_000 for i in range(200)]
PROGRAM = """
from tailrace.kv_cache.block_hash import BlockHasher, namespace
ids = [(7 * i) % 50_000 for i in range(200)]
print(BlockHasher(b"secret", 64).hash_blocks("rev|tenant", ids).hex(), namespace("rev|tenant", "bfloat16/exact").hex())
"""


def _in_process_with_seed(seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_hashes_are_equal_in_processes_with_different_hash_seeds():
    here = BlockHasher(b"secret", 64).hash_blocks("rev|tenant", IDS).hex()
    outputs = {_in_process_with_seed(seed) for seed in ("0", "1", "4294967295")}
    assert outputs == {f"{here} {namespace('rev|tenant', 'bfloat16/exact').hex()}"}


def test_a_known_vector_stays_what_it_is():
    """A change of the arithmetic would make workers of two versions miss each other's pages without any error."""
    assert BlockHasher(b"secret", 4).hash_blocks("scope", [1, 2, 3, 4, 5, 6, 7, 8, 9]).hex() == (
        "42367669f3f000f17e163a3e660873f8f2f2c043ba0f2d37a6e7948b96d5f357"
    )


def test_only_full_blocks_have_a_hash():
    hasher = BlockHasher(b"s", 64)
    assert [len(hasher.hash_blocks("a", IDS[:n])) for n in (0, 63, 64, 65, 127, 128, 200)] == [
        0, 0, 16, 16, 16, 32, 48,
    ]  # fmt: skip


def test_a_hash_names_the_whole_prefix():
    hasher = BlockHasher(b"s", 8)
    first = split_hashes(hasher.hash_blocks("a", [1] * 8 + [2] * 8))
    other = split_hashes(hasher.hash_blocks("a", [3] * 8 + [2] * 8))
    assert first[0] != other[0] and first[1] != other[1]


def test_hashing_goes_on_from_a_parent():
    hasher = BlockHasher(b"s", 8)
    whole = hasher.hash_blocks("a", IDS[:64])
    assert hasher.hash_blocks("a", IDS[32:64], parent=whole[3 * HASH_BYTES : 4 * HASH_BYTES]) == whole[4 * HASH_BYTES :]


@pytest.mark.parametrize("other", [("t", "a", 8), ("s", "b", 8), ("s", "a", 16)])
def test_secret_scope_and_block_size_are_in_the_hash(other):
    secret, scope, block = other
    assert (
        BlockHasher(b"s", 8).hash_blocks("a", IDS[:16])[:16]
        != BlockHasher(secret.encode(), block).hash_blocks(scope, IDS[:16])[:16]
    )


def test_two_tenants_have_different_hashes_and_namespaces():
    hasher = BlockHasher(b"s", 64)
    assert hasher.hash_blocks("rev|x", IDS)[:16] != hasher.hash_blocks("rev|y", IDS)[:16]
    assert namespace("rev|x", "f32/exact") != namespace("rev|y", "f32/exact")
    assert namespace("rev|x", "f32/exact") != namespace("rev|x", "f32/int8")


def test_parts_of_a_scope_cannot_be_shifted_into_each_other():
    assert namespace("ab", "c") != namespace("a", "bc")
    assert BlockHasher(b"ab", 4).hash_blocks("c", [0] * 4) != BlockHasher(b"a", 4).hash_blocks("bc", [0] * 4)


def test_ids_may_be_any_sequence():
    hasher = BlockHasher(b"s", 16)
    want = hasher.hash_blocks("a", IDS)
    assert hasher.hash_blocks("a", tuple(IDS)) == want
    assert hasher.hash_blocks("a", np.array(IDS, np.int64)) == want


def test_fingerprints_differ_with_secret_or_block_size():
    prints = {BlockHasher(s, b).fingerprint() for s in (b"one", b"two") for b in (16, 64)}
    assert len(prints) == 4


def test_a_packed_run_of_the_wrong_length_is_refused():
    assert split_hashes(b"x" * 32) == [b"x" * 16, b"x" * 16]
    with pytest.raises(ValueError, match="17 bytes"):
        split_hashes(b"x" * 17)
