"""The engine on this machine's CPU, beside transformers and llama.cpp on the same weights; and the product around it.

    cpu.decode.b1      tokens/s of one sequence         against transformers (bf16), llama_cpp (the same Q4_1 file)
    cpu.prefill.512    tokens/s of one 512 token prompt against llama_cpp, matrix_rate (the layers' products alone)
    cpu.decode.b8      tokens/s of eight sequences      against b1 (ours), llama_cpp's b1
    cpu.http.c8, cpu.handoff.1000                       see cpu_http.py

Each engine runs in a process of its own with the same number of threads, and they are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_http
from harness import MIN_PAIRS, Row, arguments, finish, identity, interleaved, row_of

from tailrace.model.source import open_source

ENGINE_NAMES = ("cpu.decode.b1", "cpu.prefill.512", "cpu.decode.b8")
NAMES = (*ENGINE_NAMES, *cpu_http.NAMES)
PREFILL = 512
# As a rank process sets it: waiting threads sleep at once, since other roles share the cores.
OMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
GATE = ("What is the capital of France?", "The capital of France is Paris.")


class Subject:
    """A running cpu_subjects.py; a context manager that ends it."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("cpu_subjects.py")), name, str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)} | (OMP if name.startswith("ours") else {})
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self.works = bool(self._read())

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else {}

    def ask(self, do: str, **what: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()
        (answer,) = self._read().values()
        return answer

    def rate(self, do: str, tokens: int, rows: int = 1) -> Callable[[], float]:
        """A measurement in tokens/s over all rows."""
        more = {"rows": rows} if do == "decode" else {}
        return lambda: rows * tokens / self.ask(do, tokens=tokens, **more)


def gate(ours: Subject) -> str:
    """Why our engine is not fit to be measured; empty if it is."""
    source = open_source("smollm2")
    assert source.chat_template is not None
    text = source.chat_template.render([{"role": "user", "content": GATE[0]}], add_generation_prompt=True)
    found = source.tokenizer.decode(
        ours.ask("answer", ids=source.tokenizer.encode(text, special=True)), skip_special=True
    )
    return (
        ""
        if found.strip() == GATE[1]
        else f"asked {GATE[0]!r}, it answered {found.strip()!r}; lifted when it answers right"
    )


def measures(name: str, subjects: dict[str, Subject], tokens: int) -> dict[str, Callable[[], float]]:
    """What to measure in turns for one row: ours and everything it is held against, all in tokens/s."""
    ours, peers = subjects["ours"], {k: s for k, s in subjects.items() if k != "ours" and s.works}
    llama = {k: s for k, s in peers.items() if k == "llama_cpp"}
    if name == "cpu.decode.b1":
        return {k: s.rate("decode", tokens) for k, s in {"ours": ours, **peers}.items()}
    if name == "cpu.prefill.512":
        rates = {k: s.rate("prefill", PREFILL) for k, s in {"ours": ours, **llama}.items()}
        return rates | {"matrix_rate": ours.rate("matrix", PREFILL)}
    eight = {"ours": ours.rate("decode", tokens, rows=8), "b1": ours.rate("decode", tokens)}
    return eight | {k: s.rate("decode", tokens) for k, s in llama.items()}


def engine_rows(args: argparse.Namespace, names: list[str], threads: int) -> list[Row]:
    """The rows about engines."""
    tokens = 48 if args.quick else 128
    pairs = MIN_PAIRS if args.quick else 15
    rows: list[Row] = []
    with (
        Subject("ours", threads) as ours,
        Subject("transformers", threads) as hf,
        Subject("llama_cpp", threads) as llama,
    ):
        subjects = {"ours": ours, "transformers": hf, "llama_cpp": llama}
        absent = [name for name, subject in subjects.items() if not subject.works]
        held = gate(ours) if ours.works else "our engine does not start"
        for name in names:
            what = identity(
                policy="greedy", path="cpu, packed 4-bit up to 4 rows, bf16 above", shapes=f"{tokens} tokens after 64",
                threads=threads, omp=OMP, absent=absent,
            )  # fmt: skip
            if held:
                rows.append(Row(name, None, "tokens/s", "higher", status="held", reason=held, identity=what))
                continue
            samples = interleaved(measures(name, subjects, tokens), pairs)
            rows.append(row_of(name, "tokens/s", "higher", samples, what))
    return rows


def main() -> None:
    args = arguments((__doc__ or "").splitlines()[0], NAMES)
    threads = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    if names := [name for name in args.names if name in ENGINE_NAMES]:
        rows += engine_rows(args, names, threads)
    if names := [name for name in args.names if name in cpu_http.NAMES]:
        with Subject("ours_dense", threads) as engine:
            rows += cpu_http.rows_of(names, engine.ask, args.quick)
    finish(rows, args)


if __name__ == "__main__":
    main()
