"""What hand-offs from each ctx cost a gen: the rate of its reads, and what a hand-off takes beside them. No I/O.

The overhead is what a hand-off's client waits for beside the bytes: from the moment at which ctx has said that all
pages are final until gen may decode, less the time in which reads of it were under way. It belongs to the transfer
thread and dies with it; a pair that is gone is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from tailrace.transfer.loop_events import Admitted, Key, LoopEvent
from tailrace.transfer.messages import PairCost
from tailrace.transfer.node_stats import TransferRate
from tailrace.transfer.transports.base import ReadDone, ReadJob

_NEW = 0.2  # weight of the newest hand-off
_MOST, _LEAST_S = 4.0, 0.001  # one that took longer counts as this many usual ones
_KEPT_HANDOFFS = 256  # hand-offs whose reads are remembered


class PairCosts:
    """`all`: of all pairs together."""

    def __init__(self) -> None:
        self.all = TransferRate()
        self._rates: dict[str, TransferRate] = {}
        self._overheads: dict[str, float] = {}
        self._jobs: dict[int, tuple[ReadJob, float]] = {}
        self._reads: OrderedDict[Key, list[tuple[float, float]]] = OrderedDict()

    def started(self, job: ReadJob, now: float) -> None:
        """A read is under way."""
        self._jobs[job.job] = (job, now)
        self.all.started(now)
        self._rates.setdefault(job.boot, TransferRate()).started(now)

    def ended(self, done: ReadDone, now: float) -> None:
        """It is over, well or not; nothing happens if it was not told to begin."""
        job, since = self._jobs.pop(done.job, (None, now))
        if job is None:
            return
        self.all.ended(done.logical_bytes, now)
        if job.boot in self._rates:
            self._rates[job.boot].ended(done.logical_bytes, now)
        self._reads.setdefault(job.key, []).append((since, now))
        while len(self._reads) > _KEPT_HANDOFFS:
            self._reads.popitem(last=False)

    def told(self, event: LoopEvent, now: float) -> LoopEvent:
        """Look at what the loop is told; an Admitted is a hand-off that has ended well. Returns the event."""
        if isinstance(event, Admitted):
            reads = self._reads.pop(event.key, [])
            if reads:  # where nothing had to be read, nothing says what reading one costs
                self._measure(event.ctx, event.exposed_s - _covered(reads, now - event.exposed_s))
        return event

    def _measure(self, boot: str, seconds: float) -> None:
        seconds, known = max(0.0, seconds), self._overheads.get(boot)
        if known is None:
            self._overheads[boot] = seconds
        else:
            self._overheads[boot] = known + _NEW * (min(seconds, _MOST * known + _LEAST_S) - known)

    def costs(self, pairs: Collection[str]) -> tuple[PairCost, ...]:
        """Of these pairs, as far as measured; what is known of others is dropped, unless a read of it goes on."""
        busy = {job.boot for job, _ in self._jobs.values()}
        for boot in [boot for boot in self._rates if boot not in pairs and boot not in busy]:
            del self._rates[boot]
            self._overheads.pop(boot, None)
        return tuple(
            PairCost(boot, rate.bytes_per_s, self._overheads.get(boot, 0.0))
            for boot, rate in self._rates.items()
            if boot in pairs and rate.bytes_per_s
        )


def _covered(spans: list[tuple[float, float]], since: float) -> float:
    """Seconds from `since` on that lie in at least one of the spans."""
    covered, reached = 0.0, since
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered
