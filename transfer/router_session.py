"""A worker's link to the router: dialled, kept, dialled again; register, heartbeat, whole set, epoch.

    linked -> Register;  Epoch accepted -> Holding at once, then Heartbeat, Holding and Stats on their clocks
    CacheQuery -> CacheEvents (cache_report.py)

Epoch rule: the first router boot id for a number is kept; a lower number, or another boot id for the same one, is
refused by naming the accepted pair. Frames of a router whose epoch was not accepted on this link are dropped, but for
Peers, which only says who is there. Belongs to the transfer thread's event loop. If the router is gone, what runs goes
on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from typing import Any, Protocol

from tailrace.model.errors import PeerError
from tailrace.transfer.cache_report import CacheReport
from tailrace.transfer.links import Identity, Link, dial
from tailrace.transfer.messages import CacheQuery, Epoch, EpochRefused, Heartbeat, Holding, Peers, Register, Stats

log = logging.getLogger(__name__)

FIRST_RETRY_S, LAST_RETRY_S = 0.05, 1.0


class EpochRule:
    """Which router this worker obeys. Outlives links and routers."""

    def __init__(self) -> None:
        self.number, self.router_boot = 0, ""

    def accepts(self, epoch: Epoch) -> bool:
        """True, and remembered, if the epoch is new or the one accepted before."""
        known = epoch.number == self.number and epoch.router_boot == self.router_boot
        if epoch.number > self.number:
            self.number, self.router_boot = epoch.number, epoch.router_boot
            return True
        return known


class SessionOwner(Protocol):
    """What the session asks and tells. All calls come on the event loop."""

    def register(self, epoch: int, router_boot: str) -> Register: ...

    def heartbeat(self) -> Heartbeat: ...

    def whole_set(self) -> Holding: ...

    def stats(self) -> Stats: ...

    def router_up(self) -> None:
        """Its epoch was accepted on a new link."""
        ...

    def router_frame(self, frame: Any) -> None: ...

    def stale_frame(self) -> None: ...


class RouterSession:
    """See the module.

    Args:
        heartbeat_s, report_s: periods of Heartbeat, and of Holding and Stats.
        cache: what it says of cached prefixes; None: nothing.
    """

    def __init__(
        self, me: Identity, secret: bytes, owner: SessionOwner, *, heartbeat_s: float, report_s: float,
        cache: CacheReport | None = None,
    ) -> None:  # fmt: skip
        self._me, self._secret, self._owner, self._cache = me, secret, owner, cache
        self._heartbeat_s, self._report_s = heartbeat_s, report_s
        self._epoch = EpochRule()
        self._address: tuple[str, int, str] | None = None
        self._changed = asyncio.Event()
        self._link: Link | None = None
        self._accepted = False
        self._said = ""  # the last reason that was logged

    @property
    def up(self) -> bool:
        """Whether there is a link whose router is obeyed."""
        return self._accepted and self._link is not None and not self._link.closed

    @property
    def epoch(self) -> tuple[int, str]:
        return self._epoch.number, self._epoch.router_boot

    def set_address(self, host: str, port: int, boot: str) -> None:
        """Where the router is now; an empty boot accepts whichever answers there."""
        if (host, port, boot) == self._address:
            return
        self._address = (host, port, boot)
        self._changed.set()
        if self._link is not None:
            self._link.close("the router has moved")

    def send(self, frame: object) -> None:
        """Dropped without a router that is obeyed: the next one is told the whole set."""
        if self.up and self._link is not None:
            self._link.send(frame)

    def report_cache(self) -> None:
        """Say what has changed in the cache; often."""
        if self.up and self._cache is not None:
            for event in self._cache.changes():
                self.send(event)

    async def run(self) -> None:
        """Until cancelled."""
        retry_s = FIRST_RETRY_S
        try:
            while True:
                self._changed.clear()
                if self._address is not None and await self._serve(*self._address):
                    retry_s = FIRST_RETRY_S
                wait_s = None if self._address is None else retry_s
                retry_s = min(LAST_RETRY_S, retry_s * 2)
                await _wait(self._changed, wait_s)
        finally:
            if self._link is not None:
                self._link.close("the worker stops")

    async def _serve(self, host: str, port: int, boot: str) -> bool:
        """One link's life; False if there was none."""
        closed = asyncio.Event()
        try:
            link = await dial(
                host, port, self._me, self._secret, expect_boot=boot, on_frame=self._on_frame,
                on_close=lambda link, reason: closed.set(),
            )  # fmt: skip
        except PeerError as error:
            if str(error) != self._said:
                log.warning("router_not_reached", extra={"fields": {"reason": str(error)}})
            self._said = str(error)
            return False
        self._said = ""
        self._link, self._accepted = link, False
        if self._cache is not None:
            self._cache.new_link()
        link.send(self._owner.register(*self.epoch))
        try:
            await self._report(link, closed)
        finally:
            self._link, self._accepted = None, False
            link.close("session over")
        log.warning("router_link_lost", extra={"fields": {"host": host, "port": port, "boot": link.peer.boot}})
        return True

    async def _report(self, link: Link, closed: asyncio.Event) -> None:
        """Heartbeats on their period, whole set and statistics on theirs, until the link is closed."""
        loop = asyncio.get_running_loop()
        heartbeat_at = report_at = loop.time()
        while not closed.is_set():
            now = loop.time()
            if now >= heartbeat_at:
                heartbeat_at = now + self._heartbeat_s
                beat = self._owner.heartbeat()
                link.send(beat if self._cache is None else replace(beat, cache_sequence=self._cache.sequence))
            if now >= report_at:
                report_at = now + self._report_s
                link.send(self._owner.stats())
                if self._accepted:
                    link.send(self._owner.whole_set())
            await _wait(closed, max(0.0, min(heartbeat_at, report_at) - loop.time()))

    def _on_frame(self, link: Link, frame: Any) -> None:
        if isinstance(frame, Epoch):
            self._on_epoch(link, frame)
        elif isinstance(frame, CacheQuery) and self._cache is not None:
            if self._accepted and link is self._link:
                for event in self._cache.answer():
                    link.send(event)
        elif isinstance(frame, Peers) or (self._accepted and link is self._link):
            self._owner.router_frame(frame)
        else:
            self._owner.stale_frame()

    def _on_epoch(self, link: Link, epoch: Epoch) -> None:
        if not self._epoch.accepts(epoch):
            fields = {"offered": epoch.number, "by": epoch.router_boot, "accepted": self._epoch.number}
            log.warning("epoch_refused", extra={"fields": fields})
            link.send(EpochRefused(self._epoch.number, self._epoch.router_boot))
            return
        if link is self._link:
            self._accepted = True
            link.send(self._owner.whole_set())
            self._owner.router_up()


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    """Until the event or the time; not by wait_for, which in 3.11 loses a cancel that meets the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
