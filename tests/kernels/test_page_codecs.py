"""Wire forms of pages: what each codec keeps, how long its rows are, and that the Triton kernels equal their twins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codec_pages import DTYPES, broken, from_bits, ordinary, random_bits, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.kernels import page_codecs
from tailrace.kernels.page_codecs import int4_bytes, scaled_bytes
from tailrace.kernels.page_codecs_lossless import decode_lossless, encode_lossless, lossless_bound, lossless_form

SHAPE = (7, 2, 2, 3, 8, 64)
PAGES = torch.tensor([6, 1, 4])
REST = [0, 2, 3, 5]
LOSSY = ("int8", "fp8", "int4")


def encoded(codec: str, pool: torch.Tensor, pages: torch.Tensor = PAGES) -> torch.Tensor:
    bound = int4_bytes(pool.shape[1:]) if codec == "int4" else scaled_bytes(pool.shape[1:])
    rows = torch.full((len(pages), bound), 7, dtype=torch.uint8)
    getattr(page_codecs, f"encode_{codec}")(pool, pages, rows)
    return rows


def through(codec: str, pool: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A pool of another order that got the pages PAGES of `pool`; the others are 9."""
    back = torch.full_like(pool, 9, dtype=dtype or pool.dtype)
    if codec == "lossless":
        rows = torch.full((len(PAGES), lossless_bound(pool.shape[1:], pool.dtype)), 7, dtype=torch.uint8)
        encode_lossless(pool, PAGES, rows)
        decode_lossless(rows, back, PAGES)
    else:
        getattr(page_codecs, f"decode_{codec}")(encoded(codec, pool), back, PAGES)
    return back


def run_comparison(device: str, **environment: str) -> str:
    program = Path(__file__).parent.with_name("codec_pages.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), device],
        capture_output=True, text=True, timeout=280, env=os.environ | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def test_the_kernels_in_the_interpreter_equal_their_twins_to_the_bit():
    pytest.importorskip("triton")
    assert "132 equal" in run_comparison("cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels run in the interpreter here")
def test_the_kernels_on_the_gpu_equal_their_twins_to_the_bit():
    assert "132 equal" in run_comparison("cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("codec", "error"), [("int8", 0.02), ("fp8", 0.03), ("int4", 0.1), ("lossless", 0.0)])
def test_a_decoded_page_is_near_what_it_was_and_other_pages_are_untouched(codec, error, dtype):
    pool = ordinary(SHAPE, dtype)
    back = through(codec, pool)
    difference = (back[PAGES].float() - pool[PAGES].float()).norm() / pool[PAGES].float().norm()
    assert difference <= error
    assert (back[REST] == 9).all()
    assert (back[6, ..., 4:, :] == 0).all(), "zeros stay zeros"


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 1, 1, 1, 32)])
def test_encoding_leaves_the_pool_as_it_was(codec, shape):
    pool = ordinary(shape, torch.float32)
    before = pool.clone()
    for pages in (torch.tensor([0]), torch.arange(shape[0])):
        encoded(codec, pool, pages)
        assert same_bits(pool, before)


@pytest.mark.parametrize("codec", [*LOSSY, "lossless"])
def test_pages_decode_into_every_float_dtype(codec):
    pool = ordinary(SHAPE, torch.float32)
    exact = through(codec, pool, torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(through(codec, pool, dtype), exact.to(dtype))


@pytest.mark.parametrize("codec", LOSSY)
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(codec):
    pool = ordinary(SHAPE, torch.float32)
    whole = through(codec, pool)
    for value in (torch.nan, torch.inf, -torch.inf):
        hurt = pool.clone()
        hurt[4, 1, 0, 2, 5, 17] = value
        back = through(codec, hurt)
        assert torch.isnan(back[4, 1, 0, 2, 5]).all()
        back[4, 1, 0, 2, 5] = whole[4, 1, 0, 2, 5]
        assert torch.equal(back, whole)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-20, 1e30])
def test_rows_of_any_size_decode_finite(codec, size):
    pool = ordinary(SHAPE, torch.float32) * size
    back = through(codec, pool)
    assert torch.isfinite(back[PAGES]).all()
    assert (back[PAGES] - pool[PAGES]).abs().max() <= 0.2 * pool[PAGES].abs().max() + 1e-37


def test_int4_spreads_an_outlier_over_its_row():
    pool = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    pool[..., 7] = 20.0
    back = through("int4", pool)
    error = (back[PAGES] - pool[PAGES])[..., 8:32].norm() / pool[PAGES][..., 8:32].norm()
    assert error < 0.3, "steps of its own group that reach the outlier alone would cost 0.4"


