"""Transfers beside other work, in the product's own processes or with its own engine.

    transfer.overlap     until gen streams, of a prompt of 8 chunks whose transfer is slowed until it takes as long as
                         its prefill, ms, against larger (the longer of prefill and transfer)
    transfer.decoding    99th percentile of the time between two tokens of 4 streams of SmolLM2 while 64 MiB arrive over
                         shm ten times a second, ms, against alone

The first through a router, an ingress, a ctx and a gen; a stream's second token is the first of gen. The wire is slowed
by the fault hook `slow_bytes_per_s`. The second with one thread for the engine, as a worker on two cores has.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_http import load_cluster_class
from harness import Options, Row, identity, interleaved, row_of
from transfer_pair import SMOLLM2_PAGE, TOTAL, Pair

from tailrace.engine.engine import Engine
from tailrace.engine.step import Row as PlanRow
from tailrace.engine.step import SamplerState, StepPlan
from tailrace.kv_cache.layout import single_layout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights

NAMES = ("transfer.overlap", "transfer.decoding")
CHUNKS, CHUNK_TOKENS = 8, 96
STREAMS, CONTEXT, STEPS = 4, 256, 40
TOKENS_PER_PAGE = 16
PACE_S = 0.1  # no ctx of this machine computes 64 MiB of pages in ten times that
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16", "kv_bytes": 2**29, "max_num_tokens": CHUNK_TOKENS, "transport": "shm", "faults": True,
    "kv_transfer_timeout_s": 60.0,
}  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- overlap


def _until_token(cluster: Any, ids: list[int], tokens: int) -> float:
    """Seconds until the stream's last of so many tokens."""
    began = time.perf_counter()
    body = {"prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    seen = 0
    with cluster.streaming(
        ids, tokens, **{k: v for k, v in body.items() if k not in ("prompt", "max_tokens")}
    ) as reply:
        for line in reply.iter_lines():
            seen += line.startswith("data: {")
            if seen == tokens:
                return time.perf_counter() - began
    raise AssertionError(f"the stream ended after {seen} tokens")


def overlap(pairs: int) -> Row:
    rng = np.random.default_rng(int(time.time()))
    num_tokens = CHUNKS * CHUNK_TOKENS

    def fresh() -> list[int]:
        return rng.integers(3, 40_000, num_tokens).tolist()

    with tempfile.TemporaryDirectory() as folder, load_cluster_class()(Path(folder) / "c", "smollm2", **CONFIG) as made:
        prefill = statistics.median(_until_token(made, fresh(), 1) for _ in range(3))
        nbytes = num_tokens // TOKENS_PER_PAGE * SMOLLM2_PAGE
        made.faults("gen-0", slow_bytes_per_s=nbytes / prefill)
        samples = interleaved(
            {
                "ours": lambda: _until_token(made, fresh(), 2) * 1e3,
                "larger": lambda: max(_until_token(made, fresh(), 1), prefill) * 1e3,
            },
            pairs,
            warm_ups=2,
        )
        made.faults("gen-0")
    what = identity(
        transport="shm", model="smollm2", tokens=num_tokens, chunks=CHUNKS, wire_bytes_per_s=round(nbytes / prefill),
        transfer_s=round(prefill, 3),
    )  # fmt: skip
    return row_of("transfer.overlap", "ms", "lower", samples, what)


# ------------------------------------------------------------------------------------------------------------- decoding


class Streams:
    """Four rows that decode, a step at a time, always at the same positions."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        source = open_source("smollm2")
        layout = single_layout(state_groups(source.config), TOKENS_PER_PAGE, "bfloat16")
        per_row = CONTEXT // TOKENS_PER_PAGE + 1
        pool = torch.zeros(STREAMS * per_row + 1, *layout.shape, dtype=torch.bfloat16)
        self.engine = Engine(Decoder(load_weights(source, dtype=torch.bfloat16, quantized=False)), pool)
        ids = np.random.default_rng(0).integers(3, 40_000, CONTEXT + 1).astype(np.int32)
        self.rows = []
        for row in range(STREAMS):
            table = np.arange(1 + row * per_row, 1 + (row + 1) * per_row, dtype=np.int32)
            self.engine.step(StepPlan([PlanRow(f"p{row}", ids[:-1], 0, table)]))
            state = SamplerState(SamplingParams(max_tokens=8, temperature=0.0), 0, CONTEXT, frozenset())
            self.rows.append(PlanRow(f"r{row}", ids[-1:], CONTEXT, table, (state,)))

    def p99_ms(self) -> float:
        gaps = []
        for _ in range(STEPS):
            began = time.perf_counter()
            self.engine.step(StepPlan(list(self.rows)))
            gaps.append(time.perf_counter() - began)
        return float(np.percentile(gaps, 99)) * 1e3


@contextmanager
def arriving(pair: Pair, rounds: list[float]) -> Iterator[None]:
    """64 MiB come in beside, again and again, until the block ends."""
    enough = threading.Event()

    def run() -> None:
        while not enough.is_set():
            rounds.append(pair.move())
            enough.wait(PACE_S)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def decoding(pairs: int) -> Row:
    streams, pair, rounds = Streams(), Pair("shm", SMOLLM2_PAGE, TOTAL // SMOLLM2_PAGE), []
    try:
        if not pair.is_right():
            return Row("transfer.decoding", None, "ms", "lower", status="held", reason="bytes differ; when they agree")

        def beside() -> float:
            with arriving(pair, rounds):
                return streams.p99_ms()

        samples = interleaved({"ours": beside, "alone": streams.p99_ms}, pairs, warm_ups=1)
    finally:
        pair.close()
    rate = pair.n * SMOLLM2_PAGE / statistics.median(rounds) / 1e9
    what = identity(
        transport="shm", model="smollm2", dtype="bfloat16", streams=STREAMS, steps=STEPS, threads=1, pace_s=PACE_S,
        transfer_gb_per_s=round(rate, 2), cores=os.cpu_count(),
    )  # fmt: skip
    return row_of("transfer.decoding", "ms", "lower", samples, what)


def rows(options: Options) -> list[Row]:
    """The rows of this module that are wanted."""
    made = []
    if options.wants("transfer.overlap"):
        made.append(overlap(options.pairs))
    if options.wants("transfer.decoding"):
        made.append(decoding(options.pairs))
    return made
