"""Bytes that follow from a declaration, for small declarations counted by hand and for the published models."""

from __future__ import annotations

from fractions import Fraction

import pytest

from tailrace.model.csa2_config import Csa2Config
from tailrace.model.family import FAMILIES
from tailrace.model.row_groups import RowField, RowGroup, RowPages
from tailrace.model.state_groups import GroupKind
from tailrace.model.state_sizes import (
    SUPER_PAGE_TOKENS,
    bytes_per_token,
    constant_of,
    layer_list,
    most_open,
    prompt_sizes,
)
from tests.model.published import V3, V4_FLASH, V4_PRO, V32, V41_FLASH, published_config

MIB = 2**20
# Bytes a token, bytes of a super-page, MiB of a prompt of 32k, constant bytes of windows and of carries.
EXPECTED = {
    V3: (Fraction(70_272), 8_994_816, 2196.0, 0, 0),
    V32: (Fraction(48_068), 6_152_704, 1502.1, 0, 0),
    V4_FLASH: (Fraction(14_057, 4), 449_824, 112.9, 43 * 74_752, 430_080),
    V4_PRO: (Fraction(80_503, 16), 644_024, 161.6, 61 * 74_752, 614_400),
    V41_FLASH: (Fraction(890), 113_920, 30.4, 40 * 67_584 + 12, 0),
}


def layout_of(name: str) -> RowPages:
    raw = published_config(name)
    config = FAMILIES[raw["model_type"]].parse(raw, name)
    return RowPages(config.row_groups("bfloat16"), SUPER_PAGE_TOKENS)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_published_models_have_the_published_sizes(name: str):
    layout = layout_of(name)
    per_token, page, mib, windows, carry = EXPECTED[name]
    assert bytes_per_token(layout.groups) == per_token
    assert layout.history_bytes == page
    sizes = prompt_sizes(layout, 32768)
    assert round(sizes.kept / MIB, 1) == mib
    assert constant_of(layout.groups, GroupKind.WINDOW, GroupKind.TOKENS) == sizes.window == windows
    assert constant_of(layout.groups, GroupKind.CARRY) == sizes.carry == carry
    assert sizes.open == 0, "32k is a multiple of every period"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_prompt_of_32k_takes_at_most_260_descriptors_a_group(name: str):
    sizes = prompt_sizes(layout_of(name), 32768)
    assert sizes.history_pages <= 260 and sizes.state_pages <= 260


@pytest.mark.parametrize("name", EXPECTED)
def test_open_rows_of_the_published_models_are_a_few_kilobytes_a_layer(name: str):
    most = {V4_FLASH: 21 * 30_720 + 20 * 6_144, V4_PRO: 30 * 30_720 + 31 * 6_144, V41_FLASH: 3 * 4_096}
    assert most_open(layout_of(name).groups) == most.get(name, 0)


def test_v41s_draft_stages_add_their_windows_to_what_is_constant_and_only_when_in_use():
    config = FAMILIES["deepseek_v41"].parse(published_config(V41_FLASH), "x")
    assert isinstance(config, Csa2Config)
    with_drafts = config.drafting().row_groups("bfloat16")
    assert constant_of(with_drafts, GroupKind.WINDOW) == 40 * 67_584 + 393_216
    assert bytes_per_token(with_drafts) == 890


def test_a_prompt_is_counted_row_by_row():
    groups = (
        RowGroup(GroupKind.HISTORY, (0, 2), (RowField("a", 10, "x"), RowField("b", 3, "x")), tokens_per_row=4),
        RowGroup(GroupKind.WINDOW, (0, 1, 2), (RowField("w", 7, "x"),), rows=6),
        RowGroup(GroupKind.TOKENS, (0,), (RowField("ids", 4, "x"),), rows=3),
        RowGroup(GroupKind.CARRY, (2,), (RowField("c", 5, "x"),), rows=4),
        RowGroup(GroupKind.TAIL, (0, 2), (RowField("t", 11, "x"),), rows=3, period=4),
        RowGroup(GroupKind.TAIL, (1,), (RowField("u", 13, "x"),), rows=1, period=8),
    )
    layout = RowPages(groups, 8)
    assert bytes_per_token(groups) == Fraction(26, 4)
    short, long = prompt_sizes(layout, 5), prompt_sizes(layout, 15)
    assert (short.history, short.window, short.carry, short.open) == (26, 3 * 5 * 7 + 12, 20, 2 * 11 + 13)
    assert (long.history, long.window, long.carry, long.open) == (3 * 26, 3 * 6 * 7 + 12, 20, 2 * 3 * 11 + 13)
    assert (short.history_pages, long.history_pages) == (1, 2)
    assert prompt_sizes(layout, 16).open == 0 and most_open(groups) == 2 * 3 * 11 + 13
    assert prompt_sizes(layout, 16).state_pages <= long.state_pages == layout.num_state_pages
    assert long.kept == long.history + long.window


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((3, 4), "3,4"),
        (range(43), "0-42"),
        (range(2, 43, 2), "2,4..42"),
        ((0, 1, *range(3, 9, 2)), "0,1,3..7"),
        ((2, 8, 14), "2,8,14"),
        ((0, 1, 2, 8, 9), "0-2,8,9"),
    ],
)
def test_layers_are_listed_by_runs(layers, text: str):
    assert layer_list(list(layers)) == text
