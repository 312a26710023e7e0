"""Failover through HTTP on real processes: what is killed under clients that keep asking, and that no client notices.

Each of eight clients asks again as soon as it has its answer; half of them stream. A round counts requests, failures,
and the longest time that a stream said nothing, and logs them. Longer rounds, and both ctx at once, in `make soak`.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from equal import Model, answer, compare, prompt_of, tiny
from fault_cases import PAGE, body, pool, settings
from harness import LocalCluster, sse_events, until
from oracle import TOP

from tailrace.model.sampling_params import SamplingParams

log = logging.getLogger(__name__)

CLIENTS, MAX_TOKENS = 8, 24
STUCK_S = 5.0  # RouterSettings.stuck_after_s
RUN_LIMIT_S = 7.0
PROMPTS = [prompt_of(20 + 9 * (i % 20), 7000 + i) for i in range(40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Iterator[LocalCluster]:
    """2 ctx and 2 gen, all alive at the start of each test."""
    path = tmp_path_factory.mktemp("cluster")
    with LocalCluster(path / "c", model.spec, ctx=2, gen=2, **config()) as made:
        yield made


def config(**more: Any) -> dict[str, Any]:
    base = settings("auto", kv_bytes=pool(500), max_request_tokens=1000, pin_lease_s=2.0, request_lease_s=3.0)
    base |= {"run_limit_s": RUN_LIMIT_S}
    return base | {"ctx_config": {"replicas": 2, "threads": 1}, "gen_config": {"replicas": 2, "threads": 1}} | more


@dataclass
class Streamed:
    """What a stream brought, by choice: ids, text, logprobs, how it ended; and when each event came."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)
    error: str = ""
    done: bool = False
    usage: dict[str, int] | None = None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def add(self, event: str) -> None:
        self.times.append(time.monotonic())
        if event == "[DONE]":
            self.done = True
            return
        data = json.loads(event)
        if "error" in data:
            self.error = json.dumps(data["error"])
            return
        self.usage = data.get("usage") or self.usage
        for choice in data["choices"]:
            empty = {"token_ids": [], "text": "", "logprobs": {"token_logprobs": []}, "finish_reason": None}
            so_far = self.choices.setdefault(choice["index"], empty)
            so_far["token_ids"] += choice["token_ids"]
            so_far["text"] += choice["text"]
            if choice["logprobs"]:
                so_far["logprobs"]["token_logprobs"] += choice["logprobs"]["token_logprobs"]
            so_far["finish_reason"] = choice["finish_reason"] or so_far["finish_reason"]


def stream(
    cluster: LocalCluster, prompt: list[int], max_tokens: int = MAX_TOKENS,
    seen: Callable[[Streamed], None] = lambda _: None, **options: Any,
) -> Streamed:  # fmt: skip
    """One stream to its end; `seen` is told after each event."""
    out = Streamed()
    wanted = {"return_token_ids": True, "logprobs": TOP, "stream_options": {"include_usage": True}, "stream": True}
    request = body(prompt, max_tokens, **(wanted | options))
    with httpx.stream("POST", f"{cluster.base_url}/v1/completions", json=request, timeout=60) as reply:
        if reply.status_code != 200:
            out.error = f"{reply.status_code} {reply.read().decode()}"
            return out
        for event in sse_events(reply):
            out.add(event)
            seen(out)
    return out


@dataclass
class Round:
    """One round of closed-loop clients. `failures`: what a client was told instead of an answer."""

    prompts: list[list[int]] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    slowest_s: float = 0.0


def ask_in_a_loop(cluster: LocalCluster, number: int, disturb: Callable[[], None], at: int) -> Round:
    """Eight clients, `number` requests in all; `disturb` is called once `at` of them have been answered."""
    out, lock, numbers = Round(), threading.Lock(), iter(range(number))
    disturbing = threading.Event()

    def client(streams: bool) -> None:
        while True:
            with lock:
                i = next(numbers, None)
            if i is None:
                return
            prompt, started = PROMPTS[i % len(PROMPTS)], time.monotonic()
            gap, failure, choice = 0.0, "", None
            try:
                if streams:
                    said = stream(cluster, prompt)
                    gap, failure = said.longest_gap_s, said.error or ("" if said.done else "cut off")
                    choice = said.choices.get(0)
                else:
                    choice = answer(cluster, prompt, MAX_TOKENS)
            except (httpx.HTTPError, AssertionError) as error:
                failure = repr(error)
            with lock:
                out.longest_gap_s = max(out.longest_gap_s, gap)
                out.slowest_s = max(out.slowest_s, time.monotonic() - started)
                if failure or choice is None:
                    out.failures.append(failure)
                else:
                    out.prompts.append(prompt)
                    out.choices.append(choice)
                if len(out.choices) >= at:
                    disturbing.set()

    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(client, bool(i % 2)) for i in range(CLIENTS)]
        assert disturbing.wait(60), out.failures
        disturb()
        for each in running:
            each.result(120)
    return out


