"""Cases A and B of the field, E11, and design 11: what dies or stops, and what then goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from equal import Model, answer, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import (
    NIXL_FIRST,
    PAGE,
    Asked,
    Shared,
    back_at_its_port,
    body,
    hold,
    in_flight,
    leave,
    pool,
    seconds,
    settings,
)
from harness import LocalCluster, sse_events, until

POOL = 32  # pages of each worker of `leases`
PIN_LEASE_S, REQUEST_LEASE_S, TIMEOUT_S = 1.0, 3.0, 5.0
both = pytest.mark.parametrize("transport", NIXL_FIRST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    clusters = Shared(tmp_path_factory.mktemp("clusters"))
    yield clusters
    clusters.close()


def leases(shared: Shared, model: Model, transport: str) -> AbstractContextManager[LocalCluster]:
    """2P1D and two ingresses, with small pools and short leases."""

    def make(path: Path) -> LocalCluster:
        config = settings(transport, kv_transfer_timeout_s=TIMEOUT_S, kv_bytes=pool(POOL), max_request_tokens=500)
        config |= {"pin_lease_s": PIN_LEASE_S, "request_lease_s": REQUEST_LEASE_S}
        return LocalCluster(path, model.spec, ctx=2, ingress=2, **config)

    return shared.cluster(f"leases-{transport}-", make)


def two_gens(shared: Shared, model: Model) -> AbstractContextManager[LocalCluster]:
    """1P2D with a small pool on the ctx and short leases."""

    def make(path: Path) -> LocalCluster:
        config = settings("auto", kv_transfer_timeout_s=TIMEOUT_S, kv_bytes=pool(POOL), max_request_tokens=500)
        config |= {"pin_lease_s": 2.0, "request_lease_s": 2.0}
        return LocalCluster(path, model.spec, gen=2, **config)

    return shared.cluster("two-gens-", make)


def large(shared: Shared, model: Model) -> AbstractContextManager[LocalCluster]:
    """1P1D with large pools, small chunks and long requests."""

    def make(path: Path) -> LocalCluster:
        config = settings("auto", max_request_tokens=4000) | {"max_num_tokens": 32, "max_batch_size": 16}
        return LocalCluster(path, model.spec, **config)

    return shared.cluster("large-", make)


def ctx_in_use(cluster: LocalCluster) -> tuple[str, str]:
    """(the ctx that has pages in use, the other one)."""
    used = {n: cluster.pages(n, "held") + cluster.pages(n, "pinned") for n in ("ctx-0", "ctx-1")}
    found = max(used, key=lambda n: used[n])
    assert used[found], used
    return found, "ctx-1" if found == "ctx-0" else "ctx-0"


def computed(cluster: LocalCluster, worker: str) -> float:
    """Prompt positions that this worker has computed since it started."""
    return cluster.settled_metric("tailrace_prompt_positions_total", worker=worker, kind="computed")


def boot_of(cluster: LocalCluster, worker: str) -> str:
    return cluster.workers()[worker]["boot"]


# --------------------------------------------------------------------------------------------------------- leases


@pytest.mark.parametrize(
    ("transport", "where"),
    [
        pytest.param("shm", "gen", marks=pytest.mark.soak),
        ("nixl", "gen"),
        ("nixl", "ctx"),
        pytest.param("peer", "gen", marks=pytest.mark.gpu),
    ],
)
def test_a14_pages_whose_lease_ended_give_a_recomputation_and_never_tokens(shared, model, transport, where):
    with leases(shared, model, transport) as cluster:
        expired = cluster.settled_metric("tailrace_expired_reads_total")
        hold(cluster, 0, *(["gen-0"] if where == "gen" else []))  # at gen that pauses its renewals, too
        seed = 10 if where == "ctx" else 0  # nothing of an earlier case is in a cache
        prompt = prompt_of(6 * PAGE, seed + 1)
        with ThreadPoolExecutor(8) as threads:
            held = threads.submit(answer, cluster, prompt)
            begun = time.monotonic()
            in_flight(cluster)
            until(
                lambda: cluster.metric("tailrace_pages", role="ctx", state="pinned") >= 6, 5, lambda: "nothing pinned"
            )
            until(
                lambda: cluster.metric("tailrace_pages", role="ctx", state="pinned") == 0, 4, lambda: "no lease ended"
            )
            # P serves others meanwhile, so that every page of it gets a new owner
            others = [prompt_of(30 * PAGE, seed + s) for s in range(4, 10)]
            list(threads.map(lambda p: cluster.complete(p, 1, ignore_eos=True), others))
            time.sleep(max(0.0, begun + 3.0 - time.monotonic()))
            cluster.poison()
            compare(model, [prompt], [held.result(30)]).check()
        assert cluster.settled_metric("tailrace_expired_reads_total") - expired == 1


def test_b2_unfetched_prefills_give_their_pages_back_by_lease_and_the_next_request_is_served(shared, model):
    with two_gens(shared, model) as cluster:
        hold(cluster, 0, "gen-0")  # it fetches nothing either, until all is seen to be full
        cluster.stop("gen-1")
        try:
            prompts = [prompt_of(6 * PAGE, s) for s in range(20, 32)]
            with ThreadPoolExecutor(12) as threads:
                begun = [threads.submit(cluster.post, "/v1/completions", body(p)) for p in prompts]
                until(lambda: "no capacity" in str(cluster.ready()), 10, lambda: f"{cluster.ready()}")
                assert cluster.ready()["status"] != "ready"
                cluster.faults("gen-0")
                replies = [each.result(60) for each in begun]
            assert {r.status_code for r in replies} <= {200, 500, 503, 504}, [r.text for r in replies]
            last = prompt_of(30 * PAGE, 50)
            compare(model, [last], [answer(cluster, last)]).check()
        finally:
            cluster.cont("gen-1")
        until(lambda: cluster.processes["gen-1"].popen.poll() is not None or boot_back(cluster, "gen-1"), 10, str)
        if not cluster.processes["gen-1"].alive:  # it was declared dead, and obeys
            cluster.start("gen", "gen-1")
        cluster.wait_ready()


def boot_back(cluster: LocalCluster, worker: str) -> bool:
    """Whether the router counts this worker in again."""
    return cluster.workers().get(worker, {}).get("condition") == "ready" and cluster.ready()["status"] == "ready"


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b8_a_dead_gen_leaves_no_pins_behind(shared, model, transport):
    """Pins end with the reader's lease; where ctx knows of its death, once the router knows that no other can read."""
    with leases(shared, model, transport) as cluster:
        hold(cluster, 1)
        with ThreadPoolExecutor(8) as threads:
            begun = [threads.submit(cluster.post, "/v1/completions", body(prompt_of(24, s))) for s in range(60, 68)]
            in_flight(cluster, 8)
            cluster.kill("gen-0")
            killed = time.monotonic()
            cluster.faults("ctx-0"), cluster.faults("ctx-1")
            until(
                lambda: cluster.metric("tailrace_pages", role="ctx", state="pinned") == 0, PIN_LEASE_S + 2,
                lambda: f"pinned {time.monotonic() - killed} s after the kill",
            )  # fmt: skip
            cluster.start("gen", "gen-0")
            replies = [each.result(60) for each in begun]
        assert {r.status_code for r in replies} <= {200, 500, 502, 503, 504}, [r.text for r in replies]
        cluster.wait_ready()
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(24, s) for s in range(60, 68)])


