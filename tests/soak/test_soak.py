"""Hundreds of mixed requests with aborts and kills: probes stay right, nothing hangs, nothing grows (A25, B1, B20)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from equal import Model, compare, prompt_of, tiny
from fault_cases import PAGE, TRANSPORTS, Asked, assert_left_none, canary, hold, idle_latency, pool, settings
from harness import READY_S, LocalCluster, until

pytestmark = pytest.mark.soak
REQUESTS, PROBE_EVERY, KILL_EVERY, MEASURE_AT = 500, 10, 50, 100
AT_ONCE, MAX_TOKENS = 8, 16
HANGS_S = 60.0
OUTCOMES = {"finished", "cancelled", "refused", "failed"}
PROBE = prompt_of(5 * PAGE + 7, 1)
both = pytest.mark.parametrize("transport", TRANSPORTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("model"), "llama")


@dataclass
class Request:
    """One request and what became of it. `status` 0: it was left."""

    prompt: list[int]
    probe: bool
    leave_after_s: float | None
    began: float = 0.0
    ended: float = 0.0
    status: int = 0
    reply: dict[str, Any] | None = None


def requests(seed: int) -> list[Request]:
    """1 to 8 pages long, half of them with a prefix that others have; 20 % are left; every 10th is the probe."""
    draw = random.Random(seed)
    prefixes = [prompt_of(PAGE * draw.randint(1, 6), 100 + n) for n in range(6)]
    made = []
    for number in range(REQUESTS):
        if number % PROBE_EVERY == PROBE_EVERY - 1:
            made.append(Request(PROBE, True, None))
            continue
        length = draw.randint(1, 8 * PAGE)
        prefix = draw.choice(prefixes) if draw.random() < 0.5 else []
        prompt = (prefix + prompt_of(length, 1000 + number))[:length]
        share = 0.2 * PROBE_EVERY / (PROBE_EVERY - 1)  # of those that are no probes
        made.append(Request(prompt, False, draw.uniform(0, 0.5) if draw.random() < share else None))
    return made


class Soak:
    """Runs requests against a cluster, AT_ONCE at a time, in order."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._room = threading.Semaphore(AT_ONCE)
        self._threads = ThreadPoolExecutor(AT_ONCE)
        self._begun: list[Future[None]] = []

    def begin(self, request: Request) -> None:
        """Returns once it has been sent to a thread; waits while AT_ONCE are under way."""
        self._room.acquire()
        self._begun.append(self._threads.submit(self._run, request))

    def drain(self) -> None:
        """Until all that was begun has ended; what failed in a thread is raised here."""
        for each in self._begun:
            each.result(HANGS_S + 10)
        self._begun.clear()

    def close(self) -> None:
        self._threads.shutdown()

    def _run(self, request: Request) -> None:
        try:
            request.began = time.monotonic()
            more = {"logprobs": 5, "return_token_ids": True}
            asked = Asked(self.cluster, request.prompt, MAX_TOKENS, **more)
            if request.leave_after_s is None:
                request.status, request.reply = asked.reply(HANGS_S)
            else:
                time.sleep(request.leave_after_s)
                asked.leave()
            request.ended = time.monotonic()
        finally:
            self._room.release()


@dataclass(frozen=True)
class Size:
    """Of one process: resident bytes and open files."""

    rss: int
    files: int

    @staticmethod
    def of(pid: int) -> Size:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return Size(pages * 4096, len(list(Path(f"/proc/{pid}/fd").iterdir())))


def sizes(cluster: LocalCluster) -> dict[int, Size]:
    """pid -> size, once the cluster is quiet."""
    cluster.wait_ready(20)
    cluster.quiet()
    found, alike = {}, 0
    while alike < 10:  # until the connections of those questions are closed too
        time.sleep(0.2)
        now = {p.pid: Size.of(p.pid) for p in cluster.processes.values()}
        same = {pid: s.files for pid, s in now.items()} == {pid: s.files for pid, s in found.items()}
        found, alike = now, alike + 1 if same else 0
    return found


def run(
    cluster: LocalCluster, every: list[Request], between: Callable[[int], None], all_there: Callable[[], None]
) -> dict[int, Size]:
    """All requests; `between` comes before each one. Returns the sizes after MEASURE_AT of them."""
    soak, measured = Soak(cluster), {}
    try:
        for number, request in enumerate(every):
            if number == MEASURE_AT:
                soak.drain()
                all_there()
                measured = sizes(cluster)
            between(number)
            soak.begin(request)
        soak.drain()
    finally:
        soak.close()
    return measured


def check(cluster: LocalCluster, model: Model, every: list[Request], disturbed: list[tuple[float, float]]) -> None:
    """Everyone who stayed was answered; who met no kill is EQ; each has ended in one of four ways."""
    stayed = [r for r in every if r.leave_after_s is None]
    for request in stayed:
        assert request.reply is not None, "hung"
        assert "choices" in request.reply if request.status == 200 else request.reply["error"]["code"], request.reply
    undisturbed = [r for r in stayed if not any(r.began < end and r.ended > begin for begin, end in disturbed)]
    wrong = [r.reply for r in undisturbed if r.status != 200]
    assert not wrong, wrong[:3]
    assert sum(r.probe for r in undisturbed) >= REQUESTS / PROBE_EVERY / 2, "nearly all probes met a kill"
    answered = [r for r in stayed if r.status == 200 and r.reply is not None]
    choices = [r.reply["choices"][0] for r in answered if r.reply is not None]
    probes = [c for r, c in zip(answered, choices, strict=True) if r.probe]
    compare(model, [PROBE] * len(probes), probes, MAX_TOKENS).check()
    compare(model, [r.prompt for r in answered], choices, MAX_TOKENS).check()
    ended = Counter[str]()
    for (name, labels), value in cluster.metrics().items():
        if name == "tailrace_requests_total" and dict(labels)["role"] == "ingress":
            ended[dict(labels)["outcome"]] += int(value)
    assert set(ended) <= OUTCOMES and ended["finished"] >= len(answered), ended
    assert len(stayed) <= sum(ended.values()) <= len(every), ended  # who leaves before it was read is no request


