"""The smaller parts of a node: leases, bitmap, outbox, faults, metrics, epochs, comparing two workers' records."""

import asyncio
import json
import time
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.model.errors import PeerError
from tailrace.transfer import frames
from tailrace.transfer.bitmap import Unit, UnitBitmap, ranges
from tailrace.transfer.faults import ALL, FRAME_KINDS, FaultPlan, Faults
from tailrace.transfer.leases import Leases, Recent
from tailrace.transfer.links import Identity
from tailrace.transfer.messages import (
    CompatRecord,
    Delta,
    Epoch,
    Fail,
    GroupRecord,
    LandingGrant,
    PageDescriptor,
    PeerAddress,
    Stats,
    TokenLogprob,
    Tokens,
    Want,
    pack_ids,
    unpack_ids,
)
from tailrace.transfer.metrics import METRIC_NAMES, Metrics, exposition
from tailrace.transfer.node_stats import TransferRate
from tailrace.transfer.outbox import Outbox
from tailrace.transfer.pairing import PairDialer, codec_between, mismatch
from tailrace.transfer.router_session import EpochRule
from tailrace.transfer.transports.base import CopyFailed, spoil

GROUP = GroupRecord("history", None, ((0, "k 2x8, v 2x8"), (1, "k 2x8, v 2x8")), 2, 2, 8)
COMPAT = CompatRecord(1, "model", "float32", 16, 64, (GROUP,), (4096,), 1, ("raw", "int8"))
K1, K2 = ("r1", 0), ("r2", 0)


def delta(key, start, ids, finish=None, sample=0, **changes):
    return replace(Delta(*key, sample, start, pack_ids(ids), (), finish, None, (), 0, {}), **changes)


# ------------------------------------------------------------------------------------------------------- leases, bitmap


def test_a_lease_ends_when_its_time_is_over_and_not_before():
    leases = Leases()
    leases.grant("a", 10.0, 5.0)
    assert leases.expired(14.9) == [] and leases.expired(15.0) == ["a"]
    assert leases.renew("a", 14.0, 5.0) and leases.expired(18.9) == []
    assert not leases.renew("b", 14.0, 5.0)
    leases.drop("a")
    assert leases.expired(99.0) == []


def test_a_renewal_never_shortens_a_lease():
    leases = Leases()
    leases.grant("a", 0.0, 10.0)
    leases.renew("a", 1.0, 2.0)
    assert leases.left_s("a", 1.0) == 9.0


def test_the_memory_of_ended_keys_forgets_the_oldest():
    forgotten = []
    recent = Recent(2, lambda key, value: forgotten.append((key, value)))
    for i in range(4):
        recent.put(i, str(i))
    assert 1 not in recent and recent.get(3) == "3" and forgotten == [(0, "0"), (1, "1")]


