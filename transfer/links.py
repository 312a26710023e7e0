"""Links: authenticated, multiplexed TCP connections that carry frames between processes, on asyncio (or uvloop).

    dialer                                     listener
    opening(protocol, identity, nonce, expect) ->
                                               <- opening(protocol, identity, nonce)
    proof = HMAC(secret, "dialer", openings)   ->
                                               <- proof = HMAC(secret, "listener", openings), or a refusal in words
    frames                                     <-> frames

The secret itself never crosses the wire; both proofs cover both openings, thus both boot ids, roles and nonces. Until
the proofs are checked a side accepts at most `HANDSHAKE_BYTES` and waits at most `HANDSHAKE_S`. A peer is (address,
boot id): a dialer that names the boot it expects is told when another process answers at that address.

Belongs to one event loop and is not thread-safe. Knows no frame's meaning. The reader never stops reading, so one slow
request cannot hold up the others on a link; a sender looks at `Link.buffered` to hold back by itself. When the peer
dies, or its host falls silent, or it sends what is no frame, `on_close` is called once and the link is gone: dialing
again is its owner's decision.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from tailrace.model.errors import PeerError, ProtocolError
from tailrace.transfer import frames
from tailrace.transfer.messages import PROTOCOL_VERSION

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
HANDSHAKE_BYTES = 4096
MAX_PENDING_HANDSHAKES = 256
SILENT_S = 20  # unacknowledged for this long: the peer's host is gone
MAX_BUFFERED_BYTES = 256 << 20  # a peer that is alive but does not read is cut off here
CLOSE_FLUSH_S = 1.0
_OPENING, _PROOF, _REFUSED = "tailrace", "proof", "refused"  # first element of the handshake's messages
_NONCE_BYTES = 32
_NAME_BYTES = 256

OnFrame = Callable[["Link", Any], None]
OnClose = Callable[["Link", str], None]
OnLink = Callable[["Link"], None]


class AuthenticationError(PeerError):
    """The other side does not know the cluster secret, or is not the process that was asked for."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who is at one end of a link. role: router | ingress | ctx | gen ...; boot: random per process start."""

    role: str
    process: str
    boot: str


@dataclass(frozen=True, slots=True)
class _Opening:
    """First message of each side. `expect`: the boot id that the dialer wants to meet, empty for any."""

    identity: Identity
    nonce: bytes
    expect: str

    def pack(self) -> bytes:
        me = self.identity
        return _packed(_OPENING, PROTOCOL_VERSION, me.role, me.process, me.boot, self.nonce, self.expect)

    @staticmethod
    def of(fields: tuple[Any, ...]) -> _Opening:
        if len(fields) != 7 or fields[0] != _OPENING:
            raise ProtocolError("the peer does not speak Tailrace's protocol")
        if fields[1] != PROTOCOL_VERSION:
            versions = f"mine {PROTOCOL_VERSION}, theirs {fields[1]!r}"
            raise ProtocolError(f"protocol version differs: {versions[:_NAME_BYTES]}")
        role, process, boot, nonce, expect = fields[2:]
        texts_right = all(type(t) is str and len(t) <= _NAME_BYTES for t in (role, process, boot, expect))
        if not texts_right or type(nonce) is not bytes or len(nonce) != _NONCE_BYTES:
            raise ProtocolError("malformed opening of a link")
        return _Opening(Identity(role, process, boot), nonce, expect)


def _packed(*fields: object) -> bytes:
    return cast(bytes, msgpack.packb(fields))


def _unpacked(body: bytes) -> tuple[Any, ...]:
    """Fields of a handshake message; raises AuthenticationError with its text if it is a refusal."""
    try:
        value = msgpack.unpackb(body, use_list=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"malformed handshake: {error or type(error).__name__}") from error
    if type(value) is not tuple or not value:
        raise ProtocolError("malformed handshake")
    if value[0] == _REFUSED and len(value) == 2:
        raise AuthenticationError(f"refused by the peer: {str(value[1])[: 2 * _NAME_BYTES]}")
    return value


