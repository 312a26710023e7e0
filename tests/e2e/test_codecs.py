"""Codecs over nixl and HTTP: lossless is EQ in fp32, int8 answers with fewer bytes, and bridges two storage dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from equal import Model, answers, assert_equal, prompt_of, tiny
from harness import LocalCluster
from oracle import greedy

PAGE, CHUNK = 16, 64
LENGTHS = (1, PAGE - 1, PAGE + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


@pytest.fixture(scope="module")
def cluster(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = {"transport": "nixl", "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": CHUNK}
    config["landing_chunk_bytes"] = 4096  # less than a float32 page: a chunk takes one, coded or not
    path = tmp_path_factory.mktemp("cluster")
    with LocalCluster(path, model.spec, codec="lossless", local_prefill="never", **config) as made:
        made.poison()
        yield made
        made.quiet()


def become(cluster: LocalCluster, dtypes: tuple[str, str], **config: Any) -> None:
    """Both workers are replaced by some of another configuration; the router and the ingress stay."""
    cluster.config |= config
    for role, dtype in zip(("ctx", "gen"), dtypes, strict=True):
        cluster.config[role] |= {"dtype": dtype}
    for role in ("ctx", "gen"):  # both are told of both: the size of chunks depends on it
        cluster.kill(f"{role}-0")
        cluster.start(role, f"{role}-0")
    cluster.wait_ready()
    cluster.poison()


def moved(cluster: LocalCluster, codec: str) -> dict[str, float]:
    return {
        kind: cluster.settled_metric("tailrace_transfer_bytes_total", kind=kind, transport="nixl", codec=codec)
        for kind in ("logical", "wire")
    }


def share(cluster: LocalCluster, codec: str, seed: int) -> float:
    """Wire bytes of each byte of pages, of prompts that fill theirs."""
    before = moved(cluster, codec)
    answers(cluster, [prompt_of(3 * CHUNK, seed + k) for k in range(2)])
    after = moved(cluster, codec)
    assert after["logical"] > before["logical"]
    return (after["wire"] - before["wire"]) / (after["logical"] - before["logical"])


def pair(cluster: LocalCluster) -> dict[str, str]:
    (found,) = cluster.info()["pairs"]
    return found


def test_lossless_answers_are_those_of_one_process(cluster: LocalCluster, model: Model):
    assert_equal(cluster, model, [prompt_of(n, 10 * n + k) for n in LENGTHS for k in range(2)])
    assert 0.5 < share(cluster, "lossless", 300) < 0.95
    assert cluster.metric("tailrace_transfer_bytes_total", codec="raw") == 0
    assert (pair(cluster)["codec"], pair(cluster)["codec_reason"]) == ("lossless", "configured")


def test_a_float32_ctx_serves_a_bfloat16_gen_through_int8(cluster: LocalCluster, model: Model):
    become(cluster, ("float32", "bfloat16"), codec="int8")
    prompts = [prompt_of(n, 500 + n) for n in LENGTHS] * 2
    choices = answers(cluster, prompts)
    expected = [result.samples[0] for result in model.ref.generate(prompts, greedy(2))]
    near = 0
    for choice, sample in zip(choices, expected, strict=True):
        assert len(choice["token_ids"]) == 16 and choice["finish_reason"] == "length"
        assert choice["token_ids"][0] == sample.ids[0], "ctx's own token is exact"
        difference = choice["logprobs"]["token_logprobs"][1] - sample.logprobs[1].logprob
        near += choice["token_ids"][1] == sample.ids[1] and abs(difference) < 0.1
    assert near >= 0.7 * len(prompts), f"{near} of {len(prompts)} second tokens are as in float32"
    assert 0.5 < share(cluster, "int8", 800) < 0.7, "an eighth more than half, for heads of 16"
    for role in ("ctx", "gen"):
        assert cluster.metric("tailrace_codec_seconds_total", role=role) > 0
    assert pair(cluster)["codec"] == "int8"
    assert "float32 pages become bfloat16" in pair(cluster)["codec_reason"]


@pytest.mark.soak
def test_auto_says_what_it_goes_by_and_loses_nothing_without_leave(cluster: LocalCluster, model: Model):
    become(cluster, ("float32", "float32"), codec="auto")
    assert_equal(cluster, model, [prompt_of(n, 900 + n) for n in LENGTHS])
    said = pair(cluster)
    assert said["codec"] in ("raw", "lossless"), said
    assert "not measured yet" in said["codec_reason"] or "GB/s of wire" in said["codec_reason"], said
