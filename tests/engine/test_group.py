"""What rank 0 says to the other ranks of its worker: it arrives as it was said; what is no message ends the link."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest

from tailrace.engine.group import MAX_MESSAGE_BYTES, Channel, Join, Make, Pass, Serve, Stop, Vote
from tailrace.engine.step import Row
from tailrace.model.errors import WorkerError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    channel = Channel(theirs, "rank 0")
    yield ours, channel
    ours.close()
    channel.close()


def framed(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("message", [Make("tailrace-a-b-c_r1"), Vote("no room"), Join(), Serve(), Stop()])
def test_a_message_arrives_as_it_was_said(ends, message):
    ours, channel = ends
    Channel(ours, "rank 1").send(message)
    assert channel.receive(1.0) == message


def test_the_rows_of_a_pass_arrive_without_their_samplers():
    rows = [
        Row("a", np.array([7], np.int32), 2**33, np.array([3, 0, 9], np.int32)),
        Row("b", np.arange(40, dtype=np.int32), 0, np.array([1, 2], np.int64), prompt_logprobs=2),
    ]
    found = Pass.of(rows, 1).rows()
    assert [(r.key, r.start, r.ids.tolist(), r.pages.tolist(), r.samplers) for r in found] == [
        (None, 2**33, [7], [3, 0, 9], ()),
        (None, 0, list(range(40)), [1, 2], ()),
    ]


def test_a_large_message_comes_in_pieces_and_several_in_one(ends):
    ours, channel = ends
    row = Row(None, np.arange(600_000, dtype=np.int32), 0, np.arange(40_000, dtype=np.int32))
    sender = threading.Thread(target=lambda: [Channel(ours, "rank 1").send(m) for m in (Pass.of([row], None), Serve())])
    sender.start()
    message = channel.receive(5.0)
    assert isinstance(message, Pass) and message.rows()[0].ids.tolist() == row.ids.tolist()
    sender.join()
    ours.sendall(framed(msgpack.packb(["Join"])) + framed(msgpack.packb(["Stop"])))
    assert [channel.receive(1.0) for _ in range(3)] == [Serve(), Join(), Stop()]


def test_half_a_message_is_waited_for_and_not_lost(ends):
    ours, channel = ends
    data = framed(msgpack.packb(["Vote", "because"]))
    ours.sendall(data[:6])
    assert channel.receive(0.01) is None
    ours.sendall(data[6:])
    assert channel.receive(1.0) == Vote("because")


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xc1"), framed(msgpack.packb(["Run", 1])), framed(msgpack.packb(["Vote"])), framed(msgpack.packb([])),
        framed(msgpack.packb(5)), struct.pack("<I", MAX_MESSAGE_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused(ends, data):
    ours, channel = ends
    ours.sendall(data)
    with pytest.raises(WorkerError, match="rank 0 said what is no message|rank 0 announces 268435457 bytes"):
        channel.receive(1.0)


def test_an_end_that_is_gone_is_told_to_who_sends_and_who_receives(ends):
    ours, channel = ends
    ours.close()
    with pytest.raises(WorkerError, match="rank 0 is gone"):
        channel.receive(1.0)
    with pytest.raises(WorkerError, match="rank 0 is gone"):
        channel.send(Serve())
