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
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from tailrace.router.breaker import Breakers
from tailrace.router.prefill_fit import Coefficients, PrefillFit, plain, predict_s
from tailrace.router.settings import RouterSettings
from tailrace.router.worker import Usable, Worker
from tailrace.transfer.loop_events import Key
from tailrace.transfer.messages import Heartbeat, Held, PrefillSample, Register

DEFAULT_PREFILL_TOKENS_PER_S = 1000.0  # until any worker has measured one
DEFAULT_TRANSFER_BYTES_PER_S = 1e9
REMEMBERED_DEATHS = 4096
RETOLD_DEATHS = 256  # to an ingress that links again
UNTOLD_ERRORS = 4096
FIRST_RESTART_S = 5.0  # until one restart was seen
_RATE_UNIT = 2**1074  # in a token a second; every float is a whole number of these


@dataclass(frozen=True, slots=True)
class _Sorted:
    """The workers of a duty, breakers aside. True until a worker's condition changes by an event, or the `oldest`
    word of one that is not silent yet is too old: words that come later only put that off."""

    ready: Usable
    silent: Usable
    oldest: float
    admitted: dict[frozenset[str], Usable] = field(default_factory=dict)  # names kept out by breakers -> the others

    def lists(self) -> Iterator[Usable]:
        yield self.ready
        yield self.silent
        yield from self.admitted.values()


