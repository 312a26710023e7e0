"""bf16 products by way of float32 ones: the same numbers, rounded once."""

import pytest
import torch

from tailrace.kernels import cpu_products
from tailrace.kernels.cpu_products import widened_linear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 4, 40])
def test_a_widened_product_is_the_exact_one_rounded(monkeypatch: pytest.MonkeyPatch, rows: int, has_bias: bool):
    monkeypatch.setattr(cpu_products, "_AT_ONCE", 24)  # several parts, the last one shorter
    random = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 96, generator=random).bfloat16(), torch.randn(64, 96, generator=random).bfloat16()
    bias = torch.randn(64, generator=random).bfloat16() if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = widened_linear(x, weight, bias)
    assert found.dtype is torch.bfloat16 and found.shape == (rows, 64)
    steps = 1 if rows > 3 else 2  # PyTorch's own product may round before it adds the bias
    assert ((found.double() - exact).abs() <= steps * 2**-8 * exact.abs() + 1e-3).all()
