"""Messages over UCX, through ucxx, in a thread of their own. Knows stations and messages, nothing of pages.

A *station* is one end of a pair. One that listens has a UCX worker of its own, which goes with it, and so do all that
its peer ever sent; those that have dialled share one. The thread alone touches
UCX: it connects, accepts, sends, takes what has arrived, and sleeps in the kernel while there is nothing to do. Others
give it orders and fetch what came of them; neither waits. If the thread dies of a fault of ours, the next `drain`
raises it in the transfer thread, which takes the process down.

A message is its length, then its bytes in fragments of one TCP segment each, all under the pair's tag. The receiver
looks what has come, and copies it into memory that it made for this message: a fragment is there as a whole or not at
all, no peer ever names an address of ours, and nothing is written but by the receiver's own call.

Habits of ucxx 0.52 that are obeyed here, each seen. Its own active messages are not used: a receive that waits when
its peer goes keeps the worker and its sockets for ever, whether one has come cannot be asked, and what was not taken
goes to the next endpoint at the same address. For the first of these reasons no receive waits here either. Sending on
an endpoint that has failed never returns, so it is looked at first. Only the blocking close is safe (it ends at once:
it is forced). A request that is dropped before its end sends garbage, so requests are kept. A send that is cancelled
keeps its worker for ever: hence the one worker for all that send.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tailrace.model.errors import ConfigError, PeerError
from tailrace.transfer.transports.base import Wake

# Eager in one segment: the copy into the receiver's memory is one call, and 64 MiB are 256 system calls, not 8192.
FRAGMENT_BYTES = 256 << 10
_OPTIONS = {"TLS": "tcp", "RNDV_THRESH": "inf", "TCP_TX_SEG_SIZE": "272k", "TCP_RX_SEG_SIZE": "272k"}
_BUSY_SLEEP_S = 0.001  # with sends under way; whatever UCX fails to wake us for is seen then
_YOUNG_SLEEP_S, _YOUNG_S = 0.005, 5.0  # while a peer is expected to connect: UCX does not wake us for all of that
_IDLE_SLEEP_S = 0.1
_START_S = 10.0
_CLOSE_S = 1.0
_LANE_BITS = 16
_LANES = (1 << _LANE_BITS) - 1
MAX_ENDPOINTS = 16  # connections that a listening station takes; one is right, the others have lost their way
_LENGTH = struct.Struct("<Q")
MISSING = "transport ucx needs the package ucxx-cu12, the extra `ucx`"


def new_tag() -> int:
    """Of a pair, hard to guess; its low bits are left for the connections that its ctx makes one after the other."""
    return secrets.randbits(64) & ~_LANES


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message under this station's tag; `lane` tells one connection of its peer from the next.

    `data` [n] uint8 is the taker's alone.
    """

    station: int
    lane: int
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class Sent:
    """The one end of a `send`: its memory is free. `error`: it has not arrived for sure; `posted`: it may have."""

    station: int
    ticket: int
    error: str | None = None
    posted: bool = True


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer of this station is gone, or said what is no message; everything that had arrived has been told."""

    station: int
    error: str


Event = Arrived | Sent | Ended


class Library:
    """What of ucxx is used. Raises ConfigError if it is not installed or does not load."""

    def __init__(self) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it would warn, on stdout, of what ucxx itself sets
        try:
            self.api: Any = importlib.import_module("ucxx._lib.libucxx")
            self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        except (ImportError, OSError) as error:
            raise ConfigError(f"{MISSING} ({error})") from None
        self.errors: tuple[type[Exception], ...] = (self.api.UCXError,)

    def context(self) -> Any:
        return self.api.UCXContext(_OPTIONS, feature_flags=(self.api.Feature.TAG, self.api.Feature.WAKEUP))

    def worker(self, context: Any) -> Any:
        """A worker that can be waited for."""
        worker = self.api.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
        worker.init_blocking_progress_mode()
        return worker

    def error_of(self, request: Any) -> str | None:
        try:
            request.check_error()
        except self.errors as error:
            return str(error)
        return None


class _Sending:
    """A message on its way out: its memory and its requests are kept until the last has ended."""

    def __init__(self, ticket: int, data: np.ndarray) -> None:
        self.ticket, self.data = ticket, data
        self.length = np.frombuffer(_LENGTH.pack(len(data)), np.uint8)
        self.requests: deque[Any] = deque()
        self.error: str | None = None

    def parts(self) -> Iterator[np.ndarray]:
        yield self.length
        for start in range(0, len(self.data), FRAGMENT_BYTES):
            yield self.data[start : start + FRAGMENT_BYTES]


class _Arriving:
    """A message whose first fragments have come."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.empty(nbytes, np.uint8)
        self.have = 0


