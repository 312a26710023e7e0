"""The simulator against what is known otherwise: queueing theory, and a recursion that needs no simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from simulate_figures import Point, point
from simulate_times import PROFILES
from simulate_trace import BASE_WORKERS, Request
from simulate_workers import replay
from simulate_world import Outcome, Setup

TOKENS = 2000  # 10 ms on the flat worker
UNLIMITED = {"max_backlog_s": 1e9, "max_wait_s": 1e9}
LIVE_HOP_S = 1e-3  # a frame between two of the processes that share two cores, and what they do with it


def one_ctx(requests: Sequence[Request]) -> list[Outcome]:
    """On one flat, first-come-first-served ctx, frames taking no time; the first token ends every request."""
    setup = Setup(PROFILES["flat"], ctx=1, gen=1, order="fifo", budget=1 << 20, hop_s=0.0, settings=UNLIMITED)
    return replay(setup, requests)[1]


def random_arrivals(count: int, per_s: float, seed: int) -> list[Request]:
    """Poisson arrivals of equal prompts that share nothing."""
    draw = random.Random(seed)
    now = 0.0
    found = []
    for i in range(count):
        now += draw.expovariate(per_s)
        found.append(Request(now, TOKENS, 1, (), str(i)))
    return found


def waits(outcomes: Sequence[Outcome]) -> list[float]:
    """Seconds of each before its own prefill."""
    service_s = PROFILES["flat"].prefill_s([(TOKENS, 0)])
    return [o.ttft - service_s for o in outcomes]


def lindley(requests: Sequence[Request]) -> list[float]:
    """The same by the recursion wait' = max(0, wait + service - time between arrivals)."""
    service_s = PROFILES["flat"].prefill_s([(TOKENS, 0)])
    found = [0.0]
    for before, after in zip(requests, requests[1:], strict=False):
        found.append(max(0.0, found[-1] + service_s - (after.at - before.at)))
    return found


def md1_wait_s(load: float) -> float:
    """Mean wait of a queue with random arrivals and constant service, by Pollaczek and Khinchine."""
    return load * PROFILES["flat"].prefill_s([(TOKENS, 0)]) / (2 * (1 - load))


def md1_ratio(load: float = 0.7, count: int = 20000, seed: int = 1) -> float:
    """Simulated over predicted mean wait."""
    per_s = load / PROFILES["flat"].prefill_s([(TOKENS, 0)])
    found = waits(one_ctx(random_arrivals(count, per_s, seed)))
    return sum(found) / len(found) / md1_wait_s(load)


def as_live(requests: Sequence[Request], blocks: int, placement: str, *, speed: float = 20.0) -> Point:
    """The scene of bench/routing.py: 4 ctx and 2 gen fakes, an LRU of `blocks`, the trace at 20x."""
    setup = Setup(
        PROFILES["flat"], ctx=4, gen=2, order="fifo", budget=1 << 20, device_blocks=blocks, host_blocks=0,
        gen_blocks=1 << 20, placement=placement, hop_s=LIVE_HOP_S,
    )  # fmt: skip
    return point(setup, [replace(r, output=2) for r in requests], BASE_WORKERS, speed)