class Link:
    """One authenticated connection. Made by `dial` and `listen` only.

    Attributes:
        peer: who is at the other end, proven to know the secret.
        remote: the other end's IP address, as the socket sees it.
    """

    def __init__(self, connection: _Connection, peer: Identity, remote: str) -> None:
        self.peer, self.remote = peer, remote
        self._connection = connection

    def __repr__(self) -> str:
        return f"<Link to {self.peer.role} {self.peer.process} boot {self.peer.boot} at {self.remote}>"

    @property
    def closed(self) -> bool:
        """True once `close` was called or the peer is gone: `send` then drops its frame silently."""
        return self._connection.closing

    @property
    def buffered(self) -> int:
        """Bytes that were sent here and that the kernel has not taken yet."""
        return self._connection.buffered

    def send(self, frame: object) -> None:
        """Queue a frame; all frames of one loop tick go out in one write.

        Raises:
            ProtocolError: the frame is wrong or too long (frames.encode); the link is unharmed.
        """
        if not self._connection.closing:
            self._connection.send_bytes(frames.encode(frame))

    def close(self, reason: str = "closed here") -> None:
        """Send what is queued, then close. No frame is delivered after this; `on_close` follows, once."""
        self._connection.close(reason)


class _Connection(asyncio.Protocol):
    """Handshake, then frames. One class for both ends: the dialer speaks first."""

    def __init__(
        self, me: Identity, secret: bytes, on_frame: OnFrame, on_close: OnClose, *,
        dialer: bool, expect_boot: str = "", on_link: OnLink | None = None,
    ) -> None:  # fmt: skip
        self.me, self.secret, self.dialer, self.expect_boot = me, secret, dialer, expect_boot
        self.on_frame, self.on_close, self.on_link = on_frame, on_close, on_link
        self.mine = _Opening(me, secrets.token_bytes(_NONCE_BYTES), expect_boot).pack()
        self.theirs: bytes | None = None
        self.peer: Identity | None = None
        self.link: Link | None = None
        self.decoder = frames.Decoder()
        self.loop = asyncio.get_running_loop()
        self.established: asyncio.Future[Link] = self.loop.create_future()
        self.established.add_done_callback(_retrieve)
        self.closing, self.reason = False, ""
        self.transport: asyncio.Transport | None = None
        self.early = bytearray()  # bytes of an unfinished handshake message
        self.queued: list[bytes] = []
        self.queued_bytes = 0
        self.timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------- asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _set_socket_options(transport.get_extra_info("socket"))
        self.timer = self.loop.call_later(HANDSHAKE_S, self._give_up)
        if self.dialer:
            self._send_handshake(self.mine)

    def data_received(self, data: bytes) -> None:
        if self.closing:
            return
        try:
            if self.link is None:
                data = self._handshake_bytes(data)
            if data and self.link is not None and not self.closing:
                for frame in self.decoder.frames(data):
                    self.on_frame(self.link, frame)
                    if self.closing:
                        return
        except ProtocolError as error:
            self._refuse(str(error))
        except AuthenticationError as error:
            self._refuse(str(error), error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self.queued.clear()
        self.queued_bytes = 0
        if self.timer is not None:
            self.timer.cancel()
        reason = self.reason or (f"connection lost: {exc}" if exc else "closed by the peer")
        if self.link is not None:
            self.on_close(self.link, reason)
        elif not self.established.done():
            self.established.set_exception(PeerError(f"link not established: {reason}"))

    # ------------------------------------------------------------------------------------------------------ handshake

    def _send_handshake(self, *messages: bytes) -> None:
        assert self.transport is not None
        self.transport.write(b"".join(len(m).to_bytes(frames.PREFIX_BYTES, "big") + m for m in messages))

    def _handshake_bytes(self, data: bytes) -> bytes:
        """Consume handshake messages; returns the bytes that follow the handshake's end."""
        self.early += data
        while self.link is None and len(self.early) >= frames.PREFIX_BYTES:
            length = int.from_bytes(self.early[: frames.PREFIX_BYTES], "big")
            if length > HANDSHAKE_BYTES - frames.PREFIX_BYTES:
                raise ProtocolError(f"{length} bytes in one message before authentication")
            if len(self.early) < frames.PREFIX_BYTES + length:
                break
            message = bytes(self.early[frames.PREFIX_BYTES : frames.PREFIX_BYTES + length])
            del self.early[: frames.PREFIX_BYTES + length]
            self._handshake_message(message)
        if self.link is None:
            if len(self.early) > HANDSHAKE_BYTES:
                raise ProtocolError(f"{len(self.early)} bytes before authentication")
            return b""
        rest, self.early = bytes(self.early), bytearray()
        return rest

    def _handshake_message(self, message: bytes) -> None:
        fields = _unpacked(message)
        if self.theirs is None:
            opening = _Opening.of(fields)
            self.theirs, self.peer = message, opening.identity
            self._check_boot(opening)
            self._send_handshake(_packed(_PROOF, self._proof_of("dialer")) if self.dialer else self.mine)
            return
        proof = fields[1] if len(fields) == 2 and fields[0] == _PROOF and type(fields[1]) is bytes else b""
        if not hmac.compare_digest(proof, self._proof_of("listener" if self.dialer else "dialer")):
            raise AuthenticationError("the peer does not know the cluster secret")
        if not self.dialer:
            self._send_handshake(_packed(_PROOF, self._proof_of("listener")))
        self._establish()

    def _check_boot(self, opening: _Opening) -> None:
        if self.dialer and self.expect_boot and opening.identity.boot != self.expect_boot:
            them = opening.identity
            raise AuthenticationError(
                f"expected boot {self.expect_boot}, found boot {them.boot} ({them.role} {them.process}) at this address"
            )
        me = self.me
        if not self.dialer and opening.expect and opening.expect != me.boot:
            raise AuthenticationError(f"expected boot {opening.expect}, found boot {me.boot} ({me.role} {me.process})")

    def _proof_of(self, side: str) -> bytes:
        assert self.theirs is not None
        openings = (self.mine, self.theirs) if self.dialer else (self.theirs, self.mine)
        return hmac.digest(self.secret, _packed(side, *openings), "sha256")

    def _establish(self) -> None:
        assert self.peer is not None and self.transport is not None
        if self.timer is not None:
            self.timer.cancel()
        address = self.transport.get_extra_info("peername")
        self.link = Link(self, self.peer, str(address[0]) if address else "")
        if not self.established.done():
            self.established.set_result(self.link)
        if self.on_link is not None:
            self.on_link(self.link)

    def _give_up(self) -> None:
        self._refuse(f"handshake not complete after {HANDSHAKE_S:g} s")

    def _refuse(self, reason: str, error: PeerError | None = None) -> None:
        """Close over a fault of the peer's. A listener tells a dialer why, in words that give nothing away."""
        if self.link is None:
            if not self.established.done():
                self.established.set_exception(error or PeerError(f"link not established: {reason}"))
            if not self.dialer and not self.closing:
                self._send_handshake(_packed(_REFUSED, reason[: 2 * _NAME_BYTES]))
        self.close(reason)

    # ---------------------------------------------------------------------------------------------------------- frames

    @property
    def buffered(self) -> int:
        written = self.transport.get_write_buffer_size() if self.transport is not None and not self.closing else 0
        return self.queued_bytes + written

    def send_bytes(self, data: bytes) -> None:
        if not self.queued:
            self.loop.call_soon(self._flush)
        self.queued.append(data)
        self.queued_bytes += len(data)

    def _flush(self) -> None:
        if not self.queued or self.transport is None:
            return
        data = self.queued[0] if len(self.queued) == 1 else b"".join(self.queued)
        self.queued.clear()
        self.queued_bytes = 0
        self.transport.write(data)
        if self.transport.get_write_buffer_size() > MAX_BUFFERED_BYTES and not self.closing:
            self.reason = f"the peer does not read: {self.transport.get_write_buffer_size()} bytes wait for it"
            self.closing = True
            self.transport.abort()

    def close(self, reason: str) -> None:
        if self.closing:
            return
        self._flush()
        self.closing, self.reason = True, self.reason or reason
        if self.transport is not None:
            self.transport.close()
            if self.timer is not None:
                self.timer.cancel()
            self.timer = self.loop.call_later(CLOSE_FLUSH_S, self.transport.abort)


def _retrieve(future: asyncio.Future[Link]) -> None:
    """A handshake that fails on the listener's side is logged here; nobody awaits its future."""
    if not future.cancelled():
        future.exception()


def _set_socket_options(sock: Any) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENT_S // 4),
        ("TCP_KEEPINTVL", SILENT_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENT_S * 1000),
    ):
        if hasattr(socket, option):  # absent outside Linux
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