class _Station:
    """Lives and dies in the thread. `limit`: bytes of a message that it takes."""

    def __init__(self, number: int, library: Library, worker: Any, tag: int, limit: int = 0) -> None:
        self.number, self._library, self._tag, self._limit = number, library, tag, limit
        self.worker: Any = worker
        self.listener: Any = None
        self.sends: deque[_Sending] = deque()
        self._ended = False
        self._young_until = time.monotonic() + _YOUNG_S
        self._endpoints: list[Any] = []
        self._requests: list[int] = []  # connections to be accepted
        self._lanes: dict[int, _Arriving | None] = {}
        self._mask = library.api.UCXXTagMask(2**64 - 1 - _LANES)

    def listen(self) -> int:
        self.listener = self._library.api.UCXListener.create(self.worker, 0, self._requests.append, cb_args=())
        return self.listener.port

    def dial(self, host: str, port: int) -> None:
        self._endpoints.append(self._library.api.UCXEndpoint.create(self.worker, host, port, True))

    @property
    def can_send(self) -> bool:
        return bool(self._endpoints) and not self._ended and self._endpoints[0].alive

    @property
    def sleep_s(self) -> float:
        """How long nobody need look at it."""
        if self.sends:
            return _BUSY_SLEEP_S
        return _YOUNG_SLEEP_S if not self._lanes and time.monotonic() < self._young_until else _IDLE_SLEEP_S

    def send(self, ticket: int, data: np.ndarray) -> None:
        sending, tag = _Sending(ticket, data), self._library.api.UCXXTag(self._tag)
        self.sends.append(sending)
        for part in sending.parts():
            if not self._endpoints[0].alive:
                sending.error = "the connection ended"
                return
            sending.requests.append(self._endpoints[0].tag_send(self._library.array(part), tag))

    def look(self) -> list[Event]:
        """Accept, take what has come, and collect what has come to its end."""
        while self._requests:
            request = self._requests.pop(0)
            if len(self._endpoints) < MAX_ENDPOINTS:
                self._accept(request)
        events: list[Event] = []
        alive = not self._endpoints or any(endpoint.alive for endpoint in self._endpoints)
        if self.listener is not None and not self._ended:
            while self._take(events):
                pass
        self._collect(events)
        if not alive and not self._ended:
            self._end(events, self._why())
        return events

    def close(self) -> list[Event]:
        """Every connection; then the worker may go."""
        for endpoint in self._endpoints:
            endpoint.close_blocking()
        events: list[Event] = []
        end = time.monotonic() + _CLOSE_S
        while self.sends and time.monotonic() < end:
            self.worker.progress_once()
            self._collect(events)
        events += [Sent(self.number, sending.ticket, "it did not end with its connection") for sending in self.sends]
        self._endpoints.clear()
        self.listener = self.worker = None
        return events

    def _end(self, events: list[Event], why: str) -> None:
        self._ended = True
        events.append(Ended(self.number, why))

    def _accept(self, request: int) -> None:
        try:
            self._endpoints.append(self.listener.create_endpoint_from_conn_request(request, True))
        except self._library.errors:
            return  # whoever dialled is gone already

    def _take(self, events: list[Event]) -> bool:
        """One fragment; False if none is there."""
        probe = self.worker.tag_probe(self._library.api.UCXXTag(self._tag), self._mask, remove=True)
        if not probe.matched:
            return False
        lane, n = int(probe.sender_tag.value) & _LANES, int(probe.length)
        arriving = self._lanes.get(lane)
        if arriving is None:
            length = self._receive(probe, np.empty(n, np.uint8)).tobytes()
            nbytes = _LENGTH.unpack(length)[0] if n == _LENGTH.size else 0
            if not 0 < nbytes <= self._limit:
                self._end(events, f"a message of {nbytes} bytes, {self._limit} are taken")
                return False
            self._lanes[lane] = _Arriving(nbytes)
            return True
        if n > len(arriving.data) - arriving.have:
            self._receive(probe, np.empty(n, np.uint8))
            self._end(events, "a fragment beyond the end of its message")
            return False
        self._receive(probe, arriving.data[arriving.have : arriving.have + n])
        arriving.have += n
        if arriving.have == len(arriving.data):
            self._lanes[lane] = None
            events.append(Arrived(self.number, lane, arriving.data))
        return True

    def _receive(self, probe: Any, into: np.ndarray) -> np.ndarray:
        request = self.worker.tag_recv_with_handle(self._library.array(into), probe)
        while not request.completed:  # of one segment, so it is there
            self.worker.progress_once()
        request.check_error()
        return into

    def _collect(self, events: list[Event]) -> None:
        while self.sends:
            sending = self.sends[0]
            while sending.requests and sending.requests[0].completed:
                sending.error = self._library.error_of(sending.requests.popleft()) or sending.error
            if sending.requests:
                return
            self.sends.popleft()
            events.append(Sent(self.number, sending.ticket, sending.error))

    def _why(self) -> str:
        try:
            self._endpoints[0].raise_on_error()
        except self._library.errors as error:
            return str(error)
        return "the connection ended"


