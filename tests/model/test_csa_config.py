"""DeepSeek V4 config.json: read as the model's own config class reads it, refused by key, and the bytes it implies."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.kernels.row_formats import RowFormat
from tailrace.model.config import RopeKind
from tailrace.model.csa_config import KV_DTYPES, LayerKind, parse_config
from tailrace.model.csa_rows import formats
from tailrace.model.csa_tensors import tensor_shapes
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES
from tailrace.model.row_groups import RowPages
from tailrace.model.state_groups import GroupKind
from tests.model.csa_models import KINDS, oracle_model, published_tensors, tiny_config
from tests.model.published import V4_FLASH, V4_PRO, published_config


@pytest.mark.parametrize("name", [V4_FLASH, V4_PRO])
def test_published_configs_are_read_as_the_oracle_reads_them(name: str):
    transformers = pytest.importorskip("transformers")
    raw = published_config(name)
    config = FAMILIES[raw["model_type"]].parse(raw, "config.json")
    theirs = transformers.DeepseekV4Config(**{k: v for k, v in raw.items() if k != "model_type"})
    assert [k.value for k in config.kinds] == theirs.layer_types
    assert [*config.hash_layers] == [kind == "hash_moe" for kind in theirs.mlp_layer_types]
    assert (config.hidden_size, config.num_heads, config.head_dim) == (
        theirs.hidden_size, theirs.num_attention_heads, theirs.head_dim)  # fmt: skip
    assert config.rope_dim == theirs.qk_rope_head_dim == 64
    assert (config.rope.kind, config.rope.theta) == (RopeKind.DEFAULT, theirs.rope_parameters["main"]["rope_theta"])
    compress = theirs.rope_parameters["compress"]
    rope = config.compressed_rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position, rope.attention_factor) == (
        RopeKind.YARN, compress["rope_theta"], compress["factor"], compress["original_max_position_embeddings"],
        compress["attention_factor"])  # fmt: skip
    assert config.num_draft_layers_stored == 1 and config.num_draft_layers == 0


def test_real_models_have_the_published_sizes():
    flash, pro = (parse_config(published_config(n), "x") for n in (V4_FLASH, V4_PRO))
    assert (len(flash.layers_of(LayerKind.CSA)), len(flash.layers_of(LayerKind.HCA)), flash.num_layers) == (21, 20, 43)
    assert (len(pro.layers_of(LayerKind.CSA)), len(pro.layers_of(LayerKind.HCA)), pro.num_layers) == (30, 31, 61)
    assert round(flash.num_parameters / 1e9, 1) == 284.3 and round(pro.num_parameters / 1e12, 2) == 1.57
    pages = RowPages(flash.row_groups("bfloat16"), 128)
    assert pages.bytes_per_page == 449_824
    state = {g.fields[0].name: g.constant_bytes for g in pages.groups if g.kind is not GroupKind.HISTORY}
    assert state == {
        "window": 43 * 74_752, "csa_overlap": 21 * 20_480, "csa_open": 21 * 30_720, "hca_open": 20 * 6_144,
    }  # fmt: skip
    assert pages.constant_bytes == 4_412_416
    mib = (32768 // 128 * pages.history_bytes + state["window"]) / 2**20
    assert round(mib, 1) == 112.9
    pages = RowPages(pro.row_groups("bfloat16"), 128)
    assert round((256 * pages.history_bytes + 61 * 74_752) / 2**20, 1) == 161.6
    # Tails apart: a prompt that ends with no open window leaves their pages out.
    assert pages.state_pages_needed(128) < pages.state_pages_needed(127) == pages.num_state_pages


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("layers", ["WWCHC", "HHCHC"])
def test_rows_have_the_bytes_and_names_of_their_formats(layers: str, kv_dtype: str):
    for raw in (tiny_config(layers), published_config(V4_FLASH)):
        config = parse_config(raw, "x")
        used = formats(config, kv_dtype)
        by_field: dict[str, RowFormat] = {"csa": used.row, "hca": used.row, "window": used.row, "csa_key": used.key}
        fields = {f.name: f for g in config.row_groups(kv_dtype) for f in g.fields}
        assert set(by_field) <= set(fields)
        for name, row_format in by_field.items():
            assert fields[name].row_bytes == row_format.row_bytes
            assert fields[name].row_format.removeprefix("hadamard+") == row_format.name
    assert (fields["csa"].row_bytes, fields["csa_key"].row_bytes) == ((2048, 512), (584, 68))[kv_dtype == "bfloat16"]


def test_a_model_without_some_kind_of_layer_has_none_of_its_rows():
    groups = parse_config(tiny_config("WW"), "x").row_groups("float32")
    assert [g.kind for g in groups] == [GroupKind.WINDOW]
    names = {f.name for g in parse_config(tiny_config("WH"), "x").row_groups("float32") for f in g.fields}
    assert names == {"window", "hca", "hca_open"}


def test_layer_kinds_come_from_types_else_ratios_else_the_families_pattern():
    raw = tiny_config("WCHC")
    by_types = parse_config(raw, "x").kinds
    assert by_types == (LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA, LayerKind.CSA)
    del raw["layer_types"]
    raw["compress_ratios"] = [4, 0, 16, 16, 0]  # the last one is the draft block's
    assert parse_config(raw, "x").kinds == (LayerKind.CSA, LayerKind.WINDOW, LayerKind.HCA, LayerKind.HCA)
    del raw["compress_ratios"]
    assert parse_config(raw, "x").kinds == (LayerKind.HCA, LayerKind.HCA, LayerKind.HCA, LayerKind.CSA)
    assert parse_config(raw, "x").hash_layers == (True, True, False, False)
    raw["mlp_layer_types"] = ["moe", "hash_moe", "moe", "moe"]
    assert parse_config(raw, "x").hash_layers == (False, True, False, False)


def test_what_transformers_writes_is_read_as_what_is_published(tmp_path):
    oracle = oracle_model(tiny_config("WCH"))
    oracle.config.save_pretrained(tmp_path)
    from tailrace.model.hf_directory import read_json

    written = parse_config(read_json(tmp_path / "config.json"), "x")
    assert written == parse_config(tiny_config("WCH"), "x")


def test_every_tensor_of_a_checkpoint_is_expected_with_its_shape():
    raw = tiny_config("WCHC")
    stored = {name: tuple(t.shape) for name, t in published_tensors(oracle_model(raw)).items()}
    assert dict(tensor_shapes(parse_config(raw, "x"))) == stored


WRONG: list[tuple[str, Any]] = [
    ("num_key_value_heads", 2), ("n_shared_experts", 2), ("scoring_func", "sigmoid"), ("norm_topk_prob", False),
    ("topk_method", "greedy"), ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True),
    ("num_hidden_layers", 0), ("num_hidden_layers", 4097), ("head_dim", "32"), ("vocab_size", 0), ("hidden_size", 1.5),
    ("num_attention_heads", True), ("q_lora_rank", 0), ("o_groups", 3), ("o_lora_rank", 0), ("sliding_window", 0),
    ("index_n_heads", 0), ("index_head_dim", 24), ("index_head_dim", 4), ("index_topk", 0), ("hc_mult", 0),
    ("hc_sinkhorn_iters", 0), ("n_routed_experts", 0), ("num_experts_per_tok", 5), ("moe_intermediate_size", -1),
    ("routed_scaling_factor", "x"), ("swiglu_limit", 0), ("rms_norm_eps", 0), ("hc_eps", -1), ("rope_theta", 0),
    ("max_position_embeddings", 0), ("compress_rope_theta", -1), ("tie_word_embeddings", "no"), ("num_hash_layers", -1),
    ("num_nextn_predict_layers", -1), ("qk_rope_head_dim", 0), ("qk_rope_head_dim", 7), ("qk_rope_head_dim", 32),
    ("partial_rotary_factor", "x"), ("compress_rates", {"csa": 4}), ("compress_rates", {KINDS["C"]: 1}),
    ("compress_rates", [4]), ("compress_rate_csa", 1), ("compress_rate_hca", 1 << 20), ("layer_types", ["full"] * 3),
    ("layer_types", [KINDS["C"]]), ("layer_types", "CCC"), ("mlp_layer_types", ["dense"] * 3), ("mlp_layer_types", 3),
    ("rope_scaling", 16), ("rope_scaling", {"rope_type": "su"}), ("rope_scaling", {"rope_type": "yarn", "factor": "x"}),
]  # fmt: skip
CALLED = {  # messages that name what the key means, or what it must fit
    "num_hidden_layers": "layers", "index_head_dim": "index_head_dim", "qk_rope_head_dim": "rotated elements|qk_rope",
    "compress_rate_hca": "hca_rate", "rope_theta": "theta", "compress_rope_theta": "theta", "rope_scaling": "rope",
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{k}={v}" for k, v in WRONG])
def test_a_wrong_value_is_refused_naming_its_key(key: str, value: Any):
    raw = tiny_config("WCH") | {key: value}
    with pytest.raises(ConfigError, match=CALLED.get(key, key)):
        parse_config(raw, "config.json")


@pytest.mark.parametrize(
    ("ratios", "message"), [([0, 4], "2 entries"), ([0, 4, 8], "0, 4, 16"), ([0, 4, 16, 4], "draft"), (4, "list")]
)
def test_wrong_ratios_are_refused(ratios: Any, message: str):
    raw = tiny_config("WCH") | {"compress_ratios": ratios}
    del raw["layer_types"]
    with pytest.raises(ConfigError, match=f"compress_ratios.*{message}"):
        parse_config(raw, "config.json")


def test_pages_and_kv_dtypes_that_do_not_fit_are_refused():
    config = parse_config(tiny_config("WCH"), "x")
    with pytest.raises(ConfigError, match="multiple of 16"):
        RowPages(config.row_groups("float32"), 24)
    with pytest.raises(ConfigError, match="float16"):
        config.row_groups("float16")
