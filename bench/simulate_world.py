"""A cluster on a simulated clock: the product's own RouterCore, driven by frames, amid simulated processes.

The router's admission, queue, placement, block index and binding are the code that serves; its clock is the
simulation's. What is simulated is what it talks to: workers (simulate_workers.py) and one ingress, which asks for a
place for every request of a trace when its time comes, retries nothing, and counts what is refused. Frames take
`hop_s`. Not simulated: text, tokenizing, HTTP, deaths, pairing time, lost frames, the workers' whole sets.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from simulate_times import ServiceTimes
from simulate_trace import BLOCK, Request

from tailrace.router.core import RouterCore
from tailrace.router.heap import Heap
from tailrace.router.records import Send
from tailrace.router.settings import RouterSettings
from tailrace.transfer.messages import CompatRecord, Done, Place, Placed, Refused, Register

BEGIN_S = 3.0  # the first request; until then workers register and pair
NAMESPACE = b"simulated cluster"[:16]
TICK_S = 0.05
GAP_LIMITS_S = (0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5)
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Setup:
    """One cluster. `ctx`, `gen`, `both`: workers of each duty; `device_blocks`, `host_blocks`: of one worker's cache.

    `budget`: prompt tokens of one pass; of duty both, of one pass beside decoding. `order`: how a ctx chooses among its
    prompts: `product` is ctx_worker's scheduler, `fifo` first come first served.
    """

    times: ServiceTimes
    ctx: int = 0
    gen: int = 0
    both: int = 0
    placement: str = "least_prefill"
    device_blocks: int = 1000
    host_blocks: int = 3000
    gen_blocks: int = 1000
    budget: int = 8192
    order: str = "product"
    hop_s: float = 2e-4
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times on the simulated clock; NaN-free: absent ones are -1.

    `gaps`: between tokens; `slow`: of them, longer than each of GAP_LIMITS_S.
    """

    request: Request
    number: int
    arrived: float
    status: str = ""
    worker: str = ""
    cached: int = 0
    first_at: float = -1.0
    ended: float = -1.0
    first_gap: float = -1.0
    gaps: int = 0
    slow: tuple[int, ...] = ()
    reports: int = 0

    @property
    def ttft(self) -> float:
        return self.first_at - self.arrived

    def within(self, ttft_s: float, gap: int, slow_share: float) -> bool:
        """Finished, the first token in time, and no more than that share of its gaps over GAP_LIMITS_S[gap]."""
        if self.status != "finished" or self.ttft > ttft_s:
            return False
        return not self.gaps or self.slow[gap] <= slow_share * self.gaps


class SimWorker(Protocol):
    """What the world needs of a worker."""

    boot: str
    duty: str
    computed: int  # prompt tokens, cached ones not counted

    def frame(self, frame: object) -> None: ...

    def submit(self, outcome: Outcome) -> None: ...

    def cancel(self, key: Key) -> None: ...

    def beat(self) -> None: ...


