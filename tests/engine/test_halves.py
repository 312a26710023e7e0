"""A large step in two halves: where it is cut, that it computes the same, and what a failing half does."""

import random

import numpy as np
import pytest
import torch

import tailrace.model.decoder as module
from tailrace.engine.forward import Forward
from tailrace.engine.halves import MIN_TOKENS, FirstHalfFailed, Halves, in_halves
from tailrace.engine.step import Row
from tailrace.kernels.paged_attention import AttentionPlan, PagedPool
from tailrace.kv_cache.layout import single_layout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights

PAGE = 16


def row(count: int, start: int = 0, first_page: int = 1) -> Row:
    rng = random.Random(count * 1000 + start)
    ids = np.array([rng.randrange(4, 500) for _ in range(count)], np.int32)
    pages = np.arange(first_page, first_page - -(start + count) // PAGE, dtype=np.int32)
    return Row(None, ids, start, pages)


def test_the_halves_are_about_equal_and_hold_every_token_once_in_order():
    rng = random.Random(1)
    for _ in range(500):
        singles = [row(1, rng.randrange(50)) for _ in range(rng.randrange(20))]
        rows = singles + [row(rng.randrange(2, 300), rng.randrange(50)) for _ in range(rng.randrange(5))]
        total = sum(len(r.ids) for r in rows)
        halves = in_halves(rows)
        if halves is None:
            continue
        assert total >= MIN_TOKENS
        first, second = halves
        joined = [(r.start + i, int(t)) for part in (first, second) for r in part for i, t in enumerate(r.ids)]
        assert joined == [(r.start + i, int(t)) for r in rows for i, t in enumerate(r.ids)]
        assert abs(sum(len(r.ids) for r in first) - total / 2) <= 32


def test_a_small_step_is_not_cut_and_a_long_prompt_is():
    assert in_halves([row(MIN_TOKENS - 1)]) is None
    assert [len(part[0].ids) for part in in_halves([row(512)]) or ()] == [256, 256]
    assert [len(part[0].ids) for part in in_halves([row(300, 5)]) or ()] == [160, 140]


def test_rows_of_one_token_stay_before_the_others_in_each_half():
    """The kernels' layout; a cut that leaves one token at a wrong place is no cut."""
    for count in range(2, 140):
        halves = in_halves([row(1), row(70, 3), row(count, 9)])
        for part in halves or ():
            lengths = [len(r.ids) == 1 for r in part]
            assert lengths == sorted(lengths, reverse=True)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def forwards(path, pages: int = 64) -> tuple[Forward, Forward]:
    """The same model on one thread and in halves, each with pages full of NaN but for the scratch page."""
    source = open_source(str(path))
    decoder = Decoder(load_weights(source, dtype=torch.float32, quantized=False))
    layout = single_layout(state_groups(source.config), PAGE, "float32")
    pools = [torch.full((pages, *layout.shape), torch.nan) for _ in range(2)]
    return Forward(decoder, pools[0], threads=1), Forward(decoder, pools[1], threads=2)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_step_in_halves_equals_the_whole_step_though_pages_held_nan(tiny, two_threads, family):
    """Cuts inside a page, a prefix already there, several prompts and decode rows beside them."""
    whole, halved = forwards(tiny(family))
    first = [row(37, 0, 1), row(5, 0, 20)]
    steps = [first, [row(1, 5, 20), row(213, 37, 1), row(90, 0, 30)]]
    with torch.inference_mode():
        for rows in steps:
            count = sum(len(r.ids) for r in rows)
            want, got = whole(rows)[:count], halved(rows)[:count]
            assert got.isfinite().all()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert in_halves(steps[1]) is not None
    written = [page for r in steps[1] for page in r.pages.tolist()]
    torch.testing.assert_close(halved.pool.kv[written], whole.pool.kv[written], rtol=1e-4, atol=1e-4)


def test_the_second_half_reads_no_layer_before_the_first_has_written_it(tiny, two_threads, monkeypatch):
    _, halved = forwards(tiny("llama"))
    rows = [row(256)]
    assert in_halves(rows) is not None
    seen: list[tuple[str, int]] = []
    write, attend = module.write_kv, module.paged_attention

    def slow_write(kv: torch.Tensor, pool: PagedPool, layer: int, plan: AttentionPlan) -> None:
        write(kv, pool, layer, plan)
        seen.append((f"wrote {len(kv)} {plan.chunks[None][0].gather is None}", layer))

    def attended(
        q: torch.Tensor, kv: torch.Tensor, pool: PagedPool, layer: int, window: int | None, plan: AttentionPlan
    ) -> torch.Tensor:
        seen.append((f"reads {plan.chunks[None][0].gather is None}", layer))
        return attend(q, kv, pool, layer, window, plan)

    monkeypatch.setattr(module, "write_kv", slow_write)
    monkeypatch.setattr(module, "paged_attention", attended)
    with torch.inference_mode():
        halved(rows)
    layers = halved.decoder.config.num_layers
    for layer in range(layers):
        assert seen.index(("wrote 128 True", layer)) < seen.index(("reads False", layer))


def test_a_half_that_fails_raises_its_own_error_and_leaves_nobody_waiting():
    halves, (first, second) = Halves(), ([row(64)], [row(64, 64)])

    def first_fails(rows, between):
        if rows is first:
            raise ValueError("first")
        between()
        return torch.zeros(1)

    def second_fails(rows, between):
        if rows is second:
            raise ValueError("second")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="first"):
        halves.run((first, second), first_fails)
    with pytest.raises(ValueError, match="second"):
        halves.run((first, second), second_fails)
    assert issubclass(FirstHalfFailed, RuntimeError)
    assert halves.run((first, second), lambda rows, between: torch.ones(1)).tolist() == [1, 1]
