"""What a rank process is made of: arena, model, pool, engine, transfer thread and loop, put together for ctx or gen.

The one place where the rooms meet. It decides nothing: sizes come from cluster/sizes.py, everything else from the
parts. `load`, `warm_up`, `start`, `run` and `close` are called once each, in this order, from the main thread.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.progress import Phase
from tailrace.cluster.sizes import Sizes, derive
from tailrace.cluster.spec import RankSpec, new_boot
from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.engine import TORCH_DTYPES, Engine, pool_tensor
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.kv_cache.arena import Arena, arena_name, unlink_earlier
from tailrace.kv_cache.manager import KvManager
from tailrace.model.decoder import Decoder
from tailrace.model.source import ModelSource, open_source
from tailrace.model.weights import load_weights
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.messages import PROTOCOL_VERSION, CompatRecord
from tailrace.transfer.node import Node
from tailrace.transfer.switchboard import NodeConfig
from tailrace.transfer.transports.base import PageHook, Transport, Wake
from tailrace.transfer.transports.nixl import ChunkConfig, NixlTransport
from tailrace.transfer.transports.shm import ShmTransport

log = logging.getLogger(__name__)

CODECS = ("raw",)
STAGING_CHUNKS = 4
# On a CPU a token costs 0.75 ms in a pass of 64 tokens, 0.68 in one of 128 and 0.66 in one of 512.
FULL_PASS_TOKENS = 128


def arena_owner(worker: str, secret: bytes) -> str:
    """The worker's part of its arenas' names. Two applications of one name on one host differ by their secrets, so a
    worker of one never unlinks the memory of the other's namesake."""
    return f"{worker}.{hashlib.sha256(secret).hexdigest()[:8]}"


def compat_record(config: TailraceConfig, source: ModelSource, sizes: Sizes, kv: torch.Tensor) -> CompatRecord:
    """What a peer must have alike. `kv`: the allocated pages, [num_pages, layer, field, kv_head, token, dim]."""
    group = sizes.layout.group
    names = ",".join(field.name for field in group.fields)
    shape = "x".join(str(n) for n in kv.shape[1:])
    description = (
        f"{group.kind} of layers {group.layers[0]}-{group.layers[-1]}, fields {names}, page {shape} {kv.dtype}"
    )
    if group.window is not None:
        description += f", window {group.window}"
    return CompatRecord(
        protocol=PROTOCOL_VERSION,
        model=source.revision,
        dtype=config.dtype,
        tokens_per_page=config.tokens_per_page,
        block_tokens=config.block_tokens,
        groups=(description,),
        page_bytes=(kv[0].numel() * kv.element_size(),),
        tp=1,
        codecs=CODECS,
    )


