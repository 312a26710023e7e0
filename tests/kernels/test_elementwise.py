"""Norm, rotary and gate against their formulas in float64."""

import pytest
import torch

from tailrace.kernels.activation import silu_mul
from tailrace.kernels.norm import RmsNorm
from tailrace.kernels.rotary import apply_rotary, rotary_rows

ULP = {torch.float32: 2e-6, torch.bfloat16: 2**-7}


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two units in the last place of found's dtype, elementwise."""
    assert found.shape == expected.shape
    bound = ULP[found.dtype] * expected.abs() + ULP[found.dtype] * 1e-2
    assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 64, 65])
def test_rms_norm_is_the_formula_for_few_rows_and_for_many(dtype: torch.dtype, rows: int):
    torch.manual_seed(0)
    x = (torch.randn(rows, 96) * 3 + 1).to(dtype)  # a mean far from 0 tells it from a layer norm
    weight = (torch.randn(96) + 2).to(dtype)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(RmsNorm(weight, 1e-5)(x), exact)


@pytest.mark.parametrize("rows", [1, 7, 65])
def test_rms_norm_takes_float32_and_rounds_once(rows: int):
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 96) * 3 + 1, (torch.randn(96) + 2).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    normed = RmsNorm(weight, 1e-5)(x)
    assert normed.dtype is torch.bfloat16 and normed.is_contiguous()
    assert ((normed.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all()  # half a step of 8 bits, and a little


def test_rms_norm_keeps_a_tiny_row_apart_from_its_neighbours_by_eps():
    x = torch.stack((torch.full((32,), 1e-4), torch.full((32,), 100.0))).bfloat16()
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(RmsNorm(torch.ones(32).bfloat16(), 1e-5)(x), exact)


def test_rms_norm_works_over_heads_of_a_strided_slice():
    torch.manual_seed(0)
    buffer = torch.randn(3, 8, 16)
    heads = buffer[:, 2:6]
    exact = heads.double() / (heads.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    close(RmsNorm(torch.ones(16), 1e-6)(heads), exact)


def test_rotary_turns_each_pair_by_position_times_frequency():
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 5000])
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    x = torch.randn(3, 2, 8)
    cos, sin = rotary_rows(positions, frequencies, 1.0, torch.float32)
    turned = x.clone()
    apply_rotary(turned, cos, sin)
    angles = (positions[:, None].float() * frequencies).double()[:, None]
    first, second = x[..., :4].double(), x[..., 4:].double()
    exact = torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )
    assert (turned - exact).abs().max() < 1e-5
    assert torch.equal(turned[0], x[0])  # position 0 turns nothing


def test_rotary_scale_multiplies_the_result():
    frequencies = torch.tensor([0.3, 0.2])
    x = torch.randn(1, 1, 4)
    plain, scaled = x.clone(), x.clone()
    apply_rotary(plain, *rotary_rows(torch.tensor([7]), frequencies, 1.0, torch.float32))
    apply_rotary(scaled, *rotary_rows(torch.tensor([7]), frequencies, 1.5, torch.float32))
    assert torch.allclose(scaled, plain * 1.5, atol=1e-6)


def test_rotary_in_place_on_a_slice_leaves_the_rest_of_the_buffer():
    buffer = torch.randn(2, 5, 8)
    before = buffer.clone()
    apply_rotary(buffer[:, :3], *rotary_rows(torch.tensor([3, 4]), torch.rand(4), 1.0, torch.float32))
    assert torch.equal(buffer[:, 3:], before[:, 3:])
    assert not torch.equal(buffer[:, :3], before[:, :3])


def test_silu_mul_gates_the_first_half():
    torch.manual_seed(0)
    x = torch.randn(5, 12)
    gate, up = x[:, :6].double(), x[:, 6:].double()
    close(silu_mul(x), gate * torch.sigmoid(gate) * up)
