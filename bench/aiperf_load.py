"""aiperf, an OpenAI load generator that knows nothing of us, against the product on this machine's CPU.

    python bench/aiperf_load.py                         starts the product's processes, ends them again
    python bench/aiperf_load.py --url http://HOST:8000  against one that runs (`make serve`)

    aiperf.c8          output tokens/s, concurrency 8, 100 chat requests, streaming, 128 tokens in, 32 out
      .ttft .ttft_p99  time to the first token, ms
      .gap .gap_p99    time between two tokens, ms
      .rps             requests/s

Rejected and failed requests make the rows `held`. aiperf is run as a program, from wherever it is installed (--aiperf),
and works offline: its tokenizer is written from the model's own file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cpu_http
from cpu_subjects import model_file
from harness import Row, finish, identity

NAME = "aiperf.c8"
CONCURRENCY, REQUESTS, TOKENS_IN, TOKENS_OUT = 8, 100, 128, 32
FIGURES = {
    "": ("output_token_throughput", "avg", "tokens/s", "higher"),
    ".rps": ("request_throughput", "avg", "1/s", "higher"),
    ".ttft": ("time_to_first_token", "p50", "ms", "lower"),
    ".ttft_p99": ("time_to_first_token", "p99", "ms", "lower"),
    ".gap": ("inter_token_latency", "p50", "ms", "lower"),
    ".gap_p99": ("inter_token_latency", "p99", "ms", "lower"),
}


def write_tokenizer(folder: Path) -> None:
    """The embedded model's tokenizer as a Hugging Face folder."""
    from transformers import AutoTokenizer

    file = model_file()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


@contextmanager
def served(url: str | None) -> Iterator[str]:
    """The URL to ask; of a cluster of our own if none is given."""
    if url is not None:
        yield url
        return
    with cpu_http.running() as cluster:
        yield cluster.base_url


def command(program: str, url: str, tokenizer: Path, out: Path, requests: int) -> list[str]:
    """aiperf's command line."""
    return [
        program, "profile", "--model", "smollm2", "--url", url, "--endpoint-type", "chat", "--streaming",
        "--concurrency", str(CONCURRENCY), "--request-count", str(requests), "--isl", str(TOKENS_IN),
        "--osl", str(TOKENS_OUT), "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0",
        "--tokenizer", str(tokenizer), "--use-server-token-count", "--random-seed", "1", "--ui", "none",
        "--output-artifact-dir", str(out),
    ]  # fmt: skip


def rows_of(report: dict[str, dict[str, float]], what: dict[str, object], requests: int) -> list[Row]:
    """Rows of aiperf's exported summary."""
    done = report.get("request_count", {}).get("avg", 0)
    reason = "" if done == requests else f"{done:g} of {requests} requests were answered; lifted when all are"
    rows = []
    for suffix, (metric, statistic, unit, better) in FIGURES.items():
        value = report.get(metric, {}).get(statistic)
        why = reason or ("" if value is not None else f"aiperf does not report {metric}; lifted when it does")
        rows.append(
            Row(NAME + suffix, None if why else value, unit, better, status="held" if why else "ok", reason=why,
                identity=what)
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="aiperf against the product on this machine's CPU.")
    parser.add_argument("--url", help="of a running ingress")
    beside = Path(sys.executable).with_name("aiperf")
    default = str(beside) if beside.exists() else shutil.which("aiperf")
    parser.add_argument("--aiperf", default=default, help="the program; default: the one installed here")
    parser.add_argument("--quick", action="store_true", help="24 requests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    requests = 24 if args.quick else REQUESTS
    what = identity(
        policy=f"concurrency {CONCURRENCY}, {requests} requests, greedy", path="http, ctx + gen, bf16 dense",
        shapes=f"chat, {TOKENS_IN} tokens in, {TOKENS_OUT} out",
        config=cpu_http.CONFIG if args.url is None else args.url,
    )  # fmt: skip
    if args.aiperf is None:
        finish([Row(NAME, None, "tokens/s", "higher", status="unsupported", reason="aiperf is not installed")], args)
        return
    with tempfile.TemporaryDirectory(prefix="tailrace-bench-") as folder, served(args.url) as url:
        tokenizer, out = Path(folder) / "tokenizer", Path(folder) / "out"
        write_tokenizer(tokenizer)
        program = command(args.aiperf, url, tokenizer, out, requests)
        ran = subprocess.run(program, capture_output=True, text=True, check=False)
        reports = list(out.rglob("*aiperf.json"))
        if ran.returncode or not reports:
            raise SystemExit(f"{' '.join(program)}\nended with {ran.returncode}:\n{ran.stdout[-2000:]}")
        finish(rows_of(json.loads(reports[0].read_text()), what, requests), args)


if __name__ == "__main__":
    main()
