"""Links over real sockets on the loopback, on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import socket
import struct

import pytest
import uvloop

from tailrace.model.errors import PeerError, ProtocolError
from tailrace.transfer import frames, links
from tailrace.transfer.links import AuthenticationError, Identity, dial, listen
from tailrace.transfer.messages import Answer, Query

SECRET = b"cluster secret"
ROUTER = Identity("router", "router-0", "b" * 16)
GEN = Identity("gen", "gen-0", "a" * 16)


class Side:
    """Collects what one side's callbacks are told."""

    def __init__(self):
        self.links, self.frames, self.closes = [], [], []
        self.changed = asyncio.Event()

    def on_link(self, link):
        self.links.append(link)
        self.changed.set()

    def on_frame(self, link, frame):
        self.frames.append(frame)
        self.changed.set()

    def on_close(self, link, reason):
        self.closes.append((link, reason))
        self.changed.set()

    async def until(self, condition):
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


async def start(server, secret=SECRET, me=ROUTER):
    return await listen(
        "127.0.0.1", 0, me, secret, on_link=server.on_link, on_frame=server.on_frame, on_close=server.on_close
    )


async def connect(listener, client, secret=SECRET, me=GEN, **more):
    return await dial(
        "127.0.0.1", listener.port, me, secret, on_frame=client.on_frame, on_close=client.on_close, **more
    )


def on_both_loops(scenario):
    """Run an async scenario under asyncio's own loop and under uvloop."""

    @pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
    def test(loop_factory):
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(scenario())

    test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
    return test


@on_both_loops
async def test_frames_cross_both_ways_in_order_and_each_side_knows_the_other():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    await server.until(lambda: server.links)
    assert link.peer == ROUTER and server.links[0].peer == GEN
    for i in range(100):
        link.send(Query(i, "ready"))
        server.links[0].send(Answer(i, "x" * i))
    await server.until(lambda: len(server.frames) == 100)
    await client.until(lambda: len(client.frames) == 100)
    assert [f.number for f in server.frames] == list(range(100)) == [f.number for f in client.frames]
    link.close()
    await server.until(lambda: server.closes)
    listener.close()


@on_both_loops
async def test_a_frame_of_many_megabytes_crosses_and_the_sender_sees_what_is_buffered():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    link.send(Answer(1, "y" * (48 << 20)))
    assert link.buffered > 48 << 20
    await server.until(lambda: server.frames)
    assert len(server.frames[0].text) == 48 << 20
    await asyncio.sleep(0.05)
    assert link.buffered == 0
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


@on_both_loops
async def test_a_wrong_secret_is_refused_on_both_sides():
    server, client = Side(), Side()
    listener = await start(server)
    with pytest.raises(AuthenticationError, match="secret"):
        await connect(listener, client, secret=b"another")
    await asyncio.sleep(0.05)
    assert not server.links and not client.closes
    listener.close()


@on_both_loops
async def test_another_boot_than_expected_is_an_error_that_names_both():
    server, client = Side(), Side()
    listener = await start(server)
    with pytest.raises(AuthenticationError) as error:
        await connect(listener, client, expect_boot="c" * 16)
    assert "c" * 16 in str(error.value) and ROUTER.boot in str(error.value)
    link = await connect(listener, client, expect_boot=ROUTER.boot)
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


@on_both_loops
async def test_close_is_told_exactly_once_on_each_side():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    await server.until(lambda: server.links)
    link.send(Query(1, "last words"))
    link.close("had enough")
    link.close("again")
    link.send(Query(2, "never sent"))
    await server.until(lambda: server.closes)
    await client.until(lambda: client.closes)
    await asyncio.sleep(0.05)
    assert [f.what for f in server.frames] == ["last words"]
    assert client.closes == [(link, "had enough")] and len(server.closes) == 1
    listener.close()


@on_both_loops
async def test_a_handler_that_raises_protocol_error_closes_its_own_link_only():
    server, good, bad = Side(), Side(), Side()

    def on_frame(link, frame):
        if frame.what == "nonsense":
            raise ProtocolError("no such thing")
        server.on_frame(link, frame)

    listener = await listen(
        "127.0.0.1", 0, ROUTER, SECRET, on_link=server.on_link, on_frame=on_frame, on_close=server.on_close
    )
    first = await connect(listener, good)
    second = await connect(listener, bad, me=Identity("gen", "gen-1", "d" * 16))
    second.send(Query(1, "nonsense"))
    second.send(Query(2, "not delivered"))
    await bad.until(lambda: bad.closes)
    first.send(Query(3, "still here"))
    await server.until(lambda: server.frames)
    assert [f.number for f in server.frames] == [3]
    assert server.closes[0][1] == "no such thing" and not good.closes
    first.close()
    await good.until(lambda: good.closes)
    listener.close()


@on_both_loops
async def test_garbage_after_the_handshake_closes_the_link_and_keeps_what_came_before():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    link.send(Query(1, "fine"))
    link._connection.send_bytes(struct.pack(">I", 1 << 31))
    await client.until(lambda: client.closes)
    assert [f.number for f in server.frames] == [1] and "over the bound" in server.closes[0][1]
    listener.close()


