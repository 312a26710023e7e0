"""DeepSeek V4.1 from a directory as it is published: FP8 blocks of 32, FP4 experts, FP8 Engram rows, a token map."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.errors import ConfigError
from tailrace.model.source import open_source
from tests.checkpoints import tiny_tokenizer_json
from tests.model.csa2_models import ENGRAM, Pages, make_decoder, random_ids, random_tensors, run, token_map
from tests.quantized_checkpoints import V41, write_quantized_checkpoint

TOP = ("model_type", "image_token_id")
FEW = {**ENGRAM, "n_routed_experts": 3, "num_experts_per_tok": 2}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(directory: Path) -> dict[str, torch.Tensor]:
    """A directory with text_config and tensors that nothing reads -> what its tensors say in float32."""
    raw: dict[str, Any] = {key: FEW[key] for key in TOP} | {"eos_token_id": 1}
    raw["text_config"] = {key: value for key, value in FEW.items() if key not in TOP}
    tensors = random_tensors(FEW, 6) | {"mtp.0.norm.weight": torch.ones(3), "vision.w.weight": torch.ones(2, 2)}
    held = write_quantized_checkpoint(directory, tensors, raw, V41, shards=2)
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    (directory / "engram_token_map.json").write_text(json.dumps(token_map().tolist()), encoding="utf-8")
    return held


def test_a_quantized_directory_gives_the_logits_of_what_it_says(tmp_path: Path):
    held = write(tmp_path)
    seen: list[tuple[int, int]] = []
    source = open_source(str(tmp_path))
    assert source.family is not None
    with pytest.raises(ConfigError, match="tokens_per_page is 15, this model needs a multiple of 2"):
        source.family.load(source.tensors, source.config, torch.float32, 15)
    decoder = source.family.load(
        source.tensors, source.config, torch.float32, 16, lambda done, total: seen.append((done, total))
    )
    assert isinstance(decoder, Csa2Decoder)
    assert seen[-1][0] == seen[-1][1] > 0
    ids = random_ids(50)
    found = run(Pages(decoder, 40), Pages(decoder, 40).table(50), ids)
    names = random_tensors(FEW, 6)
    want = make_decoder(FEW, tensors={name: held[name] for name in names})
    assert torch.equal(found, run(Pages(want, 40), Pages(want, 40).table(50), ids))
    assert decoder.config.num_parameters == sum(x.numel() for x in names.values())


@pytest.mark.parametrize("name", ["layers.4.attn.indexer.wk.weight", "layers.3.engram.embed.weight"])
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(name: str):
    tensors = random_tensors(FEW, 6)
    whole = tensors.pop(name)
    with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
        make_decoder(FEW, tensors=tensors)
    with pytest.raises(ConfigError, match=rf"tensor {name} has shape \({len(whole) - 1}, .*expected \({len(whole)}, "):
        make_decoder(FEW, tensors=tensors | {name: whole[1:]})


def test_two_token_maps_are_two_revisions_and_what_only_the_text_config_says_counts(tmp_path: Path):
    write(tmp_path)
    path, map_path = tmp_path / "config.json", tmp_path / "engram_token_map.json"
    first = open_source(str(tmp_path))
    map_path.write_text(json.dumps(token_map()[::-1].tolist()), encoding="utf-8")
    assert open_source(str(tmp_path)).revision != first.revision
    raw = json.loads(path.read_text())
    for key in ("quantization_config", "eos_token_id"):
        raw["text_config"][key] = raw.pop(key)
    path.write_text(json.dumps(raw))
    nested = open_source(str(tmp_path))
    assert nested.eos_ids == first.eos_ids == {1}
    assert nested.tensors["layers.4.attn.wkv.weight"].kind == "F8_E4M3"
    path.write_text(json.dumps(raw | {"eos_token_id": [2, 3]}))
    assert open_source(str(tmp_path)).eos_ids == {2, 3}
