"""What a client may make the HTTP server wait for and keep before the application hears of a request.

uvicorn bounds neither how long a head may take nor how long it may be, so a client that sends a byte now and then holds
its connection for ever. Here a head has HEAD_S seconds and MAX_HEAD_BYTES, and whatever is wrong before there is a
request is told in the error object too. It also lets a response that has begun close its connection (sse.CLOSE_AFTER),
and writes the head of a response and the first of its body at once.
Not used under Ray Serve, which starts uvicorn with a protocol of its own choice. There HAProxy stands before the
replicas and bounds a head by its buffer (docs/operations.md), and a failed stream is cut off instead.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tailrace.router.api_errors import error_body
from tailrace.router.formats import dumps
from tailrace.router.sse import CLOSE_AFTER

HEAD_S = 10.0
MAX_HEAD_BYTES = 65_536

_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}


class HeadWithBody:
    """A transport that writes the head of a response together with what follows it in the same turn of the loop.

    uvicorn writes them apart, and each write to a socket costs its sender, its reader and whoever stands between a
    wake-up. All but `write` and `close` is the transport's own.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held:
            data, self._held = self._held + data, b""
        elif data.startswith(b"HTTP/1."):  # or a body that begins so, which is held no longer
            self._held = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data, self._held = self._held, b""
            self._transport.write(data)


class LimitedProtocol(HttpToolsProtocol):
    """See the module. One a connection."""

    head_s = HEAD_S

    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _head_bytes = 0  # of a head that is not whole yet

    def connection_made(self, transport: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(cast(Any, HeadWithBody(transport, self.loop)))
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head:
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            self._await_head()  # most come whole, and need no timer

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is no HTTP request")

    # ----------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._head_bytes = False, 0
        if sum(len(name) + len(value) for name, value in self.headers) + len(self.url) > MAX_HEAD_BYTES:
            self._refuse_head()
        else:
            state = self.scope["state"] = self.scope.get("state", {})
            super().on_headers_complete()  # the application runs later, and a connection may hold several cycles
            state[CLOSE_AFTER] = partial(_close_after, self.cycle)

    # ----------------------------------------------------------------------------------------------------------- limits

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # of the request before; then it is looked again
            self._await_head()
        elif self._head_bytes:
            self._refuse(408, f"the head did not come within {self.head_s:g} seconds")
        else:
            self.transport.close()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head is larger than {MAX_HEAD_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Answer what never became a request, and close."""
        if self.transport.is_closing():
            return
        body = dumps(error_body(status, message)).encode()
        head = f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()


def _close_after(cycle: RequestResponseCycle) -> None:
    cycle.keep_alive = False
