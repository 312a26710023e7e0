"""A row's product does not depend on the rows beside it, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn import functional

from tailrace.kernels.steady import steady_groups, steady_linear, steady_sigmoid, steady_softplus


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("inputs, outputs", [(64, 96), (100, 7), (512, 64), (1280, 320)])
def test_a_row_alone_equals_the_row_among_many(inputs, outputs):
    generator = torch.Generator().manual_seed(inputs)
    x = torch.randn(130, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    whole = steady_linear(x, weight)
    torch.testing.assert_close(whole, functional.linear(x, weight))
    for rows in (*range(1, 21), 31, 33, 63, 65, 129):
        assert torch.equal(steady_linear(x[:rows], weight), whole[:rows])
        assert torch.equal(steady_linear(x[-rows:], weight), whole[-rows:])


def test_groups_as_well():
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(40, 3, 128, generator=generator), torch.randn(3, 24, 128, generator=generator)
    whole = steady_groups(x, weight)
    torch.testing.assert_close(whole, torch.einsum("tgi,gri->tgr", x, weight))
    for rows in (*range(1, 14), 16, 33):
        assert torch.equal(steady_groups(x[:rows], weight), whole[:rows])


@pytest.mark.parametrize("function", [steady_sigmoid, steady_softplus])
def test_functions_of_few_numbers_as_well(function: Callable[[torch.Tensor], torch.Tensor]):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2)) * 4
    whole = function(x)
    plain = {steady_sigmoid: torch.sigmoid, steady_softplus: functional.softplus}[function]
    torch.testing.assert_close(whole, plain(x))
    assert torch.equal(torch.cat([function(x[i : i + 1]) for i in range(1000)]), whole)
    assert not torch.equal(torch.cat([plain(x[i : i + 1]) for i in range(1000)]), plain(x))  # what it is for


def test_no_rows_give_no_rows():
    assert steady_linear(torch.empty(0, 4), torch.ones(3, 4)).shape == (0, 3)
    assert steady_linear(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)).shape == (1, 3)
