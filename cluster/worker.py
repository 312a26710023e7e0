"""What rank 0 of a worker is made of: arenas, model, pool, engine, transfer thread and loop, for ctx or for gen.

The one place where the rooms meet; what a further rank is made of stands in cluster/follower.py. It decides nothing:
sizes come from cluster/sizes.py, everything else from the parts. `load`, `warm_up`, `start`, `run` and `close` are
called once each, in this order, from the main thread.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.device import Chosen, choose_device
from tailrace.cluster.follower import await_message, meeting_limit_s
from tailrace.cluster.progress import Phase
from tailrace.cluster.sizes import derive
from tailrace.cluster.spec import RankSpec
from tailrace.cluster.ties import Ties
from tailrace.cluster.transports import make_transports
from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.engine import TORCH_DTYPES, Engine, pool_tensor
from tailrace.engine.grammar import Grammars
from tailrace.engine.group import Channel, Followers, Join, Make, Serve, Stop, Vote
from tailrace.gen_worker.drafting import Drafting
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler, decode_rows
from tailrace.gen_worker.shadow import ShadowConfig, relative_bound
from tailrace.kv_cache.arena import ArenaGroup, arena_name, unlink_earlier
from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.layout import PageLayout, RowLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model import drafting
from tailrace.model.config import ModelConfig
from tailrace.model.decoder import Decoder
from tailrace.model.draft_rows import drafting_config
from tailrace.model.errors import ConfigError, WorkerError
from tailrace.model.family import FamilyConfig, RowDecoder
from tailrace.model.ranks import AllReduce
from tailrace.model.shard import Shard
from tailrace.model.source import ModelSource, open_source
from tailrace.model.weights import Weights, load_weights
from tailrace.transfer.codec_choice import AUTO, RAW, offered
from tailrace.transfer.codecs import codec_named
from tailrace.transfer.compat import ROWS
from tailrace.transfer.core_events import CoreConfig
from tailrace.transfer.messages import PROTOCOL_VERSION, CompatRecord, GroupRecord
from tailrace.transfer.node import Node
from tailrace.transfer.switchboard import NodeConfig
from tailrace.transfer.transports.base import PageHook, Transport, Wake

if TYPE_CHECKING:
    from tailrace.cluster.device_parts import DeviceParts
    from tailrace.engine.device_engine import DeviceEngine

log = logging.getLogger(__name__)

# On a CPU a token costs 0.75 ms in a pass of 64 tokens, 0.68 in one of 128 and 0.66 in one of 512.
FULL_PASS_TOKENS = 128
# On a GPU a pass reads all weights however few its tokens are; from here on arithmetic takes longer than that.
FULL_DEVICE_TOKENS = 512


def arena_owner(worker: str, secret: bytes) -> str:
    """The worker's part of its arenas' names. Two applications of one name on one host differ by their secrets, so a
    worker of one never unlinks the memory of the other's namesake."""
    return f"{worker}.{hashlib.sha256(secret).hexdigest()[:8]}"


def compat_record(
    config: TailraceConfig, source: ModelSource, layout: PageLayout | RowLayout, pools: Sequence[torch.Tensor]
) -> CompatRecord:
    """What a peer must know. `layout`: of this worker's pages, every head once; `pools`: the allocated pages of each
    rank. Raises WorkerError if they are not what a peer will take them for."""
    if isinstance(layout, PageLayout):
        return _plain_record(config, source, layout, pools)
    (pages,) = pools
    if pages.shape[1] != layout.bytes_per_page:
        raise WorkerError(f"pages have {pages.shape[1]} bytes, the family's rows fill {layout.bytes_per_page}")
    groups = tuple(enumerate(layout.rows.describe().split("; ")))
    record = GroupRecord(ROWS, None, groups, fields=1, kv_heads=1, dim=layout.bytes_per_page)
    return _record(config, source, layout, record, len(pools), (RAW,))


