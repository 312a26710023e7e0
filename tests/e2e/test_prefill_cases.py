"""Prefill under load, and where it is done, over HTTP on real processes: F4, F5 and F10 of the cases from the field.

In F4 times are told in chunk times: a fault makes every pass of ctx take PASS_S longer, so that the pace of the machine
matters little.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from equal import Model, answer, assert_equal, prompt_of, tiny
from harness import LocalCluster, sse_events, until

CHUNK = 32
PASS_S = 0.15


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama3")


def ttft_s(cluster: LocalCluster, prompt: list[int]) -> float:
    started = time.monotonic()
    with cluster.streaming(prompt, max_tokens=1) as reply:
        next(sse_events(reply))
        return time.monotonic() - started


@pytest.mark.soak  # the schedulers' own tests hold it too
@pytest.mark.parametrize("chunks", [20, pytest.param(64, marks=pytest.mark.soak)])
def test_f4_short_prompts_behind_a_huge_one_wait_few_chunks_and_it_ends(model: Model, tmp_path: Path, chunks: int):
    with LocalCluster(tmp_path, model.spec, max_num_tokens=CHUNK, max_batch_size=8) as cluster:
        cluster.faults("ctx-0", slow_pass_s=PASS_S)
        chunk_s = sorted(ttft_s(cluster, prompt_of(CHUNK, i)) for i in range(5))[2]  # with HTTP and all
        with ThreadPoolExecutor(16) as pool:
            began = time.monotonic()
            huge = pool.submit(ttft_s, cluster, prompt_of(chunks * CHUNK, 7))
            time.sleep(1.0)
            short, number = [], 0
            while not huge.done():
                number += 1
                short.append(pool.submit(ttft_s, cluster, prompt_of(CHUNK, 1000 + number)))
                time.sleep(3 * chunk_s)
            whole = time.monotonic() - began
            waits = sorted(future.result() for future in short)
        assert len(waits) >= 5
        assert waits[int(0.95 * (len(waits) - 1))] <= 4 * chunk_s, (waits, chunk_s)
        share_s = len(waits) * chunk_s
        assert huge.result() <= whole and huge.result() <= 2 * chunks * chunk_s + share_s


async def at_once(cluster: LocalCluster, prompts: list[list[int]]) -> list[float]:
    """Seconds until each request ended, from the moment at which all were sent."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as http:
        started = time.monotonic()

        async def one(prompt: list[int]) -> float:
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            reply = await http.post(f"{cluster.base_url}/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"]["completion_tokens"] == 4
            return time.monotonic() - started

        return sorted(await asyncio.gather(*map(one, prompts)))


@pytest.mark.soak
@pytest.mark.parametrize("counts", [(50, 100), pytest.param((50, 100, 200), marks=pytest.mark.soak)])
def test_f5_many_at_once_move_at_an_even_pace_and_the_queue_is_shown(model: Model, tmp_path: Path, counts):
    with LocalCluster(tmp_path, model.spec, max_num_tokens=256, max_queued_requests=512) as cluster:
        answer(cluster, prompt_of(64, 1))
        for count in counts:
            ends = asyncio.run(at_once(cluster, [prompt_of(96, 1000 * count + i) for i in range(count)]))
            first, second = ends[count // 2 - 1], ends[-1] - ends[count // 2 - 1]
            assert second <= 1.5 * first, (count, first, second)
        cluster.faults("gen-0", slow_bytes_per_s=20_000)
        with ThreadPoolExecutor(6) as pool:
            slow = [pool.submit(answer, cluster, prompt_of(200, 77 + i), 2) for i in range(6)]
            until(
                lambda: (
                    cluster.metric("tailrace_transfer_queue_length", role="gen") >= 2
                    and cluster.metric("tailrace_transfer_queue_age_seconds", role="gen") > 0.2
                ),
                20.0,
                lambda: "no transfer waits",
            )
            cluster.faults("gen-0")
            for future in slow:
                future.result()
        cluster.quiet()


def test_f10_tiny_prompts_are_computed_by_gen_where_a_hand_off_costs_more(model: Model, tmp_path: Path):
    """The wire is slow, which gen measures; then prompts of 4 tokens are its own, long ones are not, and all are EQ."""
    config = {"local_prefill_max_tokens": "auto", "max_num_tokens": 64, "tokens_per_page": 8, "block_tokens": 8}
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        cluster.poison()
        assert cluster.workers()["gen-0"]["local_prefill"]["max_tokens"] == 0  # nothing is measured yet
        cluster.faults("gen-0", slow_bytes_per_s=200_000)
        for i in range(4):
            answer(cluster, prompt_of(50, 40 + i))
        until(
            lambda: cluster.workers()["gen-0"]["local_prefill"]["max_tokens"] >= 4,
            10.0,
            lambda: str(cluster.workers()["gen-0"]),
        )
        before = cluster.settled_metric("tailrace_prompt_positions_total", role="gen")
        chosen_before = cluster.metric("tailrace_local_prefills_total", reason="chosen")
        assert_equal(cluster, model, [prompt_of(4, 500 + i) for i in range(12)], at_once=1)
        chosen = cluster.settled_metric("tailrace_local_prefills_total", reason="chosen")
        computed = 4 * (chosen - chosen_before) + before
        assert chosen - chosen_before >= 10
        assert cluster.metric("tailrace_local_prefills_total", reason="fallback") == 0
        assert cluster.metric("tailrace_prompt_positions_total", role="gen") == computed
        held = prompt_of(480, 900)  # too long to be computed here; gen keeps its pages
        assert_equal(cluster, model, [held])
        assert cluster.settled_metric("tailrace_local_prefills_total", reason="chosen") == chosen
        assert_equal(cluster, model, [held[:-8] + prompt_of(10, 901)])  # all but ten tokens of it
        assert cluster.settled_metric("tailrace_local_prefills_total", reason="chosen") == chosen + 1
        assert cluster.metric("tailrace_prompt_positions_total", role="gen") <= computed + 18
        cluster.quiet()