def test_a_head_dim_that_int4_cannot_rotate_is_refused_by_name():
    with pytest.raises(ValueError, match="multiple of 32, not 80"):
        int4_bytes((1, 2, 1, 4, 80))
    assert int4_bytes((1, 2, 1, 4, 96)) == 8 * (48 + 12)


def test_wire_rows_are_as_short_as_promised():
    shape = (30, 2, 3, 16, 64)
    page_bytes = 2 * 30 * 2 * 3 * 16 * 64
    assert page_bytes / scaled_bytes(shape) >= 1.85
    assert page_bytes / int4_bytes(shape) >= 3.1
    assert page_bytes / lossless_form(shape, torch.bfloat16).coded_bytes(200) >= 1.32


# ------------------------------------------------------------------------------------------------------------ lossless


def patterns(dtype: torch.dtype) -> list[torch.Tensor]:
    """Pages chosen against the code: every exponent, none, one value, all NaN, alternating extremes, noise."""
    size = 16 if dtype is torch.bfloat16 else 32
    every = torch.arange(SHAPE[0] * 2 * 2 * 3 * 8 * 64) * (1 if size == 16 else 7919 * 65_537) % (1 << size)
    pools = [random_bits(SHAPE, dtype), from_bits(every, dtype).view(SHAPE), broken(SHAPE, dtype)]
    pools += [torch.full(SHAPE, value, dtype=dtype) for value in (0.0, -0.0, torch.nan, torch.inf, 1e-39, 1.0)]
    swing = torch.ones(SHAPE)
    swing[..., ::2] = 1e-30
    return [*pools, swing.to(dtype), ordinary(SHAPE, dtype)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_gives_back_every_bit_of_any_pattern_within_its_bound(dtype):
    for pool in patterns(dtype):
        rows = torch.full((3, lossless_bound(SHAPE[1:], dtype)), 7, dtype=torch.uint8)
        lengths = encode_lossless(pool, PAGES, rows)
        assert (lengths <= rows.shape[1]).all()
        for row, length in zip(rows, lengths.tolist(), strict=True):
            row[length:] = 0xEE  # what lies behind a row's length is not needed
        back = torch.full_like(pool, 9)
        decode_lossless(rows, back, PAGES)
        assert same_bits(back[PAGES], pool[PAGES])


def test_lossless_sends_as_it_is_what_coding_would_lengthen():
    rows = torch.zeros(3, lossless_bound(SHAPE[1:], torch.bfloat16), dtype=torch.uint8)
    assert encode_lossless(random_bits(SHAPE, torch.bfloat16), PAGES, rows).tolist() == [rows.shape[1]] * 3
    shorter = encode_lossless(ordinary(SHAPE, torch.bfloat16), PAGES, rows)
    assert (shorter < 0.78 * rows.shape[1]).all()


@settings(max_examples=60, deadline=None)
@given(
    bits=st.lists(st.integers(0, 2**16 - 1), min_size=24, max_size=24),
    repeat=st.integers(1, 40),
)
def test_lossless_gives_back_whatever_numbers_a_page_repeats(bits, repeat):
    pool = from_bits(torch.tensor(bits * 2 * repeat), torch.bfloat16).view(1, 2, 1, 1, 12, 2 * repeat)
    rows = torch.zeros(1, lossless_bound(pool.shape[1:], pool.dtype), dtype=torch.uint8)
    encode_lossless(pool, torch.tensor([0]), rows)
    back = torch.zeros_like(pool)
    decode_lossless(rows, back, torch.tensor([0]))
    assert same_bits(back, pool)


def test_a_lossless_row_with_a_head_that_cannot_be_is_refused():
    pool = broken(SHAPE, torch.bfloat16)
    good = torch.zeros(3, lossless_bound(SHAPE[1:], torch.bfloat16), dtype=torch.uint8)
    encode_lossless(pool, PAGES, good)
    for word, value in ((0, 5), (1, 2), (2, -1), (2, 10**6), (3, 4), (3, 3)):
        rows = good.clone()
        rows[0, 4 * word : 4 * word + 4] = torch.tensor([value], dtype=torch.int32).view(torch.uint8)
        with pytest.raises(ValueError, match="cannot be"):
            decode_lossless(rows, torch.zeros_like(pool), PAGES)


def test_lossless_names_what_it_cannot_code():
    with pytest.raises(ValueError, match="not float16"):
        lossless_bound((1, 2, 1, 4, 64), torch.float16)
    with pytest.raises(ValueError, match="even number"):
        lossless_bound((1, 2, 1, 3, 5), torch.bfloat16)