def _record(
    config: TailraceConfig,
    source: ModelSource,
    layout: PageLayout | RowLayout,
    group: GroupRecord,
    tp: int,
    codecs: tuple[str, ...],
) -> CompatRecord:
    return CompatRecord(
        protocol=PROTOCOL_VERSION,
        model=source.revision,
        dtype=layout.dtype,
        tokens_per_page=layout.tokens_per_page,
        block_tokens=config.block_tokens,
        groups=(group,),
        page_bytes=(layout.bytes_per_page,),
        tp=tp,
        codecs=codecs,
    )


def _plain_record(
    config: TailraceConfig, source: ModelSource, layout: PageLayout, pools: Sequence[torch.Tensor]
) -> CompatRecord:
    """`pools`: [num_pages, layer, field, kv_head of that rank, token, dim] each."""
    assert isinstance(source.config, ModelConfig)
    group, heads, kv = layout.group, source.config.num_kv_heads, pools[0]
    dim, tp = kv.shape[-1], len(pools)
    held = [len(Shard(rank, tp).kv_heads(heads)) for rank in range(tp)]
    if [pool.shape[3] for pool in pools] != held or any(pool.shape != kv.shape for pool in pools):
        shapes = ", ".join(str(tuple(pool.shape)) for pool in pools)
        raise WorkerError(f"the pages of {tp} ranks for {heads} key-value heads have shapes {shapes}")
    rows = ", ".join(f"{field.name} {heads}x{dim}" for field in group.fields)
    record = GroupRecord(
        kind=group.kind.value,
        window=group.window,
        layers=tuple((layer, rows) for layer, _ in zip(group.layers, kv[0], strict=True)),
        fields=kv.shape[2],
        kv_heads=heads,
        dim=dim,
    )
    codecs = usable_codecs(config, (*kv.shape[1:3], heads, *kv.shape[4:]), kv.dtype)
    return _record(config, source, layout, record, tp, codecs)


def usable_codecs(config: TailraceConfig, page: tuple[int, ...], dtype: torch.dtype) -> tuple[str, ...]:
    """The codecs of a worker's compat record, for pages [layer, field, kv_head, token, dim].

    Raises:
        ConfigError: the configured codec has no form for such pages.
    """

    def problem(name: str) -> str:
        try:
            codec_named(name).encoded_bytes(page, dtype)
        except ValueError as error:
            return str(error)
        return ""

    if config.codec != AUTO:
        reason = problem(config.codec)
        if reason:
            raise ConfigError(f"codec: {reason}")
    return offered(config.codec, [name for name in config.codecs_allowed if not problem(name)])


