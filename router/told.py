"""The ends of attempts that an ingress has told lately, for a router that may not have heard of them.

A report that was under way when the link broke is lost, or was never sent while there was none. The same router, found
again, would hold the claims of such an attempt for ever. So an ingress that has linked again repeats them; a router
that knows better, or is a new one, drops what it has no record of. Kept as long as a router keeps the records of an
ingress without a link. Pure, clock injected.
"""

from __future__ import annotations

from collections import deque

from tailrace.transfer.messages import Done

MARGIN_S = 2.0  # a router forgets the requests of a lost ingress a little after their lease


class Told:
    """See the module. `keep_s`: the request lease."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s + MARGIN_S
        self._ends: deque[tuple[float, Done]] = deque()

    def __len__(self) -> int:
        return len(self._ends)

    def note(self, frame: Done, now: float) -> None:
        """It was told now, or should have been."""
        self._ends.append((now, frame))
        self._drop(now)

    def again(self, now: float) -> list[Done]:
        """What to repeat, in order."""
        self._drop(now)
        return [frame for _, frame in self._ends]

    def _drop(self, now: float) -> None:
        while self._ends and self._ends[0][0] < now - self._keep_s:
            self._ends.popleft()
