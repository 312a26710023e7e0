"""Philox4x32-10 against its published vectors, and the uniforms made of it."""

import numpy as np
import pytest

from tailrace.engine.philox import philox4x32, uniforms

# Known answers of the Random123 distribution for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), VECTORS)
def test_a_block_equals_the_published_answer(counter, key, answer):
    result = philox4x32(np.array([words(counter)], np.uint64), np.array([words(key)], np.uint64))
    assert result[0].tolist() == words(answer)


def test_rows_do_not_depend_on_their_neighbours():
    counters = np.array([words(v[0]) for v in VECTORS], np.uint64)
    keys = np.array([words(v[1]) for v in VECTORS], np.uint64)
    together = philox4x32(counters, keys)
    assert together.tolist() == [words(v[2]) for v in VECTORS]


def test_a_uniform_takes_key_and_counter_from_seed_position_sample_and_draw():
    seed = 0x299F31D0A4093822
    block = philox4x32(np.array([[17, 3, 2, 0]], np.uint64), np.array([[0xA4093822, 0x299F31D0]], np.uint64))[0]
    expected = ((int(block[0]) >> 5) * 2**26 + (int(block[1]) >> 6)) / 2**53
    assert uniforms([seed], [17], [3], draw=2).tolist() == [expected]


def test_uniforms_fill_the_unit_interval_evenly():
    n = 20_000
    values = uniforms([99] * n, list(range(n)), [0] * n)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    assert np.abs(counts - n / 20).max() < 6 * (n / 20) ** 0.5


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5])
def test_any_integer_is_a_seed(seed):
    assert uniforms([seed], [1], [0]).tolist() == uniforms([seed % 2**64], [1], [0]).tolist()
