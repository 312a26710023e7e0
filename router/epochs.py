"""Which router is the right one: an epoch is (number, router boot id), and workers are the judges.

A worker keeps the first boot id that it accepted for a number and refuses any other, and any lower number, naming its
own. A starting router takes 1 + the highest number it is told. Refused while starting, it takes 1 + that; refused after
it has served, another router is in office: it must exit. Holds no state that outlives the process: the workers do.
"""

from __future__ import annotations

from enum import Enum


class Verdict(Enum):
    KEEP = "keep"
    RAISED = "raised"  # a new number: announce it to every worker
    DEPOSED = "deposed"  # exit


class EpochRule:
    """One router's claim to office. `number` is 0 until a worker has told its own."""

    def __init__(self, boot: str) -> None:
        self.boot = boot
        self.number = 0
        self.served = False

    def told(self, number: int, router_boot: str) -> Verdict:
        """A worker has accepted (number, router_boot), as its Register or its EpochRefused says."""
        if self.number == 0:
            self.number = number + 1
            return Verdict.RAISED
        mine = number == self.number and router_boot == self.boot
        if number < self.number or mine:
            return Verdict.KEEP
        if self.served:
            return Verdict.DEPOSED
        self.number = number + 1
        return Verdict.RAISED
