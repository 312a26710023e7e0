"""The published configs that other tests build on are what the models' own config classes read."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from tests.model.published import PUBLISHED, V3, V4_FLASH, V4_PRO, V32, V41_FLASH, published_config, published_directory

WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@pytest.mark.parametrize("name", [V3, V32, V4_FLASH, V4_PRO])
def test_the_models_own_config_class_takes_the_file_and_adds_no_layer(name):
    raw, parsed = published_config(name), AutoConfig.from_pretrained(published_directory(name))
    assert type(parsed).model_type == raw["model_type"]
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "vocab_size", "rms_norm_eps"):
        assert getattr(parsed, key) == raw[key]


def test_v4s_ratios_are_the_published_counts_of_layers():
    kinds = {name: AutoConfig.from_pretrained(published_directory(name)).layer_types for name in (V4_FLASH, V4_PRO)}
    assert [kinds[V4_FLASH].count(kind) for kind in (WINDOW, CSA, HCA)] == [2, 21, 20]
    assert [kinds[V4_PRO].count(kind) for kind in (WINDOW, CSA, HCA)] == [0, 30, 31]


def test_v41s_owners_are_layers_of_a_ratio_and_every_one_of_them_is_an_index_source():
    text = published_config(V41_FLASH)["text_config"]
    ratios = text["compress_ratios"]
    assert len(ratios) == text["num_hidden_layers"] + 3, "the three draft stages come last"
    assert [ratios[i] for i in text["kv_source_layer_ids"]] == [2, 2, 2, 1]
    assert set(text["kv_source_layer_ids"]) <= set(text["index_source_layer_ids"])
    assert text["candidate_source_layer_id"] in text["kv_source_layer_ids"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_checkpoint_is_fp8_with_square_blocks(name):
    quantization = published_config(name)["quantization_config"]
    assert quantization["quant_method"] == "fp8"
    side = 32 if name == V41_FLASH else 128
    assert quantization["weight_block_size"] == [side, side]
