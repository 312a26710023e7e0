"""DeepSeek V3 and V3.2 models of sizes that no published one has, against transformers, cut anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mla_checkpoints import write_tiny_mla
from row_steps import RowWorld

from tests.model.test_mla_decoder import FAMILIES, load, oracle_logits, some_ids

ODD: dict[str, tuple[int, dict[str, Any]]] = {  # tokens a page, what is odd
    "a page a token": (1, {}),
    "a page beyond the prompt": (256, {}),
    "one head, a rotation of two": (7, {"num_attention_heads": 1, "num_key_value_heads": 1, "qk_rope_head_dim": 2}),
    "a latent of 20, heads of 3 and 5": (8, {"kv_lora_rank": 20, "v_head_dim": 5, "qk_nope_head_dim": 3}),
    "no epsilon": (8, {"rms_norm_eps": 0.0}),
    "an epsilon that float32 hardly holds": (8, {"rms_norm_eps": 1e-20}),
}
V32_ODD: dict[str, tuple[int, dict[str, Any]]] = {
    "one row selected": (8, {"index_topk": 1}),
    "more rows selected than there are": (8, {"index_topk": 10_000}),
    "an index of one head and 17 elements": (8, {"index_head_dim": 17, "index_n_heads": 1}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f in FAMILIES for n in ODD] + [("deepseek_v32", n) for n in V32_ODD]
)
def test_odd_sizes_give_the_oracles_logits_however_the_prompt_is_cut(tmp_path: Path, family: str, name: str):
    tokens_per_page, odd = (ODD | V32_ODD)[name]
    directory = write_tiny_mla(tmp_path, family, **odd)
    ids = [511, 0, 511, 511, *some_ids(41)]  # the vocabulary's edges, and one id twice
    world = RowWorld(load(directory, tokens_per_page=tokens_per_page), 60)
    found = world.in_chunks(world.sequence(len(ids)), ids, 1, 2, 3, 30, 31)
    assert (found - oracle_logits(directory, ids, decode=3)).abs().max() < 1e-4


@pytest.mark.parametrize(("rank", "key"), [(20, 17), (129, 130), (1, 8)])
def test_packed_rows_whose_last_tile_is_short_have_the_bytes_that_are_declared(tmp_path: Path, rank: int, key: int):
    directory = write_tiny_mla(tmp_path, "deepseek_v32", kv_lora_rank=rank, index_head_dim=key)
    decoder = load(directory, torch.bfloat16)
    latent, index = decoder.config.row_groups("bfloat16")[0].fields
    assert latent.row_bytes == rank + 4 * -(-rank // 128) + 2 * 8
    assert index.row_bytes == key + 4 * -(-key // 128)
    world, ids = RowWorld(decoder, 30), some_ids(20)
    found = world.in_chunks(world.sequence(len(ids)), ids, 7, 8)
    assert found.isfinite().all()
