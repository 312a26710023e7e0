"""What a node measures: gauges set before each report, and the rate of its transfers. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from tailrace.kv_cache.pool import PageCounts
from tailrace.transfer.loop_events import LoopStats
from tailrace.transfer.metrics import Metrics
from tailrace.transfer.transports.base import ChunkCounts

_OLD = 0.8  # weight of what was measured before


class TransferRate:
    """Bytes a second over the time in which reads were under way, smoothed; 0 until measured."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._running = 0
        self._since = 0.0

    def started(self, now: float) -> None:
        if self._running == 0:
            self._since = now
        self._running += 1

    def ended(self, nbytes: int, now: float) -> None:
        """A read is over; the time since the last one ended, or since the first began, is what it took."""
        self._running -= 1
        seconds, self._since = now - self._since, now
        if nbytes and seconds > 0:
            rate = nbytes / seconds
            self.bytes_per_s = rate if self.bytes_per_s == 0 else _OLD * self.bytes_per_s + (1 - _OLD) * rate


def set_page_gauges(metrics: Metrics, counts: PageCounts) -> None:
    for state in ("free", "cached", "held", "pinned", "quarantined", "total"):
        metrics.add("tailrace_pages", getattr(counts, state), pool="kv", state=state)


def set_loop_gauges(metrics: Metrics, stats: LoopStats) -> None:
    """Gauges and counters of the worker's loop."""
    metrics.add("tailrace_queue_length", stats.queued)
    metrics.add("tailrace_queue_age_seconds", stats.queue_age_s)
    metrics.add("tailrace_active_requests", stats.running + stats.queued)
    metrics.raise_to("tailrace_prefix_hit_tokens_total", stats.prefix_hit_tokens)
    metrics.raise_to("tailrace_prompt_positions_total", stats.prompt_positions, kind="computed")
    metrics.raise_to("tailrace_prompt_positions_total", stats.recomputed_positions, kind="recomputed")
    if stats.replayed_positions:
        metrics.raise_to("tailrace_prompt_positions_total", stats.replayed_positions, kind="replayed")
    metrics.raise_to("tailrace_output_tokens_total", stats.output_tokens)
    metrics.raise_to("tailrace_preemptions_total", stats.preemptions)
    if stats.drafts_verified:
        metrics.raise_to("tailrace_draft_tokens_total", stats.drafts_verified, result="proposed")
        metrics.raise_to("tailrace_draft_tokens_total", stats.drafts_accepted, result="accepted")
    for reason, number in tuple(stats.undrafted.items()):
        metrics.raise_to("tailrace_undrafted_requests_total", number, reason=reason)
    for result in ("equal", "different", "skipped"):
        number = getattr(stats, f"shadow_{result}")
        if number:
            metrics.raise_to("tailrace_shadow_checks_total", number, result=result)
    if stats.shadow_seconds:
        metrics.raise_to("tailrace_shadow_check_seconds_total", stats.shadow_seconds)


def set_transfer_gauges(metrics: Metrics, in_flight: int, queued: int, age_s: float) -> None:
    metrics.add("tailrace_transfers_in_flight", in_flight)
    metrics.add("tailrace_transfer_queue_length", queued)
    metrics.add("tailrace_transfer_queue_age_seconds", age_s)


def set_chunk_gauges(metrics: Metrics, counts: Iterable[ChunkCounts]) -> None:
    every = list(counts)
    if sum(c.total for c in every):
        for state in ("free", "granted", "unpacking", "total"):
            metrics.add("tailrace_landing_chunks", sum(getattr(c, state) for c in every), state=state)


def set_pair_gauges(metrics: Metrics, ready: int, refused: int, wanted: int) -> None:
    metrics.add("tailrace_pairs", ready, state="ready")
    metrics.add("tailrace_pairs", refused, state="refused")
    metrics.add("tailrace_pairs", wanted - ready - refused, state="missing")
