"""Which device a rank takes: by the configuration, by what torch sees, by what a GPU can do."""

import pytest

from tailrace.cluster.config import load_config
from tailrace.cluster.device import choose_device
from tailrace.model.config import ModelConfig, Rope
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES
from tests.model.published import V32, published_config

LLAMA = ModelConfig(
    family="llama", vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=16, max_position=4096, rms_norm_eps=1e-6, rope=Rope(), windows=(None, None),
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return FAMILIES["deepseek_v32"].parse(published_config(V32), "config.json")


@pytest.mark.parametrize(
    ("data", "has_gpu", "device"),
    [
        ({}, True, "cuda:0"),
        ({}, False, "cpu"),
        ({"device": "cpu"}, True, "cpu"),
        ({"device": "cuda"}, True, "cuda:0"),
        ({"transport": "shm"}, True, "cpu"),
        ({"gen": {"tp": 2}}, True, "cpu"),
        ({"weights": "quantized"}, True, "cpu"),
    ],
)
def test_a_rank_takes_the_gpu_if_it_may_is_there_and_can(data, has_gpu, device):
    chosen = choose_device(load_config(data), LLAMA, has_gpu)
    assert str(chosen.device) == device and chosen.is_gpu == (device != "cpu")


def test_auto_says_why_it_does_not_take_a_gpu_that_is_there(rows):
    assert "transport: 'shm'" in choose_device(load_config({"transport": "shm"}), LLAMA, True).why
    assert "deepseek_v32" in choose_device(load_config({}), rows, True).why
    assert choose_device(load_config({}), LLAMA, False).why == "torch sees no GPU"


def test_cuda_is_refused_where_it_cannot_be(rows):
    config = load_config({"device": "cuda"})
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        choose_device(config, LLAMA, False)
    with pytest.raises(ConfigError, match="rows of family deepseek_v32"):
        choose_device(config, rows, True)
