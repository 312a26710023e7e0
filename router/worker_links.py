"""The ingress's links to workers: dialled at first use, kept, and given up for good when their boot is gone.

A link that breaks may have lost frames in either direction, so what was on it is the owner's to place anew
(`worker_gone`). Whether the worker died or only the link did is found out by dialling once more: a refused connection
or another boot id at the address is a death. Knows no frame's meaning, except that what is sent while dialling waits,
in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Protocol

from tailrace.model.errors import PeerError
from tailrace.router.attempt import Leg
from tailrace.transfer.links import AuthenticationError, Identity, Link, dial

log = logging.getLogger(__name__)

KNOWN_DEAD = 1024  # boot ids remembered as gone


class WorkerEvents(Protocol):
    """Who is told. All calls come on the event loop."""

    def worker_frame(self, boot: str, frame: object) -> None: ...

    def worker_gone(self, boot: str, *, dead: bool, reached: bool) -> None:
        """`reached`: there was a link, so what was sent to the worker may have arrived; False: it never was."""
        ...


class WorkerPort(Protocol):
    """What the ingress needs of its links to workers; tests put a fake in its place."""

    @property
    def dead(self) -> tuple[str, ...]: ...

    def start(self, events: WorkerEvents) -> None: ...

    def send(self, leg: Leg, frame: object) -> None: ...

    def drop(self, boot: str) -> None: ...

    async def close(self) -> None: ...


class WorkerLinks:
    """See the module. One link a boot id."""

    def __init__(self, me: Identity, secret: bytes) -> None:
        self._me, self._secret = me, secret
        self._links: dict[str, Link] = {}
        self._waiting: dict[str, list[object]] = {}  # frames for a boot that is being dialled
        self._legs: dict[str, Leg] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._events: WorkerEvents | None = None
        self._closing = False

    def start(self, events: WorkerEvents) -> None:
        self._events = events

    def send(self, leg: Leg, frame: object) -> None:
        """Send now or once the link is there; `worker_gone` follows if it never will be."""
        if leg.boot in self._dead:
            asyncio.get_running_loop().call_soon(self._tell_gone, leg.boot, True, False)
            return
        link = self._links.get(leg.boot)
        if link is not None and not link.closed:
            link.send(frame)
            return
        if leg.boot not in self._waiting:
            self._legs[leg.boot] = leg
            self._spawn(leg, broken=False)
        self._waiting[leg.boot].append(frame)

    @property
    def dead(self) -> tuple[str, ...]:
        """Boots that are known to be dead, the last KNOWN_DEAD."""
        return tuple(self._dead)

    def drop(self, boot: str) -> None:
        """The boot is dead: close its link, dial it no more."""
        self._dead[boot] = None
        while len(self._dead) > KNOWN_DEAD:
            self._dead.popitem(last=False)
        self._waiting.pop(boot, None)
        self._legs.pop(boot, None)
        link = self._links.pop(boot, None)
        if link is not None:
            link.close("the worker is dead")

    async def close(self) -> None:
        self._closing = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in tuple(self._links.values()):
            link.close("ingress stops")
        self._links.clear()

    def _spawn(self, leg: Leg, *, broken: bool) -> None:
        self._waiting[leg.boot] = []
        task = asyncio.create_task(self._dial(leg, broken), name=f"dial-{leg.worker}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _dial(self, leg: Leg, broken: bool) -> None:
        """First contact, or (`broken`) what has become of a worker whose link broke: its owner is told either way."""
        try:
            link = await dial(
                leg.host, leg.port, self._me, self._secret,
                expect_boot=leg.boot, on_frame=self._on_frame, on_close=self._on_close,
            )  # fmt: skip
        except PeerError as error:
            fields = {"worker": leg.worker, "boot": leg.boot, "reason": str(error)}
            log.warning("worker_not_reached", extra={"fields": fields})
            dead = isinstance(error, AuthenticationError) or isinstance(error.__cause__, ConnectionRefusedError)
            self._waiting.pop(leg.boot, None)
            if dead:
                self.drop(leg.boot)
            self._tell_gone(leg.boot, dead, broken)
            return
        if leg.boot in self._dead:
            link.close("the worker is dead")
            return
        self._links[leg.boot] = link
        for frame in self._waiting.pop(leg.boot, ()):
            link.send(frame)
        if broken:
            self._tell_gone(leg.boot, False, True)

    def _on_frame(self, link: Link, frame: object) -> None:
        if self._events is not None:
            self._events.worker_frame(link.peer.boot, frame)

    def _on_close(self, link: Link, reason: str) -> None:
        boot = link.peer.boot
        if self._links.get(boot) is not link:
            return
        del self._links[boot]
        leg = self._legs.get(boot)
        if self._closing or leg is None or boot in self._dead:
            return
        log.warning("worker_link_lost", extra={"fields": {"worker": leg.worker, "boot": boot, "reason": reason}})
        self._spawn(leg, broken=True)

    def _tell_gone(self, boot: str, dead: bool, reached: bool) -> None:
        if self._events is not None and not self._closing:
            self._events.worker_gone(boot, dead=dead, reached=reached)
