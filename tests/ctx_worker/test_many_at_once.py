"""F5 in the loop: two hundred prompts at once are computed at an even pace, and what scheduling them costs is small."""

from __future__ import annotations

import time

import pytest
from loop_fakes import EOS_IDS, Clock, FakeEngine, FakeNode, make_kv, prompt_of, submit_of

from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.transfer.loop_events import Arrived


@pytest.mark.parametrize("count", [50, 100, 200])
def test_f5_the_second_half_takes_as_long_as_the_first(count):
    clock, kv = Clock(), make_kv(8 * count)
    node = FakeNode(kv)
    engine = FakeEngine(kv, clock, seconds_per_token=0.001)
    loop = CtxLoop(engine, kv, node, PrefillScheduler(64), eos_ids=EOS_IDS, clock=clock)
    for i in range(count):
        node.events.append(Arrived(submit_of(f"r{i}", prompt_of(24, i)), clock.now))
    began, real = clock.now, time.process_time()
    ends, reals = [], []
    while len(ends) < count:
        loop.run_pass()
        new = len(node.prefilled) - len(ends)
        ends += [clock.now - began] * new
        reals += [time.process_time() - real] * new
    half = count // 2
    assert ends[-1] - ends[half - 1] <= 1.5 * ends[half - 1]
    assert reals[-1] - reals[half - 1] <= 1.5 * reals[half - 1]
    assert node.loop_stats.queued == 0 and not len(loop.scheduler)
