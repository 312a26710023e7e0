"""What operators see: readiness with its reasons, the cluster page, the router's own metrics."""

from __future__ import annotations

import json

import pytest
from router_scene import Scene

from tailrace.router import view
from tailrace.router.tenants import Share
from tailrace.transfer.metrics import Metrics


def ready(scene):
    answer = view.ready(scene.state, scene.now)
    return answer["status"], answer["reasons"]


def test_a_paired_cluster_is_ready_and_knows_its_least_limit():
    scene = Scene(ctx_replicas=1, gen_replicas=1)
    scene.cluster(1, 1)
    assert view.ready(scene.state, scene.now) == {"status": "ready", "reasons": [], "max_request_tokens": 4096}


def test_a_router_that_has_just_started_is_unready():
    scene = Scene(settle=False)
    scene.cluster(1, 1)
    assert ready(scene)[0] == "unready" and "listens" in ready(scene)[1][0]


@pytest.mark.parametrize(
    ("settings", "break_it", "status", "reason"),
    [
        ({}, lambda s: s.core.declare_dead("gen-0-boot", ""), "unready", "no gen worker"),
        ({}, lambda s: s.core.declare_dead("ctx-0-boot", ""), "degraded", "no ctx worker"),
        (
            {"local_prefill": "never"},
            lambda s: s.core.declare_dead("ctx-0-boot", ""), "unready", "no ctx worker",
        ),
        ({}, lambda s: s.pair(ctxs=[]), "unready", "paired"),
        ({"ctx_replicas": 2}, lambda s: None, "degraded", "1 of 2 ctx"),
        ({}, lambda s: s.worker("gen-1", "gen", phase="load"), "degraded", "gen-1 is loading"),
        ({}, lambda s: s.worker("gen-1", "gen", stamp_age_s=60.0), "degraded", "gen-1 is stuck"),
        ({}, lambda s: s.beat("ctx-0-boot", free_pages=0), "degraded", "no capacity: worker ctx-0"),
        ({}, lambda s: s.beat("ctx-0-boot", queued=1, queue_age_s=1.0), "degraded", "no capacity: worker ctx-0"),
        ({}, lambda s: s.beats.clear() or s.wait(2.0), "degraded", "ctx-0 is silent"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(settings, break_it, status, reason):
    scene = Scene(**settings)
    scene.cluster(1, 1)
    break_it(scene)
    assert ready(scene)[0] == status and any(reason in r for r in ready(scene)[1])


def test_a_busy_worker_with_a_queue_has_capacity():
    scene = Scene()
    scene.cluster(1, 1)
    scene.beat("ctx-0-boot", queued=5, running=3, queue_age_s=9.0)
    assert ready(scene) == ("ready", [])


def test_a_full_queue_is_told():
    scene = Scene(max_waiting=1)
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100), scene.place(tokens=100)
    assert ready(scene) == ("degraded", ["the queue of waiting requests is full"])


def test_requests_that_wait_for_a_place_are_told_as_missing_capacity():
    """B2."""
    scene = Scene()
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100), scene.place(tokens=100)
    assert ready(scene) == ("ready", [])
    scene.wait(0.7)
    assert ready(scene) == ("degraded", ["no capacity: 1 waiting for a place"])


def test_the_cluster_page_is_json_and_shows_load_and_claims():
    scene = Scene()
    scene.cluster(2, 1)
    key = scene.place(tokens=100)
    scene.place(tokens=50)
    scene.bind(key)
    page = json.loads(json.dumps(view.cluster(scene.state, scene.core.placer, scene.now)))
    assert page["requests"] == {"reading": 1, "placed": 1}
    assert page["claims"]["seconds"] == pytest.approx(0.05) and page["claims"]["pages"] == 4
    (gen,) = page["pools"]["gen"]["workers"]
    assert gen["load"]["seats"] == 1 and page["pools"]["ctx"]["pages"]["total"] == 200
    assert len(page["pairs"]) == 2 and page["router"]["epoch"] == 1


def test_the_cluster_page_says_what_a_pairs_pages_go_through_and_why():
    scene = Scene()
    (ctx,), (near, far) = scene.cluster(1, 2)
    scene.beat(near, codecs=((ctx, "raw", "there is no wire"),))
    scene.beat(far, codecs=((ctx, "auto(raw,int8)", "configured"),))
    scene.beat(ctx, codecs=((far, "int8", "at 0.10 GB/s of wire"), ("long-dead", "int4", "configured")))
    page = view.cluster(scene.state, scene.core.placer, scene.now)
    found = {pair["gen"]: (pair["codec"], pair["codec_reason"]) for pair in page["pairs"]}
    assert found == {"gen-0": ("raw", "there is no wire"), "gen-1": ("int8", "at 0.10 GB/s of wire")}


def test_the_routers_metrics_follow_its_claims_and_warn_of_stale_workers():
    scene = Scene(local_prefill_max_tokens=20)
    scene.cluster(1, 1)
    metrics = Metrics("router", "router-0", "tiny")
    key, local = scene.place(tokens=100), scene.place(tokens=10)
    view.update_metrics(metrics, scene.state, scene.now)
    assert metrics.value("tailrace_claims", kind="seconds") == pytest.approx(0.11)
    assert metrics.value("tailrace_local_prefills_total", reason="chosen") == 1
    assert metrics.value("tailrace_stats_stale") == 0
    scene.done(key), scene.done(local)
    scene.beats.clear()
    scene.wait(2.0)
    view.update_metrics(metrics, scene.state, scene.now)
    assert metrics.value("tailrace_claims", kind="seconds") == metrics.value("tailrace_claims", kind="pages") == 0
    assert metrics.value("tailrace_stats_stale") == 1


def test_the_cluster_page_shows_the_busiest_tenants_and_cuts_their_names():
    scene = Scene(tenants={"big": Share(4.0)})
    scene.cluster(1, 1, total=10)
    scene.place(tokens=100, tenant="big")
    scene.place(tokens=100, tenant="big")
    for number in range(40):
        scene.done(scene.place(tokens=100, tenant=f"{number}" + "x" * 100), "cancelled")
    shown = view.cluster(scene.state, scene.core.placer, scene.now)["tenants"]
    assert shown[0] == {"name": "big", "weight": 4.0, "waiting": 1, "running": 1, "served_tokens": 0}
    assert len(shown) == 32 and max(len(tenant["name"]) for tenant in shown) == 64
