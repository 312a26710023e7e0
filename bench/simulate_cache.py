"""The blocks of one simulated worker: a device tier, a host tier behind it, both least recently used first.

    free -> held (a request's own) -> kept (published, of nobody) -> host -> gone
                                   <- a hit, from the host at the price of a copy

A block is in one tier at a time. Held blocks are never evicted; a request gets all its device blocks at once or none.
What a router hears of it is collected in `stored` and `removed` until taken: a block that moves to the host is still
there. Knows no time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Name = bytes


@dataclass(slots=True)
class Lease:
    """What a request holds: named blocks, and so many without a name (not published, or a second copy)."""

    names: list[Name]
    unnamed: int
    hits: int  # leading blocks that were there
    from_host: int  # of them, in the host tier


class BlockCache:
    """See the module.

    Args:
        device, host: blocks a tier.
    """

    def __init__(self, device: int, host: int = 0) -> None:
        self.device, self.host = device, host
        self.stored: list[Name] = []
        self.removed: list[Name] = []
        self._pins: dict[Name, int] = {}
        self._unnamed = 0
        self._kept: OrderedDict[Name, None] = OrderedDict()
        self._cold: OrderedDict[Name, None] = OrderedDict()

    @property
    def held(self) -> int:
        return len(self._pins) + self._unnamed

    @property
    def free(self) -> int:
        """Blocks that nobody holds, kept ones included."""
        return self.device - self.held

    def __contains__(self, name: Name) -> bool:
        return name in self._pins or name in self._kept or name in self._cold

    def names(self) -> set[Name]:
        return self._pins.keys() | self._kept.keys() | self._cold.keys()

    def reserve(self, names: Sequence[Name], blocks: int, most_hits: int) -> Lease | None:
        """Device blocks for a request of `blocks`, those it finds among them; None if they do not fit now."""
        hits = cold = pinned = 0
        for name in names[:most_hits]:
            if name not in self:
                break
            hits += 1
            cold += name in self._cold
            pinned += name in self._pins
        if self.held + blocks - pinned > self.device:
            return None
        for name in names[:hits]:
            self._kept.pop(name, None)
            self._cold.pop(name, None)
            self._pins[name] = self._pins.get(name, 0) + 1
        self._unnamed += blocks - hits
        self._shrink()
        return Lease(list(names[:hits]), blocks - hits, hits, cold)

    def publish(self, lease: Lease, names: Sequence[Name]) -> None:
        """The request's full blocks are computed; the first copy of a name is the one that is kept."""
        for name in names[len(lease.names) :]:
            if name in self._pins:  # another computed it meanwhile: this copy stays without a name
                continue
            if name not in self:
                self.stored.append(name)
            self._kept.pop(name, None)
            self._cold.pop(name, None)
            self._pins[name] = 1
            lease.names.append(name)
            lease.unnamed -= 1
            self._unnamed -= 1

    def release(self, lease: Lease) -> None:
        """The request holds nothing more. The end of a prefix is the first to go."""
        for name in reversed(lease.names):
            count = self._pins[name] - 1
            if count:
                self._pins[name] = count
            else:
                del self._pins[name]
                self._kept[name] = None
        self._unnamed -= lease.unnamed
        lease.names, lease.unnamed = [], 0
        self._shrink()

    def _shrink(self) -> None:
        while self._kept and len(self._kept) + self.held > self.device:
            name, _ = self._kept.popitem(last=False)
            self._cold[name] = None
            if len(self._cold) > self.host:
                gone, _ = self._cold.popitem(last=False)
                self.removed.append(gone)

    def take_events(self) -> tuple[list[Name], list[Name]]:
        """(stored, removed) since the last call; what came and went in between is in neither."""
        stored, removed = self.stored, self.removed
        self.stored, self.removed = [], []
        gone = set(removed)
        kept = [name for name in dict.fromkeys(stored) if name in self]
        return kept, [name for name in dict.fromkeys(removed) if name in gone and name not in self]
