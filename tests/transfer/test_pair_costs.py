"""What gen measures of hand-offs from each ctx."""

from __future__ import annotations

import pytest
from loop_fakes import handoff_of, prompt_of

from tailrace.transfer.loop_events import Admitted
from tailrace.transfer.messages import PairCost
from tailrace.transfer.pair_costs import PairCosts
from tailrace.transfer.transports.base import ReadDone, ReadJob


class Pair:
    def __init__(self):
        self.costs, self.number = PairCosts(), 0

    def read(self, name, boot, start, end, nbytes):
        self.number += 1
        self.costs.started(ReadJob(self.number, (name, 0), boot, ()), start)
        self.costs.ended(ReadDone(self.number, (name, 0), (), logical_bytes=nbytes), end)

    def admit(self, name, boot, now, exposed_s):
        event = Admitted(handoff_of(name, prompt_of(8)), (), 0, 1.0, ctx=boot, exposed_s=exposed_s)
        assert self.costs.told(event, now) is event


def test_each_pair_has_its_own_rate_and_overhead():
    pair = Pair()
    pair.read("a", "near", 10.0, 10.5, 1000)
    pair.admit("a", "near", 10.6, 0.6)
    pair.read("b", "far", 20.0, 22.0, 1000)
    pair.admit("b", "far", 22.5, 2.5)
    near, far = pair.costs.costs(("near", "far"))
    assert near == PairCost("near", pytest.approx(2000), pytest.approx(0.1))
    assert far == PairCost("far", pytest.approx(500), pytest.approx(0.5))


def test_only_what_came_after_the_prefills_end_counts_and_reads_that_overlap_count_once():
    pair = Pair()
    pair.read("a", "ctx", 1.0, 9.0, 1000)  # while ctx computed on
    pair.read("a", "ctx", 9.9, 10.3, 1000)
    pair.costs.started(ReadJob(90, ("a", 0), "ctx", ()), 10.2)
    pair.costs.ended(ReadDone(90, ("a", 0), (), logical_bytes=1000), 10.4)
    pair.admit("a", "ctx", 10.5, 0.5)  # from 10.0 on; reads took 0.4 of it
    (cost,) = pair.costs.costs(("ctx",))
    assert cost.overhead_s == pytest.approx(0.1)


def test_one_stalled_hand_off_does_not_decide_and_many_do():
    pair = Pair()
    for number in range(20):
        pair.read(f"a{number}", "ctx", number, number + 0.1, 1000)
        pair.admit(f"a{number}", "ctx", number + 0.12, 0.12)
    pair.read("stall", "ctx", 50.0, 50.1, 1000)
    pair.admit("stall", "ctx", 60.0, 10.0)
    assert pair.costs.costs(("ctx",))[0].overhead_s < 0.05
    for number in range(100, 130):
        pair.read(f"a{number}", "ctx", number, number + 0.1, 1000)
        pair.admit(f"a{number}", "ctx", number + 0.6, 0.6)
    assert pair.costs.costs(("ctx",))[0].overhead_s == pytest.approx(0.5, rel=0.1)


def test_nothing_is_said_before_a_read_and_nothing_is_kept_of_pairs_that_are_gone():
    pair = Pair()
    pair.admit("a", "ctx", 1.0, 0.5)  # gen had all pages already
    assert pair.costs.costs(("ctx",)) == ()
    pair.read("b", "ctx", 1.0, 2.0, 0)  # it failed
    assert pair.costs.costs(("ctx",)) == () and pair.costs.all.bytes_per_s == 0
    pair.read("c", "ctx", 2.0, 3.0, 100)
    assert len(pair.costs.costs(("ctx",))) == 1
    assert pair.costs.costs(()) == () and not pair.costs._rates
    for number in range(1000):
        pair.read(f"never-{number}", "ctx", number, number + 0.5, 10)
    assert len(pair.costs._reads) <= 256 and not pair.costs._jobs


def test_the_end_of_a_read_that_was_never_told_changes_nothing():
    pair = Pair()
    pair.costs.ended(ReadDone(7, ("a", 0), (), logical_bytes=100), 1.0)
    assert pair.costs.costs(("ctx",)) == () and pair.costs.all.bytes_per_s == 0
