"""The conformance suite, ucx's part: stations, messages that nobody waits for, peers that are killed or stopped."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
from transport_peers import KEY, ChildCtx, assert_moved, assert_quiet, assert_untouched, units_for, wait_for

from tailrace.transfer.messages import LandingGrant, PageDescriptor
from tailrace.transfer.transports.base import ChunkCounts, PostJob
from tailrace.transfer.transports.ucx_receive import Target
from tailrace.transfer.transports.ucx_thread import Arrived, Ended, Sent, UcxThread, new_tag

pytest.importorskip("ucxx", reason="the package ucxx is not installed")

TAG = new_tag()
LIMIT = 10 << 20


@pytest.fixture
def threads():
    made: list[UcxThread] = []

    def make() -> UcxThread:
        made.append(UcxThread())
        return made[-1]

    yield make
    for thread in made:
        thread.close()


def until(thread: UcxThread, kind: type, n: int = 1) -> list[Any]:
    """The next n events of a kind; others are dropped."""
    found: list[Any] = []
    wait_for(lambda: [found.extend(e for e in thread.drain() if isinstance(e, kind)), len(found) >= n][1], str(kind))
    return found


def test_messages_of_any_size_arrive_in_order_and_their_memory_is_free_then(threads):
    here, there = threads(), threads()
    station, port = there.listen(TAG, LIMIT)
    out = here.dial("127.0.0.1", port, TAG)
    rng = np.random.default_rng(1)
    messages = [rng.integers(0, 256, n, dtype=np.uint8) for n in (1, 24, 5000, 300_000, 9 << 20, 70_001, 3)]
    tickets = [here.send(out, data) for data in messages]
    arrived = until(there, Arrived, len(messages))
    assert [e.station for e in arrived] == [station] * len(messages)
    assert all((e.data == data).all() for e, data in zip(arrived, messages, strict=True))
    assert [(e.ticket, e.error) for e in until(here, Sent, len(messages))] == [(ticket, None) for ticket in tickets]


def test_a_thread_with_nothing_to_do_sleeps(threads):
    here, there = threads(), threads()
    out = here.dial("127.0.0.1", there.listen(TAG, LIMIT)[1], TAG)
    here.send(out, np.zeros(10, np.uint8))
    until(there, Arrived)
    began = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - began < 0.1


def test_what_a_station_had_not_taken_goes_to_no_later_one(threads):
    """ucxx gives memory of closed endpoints and workers to the next ones."""
    here, there = threads(), threads()
    for i in range(6):
        station, port = there.listen(TAG, LIMIT)
        out = here.dial("127.0.0.1", port, TAG)
        data = np.full(50_000, i, np.uint8)
        here.send(out, data)
        (arrived,) = until(there, Arrived)
        assert arrived.station == station and (arrived.data == i).all()
        late = np.full(9 << 20, 0xEE, np.uint8)
        here.send(out, late)  # nobody takes the whole of it before the station is closed
        there.close_station(station)
        until(here, Ended)
        here.close_station(out)


def sockets() -> int:
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile by a thread
            count += os.readlink(f"/proc/self/fd/{fd}").startswith("socket")
    return count


@pytest.mark.parametrize("how", ["at rest", "in the middle of a message"])
def test_a_station_that_is_closed_leaves_no_socket(how, threads):
    """B26: ucxx keeps a worker for ever if a receive still waits."""
    here, there = threads(), threads()
    seen = []
    for _ in range(4):
        station, port = there.listen(TAG, LIMIT)
        out = here.dial("127.0.0.1", port, TAG)
        here.send(out, np.zeros(10, np.uint8))
        until(there, Arrived)
        if how != "at rest":
            here.send(out, np.zeros(9 << 20, np.uint8))
            time.sleep(0.002)
        here.close_station(out)
        there.close_station(station)
        wait_for(lambda: not seen or sockets() <= seen[0], "the end of their sockets")
        time.sleep(0.0 if seen else 0.5)
        seen.append(sockets())


def test_a_message_longer_than_agreed_ends_its_station(threads):
    here, there = threads(), threads()
    station, port = there.listen(TAG, 1000)
    here.send(here.dial("127.0.0.1", port, TAG), np.zeros(1001, np.uint8))
    (ended,) = until(there, Ended)
    assert ended.station == station and "1001" in ended.error and "1000" in ended.error


def test_messages_under_another_tag_are_not_taken(threads):
    here, there = threads(), threads()
    station, port = there.listen(TAG, LIMIT)
    here.send(here.dial("127.0.0.1", port, new_tag()), np.ones(100, np.uint8))
    until(here, Sent)
    here.send(here.dial("127.0.0.1", port, TAG), np.full(100, 2, np.uint8))
    (arrived,) = until(there, Arrived)
    assert arrived.data[0] == 2 and arrived.station == station


def test_a_port_where_nobody_listens_ends_its_station_and_no_other(threads):
    here, there = threads(), threads()
    good = here.dial("127.0.0.1", there.listen(TAG, LIMIT)[1], TAG)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        bad = here.dial("127.0.0.1", taken.getsockname()[1], TAG)
        here.send(bad, np.zeros(10, np.uint8))
        (ended,) = until(here, Ended)
    assert ended.station == bad
    here.send(bad, np.zeros(10, np.uint8))
    (sent,) = until(here, Sent)
    assert not sent.posted, "it is known that nothing was sent"
    here.send(good, np.zeros(10, np.uint8))
    until(there, Arrived)


def test_closing_ends_everything_and_leaves_no_thread(threads):
    here, there = threads(), threads()
    out = here.dial("127.0.0.1", there.listen(TAG, LIMIT)[1], TAG)
    here.send(out, np.zeros(1 << 20, np.uint8))
    here.close()
    there.close()
    assert not [t for t in threading.enumerate() if t.name == "ucx"]


# ---------------------------------------------------------------------------------------------------- of the transport


def send_raw(ctx: Any, station: int, message: bytes) -> None:
    """Over a ctx's own connection, behind the back of its transport."""
    ctx.transport._thread.send(station, np.frombuffer(message, np.uint8))
    until(ctx.transport._thread, Sent)