class Worker:
    """One rank. See the module for the order of calls."""

    def __init__(
        self, spec: RankSpec, config: TailraceConfig, *, threads: int, progress: Callable[[Phase, float], None]
    ) -> None:
        self.spec, self.config, self.boot = spec, config, new_boot()
        self._threads, self._progress = threads, progress
        self._arena: Arena | None = None
        self.node: Node | None = None

    def load(self) -> None:
        """Arena, weights, pool and engine."""
        config, spec = self.config, self.spec
        torch.set_num_threads(self._threads)
        self.source = open_source(config.model)
        self.sizes = derive(config, self.source.config)
        owner = arena_owner(spec.name, spec.secret.encode())
        earlier = unlink_earlier(config.app_name, owner)
        if earlier:
            log.info("earlier_arenas_unlinked", extra={"fields": {"names": earlier}})
        layout, num_pages = self.sizes.layout, self.sizes.num_pages(spec.role)
        self._arena = Arena.create(arena_name(config.app_name, owner, self.boot), layout, num_pages)
        weights = load_weights(
            self.source,
            dtype=TORCH_DTYPES[config.dtype],
            quantized=config.weights == "quantized" and spec.role == "gen",  # prefills have too many rows to gain
            progress=lambda done, total: self._progress("load", done / total),
        )
        self.kv = KvManager(layout, num_pages, config.block_tokens, self._arena.generations)
        pages = pool_tensor(self._arena.pages, layout)
        self.engine = Engine(Decoder(weights), pages)
        self.compat = compat_record(config, self.source, self.sizes, pages)

    def warm_up(self) -> None:
        """Run every shape of step once, so that no request waits for it."""
        self._progress("compile", 0.0)
        self.engine.warm_up(self.config.max_num_tokens, self.config.max_batch_size)

    def start(self) -> tuple[str, int]:
        """Start the transfer thread and make the loop; returns the address that peers, router and ingresses dial."""
        config, spec = self.config, self.spec
        node = NodeConfig(
            worker=spec.name,
            boot=self.boot,
            home=spec.role,
            duty=spec.role,
            host=spec.host,
            secret=spec.secret.encode(),
            compat=self.compat,
            max_num_tokens=config.max_num_tokens,
            max_request_tokens=self.sizes.max_request_tokens,
            model=config.model_name or self.source.name,
            transport=config.transport,
            core=CoreConfig(
                pin_lease_s=config.pin_lease_s,
                request_lease_s=config.request_lease_s,
                kv_transfer_timeout_s=config.kv_transfer_timeout_s,
                retry_failed_transfers=config.transfer_failure_policy == "recompute",
                prompt_tail_tokens=config.gen_prompt_tail_tokens,
            ),
            heartbeat_s=config.heartbeat_s,
            report_s=config.stats_period_s,
            faults=config.faults,
        )
        self.node = Node(node, self.kv, self._transports)
        address = self.node.start()
        self.loop = self._loop()
        return address

    def run(self, stop: threading.Event) -> None:
        """Passes until `stop`; raises what a pass or the transfer thread raised."""
        self.loop.run(stop)

    def close(self) -> None:
        """Orderly end, of whatever was begun: links closed, the arena's name removed."""
        if self.node is not None:
            self.node.stop()
        if self._arena is not None:
            self._arena.unlink()

    # ---------------------------------------------------------------------------------------------- from other threads

    @property
    def loop_stamp(self) -> float:
        """Monotonic time of the loop's last pass."""
        return 0.0 if self.node is None else self.node.loop_stats.stamp

    @property
    def idle(self) -> bool:
        """Whether nothing is held here for anybody."""
        return self.node is None or self.node.idle

    def set_router(self, entry: dict[str, Any]) -> None:
        """Where the directory says the router is."""
        if self.node is not None:
            self.node.set_router(entry["host"], entry["port"], entry["boot"])

    def drain(self, limit_s: float) -> None:
        """Take nothing new."""
        if self.node is not None:
            self.node.drain(limit_s)

    # ------------------------------------------------------------------------------------------------------------ parts

    def _transports(self, wake: Wake, hook: PageHook | None) -> list[Transport]:
        """In order of preference: within a host shared memory, between hosts nixl, where it is installed."""
        config, made = self.config, []
        assert self._arena is not None
        if config.transport in ("auto", "shm"):
            made.append(ShmTransport(self._arena, wake=wake, hook=hook))
        if config.transport == "nixl" or (config.transport == "auto" and importlib.util.find_spec("nixl")):
            reads = self.spec.role == "gen"
            chunks = ChunkConfig(
                landing_chunks=config.landing_chunks if reads else 0,
                staging_chunks=0 if reads else STAGING_CHUNKS,
                chunk_bytes=config.landing_chunk_bytes,
            )
            made.append(NixlTransport(self.boot, self._arena, chunks, wake=wake, hook=hook))
        return made

    def _loop(self) -> CtxLoop | GenLoop:
        config, eos_ids = self.config, self.source.eos_ids
        assert self.node is not None
        prefill = PrefillScheduler(config.max_num_tokens, full_tokens=FULL_PASS_TOKENS)
        if self.spec.role == "ctx":
            return CtxLoop(self.engine, self.kv, self.node, prefill, eos_ids=eos_ids)
        decode = DecodeScheduler(
            self.sizes.layout,
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_gen_init_admissions_per_pass=config.max_gen_init_admissions_per_pass,
        )
        return GenLoop(self.engine, self.kv, self.node, decode, prefill, eos_ids=eos_ids)
