"""Sparse attention: the formula, with parts, sinks, values that are a part of the row, and nothing to attend to."""

from __future__ import annotations

import math

import pytest
import torch

from tailrace.kernels import sparse_attention as module
from tailrace.kernels.sparse_attention import PickedRows, RowRange, sparse_attention

SCALE = 0.3


def by_definition(q, chosen, sinks, width):
    """q: [t, h, d];  chosen: for each query its rows [m, d]."""
    out = torch.zeros(*q.shape[:2], width)
    for t, rows in enumerate(chosen):
        for head in range(q.shape[1]):
            weights = [math.exp(SCALE * float(q[t, head] @ row)) for row in rows]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[head])))
            for weight, row in zip(weights, rows, strict=True):
                out[t, head] += weight / total * row[:width]
    return out


def scene():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 3, 12, generator=generator)
    history, window = torch.randn(20, 12, generator=generator), torch.randn(9, 12, generator=generator)
    index = torch.stack([torch.randperm(20, generator=generator)[:5] for _ in range(6)])
    index[0], index[1, 2:], index[2, 0] = -1, -1, -1
    first, end = torch.tensor([0, 0, 1, 2, 3, 5]), torch.tensor([0, 2, 5, 6, 7, 9])
    sinks = torch.randn(3, generator=generator)
    return q, history, window, index, first, end, sinks


@pytest.mark.parametrize("with_sink", [True, False])
@pytest.mark.parametrize("width", [12, 8])
@pytest.mark.parametrize("numbers", [1 << 23, 100])
def test_attention_is_its_formula_over_all_parts_of_a_query(with_sink, width, numbers, monkeypatch):
    monkeypatch.setattr(module, "_NUMBERS", numbers)
    q, history, window, index, first, end, sinks = scene()
    chosen = [[*history[index[t][index[t] >= 0]], *window[int(first[t]) : int(end[t])]] for t in range(6)]
    sinks = sinks if with_sink else None
    found = sparse_attention(q, [PickedRows(history, index), RowRange(window, first, end)], SCALE, sinks, width)
    torch.testing.assert_close(found, by_definition(q, chosen, sinks, width), rtol=1e-5, atol=1e-6)
    assert (found[0] == 0).all(), "query 0 has no row"


def test_rows_that_are_not_picked_may_hold_anything_and_those_that_are_may_not_hide_a_nan():
    q, history, _, index, _, _, sinks = scene()
    whole = sparse_attention(q, [PickedRows(history, index)], SCALE, sinks)
    index[3, index[3] == index[3, 0]] = -1
    unused = [i for i in range(20) if i not in index.tolist()[3]]
    history[unused] = torch.nan
    found = sparse_attention(q[3:4], [PickedRows(history, index[3:4])], SCALE, sinks)
    assert found.isfinite().all() and not torch.equal(found, whole[3:4])
    history[index[3, 1]] = torch.nan
    assert sparse_attention(q[3:4], [PickedRows(history, index[3:4])], SCALE, sinks).isnan().all()


def test_a_querys_result_does_not_depend_on_its_company_nor_on_rows_it_does_not_see():
    generator = torch.Generator().manual_seed(1)
    q, rows = torch.randn(37, 4, 24, generator=generator), torch.randn(80, 24, generator=generator)
    index = torch.stack([torch.randperm(80, generator=generator)[:7] for _ in range(37)])
    first, end = torch.arange(37), torch.arange(37) + 9
    whole = sparse_attention(q, [PickedRows(rows, index), RowRange(rows, first, end)], SCALE)
    picked = sparse_attention(q, [PickedRows(rows, index)], SCALE)
    for i in range(37):
        parts = [PickedRows(rows, index[i : i + 1]), RowRange(rows[i : i + 9], first[:1], end[:1])]
        assert torch.equal(sparse_attention(q[i : i + 1], parts, SCALE)[0], whole[i])
        assert torch.equal(sparse_attention(q[i : i + 1], parts[:1], SCALE)[0], picked[i])


def test_nothing_to_attend_to_gives_zero():
    q = scene()[0]
    empty = [PickedRows(torch.empty(0, 12), torch.full((6, 2), -1)), PickedRows(q[:, 0], torch.empty(6, 0).long())]
    assert (sparse_attention(q, empty, SCALE, None, 4) == torch.zeros(6, 3, 4)).all()
    assert (sparse_attention(q, empty, SCALE, torch.zeros(3)) == 0).all()


def test_the_result_has_the_dtype_of_the_queries():
    q, history, window, index, first, end, sinks = (x.bfloat16() if x.is_floating_point() else x for x in scene())
    parts = [PickedRows(history, index), RowRange(window, first, end)]
    exact = [PickedRows(history.float(), index), RowRange(window.float(), first, end)]
    found = sparse_attention(q, parts, SCALE, sinks)
    assert torch.equal(found, sparse_attention(q.float(), exact, SCALE, sinks).bfloat16())


def test_wrong_shapes_are_refused_with_their_numbers():
    q, history, _, index, _, _, sinks = scene()
    with pytest.raises(ValueError, match=r"rows \(20, 11\) for 6 queries"):
        sparse_attention(q, [PickedRows(history[:, 1:], index)], SCALE)
    with pytest.raises(ValueError, match="for 5 queries"):
        sparse_attention(q, [PickedRows(history, index[1:])], SCALE)
    with pytest.raises(ValueError, match=r"13 value dims and sinks \(3,\)"):
        sparse_attention(q, [], SCALE, sinks, 13)
