"""The table of workers: who is there, in what condition, and who is gone for good.

    (Register) -> linked -> lost (link down) -> linked again, or dead after the grace
                  linked and silent -> suspect -> heard again, or dead
    dead: for good; the boot id is published once and never taken back

A dropped link alone is not a death (it may be dialled again), and a missed heartbeat alone is not one (the process may
be stopped for a while): both take the worker out of the candidates first. Dead at once: when the supervisor or Ray says
so, or when a new boot registers under the same worker name. Evidence of death frees no page that another process may
write; it only says where not to send work. Knows no requests.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from tailrace.router.settings import RouterSettings
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Heartbeat, Held, Progress, Register

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0  # until any worker has measured one
DEFAULT_TRANSFER_BYTES_PER_S = 1e9
REMEMBERED_DEATHS = 4096
FIRST_RESTART_S = 5.0  # until one restart was seen


@dataclass(slots=True)
class Worker:
    """One boot of one worker.

    Attributes:
        free_pages: free + cached, by its last word and what was bound or ended since.
        pairs: boot ids of peers with which its pair is usable.
        foreign: requests it holds that the router has no record of (a former router placed them).
        foreign_progress: their last Progress, for an ingress that comes back.
        last_chosen: number of the router's last choice that fell on it.
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

    @property
    def boot(self) -> str:
        return self.register.boot

    @property
    def name(self) -> str:
        return self.register.worker

    @property
    def decodes(self) -> bool:
        return self.register.duty in ("gen", "both")

    @property
    def prefills(self) -> bool:
        return self.register.duty in ("ctx", "both")

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
        """Pages here of a prompt, its first output token, and each further sample's own open page."""
        return -(-(num_tokens + 1) // max(self.register.tokens_per_page, 1)) + samples - 1


def _sane(rate: float) -> float:
    return rate if math.isfinite(rate) and rate > 0 else 0.0


class WorkerTable:
    """All living workers by boot id, and the boot ids of the dead."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.restarts = 0  # boots of a worker name that was known before
        self.deaths = 0
        self.restart_s = FIRST_RESTART_S  # how long a worker is away when it dies, as seen
        self.last_death: dict[str, float] = {}  # duty -> when
        self._workers: dict[str, Worker] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._died: dict[str, float] = {}  # worker name -> when its last boot died
        self._names: set[str] = set()
        self._mean_rates: dict[str, float] = {}  # a duty; emptied by whatever may change one
        self._count = 0

    def get(self, boot: str) -> Worker | None:
        return self._workers.get(boot)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def is_dead(self, boot: str) -> bool:
        return boot in self._dead

    # ---------------------------------------------------------------------------------------------------------- events

    def register(self, frame: Register, now: float) -> list[str]:
        """A worker is (back) on a link. Returns boot ids that are dead by that: earlier boots of the same name."""
        worker = self._workers.get(frame.boot)
        self._mean_rates.clear()
        if worker is not None:
            worker.register, worker.linked, worker.heard_at = frame, True, now
            return []
        replaced = [w.boot for w in self._workers.values() if w.name == frame.worker]
        self.restarts += frame.worker in self._names
        self._names.add(frame.worker)
        self._count += 1
        self._workers[frame.boot] = Worker(frame, self._count, now, now)
        return replaced

    def link_down(self, boot: str, now: float) -> None:
        worker = self._workers.get(boot)
        if worker is not None and worker.linked:
            worker.linked, worker.lost_at = False, now

    def heartbeat(self, worker: Worker, frame: Heartbeat, now: float) -> None:
        worker.heartbeat, worker.heard_at = frame, now
        self._mean_rates.clear()
        worker.free_pages = frame.free_pages
        worker.pairs = set(frame.pairs)
        if worker.ready_at is None and frame.phase == "run":
            worker.ready_at = now
            died = self._died.pop(worker.name, None)
            if died is not None:
                self.restart_s += 0.5 * (now - died - self.restart_s)

    def overdue(self, now: float) -> list[str]:
        """Boot ids whose grace is over."""
        limits = self.settings
        return [
            w.boot
            for w in self._workers.values()
            if (not w.linked and now - w.lost_at > limits.redial_grace_s)
            or (w.linked and now - w.heard_at > limits.dead_after_s)
        ]

    def bury(self, boot: str, now: float) -> Worker | None:
        """Dead for good. Returns the worker if it was in the table."""
        worker = self._workers.pop(boot, None)
        self._mean_rates.clear()
        self._dead[boot] = None
        if len(self._dead) > REMEMBERED_DEATHS:
            self._dead.popitem(last=False)
        if worker is not None:
            self.deaths += 1
            self._died[worker.name] = now
            self.last_death[worker.register.duty] = now
            while len(self._died) > REMEMBERED_DEATHS:
                del self._died[next(iter(self._died))]
        return worker

    # ------------------------------------------------------------------------------------------------------ candidates

    def decoders(self, now: float) -> list[Worker]:
        """Workers of duty gen or both that may be given work; silent ones only if no other is there."""
        return self._usable(now, "decodes")

    def prefillers(self, now: float) -> list[Worker]:
        """The same for duty ctx or both."""
        return self._usable(now, "prefills")

    def _usable(self, now: float, duty: str) -> list[Worker]:
        ready, silent = [], []
        for worker in self._workers.values():
            if getattr(worker, duty):
                condition = worker.condition(now, self.settings)
                if condition == "ready":
                    ready.append(worker)
                elif condition == "silent":
                    silent.append(worker)
        return ready or silent

    def rate(self, worker: Worker) -> float:
        """Predicted prefill tokens a second: the pool's mean, unless this worker is shown to differ by more than 2x.

        Noise in the measurement must not skew the shares of equal workers.
        """
        duty, own = worker.register.duty, worker.measured_rate
        mean = self._mean_rates.get(duty)
        if mean is None:
            known = [r for w in self._workers.values() if w.register.duty == duty if (r := w.measured_rate)]
            if not known:
                known = [r for w in self._workers.values() if (r := w.measured_rate)] or [DEFAULT_PREFILL_TOKENS_PER_S]
            mean = self._mean_rates[duty] = sum(known) / len(known)
        return own if own and not mean / 2 <= own <= mean * 2 else mean

    def back_in_s(self, duties: tuple[str, ...], now: float) -> float:
        """Predicted time until a worker of one of these duties is there again, from the restarts seen so far."""
        died = max((self.last_death[d] for d in duties if d in self.last_death), default=now)
        return max(1.0, self.restart_s - (now - died))
