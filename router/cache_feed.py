"""The workers' cache events in, the block index kept right: numbers in order, one question a gap.

    asked (at each link) -> an event that is `cleared` -> followed, number by number -> a gap -> asked (once)

A number that was seen already is dropped. A missing one, or a heartbeat that names a later number than the last event,
is a gap: until the worker has said its whole set the index keeps what it believed, and what comes is ignored. An answer
that does not come is asked for again, ever more rarely. Clock injected; knows no request. If the router dies its
successor asks all workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from tailrace.router.block_index import BlockIndex
from tailrace.transfer.messages import CacheEvent, CacheQuery

ASK_AGAIN_S, LAST_ASK_AGAIN_S = 1.0, 30.0


@dataclass(slots=True)
class _Stream:
    """`next`: number of the event that is due. `asked_at`: the whole set is awaited since then, and its first event
    has a number above `above`; None: the worker is followed."""

    next: int = 1
    above: int = 0
    asked_at: float | None = None
    again_s: float = ASK_AGAIN_S
    linked: bool = True


class CacheFeed:
    """See the module.

    Args:
        send: (boot id, frame) to a worker.
        counters: `cache_gaps`, `cache_queries`, `cache_late_events` are counted there.
    """

    def __init__(self, index: BlockIndex, send: Callable[[str, object], None], counters: Counter[str]) -> None:
        self.index = index
        self._send, self._counters = send, counters
        self._streams: dict[str, _Stream] = {}

    def linked(self, boot: str, step: int, now: float) -> None:
        """A worker is (back) on a link. `step`: blocks a granule of its prefix index."""
        self.index.join(boot, step)
        stream = self._streams.setdefault(boot, _Stream())
        stream.linked, stream.above, stream.again_s = True, 0, ASK_AGAIN_S
        self._ask(boot, stream, "link", now)

    def link_down(self, boot: str) -> None:
        stream = self._streams.get(boot)
        if stream is not None:
            stream.linked = False

    def died(self, boot: str) -> None:
        self._streams.pop(boot, None)
        self.index.leave(boot)

    def event(self, boot: str, frame: CacheEvent, now: float) -> None:
        stream = self._streams.get(boot)
        if stream is None:
            return
        if frame.sequence < stream.next or (stream.asked_at is not None and not self._answers(stream, frame)):
            self._counters["cache_late_events"] += 1
        elif frame.sequence > stream.next and not frame.cleared:
            self._gap(boot, stream, frame.sequence, now)
        else:
            stream.next, stream.asked_at = frame.sequence + 1, None
            self.index.change(boot, frame.stored, frame.removed, cleared=frame.cleared)

    @staticmethod
    def _answers(stream: _Stream, frame: CacheEvent) -> bool:
        return frame.cleared and frame.sequence > stream.above

    def heartbeat(self, boot: str, sequence: int, now: float) -> None:
        """`sequence`: of the last event that the worker sent before it."""
        stream = self._streams.get(boot)
        if stream is not None and stream.asked_at is None and sequence >= stream.next:
            self._gap(boot, stream, sequence, now)

    def _gap(self, boot: str, stream: _Stream, sequence: int, now: float) -> None:
        self._counters["cache_gaps"] += 1
        stream.above, stream.again_s = sequence, ASK_AGAIN_S
        self._ask(boot, stream, "gap", now)

    def _ask(self, boot: str, stream: _Stream, why: str, now: float) -> None:
        stream.asked_at = now
        self._counters["cache_queries"] += 1
        self._send(boot, CacheQuery(why))

    def tick(self, now: float) -> None:
        for boot, stream in self._streams.items():
            if stream.linked and stream.asked_at is not None and now - stream.asked_at >= stream.again_s:
                stream.again_s = min(2 * stream.again_s, LAST_ASK_AGAIN_S)
                self._ask(boot, stream, "gap" if stream.above else "link", now)

    def follows(self, boot: str) -> bool:
        """Whether what the index says of a worker is what the worker said last."""
        stream = self._streams.get(boot)
        return stream is not None and stream.asked_at is None
