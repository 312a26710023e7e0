"""Paged attention and the writing of keys and values, against attention written down row by row in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tailrace.kernels.paged_attention import PagedPool, RowSpan, paged_attention, plan_attention, write_kv

KV_HEADS, GROUP, DIM, LAYERS = 2, 3, 16, 2
HEADS = KV_HEADS * GROUP
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


@dataclass
class Case:
    """A step: `state[i]` [k|v, kv_head, token, dim] is row i's whole keys and values, new ones included."""

    pool: PagedPool
    rows: list[RowSpan]
    state: list[torch.Tensor]
    q: torch.Tensor
    kv: torch.Tensor


def make_case(spans: Sequence[tuple[int, int]], page: int, dtype: torch.dtype, layer: int, seed: int = 0) -> Case:
    """Rows of (start, new tokens), decode first. Old state stands in scattered pages, all else in the pool is NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-(start + new) // page) for start, new in spans]
    kv = torch.full((sum(counts) + 3, LAYERS, 2, KV_HEADS, page, DIM), torch.nan, dtype=dtype)
    kv[0] = 0  # the scratch page is finite
    order = torch.randperm(sum(counts), generator=generator).numpy() + 1
    pool, rows, state = PagedPool(kv), [], []
    for (start, new), count in zip(spans, counts, strict=True):
        pages, order = order[:count].astype(np.int32), order[count:]
        own = torch.randn(2, KV_HEADS, start + new, DIM, generator=generator).to(dtype)
        for at in range(start):
            kv[int(pages[at // page]), layer, :, :, at % page] = own[:, :, at]
        if start % page:
            kv[int(pages[start // page]), :, :, :, start % page :] = 0  # cleared when the page was begun
        rows.append(RowSpan(start, new, pages))
        state.append(own)
    q = torch.randn(sum(new for _, new in spans), HEADS, DIM, generator=generator).to(dtype)
    fresh = torch.cat([own[:, :, row.start :].permute(2, 0, 1, 3) for own, row in zip(state, rows, strict=True)])
    return Case(pool, rows, state, q, fresh)


def run(case: Case, layer: int, window: int | None) -> torch.Tensor:
    plan = plan_attention(case.pool, case.rows, (window,))
    case.pool.clear_fresh(case.rows)
    write_kv(case.kv, case.pool, layer, plan)
    return paged_attention(case.q, case.kv, case.pool, layer, window, plan)


def expected(case: Case, window: int | None) -> torch.Tensor:
    results, at = [], 0
    for row, own in zip(case.rows, case.state, strict=True):
        k, v = own.double().repeat_interleave(GROUP, 1)
        for i in range(row.num_new):
            end = row.start + i + 1
            first = 0 if window is None else max(0, end - window)
            q = case.q[at].double()
            weights = (torch.einsum("hd,hnd->hn", q, k[:, first:end]) / DIM**0.5).softmax(-1)
            results.append(torch.einsum("hn,hnd->hd", weights, v[:, first:end]))
            at += 1
    return torch.stack(results)


MIXED = [(37, 1), (16, 1), (15, 1), (0, 1), (0, 40), (24, 9), (5, 2), (100, 140)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 8, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 24, 130])
def test_decode_rows_and_chunks_together_equal_attention_row_by_row(dtype, page, window):
    case = make_case(MIXED, page, dtype, layer=1)
    error = (run(case, 1, window).double() - expected(case, window)).abs().max()
    assert error < TOLERANCE[dtype]


@pytest.mark.parametrize("spans", [[(900, 1)], [(300, 1)] * 3, [(2000, 1), (1500, 1), (40, 1), (0, 1)]])
@pytest.mark.parametrize("window", [None, 200])
def test_long_decode_in_bf16_equals_attention_row_by_row(spans, window):
    case = make_case(spans, 16, torch.bfloat16, layer=0)
    assert (run(case, 0, window).double() - expected(case, window)).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("window", [None, 50])
def test_a_long_chunk_after_a_long_past_equals_attention_row_by_row(window):
    case = make_case([(333, 300)], 16, torch.float32, layer=1)
    assert (run(case, 1, window).double() - expected(case, window)).abs().max() < TOLERANCE[torch.float32]


def test_writing_touches_only_the_new_tokens_of_that_layer():
    case = make_case([(10, 1), (3, 7)], 8, torch.float32, layer=1)
    before = case.pool.kv.clone()
    write_kv(case.kv, case.pool, 1, plan_attention(case.pool, case.rows, (None,)))
    changed = (before.nan_to_num(-1.0) != case.pool.kv.nan_to_num(-1.0)).any(-1)
    at = 0
    for row, own in zip(case.rows, case.state, strict=True):
        for position in range(row.start, row.start + row.num_new):
            page, slot = int(row.pages[position // 8]), position % 8
            assert torch.equal(case.pool.kv[page, 1, :, :, slot], own[:, :, position])
            assert changed[page, 1, :, :, slot].all()
            changed[page, 1, :, :, slot] = False
            at += 1
    assert at == 8 and not changed.any()


def test_a_page_that_a_row_begins_is_cleared_and_no_other():
    case = make_case([(8, 1), (9, 1), (0, 20), (8, 8)], 8, torch.float32, layer=0)
    before = case.pool.kv.clone()
    case.pool.clear_fresh(case.rows)
    begun = {int(case.rows[0].pages[1]), int(case.rows[2].pages[2])}
    for page in range(case.pool.num_pages):
        if page in begun:
            assert (case.pool.kv[page] == 0).all()
        else:
            assert torch.equal(case.pool.kv[page].nan_to_num(-1.0), before[page].nan_to_num(-1.0))


def test_pages_before_the_window_may_be_the_scratch_page():
    case = make_case([(100, 1), (90, 12)], 8, torch.float32, layer=0)
    wanted = expected(case, 24)
    for row in case.rows:
        row.pages[: (row.start + 1 - 24) // 8] = 0
    assert (run(case, 0, 24).double() - wanted).abs().max() < TOLERANCE[torch.float32]


def test_a_nan_in_one_rows_page_reaches_no_other_row():
    case = make_case([(30, 1), (31, 1), (20, 12), (0, 9)], 8, torch.float32, layer=0)
    clean = run(case, 0, None)
    case.pool.kv[int(case.rows[1].pages[0])] = torch.nan
    case.pool.kv[int(case.rows[2].pages[0])] = torch.nan
    broken = run(case, 0, None)
    assert broken[1:14].isnan().all()
    assert torch.equal(broken[0], clean[0]) and torch.equal(broken[14:], clean[14:])


def test_padding_rows_are_stored_nowhere_and_come_out_zero():
    case = make_case([(30, 1), (3, 7)], 8, torch.float32, layer=0)
    wanted = run(case, 0, None)
    plain = case.pool.kv.clone()
    case.q = torch.cat((case.q, torch.ones(2, HEADS, DIM)))
    case.kv = torch.cat((case.kv, torch.ones(2, 2, KV_HEADS, DIM)))
    padded = run(case, 0, None)
    assert torch.equal(padded[:8], wanted) and (padded[8:] == 0).all()
    assert torch.equal(case.pool.kv.nan_to_num(-1.0), plain.nan_to_num(-1.0))


def test_an_altered_token_changes_the_output_of_its_row():
    case = make_case([(30, 1)], 8, torch.float32, layer=0)
    clean = run(case, 0, None)
    case.pool.kv[int(case.rows[0].pages[1]), 0, 0, 0, 3] += 1.0
    assert not torch.allclose(run(case, 0, None), clean, atol=1e-4)


def test_a_pool_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        PagedPool(torch.zeros(4, 2, 3, 2, 8, 16))
    with pytest.raises(ValueError, match="contiguous"):
        PagedPool(torch.zeros(4, 2, 2, 2, 16, 8).transpose(4, 5))
