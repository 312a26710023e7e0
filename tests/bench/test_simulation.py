"""The simulator of bench/simulate.py: against closed forms, against a naive cache, and that nothing is lost in it."""

import itertools
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "bench"
TRACE = BENCH.parent.parent / "shared" / "traces" / "mooncake_conversation_first2000_sessions.jsonl"
sys.path.append(str(BENCH))

from simulate_cache import BlockCache  # noqa: E402
from simulate_checks import TOKENS, UNLIMITED, lindley, md1_wait_s, one_ctx, random_arrivals, waits  # noqa: E402
from simulate_figures import Limits, Point, crossing, goodput, point  # noqa: E402
from simulate_times import PROFILES  # noqa: E402
from simulate_trace import BLOCK, Request, ceiling, hit_tokens, parts, read  # noqa: E402
from simulate_workers import replay  # noqa: E402
from simulate_world import BEGIN_S, GAP_LIMITS_S, Outcome, Setup  # noqa: E402

H200, FLAT = PROFILES["h200"], PROFILES["flat"]


def sessions(count, turns, *, seed=1, per_s=5.0):
    """A small conversation trace: every turn has the blocks of the one before it, all share block 0."""
    draw, ids, found = random.Random(seed), itertools.count(1), []
    for session in range(count):
        blocks, at = [0], draw.uniform(0, count / per_s)
        for _ in range(turns):
            blocks = blocks + [next(ids) for _ in range(draw.randint(1, 6))]
            tokens = len(blocks) * BLOCK + draw.randint(0, BLOCK - 1)
            found.append(Request(at, tokens, draw.randint(1, 40), tuple(blocks), str(session)))
            at += draw.uniform(0.5, 4.0)
    return sorted(found, key=lambda r: r.at)


# --------------------------------------------------------------------------------------------------------- closed forms


def test_waits_of_one_worker_are_those_of_the_recursion_that_defines_a_queue():
    requests = random_arrivals(1500, 80.0, seed=3)
    assert waits(one_ctx(requests)) == pytest.approx(lindley(requests), abs=1e-9)


def test_the_mean_wait_under_random_arrivals_is_what_queueing_theory_says():
    load = 0.6
    service_s = FLAT.prefill_s([(TOKENS, 0)])
    found = waits(one_ctx(random_arrivals(8000, load / service_s, seed=2)))
    assert sum(found) / len(found) == pytest.approx(md1_wait_s(load), rel=0.08)


def test_a_request_alone_takes_its_prefill_its_hand_off_and_its_steps():
    setup = Setup(H200, ctx=1, gen=1, hop_s=0.0, budget=4096, settings=UNLIMITED)
    _, (one,) = replay(setup, [Request(0.0, 6000, 11, (), "s")])
    prefill_s = H200.prefill_s([(4096, 0)]) + H200.prefill_s([(1904, 4096)])
    steps_s = sum(H200.decode_s(1, 6001 + n) for n in range(10))
    assert one.ttft == pytest.approx(prefill_s)
    assert one.first_gap == pytest.approx(H200.transfer_s(4096) + H200.decode_s(1, 6001), rel=1e-3)
    assert one.ended - one.first_at == pytest.approx(H200.transfer_s(4096) + steps_s)
    assert one.gaps == 10


def test_aggregated_serving_makes_every_stream_wait_for_a_chunk():
    setup = Setup(H200, both=1, hop_s=0.0, budget=2048, device_blocks=1000, settings=UNLIMITED)
    _, (stream, prompt) = replay(setup, [Request(0.0, 100, 200, (), "a"), Request(0.5, 4000, 2, (), "b")])
    slow = GAP_LIMITS_S.index(0.03)
    assert stream.slow[slow] == 2  # the chunks of 2,048 and 1,952 tokens
    assert stream.slow[GAP_LIMITS_S.index(0.2)] == 0
    both_s = H200.prefill_s([(2048, 0)]) + H200.prefill_s([(1952, 2048)])
    assert both_s < prompt.ttft < both_s + 0.02


