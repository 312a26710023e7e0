"""What this worker tells the router of its cached prefixes: changes, numbered without gaps, and the whole set if asked.

    a new link      -> nothing, until the router asks
    CacheQuery      -> the whole set, in one or several events, the first `cleared`; from then on every change
    a change        -> one event for all of them, at most once in EVENT_PERIOD_S

Changes wait in the books (kv_cache/changes.py), where they cancel out, so a worker without a router keeps no queue.
Belongs to the transfer thread's event loop; the worker's loop pays only for noting a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tailrace.kv_cache.changes import Hashes
from tailrace.kv_cache.manager import KvManager
from tailrace.transfer.faults import Faults
from tailrace.transfer.messages import HASH_BYTES, CacheEvent
from tailrace.transfer.node_config import NodeConfig

EVENT_PERIOD_S = 0.02
MOST_HASHES = 1 << 15  # in one event


class CacheReport:
    """See the module.

    Args:
        faults: None unless the config allows them.
        clock: monotonic seconds.
    """

    def __init__(self, config: NodeConfig, kv: KvManager, faults: Faults | None, clock: Callable[[], float]) -> None:
        self._config, self._kv, self._faults, self._clock = config, kv, faults, clock
        self.sequence = 0  # of the last event
        self._asked = False
        self._said_at = clock() - EVENT_PERIOD_S
        kv.keep_changes()

    def new_link(self) -> None:
        """Whoever listens now knows nothing yet."""
        self._asked = False

    def answer(self) -> list[CacheEvent]:
        """To a CacheQuery."""
        self._asked = True
        parts = list(_parts(self._kv.findable())) or [()]
        return self._sent([self._event(i == 0, part, ()) for i, part in enumerate(parts)])

    def changes(self) -> list[CacheEvent]:
        """What there is to say now."""
        now = self._clock()
        if not self._asked or not self._kv.has_changes or now - self._said_at < EVENT_PERIOD_S:
            return []
        self._said_at = now
        stored, removed = self._kv.take_changes()
        if sum(len(packed) for _, packed in stored + removed) <= MOST_HASHES * HASH_BYTES:
            events = [self._event(False, stored, removed)] if stored or removed else []
        else:
            events = [self._event(False, (), part) for part in _parts(removed)]
            events += [self._event(False, part, ()) for part in _parts(stored)]
        return self._sent(events)

    def _event(self, cleared: bool, stored: Hashes, removed: Hashes) -> CacheEvent:
        self.sequence += 1
        return CacheEvent(self._config.worker, self._config.boot, self.sequence, cleared, stored, removed)

    def _sent(self, events: list[CacheEvent]) -> list[CacheEvent]:
        return events if self._faults is None else self._faults.cache_events(events)


def _parts(hashes: Hashes) -> Iterator[Hashes]:
    """The same, in pieces of at most MOST_HASHES."""
    part: list[tuple[bytes, bytes]] = []
    room = most = MOST_HASHES * HASH_BYTES
    for namespace, packed in hashes:
        at = 0
        while at < len(packed):
            piece = packed[at : at + room]
            part.append((namespace, piece))
            at, room = at + len(piece), room - len(piece)
            if not room:
                yield tuple(part)
                part, room = [], most
    if part:
        yield tuple(part)
