"""The native step for few rows against its plain twins: packing, products, and what a NaN does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tailrace.kernels import few_rows
from tailrace.kernels.few_rows import GROUP, Int4Rows, Int8Rows

ROWS = [1, 2, 3, 4, 7, 8]


@pytest.fixture(scope="module")
def native() -> Any:
    module = few_rows.native()
    if module is None:
        pytest.skip("no numba, or no CPU with AVX2")
    return module


def int4(rows: int = 48, columns: int = 96) -> tuple[Int4Rows, torch.Tensor]:
    """A packed weight and what it is in float32."""
    random = torch.Generator().manual_seed(rows)
    codes = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
    scale = (torch.rand(rows, columns // GROUP, generator=random) * 0.01 + 0.001).half().float()
    minimum = (-8 * scale + torch.randn(scale.shape, generator=random) * 0.01).half().float()
    packed = few_rows.pack_int4(codes, scale, minimum)
    assert packed is not None
    weight = codes.unflatten(1, (-1, GROUP)) * scale[..., None] + minimum[..., None]
    return packed, weight.flatten(1)


def int8(rows: int = 48, columns: int = 96) -> tuple[Int8Rows, torch.Tensor]:
    random = torch.Generator().manual_seed(rows)
    values = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
    scale = (torch.rand(rows, columns // GROUP, generator=random) * 0.01 + 0.001).half().float()
    packed = few_rows.pack_int8(values, scale)
    assert packed is not None
    return packed, (values.unflatten(1, (-1, GROUP)) * scale[..., None]).flatten(1)


def quantized(native: Any, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    words, scales = np.empty(x.shape, np.int16), np.empty((len(x), x.shape[1] // GROUP, 2), np.float32)
    native.quantize_rows(x.numpy(), words, scales)
    return words, scales


def multiply(native: Any, packed: Int4Rows | Int8Rows, x: torch.Tensor) -> torch.Tensor:
    y = torch.full((len(x), len(packed.codes) * few_rows.BLOCK), torch.nan)
    arguments = (packed.codes, packed.scales, *quantized(native, x), y.numpy())
    if isinstance(packed, Int4Rows):
        native.int4_product(*arguments)
    else:
        native.int8_product(*arguments, 0, len(packed.codes))
    return y


def test_packing_keeps_what_float16_scales_say_to_the_bit():
    for packed, weight in (int4(), int8()):
        assert torch.equal(few_rows.weight_of(packed), weight)
    packed, weight = int8()
    ids = torch.tensor([47, 0, 8, 17, 0])
    assert torch.equal(packed.rows(ids), weight[ids])


def test_scales_that_float16_cannot_hold_are_not_packed():
    codes = torch.ones(16, 64, dtype=torch.uint8)
    for scale in (1e-9, 1e6):
        scales = torch.full((16, 2), scale)
        assert few_rows.pack_int4(codes, scales, torch.zeros(16, 2)) is None
        assert few_rows.pack_int8(codes.view(torch.int8), scales) is None


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("make", [int4, int8])
def test_products_are_the_twins_of_the_activations_they_are_given(native: Any, make: Any, rows: int):
    packed, _ = make()
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows)) * torch.logspace(-3, 3, 96)
    words, scales = few_rows.quantize_rows(x)
    exact = (words.unflatten(1, (-1, GROUP)).double() * scales[..., :1].double()).flatten(1)
    expected = exact @ few_rows.weight_of(packed).double().T
    found = multiply(native, packed, x)
    largest = exact.abs() @ few_rows.weight_of(packed).double().abs().T
    assert ((found.double() - expected).abs() <= 1e-6 * largest + 1e-4 * expected.abs()).all()
    # and what 16 bits lose is less than bf16 would
    twin, rounded = few_rows.product(x, packed), few_rows.product(x.bfloat16().float(), packed)
    assert (found - twin).norm() < 0.1 * (rounded - twin).norm()


@pytest.mark.parametrize("make", [int4, int8])
def test_a_row_comes_out_the_same_to_the_bit_whatever_rows_stand_beside_it(native: Any, make: Any):
    packed, _ = make()
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([multiply(native, packed, x[i : i + 1]) for i in range(8)])
    for rows in ROWS:
        assert torch.equal(multiply(native, packed, x[:rows]), alone[:rows])


def test_quantized_rows_are_the_twins(native: Any):
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    x[1, :32] = 0
    x[2, 3], x[3, 40], x[4, 63] = torch.nan, torch.inf, 3e38
    words, scales = quantized(native, x)
    expected, expected_scales = few_rows.quantize_rows(x)
    assert np.abs(words.astype(np.int32) - expected.numpy()).max() <= 1
    torch.testing.assert_close(torch.from_numpy(scales)[:3], expected_scales[:3], equal_nan=True)
    assert not np.isfinite(scales[2, 0]).any() and not np.isfinite(scales[3, 1]).any() and np.isnan(scales[4, 1, 0])


@pytest.mark.parametrize("make", [int4, int8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(native: Any, make: Any, bad: float):
    packed, _ = make()
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(3))
    clean = multiply(native, packed, x)
    x[2, 50] = bad
    found = multiply(native, packed, x)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3]], clean[[0, 1, 3]])


def test_the_gate_and_its_exponential_hold_at_the_edges(native: Any):
    gate = torch.tensor([-200.0, -88.0, -20.0, -1e-3, 0.0, 1.0, 30.0, 200.0])
    both = torch.stack((torch.cat((gate, torch.ones(8))), torch.cat((gate, -torch.ones(8)))))
    out = torch.empty(2, 8)
    native._silu_mul(both.numpy(), out.numpy())
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(out.double(), torch.stack((expected, -expected)), rtol=1e-6, atol=1e-30)