class World:
    """See the module. `run` replays requests and returns their outcomes."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.now = setup, 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._heap = Heap()  # as in the router's process
        self._left = 0
        self.stepped: Counter[float] = Counter()  # seconds of a step, rounded -> tokens that came out of such
        self.place_s: list[float] = []  # real seconds of CPU of the router's handling of one Place
        self.choose_s: list[float] = []  # real seconds of CPU of its choice of a worker
        settings = {
            "placement": setup.placement,
            "local_prefill_max_tokens": 0,
            "max_waiting": 64 * max(1, setup.ctx + setup.both),
            "max_wait_s": 10.0,
        } | setup.settings
        self.core = RouterCore("router", RouterSettings(**settings), lambda: self.now)
        self.workers: dict[str, SimWorker] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self._followers: dict[int, list[int]] = {}
        self._requests: Sequence[Request] = ()
        self.at_gen: dict[Key, str] = {}
        _time_choice(self.core, self.choose_s)

    # ------------------------------------------------------------------------------------------------------------ time

    def at(self, when: float, do: Callable[..., None], *what: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, do, what))

    def after(self, seconds: float, do: Callable[..., None], *what: Any) -> None:
        self.at(self.now + seconds, do, *what)

    def run(self, requests: Sequence[Request], workers: Iterable[tuple[SimWorker, Register]]) -> list[Outcome]:
        """Replay all on these workers and wait for the last end. One world replays once."""
        self._requests, self._left = requests, len(requests)
        for i, request in enumerate(requests):
            if request.after >= 0:
                self._followers.setdefault(request.after, []).append(i)
            else:
                self.at(BEGIN_S + request.at, self._arrive, i)
        self.core.link_up("ingress", "ingress", "ingress")
        for worker, register in workers:
            self.workers[worker.boot] = worker
            self.core.link_up(register.home, worker.boot, worker.boot)
            self.core.frame(worker.boot, register)
            self.carry_out()
        period_s = self.core.settings.heartbeat_s
        for number, worker in enumerate(self.workers.values()):  # each has its own clock: they do not beat as one
            worker.beat()
            self.after(period_s * (number + 1) / len(self.workers), self._beat, worker)
        self._tick()
        self._heap.begin()
        try:
            while self._left:
                self.step()
        finally:
            self._heap.end()
        return [self.outcomes[k] for k in sorted(self.outcomes, key=lambda k: int(k[0]))]

    def step(self) -> None:
        """The next event."""
        self.now, _, do, what = heapq.heappop(self._events)
        do(*what)

    def _beat(self, worker: SimWorker) -> None:
        worker.beat()
        self.after(self.core.settings.heartbeat_s, self._beat, worker)

    def _tick(self) -> None:
        self.core.tick()
        self._heap.tick(len(self.workers))
        self.carry_out()
        self.after(TICK_S, self._tick)

    # ---------------------------------------------------------------------------------------------------------- frames

    def to_router(self, boot: str, frame: object) -> None:
        """A worker says something; it is heard a hop later."""
        self.after(self.setup.hop_s, self.hear, boot, frame)

    def hear(self, boot: str, frame: object) -> None:
        self.core.frame(boot, frame)
        self.carry_out()

    def carry_out(self) -> None:
        """What the router wants sent arrives a hop later."""
        for action in self.core.take():
            if not isinstance(action, Send):
                raise RuntimeError(f"the router wants {action} in a world where nothing dies")
            if action.to == "ingress":
                self.after(self.setup.hop_s, self._to_ingress, action.frame)
            else:
                self.after(self.setup.hop_s, self.workers[action.to].frame, action.frame)

    # --------------------------------------------------------------------------------------------------------- ingress

    def _arrive(self, number: int) -> None:
        request = self._requests[number]
        key = (str(number), 0)
        self.outcomes[key] = Outcome(request, number, self.now)
        hashes = b"".join(block.to_bytes(16, "big") for block in request.blocks)
        place = Place(
            *key, request.tokens, request.output, 1, hashes, "", 0, None, None, 0, NAMESPACE, (), ""
        )  # fmt: skip
        self.after(self.setup.hop_s, self._ask, place)

    def _ask(self, place: Place) -> None:
        start = time.thread_time()
        self.core.frame("ingress", place)
        self.place_s.append(time.thread_time() - start)
        self.carry_out()

    def _to_ingress(self, frame: object) -> None:
        if isinstance(frame, Placed):
            if frame.leg == "decode":
                self.at_gen[frame.request, frame.attempt] = frame.boot
                return
            outcome = self.outcomes[frame.request, frame.attempt]
            outcome.worker = frame.boot
            self.after(self.setup.hop_s, self.workers[frame.boot].submit, outcome)
        elif isinstance(frame, Refused):
            key = (frame.request, frame.attempt)
            outcome = self.outcomes[key]
            if outcome.worker:
                self.workers[outcome.worker].cancel(key)
            self.finish(outcome, f"refused: {frame.reason}", tell=False)

    def first_token(self, outcome: Outcome) -> None:
        """Ctx sends it straight to the ingress."""
        outcome.first_at = self.now + self.setup.hop_s
        if outcome.request.output <= 1:
            self.finish(outcome, "finished")

    def finish(self, outcome: Outcome, status: str, *, tell: bool = True) -> None:
        outcome.status, outcome.ended = status, self.now
        outcome.reports += 1
        if outcome.reports > 1:
            raise RuntimeError(f"request {outcome.number} ended twice, now as {status}")
        self._left -= 1
        key = (str(outcome.number), 0)
        self.at_gen.pop(key, None)
        if tell:
            self.after(2 * self.setup.hop_s, self.hear, "ingress", Done(*key, "finished", ""))
        for follower in self._followers.get(outcome.number, ()):
            self.after(self._requests[follower].at, self._arrive, follower)


def compat(page_bytes: int) -> CompatRecord:
    """What all simulated workers say of their pages: one page is one block."""
    return CompatRecord(1, "model", "bfloat16", BLOCK, BLOCK, (), (page_bytes,), 1, ("raw",))


def _time_choice(core: RouterCore, found: list[float]) -> None:
    """Put a clock around what goes from a request to its worker: who is there, the pool's pages and rows, index,
    shortlist, room, policy. What the placer does once it has chosen (its claims) is in the time of the whole Place
    only."""
    placer = core.placer
    claiming = [0.0]

    def claim(*arguments: Any) -> None:
        start = time.thread_time()
        claims(*arguments)
        claiming[0] += time.thread_time() - start

    def decide(*arguments: Any) -> Any:
        claiming[0] = 0.0
        start = time.thread_time()
        refused = decides(*arguments)
        if refused is None:
            found.append(time.thread_time() - start - claiming[0])
        return refused

    claims, decides = placer._claim, placer._try
    for name, timed in (("_claim", claim), ("_try", decide)):
        setattr(placer, name, timed)
