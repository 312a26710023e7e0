"""Cases C that need real processes: prefixes, conversations over two ingresses, a lost router."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from equal import Model, compare, prompt_of, tiny
from fault_cases import pool
from harness import LocalCluster, until

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Iterator[LocalCluster]:
    """2P1D behind two ingresses, with pages of one block and ctx pools that evict."""
    config = {"placement": "prefix", "tokens_per_page": BLOCK, "block_tokens": BLOCK, "max_request_tokens": 500}
    config["kv_bytes"] = pool(400)
    with LocalCluster(tmp_path_factory.mktemp("cluster"), model.spec, ctx=2, ingress=2, **config) as cluster:
        yield cluster


def ask(cluster: LocalCluster, prompt: list[int], ingress: int = 0, max_tokens: int = 2, **more: Any) -> dict[str, Any]:
    """One greedy answer through an ingress; its choice with `cached`: tokens of the prompt that were not computed."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"logprobs": 5} | more
    reply = httpx.post(f"{cluster.url(f'ingress-{ingress}')}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0] | {"cached": answer["usage"]["prompt_tokens_details"]["cached_tokens"]}


def believed(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    return httpx.get(f"{cluster.operators}/debug/blocks", timeout=5).json()


def settled(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    """The index once every worker is followed and nothing is on its way."""
    until(lambda: all(w["follows"] for w in believed(cluster).values()), 5, lambda: f"{believed(cluster)}")
    time.sleep(0.3)
    return believed(cluster)


def test_c15_turns_that_come_through_two_ingresses_find_their_conversation(cluster: LocalCluster) -> None:
    """And the first turn of each is computed anew, so it was no accident."""

    def talk(number: int) -> tuple[int, int]:
        history, held, fresh = prompt_of(12 * BLOCK + 5, 1000 + number), 0, 0
        for turn in range(5):
            cached = ask(cluster, history, (number + turn) % 2, conversation_id=f"talk-{number}")["cached"]
            whole = (len(history) - 2 * BLOCK if turn else 0) // BLOCK * BLOCK
            held += turn > 0 and cached >= whole
            fresh += turn == 0 and cached == 0
            history += prompt_of(2 * BLOCK, 2000 + 10 * number + turn)
        return held, fresh

    with ThreadPoolExecutor(2) as threads:
        counts = list(threads.map(talk, range(20)))
    assert sum(fresh for _, fresh in counts) == 20
    assert sum(held for held, _ in counts) >= 0.95 * 80, counts
    loads = [w["cached_blocks"] for name, w in cluster.workers().items() if name.startswith("ctx")]
    assert min(loads) > 0


def test_c11_c12_wrong_events_change_no_token_and_a_new_router_knows_every_prefix(
    cluster: LocalCluster, model: Model
) -> None:
    wrong = dict.fromkeys(("drop", "dup", "swap"), 0.1)
    for worker in ("ctx-0", "ctx-1", "gen-0"):
        cluster.faults(worker, cache_events=wrong)
    rng = random.Random(2)
    common = [prompt_of(4 * BLOCK, 3000 + i) for i in range(4)]
    prompts = [rng.choice(common) + prompt_of(rng.randrange(40, 120), 4000 + i) for i in range(60)]
    with ThreadPoolExecutor(4) as threads:
        choices = list(threads.map(lambda p: ask(cluster, p, max_tokens=6), prompts))
    compare(model, prompts[::4], choices[::4], 6).check()
    for worker in ("ctx-0", "ctx-1", "gen-0"):
        cluster.faults(worker)
    after = settled(cluster)
    counters = cluster.info()["counters"]
    assert counters["cache_gaps"] > 0, counters
    cluster.kill("router")
    cluster.start("router", "router")
    began = time.monotonic()
    until(lambda: len(believed(cluster)) == 3 and all(w["follows"] for w in believed(cluster).values()), 5,
          lambda: f"{believed(cluster)}")  # fmt: skip
    assert believed(cluster) == after, "the index was not what the workers really have"
    assert time.monotonic() - began < 5
    cluster.wait_ready()
    assert {w["name"] for pool in cluster.info()["pools"].values() for w in pool["workers"]} == {
        "ctx-0",
        "ctx-1",
        "gen-0",
    }


def test_c17_tenants_and_salts_share_no_prefix(cluster: LocalCluster) -> None:
    prompt = prompt_of(100, 5000)
    for salt in ({}, {"cache_salt": "other"}):
        assert ask(cluster, prompt, **salt)["cached"] == 0
        settled(cluster)
        # On a busy machine one of the two ctx may look so slow that the other one computes the prompt, too.
        assert 96 in [ask(cluster, prompt, **salt)["cached"] for _ in range(4)]


def test_c12_prefix_hits_resume_after_a_new_router_and_no_worker_restarts(cluster: LocalCluster) -> None:
    prompts = [prompt_of(10 * BLOCK + 3, 7000 + i) for i in range(8)]
    for i, prompt in enumerate(prompts):
        ask(cluster, prompt, i % 2)
    settled(cluster)
    boots = {name: worker["boot"] for name, worker in cluster.workers().items()}
    cluster.kill("router")
    cluster.start("router", "router")
    cluster.wait_ready()
    settled(cluster)
    assert [ask(cluster, prompt, i % 2)["cached"] for i, prompt in enumerate(prompts)] == [10 * BLOCK] * 8
    assert {name: worker["boot"] for name, worker in cluster.workers().items()} == boots


def test_c5_a_killed_ctx_is_not_chosen_for_the_prefix_that_it_had(cluster: LocalCluster) -> None:
    """20 at once right after the kill: all are served by the other, which then has the prefix."""
    prompt = prompt_of(300, 6000)
    expected = ask(cluster, prompt)["token_ids"]
    assert ask(cluster, prompt)["cached"] > 0
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "receipt": True}
    reply = httpx.post(f"{cluster.url('ingress-0')}/v1/completions", json=body, timeout=60)
    [receipt] = json.loads(reply.headers["X-Tailrace-Receipt"])
    victim = receipt["ctx"]
    cluster.kill(victim)
    with ThreadPoolExecutor(20) as threads:
        choices = list(threads.map(lambda i: ask(cluster, prompt, i % 2), range(20)))
    assert [choice["token_ids"] for choice in choices] == [expected] * 20
    # Whoever dials it first is refused and says so; a router whose own link broke first gives it its grace.
    until(lambda: victim not in believed(cluster), 5, lambda: f"{believed(cluster)}")
    assert ask(cluster, prompt)["cached"] == 288  # of the other one
    cluster.start("ctx", victim)
    cluster.wait_ready()
