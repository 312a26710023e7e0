"""The prefill scheduler alone: order, ageing, priorities, budget. Pages are a callback."""

import math

import numpy as np
import pytest

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.sequence import Sequence
from tailrace.model.sampling_params import SamplingParams

CHUNK = 64


class Bench:
    """Drives a scheduler in time: one pass of `CHUNK` tokens takes one second."""

    def __init__(self, **options) -> None:
        self.scheduler = PrefillScheduler(CHUNK, **options)
        self.now = 0.0
        self.ended: dict[str, float] = {}
        self.count = 0
        self.fits = lambda sequence: True

    def add(self, name: str, length: int, *, priority: int = 0) -> Sequence:
        self.count += 1
        params = SamplingParams(max_tokens=4)
        sequence = Sequence.for_prefill((name, 0), np.zeros(length, np.int32), [], params, 1, frozenset())
        sequence.order, sequence.received, sequence.priority = self.count, self.now, priority
        self.scheduler.add(sequence)
        return sequence

    def reserve(self, sequence: Sequence) -> bool:
        if not self.fits(sequence):
            return False
        sequence.pages = [1]
        return True

    def step(self) -> dict[str, int]:
        chunks = self.scheduler.select(CHUNK, self.now, self.reserve)
        assert sum(c.num_tokens for c in chunks) <= CHUNK
        assert len({c.sequence for c in chunks}) == len(chunks)
        self.now += 1.0
        for chunk in chunks:
            assert chunk.sequence.pages and 0 < chunk.num_tokens <= chunk.sequence.remaining
            if chunk.last:
                self.scheduler.remove(chunk.sequence)
                self.ended[chunk.sequence.key[0]] = self.now
            chunk.sequence.num_computed += chunk.num_tokens
        return {c.sequence.key[0]: c.num_tokens for c in chunks}


def test_the_shortest_remaining_prompt_goes_first():
    bench = Bench(ageing_s=math.inf)
    bench.add("long", 200)
    bench.add("short", 40)
    assert bench.step() == {"short": 40, "long": 24}


def test_prompts_that_fill_a_pass_run_one_after_the_other():
    bench = Bench(ageing_s=math.inf, full_tokens=32)
    for name, length in (("a", 10), ("b", 20), ("c", 30), ("d", 100)):
        bench.add(name, length)
    assert [bench.step() for _ in range(4)] == [{"a": 10, "b": 20}, {"c": 30}, {"d": 64}, {"d": 36}]


def test_behind_an_elder_one_prompt_runs_whatever_its_size():
    bench = Bench(ageing_s=2.0, full_tokens=16)
    bench.add("huge", 1000)
    bench.now = 3.0
    bench.add("a", 30)
    bench.add("b", 30)
    assert bench.step() == {"huge": 32, "a": 30}
    assert bench.step() == {"huge": 32, "b": 30}


def test_many_short_prompts_share_a_pass():
    bench = Bench()
    for i in range(6):
        bench.add(f"r{i}", 10)
    assert bench.step() == {f"r{i}": 10 for i in range(6)}


def test_rows_of_a_pass_are_bounded():
    bench = Bench(max_rows=3)
    for i in range(6):
        bench.add(f"r{i}", 10)
    assert len(bench.step()) == 3


def test_a_more_urgent_priority_goes_before_a_shorter_prompt():
    bench = Bench(ageing_s=math.inf)
    bench.add("short", 10)
    bench.add("urgent", 64, priority=-1)
    assert bench.step() == {"urgent": 64}


@pytest.mark.parametrize("gap", [1, 2, 3])
def test_short_prompts_behind_a_huge_one_wait_at_most_four_chunk_times(gap):
    bench = Bench()
    bench.add("huge", 64 * CHUNK)
    bench.step()
    arrivals: dict[str, float] = {}
    for i in range(10 * gap):
        if i % gap == 0 and gap > 1:
            arrivals[f"s{i}"] = bench.now
            bench.add(f"s{i}", CHUNK)
        if gap == 1 and i % 2 == 0:  # one chunk of work every other chunk time, in two halves
            for half in range(2):
                arrivals[f"s{i}.{half}"] = bench.now
                bench.add(f"s{i}.{half}", CHUNK // 2)
        bench.step()
    for _ in range(6):
        bench.step()
    waits = {name: bench.ended[name] - at for name, at in arrivals.items()}
    assert max(waits.values()) <= 4.0, waits


def test_a_huge_prompt_ends_under_an_endless_stream_of_short_ones():
    bench = Bench()
    bench.add("huge", 64 * CHUNK)
    i = 0
    while "huge" not in bench.ended and bench.now < 500:
        i += 1
        bench.add(f"s{i}", CHUNK)  # as much as a pass can do, every pass
        bench.step()
    assert bench.ended["huge"] <= 2 * 64 + 3
    assert len(bench.ended) > 60  # and the short ones got the other half


def test_the_least_urgent_priority_is_served_under_endless_urgent_work_but_ages_later():
    bench = Bench(ageing_s=1.0)
    bench.add("bulk", CHUNK, priority=5)
    first_served = None
    for i in range(40):
        bench.add(f"u{i}", CHUNK, priority=0)
        if "bulk" in bench.step() and first_served is None:
            first_served = bench.now - 1.0
    assert "bulk" in bench.ended
    assert first_served is not None and 5.0 <= first_served <= 8.0


def test_a_younger_prompt_passes_one_that_does_not_fit_until_that_one_is_the_elder():
    bench = Bench(ageing_s=3.0)
    bench.add("big", CHUNK - 1)
    bench.fits = lambda s: s.key[0] != "big"
    passed = []
    for i in range(6):
        bench.add(f"s{i}", CHUNK)
        passed += [name for name in bench.step() if name.startswith("s")]
    assert passed == ["s0", "s1", "s2"]
    bench.fits = lambda s: True
    assert "big" in bench.step()


def test_what_has_started_goes_on_while_the_elder_does_not_fit():
    bench = Bench(ageing_s=0.5)
    bench.add("started", 3 * CHUNK)
    bench.step()
    bench.add("big", 10)
    bench.scheduler.remove(next(s for s in bench.scheduler if s.key[0] == "started"))
    started = bench.add("started again", 2 * CHUNK)
    started.pages = [1]
    bench.now += 5
    bench.fits = lambda s: False
    assert bench.step() == {"started again": CHUNK}


def test_seconds_left_counts_what_goes_first():
    bench = Bench()
    long, short = bench.add("long", 128), bench.add("short", 32)
    assert bench.scheduler.seconds_left(long) == math.inf
    bench.scheduler.measure(64, 1.0)
    assert bench.scheduler.seconds_left(long) == 2.0
    short.pages = [1]
    assert bench.scheduler.seconds_left(long) == 2.5
    assert bench.scheduler.seconds_left(short) == 0.5


def test_the_rate_is_smoothed():
    scheduler = PrefillScheduler(64)
    scheduler.measure(100, 1.0)
    scheduler.measure(200, 1.0)
    assert scheduler.tokens_per_s == pytest.approx(120.0)
    scheduler.measure(0, 1.0)
    assert scheduler.tokens_per_s == pytest.approx(120.0)
