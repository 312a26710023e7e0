"""Philox4x32-10, the counter-based generator behind every draw.

A draw is a pure function of (seed, absolute position, sample index, draw number), so any worker, batch or attempt that
draws the same token draws it alike. Integer arithmetic only: bit-equal on every machine, and in a kernel's twin.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MASK = 0xFFFFFFFF


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Random words of each row.

    Args:
        counters: [n, 4] unsigned, values below 2^32.
        keys: [n, 2] unsigned, values below 2^32, low word first.

    Returns:
        [n, 4] uint32.
    """
    x0, x1, x2, x3 = (np.ascontiguousarray(column, dtype=np.uint64) for column in counters.T)
    k0, k1 = (np.ascontiguousarray(column, dtype=np.uint64) for column in keys.T)
    w0, w1 = np.uint64(_W0), np.uint64(_W1)
    for _ in range(ROUNDS):
        product0, product1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (
            (product1 >> _HALF) ^ x1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ x3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + w0) & _LOW, (k1 + w1) & _LOW
    return np.stack((x0, x1, x2, x3), axis=1).astype(np.uint32)


def uniforms(seeds: list[int], positions: list[int], samples: list[int], draw: int = 0) -> np.ndarray:
    """[n] float64 in [0, 1) with 53 random bits, from the first two words of counter (position, sample, draw, 0).

    Seeds are taken modulo 2^64, so a negative one is as good as any.
    """
    n = len(seeds)
    counters = np.zeros((n, 4), np.uint64)
    counters[:, 0] = [p & _MASK for p in positions]
    counters[:, 1] = [s & _MASK for s in samples]
    counters[:, 2] = draw
    keys = np.array([(s & _MASK, (s >> 32) & _MASK) for s in seeds], np.uint64).reshape(n, 2)
    words = philox4x32(counters, keys)
    high, low = words[:, 0] >> np.uint32(5), words[:, 1] >> np.uint32(6)
    return (high.astype(np.float64) * 67108864.0 + low.astype(np.float64)) / 9007199254740992.0
