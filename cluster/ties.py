"""What ties a rank process to the other ranks of its worker: inherited file descriptors. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ties:
    """None of them where the worker has one rank.

    Attributes:
        channels: sockets to the followers in order of rank, at rank 0; at a follower the one to rank 0.
        meeting: an empty file of all ranks, where they find each other.
    """

    channels: tuple[int, ...] = ()
    meeting: int = -1

    @property
    def meeting_point(self) -> str:
        """A path to `meeting` that only this process and its user can open."""
        return f"/proc/self/fd/{self.meeting}"
