"""The ingress's link to the router: found, dialled, and dialled again for as long as the ingress lives.

While there is no link `send` says so and drops the frame; who wants it repeated does that in `on_up`. Knows no frame's
meaning. A router that is gone costs nothing but new placements: running streams do not pass here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from tailrace.model.errors import PeerError, WorkerError
from tailrace.transfer.links import Identity, Link, dial

log = logging.getLogger(__name__)

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 0.5

Address = tuple[str, int, str]
"""(host, port, boot id; empty for any)."""
FindRouter = Callable[[], Awaitable[Address | None]]


def check_task(task: asyncio.Task[None]) -> None:
    """Raise WorkerError, naming it, if a task that goes on as long as its process has ended by a fault."""
    if task.done() and not task.cancelled():
        raise WorkerError(f"task {task.get_name()!r} has ended: {task.exception()!r}")


class RouterEvents(Protocol):
    """Who is told. All calls come on the event loop."""

    def router_up(self) -> None: ...

    def router_down(self) -> None: ...

    def router_frame(self, frame: object) -> None: ...


class RouterPort(Protocol):
    """What the ingress needs of its link to the router; tests put a fake in its place."""

    @property
    def connected(self) -> bool: ...

    def start(self, events: RouterEvents) -> None: ...

    def send(self, frame: object) -> bool: ...

    def check(self) -> None: ...

    async def close(self) -> None: ...


class RouterLink:
    """See the module. `find` may be asked often and may answer with an address that is out of date."""

    def __init__(self, find: FindRouter, me: Identity, secret: bytes) -> None:
        self._find, self._me, self._secret = find, me, secret
        self._link: Link | None = None
        self._lost = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._events: RouterEvents | None = None

    @property
    def connected(self) -> bool:
        return self._link is not None and not self._link.closed

    def start(self, events: RouterEvents) -> None:
        self._events = events
        self._task = asyncio.create_task(self._keep(), name="router-link")

    def send(self, frame: object) -> bool:
        """True if the frame is on its way."""
        if self._link is None or self._link.closed:
            return False
        self._link.send(frame)
        return True

    def check(self) -> None:
        """Raises WorkerError if a fault has ended the search for the router."""
        if self._task is not None:
            check_task(self._task)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._link is not None:
            self._link.close("ingress stops")

    async def _keep(self) -> None:
        wait = FIRST_WAIT_S
        while True:
            if await self._connect():
                wait = FIRST_WAIT_S
                await self._lost.wait()
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_S)

    async def _connect(self) -> bool:
        try:
            address = await self._find()
            if address is None:
                return False
            host, port, boot = address
            self._lost.clear()
            self._link = await dial(
                host, port, self._me, self._secret, expect_boot=boot, on_frame=self._on_frame, on_close=self._on_close
            )
        except (PeerError, OSError) as error:
            log.info("router_not_reached", extra={"fields": {"reason": str(error)}})
            return False
        log.info("router_linked", extra={"fields": {"router": self._link.peer.process, "boot": self._link.peer.boot}})
        if self._events is not None and not self._link.closed:
            self._events.router_up()
        return True

    def _on_frame(self, link: Link, frame: object) -> None:
        if self._events is not None:
            self._events.router_frame(frame)

    def _on_close(self, link: Link, reason: str) -> None:
        log.warning("router_lost", extra={"fields": {"boot": link.peer.boot, "reason": reason}})
        self._link = None
        self._lost.set()
        if self._events is not None:
            self._events.router_down()
