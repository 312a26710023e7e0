"""Cases B10 to B13 and the row of refused peers: who may be paired with whom, at which address, and from when on."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from equal import Model, answer, answers, assert_equal, compare, prompt_of, tiny
from fault_cases import (
    NIXL_FIRST,
    PAGE,
    SHM_FIRST,
    back_at_its_port,
    body,
    canary,
    idle_latency,
    said,
    settings,
)
from harness import LocalCluster, until

from tailrace.model.source import open_source
from tailrace.transfer.messages import PROTOCOL_VERSION

ODD = str(Path(__file__).parent.parent / "odd_process.py")
LEASES = {"pin_lease_s": 1.0, "request_lease_s": 3.0, "kv_transfer_timeout_s": 5.0, "max_request_tokens": 1000}
both = pytest.mark.parametrize("transport", NIXL_FIRST)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


def ask(cluster: LocalCluster, seed: int) -> httpx.Response:
    return cluster.post("/v1/completions", body(prompt_of(3 * PAGE, seed)))


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b11_gens_that_are_replaced_at_their_addresses_are_served_by_ctx_workers_that_nobody_touched(
    model, tmp_path, transport
):
    """2P2D, both D killed under traffic, others on the same ports. In between: errors, and never an empty answer."""
    config = settings(transport, **LEASES, local_prefill="never")
    with LocalCluster(tmp_path, model.spec, ctx=2, gen=2, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(8)])
        idle, pids = idle_latency(cluster), {n: cluster.processes[n].pid for n in ("ctx-0", "ctx-1")}
        with ThreadPoolExecutor(8) as threads:
            begun = [threads.submit(ask, cluster, s) for s in range(10, 18)]
            cluster.kill("gen-0"), cluster.kill("gen-1")
            begun += [threads.submit(ask, cluster, s) for s in range(20, 36)]
            back_at_its_port(cluster, "gen-0", "gen-1")
            ready = time.monotonic()
            while any(ask(cluster, s).status_code != 200 for s in range(40, 44)):
                assert time.monotonic() - ready < 10
            replies = [each.result(30) for each in begun]
        for reply in replies:
            if reply.status_code == 200:
                assert reply.json()["usage"]["completion_tokens"] == 8, reply.text
            else:
                assert 500 <= reply.status_code < 600, reply.text
                assert reply.json()["error"]["message"] and reply.json()["error"]["code"], reply.text
        cluster.wait_ready(10)
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(50, 74)])
        assert {n: cluster.processes[n].pid for n in pids} == pids and all(cluster.processes[n].alive for n in pids)
        cluster.quiet()
        canary(cluster, model, idle)


@pytest.mark.parametrize("transport", NIXL_FIRST)
def test_b12_a_ctx_that_has_its_pages_ready_only_later_is_asked_again_until_it_has(model, tmp_path, transport):
    """For 3 s it answers with nothing to read from. The pair is tried again, requests are refused and then served."""
    config = settings(transport, **LEASES, local_prefill="never")
    cluster = LocalCluster(tmp_path, model.spec, ctx=0, programs={"ctx-0": [ODD, "late_pool=3"]}, **config)
    with cluster:
        cluster.start("ctx", "ctx-0")
        started = time.monotonic()
        assert cluster.ready()["status"] == "unready"
        reply = ask(cluster, 1)
        assert time.monotonic() - started < 3, "paired before it had pages"
        assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1, reply.text
        cluster.wait_ready(8)
        assert time.monotonic() - started > 2.5
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(8)])
        assert said(cluster, "gen-0", "pair_not_made")
        assert cluster.metric("tailrace_local_prefills_total") == 0
        cluster.quiet()


@pytest.mark.parametrize("transport", SHM_FIRST)
def test_b13_a_ctx_that_tells_a_wrong_address_is_not_taken_for_the_one_there_and_others_serve_on(
    model, tmp_path, transport
):
    """At the address that ctx-1 tells, ctx-0 listens on the same port; at that of ctx-2 nobody does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = str(probe.getsockname()[1])
    options = {"ctx-0": ["--host", "127.0.0.2", "--port", port], "ctx-1": ["--host", "127.0.0.4", "--port", port]}
    options |= {"ctx-2": ["--host", "127.0.0.5"], "gen-0": ["--host", "127.0.0.3"]}
    programs = {"ctx-1": [ODD, "tells=127.0.0.2"], "ctx-2": [ODD, "tells=127.0.0.6"]}
    config = settings(transport, **LEASES, local_prefill="never")
    with LocalCluster(tmp_path, model.spec, ctx=3, options=options, programs=programs, **config) as cluster:
        cluster.poison()
        assert_equal(cluster, model, [prompt_of(3 * PAGE, s) for s in range(12)])
        boots = {name: cluster.processes[name].ready["boot"] for name in cluster.processes}
        assert said(cluster, "gen-0", f"expected boot {boots['ctx-1']}", f"found boot {boots['ctx-0']}")
        assert said(cluster, "gen-0", "no link to 127.0.0.6")
        assert [(p["gen"], p["ctx"]) for p in cluster.info()["pairs"]] == [("gen-0", "ctx-0")]
        one_token = answers(cluster, [prompt_of(PAGE, s) for s in range(20, 32)], 1)  # these need no pair
        compare(model, [prompt_of(PAGE, s) for s in range(20, 32)], one_token, 1).check()
        assert all(p.alive for p in cluster.processes.values())
        cluster.quiet()


