"""config.json of every family -> ModelConfig and state groups, against transformers' reading of the same keys."""

import pytest
from checkpoints import _COMMON, FAMILIES

from tailrace.model.config import ModelConfig, Rope, RopeKind, state_groups
from tailrace.model.errors import ConfigError
from tailrace.model.hf_directory import parse_config
from tailrace.model.state_groups import GroupKind


def parsed(family: str, **overrides: object) -> ModelConfig:
    return parse_config(_COMMON | FAMILIES[family] | overrides, "config.json")


def test_every_family_names_its_own_biases_norms_and_windows():
    assert (parsed("llama").qkv_bias, parsed("llama").qk_norm, parsed("llama").windows) == (False, False, (None, None))
    assert parsed("mistral").windows == (24, 24)
    assert (parsed("qwen2").qkv_bias, parsed("qwen2").o_bias) == (True, False)
    assert (parsed("qwen3").qk_norm, parsed("qwen3").qkv_bias) == (True, False)


def test_a_llama_attention_bias_is_on_all_four_projections():
    config = parsed("llama", attention_bias=True, mlp_bias=True)
    assert config.qkv_bias and config.o_bias and config.mlp_bias


def test_qwen2_windows_only_the_layers_from_max_window_layers_on():
    assert parsed("qwen2-window").windows == (None, 24, 24)
    assert parsed("qwen2-window", use_sliding_window=False).windows == (None, None, None)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parsed("qwen2-window", layer_types=kinds).windows == (24, None, 24)


def test_a_mistral_without_window_sees_everything():
    assert parsed("mistral", sliding_window=None).windows == (None, None)


def test_head_dim_and_kv_heads_follow_the_file_not_the_hidden_size():
    config = parsed("llama", head_dim=32, num_key_value_heads=1)
    assert (config.q_size, config.kv_size) == (128, 32)
    assert parsed("llama", head_dim=None).head_dim == 16
    assert parsed("qwen2", num_key_value_heads=None).num_kv_heads == 4


def test_one_window_for_all_layers_is_a_window_group():
    (group,) = state_groups(parsed("mistral"))
    assert (group.kind, group.window, group.layers) == (GroupKind.WINDOW, 24, (0, 1))
    # Decoding token 100 reads itself and the 23 before it.
    assert group.first_needed_token(100) == 77


def test_layers_that_differ_in_what_they_see_share_one_history_group():
    (group,) = state_groups(parsed("qwen2-window"))
    assert (group.kind, group.window, group.num_layers) == (GroupKind.HISTORY, None, 3)
    assert group.elements_per_token() == 3 * 2 * 2 * 16


def test_parameter_count_equals_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM

    for family in ("llama", "mistral", "qwen2", "qwen3"):
        for extra in ({}, {"tie_word_embeddings": True}, {"attention_bias": True}):
            raw = _COMMON | FAMILIES[family] | extra
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
            expected = sum(p.numel() for p in model.parameters())
            assert parse_config(raw, "config.json").num_parameters == expected, (family, extra)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"model_type": "gpt2"}, ["architecture 'gpt2'", "llama, mistral, qwen2, qwen3"]),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, ["rope type 'longrope'", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope type 'dynamic'"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor is missing"]),
        ({"rope_scaling": [1]}, ["rope_scaling"]),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, ["differ by layer type"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'"]),
        ({"hidden_size": None}, ["hidden_size is missing"]),
        ({"hidden_size": "64"}, ["hidden_size is '64'"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
        ({"num_key_value_heads": 3}, ["4 attention heads", "3 kv heads"]),
        ({"num_hidden_layers": 0}, ["0 layers"]),
        ({"num_hidden_layers": 10**9}, ["1000000000 layers"]),
        ({"head_dim": 15}, ["head_dim 15"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config (gptq)"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(overrides, names):
    with pytest.raises(ConfigError) as refused:
        parsed("llama", **overrides)
    assert all(name in str(refused.value) for name in names)


def test_a_rope_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="high_freq_factor"):
        Rope(RopeKind.LLAMA3, original_max_position=512, low_freq_factor=4.0, high_freq_factor=4.0)
    with pytest.raises(ConfigError, match="original_max_position"):
        Rope(RopeKind.YARN, factor=2.0)
    with pytest.raises(ConfigError, match="theta"):
        Rope(theta=0.0)
