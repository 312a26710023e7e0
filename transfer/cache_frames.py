"""The frames that tell the router what a worker has cached; see messages.py, which names them all. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """How the set of a worker's published prefixes changed, at most once a pass: what is findable there, and no more.

    `stored` and `removed`: (namespace, packed hashes) each, disjoint; a hash stands for the granule (the larger
    of page and block) that its block ends.
    `sequence` rises by one with each of a boot's events. `cleared`: nothing of what was said before holds any more.
    """

    worker: str
    boot: str
    sequence: int
    cleared: bool
    stored: tuple[tuple[bytes, bytes], ...]
    removed: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """Router to worker: say the whole set, in one or several events, the first `cleared`. why: link | gap."""

    why: str