class _Rates:
    """Mean of the measured rates of a duty's workers, kept up to date. Its sums are exact, so that they hang on what is
    there now alone, and not on what has been."""

    def __init__(self) -> None:
        self._each: dict[str, tuple[str, float]] = {}  # boot -> duty, rate; those with one
        self._sums: dict[str, tuple[int, int]] = {}  # duty -> workers, sum in _RATE_UNIT
        self._means: dict[str, float] = {}  # duty -> mean, until a rate changes

    def __bool__(self) -> bool:
        return bool(self._each)

    def put(self, boot: str, duty: str, rate: float) -> bool:
        """`rate`: 0 for not measured, or gone. Returns whether that is new."""
        new = (duty, rate) if rate > 0 else None
        old = self._each.get(boot)
        if new == old:
            return False
        self._means.clear()
        if old is not None:
            del self._each[boot]
            self._add(old[0], -1, -old[1])
        if new is not None:
            self._each[boot] = new
            self._add(duty, 1, new[1])
        return True

    def _add(self, duty: str, count: int, rate: float) -> None:
        numerator, denominator = rate.as_integer_ratio()
        workers, total = self._sums.pop(duty, (0, 0))
        if workers + count:
            self._sums[duty] = (workers + count, total + numerator * (_RATE_UNIT // denominator))

    def mean(self, duty: str) -> float:
        """Of that duty's, or of all, or the default."""
        mean = self._means.get(duty)
        if mean is None:
            workers, total = self._sums.get(duty, (0, 0))
            if not workers:
                workers, total = (sum(values[i] for values in self._sums.values()) for i in (0, 1))
            mean = total / (workers * _RATE_UNIT) if workers else DEFAULT_PREFILL_TOKENS_PER_S
            self._means[duty] = mean
        return mean


class WorkerTable:
    """All living workers by boot id, and the boot ids of the dead."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.breakers = Breakers(settings.breaker_faults, settings.breaker_probe_s)
        self.restarts = 0  # boots of a worker name that was known before
        self.deaths = 0
        self.restart_s = FIRST_RESTART_S  # how long a worker is away when it dies, as seen
        self.last_death: dict[str, float] = {}  # duty -> when
        self._workers: dict[str, Worker] = {}
        self._dead: OrderedDict[str, None] = OrderedDict()
        self._died: dict[str, float] = {}  # worker name -> when its last boot died
        self._names: set[str] = set()
        self.with_foreign: dict[str, Worker] = {}  # boot id -> those that hold unknown requests: few, for a short time
        self._readers: dict[str, dict[str, Worker]] = {}  # boot id -> those that have a usable pair with it
        self._rates = _Rates()
        self._beliefs = 1  # a number for all that priors are made of; another one when any of it changes
        self._sorted: dict[str, _Sorted] = {}  # a duty (attribute's name); emptied when a condition changes
        self._fits: dict[str, PrefillFit] = {}  # a duty, of all its workers: what one without samples begins with
        self.prediction_errors: deque[float] = deque(maxlen=UNTOLD_ERRORS)  # relative, for whoever keeps the metrics
        self._count = 0

    def get(self, boot: str) -> Worker | None:
        return self._workers.get(boot)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def dead(self) -> tuple[str, ...]:
        """Boot ids that are gone for good, the last RETOLD_DEATHS."""
        return tuple(islice(reversed(self._dead), RETOLD_DEATHS))

    def is_dead(self, boot: str) -> bool:
        return boot in self._dead

    # ---------------------------------------------------------------------------------------------------------- events

    def register(self, frame: Register, now: float) -> list[str]:
        """A worker is (back) on a link. Returns boot ids that are dead by that: earlier boots of the same name."""
        worker = self._workers.get(frame.boot)
        self._sorted.clear()
        self._beliefs += 1
        if worker is not None:
            worker.linked, worker.heard_at = True, now
            worker.registered(frame)
            self._rates.put(worker.boot, frame.duty, worker.measured_rate)
            return []
        replaced = [w.boot for w in self._workers.values() if w.name == frame.worker]
        self.restarts += frame.worker in self._names
        self._names.add(frame.worker)
        self.breakers.registered(frame.worker, frame.boot)
        self._count += 1
        self._workers[frame.boot] = Worker(frame, self._count, now, now)
        return replaced

    def link_down(self, boot: str, now: float) -> None:
        worker = self._workers.get(boot)
        if worker is not None and worker.linked:
            worker.linked, worker.lost_at = False, now
            self._sorted.clear()

    def heard(self, worker: Worker, now: float) -> None:
        """A frame of it has come."""
        if now - worker.heard_at > self.settings.suspect_after_s:
            self._sorted.clear()
        worker.heard_at = now

    def drain(self, worker: Worker) -> None:
        """It takes no more work."""
        worker.draining = True
        self._sorted.clear()

    def hold(self, worker: Worker, foreign: dict[Key, Held]) -> None:
        """The requests on it that the router has no record of."""
        worker.foreign = foreign
        if foreign:
            self.with_foreign[worker.boot] = worker
        else:
            self.with_foreign.pop(worker.boot, None)

    def claimed(self, key: Key) -> list[str]:
        """The router has a record of this request now. Returns boot ids of those that hold it."""
        holders = [worker for worker in self.with_foreign.values() if key in worker.foreign]
        for worker in holders:
            del worker.foreign[key]
            if not worker.foreign:
                del self.with_foreign[worker.boot]
        return [worker.boot for worker in holders]

    def heartbeat(self, worker: Worker, frame: Heartbeat, now: float) -> None:
        self.heard(worker, now)
        before = worker.condition(now, self.settings)
        worker.heartbeat = frame
        if worker.condition(now, self.settings) != before:
            self._sorted.clear()
        self._beliefs += self._rates.put(worker.boot, worker.register.duty, worker.measured_rate)
        self.set_free_pages(worker, frame.free_pages)
        self._pair(worker, frame.pairs)
        if frame.prefills:
            self._learn(worker, frame.prefills)
        if worker.ready_at is None and frame.phase == "run":
            worker.ready_at = now
            died = self._died.pop(worker.name, None)
            if died is not None:
                self.restart_s += 0.5 * (now - died - self.restart_s)

    def set_free_pages(self, worker: Worker, pages: int) -> None:
        """It has so many free pages now, as far as is known."""
        change, worker.free_pages = pages - worker.free_pages, pages
        self.spare_changed(worker.boot, change)

    def spare_changed(self, boot: str, change: int) -> None:
        """Of a worker's free pages so many more are promised to nobody now (below 0: fewer)."""
        of_duty = self._sorted.get("decodes")
        for usable in of_duty.lists() if change and of_duty is not None else ():
            if usable.spare is not None and boot in usable.boots:
                usable.spare += change

    def _pair(self, worker: Worker, peers: Collection[str]) -> None:
        """These are all with which it has a usable pair."""
        if worker.pairs == (now_paired := set(peers)):
            return
        for peer in worker.pairs - now_paired:
            del self._readers[peer][worker.boot]
            if not self._readers[peer]:
                del self._readers[peer]
        for peer in now_paired - worker.pairs:
            self._readers.setdefault(peer, {})[worker.boot] = worker
        worker.pairs = now_paired

    def unpair(self, worker: Worker, peer: str) -> None:
        """That pair of it is not usable, until it says so again."""
        self._pair(worker, worker.pairs - {peer})

    def readers(self, peer: str) -> Mapping[str, Worker]:
        """Those that have a usable pair with it, by boot id: few, for a worker has few pairs."""
        return self._readers.get(peer, {})

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
        if worker is not None:
            self._pair(worker, ())
        self.with_foreign.pop(boot, None)
        self._beliefs += self._rates.put(boot, "", 0.0)
        self._sorted.clear()
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

    def decoders(self, now: float) -> Usable:
        """Workers of duty gen or both that may be given work; silent ones only if no other is there.

        One whose breaker is open is in neither list.
        """
        return self._usable(now, "decodes")

    def prefillers(self, now: float) -> Usable:
        """The same for duty ctx or both."""
        return self._usable(now, "prefills")

    def _usable(self, now: float, duty: str) -> Usable:
        of_duty = self._sorted_by(duty, now)
        if shut := self.breakers.shut(now):
            return self._admitted(of_duty, frozenset(shut))
        return of_duty.ready or of_duty.silent

    def _sorted_by(self, duty: str, now: float, ahead_s: float = 0.0) -> _Sorted:
        of_duty = self._sorted.get(duty)
        if of_duty is None or now + ahead_s - of_duty.oldest > self.settings.suspect_after_s:
            of_duty = self._sorted[duty] = self._sort(now, duty)
        return of_duty

    @staticmethod
    def _admitted(of_duty: _Sorted, shut: frozenset[str]) -> Usable:
        found = of_duty.admitted.get(shut)
        if found is None:
            of_duty.admitted.clear()
            found = Usable(worker for worker in of_duty.ready if worker.name not in shut)
            found = found or Usable(worker for worker in of_duty.silent if worker.name not in shut)
            of_duty.admitted[shut] = found
        return found

    def look_ahead(self, now: float, ahead_s: float) -> None:
        """Sort anew what will have to be within `ahead_s`, so that no choice has to wait for it."""
        for duty in ("decodes", "prefills"):
            self._sorted_by(duty, now, ahead_s)

    def _sort(self, now: float, duty: str) -> _Sorted:
        ready, silent, oldest = Usable(), Usable(), math.inf
        for worker in self._workers.values():
            if getattr(worker, duty):
                condition = worker.condition(now, self.settings)
                if condition == "ready":
                    ready.append(worker)
                elif condition == "silent":
                    silent.append(worker)
                if condition in ("ready", "stuck"):
                    oldest = min(oldest, worker.heard_at)
        return _Sorted(ready, silent, oldest)

    def is_ready(self, worker: Worker, now: float) -> bool:
        """Whether it may be given work, and is not silent."""
        return self.breakers.admits(worker.name, now) and worker.condition(now, self.settings) == "ready"

    def breaker_wait_s(self, now: float, duty: str) -> float | None:
        """Time until a worker that only its breaker keeps out of a duty (attribute's name) may be tried; None: none."""
        waits = [
            self.breakers.wait_s(w.name, now)
            for w in self._workers.values()
            if getattr(w, duty) and not self.breakers.admits(w.name, now)
            if w.condition(now, self.settings) in ("ready", "silent")
        ]
        return min(waits, default=None)

    def rate(self, worker: Worker) -> float:
        """Predicted prefill tokens a second: the pool's mean, unless this worker is shown to differ by more than 2x.

        Noise in the measurement must not skew the shares of equal workers.
        """
        own, mean = worker.measured_rate, self._rates.mean(worker.register.duty)
        return own if own and not mean / 2 <= own <= mean * 2 else mean

    # ----------------------------------------------------------------------------------------------------- predictions

    def _learn(self, worker: Worker, samples: tuple[PrefillSample, ...]) -> None:
        """Both fits are solved at once, so that no choice has to."""
        self.prediction_errors.extend(worker.fit.learn(samples, self._prior(worker)))
        of_duty = self._fits.setdefault(worker.register.duty, PrefillFit())
        of_duty.learn(samples, plain(self.rate(worker)))
        worker.fit.solve()
        of_duty.solve()
        self._beliefs += 1

    def _prior(self, worker: Worker) -> Coefficients:
        """What is believed of a worker that has not been measured: as the others of its duty, or of any; faster or
        slower if its rate is; where nobody has been measured, its rate alone."""
        rate, duty = self.rate(worker), worker.register.duty
        fit = self._fits.get(duty) or next(iter(self._fits.values()), None)
        if fit is None:
            return plain(rate)
        each, a_token, a_pair, of_others = fit.known or plain(rate)
        slower = self._rates.mean(duty) / rate
        return (slower * each, slower * a_token, slower * a_pair, slower * of_others)

    def coefficients(self, worker: Worker) -> Coefficients:
        """What predicts a worker's prefills (prefill_fit.py)."""
        known = worker.fit.known
        if known is not None:
            return known
        if worker.prior_of != self._beliefs:
            worker.prior, worker.prior_of = self._prior(worker), self._beliefs
        return worker.prior

    def measured(self, worker: Worker) -> Coefficients | None:
        """The same, None while nobody has told of a prefill, here or elsewhere."""
        return self.coefficients(worker) if self._fits or self._rates else None

    def predicted_s(self, worker: Worker, uncached: int, cached: int = 0, others: int = 0) -> float:
        """Predicted seconds of a prefill there, once it has begun."""
        return predict_s(self.coefficients(worker), uncached, cached, others)

    def back_in_s(self, duties: tuple[str, ...], now: float) -> float:
        """Predicted time until a worker of one of these duties is there again, from the restarts seen so far."""
        died = max((self.last_death[d] for d in duties if d in self.last_death), default=now)
        return max(1.0, self.restart_s - (now - died))
