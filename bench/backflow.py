"""Back-flow on a trace of conversations: what the later turns find at ctx, and how soon they answer.

    backflow.hit    share of the later turns' prompt tokens that ctx had, against alone (without back-flow)
    backflow.ttft   time to the first token of the later turns, median, ms, against alone

Sessions of the trace keep their lengths, divided by SCALE; a turn's prompt is the conversation so far, with the answers
that were really given, and new tokens up to the turn's length. Each session is played once with back-flow and once
without, with other tokens, in turns, one request at a time; the next turn comes THINK_S after the answer, in which ctx
reads what it was offered. The cluster is made of the product's own processes with SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from cpu_http import load_cluster_class
from harness import Row, arguments, finish, identity, ratio

TRACE = "mooncake_conversation_first2000_sessions.jsonl"
NAMES = ("backflow.hit", "backflow.ttft")
SCALE = 16
BLOCK = 32
MAX_PROMPT, MAX_ANSWER = 700, 64  # tokens, after scaling
THINK_S = 1.0
VOCAB = 40_000
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16", "kv_bytes": 2**29, "max_num_tokens": 512, "transport": "shm", "block_tokens": BLOCK,
    "local_prefill_max_tokens": 0,
}  # fmt: skip


def sessions(path: Path, number: int) -> list[list[tuple[int, int]]]:
    """(prompt tokens, answer tokens) of the turns of the first sessions with at least two that fit, scaled."""
    turns: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        row = json.loads(line)
        turns[row["session"]].append((row["input_length"] // SCALE, max(2, row["output_length"] // SCALE)))
    fit = [
        [(length, min(answer, MAX_ANSWER)) for length, answer in session if length <= MAX_PROMPT]
        for session in turns.values()
    ]
    return [session for session in fit if len(session) > 1][:number]


class Player:
    """Plays sessions on one cluster; what later turns found, and how long they took."""

    def __init__(self, cluster: Any, seed: int) -> None:
        self.cluster, self.seed = cluster, seed
        self.prompt_tokens = self.cached_tokens = 0
        self.ttft_ms: list[float] = []
        self.asked: list[tuple[int, int]] = []

    def play(self, number: int, session: list[tuple[int, int]]) -> None:
        rng = np.random.default_rng([self.seed, number])
        history: list[int] = []
        for turn, (length, answer) in enumerate(session):
            history += rng.integers(10, VOCAB, max(8, length - len(history))).tolist()
            ids, cached, ttft_s = self._ask(history, answer)
            if turn:
                self.prompt_tokens += len(history)
                self.cached_tokens += cached
                self.ttft_ms.append(ttft_s * 1e3)
            self.asked.append((len(history), len(ids)))
            history = [*history, *ids]
            time.sleep(THINK_S)

    def _ask(self, prompt: list[int], max_tokens: int) -> tuple[list[int], int, float]:
        """Ids of the answer, cached tokens, and seconds to the first token."""
        began = time.perf_counter()
        ids: list[int] = []
        cached, first = 0, 0.0
        options = {"ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        with self.cluster.streaming(prompt, max_tokens, **options) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: ") or line.endswith("[DONE]"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                for choice in event.get("choices", ()):
                    first = first or time.perf_counter() - began
                    ids += choice.get("token_ids") or ()
                if event.get("usage"):
                    cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return ids, cached, first


def measure(args: argparse.Namespace) -> list[Row]:
    played = sessions(args.trace, 4 if args.quick else 12)
    what = identity(trace=args.trace.name, sessions=len(played), scale=SCALE, block_tokens=BLOCK, think_s=THINK_S)
    cluster_class = load_cluster_class()
    with (
        tempfile.TemporaryDirectory() as folder,
        cluster_class(Path(folder) / "with", "smollm2", backflow=True, app="benchback", **CONFIG) as ours,
        cluster_class(Path(folder) / "without", "smollm2", app="benchplain", **CONFIG) as plain,
    ):
        players = {"ours": Player(ours, 1), "alone": Player(plain, 1)}
        for number, session in enumerate(played):
            for name in ("ours", "alone") if number % 2 else ("alone", "ours"):
                players[name].play(number, session)
        read = ours.settled_metric("tailrace_backflow_tokens_total")
    mine, other = players["ours"], players["alone"]
    what |= {"later_turns": len(mine.ttft_ms), "tokens_read_back": read, "turns": mine.asked}
    if mine.asked != other.asked or not read:
        reason = "the two clusters did not play the same turns, or nothing flowed back; when they do"
        return [without_value(name, "held", reason, what) for name in NAMES]
    hits = {name: player.cached_tokens / player.prompt_tokens for name, player in players.items()}
    against = {"alone": hits["ours"] / hits["alone"]} if hits["alone"] else {}
    return [
        Row("backflow.hit", hits["ours"], "fraction", "higher", against, identity=what,
            samples={name: [hit] for name, hit in hits.items()}),
        Row("backflow.ttft", statistics.median(mine.ttft_ms), "ms", "lower",
            {"alone": ratio(mine.ttft_ms, other.ttft_ms)}, identity=what,
            samples={"ours": mine.ttft_ms, "alone": other.ttft_ms}),
    ]  # fmt: skip


def without_value(name: str, status: str, reason: str, what: dict[str, object]) -> Row:
    unit, better = ("fraction", "higher") if name == "backflow.hit" else ("ms", "lower")
    return Row(name, None, unit, better, status=status, reason=reason, identity=what)


def main() -> None:
    args = arguments(__doc__ or "", NAMES, trace=TRACE)
    if args.trace.exists():
        rows = [row for row in measure(args) if row.name in args.names]
    else:
        reason = f"the trace {args.trace.name} is not there"
        rows = [without_value(name, "unsupported", reason, identity()) for name in args.names]
    finish(rows, args)


if __name__ == "__main__":
    main()