def raw_answer(port, data, wait=2.0):
    """Send bytes to the listener from outside, return what it says until it closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as sock:
        sock.sendall(data)
        out = b""
        while True:
            try:
                piece = sock.recv(65536)
            except ConnectionResetError:
                return out
            if not piece:
                return out
            out += piece


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 5000), struct.pack(">I", 2) + b"\x90\x90", b"\0" * 5000],
    ids=["http", "too_long", "array", "zeros"],
)
async def test_a_stranger_is_closed_before_it_is_authenticated(data):
    server = Side()
    listener = await start(server)
    await asyncio.to_thread(raw_answer, listener.port, data)
    assert not server.links and not server.closes
    link = await connect(listener, client := Side())
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


async def test_a_replayed_proof_is_of_no_use():
    """An eavesdropper that replays a dialer's bytes meets a fresh nonce."""
    server, client = Side(), Side()
    listener = await start(server)
    spoken = []
    send = links._Connection._send_handshake

    def record(self, *messages):
        if self.dialer:
            spoken.extend(len(m).to_bytes(4, "big") + m for m in messages)
        send(self, *messages)

    links._Connection._send_handshake = record
    try:
        link = await connect(listener, client)
    finally:
        links._Connection._send_handshake = send
    assert SECRET not in b"".join(spoken)
    await server.until(lambda: server.links)
    answer = await asyncio.to_thread(raw_answer, listener.port, b"".join(spoken))
    assert b"refused" in answer and len(server.links) == 1
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


async def test_a_listener_that_reflects_the_dialers_proof_is_not_believed():
    async def reflect(reader, writer):
        opening = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        theirs = links._Opening(ROUTER, b"n" * 32, "").pack()
        writer.write(len(theirs).to_bytes(4, "big") + theirs)
        size = await reader.readexactly(4)
        writer.write(size + await reader.readexactly(int.from_bytes(size, "big")))
        await reader.read()
        writer.close()
        assert opening

    server = await asyncio.start_server(reflect, "127.0.0.1", 0)
    client = Side()
    with pytest.raises(AuthenticationError):
        await dial(
            "127.0.0.1", server.sockets[0].getsockname()[1], GEN, SECRET,
            on_frame=client.on_frame, on_close=client.on_close,
        )  # fmt: skip
    server.close()


async def test_a_handshake_that_stalls_is_given_up_by_both_sides(monkeypatch):
    monkeypatch.setattr(links, "HANDSHAKE_S", 0.2)
    server, client = Side(), Side()
    listener = await start(server)
    assert b"not complete" in await asyncio.to_thread(raw_answer, listener.port, b"\0\0")
    mute = await asyncio.start_server(lambda r, w: asyncio.sleep(5), "127.0.0.1", 0)
    with pytest.raises(PeerError, match="no link to"):
        await dial(
            "127.0.0.1", mute.sockets[0].getsockname()[1], GEN, SECRET,
            on_frame=client.on_frame, on_close=client.on_close,
        )  # fmt: skip
    mute.close()
    listener.close()
    assert not server.links and not client.closes


async def test_nobody_listening_is_an_error_with_the_address():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    client = Side()
    with pytest.raises(PeerError, match=f"127.0.0.1:{port}"):
        await dial("127.0.0.1", port, GEN, SECRET, on_frame=client.on_frame, on_close=client.on_close)


@on_both_loops
async def test_a_taken_port_is_an_error_that_names_it():
    server = Side()
    listener = await start(server)
    with pytest.raises(OSError, match=str(listener.port)):
        await listen(
            "127.0.0.1", listener.port, ROUTER, SECRET,
            on_link=server.on_link, on_frame=server.on_frame, on_close=server.on_close,
        )  # fmt: skip
    listener.close()


async def test_a_frame_that_cannot_be_encoded_leaves_the_link_unharmed():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    with pytest.raises(ProtocolError):
        link.send(Query("one", "ready"))
    link.send(Query(2, "ready"))
    await server.until(lambda: server.frames)
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


async def test_a_peer_that_does_not_read_is_cut_off_at_the_bound(monkeypatch):
    monkeypatch.setattr(links, "MAX_BUFFERED_BYTES", 8 << 20)
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    await server.until(lambda: server.links)
    server.links[0]._connection.transport.pause_reading()
    while not client.closes:
        link.send(Answer(0, "z" * (1 << 20)))
        assert link.buffered < 16 << 20
        await asyncio.sleep(0)
    assert "does not read" in client.closes[0][1]
    listener.close()


async def test_the_sends_of_one_tick_leave_in_one_write():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    writes = []
    transport = link._connection.transport

    class Counting:
        def __getattr__(self, name):
            return getattr(transport, name)

        def write(self, data):
            writes.append(len(data))
            transport.write(data)

    link._connection.transport = Counting()
    for i in range(10):
        link.send(Query(i, "ready"))
    await server.until(lambda: len(server.frames) == 10)
    assert len(writes) == 1
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


async def test_sockets_have_nodelay_and_notice_a_silent_host():
    server, client = Side(), Side()
    listener = await start(server)
    link = await connect(listener, client)
    await server.until(lambda: server.links)
    for each in (link, server.links[0]):
        sock = each._connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == links.SILENT_S * 1000
    link.close()
    await client.until(lambda: client.closes)
    listener.close()


async def test_unfinished_handshakes_are_bounded(monkeypatch):
    monkeypatch.setattr(links, "MAX_PENDING_HANDSHAKES", 3)
    server, client = Side(), Side()
    listener = await start(server)
    idle = [await asyncio.open_connection("127.0.0.1", listener.port) for _ in range(6)]
    link = await connect(listener, client)
    assert len(listener._pending) <= 3
    link.close()
    await client.until(lambda: client.closes)
    for _, writer in idle:
        writer.close()
    listener.close()


def test_the_decoder_used_by_links_bounds_frames_at_64_mebibytes():
    assert frames.Decoder().max_bytes == 64 << 20