@given(st.sets(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_a_bitmap_is_full_exactly_when_every_expected_unit_came(expected, came):
    bitmap = UnitBitmap(Unit(0, o) for o in expected)
    new = [bitmap.set(Unit(0, o)) for o in came]
    assert sum(new) == len(expected & set(came)) and bitmap.full == (expected <= set(came))
    assert [u.ordinal for u in bitmap.missing()] == sorted(expected - set(came))


@given(st.sets(st.integers(0, 60)))
def test_ranges_cover_exactly_their_units(ordinals):
    covered = [o for _, first, end in ranges(Unit(0, o) for o in sorted(ordinals)) for o in range(first, end)]
    assert covered == sorted(ordinals)


# --------------------------------------------------------------------------------------------------------------- outbox


def flushed(outbox, takes=lambda link: True):
    return list(outbox.flush(takes))


def test_tokens_that_wait_for_a_link_merge_into_one_delta_a_sample():
    outbox = Outbox(5.0)
    logprob = TokenLogprob(1, -0.5, ())
    outbox.put(K1, delta(K1, 0, (1,), logprobs=(logprob,), prompt_logprobs=(logprob,), stamps={"queue": 1.0}))
    outbox.put(K1, delta(K1, 1, (2,), logprobs=(logprob,), stamps={"wire": 2.0}))
    outbox.put(K1, delta(K1, 0, (9,), sample=1))
    outbox.put(K1, delta(K1, 2, (3,), "stop", stop_id=3))
    assert flushed(outbox) == []
    outbox.attach(K1, "link")
    ((link, frame),) = flushed(outbox)
    first, other = frame.deltas
    assert link == "link" and unpack_ids(first.ids) == [1, 2, 3] and (first.finish, first.stop_id) == ("stop", 3)
    assert first.logprobs == (logprob, logprob) and first.prompt_logprobs == (logprob,)
    assert first.stamps == {"queue": 1.0, "wire": 2.0} and other.sample == 1
    assert flushed(outbox) == [] and not outbox.pending


def test_deltas_that_do_not_join_are_not_merged():
    outbox = Outbox(5.0)
    outbox.attach(K1, "link")
    outbox.put(K1, delta(K1, 0, (1,)))
    outbox.put(K1, delta(K1, 5, (6,)))
    ((_, frame),) = flushed(outbox)
    assert [d.start for d in frame.deltas] == [0, 5]


def test_a_link_gets_one_frame_a_flush_and_failures_after_it():
    outbox = Outbox(5.0)
    for key in (K1, K2):
        outbox.attach(key, "link")
        outbox.put(key, delta(key, 0, (1,)))
    outbox.put(K1, Fail(*K1, "internal", "", False))
    out = flushed(outbox)
    assert [type(frame) for _, frame in out] == [Tokens, Fail] and len(out[0][1].deltas) == 2


def test_a_full_link_keeps_only_its_own_tokens_back():
    outbox = Outbox(5.0)
    outbox.attach(K1, "full")
    outbox.attach(K2, "free")
    for key in (K1, K2):
        outbox.put(key, delta(key, 0, (1,)))
    assert [link for link, _ in flushed(outbox, lambda link: link == "free")] == ["free"]
    assert outbox.waits_for_link
    outbox.put(K1, delta(K1, 1, (2,)))
    ((_, frame),) = flushed(outbox)
    assert unpack_ids(frame.deltas[0].ids) == [1, 2]


def test_what_nobody_fetches_in_time_is_dropped_and_routes_end():
    outbox = Outbox(5.0)
    outbox.put(K1, delta(K1, 0, (1,), "stop"))
    outbox.attach(K2, "link")
    outbox.expire(10.0, lambda key: False)
    assert len(outbox) == 1 and outbox.pending
    outbox.expire(15.0, lambda key: False)
    assert len(outbox) == 0 and not outbox.pending


def test_a_lost_link_keeps_its_tokens_for_the_next():
    outbox = Outbox(5.0)
    outbox.attach(K1, "old")
    outbox.detach("old")
    outbox.put(K1, delta(K1, 0, (1,)))
    assert flushed(outbox) == []
    assert outbox.reattach(K1, "new")
    assert not outbox.reattach(("unknown", 0), "new")
    assert [link for link, _ in flushed(outbox)] == ["new"] and len(outbox) == 1


# --------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[", "JSON"), ("[]", "list"), ('{"hold": 1}', "hold"), ('{"hold_before_page": -1}', "hold_before_page"),
        ('{"drop": {"hello": 1}}', "drop"), ('{"drop": {"ready": true}}', "drop"),
        ('{"late_s": {"ready": "x"}}', "late_s"),
        ('{"jitter_s": {"ready": -2}}', "jitter_s"), ('{"slow_bytes_per_s": 0}', "slow_bytes_per_s"),
        ('{"poison": 1}', "poison"), ('{"preempt": -1}', "preempt"), ('{"slow_pass_s": "1"}', "slow_pass_s"),
        ('{"flip": {"wire": 1}}', "flip"), ('{"flip": {"pool": -1}}', "flip"), ('{"flip_mask": 256}', "flip_mask"),
        ('{"flip_mask": 0}', "flip_mask"), ('{"flip_byte": -1}', "flip_byte"), ('{"flip_times": -2}', "flip_times"),
        ('{"fail_times": -2}', "fail_times"), ('{"fail_read": 1.5}', "fail_read"),
    ],
)  # fmt: skip
def test_a_wrong_fault_plan_is_refused_by_name(text, word):
    with pytest.raises(ValueError, match=word):
        FaultPlan.parse(text)


def test_a_plan_that_names_no_fault_changes_nothing():
    faults = Faults()
    assert FaultPlan.parse("{}") == FaultPlan() == faults.plan
    off = {f.name: getattr(FaultPlan(), f.name) for f in fields(FaultPlan)}
    assert not any(value for name, value in off.items() if name not in ("fail_times", "flip_times", "flip_mask")), off
    assert [faults.frame(kind) for kind in FRAME_KINDS] == [(1, 0.0)] * len(FRAME_KINDS)
    want = Want(*K1, "shm", (), (), True)
    assert not any(faults.hushes(want) for _ in range(3))
    started = time.monotonic()
    for reads in (True, False):
        assert all(faults.hook(4096, reads=reads)(K1, page(i)) for i in range(100))
    assert time.monotonic() - started < 0.5


def test_random_delays_stay_within_their_bound_and_differ():
    faults = Faults(FaultPlan.parse('{"jitter_s": {"ready": 0.005}, "late_s": {"ready": 1}}'))
    delays = [faults.frame("ready")[1] for _ in range(50)]
    assert all(1 <= delay <= 1.005 for delay in delays) and len(set(delays)) == 50
    assert faults.frame("release") == (1, 0.0)