async def dial(
    host: str, port: int, me: Identity, secret: bytes, *,
    on_frame: OnFrame, on_close: OnClose, expect_boot: str = "",
) -> Link:  # fmt: skip
    """Connect and authenticate. Frames of a fast peer may reach `on_frame` before this returns.

    Args:
        expect_boot: boot id that must be met at this address; empty for any.

    Raises:
        AuthenticationError: another boot id than expected (both are named), or the secrets differ.
        PeerError: nothing answers, or the handshake breaks or takes longer than HANDSHAKE_S. `on_close` is not called.
    """
    _check_secret(secret)
    loop = asyncio.get_running_loop()
    connection: _Connection | None = None

    def make() -> _Connection:
        nonlocal connection
        connection = _Connection(me, secret, on_frame, on_close, dialer=True, expect_boot=expect_boot)
        return connection

    try:
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.create_connection(make, host, port)
            assert connection is not None
            return await asyncio.shield(connection.established)
    except (OSError, TimeoutError) as error:
        raise PeerError(f"no link to {host}:{port}: {error or 'timed out'}") from error
    except AuthenticationError as error:
        raise AuthenticationError(f"no link to {host}:{port}: {error}") from error
    except PeerError as error:
        raise PeerError(f"no link to {host}:{port}: {error}") from error
    finally:
        if connection is not None and connection.link is None:
            connection.close("the dialer gave up")


