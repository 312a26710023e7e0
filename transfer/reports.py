"""What a worker tells the router of itself, as frames made from plain values. No I/O."""

from __future__ import annotations

from tailrace.kv_cache.manager import KvManager
from tailrace.kv_cache.pool import PageCounts
from tailrace.transfer.loop_events import LoopStats
from tailrace.transfer.messages import Heartbeat, PairCost, PrefillSample, Register
from tailrace.transfer.node_config import NodeConfig


def register_frame(config: NodeConfig, port: int, kv: KvManager, epoch: int, router_boot: str) -> Register:
    """The first frame to a router. `port`: that the node listens on; epoch and router_boot: last accepted."""
    return Register(
        worker=config.worker,
        boot=config.boot,
        home=config.home,
        duty=config.duty,
        host=config.host,
        port=port,
        total_pages=kv.counts().total,
        tokens_per_page=kv.layout.tokens_per_page,
        max_num_tokens=config.max_num_tokens,
        max_request_tokens=config.max_request_tokens,
        compat=config.compat,
        epoch=epoch,
        router_boot=router_boot,
        max_batch_size=config.max_batch_size,
        state_pages=kv.layout.num_state_pages,
    )


def heartbeat_frame(
    config: NodeConfig,
    stats: LoopStats,
    counts: PageCounts,
    stamp_age_s: float,
    bytes_per_s: float,
    pairs: tuple[str, ...],
    codecs: tuple[tuple[str, str, str], ...],
    costs: tuple[PairCost, ...] = (),
) -> Heartbeat:
    """`bytes_per_s`: of transfers. `pairs`: boot ids that can be used. `codecs`: (boot, codec, why) of pairs."""
    return Heartbeat(
        worker=config.worker,
        boot=config.boot,
        phase=stats.phase,
        stamp_age_s=stamp_age_s,
        free_pages=counts.free + counts.cached,
        used_pages=counts.used,
        running=stats.running,
        queued=stats.queued,
        queue_age_s=stats.queue_age_s,
        prefill_tokens_queued=stats.prefill_tokens_queued,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        transfer_bytes_per_s=bytes_per_s,
        pairs=pairs,
        codecs=codecs,
        prefills=take_prefills(stats),
        costs=costs,
    )


def take_prefills(stats: LoopStats) -> tuple[PrefillSample, ...]:
    """What the loop has measured since the last call; it may be adding meanwhile."""
    return tuple(stats.prefills.popleft() for _ in range(len(stats.prefills)))
