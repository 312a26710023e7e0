"""DeepSeek V4.1 models of sizes that no published one has, cut anywhere; ids beyond the tokenizer; configs that lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.csa2_weights import load_weights
from tailrace.model.engram import NOTHING, EngramHash
from tailrace.model.errors import ConfigError
from tests.model.csa2_models import (
    ENGRAM,
    PLAIN,
    Pages,
    config_of,
    entries,
    random_ids,
    random_tensors,
    run,
    token_map,
)

ONE_OWNER = {"kv_source_layer_ids": [1], "index_source_layer_ids": [1, 4, 6, 7]}
SMALL = {"candidate_topk_blocks": 1, "candidate_block_size": 1}
DRAFT = {
    "num_nextn_predict_layers": 2, "dspark_block_size": 4, "dspark_target_layer_ids": [7, 8],
    "dspark_noise_token_id": 5, "dspark_markov_rank": 8,
}  # fmt: skip
ODD: dict[str, tuple[int, dict[str, Any]]] = {  # tokens a page, what is odd
    "a window of the token alone": (16, {"sliding_window": 1}),
    "a window beyond the prompt": (16, {"sliding_window": 500}),
    "a page beyond the prompt": (256, {}),
    "three tokens a row": (48, {"compress_ratios": [0, 3, 3, 3, 1, 1, 1, 1, 1]}),
    "owners of three ratios": (16, {"compress_ratios": [0, 4, 4, 2, 1, 1, 1, 1, 1]}),
    "five tokens a row to the end": (15, {"compress_ratios": [0, *[5] * 8], **ONE_OWNER}),
    "n-grams of seven": (16, {"engram_max_ngram_size": 7, "engram_num_embeddings": [2000, 2500]}),
    "n-grams of two, at both ends": (
        16,
        {"engram_max_ngram_size": 2, "engram_layer_ids": [0, 8]},
    ),
    "one row, out of one block of one row": (16, {"index_topk": 1, **SMALL}),
    "more picks than rows": (16, {"index_topk": 1000, "candidate_topk_blocks": 1000}),
    "blocks that no row count fills": (16, {"candidate_block_size": 7, "candidate_topk_blocks": 2}),
    "no epsilon at all, one stream": (16, {"rms_norm_eps": 0, "hc_eps": 0, "hc_mult": 1, "hc_sinkhorn_iters": 1}),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def decoder_of(odd: dict[str, Any], tokens_per_page: int) -> Csa2Decoder:
    raw = ENGRAM | odd
    weights = load_weights(entries(random_tensors(raw)), config_of(raw), torch.float32, token_map())
    return Csa2Decoder(weights, tokens_per_page)


@pytest.mark.parametrize("name", ODD)
def test_odd_sizes_give_the_same_bits_wherever_a_prompt_is_cut(name: str):
    tokens_per_page, odd = ODD[name]
    pages = Pages(decoder_of(odd, tokens_per_page), num_pages=800)
    ids = [96, 0, 96, 96, 95, *random_ids(65)]  # the vocabulary's edges, masked ids, one id twice
    whole = run(pages, pages.table(len(ids)), ids)
    cut = run(pages, pages.table(len(ids)), ids, cuts=(1, 2, 3, 4, 5, 7, 31, 32, 33, 48, 49, 69))
    assert whole.isfinite().all() and whole.std() > 0.5
    assert torch.equal(whole, cut)


def test_a_single_layer_that_owns_its_rows_is_a_model():
    raw = PLAIN | {"num_hidden_layers": 1, "compress_ratios": [1], "kv_source_layer_ids": [0]}
    raw |= {"index_source_layer_ids": [0], "candidate_source_layer_id": -1}
    decoder = Csa2Decoder(load_weights(entries(random_tensors(raw)), config_of(raw), torch.float32, None), 16)
    pages, ids = Pages(decoder), random_ids(40)
    whole = run(pages, pages.table(40), ids)
    assert torch.equal(whole, run(pages, pages.table(40), ids, cuts=(1, 17)))


def test_an_id_beyond_the_tokenizer_is_no_part_of_an_n_gram():
    engram = config_of(ENGRAM).engram
    assert engram is not None
    known = token_map()[:90]
    known[:61] = np.arange(61)
    hashes = EngramHash(engram, known)
    assert hashes.classes(torch.tensor([0, 89, 90, 95, 96, 10**9])).tolist()[2:] == [NOTHING] * 4
    assert min(hashes.classes(torch.tensor([0, 89])).tolist()) >= 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": -1}, "swiglu_limit is -1.0"),
        ({"rms_norm_eps": -1e-20}, "rms_norm_eps is -1e-20"),
        ({"hc_eps": -1e-6}, "hc_eps is -1e-06"),
        ({"candidate_source_layer_id": 4.5}, "candidate_source_layer_id is 4.5"),
        ({"num_key_value_heads": 2}, "num_key_value_heads 2"),
        ({"topk_method": "greedy"}, "topk_method 'greedy'"),
        ({"engram_num_embeddings": [700, 0]}, r"engram_num_embeddings \[700, 0\]"),
        ({"engram_num_embeddings": []}, r"engram_num_embeddings \[\]"),
        (DRAFT | {"dspark_noise_token_id": 97}, "dspark_noise_token_id 97 of 97 ids"),
        (DRAFT | {"dspark_num_experts_per_tok": 9}, "dspark_num_experts_per_tok is 9 of 8 experts"),
        (DRAFT | {"num_nextn_predict_layers": 10**6}, "1000000 layers"),
        (DRAFT | {"dspark_target_layer_ids": [3]}, r"dspark_target_layer_ids \[3\]"),
    ],
)
def test_what_would_go_wrong_in_a_step_is_refused_when_the_config_is_read(change: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        config_of(ENGRAM | change)
