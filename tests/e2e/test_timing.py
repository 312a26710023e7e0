"""Case F12: what is right does not hang on how much is logged, nor on a few milliseconds at the hand-off."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from equal import Model, assert_equal, prompt_of, tiny
from harness import LocalCluster, sse_events
from oracle import greedy

KINDS = ("ready", "handoff", "release", "landed")
JITTER_S = 0.005
CONFIG = {"tokens_per_page": 16, "max_num_tokens": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


def streamed(cluster: LocalCluster, prompt: list[int], max_tokens: int) -> list[int]:
    with cluster.streaming(prompt, max_tokens, ignore_eos=True, return_token_ids=True) as reply:
        events = [json.loads(e)["choices"][0] for e in sse_events(reply) if e != "[DONE]"]
    return [token for event in events for token in event["token_ids"]]


def check(model: Model, path: Path, level: str, transport: str, rounds: int) -> None:
    with LocalCluster(path, model.spec, log_level=level, transport=transport, **CONFIG) as cluster:
        prompt = prompt_of(100, 1)
        [want] = model.ref.generate([prompt], greedy(16))[0].samples
        assert streamed(cluster, prompt, 16) == want.ids  # the first request of all
        for worker in ("ctx-0", "gen-0"):
            cluster.faults(worker, jitter_s=dict.fromkeys(KINDS, JITTER_S))
        for number in range(rounds):
            prompts = [prompt_of(length, 100 * number + length) for length in (1, 15, 17, 64, 65, 130, 200, 300)]
            assert_equal(cluster, model, prompts)
            wanted = [r.samples[0].ids for r in model.ref.generate(prompts, greedy(8))]
            with ThreadPoolExecutor(len(prompts)) as threads:
                assert list(threads.map(lambda p: streamed(cluster, p, 8), prompts)) == wanted
            with cluster.streaming(prompt_of(90, 7000 + number), 2000, ignore_eos=True) as reply:
                next(sse_events(reply))  # and it leaves
        for worker in ("ctx-0", "gen-0"):
            cluster.faults(worker)
        cluster.quiet()
        logged = (path / "gen-0.log").read_text()
        assert ('"level": "INFO"' in logged) is (level != "ERROR")


@pytest.mark.parametrize("level", [pytest.param("ERROR", marks=pytest.mark.soak), "DEBUG"])
def test_f12_answers_do_not_hang_on_the_log_level_nor_on_milliseconds_at_the_hand_off(model, tmp_path, level):
    check(model, tmp_path, level, "shm", 1)


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "nixl", "ucx"])
@pytest.mark.parametrize("level", ["ERROR", "INFO", "DEBUG"])
def test_f12_at_length_over_each_transport(model, tmp_path, level, transport):
    check(model, tmp_path, level, transport, 10)
