"""What it costs to be sure of pages: sums over everything that moves (`verify_pages`), and the shadow check.

    transfer.verify            64 MiB of SmolLM2's pages in 8 reads over shm, each summed at gen and compared,
                               against alone (the same reads, nothing summed)
    transfer.verify.nixl       the same over NIXL, chunk by chunk
    transfer.verify.sum        sums alone, one thread, as ctx takes them, against copy (one memory copy)
    transfer.verify.share      bytes of sums that cross for each byte of pages
    transfer.verify.shadow     one shadow check of SmolLM2 in bfloat16 on an idle gen, ms, against engine (a step)

Gen's thread that sums runs beside the one that copies, as in a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from harness import Options, Row, identity, interleaved, row_of
from transfer_pair import NAP_S, SMOLLM2_PAGE, TOTAL, Pair, known_pages

from tailrace.engine.engine import Engine
from tailrace.engine.step import Row as PlanRow
from tailrace.engine.step import SamplerState, StepPlan
from tailrace.gen_worker.shadow import Check, ShadowChecks, ShadowConfig, relative_bound
from tailrace.kernels.page_sums import slice_sums
from tailrace.kv_cache.layout import single_layout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights
from tailrace.transfer.core_events import SumJob, SumPart
from tailrace.transfer.loop_events import LoopStats
from tailrace.transfer.messages import Landed, PageDescriptor
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.page_proof import PageSummer
from tailrace.transfer.transports.base import LandedIn, PeerNotice, PostDone, ReadDone, Transport

NAMES = (
    "transfer.verify",
    "transfer.verify.nixl",
    "transfer.verify.sum",
    "transfer.verify.share",
    "transfer.verify.shadow",
)
GEOMETRY = PoolGeometry(16, 30, 2, 3, 64, "bfloat16")
TOKENS, ROW_BYTES = GEOMETRY.tokens_per_page, GEOMETRY.dim * 2
PAGES = TOTAL // SMOLLM2_PAGE
READS = 8
CONTEXT, BLOCK = 448, 64  # tokens before the block that a shadow check computes again


class Watched:
    """A transport whose reads are told of when they end."""

    def __init__(self, transport: Transport, ended: Callable[[ReadDone], None]) -> None:
        self._transport, self._ended = transport, ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def poll(self) -> Sequence[ReadDone | PostDone | LandedIn | PeerNotice]:
        events = self._transport.poll()
        for event in events:
            if isinstance(event, ReadDone):
                self._ended(event)
        return events


class Checked(Pair):
    """A pair whose gen can sum every page that came, and compare."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, SMOLLM2_PAGE, PAGES)
        theirs = known_pages(SMOLLM2_PAGE, self.arena.num_pages)
        sums = slice_sums(theirs, self.units.src.pages, ROW_BYTES, TOKENS, range(TOKENS))
        self.expected = [row.tobytes() for row in sums]
        self.summer = PageSummer([self.arena.pages], GEOMETRY, self.arena.generations, self.news.set)
        self.transport: Any = Watched(self.transport, self._ended)
        self.verifies = False
        self.proven = self.wrong = 0

    def _read(self, units: Sequence[tuple[PageDescriptor, int]], landed: Landed | None) -> None:
        """Over shm in as many parts as a prefill has chunks."""
        step = len(units) if landed is not None else -(-len(units) // READS)
        for low in range(0, len(units), step):
            super()._read(units[low : low + step], landed)

    def _ended(self, done: ReadDone) -> None:
        if self.verifies:
            ordinals = [page.ordinal for page in done.units_ok]
            parts = tuple((SumPart(int(self.units.dst[o]), 0, TOKENS, 0),) for o in ordinals)
            self.summer.submit(SumJob(0, parts, expected=tuple(self.expected[o] for o in ordinals)))

    def seconds(self, verify: bool) -> float:
        """Until every page stands in gen's pool and, if they are verified, is proven."""
        began = time.perf_counter()
        self.verifies, self.proven = verify, 0
        self.move()
        while verify and self.proven < self.n:
            for done in self.summer.poll():
                self.proven += len(done.equal)
                self.wrong += done.equal.count(False)
            self.news.wait(NAP_S)
            self.news.clear()
        self.verifies = False
        return time.perf_counter() - began

    def sum_alone(self) -> float:
        began = time.perf_counter()
        slice_sums(self.arena.pages, self.units.dst, ROW_BYTES, TOKENS, range(TOKENS))
        return time.perf_counter() - began

    def close(self) -> None:
        self.summer.close()
        super().close()


def verified(name: str, kind: str, pairs: int) -> Row:
    pair = Checked(kind)
    try:
        what = identity(transport=kind, page_bytes=SMOLLM2_PAGE, pages=pair.n, sums_per_page=GEOMETRY_SLICES)
        pair.seconds(True)
        if pair.wrong or not pair.is_right():
            return Row(name, None, "GB/s", "higher", status="held", reason="bytes or sums differ", identity=what)
        nbytes = pair.n * SMOLLM2_PAGE
        measures = {
            "ours": lambda: nbytes / pair.seconds(True) / 1e9,
            "alone": lambda: nbytes / pair.seconds(False) / 1e9,
        }
        if name == "transfer.verify.sum":
            measures = {"ours": lambda: nbytes / pair.sum_alone() / 1e9, "copy": lambda: nbytes / pair.copy() / 1e9}
        return row_of(name, "GB/s", "higher", interleaved(measures, pairs, warm_ups=2), what)
    finally:
        pair.close()


GEOMETRY_SLICES = GEOMETRY.num_layers * GEOMETRY.num_fields * GEOMETRY.kv_heads


def shadow(pairs: int) -> Row:
    """On an idle gen, so the whole check; within a busy one the same time falls between two passes."""
    source = open_source("smollm2")
    layout = single_layout(state_groups(source.config), TOKENS, "bfloat16")
    kv = KvManager(layout, 2 * (CONTEXT + BLOCK) // TOKENS + 2, BLOCK)
    pool = torch.zeros(2 * (CONTEXT + BLOCK) // TOKENS + 2, *layout.shape, dtype=torch.bfloat16)
    engine = Engine(Decoder(load_weights(source, dtype=torch.bfloat16, quantized=False)), pool)
    ids = np.random.default_rng(0).integers(3, source.config.vocab_size, CONTEXT + BLOCK + 1).astype(np.int32)
    pages = kv.allocate(layout.num_pages(len(ids)))
    assert pages is not None
    table = np.array(pages, np.int32)
    engine.step(StepPlan([PlanRow("prefill", ids[:-1], 0, table)]))
    stats = LoopStats()
    checks = ShadowChecks(engine, kv, ShadowConfig(1, relative_bound("bfloat16", ("raw",))), stats)
    used = pages[: layout.num_pages(CONTEXT + BLOCK)]

    def check() -> float:
        kv.hold(used)
        began = time.perf_counter()
        checks.run(Check(("r", 0), ids[CONTEXT : CONTEXT + BLOCK], CONTEXT, list(used)))
        return (time.perf_counter() - began) * 1e3

    def decode() -> float:
        state = SamplerState(SamplingParams(max_tokens=8, temperature=0.0), 0, CONTEXT + BLOCK, frozenset())
        began = time.perf_counter()
        engine.step(StepPlan([PlanRow("r", ids[-1:], CONTEXT + BLOCK, table, (state,))]))
        return (time.perf_counter() - began) * 1e3

    samples = interleaved({"ours": check, "engine": decode}, pairs, warm_ups=2)
    what = identity(model="smollm2", dtype="bfloat16", context=CONTEXT, block=BLOCK, threads=torch.get_num_threads())
    name = "transfer.verify.shadow"
    if stats.shadow_different:
        return Row(name, None, "ms", "lower", status="held", reason="a right block was found to differ", identity=what)
    return row_of(name, "ms", "lower", samples, what)


def rows(options: Options) -> list[Row]:
    """The rows of this module that are wanted."""
    made = []
    for name, kind in (("transfer.verify", "shm"), ("transfer.verify.nixl", "nixl"), ("transfer.verify.sum", "shm")):
        if options.wants(name):
            made.append(verified(name, kind, options.pairs))
    if options.wants("transfer.verify.share"):
        share = GEOMETRY_SLICES * 8 / SMOLLM2_PAGE
        what = identity(page_bytes=SMOLLM2_PAGE, tokens_per_page=TOKENS)
        made.append(Row("transfer.verify.share", share, "fraction", "lower", identity=what))
    if options.wants("transfer.verify.shadow"):
        made.append(shadow(options.pairs))
    return made