@both
def test_b8_nothing_expires_behind_a_long_queue_of_a_living_gen(shared, model, transport):
    with leases(shared, model, transport) as cluster:
        expired = cluster.settled_metric("tailrace_expired_reads_total")
        page_s = 0.05
        cluster.faults("gen-0", slow_bytes_per_s=8192 / page_s)
        prompts = [prompt_of(20 * PAGE, s) for s in range(70, 74)]
        started = time.monotonic()
        choices = answers(cluster, prompts)
        assert time.monotonic() - started > 3 * PIN_LEASE_S
        compare(model, prompts, choices).check()
        assert cluster.settled_metric("tailrace_expired_reads_total") == expired


# ------------------------------------------------------------------------------------------------------------ ctx


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b4_an_aborted_read_gives_its_pages_back_though_its_ctx_dies(shared, model, transport):
    with leases(shared, model, transport) as cluster:
        hold(cluster, 6, "gen-0")
        with cluster.streaming(prompt_of(20 * PAGE, 80), ignore_eos=True) as reply:
            events = sse_events(reply)
            assert next(events)
            in_flight(cluster)
            victim, _ = ctx_in_use(cluster)
        until(lambda: cluster.pages("gen-0", "quarantined") > 0, 5, lambda: "nothing was quarantined")
        time.sleep(0.3)
        assert cluster.pages("gen-0", "quarantined") > 0, "given back while the copy is still held"
        cluster.kill(victim)
        until(lambda: cluster.pages("gen-0", "quarantined") == 0, PIN_LEASE_S + 2, lambda: "still quarantined")
        cluster.start("ctx", victim)
        cluster.wait_ready()
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(20 * PAGE, s) for s in (81, 82, 83)])


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b6_a_full_hit_whose_ctx_is_gone_when_it_is_released_is_answered_and_ends_nothing(shared, model, transport):
    """Nothing moves and a release is due: its ctx is killed before it, or stopped until after its lease."""
    with leases(shared, model, transport) as cluster:
        gen, prompt = cluster.processes["gen-0"].pid, prompt_of(8 * PAGE, 88)
        assert_equal(cluster, model, [prompt])
        for end, back_again in ((cluster.kill, back_at_its_port), (cluster.stop, None)):
            cluster.faults("gen-0", late_s={"release": 1.0})
            with ThreadPoolExecutor(1) as thread:
                held = thread.submit(answer, cluster, prompt)
                in_flight(cluster)
                victim = max(("ctx-0", "ctx-1"), key=lambda n: cluster.pages(n, "pinned") + cluster.pages(n, "held"))
                end(victim)
                try:
                    compare(model, [prompt], [held.result(20)]).check()
                finally:
                    if back_again is None:
                        cluster.cont(victim)
            if back_again is not None:
                back_again(cluster, victim)
            cluster.wait_ready(10)
            cluster.poison()
            cluster.quiet()
            assert cluster.processes["gen-0"].pid == gen and cluster.processes["gen-0"].alive
        assert_equal(cluster, model, [prompt, prompt_of(40, 89)])


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b17_a_stopped_ctx_stalls_nobody_else_and_lands_nothing_later(shared, model, transport):
    """STOP P in the middle of A's transfer: B decodes on, C comes by P2, A ends otherwise."""
    with leases(shared, model, transport) as cluster:
        prompt, over = prompt_of(10 * PAGE, 90), threading.Event()
        with ThreadPoolExecutor(4) as threads:
            try:
                b = [threads.submit(token_gaps, cluster, over, seed) for seed in (1000, 2000)]
                time.sleep(1.0)
                hold(cluster, 3)
                held = threads.submit(answer, cluster, prompt)
                until(lambda: max(cluster.pages(n, "pinned") for n in ("ctx-0", "ctx-1")) >= 10, 5, str)
                victim, other = ctx_in_use(cluster)
                cluster.stop(victim)
                stopped = time.monotonic()
                cluster.faults("gen-0"), cluster.faults(other)
                c = threads.submit(answer, cluster, prompt_of(8 * PAGE, 92))
                compare(model, [prompt_of(8 * PAGE, 92)], [c.result(30)]).check()
                compare(model, [prompt], [held.result(40)]).check()
            finally:
                over.set()
            assert_undisturbed(np.array([gap for each in b for gap in each.result(30)]), stopped)
        more = [prompt_of(10 * PAGE, s) for s in range(94, 98)]
        given = answers(cluster, more)
        cluster.cont(victim)
        time.sleep(0.5)
        given += answers(cluster, more)
        compare(model, [*more, *more], given).check()
        back(cluster, "ctx", victim)