def hold_to(model: Model, out: Round, number: int, what: str) -> None:
    """No failure, and every answer EQ to REF."""
    assert not out.failures, (what, out.failures[:3])
    assert len(out.choices) == number
    compare(model, out.prompts, out.choices, MAX_TOKENS).check()
    gap, slowest = round(out.longest_gap_s, 2), round(out.slowest_s, 2)
    log.info("%s: %d requests, 0 failed, longest gap %s s, slowest %s s", what, number, gap, slowest)


def back(cluster: LocalCluster, *names: str) -> None:
    """Start killed workers again, together."""
    started = [cluster.launch(name.split("-")[0], name) for name in names]
    for process in started:
        process.await_ready(time.monotonic() + 150)
    cluster.wait_ready()


def test_d24_e15_streams_of_every_kind_go_on_when_a_gen_is_killed_under_a_hundred_and_the_log_says_so_once(
    cluster, model
):
    """Greedy, seeded, penalized and two samples: each EQ to REF, usage counted once, in one stream. Of 100 requests in
    work; one record of the death, and few lines for each request that moved."""
    kinds: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"temperature": 0.8, "seed": 11}, 1),
        ({"temperature": 0.8, "seed": 12, "n": 2}, 2),
        ({"presence_penalty": 0.7, "frequency_penalty": 0.3, "temperature": 0.7, "seed": 13}, 1),
    ]
    asked = [(prompt_of(40 + i, 7100 + i), *kinds[i % 4]) for i in range(8)]
    begun = threading.Barrier(len(asked) + 1)
    logs = [p.log for p in cluster.processes.values()]
    sizes = {log: log.stat().st_size for log in logs}
    before = cluster.settled_metric("tailrace_migrations_total")

    def ask(prompt: list[int], options: dict[str, Any]) -> Streamed:
        told = False

        def seen(out: Streamed) -> None:
            nonlocal told
            if not told and len(out.times) >= 5:
                told = True
                begun.wait(60)

        return stream(cluster, prompt, 150, seen, **options)

    with ThreadPoolExecutor(100) as threads:
        running = [threads.submit(ask, prompt, options) for prompt, options, _ in asked]
        others = [threads.submit(stream, cluster, prompt_of(24, 7600 + i), 60) for i in range(92)]
        begun.wait(60)
        cluster.kill("gen-1")
        streamed = [each.result(120) for each in running]
        rest = [each.result(120) for each in others]
    affected = cluster.settled_metric("tailrace_migrations_total") - before
    assert affected >= 5, "the kill hit few streams"
    assert all(out.done and not out.error for out in rest), [out.error for out in rest if out.error][:3]
    lines = [line for log in logs for line in log.read_bytes()[sizes[log] :].decode().splitlines()]
    assert sum("worker_dead" in line for line in lines) == 1 and len(lines) < 10 * affected, (affected, lines[:20])
    assert not any("Traceback" in line for line in lines)
    for (prompt, options, samples), out in zip(asked, streamed, strict=True):
        assert not out.error and out.done, out.error
        names = ("temperature", "seed", "presence_penalty", "frequency_penalty")
        given = {"temperature": 0.0} | {k: v for k, v in options.items() if k in names}
        params = SamplingParams(max_tokens=150, ignore_eos=True, logprobs=TOP, **given)
        (expected,) = model.ref.generate([prompt], params, samples)
        assert out.usage["prompt_tokens"] == len(prompt) and out.usage["completion_tokens"] == 150 * samples
        for index in range(samples):
            choice = out.choices[index]
            if given["temperature"]:
                assert choice["token_ids"] == expected.samples[index].ids
                assert choice["text"] == model.text(expected.samples[index].ids)
            else:
                compare(model, [prompt], [choice], 150)
            assert choice["finish_reason"] == "length" and len(choice["logprobs"]["token_logprobs"]) == 150
    back(cluster, "gen-1")
    cluster.quiet()


