"""DeepSeek V4's decoder against transformers: layer patterns, cuts of the prompt, company in a step, ties, padding.

What belongs to no sequence in a step's pages is 0xFF throughout: to read a row that is not there gives NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailrace.model import csa_decoder
from tailrace.model.csa_decoder import CsaDecoder
from tests.model.csa_models import (
    KINDS,
    Pages,
    oracle_logits,
    oracle_model,
    published_tensors,
    run,
    some_ids,
    stable_topk,
    tensor_table,
    tiny_config,
    tiny_v4,
)

TOLERANCE = 1e-4
STEPS = 20

PATTERNS: list[tuple[str, dict[str, Any]]] = [
    ("WWCHC", {"hc_sinkhorn_iters": 20}),  # as V4-Flash begins
    ("HHCHC", {}),  # as V4-Pro begins
    ("WW", {"num_hash_layers": 0}),
    ("CC", {"index_topk": 64, "sliding_window": 5}),  # the index chooses all
    (
        "HCW",
        {"compress_rates": {KINDS["C"]: 2, KINDS["H"]: 32}, "num_hash_layers": 3, "index_topk": 1, "sliding_window": 1},
    ),
    ("CHC", {"sliding_window": 32, "o_groups": 1, "hc_mult": 2, "tie_word_embeddings": True}),
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def flash() -> tuple[Any, CsaDecoder]:
    return tiny_v4("WWCHC")


@pytest.mark.parametrize(("layers", "overrides"), PATTERNS, ids=[p for p, _ in PATTERNS])
def test_prefill_and_cached_decode_are_the_oracles(layers: str, overrides: dict[str, Any]):
    oracle, decoder = tiny_v4(layers, seed=len(layers), **overrides)
    ids = some_ids(101)
    expected = oracle_logits(oracle, ids)
    assert expected.std() > 1 and len(set(expected.argmax(-1).tolist())) > 20  # logits that say something
    pages = Pages(decoder.layout)
    sequence = pages.sequence(len(ids))
    found = [run(decoder, pages, [(sequence, ids[:-STEPS])])]
    found += [run(decoder, pages, [(sequence, [i])]) for i in ids[-STEPS:]]
    error = (torch.cat(found) - expected).abs().amax(-1)
    assert error.max() < TOLERANCE, f"{error.max()} at position {error.argmax()}"


def test_the_oracle_with_its_own_cache_agrees(flash: tuple[Any, CsaDecoder]):
    """So that its full forward, which the other tests compare with, is what it serves."""
    oracle, _ = flash
    ids = some_ids(60)
    with torch.inference_mode(), stable_topk():
        out = oracle(torch.tensor([ids[:40]]), use_cache=True)
        logits = [out.logits[0, -1]]
        for i in ids[40:-1]:
            out = oracle(torch.tensor([[i]]), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
    assert (torch.stack(logits) - oracle_logits(oracle, ids)[39:-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("layers", ["WWCHC", "HHCHC"])
def test_any_cut_of_the_prompt_gives_the_same_values(layers: str, monkeypatch: pytest.MonkeyPatch):
    _, decoder = tiny_v4(layers)
    ids = some_ids(90)

    def prefill(sizes: list[int]) -> torch.Tensor:
        pages = Pages(decoder.layout, seed=sum(sizes) + len(sizes))
        sequence, found = pages.sequence(len(ids)), []
        for size in sizes:
            found.append(run(decoder, pages, [(sequence, ids[sequence.length : sequence.length + size])]))
        return torch.cat(found)

    whole = prefill([90])
    monkeypatch.setattr(csa_decoder, "_QUERY_BLOCK", 21)  # chunks attend in blocks, which are longer than these prompts
    rng = torch.Generator().manual_seed(1)
    cuts = [[1] * 20 + [70], [4, 12, 16, 8, 50], [15, 1, 1, 47, 26], [3] * 11 + [57]]
    for _ in range(2):
        edges = sorted(torch.randperm(89, generator=rng)[:5].add(1).tolist())
        cuts.append([b - a for a, b in zip([0, *edges], [*edges, 90], strict=True)])
    for sizes in cuts:
        assert (prefill(sizes) - whole).abs().max() < 1e-5, sizes  # 0 where this was written


def test_a_step_of_several_sequences_gives_each_what_it_gets_alone(flash: tuple[Any, CsaDecoder]):
    oracle, decoder = flash
    prompts = [some_ids(n, seed=n) for n in (70, 33, 1, 16, 48)]
    expected = [oracle_logits(oracle, ids) for ids in prompts]
    pages = Pages(decoder.layout)
    held = [pages.sequence(len(ids)) for ids in prompts]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    sizes = [[1, 20, 1, 30, 9, 9], [5, 1, 1, 26], [1], [15, 1], [1, 1, 40, 6]]
    for step in range(6):
        work = [(i, sizes[i][step]) for i in range(5) if step < len(sizes[i])]
        given = [(held[i], prompts[i][held[i].length : held[i].length + n]) for i, n in work]
        logits = run(decoder, pages, given, padding=step)
        for (i, _), part in zip(work, logits.split([n for _, n in work]), strict=True):
            found[i].append(part)
    for parts, reference in zip(found, expected, strict=True):
        assert (torch.cat(parts) - reference).abs().max() < TOLERANCE


def test_padding_is_stored_nowhere(flash: tuple[Any, CsaDecoder]):
    _, decoder = flash
    ids = some_ids(37)
    kept = []
    for padding in (0, 11):
        pages = Pages(decoder.layout)
        sequence = pages.sequence(64)
        run(decoder, pages, [(sequence, ids)], padding=padding)
        kept.append(pages.pool.pages.view(torch.float32))  # 0xFF is a NaN
    torch.testing.assert_close(*kept, rtol=0, atol=5e-5, equal_nan=True)


def test_pages_of_others_are_left_alone(flash: tuple[Any, CsaDecoder]):
    _, decoder = flash
    pages = Pages(decoder.layout)
    sequence = pages.sequence(64)
    run(decoder, pages, [(sequence, some_ids(40))])
    run(decoder, pages, [(sequence, some_ids(9))])
    others = [p for p in range(pages.num_pages) if p not in sequence.table]
    assert (pages.pool.pages[others] == 0xFF).all()


def test_a_warm_up_runs_the_first_layers_only(flash: tuple[Any, CsaDecoder]):
    _, decoder = flash
    from tailrace.kernels.paged_attention import RowSpan

    pages = Pages(decoder.layout)
    sequence = pages.sequence(32)
    with torch.inference_mode():
        ids, positions = torch.tensor(some_ids(8)), torch.arange(8)
        one = decoder.forward(ids, positions, pages.pool, [RowSpan(0, 8, sequence.table)], num_layers=1)
        assert one.shape == (8, decoder.config.hidden_size) and one.isfinite().all()
        rows = pages.pool.of(sequence.table)
        assert (rows.state("window", 0).read(torch.arange(8)) != 0xFF).any()
        assert (rows.state("window", 1).read(torch.arange(8)) == 0xFF).all()


def test_of_equal_index_scores_the_lower_entry_counts():
    """Index keys without rotated part, in a first layer, over a prompt that repeats: entries have equal keys, often."""
    raw = tiny_config("CWH", index_topk=3)
    oracle = oracle_model(raw)
    norm = oracle.model.layers[0].self_attn.compressor.indexer.kv_norm.weight
    norm.data[-8:] = 0
    decoder = _of(oracle, raw)
    unit = some_ids(4)
    ids = [i for n in range(24) for i in (unit if n % 3 else [unit[0], 5, 6, 7])]
    expected = oracle_logits(oracle, ids)
    pages = Pages(decoder.layout)
    sequence = pages.sequence(len(ids))
    found = [run(decoder, pages, [(sequence, ids[:50])])]
    found += [run(decoder, pages, [(sequence, [i])]) for i in ids[50:]]
    assert (torch.cat(found) - expected).abs().max() < TOLERANCE
    keys = decoder._formats.key.unpack(pages.pool.of(sequence.table).history("csa_key", 0).first(24))
    same = (keys[:, None] == keys[None]).all(-1).sum(1)
    assert same.max() > 3  # more equal keys than are chosen
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", _higher_index_first)
        other = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    assert (other - expected).abs().max() > 1e-2  # so that the rule matters here


def _higher_index_first(scores: torch.Tensor, k: int, dim: int = -1) -> Any:
    best = scores.flip(-1).sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((best.values[..., :k], scores.shape[-1] - 1 - best.indices[..., :k]))


def test_a_checkpoint_as_transformers_writes_it_is_read_and_told_of(tmp_path):
    from tailrace.model.family import FAMILIES
    from tailrace.model.hf_directory import read_json, stored_tensors

    oracle = oracle_model(tiny_config("WCH"))
    oracle.save_pretrained(tmp_path)
    raw = read_json(tmp_path / "config.json")
    family = FAMILIES[raw["model_type"]]
    tensors, told = stored_tensors(tmp_path), []
    decoder = family.load(tensors, family.parse(raw, "x"), torch.float32, 32, lambda *done: told.append(done))
    assert told[-1][0] == told[-1][1] > 0 and len(told) == len(tensors)
    ids = some_ids(50)
    pages = Pages(decoder.layout)
    found = run(decoder, pages, [(pages.sequence(50), ids)])
    assert (found - oracle_logits(oracle, ids)).abs().max() < TOLERANCE


def test_a_missing_or_misshapen_tensor_is_named():
    from tailrace.model.csa_config import parse_config
    from tailrace.model.csa_decoder import load
    from tailrace.model.errors import ConfigError

    raw = tiny_config("C")
    config, tensors = parse_config(raw, "x"), published_tensors(oracle_model(raw))
    name = "layers.0.attn.indexer.compressor.ape"
    with pytest.raises(ConfigError, match=rf"{name}.*\(4, 31\)"):
        load(tensor_table(tensors | {name: torch.zeros(4, 31)}), config, torch.float32, 32)
    del tensors[name]
    with pytest.raises(ConfigError, match=f"{name} is missing"):
        load(tensor_table(tensors), config, torch.float32, 32)
    with pytest.raises(ConfigError, match="multiple of 4"):
        tiny_v4("C", tokens_per_page=6)


def _of(oracle: Any, raw: dict[str, Any]) -> CsaDecoder:
    from tailrace.model.csa_config import parse_config
    from tests.model.csa_models import decoder_of

    return decoder_of(oracle, parse_config(raw, "config.json"), torch.float32)
