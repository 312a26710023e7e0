"""When a process that has to answer at once (router, ingress) looks for garbage: between its events, not amid them.

Python's collector starts whenever so many objects were made, in the midst of whatever makes them, and looks through all
that is kept. Here it is off, and its rounds are made when time has passed: young objects each time, all now and then.
What is kept as long as the workers are there leaves the rounds for good whenever there is twice as much of it.

Knows nothing of what the process does. Reference counts free all but cycles at once, so memory does not hang on this.
"""

from __future__ import annotations

import gc

MIDDLE, FULL = 20, 1200  # ticks: a second, a minute


class Heap:
    """One a process: it governs the collector of all of it, from `begin` to `end`."""

    def __init__(self) -> None:
        self._ticks = self._kept = 0

    def begin(self) -> None:
        gc.disable()

    def tick(self, kept: int) -> None:
        """About every 50 ms. `kept`: how much is kept, in a unit of the caller's, like workers."""
        self._ticks += 1
        if kept > 2 * self._kept:
            self._kept = kept
            gc.collect()
            gc.freeze()
        elif not self._ticks % FULL:
            gc.collect()
        else:
            gc.collect(0 if self._ticks % MIDDLE else 1)

    def end(self) -> None:
        """As it was before."""
        gc.unfreeze()
        gc.enable()
