"""Names of prompt blocks: equal in every process that knows the cluster secret, whatever its hash seed or machine.

A block hash is SHA-256 cut to 128 bits over (cluster secret, scope, parent hash, token ids), so it names the whole
prefix up to the block's end. A namespace (scope, fidelity class) is the key of an index and no part of the hash.
Knows nothing of pages. Holds no state that could die.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

HASH_BYTES = 16
_ROOT = bytes(HASH_BYTES)
_BYTES_PER_ID = 4


def _framed(*parts: bytes) -> bytes:
    """Parts with their lengths, so that no two lists of parts give the same bytes."""
    return b"".join(len(p).to_bytes(8, "little") + p for p in parts)


def _pack(ids: Sequence[int]) -> memoryview:
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed.tobytes())


class BlockHasher:
    """Hashes the full blocks of token sequences.

    Args:
        secret: the cluster secret; without it nobody can predict a hash.
        block_tokens: tokens a block, one value for the cluster.
    """

    def __init__(self, secret: bytes, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
        self.block_tokens = block_tokens
        self._secret = secret

    def hash_blocks(self, scope: str, ids: Sequence[int], parent: bytes = b"") -> bytes:
        """Packed 16-byte hashes of the full blocks of `ids`; a last, partial block has none.

        Args:
            scope: model revision, adapter, tenant or cache salt.
            ids: token ids, each in [0, 2**31).
            parent: hash of the block before ids[0]; empty at the start of a sequence.
        """
        packed = _pack(ids)
        step = self.block_tokens * _BYTES_PER_ID
        base = hashlib.sha256(_framed(b"tailrace block 1", self._secret, scope.encode()))
        last = parent or _ROOT
        hashes = []
        for start in range(0, len(packed) - step + 1, step):
            block = base.copy()
            block.update(last)
            block.update(packed[start : start + step])
            last = block.digest()[:HASH_BYTES]
            hashes.append(last)
        return b"".join(hashes)

    def fingerprint(self) -> bytes:
        """Hash of a known sequence: two processes that differ in secret, block size or arithmetic differ in it."""
        return self.hash_blocks("fingerprint", range(self.block_tokens))


def split_hashes(packed: bytes) -> list[bytes]:
    """The single hashes of a packed run; raises ValueError if its length is no multiple of 16."""
    if len(packed) % HASH_BYTES:
        raise ValueError(f"packed hashes have {len(packed)} bytes, which is no multiple of {HASH_BYTES}")
    return [packed[i : i + HASH_BYTES] for i in range(0, len(packed), HASH_BYTES)]


def namespace(scope: str, fidelity: str) -> bytes:
    """16 bytes naming (scope, fidelity class), e.g. ("rev9|tenant-a", "bfloat16/exact")."""
    return hashlib.sha256(_framed(b"tailrace namespace 1", scope.encode(), fidelity.encode())).digest()[:HASH_BYTES]


def lossy_namespace(exact: bytes, step: str) -> bytes:
    """16 bytes naming the fidelity class of pages that a lossy step made, beside the namespace they would be exact in.

    Args:
        exact: as `namespace` gives it.
        step: what was lost and how, e.g. "int8"; never empty.
    """
    if not step:
        raise ValueError("a lossy namespace names the step that made its pages")
    return hashlib.sha256(_framed(b"tailrace lossy 1", exact, step.encode())).digest()[:HASH_BYTES]
