"""Streams of SmolLM2 go on while pages arrive over shared memory: copies run in threads that hold no lock."""

import random
import threading
import time

import numpy as np
import torch

from tailrace.engine.engine import Engine
from tailrace.engine.step import Row, SamplerState, StepPlan
from tailrace.kv_cache.arena import Arena, arena_name
from tailrace.kv_cache.layout import single_layout
from tailrace.model.config import state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.source import open_source
from tailrace.model.weights import load_weights
from tailrace.transfer.messages import PageDescriptor
from tailrace.transfer.page_list import UnitList
from tailrace.transfer.transports.base import ReadJob
from tailrace.transfer.transports.shm import ShmTransport

STREAMS, CONTEXT, STEPS = 2, 32, 50
TOTAL = 64 << 20


def _decoder():
    """A step of two streams, always at the same positions."""
    source = open_source("smollm2")
    layout = single_layout(state_groups(source.config), 16, "bfloat16")
    pool = torch.zeros(STREAMS * 3 + 1, *layout.shape, dtype=torch.bfloat16)
    engine = Engine(Decoder(load_weights(source, dtype=torch.bfloat16, quantized=False)), pool)
    ids = np.arange(5, 5 + CONTEXT + 1, dtype=np.int32)
    rows = []
    for row in range(STREAMS):
        table = np.arange(1 + 3 * row, 4 + 3 * row, dtype=np.int32)
        engine.step(StepPlan([Row(f"p{row}", ids[:-1], 0, table)]))
        state = SamplerState(SamplingParams(max_tokens=8, temperature=0.0), 0, CONTEXT, frozenset())
        rows.append(Row(f"r{row}", ids[-1:], CONTEXT, table, (state,)))
    return layout, lambda: engine.step(StepPlan(list(rows)))


def _p99(step):
    gaps = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        gaps.append(time.perf_counter() - began)
    return float(np.percentile(gaps, 99))


def _arrive(reader, news, units, enough, arrived):
    """64 MiB ten times a second, polled as a transfer thread does."""
    jobs = 0
    while not enough.is_set():
        jobs += 1
        reader.read(ReadJob(jobs, ("r", 1), "c1", units))
        while reader.busy():
            arrived += [event for event in reader.poll() if not event.error]
            news.wait(0.001)
            news.clear()
        enough.wait(0.1)


def test_streams_keep_their_pace_while_64_mib_arrive_ten_times_a_second():
    """The 99th percentile of the time between two tokens is at most twice what it is alone; the best of three."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    layout, step = _decoder()
    n = TOTAL // layout.bytes_per_page
    arenas = [Arena.create(arena_name("test", f"pace{role}", "b1"), layout, n + 1) for role in ("ctx", "gen")]
    arenas[0].generations[:] = 1
    news = threading.Event()
    reader = ShmTransport(arenas[1], wake=news.set)
    try:
        reader.connect("c1", arenas[0].name.encode())
        order = random.Random(1).sample(range(1, n + 1), n)
        units = UnitList.of([(PageDescriptor(0, i, page, 1), i + 1) for i, page in enumerate(order)])
        ratios = []
        for _ in range(3):
            alone, enough, arrived = _p99(step), threading.Event(), []
            thread = threading.Thread(target=_arrive, args=(reader, news, units, enough, arrived))
            thread.start()
            ratios.append(_p99(step) / alone)
            enough.set()
            thread.join()
            assert len(arrived) >= 3 and all(len(event.units_ok) == n for event in arrived)
            if ratios[-1] <= 2:
                break
        assert min(ratios) <= 2, ratios
    finally:
        torch.set_num_threads(threads)
        reader.close()
        for arena in arenas:
            arena.close()
            arena.unlink()