def token_gaps(cluster: LocalCluster, over: threading.Event, seed: int) -> list[tuple[float, float]]:
    """(when, gap) of the tokens of streams one after the other, from each one's second token on: those of its gen."""
    gaps: list[tuple[float, float]] = []
    while not over.is_set():
        seed += 1
        with cluster.streaming(prompt_of(5, seed), 60, ignore_eos=True) as reply:
            times = [time.monotonic() for event in sse_events(reply) if event != "[DONE]"][1:]
        gaps += zip(times[1:], np.diff(times).tolist(), strict=True)
    return gaps


def assert_undisturbed(gaps: np.ndarray, since: float) -> None:
    """p99 of the gaps [n, 2] after `since` is below twice that before it (and a time slice of a busy machine)."""
    late = gaps[:, 0] > since
    assert late.sum() > 50 and (~late).sum() > 50, "nothing was decoded meanwhile"
    before, after = np.percentile(gaps[~late, 1], 99), np.percentile(gaps[late, 1], 99)
    assert after < 2 * before + 0.02, (before, after)


def back(cluster: LocalCluster, role: str, name: str) -> None:
    """A worker that was stopped goes on, or ends because it was declared dead: then a supervisor starts another."""
    until(lambda: not cluster.processes[name].alive or boot_back(cluster, name), 10, lambda: f"{cluster.info()}")
    if not cluster.processes[name].alive:
        cluster.start(role, name)
    cluster.wait_ready()
    cluster.poison()


