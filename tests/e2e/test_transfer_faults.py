"""Cases A and B of the field (each test names its case): the hand-off under holds, aborts, leases, kills and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import yaml
from equal import Model, answer, answers, assert_equal, compare, prompt_of, tiny
from harness import DEFAULTS, LocalCluster, sse_events, until

PAGE, CHUNK = 16, 64
PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE
TRANSPORTS = ("shm", "nixl")


def pool(pages: int) -> int:
    """kv_bytes of a pool with that many usable pages."""
    return (pages + 1) * PAGE_BYTES


def settings(transport: str = "auto", **more) -> dict:
    base = {"transport": transport, "tokens_per_page": PAGE, "block_tokens": PAGE, "max_num_tokens": CHUNK}
    return base | {"stats_period_s": 0.1} | more


def hold(cluster: LocalCluster, before_page: int = 1) -> None:
    """Pause every transfer, whichever side moves the bytes."""
    for name in cluster.processes:
        if name.startswith(("ctx", "gen")):
            cluster.faults(name, hold_before_page=before_page)


def release_hold(cluster: LocalCluster) -> None:
    cluster.poison()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a1_pages_of_an_aborted_transfer_are_not_given_to_another_before_it_has_ended(model, tmp_path, transport):
    own = {"gen-0": {"gen": {"threads": 1, "kv_bytes": pool(32)}}}
    with LocalCluster(tmp_path, model.spec, per_process=own, **settings(transport, max_request_tokens=500)) as cluster:
        cluster.poison()
        hold(cluster, 4)
        with cluster.streaming(prompt_of(20 * PAGE, 1), ignore_eos=True) as reply:
            events = sse_events(reply)  # kept: the end of the generator would close the connection
            assert next(events)  # the first token came from ctx
            until(lambda: cluster.metric("tailrace_transfers_in_flight", role="gen") == 1, 5, lambda: "no transfer")
        second = prompt_of(18 * PAGE - 5, 2)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(answer, cluster, second)
            if transport == "shm":
                until(lambda: cluster.pages("gen-0", "quarantined") > 0, 5, lambda: "nothing was quarantined")
            time.sleep(0.5)
            assert not waiting.done() or transport == "nixl"
            release_hold(cluster)
            compare(model, [second], [waiting.result(30)]).check()
        cluster.quiet(5)


def test_a4_pages_that_are_still_to_be_read_are_not_evicted(model, tmp_path):
    own = {"ctx-0": {"ctx": {"threads": 1, "kv_bytes": pool(12)}}}
    with LocalCluster(tmp_path, model.spec, per_process=own, **settings(max_request_tokens=180)) as cluster:
        cluster.poison()
        hold(cluster)
        first, second = prompt_of(8 * PAGE, 1), prompt_of(8 * PAGE, 2)
        with ThreadPoolExecutor(2) as threads:
            a = threads.submit(answer, cluster, first)
            until(lambda: cluster.pages("ctx-0", "pinned") >= 8, 5, lambda: "nothing was pinned")
            b = threads.submit(answer, cluster, second)
            time.sleep(0.5)
            assert not b.done()
            assert cluster.pages("ctx-0", "pinned") >= 8
            release_hold(cluster)
            compare(model, [first, second], [a.result(30), b.result(30)]).check()
        cluster.quiet(5)


def test_a5_a_prefix_matched_at_bind_stays_while_others_need_its_pages(model, tmp_path):
    own = {"gen-0": {"gen": {"threads": 1, "kv_bytes": pool(14)}}}
    with LocalCluster(tmp_path, model.spec, per_process=own, **settings(max_request_tokens=200)) as cluster:
        cluster.poison()
        prompt = prompt_of(8 * PAGE + 1, 1)
        assert_equal(cluster, model, [prompt[: 4 * PAGE]])
        hold(cluster, 6)
        others = [prompt_of(3 * PAGE, s) for s in (5, 6, 7)]
        with ThreadPoolExecutor(4) as threads:
            held = threads.submit(answer, cluster, prompt)
            until(lambda: cluster.metric("tailrace_transfers_in_flight", role="gen") == 1, 5, lambda: "no transfer")
            rest = [threads.submit(answer, cluster, other) for other in others]
            time.sleep(0.5)
            release_hold(cluster)
            compare(model, [prompt, *others], [held.result(30), *(r.result(30) for r in rest)]).check()
        cluster.quiet(5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a14_pages_whose_lease_ended_give_a_recomputation_and_never_tokens(model, tmp_path, transport):
    own = {"ctx-0": {"ctx": {"threads": 1, "kv_bytes": pool(12)}}}
    config = settings(transport, pin_lease_s=1.0, max_request_tokens=180)
    with LocalCluster(tmp_path, model.spec, per_process=own, **config) as cluster:
        cluster.poison()
        hold(cluster, 0)
        prompt = prompt_of(6 * PAGE, 1)
        with ThreadPoolExecutor(4) as threads:
            held = threads.submit(answer, cluster, prompt)
            until(lambda: cluster.pages("ctx-0", "pinned") >= 6, 5, lambda: "nothing was pinned")
            until(lambda: cluster.pages("ctx-0", "pinned") == 0, 4, lambda: "the lease never ended")
            # P serves others meanwhile, so that every page of it gets a new owner
            others = [prompt_of(9 * PAGE, s) for s in (5, 6)]
            for other in others:
                assert cluster.complete(other, 1, ignore_eos=True)["usage"]["completion_tokens"] == 1
            release_hold(cluster)
            compare(model, [prompt], [held.result(30)]).check()
        assert cluster.settled_metric("tailrace_expired_reads_total") == 1
        cluster.quiet()


MISFITS = {
    "dtype": {"dtype": "bfloat16"},
    "tokens_per_page": {"tokens_per_page": 8, "block_tokens": 16},
    "model": {"model": "layers"},
}


@pytest.mark.parametrize("field", MISFITS)
def test_a17_workers_that_do_not_fit_are_refused_by_field_and_the_client_gets_503(model, tmp_path, field):
    """A17, A8, E4: refused at pairing with both values named, nobody exits, not ready, 503 within 2 s."""
    own = dict(MISFITS[field])
    if field == "model":
        own["model"] = tiny(tmp_path / "other", "llama", num_hidden_layers=3).spec
    cluster = LocalCluster(tmp_path / "c", model.spec, per_process={"gen-0": own}, **settings(local_prefill="never"))
    cluster.counts["gen"] = 0
    with cluster:
        cluster.start("gen", "gen-0")
        logs = [cluster.processes[n].log for n in ("ctx-0", "gen-0")]
        until(
            lambda: any("refused" in log.read_text() and f'"{field}"' in log.read_text() for log in logs), 5,
            lambda: "\n".join(log.read_text() for log in logs),
        )  # fmt: skip
        assert cluster.ready()["status"] == "unready"
        started = time.monotonic()
        reply = cluster.post("/v1/completions", {"prompt": prompt_of(9, 1), "max_tokens": 4})
        assert reply.status_code == 503, reply.text
        assert int(reply.headers["retry-after"]) >= 1
        assert time.monotonic() - started < 2
        assert all(p.alive for p in cluster.processes.values())


def test_b2_unfetched_prefills_give_their_pages_back_by_lease_and_the_next_request_is_served(model, tmp_path):
    own = {"ctx-0": {"ctx": {"threads": 1, "kv_bytes": pool(16)}}}
    config = settings(pin_lease_s=2.0, request_lease_s=2.0, max_request_tokens=200)
    with LocalCluster(tmp_path, model.spec, per_process=own, gen=2, **config) as cluster:
        cluster.poison()
        cluster.stop("gen-1")
        try:
            with ThreadPoolExecutor(8) as threads:
                prompts = [prompt_of(6 * PAGE, s) for s in range(6)]
                begun = [threads.submit(cluster.post, "/v1/completions", body(p)) for p in prompts]
                replies = [each.result(60) for each in begun]
            assert {r.status_code for r in replies} <= {200, 500, 503, 504}, [r.text for r in replies]
            assert cluster.ready()["status"] == "degraded"
            last = prompt_of(8 * PAGE, 50)
            compare(model, [last], [answer(cluster, last)]).check()
        finally:
            cluster.cont("gen-1")
        cluster.quiet(8)


def body(prompt: list[int], max_tokens: int = 8) -> dict:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def test_b3_a_late_completion_frees_its_pages_without_any_new_traffic(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **settings()) as cluster:
        cluster.poison()
        cluster.faults("gen-0", late_s={"release": 3.0})
        started = time.monotonic()
        assert_equal(cluster, model, [prompt_of(5 * PAGE, 1)])
        assert time.monotonic() - started >= 3.0
        cluster.quiet(1.0)


def test_b14_two_of_each_start_with_defaults_on_one_host_and_a_taken_port_is_named(model, tmp_path):
    with LocalCluster(tmp_path / "four", model.spec, ctx=2, gen=2, **settings()) as cluster:
        assert_equal(cluster, model, [prompt_of(40, s) for s in range(8)])
        taken = cluster.operators.rsplit(":", 1)[1]
        config = tmp_path / "taken.yaml"
        config.write_text(yaml.safe_dump({**DEFAULTS, "model": model.spec, "operators_port": int(taken)}))
        command = [sys.executable, "-m", "tailrace.cluster.process", "router", "--config", str(config)]
        started = time.monotonic()
        ended = subprocess.run([*command, "--directory", str(tmp_path)], capture_output=True, text=True, timeout=20)
        assert ended.returncode != 0
        assert taken in ended.stderr
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("stream", [True, False])
def test_b23_prompts_of_clients_that_left_do_not_delay_a_short_one(model, tmp_path, stream):
    config = settings(max_num_tokens=32, max_batch_size=16, max_request_tokens=4000)
    with LocalCluster(tmp_path, model.spec, **config) as cluster:
        cluster.poison()
        short = prompt_of(10, 1)
        idle = min(seconds(answer, cluster, prompt_of(10, s), 1) for s in range(2, 7))
        alone = seconds(answer, cluster, prompt_of(3900, 99), 1)
        with ThreadPoolExecutor(5) as threads:
            gone = [threads.submit(leave, cluster, prompt_of(3900, 100 + s), stream, 0.1 * alone) for s in range(5)]
            for each in gone:
                each.result(30)
        took = seconds(answer, cluster, short, 1)
        chunk = alone / (3900 / 32)
        assert took < 5 * chunk + 2 * idle + 0.1, (took, chunk, idle, alone)
        assert took < alone / 2
        cluster.quiet(5)


def seconds(call, *args) -> float:
    started = time.monotonic()
    call(*args)
    return time.monotonic() - started


def leave(cluster: LocalCluster, prompt: list[int], stream: bool, after_s: float) -> None:
    """Ask and hang up after a while."""
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{cluster.base_url}/v1/completions", json={**body(prompt), "stream": stream}, timeout=after_s)


def test_b7_aborts_in_every_phase_leave_nothing_behind(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **settings()) as cluster:
        cluster.poison()
        for number in range(24):
            stop_after = 0.004 * number
            with pytest.raises(httpx.TimeoutException):
                httpx.post(
                    f"{cluster.base_url}/v1/completions",
                    json=body(prompt_of(300, number), 400),
                    timeout=0.005 + stop_after,
                )
        cluster.quiet(5)
        assert_equal(cluster, model, [prompt_of(30, 1)])


def test_a_killed_ctx_comes_back_with_a_new_boot_and_meanwhile_the_decoder_prefills(model, tmp_path):
    """B10 and the kill of ctx: gen's pid stays; answers go on by local prefill; the new ctx is paired and used."""
    with LocalCluster(tmp_path, model.spec, **settings()) as cluster:
        cluster.poison()
        gen = cluster.processes["gen-0"].pid
        for number in range(2):
            assert_equal(cluster, model, [prompt_of(40, 10 * number)])
            cluster.kill("ctx-0")
            assert_equal(cluster, model, [prompt_of(41, 10 * number + k) for k in range(4)])
            assert cluster.settled_metric("tailrace_local_prefills_total", reason="fallback") > 0
            cluster.start("ctx", "ctx-0")
            cluster.wait_ready(5)
            before = cluster.settled_metric("tailrace_prompt_positions_total", role="ctx")
            assert_equal(cluster, model, [prompt_of(42, 10 * number + 5)])
            assert cluster.settled_metric("tailrace_prompt_positions_total", role="ctx") > before
        assert cluster.processes["gen-0"].pid == gen and cluster.processes["gen-0"].alive
        cluster.quiet()


