"""Writing a response that streams, and noticing a client that is gone, half gone, or too slow.

The socket's own flow control says when a client is behind: `send` then does not return. Tokens wait in their samples
meanwhile, so nothing grows here, and a client that takes nothing for `slow_reader_s` is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

COMMENT = b": waiting\n\n"
# Key in the scope's `state`: a function that makes the server close this connection after this response. A server that
# has none (Ray Serve's) closes it when a response is left without its end: HTTP can say so in the head only, which has
# gone out, and one that said so before every stream would let no connection be used twice.
CLOSE_AFTER = "tailrace.close_after"
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class EventStream:
    """One streaming response.

    Args:
        clock: as the ticks that call `watch` read it.
        close_after: what the server put under CLOSE_AFTER, or None.

    Attributes:
        started: the status has gone out, so an error can only be an event.
        too_slow: the client took nothing for slow_reader_s, and the task that writes was cancelled.
    """

    def __init__(
        self, send: Send, headers: Headers, *, clock: Callable[[], float], slow_reader_s: float, comment_s: float,
        close_after: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.started = False
        self.too_slow = False
        self._send, self._clock, self._close_after = send, clock, close_after
        self._headers = STREAM_HEADERS + headers
        self._slow_reader_s, self._comment_s = slow_reader_s, comment_s
        self._writing_since: float | None = None
        self._written = clock()
        self._comment_due = asyncio.Event()
        self._wake: Callable[[], None] | None = None
        self._task = asyncio.current_task()

    async def start(self, wake: Callable[[], None]) -> None:
        """Send the status. `wake` is called when a comment is due."""
        self.started, self._wake = True, wake
        await self._put({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def write(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def write_comment_if_due(self) -> None:
        if self._comment_due.is_set():
            await self.write(COMMENT)

    async def end(self, data: bytes, *, close: bool = False) -> None:
        """Send the last bytes. `close`: the connection ends with them; else the client may use it again."""
        cut_off = close and self._close_after is None
        if close and self._close_after is not None:
            self._close_after()
        await self._put({"type": "http.response.body", "body": data, "more_body": cut_off})

    def watch(self, now: float) -> None:
        """Called several times a second by the ingress's clock."""
        if self._writing_since is not None:
            if now - self._writing_since >= self._slow_reader_s and not self.too_slow and self._task is not None:
                self.too_slow = True
                self._task.cancel()
        elif self._wake is not None and now - self._written >= self._comment_s:
            self._comment_due.set()
            self._wake()

    def let_go(self) -> None:
        """The writing task has seen that it is `too_slow`: it goes on, as one that nobody cancelled."""
        if self._task is not None:
            self._task.uncancel()

    async def _put(self, message: Message) -> None:
        self._comment_due.clear()
        self._writing_since = self._clock()
        await self._send(message)
        self._written, self._writing_since = self._clock(), None


async def until_gone(work: Coroutine[Any, Any, None], receive: Receive) -> bool:
    """Run `work` to its end (True), or cancel it when the client closes its side (False). Its errors pass through.

    It runs in the caller's task: a task of its own for each request would cost more than much of what it does.
    """
    mine = asyncio.current_task()
    assert mine is not None
    gone = asyncio.create_task(_disconnected(receive))
    over = left = False

    def cancel(_: asyncio.Task[None]) -> None:
        nonlocal left
        if not over:
            left = mine.cancel()

    gone.add_done_callback(cancel)
    try:
        await work
    except asyncio.CancelledError:
        if left and mine.uncancel() == 0:  # else somebody cancelled the caller, too
            return False
        raise
    else:
        if left:  # it had something to end in order, and has
            mine.uncancel()
        return True
    finally:
        over = True
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
