"""DeepSeek V4.1 on pages: the same tokens give the same bits however they are cut, placed, moved or put beside others;
and what a hand-off leaves out shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model import csa2_decoder
from tailrace.model.engram import NOTHING
from tests.model.csa2_models import ENGRAM, PLAIN, Pages, make_decoder, random_ids, random_tensors, run, step

WINDOW, DECODED = 16, 7
LENGTHS = sorted({1, 2, 3, WINDOW - 1, WINDOW, WINDOW + 1, 63, 64, 79, 80, 127, 128, 129})  # r - 1, r, r + 1: 0 to 3
MOVES = 1e-2


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pages() -> Pages:
    return Pages(make_decoder(ENGRAM, seed=1), 900)


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return random_ids(LENGTHS[-1] + DECODED, seed=3)


@pytest.fixture(scope="module")
def whole(pages: Pages, ids: list[int]) -> torch.Tensor:
    """Logits of all positions, from one chunk."""
    return run(pages, pages.table(len(ids)), ids)


def test_pages_are_shuffled(pages: Pages):
    assert not np.array_equal(np.sort(pages.table(40)), pages.table(40))


def test_a_prompt_gives_the_same_bits_wherever_it_is_cut(pages: Pages, ids: list[int], whole: torch.Tensor):
    assert whole.isfinite().all()
    assert len(whole.argmax(-1).unique()) > 30  # the model does not emit one constant
    for cuts in ([1, 2, 3, 17], [63, 64, 96, 97], range(19, 136, 19)):
        assert torch.equal(run(pages, pages.table(len(ids)), ids, cuts=cuts), whole), cuts


def test_sequences_of_one_step_do_not_touch_each_other(pages: Pages, ids: list[int], whole: torch.Tensor):
    others = [random_ids(n, seed=n) for n in (40, 1, 25)]
    alone = [run(pages, pages.table(60), some) for some in others]
    tables = [pages.table(60) for _ in others]
    mine = pages.table(len(ids))
    run(pages, tables[0], others[0][:39])
    run(pages, mine, ids[:50])
    parts = [
        (tables[0], others[0][39:], 39),
        (tables[1], others[1], 0),
        (mine, ids[50:90], 50),
        (tables[2], others[2], 0),
    ]
    together = step(pages, parts).split([1, 1, 40, 25])
    for i, want in ((0, alone[0][39:]), (1, alone[1]), (2, whole[50:90]), (3, alone[2])):
        assert torch.equal(together[i], want), i


def test_a_sequence_goes_on_from_other_pages_after_every_length(pages: Pages, ids: list[int], whole: torch.Tensor):
    """Only the pages that a hand-off after so many tokens sends are copied; the rest stays poisoned."""
    moved, table, done = [], pages.table(len(ids)), 0
    for length in LENGTHS:
        run(pages, table, ids[done:length], done)
        moved.append(pages.copy(table, length))
        done = length
    pages.pool.pages[table] = 0xFF
    for i in range(DECODED):
        parts = [(table, [ids[n + i]], n + i) for table, n in zip(moved, LENGTHS, strict=True)]
        found = step(pages, parts)
        assert torch.equal(found, whole[[n + i for n in LENGTHS]]), [
            (n, float(e)) for n, e in zip(LENGTHS, (found - whole[[n + i for n in LENGTHS]]).abs().amax(1), strict=True)
        ]


def test_padding_is_stored_nowhere(pages: Pages, ids: list[int], whole: torch.Tensor):
    table = pages.table(len(ids))
    run(pages, table, ids[:20])
    rest = torch.tensor([*ids[20:25], 0, 0, 0])
    before = pages.pool.pages.clone()
    decoder = pages.decoder
    hidden = decoder.forward(rest, torch.tensor([20, 21, 22, 23, 24, 0, 0, 0]), pages.pool, [RowSpan(20, 5, table)])
    assert hidden.shape == (8, decoder.config.hidden_size)
    assert torch.equal(decoder.logits(hidden)[:5], whole[20:25])
    touched = (pages.pool.pages != before).any(1).nonzero()[:, 0].tolist()
    assert set(touched) <= set(table.tolist())
    assert torch.equal(run(pages, table, ids[25:40], 25), whole[25:40])


LENGTH = 79  # odd: a pair is open


@pytest.mark.parametrize(
    "dropped", ["nothing", "pending pair", "window", "index keys", "main rows", "one lookback id", "boundary's keys"]
)
def test_every_part_of_the_state_is_needed(pages: Pages, ids: list[int], whole: torch.Tensor, dropped: str):
    table = pages.table(len(ids))
    run(pages, table, ids[:LENGTH])
    rows = pages.pool.of(table)
    owners = pages.decoder.config.owners
    if dropped == "pending pair":
        for layer in owners[:-1]:
            rows.state("pending_r2", layer).write(
                torch.zeros(1, dtype=torch.long), torch.zeros(1, 512, dtype=torch.uint8)
            )
    if dropped == "window":
        for layer in range(pages.decoder.config.num_layers):
            state = rows.state("window", layer)
            state.write(torch.arange(WINDOW), torch.zeros(WINDOW, state.row_bytes, dtype=torch.uint8))
    for name, part in (("key", "index keys"), ("main", "main rows")):
        if dropped == part:
            for layer in owners:
                ratio = pages.decoder.config.layers[layer].ratio
                history = rows.history(f"{name}_r{ratio}", layer)
                history.write(0, torch.zeros(LENGTH // ratio, history.row_bytes, dtype=torch.uint8))
    if dropped == "boundary's keys":
        history = rows.history("key_r1", owners[-1])
        history.write(0, torch.zeros(LENGTH, history.row_bytes, dtype=torch.uint8))
    if dropped == "one lookback id":
        gone = torch.tensor([[NOTHING]], dtype=torch.int32).view(torch.uint8)
        rows.state("ids", 0).write(torch.tensor([(LENGTH - 3) % 3]), gone)
    found = run(pages, table, ids[LENGTH:100], LENGTH, cuts=[LENGTH + 1])
    error = (found - whole[LENGTH:100]).abs().max()
    assert error == 0 if dropped == "nothing" else error > MOVES, float(error)


def test_ties_are_broken_alike_in_prefill_and_decode(ids: list[int], monkeypatch: pytest.MonkeyPatch):
    """All index keys equal, so every selection is a tie; then with the default top-k, which is seen to go wrong."""
    tensors = random_tensors(PLAIN, 2)
    for name in tensors:
        if name.endswith("indexer.wk.weight"):
            tensors[name].zero_()
    pages = Pages(make_decoder(PLAIN, tensors=tensors), 200)
    whole = run(pages, pages.table(80), ids[:80])
    assert torch.equal(run(pages, pages.table(80), ids[:80], cuts=[41, *range(72, 80)]), whole)

    def unstable(scores: torch.Tensor, k: int, visible: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.zeros_like(scores, dtype=torch.bool)
        if visible is not None:
            hidden = torch.arange(scores.shape[-1]) >= visible[:, None]
        best, index = scores.masked_fill(hidden, -torch.inf).topk(min(k, scores.shape[-1]))
        index = index.masked_fill(best == -torch.inf, -1)
        return torch.nn.functional.pad(index, (0, k - index.shape[-1]), value=-1)

    monkeypatch.setattr(csa2_decoder, "exact_topk", unstable)
    whole = run(pages, pages.table(80), ids[:80])
    assert (run(pages, pages.table(80), ids[:80], cuts=[41, *range(72, 80)]) - whole).abs().max() > MOVES


def test_candidates_confine_later_selections(ids: list[int]):
    """With enough blocks they confine nothing; with few they do, and only where rows are more than they hold."""
    wide = Pages(make_decoder({**PLAIN, "candidate_topk_blocks": 1000}), 200)
    none = Pages(make_decoder({**PLAIN, "candidate_topk_blocks": 0}), 200)
    few = Pages(make_decoder({**PLAIN, "candidate_topk_blocks": 3}), 200)
    found = [run(pages, pages.table(60), ids[:60]) for pages in (wide, none, few)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0][:12], found[2][:12])
    assert (found[0] - found[2])[12:].abs().max() > MOVES


def test_bfloat16_stays_near(ids: list[int], pages: Pages, whole: torch.Tensor):
    half = Pages(make_decoder(ENGRAM, seed=1, dtype=torch.bfloat16), 100)
    found = run(half, half.table(80), ids[:80], cuts=[33, 34])
    assert found.dtype is torch.float32
    want = whole[:80].log_softmax(-1)
    divergence = (want.exp() * (want - found.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.1


def test_the_encoder_half_writes_all_that_grows(pages: Pages, ids: list[int]):
    """Up to the boundary: the same history, tail, ids and lower windows, and no upper window."""
    decoder, boundary = pages.decoder, pages.decoder.config.boundary
    tables = [pages.table(60) for _ in range(2)]
    run(pages, tables[0], ids[:51], cuts=[30])
    run(pages, tables[1], ids[:51], cuts=[7, 30], num_layers=boundary)
    full, half = (pages.pool.of(table) for table in tables)
    for (name, layer), region in decoder.layout.history.items():
        count = 51 * region.rows_per_page // decoder.layout.tokens_per_page
        assert torch.equal(full.history(name, layer).first(count), half.history(name, layer).first(count))
    for (name, layer), region in decoder.layout.state.items():
        index = torch.arange(region.rows)
        same = torch.equal(full.state(name, layer).read(index), half.state(name, layer).read(index))
        assert same == (name != "window" or layer < boundary), (name, layer)
        if not same:
            assert (half.state(name, layer).read(index) == 0xFF).all()