def test_requests_under_way_at_the_kill_of_a_ctx_are_answered(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **settings(max_num_tokens=32, max_batch_size=16)) as cluster:
        cluster.poison()
        prompts = [prompt_of(400, s) for s in range(8)]
        with ThreadPoolExecutor(8) as threads:
            begun = [threads.submit(answer, cluster, p) for p in prompts]
            time.sleep(0.15)
            cluster.kill("ctx-0")
            compare(model, prompts, [each.result(60) for each in begun]).check()


def test_a_killed_gen_ends_its_streams_with_one_error_event_and_new_ones_get_503_until_it_is_back(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **settings()) as cluster:
        cluster.poison()
        with cluster.streaming(prompt_of(40, 1), 2000, ignore_eos=True) as reply:
            events = sse_events(reply)
            for _ in range(5):
                next(events)
            cluster.kill("gen-0")
            rest = list(events)
        errors = [e for e in rest if '"error"' in e]
        assert len(errors) == 1 and rest[-1] == errors[0]
        assert "[DONE]" not in rest
        assert not any('"finish_reason":"stop"' in e for e in rest)
        until(lambda: cluster.post("/v1/completions", body(prompt_of(9, 2))).status_code == 503, 3, lambda: "no 503")
        reply = cluster.post("/v1/completions", body(prompt_of(9, 2)))
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        assert cluster.ready()["status"] == "unready"
        cluster.start("gen", "gen-0")
        cluster.wait_ready(10)
        assert_equal(cluster, model, [prompt_of(40, 3)])
        cluster.quiet()