def test_a_second_turn_costs_only_what_is_new_and_from_the_host_a_copy_more():
    blocks = tuple(range(8))
    requests = [Request(0.0, 8 * BLOCK + 9, 1, blocks, "s"), Request(5.0, 8 * BLOCK + 9, 1, blocks, "s")]
    setup = Setup(H200, ctx=1, gen=1, hop_s=0.0, settings=UNLIMITED)
    _, (first, again) = replay(setup, requests)
    assert (first.cached, again.cached) == (0, 8 * BLOCK)
    assert again.ttft == pytest.approx(H200.prefill_s([(9, 8 * BLOCK)]))
    other = Request(2.0, 9 * BLOCK, 1, tuple(range(100, 109)), "t")
    _, outcomes = replay(
        Setup(H200, ctx=1, gen=1, hop_s=0.0, device_blocks=10, settings=UNLIMITED), [requests[0], other, requests[1]]
    )
    from_host = [o for o in outcomes if o.request == requests[1]][0]
    copied = 8 - 1  # one block of the first turn was still on the device
    assert from_host.cached == 8 * BLOCK
    assert from_host.ttft - again.ttft == pytest.approx(H200.host_copy_s(copied * BLOCK))


# --------------------------------------------------------------------------------------------------------- conservation


@pytest.mark.parametrize("setup", [
    Setup(H200, ctx=3, gen=2, device_blocks=60, host_blocks=40, gen_blocks=60, placement="round_robin"),
    Setup(H200, ctx=3, gen=2, device_blocks=60, host_blocks=40, gen_blocks=60, placement="prefix", order="fifo"),
    Setup(H200, both=4, device_blocks=80, host_blocks=0, placement="prefix", budget=512),
    Setup(H200, ctx=1, gen=1, placement="least_tokens", settings={"max_waiting": 4, "max_backlog_s": 0.2}),
])  # fmt: skip
def test_every_request_ends_once_and_leaves_nothing_behind(setup):
    requests = sessions(60, 4, per_s=20.0)
    world, outcomes = replay(setup, requests)
    assert [o.request for o in outcomes] == requests
    assert all(o.reports == 1 and (o.status == "finished" or o.status.startswith("refused")) for o in outcomes)
    assert any(o.status == "finished" for o in outcomes)
    for outcome in outcomes:
        if outcome.status == "finished":
            assert BEGIN_S <= outcome.arrived < outcome.first_at <= outcome.ended + setup.hop_s
            assert outcome.cached < outcome.request.tokens
    computed = sum(w.computed for w in world.workers.values())
    assert computed == sum(o.request.tokens - o.cached for o in outcomes if o.first_at >= 0)
    while world._events and world.now < max(o.ended for o in outcomes) + 1.0:  # let the last words arrive
        world.step()
    world.core.check()
    assert not world.core.state.records
    assert all(worker.free_blocks == worker.all_blocks for worker in world.workers.values())


def test_a_full_cluster_refuses_and_counts_it():
    setup = Setup(H200, ctx=1, gen=1, settings={"max_waiting": 4, "max_backlog_s": 0.2})
    found = point(setup, sessions(200, 2, per_s=200.0), 16, 1.0)
    assert 0 < found.refused < 1
    assert found.good(Limits()) + found.refused <= 1 + 1e-9


def test_a_busy_holder_of_duty_both_does_not_hold_up_who_comes_after():
    """The policy may prefer a busy worker; the request then waits there, and not at the head of the router's queue."""
    setup = Setup(H200, both=4, placement="prefix", budget=512)
    found = point(setup, sessions(60, 6, per_s=3.0), 16, 1.0)
    assert found.refused == 0
    assert found.ttft(0.9) < 0.7


def test_two_runs_are_equal_to_the_last_digit():
    setup = Setup(H200, ctx=3, gen=2, placement="prefix", device_blocks=60, host_blocks=40)
    runs = [replay(setup, sessions(40, 4, per_s=15.0)) for _ in range(2)]
    (_, one), (_, other) = runs
    assert one == other


def test_turns_of_a_closed_loop_wait_for_the_answer_before_them():
    requests = [
        Request(0.0, 2000, 50, (), "a"),
        Request(0.25, 2500, 5, (), "a", after=0),
        Request(0.0, 9, 3, (), "b", after=1),
    ]
    _, (first, second, third) = replay(Setup(H200, ctx=1, gen=1), requests)
    assert second.arrived == pytest.approx(first.ended + 0.25)
    assert third.arrived == pytest.approx(second.ended)