class Listener:
    """An open port. Links that it accepted belong to whoever got them from `on_link`; closing this leaves them."""

    def __init__(self, server: asyncio.Server, pending: set[_Connection]) -> None:
        self._server, self._pending = server, pending
        self.host, self.port = server.sockets[0].getsockname()[:2]

    def close(self) -> None:
        """Accept no more, and drop connections that have not authenticated yet."""
        self._server.close()
        for connection in tuple(self._pending):
            connection.close("listener closed")


async def listen(
    host: str, port: int, me: Identity, secret: bytes, *, on_link: OnLink, on_frame: OnFrame, on_close: OnClose
) -> Listener:
    """Listen on `host`:`port` (0: any free port, see Listener.port).

    `on_link` comes once a peer is authenticated, before its first frame.

    Raises:
        OSError: the port is taken; the message names it.
    """
    _check_secret(secret)
    pending: set[_Connection] = set()

    def ended(connection: _Connection, future: asyncio.Future[Link]) -> None:
        pending.discard(connection)
        if not future.cancelled() and (error := future.exception()) is not None:
            log.warning("link_refused", extra={"fields": {"reason": str(error), "peer": str(connection.peer)}})

    def make() -> _Connection:
        connection = _Connection(me, secret, on_frame, on_close, dialer=False, on_link=on_link)
        if len(pending) >= MAX_PENDING_HANDSHAKES:
            next(iter(pending)).close("too many unfinished handshakes")
        pending.add(connection)
        connection.established.add_done_callback(lambda future: ended(connection, future))
        return connection

    server = await asyncio.get_running_loop().create_server(make, host, port, backlog=512)
    return Listener(server, pending)


def _check_secret(secret: bytes) -> None:
    if not secret:
        raise ValueError("an empty cluster secret would let anybody in")
