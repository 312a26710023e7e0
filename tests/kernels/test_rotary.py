"""Rotary embedding of interleaved pairs."""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels.rotary import apply_rotary_pairs, rotary_pairs

FREQUENCIES = 10000.0 ** -(torch.arange(4) / 4)
POSITIONS = torch.tensor([0, 1, 77, 100_000])


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_pairs_turn_like_complex_numbers_and_the_rest_stays(first, heads):
    x = rows(4, *heads, 11)
    before = x.clone()
    out = apply_rotary_pairs(x, rotary_pairs(POSITIONS, FREQUENCIES), first=first)
    assert torch.equal(x, before)
    part = slice(0, 8) if first else slice(3, 11)
    rest = slice(8, 11) if first else slice(0, 3)
    assert torch.equal(out[..., rest], x[..., rest])
    turns = torch.polar(torch.ones(4, 4), POSITIONS[:, None].float() * FREQUENCIES).view(4, *(1 for _ in heads), 4)
    expected = torch.view_as_complex(x[..., part].unflatten(-1, (4, 2)).contiguous()) * turns
    torch.testing.assert_close(out[..., part], torch.view_as_real(expected).flatten(-2), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_back_gives_what_was(dtype):
    x = rows(4, 2, 8).to(dtype)
    turns = rotary_pairs(POSITIONS, FREQUENCIES)
    back = apply_rotary_pairs(apply_rotary_pairs(x, turns), turns, inverse=True)
    assert back.dtype is dtype
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6 if dtype is torch.float32 else 3e-2)


def test_a_dot_product_depends_on_the_distance_only():
    q, k = rows(1, 8), rows(2, 8)[1:]
    near = [apply_rotary_pairs(v, rotary_pairs(torch.tensor([p]), FREQUENCIES)) for v, p in ((q, 9), (k, 4))]
    far = [apply_rotary_pairs(v, rotary_pairs(torch.tensor([p]), FREQUENCIES)) for v, p in ((q, 509), (k, 504))]
    torch.testing.assert_close((near[0] * near[1]).sum(), (far[0] * far[1]).sum(), rtol=1e-4, atol=1e-4)


def test_the_scale_is_on_both():
    turns = rotary_pairs(POSITIONS, FREQUENCIES)
    assert torch.equal(rotary_pairs(POSITIONS, FREQUENCIES, 0.5), turns * 0.5)
