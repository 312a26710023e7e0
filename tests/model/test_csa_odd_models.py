"""DeepSeek V4 models of sizes that no published one has, against transformers, and checkpoints that lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailrace.model.csa_config import parse_config
from tailrace.model.csa_decoder import load
from tailrace.model.errors import ConfigError
from tests.model.csa_models import (
    KINDS,
    VOCAB,
    Pages,
    oracle_logits,
    oracle_model,
    published_tensors,
    run,
    some_ids,
    tensor_table,
    tiny_config,
    tiny_v4,
    with_draft,
)
from tests.model.test_csa_draft import Speculating, plain, same


def rates(csa: int, hca: int) -> dict[str, Any]:
    return {"compress_rates": {KINDS["C"]: csa, KINDS["H"]: hca}}


ODD: dict[str, tuple[str, int, dict[str, Any]]] = {  # layers, tokens a page, what is odd
    "rates that do not divide each other": ("WCHC", 60, {**rates(3, 10), "sliding_window": 7}),
    "a window of the token alone": ("HCC", 70, {**rates(5, 7), "sliding_window": 1}),
    "CSA coarser than HCA": ("HC", 48, rates(16, 3)),
    "a window beyond the prompt": ("WCH", 32, {"sliding_window": 500}),
    "a page beyond the prompt": ("WCHC", 256, {}),
    "an epsilon that float32 hardly holds": ("WCH", 32, {"rms_norm_eps": 1e-20, "hc_eps": 1e-20}),
    "one stream, rotation of two": ("WC", 32, {"hc_mult": 1, "hc_sinkhorn_iters": 1, "qk_rope_head_dim": 2}),
    "all layers by hash, more picks than entries": ("WC", 32, {"num_hash_layers": 99, "index_topk": 10_000}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_give_the_oracles_logits_however_the_prompt_is_cut(name: str):
    layers, tokens_per_page, odd = ODD[name]
    oracle, decoder = tiny_v4(layers, tokens_per_page=tokens_per_page, **odd)
    ids = [VOCAB - 1, 0, VOCAB - 1, VOCAB - 1, *some_ids(71)]  # the vocabulary's edges, and one id twice
    pages = Pages(decoder.layout)
    sequence = pages.sequence(len(ids))
    cuts = (0, 1, 2, 3, 34, 35, 59, 60, 61, len(ids))
    found = [run(decoder, pages, [(sequence, ids[a:b])]) for a, b in zip(cuts, cuts[1:], strict=False)]
    assert (torch.cat(found) - oracle_logits(oracle, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.clone().fill_(4), r"tid2eid \(96, 2\) holds 4, expected 0 to 3"),
        (lambda table: table.clone().fill_(-1), r"tid2eid \(96, 2\) holds -1, expected 0 to 3"),
        (lambda table: table.float(), r"tid2eid has type F32, expected I64 or I32"),
    ],
)
def test_a_table_of_experts_that_are_not_there_is_refused_at_loading(change, message: str):
    raw = tiny_config("WC")
    tensors = published_tensors(oracle_model(raw))
    tensors["layers.0.ffn.gate.tid2eid"] = change(tensors["layers.0.ffn.gate.tid2eid"])
    with pytest.raises(ConfigError, match=message):
        load(tensor_table(tensors), parse_config(raw, "config.json"), torch.float32, 32)


def test_numbers_where_weights_belong_are_refused_at_loading():
    raw = tiny_config("WC")
    tensors = published_tensors(oracle_model(raw))
    tensors["layers.1.attn.wkv.weight"] = torch.ones(32, 64, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"wkv\.weight has type I64, expected a floating type"):
        load(tensor_table(tensors), parse_config(raw, "config.json"), torch.float32, 32)


@pytest.mark.parametrize(("csa", "hca", "window", "tokens_per_page"), [(2, 3, 1, 24), (5, 7, 3, 35)])
def test_guesses_change_nothing_where_rates_and_window_are_odd(csa: int, hca: int, window: int, tokens_per_page: int):
    raw = tiny_config("WCHW", **rates(csa, hca), sliding_window=window)
    decoder, _ = with_draft(oracle_model(raw), parse_config(raw, "x"), tokens_per_page=tokens_per_page)
    for length in (1, 4, 6):
        prompt = some_ids(length, seed=length)
        expected = plain(decoder, prompt, 16)

        def guess(position: int, own: int, tokens: list[int] = expected[0], first: int = length) -> int:
            """Right at two of three places."""
            right = tokens[position - first] if position - first < len(tokens) else own
            return (right + 1) % VOCAB if position % 3 == 0 else right

        same(Speculating(decoder, length + 40, guess), prompt, expected)
