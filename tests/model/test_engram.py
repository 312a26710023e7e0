"""Engram: which rows a token reads, from whatever was cut or split, and what they add."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tailrace.model.csa2_config import EngramConfig, parse_config
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.csa2_weights import load_weights
from tailrace.model.engram import (
    NOTHING,
    EngramHash,
    EngramTable,
    EngramWeights,
    RowsAhead,
    hash_multipliers,
    hash_primes,
    read_token_map,
    row_range,
    token_classes,
    write_memory,
)
from tailrace.model.errors import ConfigError
from tests.checkpoints import tiny_tokenizer_json
from tests.model.csa2_models import (
    ENGRAM,
    Pages,
    config_of,
    entries,
    make_decoder,
    random_ids,
    random_tensors,
    run,
    token_map,
)
from tests.model.published import V41_FLASH, published_config


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny() -> EngramConfig:
    config = parse_config(ENGRAM, "tiny").engram
    assert config is not None
    return config


def by_hand(config: EngramConfig, ids: list[int], layer: int, position: int) -> list[int]:
    """Rows of one position, in Python integers."""
    which = config.layers.index(layer)
    classes = []
    for k in range(config.max_ngram):
        at = position - k
        blocked = at < 0 or config.masked_id in ids[at : position + 1]
        classes.append(int(token_map()[config.pad_id if blocked else ids[at]]))
    rows, offset = [], 0
    for n in range(2, config.max_ngram + 1):
        mixed = 0
        for k in range(n):
            mixed ^= classes[k] * int(hash_multipliers(config)[which, k])
        for prime in hash_primes(config)[which, n - 2].tolist():
            rows.append(mixed % prime + offset)
            offset += prime
    return rows


def test_the_published_tables_have_a_row_for_every_hash_and_no_more():
    config = parse_config(published_config(V41_FLASH), "config.json").engram
    assert config is not None
    primes = hash_primes(config)
    assert tuple(primes.sum((1, 2))) == config.table_rows == (384_006_168, 384_016_682)
    assert len(set(primes.flatten().tolist())) == 2 * 3 * 8
    multipliers = hash_multipliers(config)
    assert (multipliers % 2 == 1).all()
    assert int(multipliers.max()) * (config.num_classes - 1) < 2**63


def test_rows_are_those_of_the_formula_and_masked_tokens_hide_what_is_behind_them():
    config, ids = tiny(), [5, 6, 96, 7, 8, 9, 10, 96, 96, 11]
    table = EngramHash(config, token_map())
    for layer in config.layers:
        classes = torch.cat((torch.full((3,), NOTHING), table.classes(torch.tensor(ids))))
        rows = table.rows(layer, classes)
        assert rows.tolist() == [by_hand(config, ids, layer, i) for i in range(len(ids))]
        assert int(rows.max()) < config.table_rows[config.layers.index(layer)]


def test_rows_to_fetch_are_known_from_a_spans_ids():
    """Of a span behind others; only the last three ids in front of it count."""
    config = tiny()
    hashes = EngramHash(config, token_map())
    ids = np.random.default_rng(0).integers(0, 96, 40).tolist()
    for start, end in itertools.combinations((0, 1, 2, 3, 10, 40), 2):
        for num_before in {min(start, 3), start}:
            needed = hashes.rows_of_ids(ids[start - num_before : end], num_before)
            for layer in config.layers:
                want = {row for i in range(start, end) for row in by_hand(config, ids, layer, i)}
                assert set(needed[layer].tolist()) == want


def test_a_table_split_over_ranks_adds_up_to_the_whole():
    rows = torch.randn(701, 32)
    whole = EngramTable(lambda index: rows[index], range(701))
    picks = torch.randint(0, 701, (50, 6))
    parts = []
    for rank in range(3):
        held = row_range(701, rank, 3)

        def gather(index: torch.Tensor, held: range = held) -> torch.Tensor:
            assert all(int(i) in held for i in index)
            return rows[index]

        parts.append(EngramTable(gather, held))
    assert [len(part.held) for part in parts] == [233, 234, 234]
    assert torch.equal(sum(part.read(picks) for part in parts), whole.read(picks))
    assert torch.equal(whole.read(picks), rows[picks].flatten(1))
    own = [part.own(picks.unique()) for part in parts]
    assert torch.equal(torch.cat(own), picks.unique())


def test_rows_are_read_ahead_of_their_step_each_once_and_by_their_rank_only():
    config = tiny()
    hashes = EngramHash(config, token_map())
    ids = np.random.default_rng(3).integers(0, 96, 50).tolist()
    asked: dict[int, list[int]] = {layer: [] for layer in config.layers}
    held = {1: row_range(700, 0, 2), 3: row_range(900, 1, 2)}

    def table(layer: int) -> EngramTable:
        def gather(index: torch.Tensor) -> torch.Tensor:
            assert threading.current_thread() is not threading.main_thread()
            asked[layer] += index.tolist()
            return torch.zeros(len(index), 32)

        return EngramTable(gather, held[layer])

    ahead = RowsAhead(hashes, {layer: table(layer) for layer in config.layers})
    count = ahead.ask(ids[10:], 3).result(timeout=10)
    ahead.close()
    needed = hashes.rows_of_ids(ids[10:], 3)
    for layer in config.layers:
        assert asked[layer] == [row for row in needed[layer].tolist() if row in held[layer]]
    assert count == sum(map(len, asked.values())) > 50


def test_ranks_that_share_the_tables_compute_the_same():
    """Two ranks in step, each with half of every table; then without adding up, which is seen."""
    tensors, ids = random_tensors(ENGRAM, 1), random_ids(12)
    whole = make_decoder(ENGRAM, tensors=tensors)
    want = run(Pages(whole, 40), Pages(whole, 40).table(12), ids)
    parts: list[torch.Tensor] = [torch.empty(0)] * 2
    barrier = threading.Barrier(2, timeout=20)

    def rank(number: int, is_added: bool) -> torch.Tensor:
        def add_up(x: torch.Tensor) -> torch.Tensor:
            barrier.wait()
            parts[number] = x
            barrier.wait()
            return parts[0] + parts[1]

        torch.set_num_threads(1)  # of this thread
        weights = load_weights(entries(tensors), config_of(ENGRAM), torch.float32, token_map(), None, number, 2)
        decoder = Csa2Decoder(weights, 16, add_up if is_added else None)
        return run(Pages(decoder, 40), Pages(decoder, 40).table(12), ids, cuts=[7])

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(rank, (0, 1), (True, True)))
    assert torch.equal(found[0], want)
    assert torch.equal(found[1], want)
    assert (rank(0, False) - want).abs().max() > 1e-2


def test_a_gate_is_shut_for_masked_tokens_and_open_where_keys_match():
    generator = torch.Generator().manual_seed(0)
    streams = torch.randn(4, 2, 8, generator=generator)
    found = torch.randn(4, 6, generator=generator)
    wkv = torch.randn(24, 6, generator=generator)
    weights = EngramWeights(EngramTable(lambda i: found, range(0)), wkv, torch.ones(2, 8))
    masked = torch.tensor([False, True, False, False])
    out = write_memory(streams, found, weights, masked, 1e-20)
    assert torch.equal(out[1], streams[1])
    for t, i in ((0, 0), (2, 1), (3, 0)):
        key, value = (wkv[i * 8 : i * 8 + 8] @ found[t], wkv[16:] @ found[t])
        d = (streams[t, i] / streams[t, i].square().mean().sqrt()) @ (key / key.square().mean().sqrt()) * 8**-0.5
        gate = torch.sigmoid(d.sign() * d.abs().sqrt())
        torch.testing.assert_close(out[t, i], streams[t, i] + gate * value)


def test_texts_that_differ_in_case_accents_and_blanks_share_a_class():
    from tokenizers import Tokenizer, models

    texts = ["The", "the", " THE", "thé", "Ｔｈｅ", " ", "\t\n", "", "then", "ﬁ", "fi"]
    words = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=""))
    assert token_classes(words).tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 4]


def test_the_token_map_is_read_or_derived_and_checked(tmp_path: Path):
    config = tiny()
    with pytest.raises(ConfigError, match=r"tokenizer\.json: cannot be read"):
        read_token_map(tmp_path, config)
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer_json(), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: \d+ token classes, .* is 61"):
        read_token_map(tmp_path, config)
    (tmp_path / "engram_token_map.json").write_text(json.dumps(token_map().tolist()), encoding="utf-8")
    assert read_token_map(tmp_path, config).tolist() == token_map().tolist()
    (tmp_path / "engram_token_map.json").write_text("[0, 1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="2 token classes"):
        read_token_map(tmp_path, config)


def test_tables_too_small_for_their_hashes_are_refused():
    config = parse_config({**ENGRAM, "engram_num_embeddings": [700, 600]}, "tiny").engram
    assert config is not None
    with pytest.raises(ConfigError, match=r"engram of layer 3: its hashes name \d+ rows, the table has 600"):
        EngramHash(config, token_map())