def test_e11_a_ctx_that_stops_for_five_seconds_is_skipped_and_then_used_with_its_boot_id(shared, model):
    with leases(shared, model, "shm") as cluster:
        boot, before = boot_of(cluster, "ctx-0"), computed(cluster, "ctx-0")
        cluster.stop("ctx-0")
        stopped = time.monotonic()
        try:
            until(lambda: cluster.workers()["ctx-0"]["condition"] != "ready", 3, lambda: f"{cluster.workers()}")
            assert_equal(cluster, model, [prompt_of(40, s) for s in range(100, 106)])
            time.sleep(max(0.0, stopped + 5 - time.monotonic()))
        finally:
            cluster.cont("ctx-0")
        cluster.wait_ready(5)
        assert_equal(cluster, model, [prompt_of(40, s) for s in range(106, 118)])
        assert boot_of(cluster, "ctx-0") == boot
        assert computed(cluster, "ctx-0") > before


@pytest.mark.parametrize(
    ("transport", "times"),
    [
        ("nixl", 2),
        pytest.param("nixl", 5, marks=pytest.mark.soak),
        pytest.param("shm", 2, marks=pytest.mark.soak),
        pytest.param("peer", 3, marks=pytest.mark.gpu),
    ],
)
def test_b10_a_ctx_that_was_killed_and_restarted_at_its_address_is_used_each_time(shared, model, transport, times):
    with leases(shared, model, transport) as cluster:
        gen = cluster.processes["gen-0"].pid
        boots = {boot_of(cluster, "ctx-0")}
        prompts: list[list[int]] = []
        choices: list[dict[str, Any]] = []
        address = cluster.workers()["ctx-0"]["address"]
        for number in range(times):
            with ThreadPoolExecutor(4) as threads:
                under_way = [prompt_of(10 * PAGE, 2000 + 10 * number + s) for s in range(8)]
                begun = [threads.submit(answer, cluster, p) for p in under_way]
                time.sleep(0.1)
                cluster.kill("ctx-0")
                prompts, choices = prompts + under_way, choices + [each.result(30) for each in begun]
            back_at_its_port(cluster, "ctx-0")
            ready = time.monotonic()
            cluster.wait_ready(5)
            for batch in range(20):
                more = [prompt_of(3 * PAGE, 3000 + 100 * number + 4 * batch + s) for s in range(4)]
                prompts, choices = prompts + more, choices + answers(cluster, more)
                if computed(cluster, "ctx-0"):
                    break
            assert time.monotonic() - ready < 5
            boots.add(boot_of(cluster, "ctx-0"))
        compare(model, prompts, choices).check()
        assert len(boots) == times + 1
        assert cluster.workers()["ctx-0"]["address"] == address
        assert cluster.processes["gen-0"].pid == gen and cluster.processes["gen-0"].alive


