"""What operators and load balancers see of the router: readiness, the cluster page, and the router's own metrics.

Pure functions over the shared state; `/ready`, `/cluster`, `tailrace status` and the ingresses' answers all come from
here, so they tell the same truth.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter
from typing import Any

from tailrace.router import local_prefill
from tailrace.router.placing import Placer
from tailrace.router.records import RouterState
from tailrace.router.worker import Worker
from tailrace.transfer.metrics import Metrics

TENANTS_SHOWN, TENANT_CHARS = 32, 64
WAITS_S = 0.5  # who waits longer for a place waits because there is none

# Our counters -> (metric, labels).
_COUNTED: dict[str, tuple[str, dict[str, str]]] = {
    "local_chosen": ("tailrace_local_prefills_total", {"reason": "chosen"}),
    "local_fallback": ("tailrace_local_prefills_total", {"reason": "fallback"}),
    "stale_frames": ("tailrace_stale_frames_total", {}),
}


def ready(state: RouterState, now: float) -> dict[str, Any]:
    """{status: ready | degraded | unready, reasons, max_request_tokens}.

    unready: a new request would be refused. degraded: it would be served, but not by all that should be there, or late.
    max_request_tokens: the least over all workers of both duties, 0 while none is there.
    """
    settings, workers = state.settings, list(state.workers)
    gens, prefillers = state.workers.decoders(now), state.workers.prefillers(now)
    fatal, lesser = [], []
    if not state.serving(now):
        fatal.append("the router has just started and listens for workers")
    if not gens:
        fatal.append("no gen worker is there")
    ctxs = [w for w in prefillers if not w.decodes]
    if not prefillers:
        (fatal if settings.local_prefill == "never" else lesser).append("no ctx worker is there")
    elif gens and ctxs == prefillers and not any(state.paired(g, c.boot) for g in gens for c in ctxs):
        fatal.append("no gen worker is paired with a ctx worker")
    for worker in workers:
        condition = worker.condition(now, settings)
        if condition != "ready":
            lesser.append(f"worker {worker.name} is {condition}")
        elif state.workers.breakers.state(worker.name, now) == "open":
            lesser.append(f"worker {worker.name} failed several requests: its breaker is open")
        elif worker.no_capacity:
            lesser.append(f"no capacity: worker {worker.name} has work that waits and no room for it")
    for pool, asked in (("ctx", settings.ctx_replicas), ("gen", settings.gen_replicas)):
        there = sum(w.register.home == pool and w.condition(now, settings) == "ready" for w in workers)
        if there < asked:
            lesser.append(f"{there} of {asked} {pool} workers are ready")
    if state.queue.age_s(now) > WAITS_S:
        lesser.append(f"no capacity: {len(state.queue)} waiting for a place")
    if state.queue.full:
        lesser.append("the queue of waiting requests is full")
    status = "unready" if fatal else "degraded" if lesser else "ready"
    limit = min((w.register.max_request_tokens for w in (*gens, *prefillers)), default=0)
    return {"status": status, "reasons": [*fatal, *lesser], "max_request_tokens": limit}


def cluster(state: RouterState, placer: Placer, now: float) -> dict[str, Any]:
    """Pools, pages, pairs, drains, epoch, requests, claims: everything the router believes, as JSON."""
    workers = list(state.workers)
    pools: dict[str, dict[str, Any]] = {}
    for worker in workers:
        pool = pools.setdefault(worker.register.home, {"workers": [], "pages": {"total": 0, "free": 0, "used": 0}})
        pool["workers"].append(_worker(state, placer, worker, now))
        pool["pages"]["total"] += worker.register.total_pages
        if worker.heartbeat is not None:
            pool["pages"]["free"] += worker.heartbeat.free_pages
            pool["pages"]["used"] += worker.heartbeat.used_pages
    names = {w.boot: w.name for w in workers}
    usable = [(g, c) for g in workers for c in sorted(g.pairs) if c in names]
    return {
        "router": {
            "boot": state.boot,
            "epoch": state.epoch.number,
            "serving": state.serving(now),
            "uptime_s": round(now - state.started, 3),
        },
        "ready": ready(state, now),
        "pools": pools,
        "pairs": [
            {"gen": g.name, "ctx": names[c], "gen_boot": g.boot, "ctx_boot": c, **_codec(state, g.boot, c)}
            for g, c in usable
        ],
        "drains": [w.name for w in workers if w.draining],
        "requests": dict(Counter(str(record.state) for record in state.records.values())),
        "queue": {
            "length": len(state.queue),
            "migrations": len(state.migrations),
            "age_s": round(state.queue.age_s(now), 3),
            "next_grant_s": round(placer.next_grant_s(now), 3),
        },
        "tenants": tenants(state),
        "unbound": len(state.unbound),
        "prefixes": {"blocks": len(state.blocks), "conversations": len(state.conversations)},
        "claims": claims(state),
        "ingresses": [{"process": i.process, "boot": i.boot, "linked": i.linked} for i in state.ingresses.values()],
        "counters": dict(state.counters) | {"worker_deaths": state.workers.deaths},
    }


def _codec(state: RouterState, gen: str, ctx: str) -> dict[str, str]:
    """What the pages of a pair go through and why, by gen; what ctx chose, where it may."""
    said: dict[str, str] = {}
    for here, peer in ((gen, ctx), (ctx, gen)):
        worker = state.workers.get(here)
        for boot, codec, reason in worker.heartbeat.codecs if worker and worker.heartbeat else ():
            if boot == peer and (not said or said["codec"].startswith("auto")):
                said = {"codec": codec, "codec_reason": reason}
    return said


def _worker(state: RouterState, placer: Placer, worker: Worker, now: float) -> dict[str, Any]:
    at, beat = worker.register, worker.heartbeat
    return {
        "name": at.worker,
        "boot": at.boot,
        "duty": at.duty,
        "address": f"{at.host}:{at.port}",
        "condition": worker.condition(now, state.settings),
        "breaker": state.workers.breakers.state(worker.name, now),
        "phase": beat.phase if beat else "unknown",
        "heard_s_ago": round(now - worker.heard_at, 3),
        "stamp_age_s": round(beat.stamp_age_s, 3) if beat else None,
        "pages": {
            "total": at.total_pages,
            "free": beat.free_pages if beat else None,
            "used": beat.used_pages if beat else None,
        },
        "running": beat.running if beat else 0,
        "queued": beat.queued if beat else 0,
        "queue_age_s": round(beat.queue_age_s, 3) if beat else 0.0,
        "prefill": _prefill(state, worker),
        "local_prefill": _local(state, placer, worker),
        "cached_blocks": state.blocks.num_held(at.boot),
        "load": {
            "prefill_tokens": state.prefill.total(at.boot),
            "seconds": round(placer.backlog_s(worker), 3),
            "pages": state.pages.total(at.boot),
            "seats": state.seats.total(at.boot),
            "unknown_requests": len(worker.foreign),
        },
    }


def _prefill(state: RouterState, worker: Worker) -> dict[str, Any]:
    """What predicts its prefills, and how wrong that has been."""
    each, a_token, a_pair, of_others = state.workers.coefficients(worker)
    return {
        "samples": worker.fit.num_samples,
        "error_ratio": round(worker.fit.error, 3) if worker.fit.num_samples else None,
        "seconds": {"request": each, "token": a_token, "token_pair": a_pair, "token_of_others": of_others},
    }


def _local(state: RouterState, placer: Placer, worker: Worker) -> dict[str, Any] | None:
    """Up to how many tokens that it lacks a gen computes itself, and why; None for who always or never does."""
    if worker.register.duty != "gen":
        return None
    settings = state.settings
    if settings.local_prefill == "never" or settings.local_prefill_max_tokens is not None:
        most = 0 if settings.local_prefill == "never" else settings.local_prefill_max_tokens
        return {"max_tokens": most, "why": "as configured"}
    view = placer.alone.view(worker)
    return {"max_tokens": local_prefill.threshold(view), "why": local_prefill.reason(view)}


def blocks(state: RouterState) -> dict[str, dict[str, Any]]:
    """Worker name -> what the block index believes that it has cached, as a count and a digest of the whole set."""
    found = {}
    for worker in state.workers:
        held = state.blocks.held(worker.boot)
        digest = hashlib.sha256(b"".join(sorted(n + key for n, keys in held.items() for key in keys)))
        count, follows = sum(map(len, held.values())), state.feed.follows(worker.boot)
        found[worker.name] = {"blocks": count, "digest": digest.hexdigest(), "follows": follows}
    return found


def tenants(state: RouterState) -> list[dict[str, Any]]:
    """The busiest tenants: what of each waits and runs, and the tokens it was served by this router."""
    busiest = heapq.nlargest(TENANTS_SHOWN, state.tenants, key=lambda t: (t.waiting + t.running, t.served))
    return [
        {
            "name": tenant.name[:TENANT_CHARS],
            "weight": tenant.weight,
            "waiting": tenant.waiting,
            "running": tenant.running,
            "served_tokens": tenant.served,
        }
        for tenant in busiest
    ]


def claims(state: RouterState) -> dict[str, float]:
    """What is claimed now: predicted seconds of prefill, gen pages, seats. All zero when nothing is going on."""
    return {
        "seconds": round(sum(map(state.claimed_s, state.workers)), 6),
        "prefill_tokens": state.prefill.sum,
        "pages": state.pages.sum,
        "seats": state.seats.sum,
        "rows": state.rows.sum,
    }


def update_metrics(metrics: Metrics, state: RouterState, now: float) -> None:
    """Bring the router's own metrics up to date."""
    held = claims(state)
    metrics.add("tailrace_claims", held["seconds"], kind="seconds")
    metrics.add("tailrace_claims", held["pages"], kind="pages")
    while state.workers.prediction_errors:
        metrics.add("tailrace_prefill_prediction_error_ratio", state.workers.prediction_errors.popleft())
    metrics.add("tailrace_queue_length", len(state.queue) + len(state.migrations))
    metrics.add("tailrace_queue_age_seconds", max(state.queue.age_s(now), state.migrations.age_s(now)))
    metrics.add("tailrace_active_requests", len(state.records))
    stale = any(w.linked and w.condition(now, state.settings) == "silent" for w in state.workers)
    metrics.add("tailrace_stats_stale", float(stale))
    metrics.raise_to("tailrace_worker_restarts_total", state.workers.restarts)
    metrics.raise_to("tailrace_breaker_trips_total", state.workers.breakers.trips)
    for worker in state.workers:
        closed = state.workers.breakers.state(worker.name, now) == "closed"
        metrics.add("tailrace_breaker_open", float(not closed), peer=worker.name)
    for name, (metric, labels) in _COUNTED.items():
        metrics.raise_to(metric, state.counters[name], **labels)
