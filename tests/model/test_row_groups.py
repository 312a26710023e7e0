"""Where rows stand in history and state pages: sizes of the real families, no overlap, what is written is read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowField, RowGroup, RowPages
from tailrace.model.row_store import RowPool
from tailrace.model.state_groups import GroupKind

V41 = (
    RowGroup(GroupKind.HISTORY, (2, 8, 14), (RowField("r2", 288, "m"), RowField("r2_key", 68, "k")), tokens_per_row=2),
    RowGroup(GroupKind.HISTORY, (20,), (RowField("r1", 288, "m"), RowField("r1_key", 68, "k"))),
    RowGroup(GroupKind.WINDOW, tuple(range(40)), (RowField("window", 528, "w"),), rows=128),
    RowGroup(GroupKind.TAIL, (2, 8, 14), (RowField("pending", 4096, "f"),), rows=1, period=2),
    RowGroup(GroupKind.TOKENS, (0,), (RowField("ids", 4, "i"),), rows=3),
)
V4 = (
    RowGroup(GroupKind.HISTORY, tuple(range(21)), (RowField("c", 584, "m"), RowField("k", 68, "k")), tokens_per_row=4),
    RowGroup(GroupKind.HISTORY, tuple(range(20)), (RowField("hca", 584, "m"),), tokens_per_row=128),
    RowGroup(GroupKind.WINDOW, tuple(range(43)), (RowField("window", 584, "m"),), rows=128),
)  # fmt: skip


def test_a_super_page_has_the_bytes_of_the_real_families():
    assert RowPages(V41, 128).bytes_per_page == 113_920
    assert RowPages(V4, 128).bytes_per_page == 449_824
    assert RowPages(V41, 128).constant_bytes == 40 * 67_584 + 3 * 4096 + 12


def spots(pages: RowPages) -> list[tuple[bool, int, int, int]]:
    """(is state, page, first byte, end) of every row."""
    found = [(False, 0, r.offset + i * r.row_bytes, r.offset + (i + 1) * r.row_bytes)
             for r in pages.history.values() for i in range(r.rows_per_page)]  # fmt: skip
    for region in pages.state.values():
        where = region.places(np.arange(region.rows))
        found += [(True, int(p), int(o), int(o) + region.row_bytes) for p, o in zip(*where, strict=True)]
    return sorted(found)


@pytest.mark.parametrize("groups", [V41, V4])
def test_no_row_overlaps_another_or_crosses_a_page(groups):
    pages = RowPages(groups, 128)
    rows = spots(pages)
    assert all(0 <= first < end <= pages.bytes_per_page for _, _, first, end in rows)
    assert max(page for is_state, page, _, _ in rows if is_state) == pages.num_state_pages - 1
    for (kind, page, _, end), (other, next_page, first, _) in zip(rows, rows[1:], strict=False):
        assert (kind, page) != (other, next_page) or end <= first


def test_an_empty_tail_leaves_its_pages_out_and_nothing_else():
    pages = RowPages(V41, 128)
    needed = {p for (name, _), r in pages.state.items() if name != "pending" for p in r.places(np.arange(r.rows))[0]}
    assert pages.state_pages_needed(1000) == max(needed) + 1
    assert pages.state_pages_needed(1001) == pages.num_state_pages


def test_what_is_written_is_read_whatever_the_pages_are():
    layout = RowPages(V41, 128)
    rng = np.random.default_rng(1)
    pages = torch.from_numpy(rng.integers(0, 256, (64, layout.bytes_per_page), np.uint8))
    pool = RowPool(pages, layout)
    table = rng.permutation(np.arange(1, 64))[: 3 + layout.num_state_pages]
    rows = pool.of(table)
    before = pages.clone()
    new = torch.from_numpy(rng.integers(0, 256, (150, 288), np.uint8))
    rows.history("r1", 20).write(100, new)
    assert torch.equal(rows.history("r1", 20).read(torch.arange(100, 250)), new)
    assert torch.equal(rows.history("r1", 20).first(250)[100:], new)
    window = torch.from_numpy(rng.integers(0, 256, (100, 528), np.uint8))
    at = torch.arange(300, 400) % 128
    for layer in range(40):
        rows.state("window", layer).write(at, window.roll(layer, 0))
    for layer in range(40):
        assert torch.equal(rows.state("window", layer).read(at), window.roll(layer, 0))
    assert torch.equal(rows.history("r1", 20).first(250)[100:], new)
    others = [p for p in range(64) if p not in table]
    assert torch.equal(pages[others], before[others])


@pytest.mark.parametrize("tokens", [0, 1, 3, 127])
def test_pages_that_do_not_fit_the_groups_are_refused(tokens):
    with pytest.raises(ConfigError, match="multiple of 128" if tokens else "tokens_per_page is 0"):
        RowPages(V4, tokens)
    with pytest.raises(ConfigError, match="twice"):
        RowPages((*V4, V4[0]), 128)
