"""What `check --model` shows of the published configs, and what it refuses."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from tailrace.cluster.model_view import render
from tailrace.model.errors import ConfigError
from tests.checkpoints import write_tiny_checkpoint
from tests.model.published import (
    V3,
    V4_FLASH,
    V4_PRO,
    V32,
    V41_FLASH,
    published_config,
    published_directory,
)

CHECKED = {
    V41_FLASH: ("30.4", "bytes a token: 890", "113,920", "2,703,372", "288", "12,288 at most", "carry 0"),
    V4_FLASH: ("112.9", "3,514.25", "449,824", "3,214,336", "584", "carry 430,080", "1,048,576"),
    V4_PRO: ("161.6", "5,031.44", "644,024", "4,559,872"),
    V32: ("1,502", "48,068", "6,152,704", "656", "132", "windows 0"),
    V3: ("2,196", "70,272", "1152"),
}


def shown(model: Path | str, tokens_per_page: int = 128) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    for part in render(str(model), tokens_per_page):
        console.print(part)
    return console.export_text()


@pytest.mark.parametrize("name", CHECKED)
def test_a_published_config_alone_shows_bytes_of_tokens_prompts_and_pages(name: str):
    text = shown(published_directory(name))
    assert [word for word in (*CHECKED[name], name, "config.json alone", " 256 ") if word not in text] == [], text


def test_pages_that_hold_no_whole_number_of_rows_are_refused_with_what_would_do():
    with pytest.raises(ConfigError, match="tokens_per_page is 64, this model needs a multiple of 128"):
        shown(published_directory(V4_FLASH), 64)
    text = shown(published_directory(V4_FLASH), 256)
    assert "super-page of 256 tokens: 899,648" in text and " 128 " in text


def test_prompts_beyond_the_models_positions_are_not_shown(tmp_path: Path):
    for positions, prompts in ((300, ["300"]), (40_000, ["8,192", "32,768"])):
        raw = published_config(V32) | {"max_position_embeddings": positions}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        rows = re.findall(r"^│ ([0-9,]+) +│ [0-9.,]+ +│", shown(tmp_path), re.MULTILINE)
        assert rows == prompts


def test_a_quantization_that_cannot_be_read_is_refused_without_any_weights(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(V32) | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config \(\?\) is not supported"):
        shown(tmp_path)


def test_with_weights_that_are_damaged_the_config_alone_is_not_taken_for_enough(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(published_config(V32)))
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"tokenizer\.json|model\.safetensors"):
        shown(tmp_path)


def test_llama_like_models_show_their_one_group_and_their_revision(tmp_path: Path):
    text = shown(write_tiny_checkpoint(tmp_path / "m", "qwen3"))
    assert "history" in text and "k 2x16, v 2x16" in text and "revision" in text
