"""Codecs between real nodes over NIXL: what arrives and is counted, what the router is told, who may find the pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from handoff_sim import NAMESPACE, PAGE
from node_rig import COMPAT, KEY, event, finish, prefill, submit, until

from tailrace.kv_cache.block_hash import BlockHasher
from tailrace.kv_cache.manager import EXACT, Fidelity
from tailrace.transfer.codec_choice import offered
from tailrace.transfer.loop_events import Admitted, Arrived
from tailrace.transfer.messages import Bind, Bound, Heartbeat, Peers, Renew

TOKENS = 4 * PAGE
HASHES = BlockHasher(b"s", PAGE).hash_blocks("x", list(range(TOKENS)))


def connected(one_rig, kind: str, *codecs: str):
    compat = replace(COMPAT, codecs=codecs)
    rig = one_rig(kind, ctx={"compat": compat}, gen={"compat": compat})
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    rig.ingress.dial(rig.ctx)
    return rig


def hand_over(rig, key=KEY, seq=1) -> tuple[Admitted, list[np.ndarray]]:
    """One hand-off; what gen's loop is told, and the bytes that ctx's pages had."""
    rig.ingress.send("c0", submit(TOKENS, key=key, hashes=HASHES))
    assert event(rig.ctx, Arrived)
    rig.router.send("g0", Bind(seq, *key, rig.peer(rig.ctx), TOKENS, 8, 1, HASHES, NAMESPACE))
    assert rig.router.expect(Bound)
    if "g0" not in rig.ingress.links:
        rig.ingress.dial(rig.gen)
    rig.ingress.send("g0", Renew((key,), 5.0))
    pages = prefill(rig, TOKENS, key=key)
    before = [rig.memory["c0"][page].copy() for page in pages]
    finish(rig, TOKENS, pages, key=key)
    return event(rig.gen, Admitted), before


def moved(rig, kind: str, codec: str) -> float:
    return rig.gen.metrics.value("tailrace_transfer_bytes_total", kind=kind, transport=rig.kind, codec=codec)


def numbers(memory: np.ndarray) -> np.ndarray:
    return memory.view(np.float32)


@pytest.mark.parametrize(
    ("codec", "made_by", "step"), [("lossless", "lossless", ""), ("int8", "int8", "int8"), ("auto", "raw", "")]
)
def test_pages_cross_through_the_codec_and_are_counted_before_and_after_it(one_rig, codec, made_by, step):
    rig = connected(one_rig, "nixl", *offered(codec, ("int8",) if codec == "auto" else ()))
    admitted, before = hand_over(rig)
    assert admitted.fidelity == (Fidelity(0, step) if step else EXACT)
    for mine, theirs in zip(admitted.pages, before, strict=True):
        found = rig.memory["g0"][mine]
        assert np.allclose(numbers(found), numbers(theirs), rtol=1e-6, atol=0)
        assert (found == theirs).all() or step
    logical = moved(rig, "logical", made_by)
    assert logical == sum(page.nbytes for page in before)
    assert 0 < moved(rig, "wire", made_by) <= logical + 48 * len(before), "these pages are too small to be shortened"
    for node in (rig.gen, rig.ctx):
        until(lambda node=node: node.metrics.value("tailrace_codec_seconds_total") > 0)


def test_lossy_pages_serve_requests_over_such_a_pair_and_never_an_exact_one(one_rig):
    rig = connected(one_rig, "nixl", "int8")
    admitted, _ = hand_over(rig)
    kv = rig.gen.kv
    kv.publish(NAMESPACE, HASHES, admitted.pages, TOKENS, admitted.fidelity)  # as gen's loop does
    exact = kv.match_prefix(NAMESPACE, HASHES, TOKENS, whole=True)
    assert exact.num_tokens == 0, "a request that must have exact pages"
    wire = moved(rig, "wire", "int8")
    again, _ = hand_over(rig, ("b" * 32, 0), 2)
    assert again.num_matched_tokens == TOKENS and again.pages == admitted.pages
    assert again.fidelity == Fidelity(0, "int8")
    assert moved(rig, "wire", "int8") == wire, "all of it was there"


def test_exact_and_lossless_pages_are_found_by_all(one_rig):
    rig = connected(one_rig, "nixl", "lossless")
    admitted, _ = hand_over(rig)
    kv = rig.gen.kv
    kv.publish(NAMESPACE, HASHES, admitted.pages, TOKENS, admitted.fidelity)
    hit = kv.match_prefix(NAMESPACE, HASHES, TOKENS, whole=True)
    assert hit.num_tokens == TOKENS and hit.fidelity == EXACT
    kv.release(hit.pages)


@pytest.mark.parametrize(
    ("kind", "codec", "told", "why"),
    [
        ("nixl", "int8", "int8", "configured"),
        ("nixl", "auto", "raw", "the link is not measured yet"),
        ("shm", "int8", "raw", "gen reads the context worker's memory: there is no wire"),
    ],
)
def test_the_router_is_told_what_a_pairs_pages_go_through_and_why(one_rig, kind, codec, told, why):
    rig = connected(one_rig, kind, *offered(codec))
    admitted, before = hand_over(rig)
    if told == "raw":
        assert admitted.fidelity == EXACT
        for mine, theirs in zip(admitted.pages, before, strict=True):
            assert (rig.memory["g0"][mine] == theirs).all()
    teller = "c0" if codec == "auto" else "g0"  # ctx chooses
    peer = rig.nodes["g0" if teller == "c0" else "c0"].config.boot
    found: list[tuple[str, str, str]] = []

    def said() -> bool:
        beat = rig.router.expect(Heartbeat)
        found[:] = beat.codecs if beat.worker == teller else found
        return (peer, told, why) in found

    until(said)


def test_workers_without_a_common_codec_do_not_pair(one_rig):
    rig = one_rig(
        "nixl", ctx={"compat": replace(COMPAT, codecs=("int8",))}, gen={"compat": replace(COMPAT, codecs=("int4",))}
    )
    rig.follow(rig.ctx, rig.gen)
    rig.router.send("g0", Peers((rig.peer(rig.ctx),)))
    until(lambda: rig.gen.refused_pairs)
    (why,) = rig.gen.refused_pairs.values()
    assert "codecs" in why and "int8" in why and "int4" in why
