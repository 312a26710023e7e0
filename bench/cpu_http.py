"""The whole product on this machine's CPU: cpu.py's rows about HTTP and the hand-off.

    cpu.http.c8        tokens/s of 8 closed-loop clients          against engine (one process, both phases, all cores)
      .ttft            time to the first token, median, ms
      .gap .gap_p99    time between two tokens of a stream, median and 99th percentile, ms
    cpu.handoff.1000   over shm, one prompt of 1,000 tokens at a time: time to first token + first gap, ms
      .share           the hand-off's exposed time as a share of that
      .ms              the exposed time                           against copy (one memory copy of the same bytes)
      .gap             the first gap, as the client sees it       against alone (later gaps of the same stream)

The cluster is made of the product's own processes, configured as manifests/serve/local.yaml. What the product states
of itself (metrics) is held against what the client measured; a row whose figures do not add up is held.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from harness import MIN_PAIRS, ROOT, Row, identity, interleaved, row_of
from load import Answer, closed_loop, completion

from tailrace.kv_cache.layout import PageLayout
from tailrace.model.config import state_groups
from tailrace.model.source import open_source

NAMES = ("cpu.http.c8", "cpu.handoff.1000")
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16", "kv_bytes": 2**29, "max_num_tokens": 512, "transport": "shm", "faults": False,
    "heartbeat_s": 0.5, "stats_period_s": 1.0,
}  # fmt: skip
CLIENTS = 8
PROMPT_TOKENS = (64, 192)
HANDOFF_TOKENS, HANDOFF_ANSWER = 1000, 8
VOCAB = 40_000
REPORT_S = 10.0
# A token that the engine, given the same text before it, finds this much less likely than its best one, in nats, is
# wrong. bf16 shifts the two best ones by some hundredths.
SHORTFALL = 0.5
AGREEMENT = 0.95
# What the client may see beyond what the product states: HTTP, two sockets and the wake-ups of two processes.
UNSTATED_MS = 10.0
STATED = {
    "whole": ("tailrace_ttft_seconds", "whole"), "tokenize": ("tailrace_ttft_seconds", "tokenize"),
    "place": ("tailrace_ttft_seconds", "place"), "queue": ("tailrace_ttft_seconds", "queue"),
    "prefill": ("tailrace_ttft_seconds", "prefill"), "wire": ("tailrace_ttft_seconds", "wire"),
    "exposed": ("tailrace_transfer_seconds", "exposed"), "total": ("tailrace_transfer_seconds", "total"),
}  # fmt: skip

Engine = Callable[..., Any]  # Subject.ask of an engine in a process of its own


def load_cluster_class() -> type:
    """LocalCluster of the tests, whose module has the same name as one here; others of the tests it finds by theirs."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.append(str(ROOT / "tests"))  # behind our own folder
    spec = importlib.util.spec_from_file_location("cluster_harness", ROOT / "tests" / "harness.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LocalCluster


class Serving:
    """The cluster beside an engine. Prompts are fresh ones, so no page is found in any cache."""

    def __init__(self, cluster: Any, engine: Engine) -> None:
        self.cluster, self.engine = cluster, engine
        self.layout = PageLayout(state_groups(open_source("smollm2").config)[0], 16, "bfloat16")
        self.reason = ""  # why what was served is wrong; empty while it is right
        self._wire = cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire")

    def bytes_of(self, tokens: int) -> int:
        """Page bytes that the hand-off of such a prompt moves."""
        return self.layout.num_pages(tokens) * self.layout.bytes_per_page

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, clients: int) -> tuple[float, list[Answer]]:
        """(seconds, answers) of that many closed-loop clients."""
        port = self.cluster.processes["ingress-0"].ready["port"]
        bodies = [completion(prompt, tokens) for prompt in prompts]
        start = time.perf_counter()
        answers = asyncio.run(closed_loop(port, bodies, clients))
        seconds = time.perf_counter() - start
        self._wire += sum(self.bytes_of(len(prompt)) for prompt in prompts)
        return seconds, answers

    def check_counts(self) -> None:
        """Everything went through a hand-off, once."""
        wire = self.cluster.settled_metric("tailrace_transfer_bytes_total", kind="wire")
        local = self.cluster.metric("tailrace_local_prefills_total")
        positions = self.cluster.metric("tailrace_prompt_positions_total", role="gen")
        if wire != self._wire:
            self._wrong(f"{wire:,.0f} bytes were moved, not {self._wire:,.0f}")
        if local or positions:
            self._wrong(f"{local:g} local prefills, {positions:g} prompt positions on gen")

    def check(self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], tokens: int) -> None:
        """By the engine's own judgement of each token, given the text before it."""
        bad = [answer for answer in answers if answer.status != 200 or len(answer.ids) != tokens]
        if bad:
            self._wrong(f"{len(bad)} of {len(answers)} answers are not {tokens} tokens, one has status {bad[0].status}")
            return
        short = np.array(self.engine("judge", prompts=prompts, answers=[answer.ids for answer in answers]))
        best = float((short == 0).mean())
        if best < AGREEMENT or short.max() > SHORTFALL:
            self._wrong(f"{best:.1%} of the tokens are the engine's choice, the worst {short.max():.2f} nats below it")

    def _wrong(self, why: str) -> None:
        self.reason = self.reason or f"{why}; lifted when the answers are right"


