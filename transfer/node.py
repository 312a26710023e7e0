"""The transfer thread of a rank process: sockets, protocol cores and transports on one event loop.

    worker's loop  --calls-->  inbox  -->  switchboard.py (links, cores, transports)  --events-->  worker's loop

The loop's calls return at once; those that hand pages over pin them before they return. The thread polls its transports
each millisecond while a transfer is under way, sleeps otherwise, and ticks ten times a second whether or not there is
work. If it dies, the loop is told by an exception at its next call and the process ends: peers see its boot id go.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.kv_cache.manager import KvManager
from tailrace.model.errors import ConfigError, PeerError, TailraceError, WorkerError
from tailrace.transfer import core_events as ce
from tailrace.transfer.faults import Faults
from tailrace.transfer.links import listen
from tailrace.transfer.loop_events import Key, LoopEvent, LoopStats, PrefillResult, Turn
from tailrace.transfer.messages import Delta
from tailrace.transfer.metrics import Metrics
from tailrace.transfer.node_config import NodeConfig
from tailrace.transfer.page_proof import PageSummer
from tailrace.transfer.pairing import geometry, preferred
from tailrace.transfer.switchboard import Switchboard
from tailrace.transfer.transports.base import PageHook, Transport, Wake

try:
    from uvloop import new_event_loop
except ImportError:  # not on Linux
    from asyncio import new_event_loop

log = logging.getLogger(__name__)

TICK_S = 0.05
TIMER_S = 0.001  # finer than this the event loop cannot time
START_S = 30.0
STOP_S = 10.0
LAST_BYTES_S = 0.05  # what the links have queued goes out

MakeTransports = Callable[[Wake, PageHook | None], Sequence[Transport]]
"""Builds the transports, in order of preference, from what they call when they have news and what tests hook in."""


class NodeFailed(WorkerError):
    """The transfer thread is dead, or could not start; the process must end."""


class Node:
    """See the module; implements loop_events.LoopPort.

    Args:
        kv: the worker's page books.
        make_transports: called once, here.
        pages: our own, [num_pages, bytes_per_page] uint8 a rank: to be summed (`verify_pages`), by us or for a peer.
        clock: monotonic seconds, for leases, stamps and ages.
    """

    def __init__(
        self,
        config: NodeConfig,
        kv: KvManager,
        make_transports: MakeTransports,
        *,
        clock: Callable[[], float] = time.monotonic,
        pages: Sequence[np.ndarray] = (),
    ) -> None:
        self.config, self.kv = config, kv
        self.loop_stats = LoopStats(stamp=clock())
        self.metrics = Metrics(config.home, config.worker, config.model)
        faults = Faults() if config.faults else None
        hook = faults.hook(kv.layout.bytes_per_page, reads=config.duty != "ctx") if faults is not None else None
        self._news, self._stopping = asyncio.Event(), asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        every = make_transports(self._wake_from_helper, hook)
        transports = preferred(every, config.transport)
        if not transports:
            names = ", ".join(t.name for t in every) or "none"
            raise ConfigError(f"transport: {config.transport!r} is not among those of this worker ({names})")
        summer = None
        if pages:
            own = geometry(config.compat, config.compat.groups[0])
            summer = PageSummer(pages, own, kv.generations, self._wake_from_helper)
        self._board = Switchboard(
            config, kv, transports, self.metrics, self.loop_stats, self._to_loop, faults, self._news, clock, summer
        )
        self._events: deque[LoopEvent] = deque()
        self._events_there = threading.Event()
        self._inbox: deque[Any] = deque()
        self._inbox_due = False
        self._pinned: dict[Key, list[int]] = {}  # the loop's thread only: what chunk_done has pinned, by ordinal
        self._thread: threading.Thread | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None

    # ------------------------------------------------------------------------------------------------------ life cycle

    def start(self) -> tuple[str, int]:
        """Start the thread; returns the address that it listens on.

        Raises:
            NodeFailed: it could not listen; the message names the port.
        """
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._thread.start()
        if not self._started.wait(START_S):
            raise NodeFailed(f"the transfer thread did not start within {START_S:g} s")
        self._raise_failure()
        return self.config.host, self._board.port

    def stop(self) -> None:
        """Close links and transports and end the thread. From any thread but its own; a second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._call(self._stopping.set)
            thread.join(STOP_S)

    def set_router(self, host: str, port: int, boot: str = "") -> None:
        """Where the router is from now on; an empty boot accepts whichever answers there. Any thread."""
        self._call(lambda: self._board.session.set_address(host, port, boot))

    def drain(self, limit_s: float) -> None:
        """Take nothing new, and tell the router. Any thread."""
        self._call(lambda: self._board.drain(limit_s))

    @property
    def idle(self) -> bool:
        """Whether nothing is held here for anybody: what a draining worker waits for. Any thread."""
        return not self._inbox and not self._events and self._board.idle

    @property
    def refused_pairs(self) -> dict[str, str]:
        """Boot id -> why, of wanted peers that differ in something no codec bridges. Any thread."""
        return dict(self._board.pairs.refused)

    @property
    def ready_pairs(self) -> dict[str, str]:
        """Boot id -> name of its transport, of the ctx workers that can be read now. Any thread."""
        return {boot: transport.name for boot, transport in list(self._board.pairs.ready.items())}

    # -------------------------------------------------------------------------------------------- for the worker's loop

    def poll_events(self) -> list[LoopEvent]:
        """As LoopPort. Raises NodeFailed, as every call of the loop does, once the transfer thread is dead."""
        self._raise_failure()
        self._events_there.clear()
        events: list[LoopEvent] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def wait(self, timeout_s: float) -> bool:
        return self._events_there.wait(timeout_s)

    def chunk_launched(self, key: Key, last: bool, seconds_left: float) -> None:
        self._post(ce.ChunkLaunched(key, last, seconds_left))

    def chunk_done(self, key: Key, pages: Sequence[int], tokens_ready: int, seconds_left: float) -> None:
        before = self._pinned.get(key, [])
        layout = self.kv.layout
        whole = layout.num_pages(tokens_ready) == len(pages)
        reach = list(pages if whole else pages[: layout.history_pages(tokens_ready)])
        new = tuple(
            (ordinal, page)
            for ordinal, page in enumerate(reach)
            if page != SCRATCH_PAGE and (ordinal >= len(before) or before[ordinal] != page)
        )
        self.kv.pin([page for _, page in new])
        self._pinned[key] = reach
        self._post(ce.ChunkDone(key, new, tokens_ready, seconds_left))

    def prefill_done(self, key: Key, result: PrefillResult) -> None:
        self._pinned.pop(key, None)
        self._post(ce.PrefillDone(key, result))

    def tokens(self, deltas: Sequence[Delta]) -> None:
        if deltas:
            self._post(tuple(deltas))

    def turn_ended(self, turn: Turn) -> None:
        self._post(ce.TurnEnded(turn))

    def ended(self, key: Key, outcome: str) -> None:
        self._pinned.pop(key, None)
        self._post(ce.LoopEnded(key, outcome))

    def failed(self, key: Key, code: str, message: str, retryable: bool) -> None:
        self._pinned.pop(key, None)
        self._post(ce.LoopFailed(key, code, message, retryable))

    def _post(self, event: Any) -> None:
        """To the transfer thread; one wake-up for all that comes before it looks."""
        self._raise_failure()
        self._inbox.append(event)
        if not self._inbox_due:
            self._inbox_due = True
            self._call(self._empty_inbox)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise NodeFailed(f"the transfer thread failed: {self._failure}") from self._failure

    # ------------------------------------------------------------------------------------------------------- the thread

    def _to_loop(self, event: LoopEvent) -> None:
        self._events.append(event)
        self._events_there.set()

    def _call(self, call: Callable[[], None]) -> None:
        """Run in the transfer thread, if that is (still) there."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _wake_from_helper(self) -> None:
        self._call(self._news.set)

    def _empty_inbox(self) -> None:
        self._inbox_due = False
        while self._inbox:
            self._board.from_loop(self._inbox.popleft())
        self._board.session.report_cache()

    def _main(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._run())
        except TailraceError as error:  # the loop's next call raises it
            self._failure = self._failure or error
        except BaseException as error:
            self._failure = self._failure or error
            raise
        finally:
            if self._failure is not None:
                trace = None if isinstance(self._failure, TailraceError) else self._failure  # ours say enough
                fields = {"reason": repr(self._failure)}
                log.critical("transfer_thread_failed", exc_info=trace, extra={"fields": fields})
            self._started.set()
            self._events_there.set()

    async def _run(self) -> None:
        config, board = self.config, self._board
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_error)
        try:
            listener = await listen(
                config.host, config.port, config.identity, config.secret,
                on_link=board.link_opened, on_frame=board.link_frame, on_close=board.link_closed,
            )  # fmt: skip
        except OSError as error:
            self._failure = NodeFailed(f"cannot listen on {config.host}:{config.port}: {error}")
            return
        board.port = listener.port
        self._started.set()
        log.info("node_started", extra={"fields": {"host": config.host, "port": board.port, "boot": config.boot}})
        tasks = [asyncio.create_task(part) for part in (board.session.run(), self._tick(), self._poll())]
        tasks.append(asyncio.create_task(self._until_stopped()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            listener.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await board.close()
            await asyncio.sleep(LAST_BYTES_S)

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    async def _tick(self) -> None:
        while True:
            self._board.tick()
            self._board.session.report_cache()
            await asyncio.sleep(TICK_S)

    async def _poll(self) -> None:
        while True:
            self._news.clear()
            soon = self._board.poll()
            if soon is None:
                await self._news.wait()
            elif 0 < soon < TIMER_S:
                time.sleep(soon)
                await asyncio.sleep(0)
            elif soon:
                late = asyncio.get_running_loop().call_later(soon, self._news.set)
                await self._news.wait()  # a helper that has ended a copy does not wait for the next millisecond
                late.cancel()
            else:
                await asyncio.sleep(0)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback: a peer's fault ends its link, our own ends the process."""
        error = context.get("exception")
        if error is None or isinstance(error, OSError | PeerError):
            log.warning("event_loop_error", extra={"fields": {"what": context.get("message"), "reason": str(error)}})
            return
        self._failure = self._failure or error
        self._stopping.set()