def test_a_killed_router_stops_no_stream_and_no_worker(model, tmp_path):
    with LocalCluster(tmp_path, model.spec, **settings()) as cluster:
        cluster.poison()
        pids = {n: cluster.processes[n].pid for n in ("ctx-0", "gen-0", "ingress-0")}
        prompt = prompt_of(40, 1)
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(answer, cluster, prompt, 400)
            time.sleep(0.3)
            cluster.kill("router")
            time.sleep(0.3)
            held = ThreadPoolExecutor(1).submit(answer, cluster, prompt_of(30, 2))
            cluster.start("router", "router")
            cluster.wait_ready(10)
            compare(model, [prompt], [running.result(60)], 400)
            compare(model, [prompt_of(30, 2)], [held.result(30)]).check()
        assert_equal(cluster, model, [prompt_of(41, 3)])
        assert {n: cluster.processes[n].pid for n in pids} == pids
        assert all(cluster.processes[n].alive for n in pids)
        cluster.quiet()


def test_one_of_two_ingresses_killed_takes_only_its_own_connections(model, tmp_path):
    config = settings(request_lease_s=2.0)
    with LocalCluster(tmp_path, model.spec, ingress=2, **config) as cluster:
        cluster.poison()
        done = threading.Event()

        def stream_of_the_other() -> list[str]:
            with httpx.stream(
                "POST", f"{cluster.url('ingress-1')}/v1/completions",
                json={**body(prompt_of(40, 1), 300), "stream": True}, timeout=60,
            ) as reply:  # fmt: skip
                return list(sse_events(reply))

        with ThreadPoolExecutor(2) as threads:
            other = threads.submit(stream_of_the_other)
            with cluster.streaming(prompt_of(40, 2), 3000, ignore_eos=True) as reply:
                events = sse_events(reply)
                next(events)
                cluster.kill("ingress-0")
            assert other.result(60)[-1] == "[DONE]"
        done.set()
        cluster.counts["ingress"] = 1
        until(lambda: not cluster.disquiet(), 6, lambda: f"not quiet: {cluster.disquiet()}")
        cluster.start("ingress", "ingress-0")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_ctx_that_goes_on_later_lands_nothing_in_pages_of_others(model, tmp_path, transport):
    """B17: STOP P in the middle of a transfer; its request ends otherwise; after SIGCONT nothing late lands."""
    config = settings(transport, kv_transfer_timeout_s=2.0, request_lease_s=3.0)
    with LocalCluster(tmp_path, model.spec, ctx=2, **config) as cluster:
        cluster.poison()
        hold(cluster, 3)
        prompt = prompt_of(20 * PAGE, 1)
        with ThreadPoolExecutor(2) as threads:
            held = threads.submit(answer, cluster, prompt)
            until(lambda: cluster.metric("tailrace_transfers_in_flight", role="gen") == 1, 5, lambda: "no transfer")
            workers = cluster.workers()
            victim = max(("ctx-0", "ctx-1"), key=lambda n: workers[n]["pages"]["used"] or 0)
            cluster.stop(victim)
            cluster.faults("gen-0")
            other = "ctx-1" if victim == "ctx-0" else "ctx-0"
            cluster.faults(other)
            compare(model, [prompt], [held.result(40)]).check()
            more = [prompt_of(10 * PAGE, s) for s in range(20, 26)]
            given = answers(cluster, more)
            cluster.cont(victim)
            time.sleep(0.5)
            given += answers(cluster, more)
            compare(model, [*more, *more], given).check()
        cluster.faults(victim)
        cluster.quiet()


def test_e10_the_rank_dies_with_its_supervisor(model, tmp_path):
    """SIGKILL of a supervisor leaves no rank, no port and no shared memory that a new start would not clear."""
    config = tmp_path / "c.yaml"
    app = f"t{os.getpid()}_sup"
    config.write_text(yaml.safe_dump({**DEFAULTS, **settings(), "app_name": app, "model": model.spec}))
    command = [sys.executable, "-m", "tailrace.cluster.process", "ctx", "--supervised", "--config", str(config)]
    for _ in range(2):
        supervisor = subprocess.Popen([*command, "--directory", str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        assert '"ready": true' in line
        rank = int(line.split('"pid": ')[-1].split(",")[0].rstrip("}\n"))
        os.kill(supervisor.pid, signal.SIGKILL)
        supervisor.wait()
        supervisor.stdout.close()
        until(lambda: not os.path.exists(f"/proc/{rank}"), 10, lambda: f"rank {rank} lives on")  # noqa: B023
    left = [n for n in os.listdir("/dev/shm") if n.startswith(f"tailrace-{app}-")]
    assert len(left) == 1, f"each start clears what the killed one left: {left}"
    os.unlink(f"/dev/shm/{left[0]}")