class Load:
    """One turn's prompts after another, the same for the cluster and the engine; what the clients saw."""

    def __init__(self, serving: Serving, prompts: int, tokens: int) -> None:
        self._serving, self._num_prompts, self._tokens = serving, prompts, tokens
        self._turn = {"ours": 0, "engine": 0}
        self.firsts: list[float] = []
        self.gaps: list[float] = []

    def _next(self, who: str) -> list[list[int]]:
        self._turn[who] += 1
        rng = np.random.default_rng(self._turn[who])
        lengths = rng.permutation(np.linspace(*PROMPT_TOKENS, self._num_prompts).astype(int))
        return [rng.integers(1000, VOCAB, n).tolist() for n in lengths]

    def ours(self) -> float:
        """Tokens/s; the answers are judged after the clock has stopped."""
        prompts = self._next("ours")
        seconds, answers = self._serving.ask(prompts, self._tokens, CLIENTS)
        self._serving.check(prompts, answers, self._tokens)
        if self._turn["ours"] > 1:  # the first turn warms up
            for times in ([at for at, _ in answer.tokens()] for answer in answers):
                self.firsts.append(1e3 * times[0])
                self.gaps += (1e3 * np.diff(times)).tolist()
        return len(prompts) * self._tokens / seconds

    def engine(self) -> float:
        prompts = self._next("engine")
        seconds = self._serving.engine("serve", prompts=prompts, tokens=self._tokens, at_once=CLIENTS)
        return len(prompts) * self._tokens / seconds


def http_rows(serving: Serving, quick: bool) -> list[Row]:
    """cpu.http.c8 and its figures."""
    prompts, tokens, pairs = (16, 32, MIN_PAIRS) if quick else (32, 64, 9)
    load = Load(serving, prompts, tokens)
    samples = interleaved({"ours": load.ours, "engine": load.engine}, pairs)
    serving.check_counts()
    what = identity(
        policy="greedy, 8 closed-loop clients", path="http, ctx + gen, shm, bf16 dense",
        shapes=f"{prompts} prompts of {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens, {tokens} tokens each",
        config=CONFIG,
    )  # fmt: skip
    name = NAMES[0]
    rows = [row_of(name, "tokens/s", "higher", samples, what)]
    for suffix, values, q in ((".ttft", load.firsts, 0.5), (".gap", load.gaps, 0.5), (".gap_p99", load.gaps, 0.99)):
        value = float(np.quantile(values, q))
        rows.append(Row(name + suffix, value, "ms", "lower", identity=what, samples={"ours": values}))
    return [held(row, serving.reason) for row in rows]


def held(row: Row, reason: str) -> Row:
    return replace(row, value=None, against={}, status="held", reason=reason) if reason else row


