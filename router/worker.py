"""One boot of one worker as the router sees it, and lists of those that may be given work.

Plain data with what follows from it; who is in which list, and when that changes, is the table's (workers.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from tailrace.router.prefill_fit import Coefficients, PrefillFit, plain
from tailrace.router.settings import RouterSettings
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Heartbeat, Held, Progress, Register


@dataclass(slots=True)
class Worker:
    """One boot of one worker.

    Attributes:
        free_pages: free + cached, by its last word and what was bound or ended since.
        pairs: boot ids of peers with which its pair is usable; changed by the table only, as free_pages is.
        foreign: requests it holds that the router has no record of (a former router placed them).
        foreign_progress: their last Progress, for an ingress that comes back.
        last_chosen: number of the router's last choice that fell on it.
        fit: of its own prefills; a new boot begins anew.
        boot, name, decodes, prefills: its id, its name and its duties, as its Register says.
        prior: what predicts them until there are some, by the table's beliefs number `prior_of`.
    """

    register: Register
    order: int
    heard_at: float
    registered_at: float
    linked: bool = True
    lost_at: float = 0.0
    heartbeat: Heartbeat | None = None
    ready_at: float | None = None
    draining: bool = False
    free_pages: int = 0
    pairs: set[str] = field(default_factory=set)
    foreign: dict[Key, Held] = field(default_factory=dict)
    foreign_progress: dict[Key, Progress] = field(default_factory=dict)
    last_chosen: int = 0
    fit: PrefillFit = field(default_factory=PrefillFit)
    prior: Coefficients = plain(1.0)
    prior_of: int = 0
    boot: str = field(init=False)
    name: str = field(init=False)
    decodes: bool = field(init=False)
    prefills: bool = field(init=False)

    def __post_init__(self) -> None:
        self.registered(self.register)

    def registered(self, frame: Register) -> None:
        """It has said (again) who it is; the boot id stays the same."""
        self.register, self.boot, self.name = frame, frame.boot, frame.worker
        self.decodes, self.prefills = frame.duty in ("gen", "both"), frame.duty in ("ctx", "both")

    @property
    def measured_rate(self) -> float:
        return _sane(self.heartbeat.prefill_tokens_per_s) if self.heartbeat else 0.0

    @property
    def transfer_rate(self) -> float:
        return _sane(self.heartbeat.transfer_bytes_per_s) if self.heartbeat else 0.0

    @property
    def bytes_per_token(self) -> float:
        return sum(self.register.compat.page_bytes) / max(self.register.tokens_per_page, 1)

    @property
    def no_capacity(self) -> bool:
        """It has work that waits and cannot begin."""
        beat = self.heartbeat
        return beat is not None and (
            beat.free_pages == 0 or (beat.queued > 0 and beat.running == 0 and beat.queue_age_s > 0.5)
        )

    def condition(self, now: float, settings: RouterSettings) -> str:
        """ready | silent | lost | loading | stuck | draining; only ready ones, and silent ones in need, get work."""
        if not self.linked:
            return "lost"
        if self.draining:
            return "draining"
        beat = self.heartbeat
        if beat is None or beat.phase != "run":
            return "loading"
        if now - self.heard_at > settings.suspect_after_s:
            return "silent"
        return "stuck" if beat.stamp_age_s > settings.stuck_after_s else "ready"

    def pages_for(self, num_tokens: int, samples: int) -> int:
        """Pages here of a prompt, its first output token, and each sample's own state and further one's open page."""
        own = samples * self.register.state_pages
        return -(-(num_tokens + 1) // max(self.register.tokens_per_page, 1)) + samples - 1 + own


def _sane(rate: float) -> float:
    return rate if math.isfinite(rate) and rate > 0 else 0.0


class Usable(list[Worker]):
    """Workers that may be given work, with what holds for all of them. It is shared: nobody changes it.

    Attributes:
        spare: free pages of them all that are promised to nobody; None until asked, then kept up to date by the table.
    """

    spare: int | None = None

    @cached_property
    def boots(self) -> frozenset[str]:
        return frozenset(worker.boot for worker in self)

    @cached_property
    def smallest_pages(self) -> Worker | None:
        """The one that needs the most pages for a prompt."""
        return min(self, key=lambda worker: worker.register.tokens_per_page, default=None)

    @cached_property
    def batch_rows(self) -> int | None:
        """Of all their batches; None while one does not say."""
        rows = [worker.register.max_batch_size for worker in self]
        return sum(rows) if all(rows) else None
