"""config.json of DeepSeek V3 and V3.2 as MlaConfig and row groups, against transformers' reading of the same file."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.model.errors import ConfigError
from tailrace.model.mla_config import expected_shapes, parse_config
from tailrace.model.row_groups import RowPages
from tests.model.published import V3, V32, published_config, published_directory


@pytest.mark.parametrize("name", [V3, V32])
def test_the_published_models_have_the_parameters_and_the_scale_that_transformers_gives_them(name):
    config = parse_config(published_config(name), name)
    with torch.device("meta"):
        oracle = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published_directory(name)))
    biases = config.is_sparse.count(True) * config.experts.num  # buffers there, stored all the same
    assert config.num_parameters == sum(p.numel() for p in oracle.parameters()) + biases
    assert config.softmax_scale == pytest.approx(oracle.model.layers[0].self_attn.scaling, rel=1e-12)
    assert config.rope.attention_factor == oracle.model.rotary_emb.attention_scaling == 1.0
    assert config.is_sparse == (False,) * 3 + (True,) * 58
    assert (config.indexer is not None) == (name == V32)


@pytest.mark.parametrize(("name", "dtype", "token_bytes"), [
    (V3, "bfloat16", 70_272), (V32, "bfloat16", 48_068), (V3, "float32", 140_544), (V32, "float32", 171_776),
])  # fmt: skip
def test_a_token_has_the_published_bytes_and_a_sequence_nothing_that_does_not_grow(name, dtype, token_bytes):
    config = parse_config(published_config(name), name)
    pages = RowPages(config.row_groups(dtype), 64)
    assert pages.bytes_per_page == 64 * token_bytes
    assert (pages.num_state_pages, pages.constant_bytes) == (0, 0)


def test_v32_rows_are_656_and_132_bytes_and_v3_rows_1152():
    fields = {f.name: f.row_bytes for f in parse_config(published_config(V32), "c").row_groups("bfloat16")[0].fields}
    assert fields == {"latent": 656, "index_key": 132}
    (field,) = parse_config(published_config(V3), "c").row_groups("bfloat16")[0].fields
    assert field.row_bytes == 1152


def test_a_32k_prompt_of_v32_is_1502_mib():
    config = parse_config(published_config(V32), "c")
    assert round(RowPages(config.row_groups("bfloat16"), 64).bytes_per_page * (32768 // 64) / 2**20) == 1502


@pytest.mark.parametrize("mscale", [{}, {"mscale": 0.707, "mscale_all_dim": 0.707}, {"mscale": 1.0}])
def test_yarn_sharpens_scores_by_mscale_all_dim_alone(mscale):
    raw = published_config(V3)
    raw["rope_scaling"] = {k: v for k, v in raw["rope_scaling"].items() if "mscale" not in k} | mscale
    plain = (128 + 64) ** -0.5
    all_dim = mscale.get("mscale_all_dim", 0)
    assert parse_config(raw, "c").softmax_scale == pytest.approx(plain * (0.1 * all_dim * math.log(40) + 1) ** 2)
    assert parse_config(raw | {"rope_scaling": None}, "c").softmax_scale == plain


def test_kinds_of_layers_may_be_listed():
    raw = published_config(V32) | {"num_hidden_layers": 3}
    raw["mlp_layer_types"] = ["sparse", "dense", "sparse"]
    assert parse_config(raw, "c").is_sparse == (True, False, True)
    assert parse_config(published_config(V3) | {"first_k_dense_replace": 61}, "c").experts is None


def test_draft_blocks_in_use_add_their_rows_and_tensors():
    config = parse_config(published_config(V3), "c")
    drafting = dataclasses.replace(config, num_draft_layers=1)
    assert [g.layers[-1] for c in (config, drafting) for g in c.row_groups("bfloat16")] == [60, 61]
    more = expected_shapes(drafting).keys() - expected_shapes(config).keys()
    assert all(name.startswith("model.layers.61.") for name in more) and "model.layers.61.eh_proj.weight" in more
    with pytest.raises(ConfigError, match="2 draft layers are asked for, the checkpoint has 1"):
        dataclasses.replace(config, num_draft_layers=2)


WRONG = [
    (V3, {"model_type": "deepseek_v2"}, "model_type 'deepseek_v2'"),
    (V3, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    (V3, {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    (V3, {"topk_method": "greedy"}, "topk_method 'greedy'"),
    (V3, {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    (V3, {"num_key_value_heads": 64}, "num_key_value_heads is 64"),
    (V3, {"num_hidden_layers": 0}, "0 layers"),
    (V3, {"num_hidden_layers": 10**9}, "1000000000 layers"),
    (V3, {"hidden_size": 0}, "hidden_size is 0"),
    (V3, {"hidden_size": None}, "hidden_size is missing"),
    (V3, {"vocab_size": "many"}, "vocab_size is 'many'"),
    (V3, {"kv_lora_rank": 1.5}, "kv_lora_rank is 1.5"),
    (V3, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63"),
    (V3, {"v_head_dim": -1}, "v_head_dim is -1"),
    (V3, {"n_group": 7}, "n_group is 7"),
    (V3, {"n_group": 256}, "n_group is 256"),
    (V3, {"topk_group": 9}, "topk_group is 9"),
    (V3, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129"),
    (V3, {"norm_topk_prob": 1}, "norm_topk_prob is 1"),
    (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    (V3, {"mlp_layer_types": ["dense"]}, "mlp_layer_types is"),
    (V3, {"n_shared_experts": -1}, "n_shared_experts is -1"),
    (V3, {"rope_scaling": {"type": "dynamic"}}, "rope type 'dynamic'"),
    (V3, {"rope_interleave": "no"}, "rope_interleave is 'no'"),
    (V3, {"attention_bias": 0}, "attention_bias is 0"),
    (V32, {"q_lora_rank": None}, "q_lora_rank is null"),
    (V32, {"rope_interleave": False}, "rope_interleave false"),
    (V32, {"index_head_dim": 32}, "index_head_dim is 32"),
    (V32, {"index_topk": 0}, "index_topk is 0"),
    (V32, {"index_n_heads": None}, "index_n_heads is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), WRONG, ids=[m for _, _, m in WRONG])
def test_a_wrong_value_is_named_by_its_key(name, change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(published_config(name) | change, "config.json")


def test_an_absent_query_rank_is_not_a_null_one():
    raw = published_config(V3)
    del raw["q_lora_rank"]
    with pytest.raises(ConfigError, match="q_lora_rank is missing"):
        parse_config(raw, "config.json")
    shapes = expected_shapes(parse_config(raw | {"q_lora_rank": None}, "config.json"))
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (128 * 192, 7168)


def test_other_dtypes_of_rows_are_refused():
    with pytest.raises(ConfigError, match="kv_dtype 'float16'"):
        parse_config(published_config(V3), "c").row_groups("float16")