def test_faults_on_frames_are_spent():
    faults = Faults(FaultPlan.parse(json.dumps({"drop": {"ready": 1}, "dup": {"ready": 1}, "late_s": {"release": 2}})))
    assert [faults.frame("ready") for _ in range(3)] == [(0, 0.0), (2, 0.0), (1, 0.0)]
    assert faults.frame("release") == (1, 2.0)
    faults.set(FaultPlan.parse(json.dumps({"drop": {"ready": ALL}})))
    assert [faults.frame("ready")[0] for _ in range(5)] == [0] * 5
    faults.set(FaultPlan())
    assert faults.frame("ready") == (1, 0.0)


def test_a_flip_changes_one_byte_of_its_page_in_its_place_so_many_times():
    faults = Faults(FaultPlan.parse(json.dumps({"flip": {"unpacked": 2}, "flip_byte": 5, "flip_mask": 3})))
    data = np.zeros(8, np.uint8)
    hook = faults.hook(8, reads=True)
    for place, ordinal in (("unpacked", 1), ("staging", 2)):
        spoil(hook, place, ordinal, data)
    assert not data.any()
    spoil(hook, "unpacked", 2, data)
    assert data.tolist() == [0, 0, 0, 0, 0, 3, 0, 0]
    spoil(hook, "unpacked", 2, data)
    assert data[5] == 3
    spoil(lambda key, descriptor: True, "unpacked", 2, data)  # a hook that flips nothing
    spoil(None, "unpacked", 2, data)


def page(ordinal):
    return PageDescriptor(0, ordinal, 1, 1)


def test_a_held_transfer_stops_before_its_page_until_another_plan_is_set():
    faults = Faults(FaultPlan(hold_before_page=2))
    hook = faults.hook(4096, reads=True)
    assert hook(K1, page(1)) and not hook(K1, page(2)) and not hook(K1, page(3))
    faults.lift(K1)
    assert hook(K1, page(2)) and not hook(K2, page(2))
    faults.set(FaultPlan())
    assert hook(K2, page(2))


def test_a_renewal_that_repeats_its_grants_is_hushed_and_one_with_a_new_grant_is_not():
    faults = Faults(FaultPlan(hold_before_page=1))
    first, second = LandingGrant(0, 7, 100, 3), LandingGrant(1, 8, 100, 3)
    want = Want("r", 0, "nixl", ((0, 0, 3),), (first,), True)
    assert [faults.hushes(want) for _ in range(2)] == [False, True]
    assert not faults.hushes(replace(want, grants=(first, second)))
    assert faults.hushes(replace(want, grants=(second,)))


def test_renewals_are_hushed_while_transfers_are_held():
    faults = Faults(FaultPlan(hold_before_page=0))
    want = Want(*K1, "shm", (), (), True)
    assert [faults.hushes(want) for _ in range(3)] == [False, True, True]
    faults.set(FaultPlan())
    assert not faults.hushes(want)


def test_a_read_fails_as_often_as_the_plan_says():
    faults = Faults(FaultPlan(fail_read=1, fail_times=2))
    reads, posts = faults.hook(4096, reads=True), faults.hook(4096, reads=False)
    assert posts(K1, page(1)) and reads(K1, page(0))
    for _ in range(2):
        with pytest.raises(CopyFailed):
            reads(K1, page(1))
    assert reads(K1, page(1))


# -------------------------------------------------------------------------------------------------------------- metrics


def test_families_survive_the_wire_and_merge_into_one_exposition():
    ctx, gen = Metrics("ctx", "c0", "m"), Metrics("gen", "g0", "m")
    ctx.add("tailrace_stale_frames_total")
    gen.add("tailrace_stale_frames_total", 2)
    gen.add("tailrace_transfer_seconds", 0.02, part="total")
    gen.add("tailrace_pages", 7, pool="kv", state="free")
    sent = [Stats(role, name, m.families()) for role, name, m in (("ctx", "c0", ctx), ("gen", "g0", gen))]
    text = exposition([frames.unpack(frames.pack(stats)) for stats in sent]).decode()
    assert text.count("# TYPE tailrace_stale_frames_total counter") == 1
    assert 'tailrace_stale_frames_total{model="m",role="ctx",worker="c0"} 1.0' in text
    assert 'tailrace_stale_frames_total{model="m",role="gen",worker="g0"} 2.0' in text
    assert 'tailrace_transfer_seconds_bucket{le="0.025",model="m",part="total",role="gen",worker="g0"} 1.0' in text
    assert "_created" not in text


def test_names_are_those_of_the_design():
    assert {"tailrace_pages", "tailrace_ttft_seconds", "tailrace_transfer_bytes_total"} <= set(METRIC_NAMES)
    for name in METRIC_NAMES:
        assert name.startswith("tailrace_")