class UcxThread:
    """See the module. Its methods are for one other thread (the transfer thread).

    Args:
        wake: called when `drain` has something new.

    Raises:
        ConfigError: ucxx is not installed.
    """

    def __init__(self, wake: Wake | None = None) -> None:
        if importlib.util.find_spec("ucxx") is None:
            raise ConfigError(MISSING)
        self._wake = wake
        self._orders: deque[Callable[[], None]] = deque()
        self._events: deque[Event] = deque()
        self._failure: BaseException | None = None
        self._poke_r, self._poke_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._numbers = iter(range(1, 2**62))
        self._thread: threading.Thread | None = None
        self._ended = self._closed = False
        # the thread's own from here on; ucxx is loaded there, when the first pair needs it
        self._library: Any = None
        self._context: Any = None
        self._workers: list[Any] = []  # the one that sends, then those of the listening stations
        self._stations: dict[int, _Station] = {}
        self._waits = select.epoll()

    # ------------------------------------------------------------------------------------------------- for one caller

    def listen(self, tag: int, limit: int) -> tuple[int, int]:
        """A new station, and the port that its peer dials. Waits for the thread, some milliseconds.

        Args:
            tag: of the messages that are taken.
            limit: bytes of one at most; a longer one ends the station.

        Raises:
            PeerError: UCX cannot be brought up here.
        """
        number, told, port = next(self._numbers), threading.Event(), [0]

        def order() -> None:
            port[0] = self._listen(number, tag, limit)
            told.set()

        self._order(order)
        if not told.wait(_START_S):
            raise PeerError(f"UCX cannot be brought up here: {self._failure or 'no answer'}")
        return number, port[0]

    def dial(self, host: str, port: int, tag: int) -> int:
        """A new station that dials another's port, at once; whether it comes about is seen by what is sent."""
        number, tag = next(self._numbers), tag | secrets.randbits(_LANE_BITS)
        self._order(lambda: self._dial(number, host, port, tag))
        return number

    def send(self, station: int, data: np.ndarray) -> int:
        """From a station that has dialled. In order. `data` [n] uint8, n > 0, must stay as it is until its Sent."""
        ticket = next(self._numbers)
        self._order(lambda: self._send(station, ticket, data))
        return ticket

    def close_station(self, station: int) -> None:
        """End its connections; its sends end with an error. Messages that have been told stay."""
        self._order(lambda: self._close_station(station))

    def drain(self) -> list[Event]:
        """What happened since the last call, in order. Raises what the thread died of."""
        if self._failure is not None:
            raise self._failure
        found = []
        while self._events:
            found.append(self._events.popleft())
        return found

    def close(self) -> None:
        """Every station, then the thread. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._order(self._end)
            self._thread.join()
        self._waits.close()
        os.close(self._poke_r)
        os.close(self._poke_w)

    def _order(self, order: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ucx", daemon=True)
            self._thread.start()
        self._orders.append(order)
        try:
            os.write(self._poke_w, b"x")
        except BlockingIOError:
            return  # it is full of pokes already

    # ------------------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._failure = error
            if self._wake is not None:
                self._wake()
            raise

    def _serve(self) -> None:
        self._library = Library()
        self._context = self._library.context()
        self._new_worker()
        self._waits.register(self._poke_r, select.EPOLLIN)
        while not self._ended:
            while self._orders:
                self._orders.popleft()()
            progressed, told = False, False
            for worker in self._workers:
                progressed = worker.progress_once() or progressed
            for station in list(self._stations.values()):
                told = self._tell(station.look()) or told
            if not progressed and not told and not self._orders and not self._ended:
                self._sleep()
        for number in list(self._stations):
            self._close_station(number)
        self._workers.clear()
        self._context = None

    def _sleep(self) -> None:
        """Until UCX has something, somebody gives an order, or a short while has passed."""
        if not all(worker.arm() for worker in self._workers):
            return
        ready = self._waits.poll(min((s.sleep_s for s in self._stations.values()), default=_IDLE_SLEEP_S))
        if any(fd == self._poke_r for fd, _ in ready):
            os.read(self._poke_r, 4096)

    def _tell(self, events: list[Event]) -> bool:
        if events:
            self._events.extend(events)
            if self._wake is not None:
                self._wake()
        return bool(events)

    def _listen(self, number: int, tag: int, limit: int) -> int:
        station = self._stations[number] = _Station(number, self._library, self._new_worker(), tag, limit)
        return station.listen()

    def _dial(self, number: int, host: str, port: int, tag: int) -> None:
        station = self._stations[number] = _Station(number, self._library, self._workers[0], tag)
        try:
            station.dial(host, port)
        except self._library.errors as error:
            self._tell([Ended(number, f"{host}:{port} cannot be dialled: {error}")])

    def _send(self, number: int, ticket: int, data: np.ndarray) -> None:
        station = self._stations.get(number)
        if station is None or not station.can_send:
            self._tell([Sent(number, ticket, "there is no connection", posted=False)])
            return
        station.send(ticket, data)

    def _close_station(self, number: int) -> None:
        station = self._stations.pop(number, None)
        if station is None:
            return
        worker = station.worker
        self._tell(station.close())
        if worker is not self._workers[0]:
            self._workers.remove(worker)
            self._waits.unregister(worker.epoll_file_descriptor)

    def _new_worker(self) -> Any:
        worker = self._library.worker(self._context)
        self._workers.append(worker)
        self._waits.register(worker.epoll_file_descriptor, select.EPOLLIN)
        return worker

    def _end(self) -> None:
        self._ended = True
