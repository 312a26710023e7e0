"""What operators and load balancers see of the router: readiness, the cluster page, and the router's own metrics.

Pure functions over the shared state; `/ready`, `/cluster`, `tailrace status` and the ingresses' answers all come from
here, so they tell the same truth.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from tailrace.router.placing import Placer
from tailrace.router.records import RouterState
from tailrace.router.workers import Worker
from tailrace.transfer.metrics import Metrics

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
        elif worker.no_capacity:
            lesser.append(f"no capacity: worker {worker.name} has work that waits and no room for it")
    for pool, asked in (("ctx", settings.ctx_replicas), ("gen", settings.gen_replicas)):
        there = sum(w.register.home == pool and w.condition(now, settings) == "ready" for w in workers)
        if there < asked:
            lesser.append(f"{there} of {asked} {pool} workers are ready")
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
        "pairs": [{"gen": g.name, "ctx": names[c], "gen_boot": g.boot, "ctx_boot": c} for g, c in usable],
        "drains": [w.name for w in workers if w.draining],
        "requests": dict(Counter(str(record.state) for record in state.records.values())),
        "queue": {
            "length": len(state.queue),
            "age_s": round(state.queue.age_s(now), 3),
            "next_grant_s": round(placer.next_grant_s(now), 3),
        },
        "unbound": len(state.unbound),
        "claims": claims(state),
        "ingresses": [{"process": i.process, "boot": i.boot, "linked": i.linked} for i in state.ingresses.values()],
        "counters": dict(state.counters) | {"worker_deaths": state.workers.deaths},
    }


def _worker(state: RouterState, placer: Placer, worker: Worker, now: float) -> dict[str, Any]:
    at, beat = worker.register, worker.heartbeat
    return {
        "name": at.worker,
        "boot": at.boot,
        "duty": at.duty,
        "address": f"{at.host}:{at.port}",
        "condition": worker.condition(now, state.settings),
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
        "load": {
            "prefill_tokens": state.prefill.total(at.boot),
            "seconds": round(placer.backlog_s(worker), 3),
            "pages": state.pages.total(at.boot),
            "seats": state.seats.total(at.boot),
            "unknown_requests": len(worker.foreign),
        },
    }


def claims(state: RouterState) -> dict[str, float]:
    """What is claimed now: predicted seconds of prefill, gen pages, seats. All zero when nothing is going on."""
    seconds = sum(
        state.prefill.total(worker.boot) / state.workers.rate(worker)
        for worker in state.workers
        if state.prefill.total(worker.boot)
    )
    return {
        "seconds": round(seconds, 6),
        "prefill_tokens": state.prefill.sum,
        "pages": state.pages.sum,
        "seats": state.seats.sum,
    }


def update_metrics(metrics: Metrics, state: RouterState, now: float) -> None:
    """Bring the router's own metrics up to date."""
    held = claims(state)
    metrics.add("tailrace_claims", held["seconds"], kind="seconds")
    metrics.add("tailrace_claims", held["pages"], kind="pages")
    metrics.add("tailrace_queue_length", len(state.queue))
    metrics.add("tailrace_queue_age_seconds", state.queue.age_s(now))
    metrics.add("tailrace_active_requests", len(state.records))
    stale = any(w.linked and w.condition(now, state.settings) == "silent" for w in state.workers)
    metrics.add("tailrace_stats_stale", float(stale))
    metrics.raise_to("tailrace_worker_restarts_total", state.workers.restarts)
    for name, (metric, labels) in _COUNTED.items():
        metrics.raise_to(metric, state.counters[name], **labels)
