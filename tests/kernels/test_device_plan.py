"""A step's index buffers, and the twins of the device step against the CPU path that they stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tailrace.engine.philox import uniforms
from tailrace.engine.sampler import Sampler, margin
from tailrace.engine.step import SamplerState
from tailrace.kernels import activation, device_plan
from tailrace.kernels.device_attention import decode_attention, prefill_attention
from tailrace.kernels.device_plan import DevicePlan, PlanShape, StagedBuffers
from tailrace.kernels.device_sampling import (
    ADVANCED,
    GREEDY,
    TEMPERATURE_ONLY,
    RowSampling,
    SamplingRows,
    argmax_rows,
    philox_uniforms,
    sample_rows,
)  # fmt: skip
from tailrace.kernels.device_step import add_rms_norm, rotary_write, silu_mul
from tailrace.kernels.norm import RmsNorm
from tailrace.kernels.paged_attention import PagedPool, RowSpan, paged_attention, plan_attention, write_kv
from tailrace.kernels.rotary import apply_rotary, rotary_rows
from tailrace.model.sampling_params import SamplingParams

CPU = torch.device("cpu")
SIZE, HEADS, KV_HEADS, DIM = 8, 6, 2, 16


def spans_of(*sizes: tuple[int, int]) -> list[RowSpan]:
    """Rows of (start, new) whose pages are scattered."""
    counts = [-(-(start + new) // SIZE) for start, new in sizes]
    order = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32) + 1
    parts = np.split(order, np.cumsum(counts)[:-1])
    return [RowSpan(start, new, pages) for (start, new), pages in zip(sizes, parts, strict=True)]


def plan_of(**sizes: int) -> DevicePlan:
    return DevicePlan(CPU, **({"rows": 6, "chunks": 4, "tokens": 80, "pages": 12, "tokens_per_page": SIZE} | sizes))


def test_a_plan_holds_what_its_rows_say_and_padding_names_page_zero_only():
    plan, rows = plan_of(), spans_of((37, 1), (8, 1), (0, 20), (24, 9))
    shape = plan.fill(rows, decode_rows=4, chunks=3, tokens=40, ids=np.arange(100, 131))
    assert shape == PlanShape(decode_rows=4, chunks=3, tokens=40, max_new=20)
    assert plan.lengths[:4].tolist() == [38, 9, 0, 0]
    assert plan.chunk_starts[:4].tolist() == [0, 20, 29, 29] and plan.context[:3].tolist() == [0, 24, 0]
    for row, table in ((rows[0], plan.page_table[0]), (rows[1], plan.page_table[1]), (rows[3], plan.chunk_pages[1])):
        assert table[: len(row.pages)].tolist() == row.pages.tolist()
    expected = [(37, rows[0]), (8, rows[1]), None, None, *((i, rows[2]) for i in range(20))]
    expected += [*((i, rows[3]) for i in range(24, 33)), *[None] * 7]
    for token, entry in enumerate(expected):
        place, slot = (0, 0) if entry is None else (entry[0], entry[1].pages[entry[0] // SIZE] * SIZE + entry[0] % SIZE)
        assert (plan.positions[token], plan.slots[token]) == (place, slot)
    assert plan.ids[:40].tolist() == [100, 101, 0, 0, *range(102, 131), *[0] * 7]


def test_a_plan_filled_again_forgets_the_longer_step_before():
    plan = plan_of()
    plan.fill(spans_of((37, 1), (8, 1), (0, 20)), tokens=40)
    shape = plan.fill(spans_of((5, 1)), decode_rows=6, chunks=4, tokens=80)
    assert shape == PlanShape(6, 4, 80, 0)
    assert plan.lengths.tolist() == [6, 0, 0, 0, 0, 0]
    assert plan.chunk_starts.tolist() == [0] * 5 and plan.positions[1:].sum() == 0 and plan.slots[1:].sum() == 0


def test_tasks_cover_each_row_once_and_a_long_row_has_the_most():
    plan = plan_of(pieces=10, pages=600)
    plan.fill(spans_of((4000, 1), (300, 1), (0, 1)), decode_rows=5)
    found = plan.decode_tasks(5)
    assert found.firsts.tolist() == [[0, 9], [9, 1], [10, 1], [11, 1], [12, 1]]
    rows = [(0, 4001)] * 9 + [(1, 301), (2, 1), (3, 0), (4, 0)]
    pieces = [*((i, 9) for i in range(9)), *[(0, 1)] * 4]
    assert found.tasks[:13].tolist() == [[r, p, n, k] for (r, k), (p, n) in zip(rows, pieces, strict=True)]
    assert len(found.tasks) == 15 and found.tasks[13:, 0].tolist() == [-1, -1]


def test_rows_of_one_token_may_be_chunks():
    plan = plan_of()
    shape = plan.fill(spans_of((37, 1), (0, 3)), decode_rows=0)
    assert shape == PlanShape(0, 2, 4, 3) and plan.chunk_starts[:3].tolist() == [0, 1, 4]


@pytest.mark.parametrize(
    ("sizes", "padded", "message"),
    [
        ([(1, 1)] * 7, {}, "7 decode_rows, padded to 7, of at most 6"),
        ([(1, 1)] * 3, {"decode_rows": 2}, "3 decode_rows, padded to 2, of at most 6"),
        ([(0, 90)], {}, "90 tokens, padded to 90, of at most 80"),
        ([(100, 1)], {}, "0 pages, padded to 13, of at most 12"),
        ([(0, 2)] * 5, {}, "5 chunks, padded to 5, of at most 4"),
    ],
)
def test_a_step_that_does_not_fit_is_refused_with_its_numbers(sizes, padded, message):
    with pytest.raises(ValueError, match=message):
        plan_of().fill(spans_of(*sizes), **padded)


def test_a_row_whose_pages_end_before_its_token_is_refused():
    plan, row = plan_of(), spans_of((37, 1))[0]
    plan.fill([row])
    with pytest.raises(ValueError, match="token 37 lies behind its 4 pages of 8"):
        plan.fill([RowSpan(37, 1, row.pages[:4])])


def test_a_slot_that_the_device_does_not_take_is_given_up_on(monkeypatch):
    class Never:
        def query(self) -> bool:
            return False

    buffers = StagedBuffers(CPU, {"numbers": ((3,), torch.int32)})
    monkeypatch.setattr(buffers, "_taken", [Never()])
    monkeypatch.setattr(device_plan, "WAIT_S", 0.05)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        buffers.begin()


@pytest.mark.parametrize("window", [None, 24])
def test_a_step_by_the_twins_equals_the_cpu_path(window):
    generator = torch.Generator().manual_seed(0)
    rows = spans_of((37, 1), (16, 1), (0, 1), (0, 20), (24, 9))
    real = [0, 1, 2, *range(4, 33)]
    kv = torch.randn(40, 2, 2, KV_HEADS, SIZE, DIM, generator=generator)
    kv[0] = 0
    qkv = torch.randn(40, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    plan, pool = plan_of(), PagedPool(kv.clone())
    shape = plan.fill(rows, decode_rows=4, chunks=3, tokens=40)
    cos, sin = rotary_rows(plan.positions[:40], torch.rand(DIM // 2, generator=generator), 1.0, torch.float32)

    q = rotary_write(qkv, cos, sin, plan.slots[:40], kv, 1)
    options = {"scale": DIM**-0.5, "window": window}
    found = torch.cat((
        decode_attention(q[:4], kv, 1, plan.page_table[:4], plan.lengths[:4], **options),
        prefill_attention(
            q[4:], kv, 1, plan.chunk_starts[:4], plan.context[:3], plan.chunk_pages[:3], shape.max_new, **options
        ),
    ))  # fmt: skip

    indices, own = plan_attention(pool, rows, (window,)), qkv[real].clone()
    apply_rotary(own[:, : HEADS + KV_HEADS], cos[real], sin[real])
    fresh = own[:, HEADS:].reshape(-1, 2, KV_HEADS, DIM)
    write_kv(fresh, pool, 1, indices)
    wanted = paged_attention(own[:, :HEADS].contiguous(), fresh, pool, 1, window, indices)
    torch.testing.assert_close(found[real], wanted, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(kv[1:], pool.kv[1:], rtol=1e-6, atol=1e-6)
    assert not found[3].any() and not found[33:].any()


def test_norm_rotary_norm_and_gate_equal_the_cpu_path():
    generator = torch.Generator().manual_seed(1)
    hidden, part = torch.randn(2, 5, 48, generator=generator)
    weight, head = torch.randn(48, generator=generator), torch.randn(2, DIM, generator=generator)
    residual = hidden.clone()
    found = add_rms_norm(residual, part, weight, 1e-5)
    torch.testing.assert_close(residual, hidden + part)
    torch.testing.assert_close(found, RmsNorm(weight, 1e-5)(hidden + part), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(silu_mul(part), activation.silu_mul(part.clone()), rtol=1e-5, atol=1e-6)
    qkv = torch.randn(3, HEADS + 2 * KV_HEADS, DIM, generator=generator)
    cos, sin = rotary_rows(torch.tensor([5, 0, 900]), torch.rand(DIM // 2), 1.2, torch.float32)
    kv = torch.zeros(2, 1, 2, KV_HEADS, SIZE, DIM)
    q = rotary_write(qkv, cos, sin, torch.tensor([SIZE, SIZE + 1, SIZE + 5]), kv, 0, *head, eps=1e-5)
    wanted = torch.cat((RmsNorm(head[0], 1e-5)(qkv[:, :HEADS]), RmsNorm(head[1], 1e-5)(qkv[:, HEADS:-KV_HEADS])), 1)
    apply_rotary(wanted, cos, sin)
    torch.testing.assert_close(q, wanted[:, :HEADS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kv[1, 0, 0, :, 5], wanted[2, HEADS:], rtol=1e-5, atol=1e-5)
    assert torch.equal(kv[1, 0, 1, :, 1], qkv[1, -KV_HEADS:])


def sampling(rows: Sequence[RowSampling]) -> tuple[SamplingRows, str]:
    params = SamplingRows(CPU, len(rows) + 2)
    return params, params.fill(rows)


def rows_of_every_filter() -> list[RowSampling]:
    return [
        RowSampling(
            temperature=(0.0, 0.7, 1.3, 20.0)[i % 4], top_k=(0, 5, 50)[i // 3 % 3], top_p=(1.0, 0.9, 0.3)[i // 9 % 3],
            min_p=(0.0, 0.05)[i % 2], seed=i * 2**58 + 3 - 2**62, position=i + 2**31, sample=i % 2,
        )
        for i in range(72)
    ]  # fmt: skip


def test_the_twin_draws_what_the_host_sampler_draws():
    rows = rows_of_every_filter()
    logits = 3 * torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(1))
    logits[5, 7], logits[6], logits[7] = torch.nan, -torch.inf, 2.0
    states = [
        SamplerState(
            SamplingParams(1, temperature=r.temperature, top_k=r.top_k, top_p=r.top_p, min_p=r.min_p, seed=r.seed),
            r.sample, 0, frozenset(),
        )
        for r in rows
    ]  # fmt: skip
    positions = [r.position for r in rows]
    wanted = [token for token, _ in Sampler().sample(logits, states, positions)]
    params, variant = sampling(rows)
    assert variant == ADVANCED
    found = sample_rows(logits, params, variant).tolist()
    clear = [i not in (5, 6) and margin(logits[i], states[i], positions[i]).clear for i in range(len(rows))]
    assert sum(clear) > 60
    assert [t for t, c in zip(found, clear, strict=True) if c] == [t for t, c in zip(wanted, clear, strict=True) if c]
    assert found[5] == found[6] == -1


def test_the_twins_uniforms_equal_the_generators_to_the_bit():
    rows = rows_of_every_filter()
    params, _ = sampling(rows)
    found = philox_uniforms(*(t[: len(rows)] for t in (params.seed, params.position, params.sample)))
    assert found.tolist() == uniforms(*([getattr(r, n) for r in rows] for n in ("seed", "position", "sample"))).tolist()


def test_the_variant_is_the_least_that_serves_all_rows_and_rows_behind_them_are_greedy():
    plain, hot, cut = RowSampling(), RowSampling(temperature=1.0), RowSampling(temperature=1.0, min_p=0.1)
    assert [sampling(r)[1] for r in ([], [plain], [plain, hot], [cut, hot, plain])] == [
        GREEDY, GREEDY, TEMPERATURE_ONLY, ADVANCED,
    ]  # fmt: skip
    params, _ = sampling([cut, hot])
    params.fill([hot])
    assert params.inverse.tolist() == [1.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="5 rows to sample, there is room for 4"):
        params.fill([plain] * 5)


def test_of_equal_logits_the_lowest_id_is_the_greedy_token():
    logits = torch.tensor([[1.0, 3.0, 3.0], [0.0, -0.0, -1.0], [torch.nan, 1.0, 2.0], [torch.inf, 1.0, 2.0]])
    assert argmax_rows(logits).tolist() == [1, 0, -1, -1]