def test_a_killed_ctx_is_noticed_and_its_chunks_return_because_its_station_is_closed(make_gen):
    gen = make_gen("ucx", 65536, 200)
    ctx = gen.new_ctx("c1", 200, child=True)
    other = gen.new_ctx("c2", 200, child=True)
    assert isinstance(ctx, ChildCtx)
    src = list(range(1, 161))
    units = units_for(src, ctx.write(src, owner=1), src)
    ctx.set_hold(30)  # the second chunk is never packed
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: len(move.ok) == 16, "the first chunk")
    ctx.kill()
    del gen.ctxs["c1"]
    wait_for(lambda: [gen.transport.poll(), gen.transport.counts() == ChunkCounts(4, 0, 0, 4)][1], "its end")
    assert not gen.transport.grants(KEY, "c1", 1), "nobody is there to send"
    assert_moved(gen, units[:16], owner=1)
    assert_untouched(gen, {dst for _, dst in units[:16]})
    gen.moves.clear()
    others = units_for(src[:40], other.write(src[:40], owner=2), src[:40])
    gen.finish(gen.start(("b", 1), other, others))
    assert_moved(gen, others, owner=2)
    ctx.close()


def test_what_was_posted_when_a_pair_ends_is_lost_and_the_rest_was_never_posted(make_gen):
    """To a gen that accepts the connection and takes nothing."""
    gen = make_gen("ucx", 262_144, 130, chunk_bytes=4 << 20)
    ctx = gen.new_ctx("c1", 130, child=True, pair=False)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        target = Target("127.0.0.1", deaf.getsockname()[1], b"t" * 16, TAG, 4, 4 << 20, 262_144)
        ctx.connect("deaf", target.encode())
        src = list(range(1, 65))
        pages = [d for d, _ in units_for(src, ctx.write(src, owner=1), src)]
        for i in range(4):
            grant = LandingGrant(i, i + 1, 4 << 20, 16)
            ctx.post(PostJob(i, KEY, "deaf", tuple(pages[16 * i : 16 * i + 16]), grant))
        wait_for(lambda: ctx.num_live("deaf") == 2, "two posted messages")
        ctx.disconnect("deaf")
        done: list[Any] = []
        wait_for(lambda: [done.extend(ctx.step()), len(done) == 4][1], "four answers")
    assert sorted(d.lost for d in done) == [False, False, True, True]
    assert all(d.error and not d.stale for d in done)
    gen.pair(ctx)  # and its staging is free again
    units = units_for(src, [d.generation for d in pages], src)
    gen.finish(gen.start(KEY, ctx, units))
    assert_moved(gen, units, owner=1)
    ctx.close()


def test_messages_without_the_pairs_token_or_a_grant_are_dropped_and_counted(make_gen, threads):
    gen = make_gen("ucx")
    ctx = gen.new_ctx("c1", 64, child=False)
    src = [1, 2, 3]
    units = units_for(src, ctx.write(src, owner=1), src)
    gen.unpack = False
    move = gen.start(KEY, ctx, units)
    gen.until(lambda: gen.landed, "the landing")
    target = Target.decode(gen.transport.info_for("c1"))
    assert target is not None
    sender = ctx.transport._ctx._senders[gen.boot]
    again = ctx.transport._ctx._chunk(0)[: 4096 + 3 * 16384].tobytes()
    for message in (b"x", b"nonsense" * 100, b"y" * 5000 + target.token + (7).to_bytes(8, "little"), again):
        send_raw(ctx, sender.station, message)
    stranger = threads()
    stranger.send(stranger.dial("127.0.0.1", target.port, target.tag), np.zeros(100, np.uint8))
    gen.until(lambda: gen.transport.stale_notifications == 5, "five messages that nobody waits for")
    gen.unpack = True
    gen.take(gen.landed[0])
    gen.finish(move)
    assert_moved(gen, units, owner=1)
    assert len(gen.landed) == 1
    assert_quiet(gen)


def test_a_copy_of_a_message_that_was_taken_is_dropped(make_gen):
    """Reorder and duplicate: the sequence number of a grant is good for one message."""
    gen = make_gen("ucx")
    ctx = gen.new_ctx("c1", 64, child=False)
    units = units_for([1], ctx.write([1], owner=1), [9])
    gen.finish(gen.start(KEY, ctx, units))
    side = ctx.transport._ctx
    sender = side._senders[gen.boot]
    message = next(side._chunk(i) for i in range(4) if side._chunk(i)[:8].tobytes() == b"landed 1")
    end = message.tobytes().rindex(sender.target.token) + 24
    send_raw(ctx, sender.station, message[:end].tobytes())
    gen.until(lambda: gen.transport.stale_notifications == 1, "the copy")
    assert len(gen.landed) == 1
    (descriptor,) = gen.transport.grants(("other", 1), "c1", 1)
    assert isinstance(descriptor, LandingGrant) and isinstance(units[0][0], PageDescriptor)
    gen.transport.reclaim(("other", 1), "c1")
    assert_quiet(gen)
