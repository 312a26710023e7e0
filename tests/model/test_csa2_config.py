"""DeepSeek V4.1's config: who reads whom, which state that leaves, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.model.csa2_config import parse_config
from tailrace.model.csa2_layers import Role
from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowPages
from tailrace.model.state_groups import GroupKind
from tests.model.csa2_models import ENGRAM, PLAIN
from tests.model.published import V41_FLASH, published_config


def test_the_published_model_has_its_bytes():
    config = parse_config(published_config(V41_FLASH), "config.json")
    pages = RowPages(config.row_groups("bfloat16"), 128)
    assert pages.bytes_per_page == 113_920
    assert pages.constant_bytes == 40 * 67_584 + 3 * 4096 + 3 * 4
    per_token = sum(g.row_bytes * len(g.layers) / g.tokens_per_row for g in pages.groups if g.kind is GroupKind.HISTORY)
    assert per_token == 890
    assert config.row_groups("float32") == config.row_groups("bfloat16")


def test_the_published_model_has_its_roles():
    config = parse_config(published_config(V41_FLASH), "config.json")
    roles = [plan.role for plan in config.layers]
    assert [i for i, role in enumerate(roles) if role is Role.SWA] == [0, 1]
    assert config.owners == (2, 8, 14, 20)
    assert config.boundary == 20
    assert [i for i, role in enumerate(roles) if role is Role.REINDEX] == [24, 28, 32, 36]
    assert [plan.owner for plan in config.layers] == [-1, -1, *[2] * 6, *[8] * 6, *[14] * 6, *[20] * 20]
    assert [i for i, plan in enumerate(config.layers) if plan.restricted] == [24, 28, 32, 36]
    assert 740e9 < config.num_parameters < 765e9  # the card says 763 with vision and draft stages


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "deepseek_v4"}, "model_type"),
        ({"compress_ratios": [0, 2, 2]}, "3 compress_ratios for 9 layers"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1, 1]}, "layer 5 has compress ratio 1, its KV source 4 2"),
        ({"compress_ratios": [2, 2, 2, 2, 1, 1, 1, 1, 1]}, "layer 0 has compress ratio 2 and no KV source"),
        ({"kv_source_layer_ids": [0, 1, 3, 4]}, "kv_source_layer_ids names layer 0"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids is empty"),
        ({"index_source_layer_ids": [1, 4, 6, 7]}, "layer 3 is in kv_source_layer_ids and not in index_source"),
        ({"index_source_layer_ids": [1, 3, 4, 12]}, "index_source_layer_ids names layer 12"),
        ({"candidate_source_layer_id": 5}, "candidate_source_layer_id 5 is not in index_source_layer_ids"),
        (
            {"candidate_source_layer_id": 3},
            "layer 4 selects among rows of layer 4, but its candidates come from layer 3",
        ),
        ({"head_dim": 48}, "head_dim is 48, expected a multiple of 32"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim 64 is above"),
        ({"num_attention_heads": 5}, "num_attention_heads is 5"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear'"),
        ({"engram_layer_ids": [3, 1]}, "engram_layer_ids"),
        ({"engram_num_embeddings": [700]}, "engram_num_embeddings"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"index_topk": None}, "index_topk is missing"),
    ],
)
def test_what_cannot_be_served_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=f"^x.json: .*{message}"):
        parse_config({**ENGRAM, **changes}, "x.json")


def test_a_later_owner_must_not_take_its_candidates_from_other_rows():
    """Without candidates the same sources are fine."""
    sources = {"kv_source_layer_ids": [1, 3, 4, 6], "candidate_source_layer_id": 4}
    with pytest.raises(
        ConfigError, match="layer 6 selects among rows of layer 6, but its candidates come from layer 4"
    ):
        parse_config({**PLAIN, **sources}, "x.json")
    assert parse_config({**PLAIN, **sources, "candidate_topk_blocks": 0}, "x.json").boundary == 6


def test_groups_follow_the_config():
    groups = parse_config(ENGRAM, "x.json").row_groups()
    assert [(g.kind, g.layers, g.tokens_per_row, g.rows, g.period) for g in groups] == [
        (GroupKind.HISTORY, (1, 3), 2, 0, 0),
        (GroupKind.HISTORY, (4,), 1, 0, 0),
        (GroupKind.WINDOW, tuple(range(9)), 1, 16, 0),
        (GroupKind.TOKENS, (0,), 1, 3, 0),
        (GroupKind.TAIL, (1, 3), 1, 1, 2),
    ]
    assert not [g for g in parse_config(PLAIN, "x.json").row_groups() if g.kind is GroupKind.TOKENS]
