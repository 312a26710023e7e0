"""What a gen core keeps of one hand-off, from Bind to Valid, and of one read. Plain data; gen_core.py decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.transfer.bitmap import Unit, UnitBitmap
from tailrace.transfer.core_events import PairUp
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Bind, Handoff, LandingGrant, PageDescriptor
from tailrace.transfer.request_state import State


@dataclass(slots=True)
class Hand:
    """One hand-off, from Bind to Valid. `pages`: one an ordinal, SCRATCH_PAGE where the group needs none."""

    bind: Bind
    pair: PairUp
    pages: list[int]
    num_matched_tokens: int
    units: UnitBitmap
    bound_at: float
    progress_at: float
    asked_at: float
    state: State = State.READING
    seen: dict[Unit, PageDescriptor] = field(default_factory=dict)
    told: set[Unit] = field(default_factory=set)  # a read of it was started
    jobs: set[int] = field(default_factory=set)
    handoff: Handoff | None = None
    tokens_ready: int = 0
    final_at: float | None = None
    grants: dict[int, LandingGrant] = field(default_factory=dict)  # by chunk: out, and not landed
    ctx_dead: bool = False

    @property
    def key(self) -> Key:
        return (self.bind.request, self.bind.attempt)

    @property
    def complete(self) -> bool:
        return self.units.full and self.handoff is not None


@dataclass(slots=True)
class ReadUnderWay:
    """A read under way. `quarantined`: its request is gone, its pages wait for its end."""

    key: Key
    boot: str
    units: dict[Unit, int]  # -> our page
    quarantined: bool = False


def real_pages(pages: list[int]) -> list[int]:
    return [page for page in pages if page != SCRATCH_PAGE]
