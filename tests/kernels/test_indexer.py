"""Index scores: their formula, what counts as 0, and that they depend on nothing but query and key."""

from __future__ import annotations

import pytest
import torch

from tailrace.kernels import indexer
from tailrace.kernels.indexer import index_scores


def scene(t: int = 5, n: int = 37, heads: int = 4, dim: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(t, heads, dim, generator=generator),
        torch.randn(n, dim, generator=generator),
        torch.randn(t, heads, generator=generator),
    )


def test_scores_are_the_formula():
    q, keys, weights = scene()
    expected = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, keys).relu())
    torch.testing.assert_close(index_scores(q, keys, weights), expected, rtol=1e-5, atol=1e-5)


def test_a_score_does_not_depend_on_its_company(monkeypatch):
    q, keys, weights = scene(t=33, n=301, dim=24)
    keys[200] = keys[3]
    whole = index_scores(q, keys, weights)
    assert torch.equal(whole[:, 200], whole[:, 3])
    for t, n in ((1, 301), (7, 201), (33, 4)):
        assert torch.equal(index_scores(q[:t], keys[:n], weights[:t]), whole[:t, :n])
    monkeypatch.setattr(indexer, "_SCORES", 4 * 301 * 2)
    assert torch.equal(index_scores(q, keys, weights), whole)


def test_nan_and_minus_infinity_count_as_zero_and_infinity_does_not():
    q, keys, weights = scene()
    whole = index_scores(q, keys, weights)
    keys[4] = torch.nan
    q[1, 2, 0], weights[2, 1] = torch.nan, torch.nan
    keys[9] = torch.inf * keys[9].sign()
    found = index_scores(q, keys, weights)
    assert (found[:, 4] == 0).all() and (found[1:3] == 0).all()
    rest = [i for i in range(37) if i not in (4, 9)]
    assert torch.equal(found[3:, rest], whole[3:, rest])
    one = torch.ones(1, 1, 1)
    big = torch.tensor([[torch.inf]])
    assert index_scores(one, big, -torch.ones(1, 1)) == 0
    assert index_scores(one, big, torch.ones(1, 1)) == torch.inf


def test_no_keys_give_no_scores_and_bfloat16_is_taken():
    q, keys, weights = scene()
    assert index_scores(q, keys[:0], weights).shape == (5, 0)
    half = index_scores(q.bfloat16(), keys.bfloat16(), weights)
    assert torch.equal(half, index_scores(q.bfloat16().float(), keys.bfloat16().float(), weights))


def test_wrong_shapes_are_refused_with_their_numbers():
    q, keys, weights = scene()
    with pytest.raises(ValueError, match=r"q \(5, 4, 16\): keys \(37, 15\)"):
        index_scores(q, keys[:, 1:], weights)
