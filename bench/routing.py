"""Placement quality, live: the conversation trace at 20x through our ingress and router, and through vllm-router.

    routing.hit.N          cached share of the prompt tokens, N blocks of 512 in the LRU of each of 4 ctx
    routing.ttft_p90.N     ms from when a request was due to its first token, at the client; ttft_p50 the median
    routing.imbalance.N    the busiest ctx's computed prompt tokens over the mean (routing.imbalance.8000: at most 1.10)
                           all against vllm_router (cache_aware, in the same run) and round_robin (vllm-router's)
    routing.least_prefill.hit.N, routing.least_prefill.ttft_p90.N    ours with that policy, where it is not the default

4 ctx and 2 gen fakes: first in, first out, 200,000 prompt tokens/s, an LRU. Ours is what serves: the ingress process
with HTTP, tokenizing skipped as prompts are ids, the router process; the workers speak the product's frames
(fake_workers.py). vllm-router gets the same trace as text and HTTP workers with the same times (routing_peers.py). The
arrivals are spread over the 3 s to which the trace rounds them, seed 1, alike for all.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from cpu_http import load_cluster_class
from harness import Row, arguments, finish, identity, parser_of
from routing_load import BLOCK_CHARS, BLOCK_IDS, OUTPUT_TOKENS, TOKENS_PER_ID, Sent, bodies, open_loop
from routing_peers import Talk, vllm_router
from simulate_trace import Request, ceiling, read

SPEED = 20.0
RATE = 200_000.0
CTX, GEN = 4, 2
SIZES = (8000, 2000)
FIGURES = ("hit", "ttft_p90", "ttft_p50", "imbalance")
NAMES = (
    *(f"routing.{figure}.{n}" for n in SIZES for figure in FIGURES),
    *(f"routing.least_prefill.{figure}.{n}" for n in SIZES for figure in ("hit", "ttft_p90")),
)  # fmt: skip
HERE = Path(__file__).resolve().parent
MODEL = "smollm2"
QUICK_ROWS = 700


@dataclass(slots=True)
class Run:
    """One replay. `computed`: prompt tokens by ctx, cached ones not counted."""

    sent: list[Sent]
    prompt_tokens: int
    cached_tokens: int
    computed: list[int] = field(default_factory=list)

    @property
    def hit(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def ttft_ms(self, share: float) -> float:
        found = [s.first_s for s in self.sent if s.first_s >= 0]
        return 1000 * float(np.quantile(found, share)) if found else 0.0

    @property
    def imbalance(self) -> float:
        return max(self.computed) / max(1e-9, statistics.mean(self.computed))

    @property
    def failed(self) -> int:
        return sum(s.status != 200 or s.first_s < 0 for s in self.sent)

    @property
    def late_ms(self) -> float:
        """p99 of how late the client itself sent."""
        return 1000 * float(np.quantile([s.late_s for s in self.sent], 0.99))

    def figure(self, name: str) -> float:
        if name == "hit":
            return self.hit
        if name == "imbalance":
            return self.imbalance
        return self.ttft_ms(0.5 if name.endswith("p50") else 0.9)


def ours(requests: Sequence[Request], at: Sequence[float], blocks: int, policy: str) -> Run:
    """Through our ingress and router."""
    sent = bodies(requests, text=False, model=MODEL)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = load_cluster_class()(
            folder / "cluster", MODEL, ctx=0, gen=0, model_name=MODEL, placement=policy, block_tokens=BLOCK_IDS,
            local_prefill_max_tokens=0, faults=False, kv_bytes=2**31,
        )  # fmt: skip
        stack.enter_context(cluster)
        command = [sys.executable, str(HERE / "fake_workers.py"), "--directory", str(folder / "cluster" / "directory")]
        command += ["--ctx", str(CTX), "--gen", str(GEN), "--prefill-rate", str(RATE / TOKENS_PER_ID)]
        command += ["--cache-blocks", str(blocks), "--block-tokens", str(BLOCK_IDS)]
        fakes = stack.enter_context(Talk(command, folder / "fakes.log"))
        cluster.wait_ready()
        answers = asyncio.run(open_loop(cluster.processes["ingress-0"].ready["port"], sent, at))
        counts = fakes.ask("counts")
    ctxs = [c for name, c in counts.items() if name.startswith("ctx")]
    computed = [c["prompt_tokens"] - c["cached_tokens"] for c in ctxs]
    return Run(answers, sum(c["prompt_tokens"] for c in ctxs), sum(c["cached_tokens"] for c in ctxs), computed)


def theirs(requests: Sequence[Request], at: Sequence[float], blocks: int, policy: str) -> Run:
    """Through vllm-router."""
    sent = bodies(requests, text=True, model="fake")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, str(HERE / "routing_peers.py"), "--prefill", str(CTX), "--decode", str(GEN)]
        command += ["--rate", str(RATE), "--cache-blocks", str(blocks)]
        fakes = stack.enter_context(Talk(command, folder / "fakes.log"))
        port = stack.enter_context(vllm_router(fakes.ready["prefill"], fakes.ready["decode"], policy))
        answers = asyncio.run(open_loop(port, sent, at))
        counts = fakes.ask("counts")
    computed = [c["prompt_tokens"] - c["cached_tokens"] for c in counts]
    return Run(answers, sum(c["prompt_tokens"] for c in counts), sum(c["cached_tokens"] for c in counts), computed)


def rows_of(args: Namespace, requests: Sequence[Request], blocks: int) -> list[Row]:
    """All rows of one cache size, from replays one after the other."""
    at = [r.at / SPEED for r in requests]
    wanted = [name for name in args.names if name.endswith(f".{blocks}")]
    if not wanted:
        return []
    subjects = {"ours": (ours, args.policy)}
    if any("least_prefill" in name for name in wanted) and args.policy != "least_prefill":
        subjects["least_prefill"] = (ours, "least_prefill")
    peers = {"vllm_router": (theirs, "cache_aware"), "round_robin": (theirs, "round_robin")}
    present = find_spec("vllm_router") is not None
    runs: dict[str, list[Run]] = {}
    for turn in range(args.pairs):
        turns = list((subjects | (peers if present else {})).items())
        for label, (replay, policy) in turns if turn % 2 == 0 else turns[::-1]:
            print(f"{label} ({policy}), {blocks} blocks ...", file=sys.stderr, flush=True)
            runs.setdefault(label, []).append(replay(requests, at, blocks, policy))
    what = identity(
        policy=args.policy, path="HTTP, ingress, router, frames; fake workers", trace=args.trace.name,
        shapes=f"{CTX} ctx + {GEN} gen, {RATE:,.0f} prompt tokens/s, LRU of {blocks} blocks of 512; arrivals at "
        f"{SPEED:g}x, spread; {OUTPUT_TOKENS} tokens out",
        scale=f"one id stands for {TOKENS_PER_ID} tokens of the trace ({BLOCK_IDS} ids a block); for vllm-router "
        f"{BLOCK_CHARS} characters a block",
        sample="whole" if len(requests) >= args.rows else f"the first {len(requests)} of {args.rows} rows",
        ceiling=round(ceiling(requests), 4), pairs=args.pairs, vllm_router="0.1.17, --vllm-pd-disaggregation",
        failed={label: sum(r.failed for r in found) for label, found in runs.items()},
        client_late_ms={k: round(max(r.late_ms for r in found), 1) for k, found in runs.items()},
    )  # fmt: skip
    return [row for row in (_row(name, blocks, runs, what, present) for name in wanted) if row is not None]


def _row(name: str, blocks: int, runs: dict[str, list[Run]], what: dict[str, object], present: bool) -> Row | None:
    label = "least_prefill" if "least_prefill" in name and "least_prefill" in runs else "ours"
    figure = name.removeprefix("routing.").removeprefix("least_prefill.").replace(f".{blocks}", "")
    unit, better = {"hit": ("share", "higher"), "imbalance": ("ratio", "lower")}.get(figure, ("ms", "lower"))
    samples = {key: [run.figure(figure) for run in found] for key, found in runs.items()}
    mine = samples[label]
    if any(run.failed for run in runs[label]):
        reason = f"{sum(run.failed for run in runs[label])} requests failed; lifted when none does"
        return Row(name, None, unit, better, status="held", reason=reason, identity=what)
    against = {}
    for key in ("vllm_router", "round_robin", "least_prefill"):
        if key in samples and key != label:
            pairs = zip(mine, samples[key], strict=True)
            against[key] = statistics.median(a / max(b, 1e-9) for a, b in pairs)
    if not present:
        what = what | {"absent": "vllm-router is not installed"}
    return Row(name, statistics.median(mine), unit, better, against, identity=what, samples=samples)


def main() -> None:
    parser = parser_of((__doc__ or "").splitlines()[0])
    parser.add_argument("--policy", default="prefix", help="placement of ours")
    parser.add_argument("--pairs", type=int, default=1, help="replays of each; a replay is the whole sample")
    args = arguments("", NAMES, trace="mooncake_conversation_first2000_sessions.jsonl", parser=parser)
    if not args.trace.exists():
        what, reason = identity(trace=args.trace.name), f"no trace at {args.trace.name}"
        finish(
            [Row(n, None, "", "lower", status="unsupported", reason=reason, identity=what) for n in args.names], args
        )
        return
    requests = read(args.trace)
    args.rows = len(requests)
    if args.quick:
        requests = requests[:QUICK_ROWS]
    finish([row for blocks in SIZES for row in rows_of(args, requests, blocks)], args)


if __name__ == "__main__":
    main()