class HandOff:
    """One prompt of 1,000 tokens at a time; a call is one request. Times in ms, one a request."""

    def __init__(self, serving: Serving) -> None:
        self._serving, self._rng = serving, np.random.default_rng(1)
        self._copied = np.ones((2, serving.bytes_of(HANDOFF_TOKENS)), np.uint8)
        self.stated: dict[str, list[float]] = {name: [] for name in STATED}
        self.client: dict[str, list[float]] = {"first": [], "gap": [], "alone": []}

    def copy(self) -> float:
        """One memory copy of the hand-off's bytes, ms."""
        start = time.perf_counter()
        np.copyto(self._copied[1], self._copied[0])
        return 1e3 * (time.perf_counter() - start)

    def ours(self) -> float:
        """The hand-off's exposed time by the product's own word, ms."""
        before = self._sums("_count"), self._sums("_sum")
        prompt = self._rng.integers(1000, VOCAB, HANDOFF_TOKENS).tolist()
        _, [answer] = self._serving.ask([prompt], HANDOFF_ANSWER, 1)
        self._serving.check([prompt], [answer], HANDOFF_ANSWER)
        times = [1e3 * at for at, _ in answer.tokens()]
        gaps = np.diff(times)
        for key, value in (("first", times[0]), ("gap", gaps[0]), ("alone", np.median(gaps[1:]))):
            self.client[key].append(float(value))
        deadline = time.monotonic() + REPORT_S
        while any(now != then + 1 for now, then in zip(self._sums("_count"), before[0], strict=True)):
            if time.monotonic() > deadline:
                raise SystemExit("the product did not report one hand-off within 10 s")
            time.sleep(0.1)
        for key, now, then in zip(STATED, self._sums("_sum"), before[1], strict=True):
            self.stated[key].append(1e3 * (now - then))
        return self.stated["exposed"][-1]

    def _sums(self, kind: str) -> list[float]:
        metrics = self._serving.cluster.metrics()
        return [
            sum(v for (name, labels), v in metrics.items() if name == metric + kind and ("part", part) in labels)
            for metric, part in STATED.values()
        ]

    def unstated(self) -> str:
        """What of the client's times the product's own do not explain, medians; empty if they do."""
        client = {key: float(np.median(values)) for key, values in self.client.items()}
        stated = {key: float(np.median(values)) for key, values in self.stated.items()}
        first, gap = client["first"] - stated["whole"], client["gap"] - client["alone"] - stated["exposed"]
        if abs(first) <= UNSTATED_MS and abs(gap) <= UNSTATED_MS:
            return ""
        return (
            f"the product's times do not explain the client's: {first:.1f} ms of the time to first token, {gap:.1f} of "
            f"the first gap; lifted below {UNSTATED_MS:g}"
        )


def handoff_rows(serving: Serving, quick: bool) -> list[Row]:
    """cpu.handoff.1000 and its figures."""
    hand = HandOff(serving)
    samples = interleaved({"ours": hand.ours, "copy": hand.copy}, MIN_PAIRS if quick else 15)
    serving.check_counts()
    warm = len(hand.client["first"]) - len(samples["ours"])
    client = {key: values[warm:] for key, values in hand.client.items()}
    hand.stated = {key: values[warm:] for key, values in hand.stated.items()}
    hand.client = client
    whole = [a + b for a, b in zip(client["first"], client["gap"], strict=True)]
    shares = [a / b for a, b in zip(hand.stated["exposed"], whole, strict=True)]
    parts = {key: round(float(np.median(values)), 3) for key, values in hand.stated.items()}
    what = identity(
        policy="greedy, one request at a time", path="http, ctx + gen, shm, bf16 dense", config=CONFIG,
        shapes=f"a prompt of {HANDOFF_TOKENS} tokens in chunks of {CONFIG['max_num_tokens']}",
        wire_bytes=serving.bytes_of(HANDOFF_TOKENS), stated_ms=parts,
        client_ms={key: round(float(np.median(values)), 3) for key, values in client.items()},
        limit_ms=round(3 * float(np.median(samples["copy"])) + 5, 3),
    )  # fmt: skip
    name = NAMES[1]
    rows = [
        row_of(name, "ms", "lower", {"ours": whole}, what),
        row_of(name + ".share", "", "lower", {"ours": shares}, what),
        row_of(name + ".ms", "ms", "lower", samples, what),
        row_of(name + ".gap", "ms", "lower", {"ours": client["gap"], "alone": client["alone"]}, what),
    ]
    return [held(row, serving.reason or hand.unstated()) for row in rows]


ROWS = {NAMES[0]: http_rows, NAMES[1]: handoff_rows}


def rows_of(names: Sequence[str], engine: Engine, quick: bool) -> Iterator[Row]:
    """The rows of these names, all on one cluster. `engine`: asks a running cpu_subjects.py ours_dense."""
    with running() as cluster:
        for name in names:
            yield from ROWS[name](Serving(cluster, engine), quick)


@contextmanager
def running(**config: Any) -> Iterator[Any]:
    """The cluster of these rows."""
    pools = {"ctx-0": {"ctx": {}}, "gen-0": {"gen": {}}}  # the tests' cluster has one thread a worker
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder,
        load_cluster_class()(Path(folder), "smollm2", per_process=pools, **{**CONFIG, **config}) as cluster,
    ):
        yield cluster
