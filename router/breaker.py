"""Breakers: a worker whose requests fail by its own fault gets no more of them, until one has gone well.

    closed     it is chosen as usual; faults in a row are counted
    open       after `faults` in a row: nothing is sent there for `probe_s`
    half open  from then on one request, the probe, may be sent: it goes well -> closed; a fault -> open again

A breaker belongs to a worker and guards both legs: an open one takes the worker out of prefilling and of decoding, so
that no pages are reserved at one end for a request which the other cannot serve. Faults are what workers do wrong, as
ingresses and unanswered binds tell; a refusal, a client's error and a client that leaves are none. Deaths without a
success between them count too, whatever the boot: a worker that dies of its first request each time is not given many.

The probe is the first request that comes, not one of ours: with no traffic a breaker stays half open, in which the
worker counts as usable, so that readiness draws traffic again. A probe without a verdict (cancelled, or under way for
longer than `probe_s`) makes room for the next. Keyed by the worker's name. Pure; a new router begins with all closed.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tailrace.transfer.loop_events import Key

ONE_EVENT_S = 0.2  # faults this close together are one: a link that breaks under fifty requests fails once
REMEMBERED = 4096  # workers


@dataclass(slots=True)
class _Breaker:
    boot: str = ""
    faults: int = 0
    deaths: int = 0
    last_fault: float | None = None
    opened: float | None = None
    probe: Key | None = None
    probe_since: float = 0.0


class Breakers:
    """See the module.

    Args:
        faults: in a row that open a breaker; deaths in a row that do.
        probe_s: time from opening to the first probe, and between probes.
    """

    def __init__(self, faults: int, probe_s: float) -> None:
        self._limit, self._probe_s = faults, probe_s
        self._breakers: OrderedDict[str, _Breaker] = OrderedDict()
        self.trips = 0

    # ---------------------------------------------------------------------------------------------------------- events

    def registered(self, worker: str, boot: str) -> None:
        """A new boot has done nothing wrong; what its predecessors died of may be in the requests."""
        breaker = self._breakers.get(worker)
        if breaker is None or breaker.boot == boot:
            return
        breaker.boot, breaker.faults, breaker.last_fault, breaker.probe = boot, 0, None, None
        if breaker.deaths < self._limit:
            breaker.opened = None

    def fault(self, worker: str, boot: str, now: float) -> None:
        """A request failed by this worker's fault."""
        breaker = self._of(worker)
        breaker.boot = boot
        if breaker.opened is not None:
            if now >= breaker.opened + self._probe_s:
                self._open(breaker, now)
            return
        if breaker.last_fault is None or now - breaker.last_fault >= ONE_EVENT_S:
            breaker.last_fault = now
            breaker.faults += 1
            if breaker.faults >= self._limit:
                self._open(breaker, now)

    def died(self, worker: str, now: float) -> None:
        breaker = self._of(worker)
        breaker.deaths += 1
        if breaker.deaths >= self._limit or breaker.opened is not None:
            self._open(breaker, now)

    def success(self, worker: str, key: Key) -> None:
        """A request was served. An open breaker is closed by its probe alone, not by what was under way before."""
        breaker = self._breakers.get(worker)
        if breaker is not None and (breaker.opened is None or breaker.probe == key):
            del self._breakers[worker]

    def given(self, worker: str, key: Key, now: float) -> None:
        """A request was sent there; if the breaker is not closed it is the probe."""
        breaker = self._breakers.get(worker)
        if breaker is not None and breaker.opened is not None:
            breaker.probe, breaker.probe_since = key, now

    def ended(self, worker: str, key: Key) -> None:
        """A request is over without a verdict on the worker."""
        breaker = self._breakers.get(worker)
        if breaker is not None and breaker.probe == key:
            breaker.probe = None

    # ----------------------------------------------------------------------------------------------------------- asked

    def state(self, worker: str, now: float) -> str:
        """closed | open | half_open."""
        breaker = self._breakers.get(worker)
        if breaker is None or breaker.opened is None:
            return "closed"
        return "half_open" if now >= breaker.opened + self._probe_s else "open"

    def admits(self, worker: str, now: float) -> bool:
        """Whether it may be given a request now."""
        return self.wait_s(worker, now) <= 0.0

    def shut(self, now: float) -> set[str]:
        """The workers that may not be given one now."""
        return {worker for worker in self._breakers if not self.admits(worker, now)}

    def wait_s(self, worker: str, now: float) -> float:
        """Time until it may be given one, if nothing is heard of its probe; 0 for now."""
        breaker = self._breakers.get(worker)
        if breaker is None or breaker.opened is None:
            return 0.0
        since = breaker.opened if breaker.probe is None else max(breaker.opened, breaker.probe_since)
        return max(0.0, since + self._probe_s - now)

    # ---------------------------------------------------------------------------------------------------------- inside

    def _open(self, breaker: _Breaker, now: float) -> None:
        self.trips += breaker.opened is None
        breaker.opened, breaker.probe = now, None

    def _of(self, worker: str) -> _Breaker:
        breaker = self._breakers.setdefault(worker, _Breaker())
        self._breakers.move_to_end(worker)
        if len(self._breakers) > REMEMBERED:
            self._breakers.popitem(last=False)
        return breaker