def test_a_killed_ctx_that_was_alone_is_replaced_by_local_prefill_until_it_is_back(shared, model):
    with large(shared, model) as cluster:
        prompts = [prompt_of(400, s) for s in range(200, 208)]
        with ThreadPoolExecutor(8) as threads:
            begun = [threads.submit(answer, cluster, p) for p in prompts]
            time.sleep(0.15)
            cluster.kill("ctx-0")
            compare(model, prompts, [each.result(60) for each in begun]).check()
        assert_equal(cluster, model, [prompt_of(41, s) for s in range(208, 212)])
        assert cluster.settled_metric("tailrace_local_prefills_total", reason="fallback") > 0
        cluster.start("ctx", "ctx-0")
        cluster.wait_ready(5)
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(42, 212)])
        assert computed(cluster, "ctx-0") >= 42


# ------------------------------------------------------------------------------------------- gen, router, ingress


def test_a_killed_gen_ends_its_streams_with_one_error_event_and_new_ones_get_503_until_it_is_back(shared, model):
    with large(shared, model) as cluster:
        with cluster.streaming(prompt_of(40, 220), 2000, ignore_eos=True) as reply:
            events = sse_events(reply)
            for _ in range(5):
                next(events)
            cluster.kill("gen-0")
            rest = list(events)
        errors = [e for e in rest if '"error"' in e]
        assert len(errors) == 1 and rest[-1] == errors[0]
        assert "[DONE]" not in rest
        assert not any('"finish_reason":"stop"' in e for e in rest)
        until(lambda: cluster.post("/v1/completions", body(prompt_of(9, 221))).status_code == 503, 3, lambda: "no 503")
        reply = cluster.post("/v1/completions", body(prompt_of(9, 222)))
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        assert cluster.ready()["status"] == "unready"
        cluster.start("gen", "gen-0")
        cluster.wait_ready(10)
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(40, 223)])


def test_a_killed_router_stops_no_stream_and_no_worker(shared, model):
    with large(shared, model) as cluster:
        pids = {n: cluster.processes[n].pid for n in ("ctx-0", "gen-0", "ingress-0")}
        prompt, later = prompt_of(40, 230), prompt_of(30, 231)
        with ThreadPoolExecutor(2) as threads:
            running = threads.submit(answer, cluster, prompt, 600)
            time.sleep(0.3)
            cluster.kill("router")
            time.sleep(0.3)
            held = threads.submit(answer, cluster, later)
            cluster.start("router", "router")
            cluster.wait_ready(10)
            compare(model, [prompt], [running.result(60)], 600)
            compare(model, [later], [held.result(30)]).check()
        assert_equal(cluster, model, [prompt_of(41, 232)])
        assert {n: cluster.processes[n].pid for n in pids} == pids
        assert all(cluster.processes[n].alive for n in pids)