def test_a_counter_that_its_owner_counts_is_raised_to_its_total():
    metrics = Metrics("gen", "g0", "m")
    for total in (3, 3, 8, 5):
        metrics.raise_to("tailrace_output_tokens_total", total)
    assert metrics.value("tailrace_output_tokens_total") == 8


def test_the_rate_counts_only_the_time_in_which_reads_ran():
    rate = TransferRate()
    rate.started(0.0)
    rate.started(0.5)
    rate.ended(1000, 1.0)
    assert rate.bytes_per_s == 1000
    rate.ended(1000, 2.0)
    rate.started(100.0)
    rate.ended(1000, 101.0)
    assert rate.bytes_per_s == pytest.approx(1000)


# ------------------------------------------------------------------------------------------------------ epochs, records


def test_a_worker_keeps_the_first_router_of_a_number():
    rule = EpochRule()
    assert rule.accepts(Epoch(3, "a")) and rule.accepts(Epoch(3, "a"))
    assert not rule.accepts(Epoch(3, "b")) and not rule.accepts(Epoch(2, "a")) and not rule.accepts(Epoch(2, "c"))
    assert rule.accepts(Epoch(4, "b")) and not rule.accepts(Epoch(3, "a"))
    assert (rule.number, rule.router_boot) == (4, "b")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"protocol": 2}, "protocol"), ({"model": "other"}, "model"), ({"block_tokens": 32}, "block_tokens"),
        ({"dtype": "float16", "codecs": ("raw",)}, "dtype"), ({"codecs": ("fp8",)}, "codecs"), ({"tp": 3}, "tp"),
        ({"tp": 0}, "tp"), ({"tokens_per_page": 0}, "tokens_per_page"), ({"tokens_per_page": 24}, "tokens_per_page"),
        ({"dtype": "int4"}, "dtype"),
        ({"groups": (GROUP, GROUP)}, "groups"), ({"groups": (replace(GROUP, kind="window"),)}, "groups[0].kind"),
        ({"groups": (replace(GROUP, window=24),)}, "groups[0].window"),
        ({"groups": (replace(GROUP, layers=(*GROUP.layers, (2, "k 2x8, v 2x8"))),)}, "groups[0] layers 2"),
        ({"groups": (replace(GROUP, layers=((0, "k 4x8, v 4x8"), (1, "k 4x8, v 4x8"))),)}, "groups[0] layers 0, 1"),
        ({"groups": (replace(GROUP, layers=(GROUP.layers[0], (1, "k 2x4, v 2x4"))),)}, "groups[0] layers 1"),
        ({"groups": (replace(GROUP, dim=4),)}, "groups[0].dim"),
    ],
)  # fmt: skip
def test_the_first_differing_field_is_named_with_both_values(changes, field):
    theirs = replace(COMPAT, **changes)
    refused = mismatch(COMPAT, theirs)
    assert refused is not None and refused.field == field
    assert repr(refused.mine) in str(refused) and repr(refused.theirs) in str(refused)


def test_equal_records_and_a_common_codec_pair():
    assert mismatch(COMPAT, COMPAT) is None
    assert mismatch(COMPAT, replace(COMPAT, codecs=("raw",))) is None


@pytest.mark.parametrize(
    "changes", [{"tokens_per_page": 8, "page_bytes": (2048,)}, {"tp": 4, "page_bytes": (2048,)}, {"dtype": "float16"}]
)
def test_page_sizes_ranks_and_with_a_common_codec_dtypes_may_differ(changes):
    theirs = replace(COMPAT, **changes)
    assert mismatch(COMPAT, theirs) is None and mismatch(theirs, COMPAT) is None


def test_a_dtype_is_bridged_by_the_first_common_codec_that_is_not_raw():
    other = replace(COMPAT, dtype="float16")
    assert codec_between(COMPAT, COMPAT) == "raw"
    assert codec_between(COMPAT, other) == "int8"
    assert codec_between(COMPAT, replace(other, codecs=("raw",))) is None


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), PeerError("not there yet")])
async def test_a_pair_that_cannot_be_made_now_is_tried_again(monkeypatch, error):
    """B26: an error of the system is no fault of the worker's books; without this the peer would stay unpaired."""
    served, tries, told = asyncio.Event(), [], []

    async def serve(self: PairDialer, peer: PeerAddress) -> None:
        tries.append(peer.boot)
        if len(tries) == 1:
            raise error
        served.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(PairDialer, "_serve", serve)
    asyncio.get_running_loop().set_exception_handler(lambda _, what: told.append(what))
    dialer = PairDialer("gen0", Identity("gen", "gen0", "g0"), b"secret", COMPAT, [], None, asyncio.Event())
    dialer.want([PeerAddress("ctx0", "c0", "127.0.0.1", 1)])
    await asyncio.wait_for(served.wait(), 5)
    await dialer.close()
    assert tries == ["c0", "c0"] and not told
