"""How heads and widths are divided among ranks, and what cannot be divided."""

from __future__ import annotations

import pytest

from tailrace.model.config import ModelConfig, Rope
from tailrace.model.errors import ConfigError
from tailrace.model.shard import Shard, check


def model(heads: int, kv_heads: int, inner: int = 64) -> ModelConfig:
    return ModelConfig(
        family="llama", vocab_size=100, hidden_size=32, intermediate_size=inner, num_layers=1, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=8, max_position=64, rms_norm_eps=1e-5, rope=Rope(), windows=(None,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("total", "tp", "held"),
    [
        (2, 1, [[0, 1]]),
        (2, 2, [[0], [1]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 4, [[0], [0], [0], [0]]),
        (8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 8, [[0]] * 4 + [[1]] * 4),
    ],
)
def test_each_rank_holds_the_key_value_heads_that_its_query_heads_attend_to(total, tp, held):
    assert [list(Shard(rank, tp).kv_heads(total)) for rank in range(tp)] == held
    heads = 8
    for rank in range(tp):
        attended = {query // (heads // total) for query in Shard(rank, tp).part(heads)}
        assert attended == set(held[rank])


def test_a_rank_has_its_part_of_heads_and_width_and_all_else_whole():
    part = Shard(3, 4).config(model(8, 2))
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 16)
    assert (part.hidden_size, part.head_dim, part.vocab_size) == (32, 8, 100)
    assert Shard().config(model(9, 3)) == model(9, 3)


@pytest.mark.parametrize(
    ("config", "tp", "reason"),
    [
        (model(9, 3), 2, "gen.tp: 2 ranks cannot share 9 attention heads"),
        (model(8, 2, inner=66), 4, "gen.tp: 4 ranks cannot share an MLP of width 66"),
        (model(12, 3), 4, "gen.tp: 4 ranks can neither share 3 key-value heads nor"),
        (model(12, 6), 4, "gen.tp: 4 ranks can neither share 6 key-value heads nor"),
    ],
)
def test_what_cannot_be_split_is_refused_with_both_numbers(config, tp, reason):
    with pytest.raises(ConfigError, match=reason):
        check(config, tp, "gen.tp")


def test_a_rank_beyond_the_last_is_refused():
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Shard(2, 2)
