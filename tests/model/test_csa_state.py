"""What a DeepSeek V4 hand-off carries: moved after any length decode goes on as if it had not, and each part matters.

Lengths stand around every compression rate, the window and page ends. A sequence is copied to other page numbers of
another pool, both full of 0xFF but for what the copy brings: history pages, and the state pages that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.model.csa_decoder import CsaDecoder
from tests.model.csa_models import KINDS, Held, Pages, oracle_logits, run, some_ids, tiny_v4

TOLERANCE = 1e-4
LENGTHS = (1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 79, 80, 127, 128, 129)
STEPS = 8

Model = tuple[CsaDecoder, list[int], torch.Tensor]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(layers: str, **overrides: Any) -> Model:
    oracle, decoder = tiny_v4(layers, **overrides)
    ids = some_ids(150)
    return decoder, ids, oracle_logits(oracle, ids)


@pytest.fixture(scope="module")
def small() -> Model:
    """Rates 4 and 16, window 8, 32 tokens a page."""
    return made("WWCHC")


@pytest.fixture(scope="module")
def real_rates() -> Model:
    """Rates 4 and 128 as published, window 16, 128 tokens a page."""
    rates = {KINDS["C"]: 4, KINDS["H"]: 128}
    return made("HCCH", compress_rates=rates, sliding_window=16, tokens_per_page=128, seed=5)


def prefilled(decoder: CsaDecoder, ids: list[int], lengths: Sequence[int]) -> tuple[Pages, list[Held]]:
    """A sequence of each length, in two chunks, where there are two tokens."""
    pages = Pages(decoder.layout, num_pages=400)
    held = [pages.sequence(len(ids)) for _ in lengths]
    for sequence, length in zip(held, lengths, strict=True):
        cut = length * 5 // 8
        for chunk in (ids[:cut], ids[cut:length]):
            if chunk:
                run(decoder, pages, [(sequence, chunk)])
    return pages, held


def decoded(decoder: CsaDecoder, pages: Pages, held: list[Held], ids: list[int], steps: int = STEPS) -> torch.Tensor:
    """[sequences, steps, vocab]; all of them in each step."""
    found = [run(decoder, pages, [(s, ids[s.length : s.length + 1]) for s in held]) for _ in range(steps)]
    return torch.stack(found, 1)


@pytest.mark.parametrize("model", ["small", "real_rates"])
def test_a_sequence_moved_after_any_length_goes_on_as_if_it_had_not(model: str, request: pytest.FixtureRequest):
    decoder, ids, expected = request.getfixturevalue(model)
    source, held = prefilled(decoder, ids, LENGTHS)
    target = Pages(decoder.layout, num_pages=400, seed=99)
    moved = [target.moved(source, sequence, len(ids)) for sequence in held]
    assert all(not np.array_equal(a.table, b.table) for a, b in zip(held, moved, strict=True))
    stayed = decoded(decoder, source, held, ids)
    source.pool.pages.fill_(0xFF)
    found = decoded(decoder, target, moved, ids)
    for length, mine, unmoved in zip(LENGTHS, found, stayed, strict=True):
        assert torch.equal(mine, unmoved), length
        assert (mine - expected[length : length + STEPS]).abs().max() < TOLERANCE, length


def test_closed_windows_leave_the_tails_pages_behind(small: Model):
    """After a multiple of both rates nothing is open: what would hold it need not be there, nor need it be right."""
    decoder, ids, expected = small
    source, [sequence] = prefilled(decoder, ids, [64])
    assert decoder.layout.state_pages_needed(64) <= decoder.layout.num_state_pages
    for name in ("csa_open", "csa_key_open", "hca_open"):
        wipe(source, sequence, name, 0xFF)
    [found] = decoded(decoder, source, [sequence], ids)
    assert (found - expected[64 : 64 + STEPS]).abs().max() < TOLERANCE


# ---------------------------------------------------------------------------------------------------------- ablations


def wipe(pages: Pages, sequence: Held, field: str, value: int = 0) -> None:
    """All rows of a field, in all layers that have it, that this sequence has."""
    layout, rows = pages.layout, pages.pool.of(sequence.table)
    done = 0
    for (name, layer), region in layout.history.items():
        if name == field:
            count = (len(sequence.table) - layout.num_state_pages) * region.rows_per_page
            rows.history(name, layer).write(0, torch.full((count, region.row_bytes), value, dtype=torch.uint8))
            done += 1
    for (name, layer), region in layout.state.items():
        if name == field:
            every = torch.arange(region.rows)
            rows.state(name, layer).write(every, torch.full((region.rows, region.row_bytes), value, dtype=torch.uint8))
            done += 1
    assert done


Harm = Callable[[Pages, Held], None]


def wiping(field: str) -> Harm:
    return lambda pages, sequence: wipe(pages, sequence, field)


def changes(model: Model, length: int, harms: Sequence[Harm], steps: int = 22) -> torch.Tensor:
    """[harms, steps]: how far off the logits are after each harm. Some steps take all of the sequences at once."""
    decoder, ids, expected = model
    pages, held = prefilled(decoder, ids, [length] * len(harms))
    for sequence, harm in zip(held, harms, strict=True):
        harm(pages, sequence)
    return (decoded(decoder, pages, held, ids, steps) - expected[length : length + steps]).abs().amax(-1)


def test_zeroed_rows_of_each_kind_move_the_logits(small: Model):
    fields = ["csa", "csa_key", "hca", "window", "csa_open", "csa_key_open", "hca_open"]
    change = changes(small, 79, [*map(wiping, fields), lambda pages, sequence: None])
    for field, moved in zip(fields, change, strict=False):
        assert moved.max() > 1e-2, field
    assert change[-1].max() < TOLERANCE


def test_a_zeroed_overlap_shows_when_the_next_window_closes_and_not_before(small: Model):
    fields = ["csa_overlap", "csa_key_overlap"]
    for length in (76, 77, 79):
        for field, change in zip(fields, changes(small, length, [*map(wiping, fields)]), strict=True):
            closing = 79 - length  # the step whose token closes the window; that or a later query may choose it
            assert (change[:closing] < TOLERANCE).all(), field
            assert change.max() > 1e-2, field


@pytest.mark.parametrize("length", [65, 79])
def test_one_lost_row_of_an_open_window_is_enough(length: int, small: Model):
    """The newest open row of the index alone, or one window row: nothing in a group is there for nothing."""

    def lose(fields: Sequence[str], position: int) -> Harm:
        def harm(pages: Pages, sequence: Held) -> None:
            rows = pages.pool.of(sequence.table)
            for field, layer in pages.layout.state:
                if field in fields:
                    state = rows.state(field, layer)
                    at = torch.tensor([position % state.rows])
                    state.write(at, torch.zeros(1, state.row_bytes, dtype=torch.uint8))

        return harm

    harms = [lose(["csa_open", "csa_key_open"], length - 1), lose(["window"], length + 1)]
    assert (changes(small, length, harms, 12).amax(1) > 1e-2).all()
