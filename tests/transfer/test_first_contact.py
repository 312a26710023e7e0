"""F3: a pair is made before anybody needs it, beside everything that runs, and its first hand-off is like any other."""

from __future__ import annotations

import asyncio
import time

from node_rig import event, finish, prefill, submit, until

from tailrace.transfer.loop_events import Admitted, Arrived
from tailrace.transfer.messages import Bound, Delta, Peers, Progress, Tokens, pack_ids
from tailrace.transfer.switchboard import Switchboard

HANDSHAKE_S = 2.0
PACE_S = 0.02
STREAM = ("stream", 0)


def gap_s(rig, number):
    """A stream's next token, PACE_S after the one before."""
    started = time.monotonic()
    time.sleep(PACE_S)
    rig.gen.tokens([Delta(*STREAM, 0, number, pack_ids((9,)), (), None, None, (), 0, {})])
    assert rig.ingress.expect(Tokens).deltas[0].start == number
    return time.monotonic() - started


def hand_off_s(rig, number):
    """From Bind to where gen may decode; the pages are final before."""
    key, worker = (f"r{number}", 0), rig.ctx.config.worker
    rig.ingress.send(worker, submit(8, key=key))
    event(rig.ctx, Arrived)
    pages = prefill(rig, 8, key=key)
    finish(rig, 8, pages, key)
    rig.ingress.expect(Tokens)
    rig.router.expect(Progress)
    started = time.monotonic()
    rig.bind(8, number, key)
    admitted = event(rig.gen, Admitted)
    took = time.monotonic() - started
    rig.router.expect(Bound)
    rig.gen.kv.release(admitted.pages)
    rig.gen.ended(key, "finished")
    rig.router.forget()
    return took


def test_f3_a_slow_handshake_holds_up_no_stream_and_the_first_hand_off_is_as_quick_as_a_warm_one(one_rig, monkeypatch):
    rig = one_rig()
    rig.follow(rig.ctx, rig.gen)
    rig.pair()
    for node in (rig.ctx, rig.gen):
        rig.ingress.dial(node)
    rig.ingress.send("g0", submit(8, leg="local", key=STREAM))
    event(rig.gen, Arrived)
    warm = [hand_off_s(rig, number) for number in range(1, 9)][2:]
    alone = sorted(gap_s(rig, number) for number in range(60))

    plain = Switchboard._hello

    def slow_hello(self, link, hello):
        asyncio.get_running_loop().call_later(HANDSHAKE_S, plain, self, link, hello)

    monkeypatch.setattr(Switchboard, "_hello", slow_hello)
    old, new = rig.ctx, rig.node("ctx", "c1")
    rig.follow(new)
    joined = time.monotonic()
    rig.router.send("g0", Peers((rig.peer(old), rig.peer(new))))
    during, number = [], 60
    while new.config.boot not in rig.gen.ready_pairs:
        during.append(gap_s(rig, number))
        number += 1
        if number % 20 == 0:
            warm.append(hand_off_s(rig, number))  # the old pair is used meanwhile
        assert time.monotonic() < joined + 5 * HANDSHAKE_S
    assert time.monotonic() - joined >= HANDSHAKE_S and len(during) > 40
    during.sort()
    assert during[int(0.9 * len(during))] <= 1.5 * alone[int(0.9 * len(alone))]
    assert during[-1] < HANDSHAKE_S / 4, "a token waited for the handshake"
    rig.ctx = new
    rig.ingress.dial(new)
    assert hand_off_s(rig, number) <= 1.5 * max(warm)
    rig.gen.ended(STREAM, "finished")
    until(lambda: rig.gen.idle)
