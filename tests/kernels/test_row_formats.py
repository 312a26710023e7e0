"""Row formats: their bytes, their error, their rules at the edges."""

from __future__ import annotations

import math

import pytest
import torch

from tailrace.kernels.row_formats import RowFormat, ceil_exponent, fp4_groups, fp8_tiles, plain

V4 = fp8_tiles(512, 64, "ue8m0", tail_dims=64, pad=1)
V32 = fp8_tiles(576, 128, "float32", tail_dims=64)
WINDOW = fp8_tiles(512, 32, "ue8m0")
KEY8 = fp8_tiles(128, 128, "float32")
MAIN = fp4_groups(512, 16, "e4m3")
KEY4 = fp4_groups(128, 32, "ue8m0")
REAL = [(V4, 584, 2.5), (V32, 656, 2.4), (KEY8, 132, 2.6), (MAIN, 288, 9.5), (KEY4, 68, 11.5), (WINDOW, 528, 2.7)]
TINY = [fp8_tiles(32, 16, "ue8m0", 8), fp8_tiles(40, 16, "float32", 8, 3), fp4_groups(16, 4, "e4m3")]


def rows(n: int, fmt: RowFormat, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, fmt.dim, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("fmt", "nbytes", "percent"), REAL, ids=lambda v: getattr(v, "name", None))
def test_rows_of_the_published_models_have_their_bytes_and_error(fmt, nbytes, percent):
    assert fmt.row_bytes == nbytes
    x = rows(500, fmt)
    packed = fmt.pack(x)
    assert packed.shape == (500, nbytes)
    error = float((fmt.unpack(packed) - x).norm() / x.norm()) * 100
    assert abs(error - percent) < 0.06, error


@pytest.mark.parametrize("fmt", [*(fmt for fmt, _, _ in REAL), *TINY, plain(12, torch.bfloat16)], ids=lambda f: f.name)
def test_what_was_unpacked_packs_to_the_same_numbers_and_rows_do_not_mix(fmt):
    x = rows(9, fmt)
    once = fmt.rounded(x)
    if fmt.scale in ("", "ue8m0"):  # other scales depend on how the largest number itself was rounded
        assert torch.equal(fmt.rounded(once), once)
    for i in range(9):
        assert torch.equal(fmt.pack(x[i : i + 1]), fmt.pack(x)[i : i + 1])
    assert fmt.pack(x[:0]).shape == (0, fmt.row_bytes)
    assert fmt.unpack(fmt.pack(x[:0])).shape == (0, fmt.dim)


def test_plain_float32_rows_are_exact():
    x = rows(3, plain(10, torch.float32))
    assert torch.equal(plain(10, torch.float32).rounded(x), x)
    assert plain(10, torch.float32).row_bytes == 40


@pytest.mark.parametrize("top", [448.0, 6.0])
def test_the_exponent_is_the_ceiling_of_the_logarithm_at_every_edge(top):
    for power in range(-120, 118):
        edge = torch.tensor(top) * 2.0**power
        below, above = torch.nextafter(edge, torch.tensor(0.0)), torch.nextafter(edge, torch.tensor(torch.inf))
        assert ceil_exponent(torch.stack((below, edge, above)), top).tolist() == [power, power, power + 1]
        for x in (below, edge, above):  # the published form: times the rounded reciprocal, then the bits
            mantissa, exponent = math.frexp(float(x * torch.tensor(1 / top)))
            assert exponent - (mantissa == 0.5) == int(ceil_exponent(x[None], top))


def test_e2m1_rounds_to_nearest_and_ties_to_the_even_code():
    fmt = fp4_groups(32, 32, "ue8m0")
    x = torch.tensor([6, 0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 1.74, 2.5, 2.51, 3.5, 3.49, 5, 5.01, -0.25])
    x = torch.cat((x, -x))[None]
    expected = torch.tensor([6, 0, 0.5, 0.5, 1, 1, 1.5, 2, 1.5, 2, 3, 4, 3, 4, 6, -0.0])
    assert torch.equal(fmt.rounded(x)[0], torch.cat((expected, -expected)))
    packed = fmt.pack(x)[0]
    assert packed[0] == 0x07 and packed[1] == 0x11, "0.25 -> 0 stands in the upper nibble of byte 0"
    assert packed[16] == 127


def test_the_parts_of_a_v4_row_stand_where_they_should():
    x = rows(1, V4)
    x[0, 64:128] *= 1000
    packed = V4.pack(x)[0]
    amax = x[0, :448].view(7, 64).abs().amax(1)
    assert packed[448:455].tolist() == [127 + math.ceil(math.log2(a / 448)) for a in amax.tolist()]
    assert packed[455] == 0
    assert torch.equal(packed[456:].view(torch.bfloat16), x[0, 448:].bfloat16())
    step = 2.0 ** (int(packed[449]) - 127)
    assert torch.equal(packed[64:128].view(torch.float8_e4m3fn).float() * step, V4.unpack(packed[None])[0, 64:128])


def test_small_rows_use_the_floor_of_the_scale():
    for fmt, written in ((WINDOW, 127 - 22), (KEY4, 1)):
        assert fmt.pack(torch.zeros(1, fmt.dim))[0, -1] == written
    assert MAIN.pack(torch.zeros(1, 512))[0, -1] == 1, "the smallest e4m3"
    assert KEY8.pack(torch.zeros(1, 128))[0, -4:].view(torch.float32) == torch.tensor(1e-4) / 448
    tiny = torch.full((1, 128), 2.0**-126)
    assert torch.equal(KEY4.rounded(tiny), tiny)


@pytest.mark.parametrize("fmt", [*(fmt for fmt, _, _ in REAL), *TINY], ids=lambda f: f.name)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_tile_that_is_not_finite_decodes_as_nan_and_spoils_no_other(fmt, value):
    x = rows(3, fmt)
    whole = fmt.rounded(x)
    hurt = x.clone()
    hurt[1, fmt.tile // 2] = value
    back = fmt.rounded(hurt)
    assert back[1, : fmt.tile].isnan().all()
    back[1, : fmt.tile] = whole[1, : fmt.tile]
    assert torch.equal(back, whole)
    assert fmt.unpack(torch.full((1, fmt.row_bytes), 0xFF, dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize("fmt", [fmt for fmt, _, _ in REAL], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-6, 1e4, 1e30])
def test_rows_of_any_size_decode_finite(fmt, size):
    back = fmt.rounded(rows(3, fmt) * size)
    assert back.isfinite().all()


def test_wrong_arguments_are_refused_with_their_numbers():
    with pytest.raises(ValueError, match="no fp4 format of 40 numbers in groups of 16"):
        fp4_groups(40, 16, "e4m3")
    with pytest.raises(ValueError, match="no fp8 format of 64 numbers, 64 of them bf16"):
        fp8_tiles(64, 16, "ue8m0", 64)
    with pytest.raises(ValueError, match=r"float32 \[n, 512\], not torch.float32 \(2, 511\)"):
        V4.pack(torch.zeros(2, 511))
    with pytest.raises(ValueError, match=r"uint8 \[n, 584\], not torch.uint8 \(2, 583\)"):
        V4.unpack(torch.zeros(2, 583, dtype=torch.uint8))


def test_formats_are_named_apart():
    formats = [*(fmt for fmt, _, _ in REAL), *TINY, plain(512, torch.float32), plain(512, torch.bfloat16)]
    assert len({fmt.name for fmt in formats}) == len(formats)
    assert fp4_groups(128, 32, "ue8m0") == KEY4
