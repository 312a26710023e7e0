"""Rotary frequencies are bit-equal to transformers'."""

import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tailrace.model.config import Rope, RopeKind
from tailrace.model.hf_directory import parse_config
from tailrace.model.rope import frequencies

BASE = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 131072,
}
SCALINGS = [
    None,
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 0.8, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 4096},
    {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096},
    {
        "rope_type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
]


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_and_attention_factor_equal_transformers(scaling, theta):
    raw = BASE | {"rope_theta": theta, "rope_scaling": scaling}
    config = parse_config(raw, "config.json")
    reference = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(raw)))
    assert torch.equal(frequencies(config.rope, config.head_dim), reference.inv_freq)
    assert config.rope.attention_factor == reference.attention_scaling


def test_the_newer_rope_parameters_key_means_the_same():
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    new = parse_config(BASE | {"rope_parameters": scaling}, "config.json")
    old = parse_config(BASE | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0}, "config.json")
    assert new.rope == old.rope


def test_divisors_of_a_gguf_file_divide_each_frequency():
    plain = frequencies(Rope(theta=10000.0), 8)
    divided = frequencies(Rope(RopeKind.FACTORS, 10000.0, divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    assert torch.equal(divided, plain / torch.tensor([1.0, 2.0, 4.0, 8.0]))
