"""docs/models.md: what is generated is current, and what is said of sizes and times follows from it."""

import re
from pathlib import Path

import pytest

from tailrace.cluster.config import load_config
from tailrace.cluster.models_page import BEGIN, CONFIGS, END, PAGE, page_with, state_groups_text
from tailrace.cluster.sizes import derive
from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowPages
from tailrace.model.source import family_of
from tailrace.model.state_sizes import SUPER_PAGE_TOKENS, prompt_sizes

LINK_BYTES_S = 50e9


def test_the_state_groups_of_the_page_are_the_generated_ones():
    assert PAGE.read_text() == page_with(PAGE.read_text()), "run make models"


def test_every_published_model_has_its_row_and_its_table():
    text = state_groups_text()
    for directory in CONFIGS.iterdir():
        assert f"| {directory.name} | " in text and f"**{directory.name}** (" in text


def test_a_page_whose_tables_were_edited_by_hand_is_seen():
    text = PAGE.read_text()
    edited = text.replace("113,920", "113,921")
    assert edited != text and page_with(edited) == text


@pytest.mark.parametrize("text", [f"a {BEGIN} b", f"a {END} b", "a"])
def test_a_page_without_its_markers_is_not_written(text: str):
    with pytest.raises(ValueError, match="unpack"):
        page_with(text)


def test_the_times_on_a_link_are_those_of_the_bytes():
    times = {}
    for directory in CONFIGS.iterdir():
        own = family_of(str(directory))
        assert own is not None
        layout = RowPages(own[1].row_groups("bfloat16"), SUPER_PAGE_TOKENS)
        times[own[0]] = prompt_sizes(layout, 32768).kept / LINK_BYTES_S * 1e3
    said = re.findall(r"([\d.]+) ms\s+for (V[\d.]+(?:-\w+)?)", PAGE.read_text())
    assert len(said) == 5
    for milliseconds, model in said:
        digits = len(milliseconds.partition(".")[2])
        assert round(times[f"deepseek-{model.lower()}"], digits) == float(milliseconds), model


REFUSED = {  # rows of the page's feature table: what of the configuration, and the key that is named
    "`codec`": ({"codec": "int8"}, "codec"),
    "GGUF, `weights: quantized`": ({"weights": "quantized"}, "weights"),
    "`ctx.tp`, `gen.tp` above 1": ({"gen": {"tp": 2}}, "gen.tp"),
    "`tokens_per_page` or `dtype` that differ between ctx and gen": (
        {"gen": {"tokens_per_page": 256}, "ctx": {"tokens_per_page": 128}},
        "gen.tokens_per_page",
    ),
    "`backflow`, `shadow_check_every`": ({"shadow_check_every": 2}, "shadow_check_every"),
}


@pytest.mark.parametrize("directory", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
@pytest.mark.parametrize("row", REFUSED)
def test_what_the_page_says_is_not_there_is_refused_by_name(row: str, directory: Path):
    own = family_of(str(directory))
    assert own is not None and f"\n| {row} |" in PAGE.read_text()
    settings, key = REFUSED[row]
    with pytest.raises(ConfigError, match=rf"{key}: .*{own[1].family}"):
        derive(load_config({"kv_bytes": "64GiB"} | settings), own[1])


@pytest.mark.parametrize("directory", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_what_the_page_says_of_tokens_a_page_is_what_is_derived(directory: Path):
    own = family_of(str(directory))
    assert own is not None
    sizes = derive(load_config({"kv_bytes": "64GiB"}), own[1])
    assert sizes.layout("ctx").tokens_per_page == sizes.layout("gen").tokens_per_page == 128
