"""Case A24 on real nodes and transports: a byte flips in ctx's pool, in staging, or in gen's pool after the unpack."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from node_rig import CORE, KEY, PAGES, event, finish, prefill, submit, until

from tailrace.transfer.loop_events import Admitted, Arrived, FaultsSet
from tailrace.transfer.messages import Bound, Fail, Renew, SetFaults
from tailrace.transfer.metrics import METRICS

VERIFY = replace(CORE, verify_pages=True)
TOKENS = 18
CORRUPT = "tailrace_corrupt_pages_total"
PLACES = [("shm", "pool"), ("shm", "unpacked"), ("nixl", "pool"), ("nixl", "staging"), ("nixl", "unpacked")]


def flip(rig, where, **plan):
    """Set a plan at the worker in whose memory this place is, the other one's plan being empty."""
    worker, node = ("g0", rig.gen) if where == "unpacked" else ("c0", rig.ctx)
    rig.router.send(worker, SetFaults(json.dumps(plan)))
    assert event(node, FaultsSet)


def hand_over(rig, where, core, key=KEY, seq=1, **plan):
    """One hand-off with this fault: held until ctx has summed and flipped. Returns ctx's pages."""
    hold = where == "pool" and core.verify_pages  # a page flips in ctx's pool once it has been summed
    flip(rig, where, flip={where: 2}, **plan)
    if hold:
        reader = "g0" if rig.kind == "shm" else "c0"
        node = rig.gen if rig.kind == "shm" else rig.ctx
        rig.router.send(reader, SetFaults(json.dumps({"hold_before_page": 0, **({"flip": {where: 2}} | plan)})))
        assert event(node, FaultsSet)
    rig.ingress.send("c0", submit(TOKENS, key=key))
    assert event(rig.ctx, Arrived)
    rig.bind(TOKENS, seq, key)
    assert rig.router.expect(Bound)
    rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", Renew((key,), 5.0))
    pages = prefill(rig, TOKENS, key=key)
    before = [rig.memory["c0"][page].copy() for page in pages]
    finish(rig, TOKENS, pages, key=key)
    if hold:
        until(lambda: (rig.memory["c0"][pages[2]] != before[2]).any())
        rig.router.send(reader, SetFaults("{}"))
        assert event(node, FaultsSet)
    return pages, before


def connected(one_rig, kind, core):
    rig = one_rig(kind, ctx={"faults": True, "core": core}, gen={"faults": True, "core": core})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    return rig


@pytest.mark.parametrize(("kind", "where"), PLACES)
def test_a_flipped_byte_is_found_counted_and_never_decoded(one_rig, kind, where):
    """Where it is right at ctx the page is brought over again; where ctx's own is wrong the attempt is given up."""
    rig = connected(one_rig, kind, VERIFY)
    _, before = hand_over(rig, where, VERIFY)
    if where == "pool":
        assert rig.ingress.expect(Fail).code == "corrupt"
        assert rig.gen.metrics.value(CORRUPT) == 2
        until(lambda: rig.gen.kv.counts().free == PAGES - 1)
        return
    admitted = event(rig.gen, Admitted)
    assert rig.gen.metrics.value(CORRUPT) == 1
    for page, expected in zip(admitted.pages, before, strict=True):
        assert np.array_equal(rig.memory["g0"][page], expected)
    until(lambda: rig.ctx.kv.counts().used == 0 and rig.ctx.idle)


@pytest.mark.parametrize(("kind", "where"), [p for p in PLACES if p[1] != "staging"])
def test_without_verification_nobody_notices(one_rig, kind, where):
    """The control of the test above. In staging a chunk's checksum finds it all the same."""
    rig = connected(one_rig, kind, CORE)
    _, before = hand_over(rig, where, CORE)
    admitted = event(rig.gen, Admitted)
    assert rig.gen.metrics.value(CORRUPT) == 0
    differ = [
        not np.array_equal(rig.memory["g0"][page], expected)
        for page, expected in zip(admitted.pages, before, strict=True)
    ]
    assert where == "pool" or differ == [False, False, True, False, False]
    if where == "pool":  # what gen has is what ctx has, and both are wrong
        right = (2 * 7 + 4) % 251
        assert (rig.memory["g0"][admitted.pages[2]] != right).sum() == 1


@pytest.mark.parametrize("kind", ["shm", "nixl"])
def test_a_page_that_is_wrong_again_and_again_ends_the_attempt_as_the_policy_says(one_rig, kind):
    core = replace(VERIFY, retry_failed_transfers=False)
    rig = connected(one_rig, kind, core)
    hand_over(rig, "unpacked", core, flip_times=-1, flip_byte=5, flip_mask=1)
    fail = rig.ingress.expect(Fail)
    assert fail.code == "corrupt" and not fail.retryable
    assert rig.gen.metrics.value(CORRUPT) == 2
    until(lambda: rig.gen.kv.counts().free == PAGES - 1)


def test_a_gen_that_verifies_gets_sums_also_from_a_ctx_that_was_not_told_to(one_rig):
    rig = one_rig("shm", ctx={"core": CORE}, gen={"core": VERIFY, "faults": True})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    hand_over(rig, "unpacked", VERIFY)
    assert event(rig.gen, Admitted)
    assert rig.gen.metrics.value(CORRUPT) == 1


def test_the_counter_is_a_metric_of_the_product():
    assert METRICS[CORRUPT].kind == "counter"