# ---------------------------------------------------------------------------------------------------------------- cache


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_block_cache_keeps_its_law_and_tells_exactly_what_it_has(data):
    device, host = data.draw(st.integers(6, 12)), data.draw(st.integers(0, 6))
    cache, told, leases = BlockCache(device, host), set(), []
    for _ in range(data.draw(st.integers(1, 25))):
        if leases and data.draw(st.booleans()):
            lease, names = leases.pop(data.draw(st.integers(0, len(leases) - 1)))
            cache.publish(lease, names)
            cache.release(lease)
        else:
            family = data.draw(st.integers(0, 3))
            names = [bytes([family, n]) for n in range(data.draw(st.integers(0, 5)))]
            had = cache.names()
            before = cache.free
            blocks = len(names) + 1
            lease = cache.reserve(names, blocks, len(names))
            if lease is None:
                assert before < blocks
                continue
            leading = list(itertools.takewhile(had.__contains__, names))
            assert lease.hits == len(leading) and len(lease.names) + lease.unnamed == blocks
            leases.append((lease, names))
        stored, removed = cache.take_events()
        assert not set(stored) & told and set(removed) <= told and not set(stored) & set(removed)
        told = (told | set(stored)) - set(removed)
        assert told == cache.names()
        assert 0 <= cache.held <= device and len(cache.names()) <= device + host
    for lease, _ in leases:
        cache.release(lease)
    assert cache.held == 0


# --------------------------------------------------------------------------------------------------------- trace, sums


def test_scaling_up_copies_the_trace_and_shares_only_the_system_prompt():
    requests = sessions(20, 3)
    (large,) = parts(requests, 64, 2.0)
    assert len(large) == 4 * len(requests)
    by_copy = {}
    for request in large:
        by_copy.setdefault(request.session.split(".")[0], set()).update(request.blocks)
    assert len(by_copy) == 4
    assert set.intersection(*by_copy.values()) == {0}
    assert all(a & b == {0} for a, b in itertools.combinations(by_copy.values(), 2))
    assert [r.at for r in large] == sorted(r.at for r in large)


def test_scaling_down_parts_the_sessions_and_loses_none():
    requests = sessions(32, 3)
    small = parts(requests, 4, 2.0)
    assert len(small) == 4
    assert sorted(r.tokens for part in small for r in part) == sorted(r.tokens for r in requests)
    of_part = [{r.session for r in part} for part in small]
    assert all(not a & b for a, b in itertools.combinations(of_part, 2))
    with pytest.raises(ValueError, match="17 workers are no multiple of 16"):
        parts(requests, 17, 1.0)


def test_the_ceiling_is_the_hit_rate_of_one_worker_that_forgets_nothing():
    requests = [Request(r.at * 100, r.tokens, 1, r.blocks, r.session) for r in sessions(10, 4)]
    setup = Setup(FLAT, ctx=1, gen=1, order="fifo", device_blocks=1 << 20, settings=UNLIMITED)
    found = point(setup, requests, 16, 1.0)
    assert found.hit == pytest.approx(ceiling(requests))
    assert hit_tokens(Request(0, 2 * BLOCK, 1, (1, 2), "s"), 2) == 2 * BLOCK - 1


@pytest.mark.skipif(not TRACE.exists(), reason="no trace here")
def test_the_conversation_trace_is_read_spread_and_has_its_known_ceiling():
    requests = read(TRACE)
    assert len(requests) == 2000
    assert ceiling(requests) == pytest.approx(0.294, abs=0.0006)
    assert all(a.at <= b.at for a, b in itertools.pairwise(requests))
    assert len({r.at for r in requests}) == 2000
    assert read(TRACE) == requests


def some_point(load, ttfts, slow=(0,) * len(GAP_LIMITS_S)):
    request = Request(0.0, 100, 101, (), "s")
    outcomes = [
        Outcome(request, i, 0.0, "finished", first_at=ttft, ended=ttft + 1, gaps=100, slow=slow)
        for i, ttft in enumerate(ttfts)
    ]
    return Point(load, load, outcomes, [1], {})


def test_goodput_is_interpolated_between_the_loads_around_it():
    limits = Limits(ttft_s=5.0)
    at = lambda load, good: some_point(load, [1.0] * good + [9.0] * (100 - good))  # noqa: E731
    assert goodput([at(1.0, 100), at(2.0, 95), at(3.0, 85)], limits) == pytest.approx(2.5)
    assert goodput([at(1.0, 80)], limits) == 0.0
    assert goodput([at(1.0, 100), at(2.0, 96)], limits) == 2.0


def test_the_crossing_is_the_first_gap_limit_from_which_theirs_is_no_worse():
    def slow_over(gap_s):
        return tuple(100 * (gap_s > limit) for limit in GAP_LIMITS_S)

    ours = {"split": [some_point(2.0, [1.0], slow_over(0.02))]}
    theirs = {"both": [some_point(3.0, [1.0], slow_over(0.1))]}
    assert crossing(ours, theirs, Limits()) == 0.1
    assert crossing(ours, {"both": [some_point(1.0, [1.0])]}, Limits()) is None