def test_kills_of_one_gen_one_ctx_and_the_last_ctx_fail_no_request(cluster, model):
    """80 requests each; with all ctx dead the cluster says degraded, and gens prefill."""
    out = ask_in_a_loop(cluster, 80, lambda: cluster.kill("gen-0"), 20)
    hold_to(model, out, 80, "SIGKILL one gen")
    out = ask_in_a_loop(cluster, 80, lambda: cluster.kill("ctx-0"), 20)
    hold_to(model, out, 80, "SIGKILL one ctx")
    said: list[str] = []

    def kill_the_last() -> None:
        cluster.kill("ctx-1")
        until(lambda: "no ctx worker is there" in cluster.ready()["reasons"], 5, lambda: f"{cluster.ready()}")
        said.append(cluster.ready()["status"])

    out = ask_in_a_loop(cluster, 80, kill_the_last, 20)
    hold_to(model, out, 80, "SIGKILL all ctx")
    assert said == ["degraded"] and httpx.get(f"{cluster.base_url}/ready", timeout=5).status_code == 200
    back(cluster, "gen-0", "ctx-0", "ctx-1")
    cluster.quiet()


def test_with_all_gens_killed_requests_are_refused_within_a_second_until_they_are_back(cluster, model):
    """B11: 503 with Retry-After, /ready 503; both gens come back at their old ports; nobody else is restarted."""
    others = {name: cluster.processes[name].pid for name in ("router", "ingress-0", "ctx-0", "ctx-1")}
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(stream, cluster, prompt_of(40, 7200 + i), 400) for i in range(2)]
        until(lambda: cluster.metric("tailrace_active_requests", role="gen") >= 2, 10, lambda: "nothing decodes")
        for name in ("gen-0", "gen-1"):
            cluster.processes[name].popen.kill()
        killed = time.monotonic()
        reply = cluster.post("/v1/completions", body(prompt_of(9, 7210)))
        took = time.monotonic() - killed
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1, reply.text
        assert took < 1.0, took
        log.info("SIGKILL all gen: 503 after %.2f s, Retry-After %s", took, reply.headers["retry-after"])
        assert reply.json()["error"]["code"] and httpx.get(f"{cluster.base_url}/ready", timeout=5).status_code == 503
        for each in running:
            assert each.result(30).error and not each.result().done
    for name in ("gen-0", "gen-1"):
        cluster.processes[name].popen.wait()
        cluster.options[name] = ["--port", str(cluster.processes[name].ready["port"])]
    back(cluster, "gen-0", "gen-1")
    ready = time.monotonic()
    out = ask_in_a_loop(cluster, 24, lambda: None, 1)
    hold_to(model, out, 24, "after the return of all gens")
    assert time.monotonic() - ready < 10
    assert {name: cluster.processes[name].pid for name in others} == others
    assert all(cluster.processes[name].alive for name in others)
    cluster.quiet()


def positions(cluster: LocalCluster, *names: str) -> list[float]:
    """Prompt positions that each of these has computed since it started."""
    return [cluster.metric("tailrace_prompt_positions_total", worker=name, kind="computed") for name in names]


def test_c4_nothing_is_counted_for_ever_and_a_worker_that_comes_back_gets_its_share_not_all(cluster, model):
    """Clients leave at random while a ctx dies; then it is started again and gets 40 new prompts with the other."""
    restarts, boot = cluster.metric("tailrace_worker_restarts_total"), cluster.workers()["ctx-0"]["boot"]
    chance = random.Random(4)

    def leave(i: int) -> None:
        request = body(prompt_of(150, 7300 + i), 60, stream=True)
        with httpx.stream("POST", f"{cluster.base_url}/v1/completions", json=request, timeout=60) as reply:
            for _ in zip(range(chance.choice([1, 2, 20, 100])), sse_events(reply), strict=False):
                pass

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(leave, i) for i in range(60)]
        running[10].result(60)
        cluster.kill("ctx-0")
        for each in running:
            each.result(60)
    cluster.quiet()
    back(cluster, "ctx-0")
    assert cluster.workers()["ctx-0"]["boot"] != boot  # E11 (ii)
    assert cluster.settled_metric("tailrace_worker_restarts_total") == restarts + 1
    before = positions(cluster, "ctx-0", "ctx-1")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: answer(cluster, prompt_of(120, 7400 + i), 4), range(40)))
    time.sleep(0.5)
    got = [after - first for after, first in zip(positions(cluster, "ctx-0", "ctx-1"), before, strict=True)]
    assert sum(got) == 40 * 120 and max(got) <= 1.5 * sum(got) / 2, got


def test_c12_a_new_router_knows_all_workers_within_five_seconds_and_none_is_restarted(cluster, model):
    pids = {name: p.pid for name, p in cluster.processes.items() if name != "router"}
    warm = prompt_of(160, 7500)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: answer(cluster, warm, 4), range(16)))
    cluster.kill("router")
    cluster.start("router", "router")
    started = time.monotonic()
    until(lambda: len(cluster.workers()) == 4 and cluster.ready()["status"] == "ready", 5, lambda: str(cluster.info()))
    assert httpx.get(f"{cluster.base_url}/v1/models", timeout=5).status_code == 200
    assert time.monotonic() - started < 5
    hits = [answer(cluster, warm, 4)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(4)]
    assert min(hits) >= 160 - 2 * PAGE, "what was cached is computed anew"
    assert {name: cluster.processes[name].pid for name in pids} == pids
    assert all(p.alive for p in cluster.processes.values())