@pytest.mark.parametrize("transport", SHM_FIRST)
def test_a_peer_of_another_protocol_model_or_layout_is_refused_by_both_values_and_disturbs_nobody(
    model, tmp_path, transport
):
    """Five that do not fit join a pair that streams: none is paired, none ends, each is told why, and so are we."""
    twin = tiny(tmp_path / "twin", "llama", seed=7)
    mine, theirs = (open_source(m.spec).revision for m in (model, twin))
    programs = {"gen-1": [ODD, "protocol=99"], "gen-3": [ODD, "window=99"]}
    programs |= {"ctx-1": [ODD, "window=98"], "gen-4": [ODD, "links_protocol=99"]}
    misfits = {"gen-1": ("protocol", "99", str(PROTOCOL_VERSION)), "gen-2": ("model", mine, theirs)}
    misfits |= {"gen-3": ("groups[0].window", "99", "None"), "ctx-1": ("groups[0].window", "98", "None")}
    config = settings(transport, **LEASES)
    cluster = LocalCluster(
        tmp_path / "c", model.spec, programs=programs, per_process={"gen-2": {"model": twin.spec}}, **config
    )
    with cluster:
        cluster.poison()
        prompt, over = prompt_of(40, 1), []
        with ThreadPoolExecutor(1) as threads:
            stream = threads.submit(_stream_until, cluster, over)
            try:
                for name in (*misfits, "gen-4"):
                    cluster.launch(name.split("-")[0], name)
                for name in (*misfits, "gen-4"):
                    cluster.processes[name].await_ready(time.monotonic() + 60)
                for name, words in misfits.items():
                    for side in (name, "gen-0" if name.startswith("ctx") else "ctx-0"):
                        _wait_for(cluster, side, "pair_refused", *words)
                for side in ("router", "gen-4"):
                    _wait_for(cluster, side, "protocol version differs", str(PROTOCOL_VERSION), "99")
            finally:
                over.append(True)
            assert stream.result(30) > 0
        assert_equal(cluster, model, [prompt, *(prompt_of(40, s) for s in range(2, 18))])
        assert [(p["gen"], p["ctx"]) for p in cluster.info()["pairs"]] == [("gen-0", "ctx-0")]
        assert all(p.alive for p in cluster.processes.values())
        assert cluster.metric("tailrace_local_prefills_total") == 0
        cluster.quiet()


def _wait_for(cluster: LocalCluster, side: str, *words: str) -> None:
    until(lambda: said(cluster, side, *words), 5, lambda: f"{side} has not said {words}")


def _stream_until(cluster: LocalCluster, over: list[bool]) -> int:
    """Answers one after the other, each equal to the first; how many there were."""
    first, count = answer(cluster, prompt_of(30, 99), 60)["token_ids"], 0
    while not over:
        assert answer(cluster, prompt_of(30, 99), 60)["token_ids"] == first
        count += 1
    return count
