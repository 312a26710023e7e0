"""DeepSeek directories in FP8 and FP4, as serving opens them: the decoder computes with what they say."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mla_checkpoints import tiny_mla_config, tiny_mla_weights
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tailrace.model.csa_config import parse_config
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES, RowDecoder
from tailrace.model.hf_directory import stored_tensors
from tailrace.model.safetensors_files import quantization_block
from tests.model import csa2_models, csa_models
from tests.model.csa_models import Pages, oracle_model, published_tensors, run, some_ids, tiny_config
from tests.quantized_checkpoints import V3, V4, V41, Style, save_sharded, write_quantized_checkpoint

SMALL_BLOCKS = replace(V4, block=(16, 24))  # several blocks a matrix, and short ones at its ends


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> RowDecoder:
    raw = json.loads((directory / "config.json").read_text())
    family = FAMILIES[raw["model_type"]]
    tensors = stored_tensors(directory, quantization_block(raw, "config.json"))
    return family.load(tensors, family.parse(raw, "config.json"), dtype, 32)


def logits(decoder: RowDecoder, ids: list[int]) -> torch.Tensor:
    """Of a prompt in two chunks and then a token at a time."""
    pages = Pages(decoder.layout)
    sequence = pages.sequence(len(ids))
    cuts = [0, 13, len(ids) - 3, len(ids) - 2, len(ids) - 1, len(ids)]
    return torch.cat([run(decoder, pages, [(sequence, ids[a:b])]) for a, b in zip(cuts, cuts[1:], strict=False)])


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def v4() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    raw = tiny_config("WCHC")
    return raw, published_tensors(oracle_model(raw))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32"])
def test_v3_in_fp8_gives_the_logits_of_transformers_reading_the_same_files(family: str, tmp_path: Path):
    raw = tiny_mla_config(family)
    # transformers takes whole blocks only, so no published kv_a_proj of 576 rows; 8 divides every side here.
    write_quantized_checkpoint(tmp_path, tiny_mla_weights(raw, 1), raw, replace(V3, block=(8, 8)))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    ids = csa_models.some_ids(45)
    with torch.inference_mode(), csa_models.stable_topk():
        expected = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    assert (logits(loaded(tmp_path), ids) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("style", [V3, replace(V3, block=(16, 24)), replace(V3, block=(8, 48), ue8m0=True)], ids=str)
def test_v3_blocks_of_any_size_with_short_ends_say_what_was_written(style: Style, tmp_path: Path):
    raw = tiny_mla_config("deepseek_v32")
    held = write_quantized_checkpoint(tmp_path / "packed", tiny_mla_weights(raw, 1), raw, style, shards=2)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(raw))
    save_sharded(held, tmp_path / "plain")
    ids = csa_models.some_ids(30)
    assert torch.equal(logits(loaded(tmp_path / "packed"), ids), logits(loaded(tmp_path / "plain"), ids))


@pytest.mark.parametrize("style", [V4, SMALL_BLOCKS], ids=["published", "small blocks"])
def test_v4_in_fp8_and_fp4_computes_with_what_the_files_say(v4, style: Style, tmp_path: Path):
    raw, tensors = v4
    held = write_quantized_checkpoint(tmp_path / "packed", tensors, raw, style, shards=3)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "config.json").write_text(json.dumps(raw))
    save_sharded(held, tmp_path / "plain")
    ids = some_ids(40)
    packed = logits(loaded(tmp_path / "packed"), ids)
    assert torch.equal(packed, logits(loaded(tmp_path / "plain"), ids))
    exact = logits(csa_models.decoder_of(oracle_model(raw), parse_config(raw, "x"), torch.float32), ids)
    assert 0.05 < (packed - exact).abs().max() < exact.std() * 8, "the rounding is seen, and is no more than that"


def test_a_v41_directory_with_a_lost_scale_names_it(tmp_path: Path):
    raw = csa2_models.ENGRAM
    write_quantized_checkpoint(tmp_path, csa2_models.random_tensors(raw), raw, V41)
    (tmp_path / "engram_token_map.json").write_text(json.dumps(csa2_models.token_map().tolist()))
    stored = load_file(tmp_path / "model.safetensors")
    del stored["layers.3.engram.embed.scale"]
    save_sharded(stored, tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.3\.engram\.embed\.weight \(F8_E4M3.* has no scales"):
        loaded(tmp_path)


def test_a_v4_directory_with_a_lost_scale_names_it(v4, tmp_path: Path):
    raw, tensors = v4
    write_quantized_checkpoint(tmp_path, tensors, raw, V4)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["layers.1.ffn.experts.2.w1.scale"]
    save_sharded(stored, tmp_path)
    with pytest.raises(ConfigError, match=r"layers\.1\.ffn\.experts\.2\.w1\.weight \(I8 .* has no scales"):
        loaded(tmp_path)


def test_flipped_bytes_load_or_are_refused_and_nothing_else(tmp_path: Path):
    raw, rng = csa2_models.ENGRAM, random.Random(1)
    write_quantized_checkpoint(tmp_path, csa2_models.random_tensors(raw), raw, V41)
    (tmp_path / "engram_token_map.json").write_text(json.dumps(csa2_models.token_map().tolist()))
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header, refused = 8 + int.from_bytes(whole[:8], "little"), 0
    for _ in range(30):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3])):
            broken[rng.randrange(header if rng.random() < 0.7 else len(broken))] = rng.randrange(256)
        path.write_bytes(broken)
        try:
            loaded(tmp_path)
        except ConfigError:
            refused += 1
    assert 10 <= refused < 30
