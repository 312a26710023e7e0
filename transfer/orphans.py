"""Landing chunks that are out for hand-offs which have ended: a write into them may still come.

Books for a gen core; the chunks themselves are in landing.py. Pure; dies with its worker.
"""

from __future__ import annotations

from tailrace.transfer.loop_events import Key


class Orphans:
    """How many chunks are out for which (peer boot, ended key), and since when."""

    def __init__(self) -> None:
        self._out: dict[tuple[str, Key], tuple[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._out)

    def __contains__(self, entry: tuple[str, Key]) -> bool:
        return entry in self._out

    def of(self, boot: str) -> bool:
        """Whether a chunk is out with this peer."""
        return any(other == boot for other, _ in self._out)

    def add(self, boot: str, key: Key, number: int, since: float) -> None:
        self._out[boot, key] = (number, since)

    def landed(self, boot: str, key: Key) -> None:
        """One of them has come."""
        number, since = self._out.pop((boot, key), (0, 0.0))
        if number > 1:
            self._out[boot, key] = (number - 1, since)

    def take(self, boot: str, key: Key) -> bool:
        """No more will come for this key; whether something was out."""
        return self._out.pop((boot, key), None) is not None

    def forget(self, boot: str) -> None:
        """The agent that receives from this peer is gone, or will be."""
        for entry in [entry for entry in self._out if entry[0] == boot]:
            del self._out[entry]

    def stalled(self, since: float) -> list[str]:
        """Peers with a chunk that is out since then, or for longer."""
        return sorted({boot for (boot, _), (_, began) in self._out.items() if began <= since})
