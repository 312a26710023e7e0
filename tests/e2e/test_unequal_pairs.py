"""Ctx and gen workers whose pages differ: A8, A11, A13 and A17 over HTTP, the answers those of one process (REF)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from equal import Model, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import body
from harness import LocalCluster, until
from oracle import greedy

ROLES = ("ctx", "gen")
CHUNK, BLOCK, WINDOW = 20, 16, 24
LENGTHS = (1, 15, 16, 17, 24, 33, 5 * CHUNK + 3, 6 * CHUNK)
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # layers, K and V, heads, dims, bytes
# One worker is replaced from each to the next.
ALL = [(8, 8), (8, 16), (8, 64), (16, 64), (16, 16), (16, 8), (64, 8), (64, 16), (64, 64)]
SOME = [(8, 16), (64, 16), (64, 8)]
REST = [(8, 16), (8, 64), (16, 16), (16, 8), (64, 16), (64, 64)]  # in `make soak`, for their time


class Pairs:
    """One cluster of a ctx and a gen; a worker of another page size takes the place of the present one."""

    def __init__(self, path: Path, model: Model, first: tuple[int, int], **config: Any) -> None:
        self.model, self._sizes = model, first
        pools = {f"{role}_config": {"tokens_per_page": size} for role, size in zip(ROLES, first, strict=True)}
        self.cluster = LocalCluster(
            path, model.spec, block_tokens=BLOCK, max_num_tokens=CHUNK, max_batch_size=8, local_prefill="never",
            **pools, **config,
        )  # fmt: skip
        self.cluster.__enter__()

    def become(self, sizes: tuple[int, int]) -> LocalCluster:
        cluster = self.cluster
        for role, old, new in zip(ROLES, self._sizes, sizes, strict=True):
            if old != new:
                cluster.config[role] |= {"tokens_per_page": new}
                cluster.kill(f"{role}-0")
                cluster.start(role, f"{role}-0")
        self._sizes = sizes
        cluster.wait_ready()
        cluster.poison()
        return cluster

    def prompts(self, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
        """The same in every run, others for every pair of sizes."""
        ctx, gen = self._sizes
        return [prompt_of(n, 100_000 * ctx + 1000 * gen + n) for n in lengths]

    def moved(self, kind: str = "wire") -> float:
        return self.cluster.settled_metric("tailrace_transfer_bytes_total", kind=kind)


def pairs(path: Path, model: Model, first: tuple[int, int], **config: Any) -> Iterator[Pairs]:
    made = Pairs(path, model, first, **config)
    try:
        yield made
        made.cluster.quiet()
    finally:
        made.cluster.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("windowed"), "mistral")


@pytest.fixture(scope="module")
def by_shm(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    yield from pairs(tmp_path_factory.mktemp("shm"), model, ALL[0], transport="shm")


@pytest.fixture(scope="module")
def by_nixl(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    yield from pairs(tmp_path_factory.mktemp("nixl"), model, SOME[0], transport="nixl")


@pytest.fixture(scope="module")
def through_a_window(windowed: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    yield from pairs(tmp_path_factory.mktemp("window"), windowed, (16, 64), transport="shm")


@pytest.mark.parametrize("sizes", [pytest.param(s, marks=[pytest.mark.soak] * (s in REST)) for s in ALL])
def test_a8_answers_are_right_whatever_the_page_sizes_and_exactly_the_missing_tokens_are_read(by_shm, sizes):
    """Also A11 and A13: chunks of 20 end inside pages; prompts shorter than a page and of several chunks."""
    cluster, prompts = by_shm.become(sizes), by_shm.prompts()
    before = by_shm.moved()
    assert_equal(cluster, by_shm.model, prompts)
    page = sizes[0] if sizes[0] == sizes[1] else 1  # pages that are alike are copied whole
    assert by_shm.moved() - before == sum(-(-n // page) * page for n in LENGTHS) * TOKEN_BYTES
    assert cluster.settled_metric("tailrace_prompt_positions_total", role="gen") == 0
    cluster.quiet()


@pytest.mark.parametrize("sizes", [pytest.param(s, marks=[pytest.mark.soak] * (s in REST)) for s in SOME])
def test_a8_a13_over_nixl_whole_pages_of_ctx_cross(by_nixl, sizes):
    cluster, prompts = by_nixl.become(sizes), by_nixl.prompts()
    before = by_nixl.moved(), by_nixl.moved("logical")
    assert_equal(cluster, by_nixl.model, prompts)
    assert by_nixl.moved() - before[0] == sum(-(-n // sizes[0]) * sizes[0] for n in LENGTHS) * TOKEN_BYTES
    assert by_nixl.moved("logical") - before[1] == sum(LENGTHS) * TOKEN_BYTES
    cluster.quiet()


def test_a_prefix_that_gen_holds_in_its_own_pages_is_not_read_again(by_shm):
    """Ctx has pages of 64 tokens, gen of 8: what it holds of one it does not read; of a whole hit it reads nothing."""
    cluster = by_shm.become((64, 8))
    (prompt,) = by_shm.prompts([100])
    asked, choices = [], []
    for length, read in ((48, 48), (100, 52), (96, 0), (100, 4)):
        before = by_shm.moved()
        asked.append(prompt[:length])
        choices += answers(cluster, asked[-1:])
        assert by_shm.moved() - before == read * TOKEN_BYTES, length
    compare(by_shm.model, asked, choices).check()
    cluster.quiet(2.0)


@pytest.mark.parametrize(
    "sizes", [(16, 64), pytest.param((8, 64), marks=pytest.mark.soak), pytest.param((64, 8), marks=pytest.mark.soak)]
)
def test_a11_only_rows_that_the_window_still_reads_are_moved(through_a_window, sizes):
    cluster, prompts = through_a_window.become(sizes), through_a_window.prompts()
    before = through_a_window.moved()
    assert_equal(cluster, through_a_window.model, prompts)
    page = sizes[0] if sizes[0] == sizes[1] else 1
    firsts = [max(0, n - WINDOW + 1) // page * page for n in LENGTHS]
    moved = sum(-(-n // page) * page - first for n, first in zip(LENGTHS, firsts, strict=True)) * TOKEN_BYTES
    assert through_a_window.moved() - before == moved
    cluster.quiet()


def test_a17_pages_of_another_dtype_are_refused_by_both_names_and_the_client_is_told_at_once(model, tmp_path):
    """Each worker's file is right by itself; only the pair is not."""
    config = {"per_process": {"gen-0": {"dtype": "bfloat16"}}, "local_prefill": "never"}
    with LocalCluster(tmp_path, model.spec, gen=0, **config) as cluster:
        cluster.start("gen", "gen-0")
        until(lambda: cluster.metric("tailrace_pairs", state="refused") == 1, 10, lambda: "the pair is not refused")
        started = time.monotonic()
        reply = cluster.post("/v1/completions", body(prompt_of(30, 1)))
        assert reply.status_code == 503 and time.monotonic() - started < 2
        assert cluster.ready()["status"] != "ready"
        log = (tmp_path / "gen-0.log").read_text()
        assert "dtype differs" in log and "'float32'" in log and "'bfloat16'" in log
        assert all(process.alive for process in cluster.processes.values())
        cluster.quiet()


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.soak), "nixl"])
def test_a17_a_codec_brings_pages_of_float32_into_pages_of_bfloat16(model, tmp_path, transport):
    """Also of other sizes. What the tokens should be nobody can promise; that they are near, their logprobs show."""
    pools = {"ctx_config": {"tokens_per_page": 8}, "gen_config": {"tokens_per_page": 64, "dtype": "bfloat16"}}
    with LocalCluster(tmp_path, model.spec, codec="int8", transport=transport, **pools) as cluster:
        cluster.poison()
        prompts = [prompt_of(n, 500 + n) for n in LENGTHS]
        found, expected = answers(cluster, prompts, 2), model.ref.generate(prompts, greedy(2))
        for choice, result in zip(found, expected, strict=True):
            sample = result.samples[0]
            assert choice["token_ids"][0] == sample.ids[0], "ctx computes in float32"
            second = choice["logprobs"]["token_logprobs"][1]
            assert abs(second - sample.logprobs[1].logprob) < 0.5, (second, sample.logprobs[1])
        assert cluster.settled_metric("tailrace_transfer_bytes_total", kind="logical", codec="int8") > 0
        cluster.quiet()