class Worker:
    """Rank 0, with what it holds of the others. See the module for the order of calls."""

    def __init__(
        self,
        spec: RankSpec,
        config: TailraceConfig,
        ties: Ties,
        *,
        threads: int,
        progress: Callable[[Phase, float], None],
    ) -> None:
        self.spec, self.config, self.boot = spec, config, spec.boot
        self._threads, self._progress = threads, progress
        self._meeting_point = ties.meeting_point
        self._shard = Shard(0, config.pool(spec.role).tp)
        self._channels = [Channel(socket.socket(fileno=fd), f"rank {i}") for i, fd in enumerate(ties.channels, 1)]
        if len(self._channels) + 1 != self._shard.tp:
            raise WorkerError(f"{spec.role}.tp is {self._shard.tp} and {len(self._channels)} further ranks are there")
        self._arenas: ArenaGroup | None = None
        self._on_device: DeviceParts | None = None
        self.node: Node | None = None

    def load(self) -> None:
        """Arenas, weights, pool and engine, at all ranks.

        Raises:
            WorkerError: another rank cannot; its reason is in the message.
        """
        config, spec = self.config, self.spec
        torch.set_num_threads(self._threads)
        self.source = open_source(config.model)
        self.sizes = derive(config, self.source.config)
        owner = arena_owner(spec.name, spec.secret.encode())
        earlier = unlink_earlier(config.app_name, owner)
        if earlier:
            log.info("earlier_arenas_unlinked", extra={"fields": {"names": earlier}})
        chosen = choose_device(config, self.source.config)
        log.info("device_chosen", extra={"fields": {"device": str(chosen.device), "why": chosen.why}})
        if chosen.is_gpu:
            self._load_on_device(chosen, owner)
            return
        layout, num_pages = self.sizes.rank_layout(spec.role), self.sizes.num_pages(spec.role)
        names = [arena_name(config.app_name, owner, self.boot, rank) for rank in range(self._shard.tp)]
        self._arenas = ArenaGroup.create(names, layout, num_pages)
        for channel, name in zip(self._channels, names[1:], strict=True):
            channel.send(Make(name))
        model = self._load_model(layout)
        self.kv = KvManager(self.sizes.layout(spec.role), num_pages, config.block_tokens, self._arenas.generations)
        pools = [pool_tensor(pages, layout) for pages in self._arenas.pages]
        self._followers = Followers(self._channels, pools[1:])
        self._hear_votes()
        followers = self._followers if self._channels else None
        decoder = Decoder(model, self._meet()) if isinstance(model, Weights) else model
        self.engine: Engine | DeviceEngine = Engine(decoder, pools[0], followers=followers)
        self.compat = compat_record(config, self.source, self.sizes.layout(spec.role), pools)

    def _load_on_device(self, chosen: Chosen, owner: str) -> None:
        """Pool, weights and engine on a GPU; the arena keeps the pages' generation numbers."""
        from tailrace.cluster.device_parts import DeviceParts

        config, role = self.config, self.spec.role
        parts = self._on_device = DeviceParts(
            config, self.source, self.sizes, role, chosen.device, owner, self.boot,
            lambda done: self._progress("load", done),
        )  # fmt: skip
        layout = self.sizes.layout(role)
        self.kv = KvManager(layout, self.sizes.num_pages(role), config.block_tokens, parts.pool.arena.generations)
        self._followers = Followers((), ())
        self.engine = parts.engine
        self.compat = compat_record(config, self.source, layout, [parts.pages])

    def _load_model(self, layout: PageLayout | RowLayout) -> Weights | RowDecoder:
        """Rank 0's weights; of a family with rows of its own, its decoder."""
        source, dtype = self.source, TORCH_DTYPES[layout.dtype]

        def progress(done: int, total: int) -> None:
            self._progress("load", done / total)

        if source.family is None:
            quantized = self.config.weights == "quantized" and self.spec.role == "gen"  # prefills would not gain by it
            return load_weights(source, dtype=dtype, quantized=quantized, progress=progress, shard=self._shard)
        assert not isinstance(source.config, ModelConfig)
        of = source.tensors, source.config, dtype, layout.tokens_per_page, progress
        if self.sizes.replay is not None and self.spec.role == "ctx":
            decoder: RowDecoder = source.family.load_lower(source.tensors, self._pages_of(source.config), *of[2:])
        else:
            decoder = drafting.load(*of) if self.config.gen.drafts else source.family.load(*of)
        source.tensors.drop_pages()
        return decoder

    def _pages_of(self, config: FamilyConfig) -> FamilyConfig:
        """The model whose rows the pages hold: with gen.drafts those of its draft block, too."""
        return drafting_config(config) if self.config.gen.drafts else config

    def _hear_votes(self) -> None:
        """Nobody acts before every rank has said that it can."""
        for rank, channel in enumerate(self._channels, 1):
            vote: Vote = await_message(channel, Vote, self._progress)
            if vote.why:
                raise WorkerError(f"rank {rank} cannot serve: {vote.why}")

    def _meet(self) -> AllReduce | None:
        if not self._channels:
            return None
        self._followers.tell(Join())
        return AllReduce(self._shard, self._meeting_point, meeting_limit_s(self.config))

    def warm_up(self) -> None:
        """Run every shape of step once, so that no request waits for it."""
        self._progress("compile", 0.0)
        self.engine.warm_up(self.config.max_num_tokens, self.config.max_batch_size)
        self._followers.tell(Serve())

    def start(self) -> tuple[str, int]:
        """Start the transfer thread and make the loop; returns the address that peers, router and ingresses dial."""
        config, spec = self.config, self.spec
        node = NodeConfig(
            worker=spec.name,
            boot=self.boot,
            home=spec.role,
            duty=spec.role,
            host=spec.host,
            port=spec.port,
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
                verify_pages=config.verify_pages,
            ),
            heartbeat_s=config.heartbeat_s,
            report_s=config.stats_period_s,
            faults=config.faults,
            recorder_bytes=config.flight_recorder_bytes,
            recorder_dir=config.flight_recorder_dir,
            backflow=config.backflow,
            max_batch_size=0
            if spec.role == "ctx"
            else decode_rows(config.max_batch_size, config.max_num_tokens, config.gen.drafts),
        )
        pages = () if self._arenas is None else self._arenas.pages
        self.node = Node(node, self.kv, self._transports, pages=pages)
        address = self.node.start()
        self.loop = self._loop()
        return address

    def run(self, stop: threading.Event) -> None:
        """Passes until `stop`; raises what a pass or the transfer thread raised."""
        self.loop.run(stop)

    def close(self) -> None:
        """Orderly end, of whatever was begun: links closed, followers told, the arenas' names removed."""
        if self.node is not None:
            self.node.stop()
        for channel in self._channels:
            with suppress(WorkerError):  # it is gone already
                channel.send(Stop())
        if self._arenas is not None:
            self._arenas.unlink()
        if self._on_device is not None:
            self._on_device.pool.unlink()

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
        if self._on_device is not None:
            return [self._on_device.transport(self.config, hook)]
        assert self._arenas is not None
        whole = [self.sizes.rank_layout(r).bytes_per_page * self.config.pool(r).tp for r in ("ctx", "gen")]
        return make_transports(self.config, self.spec, self.boot, self._arenas, wake, hook, whole)

    def _loop(self) -> CtxLoop | GenLoop:
        config, eos_ids = self.config, self.source.eos_ids
        assert self.node is not None
        full = FULL_PASS_TOKENS if self._on_device is None else FULL_DEVICE_TOKENS
        engine = self.engine
        ahead = engine.read_ahead if isinstance(engine, Engine) and engine.reads_ahead else None
        prefill = PrefillScheduler(config.max_num_tokens, full_tokens=full, read_ahead=ahead)
        grammars = Grammars(lambda: self.source.tokenizer, self.source.config.vocab_size, eos_ids)
        if self.spec.role == "ctx":
            lower = self.sizes.replay is not None
            return CtxLoop(
                self.engine, self.kv, self.node, prefill, eos_ids=eos_ids, grammars=grammars, lower_half=lower
            )
        decode = DecodeScheduler(
            self.sizes.layout(self.spec.role),
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            max_gen_init_admissions_per_pass=config.max_gen_init_admissions_per_pass,
            max_drafts=config.gen.drafts,
        )
        shadow = None
        if config.shadow_check_every:
            retry = config.transfer_failure_policy == "recompute"
            bound = relative_bound(self.compat.dtype, self.compat.codecs)
            shadow = ShadowConfig(config.shadow_check_every, bound, retry)
        hasher = BlockHasher(self.spec.secret.encode(), config.block_tokens) if config.backflow else None
        flying = self._on_device.engine if config.run_ahead and self._on_device is not None else None
        replay = self.sizes.replay
        return GenLoop(
            self.engine, self.kv, self.node, decode, prefill, eos_ids=eos_ids, grammars=grammars, hasher=hasher,
            shadow=shadow, run_ahead=flying, drafting=Drafting(config.gen.drafts) if config.gen.drafts else None,
            replay_tokens=0 if replay is None else replay.decoder, replay_step=self.sizes.replay_step,
        )  # fmt: skip