def test_one_of_two_ingresses_killed_takes_only_its_own_connections(shared, model):
    with leases(shared, model, "shm") as cluster:
        begun = threading.Event()

        def stream_of_the_other() -> list[str]:
            request = body(prompt_of(40, 240), 400, stream=True)
            with httpx.stream("POST", f"{cluster.url('ingress-1')}/v1/completions", json=request, timeout=60) as reply:
                events = []
                for event in sse_events(reply):
                    begun.set()
                    events.append(event)
                return events

        with ThreadPoolExecutor(2) as threads:
            other = threads.submit(stream_of_the_other)
            assert begun.wait(10)
            with pytest.raises(httpx.HTTPError), cluster.streaming(prompt_of(40, 241), 450, ignore_eos=True) as reply:
                events = sse_events(reply)
                next(events)
                cluster.kill("ingress-0")
                list(events)
            assert other.result(60)[-1] == "[DONE]"
        until(lambda: not cluster.disquiet(), REQUEST_LEASE_S + 2, lambda: f"not quiet: {cluster.disquiet()}")
        cluster.start("ingress", "ingress-0")
        answer(cluster, prompt_of(20, 242))


# -------------------------------------------------------------------------------------------------------- clients


@pytest.mark.parametrize("how", ["stream", "whole", "half-close"])
def test_b23_prompts_of_clients_that_left_do_not_delay_a_short_one(shared, model, how):
    with large(shared, model) as cluster:
        seed, stream = 300 + 50 * len(how), how == "stream"
        idle = min(seconds(answer, cluster, prompt_of(10, seed + s), 1) for s in range(5))
        alone = seconds(answer, cluster, prompt_of(3900, seed + 10), 1)
        with ThreadPoolExecutor(5) as threads:
            prompts = [prompt_of(3900, seed + 20 + s) for s in range(5)]
            if how == "half-close":
                asked = [Asked(cluster, prompt) for prompt in prompts]
                time.sleep(0.1 * alone)
                for each in asked:
                    each.half_close()
            else:
                gone = [threads.submit(leave, cluster, prompt, 0.1 * alone, stream=stream) for prompt in prompts]
                for each in gone:
                    each.result(30)
        took = seconds(answer, cluster, prompt_of(10, seed + 30), 1)
        chunk = alone / (3900 / 32)
        assert took < chunk + 2 * idle + 0.1, (took, chunk, idle, alone)
        assert took < alone / 2
        cluster.quiet(5)


# ---------------------------------------------------------------------------------------------------- who never fits


def test_a17_workers_that_do_not_fit_are_refused_by_field_and_the_client_gets_503(model, tmp_path):
    """A17, A8, E4: refused at pairing with both values named, nobody exits, not ready, 503 within 2 s."""
    misfits: dict[str, dict[str, Any]] = {
        "gen-0": {"dtype": "bfloat16"},
        "gen-1": {"block_tokens": 128},
        "gen-2": {"model": tiny(tmp_path / "other", "llama", num_hidden_layers=3).spec},
    }
    fields = {"gen-0": "dtype", "gen-1": "block_tokens", "gen-2": "model"}
    cluster = LocalCluster(
        tmp_path / "c", model.spec, gen=0, per_process=misfits, **settings("auto", local_prefill="never")
    )
    with cluster:
        started = [cluster.launch("gen", name) for name in misfits]
        for process in started:
            process.await_ready(time.monotonic() + 60)

        def refused(name: str) -> bool:
            boot = cluster.processes[name].ready["boot"]
            lines = [line for n in ("ctx-0", name) for line in cluster.processes[n].log.read_text().splitlines()]
            return any("pair_refused" in line and fields[name] in line for line in lines) and bool(boot)

        for name in misfits:
            until(lambda name=name: refused(name), 5, lambda name=name: cluster.processes[name].log.read_text())
        assert cluster.ready()["status"] == "unready"
        asked = time.monotonic()
        reply = cluster.post("/v1/completions", {"prompt": prompt_of(9, 1), "max_tokens": 4})
        assert reply.status_code == 503, reply.text
        assert int(reply.headers["retry-after"]) >= 1
        assert time.monotonic() - asked < 2
        assert all(p.alive for p in cluster.processes.values())
