"""What long prompts and many streams do to everybody else, at our router and ingress with trivial workers: F1 and F13.

    burst.gap       p99 of the time between two chunks of 20 streams at 20 ms a token while 8 prompts of 1,000,000
                    characters come at once, ms; against alone (the same streams, nothing else; at most 2)
    burst.health    p99 of /health meanwhile, ms (under 100)
    burst.prompts   seconds until the last of the 8 has its first token, through the prompt-token cache as configured
    crowd.ttft      time to first token of a request beside 100 streams at 20 ms a token, p50, ms; against idle (at most
                    2, and one step of 20 ms)

A row is held where an answer was wrong or a worker was taken for dead.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from harness import Row, arguments, finish, identity
from router_subjects import HERE, Ours, Process, Prompts, write_model

NAMES = ("burst.gap", "burst.health", "burst.prompts", "crowd.ttft")
CHARS, PROMPTS, STREAMS, CROWD = 1_000_000, 8, 20, 100
PATH, PACE_S = "/v1/chat/completions", 0.02


class Scene:
    """The processes, and a client of its own that streams."""

    def __init__(self, folder: Path, quick: bool) -> None:
        self.ours = Ours(folder, write_model(folder / "model"), haproxy=False)
        self.client = Process((sys.executable, str(HERE / "router_client.py")), folder / "client.log")
        self.prompts, self.tokens = Prompts(), 150 if quick else 600
        self.wrong: list[str] = []
        self.ours.pace(PACE_S)

    def streams(self, count: int) -> dict[str, Any]:
        bodies = [self.prompts.body(self.prompts.text(1000), self.tokens) for _ in range(count)]
        seen = self.client.ask(
            do="http", port=self.ours.port, path=PATH, requests=count, clients=count, keep=False, spread_s=0.5,
            bodies=bodies,
        )  # fmt: skip
        if seen["wrong"] or seen["events"] < count * self.tokens:
            self.wrong.append(f"{seen['wrong']} streams wrong, {seen['events']} events; {seen['why'][:100]}")
        return seen

    def ask(self, chars: int) -> float:
        """Seconds to the whole answer of one token."""
        body = json.loads(self.prompts.body(self.prompts.text(chars), 1)) | {"stream": False}
        started = time.perf_counter()
        reply = httpx.post(f"http://127.0.0.1:{self.ours.port}{PATH}", json=body, timeout=120)
        if reply.status_code != 200:
            self.wrong.append(f"{reply.status_code}: {reply.text[:100]}")
        return time.perf_counter() - started

    def healths(self, stop: threading.Event) -> list[float]:
        took = []
        with httpx.Client(base_url=f"http://127.0.0.1:{self.ours.port}", timeout=30) as client:
            while not stop.wait(0.02):
                started = time.perf_counter()
                client.get("/health")
                took.append(time.perf_counter() - started)
        return took

    def check_workers(self) -> None:
        ready = httpx.get(f"http://127.0.0.1:{self.ours.port}/ready", timeout=10).json()
        if ready["status"] != "ready":
            self.wrong.append(f"/ready says {ready}")

    def close(self) -> None:
        self.client.close()
        self.ours.close()


def p99(values: list[float]) -> float:
    return 1e3 * sorted(values)[len(values) * 99 // 100]


def burst(scene: Scene) -> dict[str, tuple[float, dict[str, float]]]:
    alone = p99(scene.streams(STREAMS)["gaps"])
    stop = threading.Event()
    with ThreadPoolExecutor(PROMPTS + 2) as threads:
        polled = threads.submit(scene.healths, stop)
        streaming = threads.submit(scene.streams, STREAMS)
        time.sleep(1.0)
        asked = [threads.submit(scene.ask, CHARS) for _ in range(PROMPTS)]
        slowest = max(one.result() for one in asked)
        gap = p99(streaming.result()["gaps"])
        stop.set()
        health = p99(polled.result())
    scene.check_workers()
    return {"burst.gap": (gap, {"alone": gap / alone}), "burst.health": (health, {}), "burst.prompts": (slowest, {})}


def crowd(scene: Scene) -> dict[str, tuple[float, dict[str, float]]]:
    idle = statistics.median(scene.ask(1000) for _ in range(15))
    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(scene.streams, CROWD)
        time.sleep(1.5)
        busy = []
        while not streaming.done() and len(busy) < 15:
            busy.append(scene.ask(1000))
        streaming.result()
    took = statistics.median(busy)
    return {"crowd.ttft": (1e3 * took, {"idle": took / idle})}


def main() -> None:
    args = arguments((__doc__ or "").splitlines()[0], NAMES)
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), args.quick)
        try:
            found = burst(scene) if set(NAMES[:3]) & set(args.names) else {}
            found |= crowd(scene) if NAMES[3] in args.names else {}
        finally:
            scene.close()
    what = identity(streams=STREAMS, crowd=CROWD, pace_s=PACE_S, chars=CHARS, prompts=PROMPTS, path="HTTP, no HAProxy")
    rows = []
    for name in args.names:
        value, against = found[name]
        row = Row(name, value, "s" if name == "burst.prompts" else "ms", "lower", against, identity=what)
        if scene.wrong:
            row.status, row.reason = "held", f"{scene.wrong[0]}; lifted when every answer is right"
        rows.append(row)
    finish(rows, args)


if __name__ == "__main__":
    main()