def compare_sizes(cluster: LocalCluster, before: dict[int, Size]) -> None:
    """Of processes that were there already: open files equal, memory not more than 5 % above."""
    names = {p.pid: name for name, p in cluster.processes.items()}

    def grown() -> list[str]:
        now = {pid: Size.of(pid) for pid in before if pid in names}
        return [
            f"{names[pid]}: {before[pid]}, now {size}"
            for pid, size in now.items()
            if size.files != before[pid].files or size.rss > 1.05 * before[pid].rss
        ]

    until(lambda: not grown(), 10, lambda: f"grown: {grown()}")


def _pairs(cluster: LocalCluster) -> set[str]:
    """Boot ids of the workers that are paired with both workers of the other kind."""
    pairs = Counter(boot for pair in cluster.info()["pairs"] for boot in (pair["gen_boot"], pair["ctx_boot"]))
    return {boot for boot, number in pairs.items() if number == 2}


def soaked(model: Model, path: Path, transport: str, workers: int) -> LocalCluster:
    leases = {"pin_lease_s": 3.0, "request_lease_s": 3.0, "kv_transfer_timeout_s": 5.0}
    config = settings(transport, kv_bytes=pool(96), max_request_tokens=400, **leases)
    return LocalCluster(path, model.spec, ctx=workers, gen=workers, **config)


@both
def test_a25_output_does_not_decay_and_nothing_grows(model, tmp_path, transport):
    with soaked(model, tmp_path, transport, 1) as cluster:
        cluster.poison()
        every = requests(1)
        before = run(cluster, every, lambda number: None, lambda: None)
        cluster.quiet()
        check(cluster, model, every, [])
        compare_sizes(cluster, before)


@both
def test_a_random_worker_killed_every_fifty_requests_leaves_no_probe_wrong_and_nothing_behind(
    model, tmp_path, transport
):
    """2P2D; a successor is started at once, as a supervisor does, and serves before the next kill."""
    with soaked(model, tmp_path, transport, 2) as cluster:
        cluster.poison()
        every, draw = requests(2), random.Random(3)
        disturbed: list[tuple[float, float]] = []
        starting: list[str] = []

        def all_there() -> None:
            for name in starting:
                boot = cluster.processes[name].await_ready(time.monotonic() + READY_S)["boot"]
                until(lambda b=boot: b in _pairs(cluster), 20, lambda b=boot: f"{b} is in no pair: {cluster.info()}")
            starting.clear()
            cluster.wait_ready(20)
            cluster.poison()

        def kill_at_times(number: int) -> None:
            if number == 0 or number % KILL_EVERY:
                return
            all_there()
            victim = draw.choice(["ctx-0", "ctx-1", "gen-0", "gen-1"])
            at = time.monotonic()
            cluster.kill(victim)
            disturbed.append((at, time.monotonic()))
            cluster.launch(victim.split("-")[0], victim)
            starting.append(victim)

        before = run(cluster, every, kill_at_times, all_there)
        all_there()
        cluster.quiet()
        check(cluster, model, every, disturbed)
        compare_sizes(cluster, before)
        assert len(disturbed) == REQUESTS // KILL_EVERY - 1
        assert_left_none(cluster)


@both
def test_b1_fifty_times_eight_clients_that_leave_during_the_transfer(model, tmp_path, transport):
    with soaked(model, tmp_path, transport, 1) as cluster:
        cluster.poison()
        idle, files = idle_latency(cluster), {}
        for number in range(50):
            hold(cluster, 2)
            asked = [Asked(cluster, prompt_of(3 * PAGE + 4, 10_000 + 8 * number + n)) for n in range(8)]
            until(
                lambda: cluster.metric("tailrace_transfers_in_flight", role="gen") >= 8, 10, lambda: "not 8 transfers"
            )
            for each in asked:
                each.leave()
            cluster.poison()
            cluster.quiet(5)
            files = files or cluster.open_files()
            if number % 10 == 9:
                canary(cluster, model, idle, 200 + number)
        until(lambda: cluster.open_files() == files, 5, lambda: f"open files {cluster.open_files()}, before {files}")


@both
def test_b20_twenty_kills_leave_one_region_a_worker(model, tmp_path, transport):
    """The same worker is killed under traffic and started again, twenty times; strangers' files stay."""
    stranger = Path("/dev/shm") / f"not-ours-{tmp_path.name}"
    stranger.write_bytes(b"x")
    try:
        with soaked(model, tmp_path, transport, 1) as cluster:
            for number in range(20):
                asked = [Asked(cluster, prompt_of(4 * PAGE, 20_000 + 8 * number + n)) for n in range(4)]
                cluster.kill("ctx-0")
                assert len(cluster.shared_memory()) <= 2, "live and one more"
                cluster.start("ctx", "ctx-0")
                assert len(cluster.shared_memory()) <= 3
                assert all(each.reply()[0] for each in asked)
                cluster.wait_ready(10)
            cluster.quiet()
            assert_left_none(cluster)
        assert stranger.read_bytes() == b"x"
    finally:
        stranger.unlink()