def supervised(cluster: LocalCluster, name: str) -> int:
    """Start a worker again, under its supervisor; returns its engine's pid."""
    cluster.options[name] = ["--supervised"]
    if cluster.processes[name].alive:
        cluster.kill(name)
    back(cluster, name)
    return cluster.processes[name].ready["pid"]


def ended_by_its_supervisor(cluster: LocalCluster, name: str, rank: int) -> bool:
    return cluster.processes[name].popen.wait(20) == 1 and not Path(f"/proc/{rank}").exists()


@pytest.mark.soak
def test_e2_a_ctx_whose_loop_is_stuck_leaves_rotation_and_is_ended_and_its_requests_go_elsewhere(cluster, model):
    """Its loop sleeps for a minute in a pass. Out of rotation within two of the router's periods, ended at
    run_limit_s by its supervisor, and what it had is placed again."""
    rank = supervised(cluster, "ctx-1")
    cluster.faults("ctx-1", slow_pass_s=60.0)
    seen: list[float] = []

    def watch() -> None:
        started = time.monotonic()
        until(lambda: cluster.workers().get("ctx-1", {}).get("condition") != "ready", 2 * STUCK_S, str)
        seen.append(time.monotonic() - started)

    out = ask_in_a_loop(cluster, 40, watch, 1)
    hold_to(model, out, 40, "a loop that is stuck")
    assert seen[0] < 2 * STUCK_S and out.slowest_s < RUN_LIMIT_S + 10
    assert ended_by_its_supervisor(cluster, "ctx-1", rank)
    del cluster.options["ctx-1"]
    back(cluster, "ctx-1")
    cluster.quiet()


@pytest.mark.soak
def test_e2_a_stopped_engine_leaves_rotation_within_two_periods_of_silence_and_is_ended(cluster, model):
    rank = supervised(cluster, "ctx-1")
    os.kill(rank, signal.SIGSTOP)
    until(lambda: cluster.workers()["ctx-1"]["condition"] == "silent", 2 * 3 * cluster.config["heartbeat_s"] + 1, str)
    out = ask_in_a_loop(cluster, 16, lambda: None, 1)
    hold_to(model, out, 16, "a stopped engine")
    assert ended_by_its_supervisor(cluster, "ctx-1", rank)
    del cluster.options["ctx-1"]
    back(cluster, "ctx-1")
    cluster.quiet()


@pytest.mark.soak
def test_a_gen_without_pages_gives_requests_back_and_they_are_prefilled_anew(tmp_path, model):
    """It has only the tails of their prompts, so it cannot compute them again itself; every answer is EQ."""
    tail = {"gen_prompt_tail_tokens": 256, "transceiver_runtime": "python"}
    made = settings("auto", max_request_tokens=600, gen_config={"threads": 1, "kv_bytes": pool(70)}, **tail)
    prompts = [prompt_of(300 + i, 7800 + i) for i in range(6)]  # 19 pages each, 29 at its end
    with LocalCluster(tmp_path / "tail", model.spec, **made) as tight:
        with ThreadPoolExecutor(6) as threads:
            choices = list(threads.map(lambda p: answer(tight, p, 150), prompts))
        compare(model, prompts, choices, 150)
        assert [len(choice["token_ids"]) for choice in choices] == [150] * 6
        assert tight.settled_metric("tailrace_migrations_total") > 0, "nothing was given back"
        assert tight.metric("tailrace_breaker_trips_total") == 0
        tight.quiet()


@pytest.mark.soak
@pytest.mark.parametrize("victims", [["gen-0"], ["ctx-0"], ["ctx-0", "ctx-1"]], ids=["gen", "ctx", "all-ctx"])
def test_long_rounds_of_kills_fail_no_request(cluster, model, victims):
    for number in range(5):
        hit = random.Random(number).sample(victims, len(victims))

        def kill(hit: list[str] = hit) -> None:
            for name in hit:
                cluster.processes[name].popen.kill()
            for name in hit:
                cluster.processes[name].popen.wait()

        out = ask_in_a_loop(cluster, 400, kill, 50)
        hold_to(model, out, 400, f"SIGKILL {' '.join(hit)}")
        back(cluster, *hit)
    cluster.quiet()
