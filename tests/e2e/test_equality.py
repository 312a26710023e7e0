"""Prefill in one process, decode in another, over HTTP: the answers are those of one process (REF), in fp32."""

from __future__ import annotations

import json

import pytest
from equal import Model, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import NIXL_FIRST
from harness import LocalCluster
from oracle import Mismatch

CHUNK = 64
FIRST = (("shm", 16), ("nixl", 8), ("nixl", 64))  # the others in `make soak`, for their time
SPREAD = [
    pytest.param(transport, page, marks=[] if (transport, page) in FIRST else [pytest.mark.soak])
    for transport in ("shm", "nixl")
    for page in (8, 16, 64)
]
ON_A_GPU = [pytest.param("peer", page, marks=pytest.mark.gpu) for page in (8, 16, 64)]


def lengths(page: int) -> list[int]:
    return [1, page - 1, page, page + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 3]


def spread_prompts(page: int, rounds: int, seed: int) -> list[list[int]]:
    return [prompt_of(n, seed + 100 * i + k) for i in range(rounds) for k, n in enumerate(lengths(page))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


@pytest.mark.parametrize(("transport", "page"), [*SPREAD, *ON_A_GPU])
def test_answers_are_those_of_one_process(model: Model, tmp_path, transport: str, page: int):
    config = {"transport": transport, "tokens_per_page": page, "max_num_tokens": CHUNK}
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        cluster.poison()
        prompts = spread_prompts(page, 4, 1000 * page)
        assert_equal(cluster, model, prompts)
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
        assert cluster.metric("tailrace_transfer_bytes_total", kind="wire", transport=transport) > 0
        assert cluster.metric("tailrace_local_prefills_total") == 0
        cluster.quiet()


@pytest.mark.soak
@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "mistral", "llama-yarn"])
@pytest.mark.parametrize(("transport", "page"), SPREAD)
def test_every_family_over_every_transport_and_page_size(tmp_path, family: str, transport: str, page: int):
    model = tiny(tmp_path / "model", family)
    config = {"transport": transport, "tokens_per_page": page, "max_num_tokens": CHUNK}
    with LocalCluster(tmp_path / "cluster", model.spec, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, spread_prompts(page, 25, 7 * page))
        cluster.quiet()


def test_the_real_model_answers_as_one_process_does(tmp_path):
    model = Model("smollm2")
    encode = model.ref.source.tokenizer.encode
    subjects = [
        "France",
        "the moon",
        "bread",
        "a prime number",
        "rivers",
        "Ada Lovelace",
        "tea",
        "glass",
        "maps",
        "time",
    ]
    texts = [f"Tell me one thing about {s}." for s in subjects] + [f"{s} is known because" for s in subjects]
    prompts = [encode(text * (1 + i % 4), special=False) for i, text in enumerate(texts)]
    with LocalCluster(tmp_path, model.spec, kv_bytes=256 * 2**20, max_num_tokens=CHUNK) as cluster:
        cluster.poison()
        assert_equal(cluster, model, prompts)
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
        cluster.quiet()


def test_one_altered_page_changes_the_answer(model: Model):
    """The negative control: with a page of another prompt in its place, greedy output must differ from REF."""
    ref, prompt = model.ref, prompt_of(40, 5)
    altered = [*prompt_of(16, 6), *prompt[16:]]
    [good], [bad] = (answers_of(ref, p) for p in ([prompt], [altered]))
    with pytest.raises(Mismatch):
        compare_ids(model, prompt, bad)
    compare_ids(model, prompt, good)


def answers_of(ref, prompts):
    from oracle import greedy

    return [r.samples[0].ids for r in ref.generate(prompts, greedy(16))]


def compare_ids(model: Model, prompt, ids) -> None:
    from oracle import compare_greedy, greedy

    [expected] = model.ref.generate([prompt], greedy(16))
    compare_greedy(expected.samples[0].logprobs, ids)


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_prefixes_that_the_decoder_holds_are_not_sent_again(model: Model, tmp_path, transport: str):
    """A5: k pages are warm on gen (none, one, all but one, all), prompts end before, at and after a page border."""
    page, full = 16, 4
    config = {"tokens_per_page": page, "block_tokens": page, "max_num_tokens": CHUNK, "stats_period_s": 0.1}
    config["transport"] = transport
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        cluster.poison()
        seed = 0
        for warm in (0, 1, full - 1, full):
            for length in (full * page - 1, full * page, full * page + 1):
                seed += 1
                prompt = prompt_of(length, 300 + seed)
                if warm:
                    assert_equal(cluster, model, [prompt[: warm * page]])
                before = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire")
                assert_equal(cluster, model, [prompt])
                moved = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire") - before
                pages = -(-length // page) - min(warm, length // page)
                assert moved == pages * page_bytes(page), (warm, length)
        cluster.quiet(2.0)  # also after a full hit ctx was told to let go, long before the pin lease


def page_bytes(page: int) -> int:
    layers, fields, heads, dim, fp32 = 2, 2, 2, 16, 4
    return layers * fields * heads * dim * fp32 * page


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_a_prompt_that_fits_no_page_exactly_runs_no_position_on_the_decoder(model: Model, tmp_path, transport: str):
    """A6: first token and logprob are REF's; gen computes no prompt position at all, whatever the length."""
    page = 16
    config = {"tokens_per_page": page, "max_num_tokens": CHUNK, "transport": transport}
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(n, 70 + n) for n in (1, 2, page - 1, page, page + 1, 2 * page)])
        assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0


def test_chunks_that_end_inside_a_page_are_sent_once_in_their_final_state(tmp_path):
    """A11 and A10: chunk 20 with pages of 16, also with a sliding window; every page moves exactly once."""
    for name, family in (("full", "llama"), ("window", "mistral")):
        model = tiny(tmp_path / name, family)
        config = {"tokens_per_page": 16, "max_num_tokens": 20, "max_batch_size": 8}
        with LocalCluster(tmp_path / f"{name}-cluster", model.spec, **config) as cluster:
            cluster.poison()
            assert_equal(cluster, model, [prompt_of(50, 11), prompt_of(6 * 20, 12)], at_once=1)
            moved = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire")
            first_needed = [0, 0] if family == "llama" else [(n - 24 + 1) // 16 for n in (50, 120)]
            assert moved == (4 - first_needed[0] + 8 - first_needed[1]) * page_bytes(16)
            cluster.quiet()


def test_a_stream_says_the_same_as_a_whole_answer(model: Model, tmp_path):
    with LocalCluster(tmp_path, model.spec, tokens_per_page=16, max_num_tokens=CHUNK) as cluster:
        prompts = [prompt_of(n, n) for n in (5, 33, 130)]
        whole = answers(cluster, prompts)
        compare(model, prompts, whole).check()
        for prompt, choice in zip(prompts, whole, strict=True):
            with cluster.streaming(prompt, ignore_eos=True, return_token_ids=True) as reply:
                lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            events = [json.loads(line)["choices"][0] for line in lines[:-1]]
            assert "".join(e["text"] for e in events) == choice["text"]
            assert [i for e in events for i in e["token_ids"]] == choice["token_ids"]
            assert events[-1]["finish_reason"] == choice["finish_reason"]
