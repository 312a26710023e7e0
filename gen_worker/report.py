"""What a gen loop says of itself once a pass. Writes numbers down; decides nothing."""

from __future__ import annotations

from collections.abc import Collection

from tailrace.gen_worker.request import Request
from tailrace.gen_worker.scheduler import DecodeScheduler, Prefill
from tailrace.kv_cache.layout import Layout
from tailrace.transfer.loop_events import LoopStats


def report(
    stats: LoopStats,
    requests: Collection[Request],
    scheduler: DecodeScheduler,
    prefill: Prefill | None,
    layout: Layout,
    now: float,
) -> None:
    """Overwrite what the transfer thread reads."""
    blocked = [s for s in prefill or () if not s.pages]
    queued = [r.received for r in scheduler.waiting] + [s.received for s in blocked]
    stats.running = len(scheduler.running)
    stats.queued = len(queued)
    stats.queue_age_s = now - min(queued) if queued else 0.0
    stats.headroom_pages = scheduler.oldest_growth(requests) + sum(layout.num_pages(s.num_known + 1) for s in blocked)
    if prefill is not None:
        stats.prefill_tokens_queued = prefill.num_queued_tokens
        stats.prefill_tokens_per_s = prefill.tokens_per_s
    stats.stamp = now
