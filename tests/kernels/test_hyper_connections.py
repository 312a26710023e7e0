"""mHC mixing against the oracle's modules, against its formula written out, and what Sinkhorn promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailrace.kernels.hyper_connections import (
    CollapseWeights,
    MixingWeights,
    collapse,
    collapse_weights,
    doubly_stochastic,
    mixing,
    spread,
)

N, DIM, ROWS = 4, 24, 7


def weights(seed: int, size: int, scales: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(size, N * DIM) * 0.1, torch.randn(size), torch.randn(scales)


def test_mixing_is_the_oracles():
    deepseek = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    from transformers import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=DIM, hc_mult=N, hc_sinkhorn_iters=5, hc_eps=1e-3, rms_norm_eps=1e-4)
    module, head = deepseek.DeepseekV4HyperConnection(config), deepseek.DeepseekV4HyperHead(config)
    ours, last = MixingWeights(*weights(1, N * (2 + N), 3)), CollapseWeights(*weights(2, N, 1))
    for owner, names, given in (
        (module, ("fn", "base", "scale"), ours),
        (head, ("hc_fn", "hc_base", "hc_scale"), last),
    ):
        for name, value in zip(names, (given.projection, given.base, given.scale), strict=True):
            setattr(owner, name, nn.Parameter(value))
    streams, output = torch.randn(ROWS, N, DIM), torch.randn(ROWS, DIM)
    with torch.inference_mode():
        post, combination, collapsed = module(streams[None])
        after = post[..., None] * output[None, :, None] + combination.transpose(-1, -2) @ streams[None]
        mixed = mixing(streams, ours, rms_eps=1e-4, floor=1e-3, iterations=5)
        pre = collapse_weights(streams, last, rms_eps=1e-4, floor=1e-3)
        torch.testing.assert_close(mixed.post, post[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(mixed.combination, combination[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(collapse(streams, mixed.pre), collapsed[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(spread(streams, output, mixed), after[0], rtol=0, atol=1e-5)
        torch.testing.assert_close(collapse(streams, pre), head(streams[None])[0], rtol=0, atol=1e-5)


def test_mixing_is_its_formula_for_one_token():
    """Written out in float64, index by index, so that a transposed combination or a swapped scale cannot hide."""
    given = MixingWeights(*weights(3, N * (2 + N), 3))
    streams, output = torch.randn(1, N, DIM), torch.randn(1, DIM)
    x = streams[0].double()
    flat = x.flatten()
    m = given.projection.double() @ (flat / (flat.square().mean() + 1e-6).sqrt())
    s, b = given.scale.double(), given.base.double()
    pre = [torch.sigmoid(s[0] * m[i] + b[i]) + 1e-6 for i in range(N)]
    post = [2 * torch.sigmoid(s[1] * m[N + i] + b[N + i]) for i in range(N)]
    a = torch.stack([(s[2] * m[2 * N + N * i : 3 * N + N * i] + b[2 * N + N * i : 3 * N + N * i]).softmax(0)
                     for i in range(N)]) + 1e-6  # fmt: skip
    a = a / (a.sum(0) + 1e-6)
    for _ in range(19):
        a = a / (a.sum(1, keepdim=True) + 1e-6)
        a = a / (a.sum(0, keepdim=True) + 1e-6)
    mixed = mixing(streams, given, rms_eps=1e-6, floor=1e-6, iterations=20)
    expected = torch.stack([post[k] * output[0] + sum(a[j, k] * x[j] for j in range(N)) for k in range(N)])
    torch.testing.assert_close(collapse(streams, mixed.pre)[0].double(), sum(pre[i] * x[i] for i in range(N)),
                               rtol=0, atol=1e-5)  # fmt: skip
    torch.testing.assert_close(spread(streams, output, mixed)[0].double(), expected, rtol=0, atol=1e-5)


def test_twenty_iterations_leave_rows_and_columns_that_sum_to_one():
    torch.manual_seed(4)
    square = doubly_stochastic(torch.randn(50, N, N).softmax(-1) + 1e-6, 1e-6, 20)
    assert (square.sum(-2) - 1).abs().max() < 1e-5
    assert (square.sum(-1) - 1).abs().max() < 1e-3
    assert (square - square.transpose(-1, -2)).abs().max() > 0.1  # so the direction matters


def test_a_token_does_not_depend_on_its_neighbours_and_bfloat16_streams_stay_so():
    given = MixingWeights(*weights(5, N * (2 + N), 3))
    streams, output = torch.randn(ROWS, N, DIM), torch.randn(ROWS, DIM)
    settings = {"rms_eps": 1e-6, "floor": 1e-6, "iterations": 20}
    together = spread(streams, output, mixing(streams, given, **settings))
    for i in range(ROWS):
        row = slice(i, i + 1)
        alone = spread(streams[row], output[row], mixing(streams[row], given, **settings))
        torch.testing.assert_close(together[row], alone, rtol=0, atol=2e-6)
    low = streams.bfloat16()
    rounded = spread(low, output.bfloat16(), mixing(low, given, **settings))
    assert rounded.dtype is torch.bfloat16
    assert (rounded.float() - together).abs().max() < 0.1
