"""Prompts that wait have what their steps will look up by token ids fetched meanwhile, by a thread of its own."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from equal import prompt_of
from node_rig import until
from oracle import greedy, reference
from row_rig import RowRig
from tiny_families import write_tiny_family

from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.engine import Engine, pool_tensor
from tailrace.engine.sequence import Sequence
from tailrace.model.sampling_params import SamplingParams

CHUNK, PAGE = 16, 16


class Tables:
    """Which rows of a decoder's tables were read, by whom."""

    def __init__(self, decoder: Any) -> None:
        self.ahead: dict[int, set[int]] = {}
        self.in_steps: dict[int, set[int]] = {}
        for layer, weights in decoder._weights.engrams().items():
            self.ahead[layer], self.in_steps[layer] = set(), set()
            self._watch(layer, weights.table)

    def _watch(self, layer: int, table: Any) -> None:
        gather = table._gather

        def watched(rows: torch.Tensor) -> torch.Tensor:
            is_ahead = threading.current_thread().name.startswith("engram-ahead")
            (self.ahead if is_ahead else self.in_steps)[layer].update(rows.tolist())
            return gather(rows)

        table._gather = watched


def sequence(prompt: list[int]) -> Sequence:
    params = SamplingParams(max_tokens=2, temperature=0.0)
    return Sequence.for_prefill(("r", 0), np.array(prompt, np.int32), [], params, 1, frozenset())


def test_what_a_prompt_looks_up_behind_its_first_chunk_is_read_while_that_runs(tmp_path: Path):
    torch.set_num_threads(1)
    ref = reference(write_tiny_family(tmp_path, "v41-engram"), tokens_per_page=PAGE, block_tokens=PAGE, num_pages=300)
    expected = ref.generate([prompt_of(60, 1), prompt_of(50, 2)], greedy(5))
    tables = Tables(ref.weights)
    with RowRig(ref, "in_process", chunk=CHUNK) as rig:
        answers = rig.ask([prompt_of(60, 1), prompt_of(50, 2)], greedy(5))
        assert [a.samples[0] for a in answers] == [e.samples[0].ids for e in expected]
    hashes: Any = ref.weights.engram
    for layer, rows in hashes.rows_of_ids(prompt_of(60, 1), 0).items():
        first = set(hashes.rows_of_ids(prompt_of(60, 1)[:CHUNK], 0)[layer].tolist())
        later = set(rows.tolist()) - first
        until(lambda layer=layer, later=later: later <= tables.ahead[layer], 10)
        assert later and tables.ahead[layer] <= tables.in_steps[layer], "no row that no step read"


def test_only_what_is_not_about_to_run_is_asked_for_and_models_without_tables_ask_for_nothing(tmp_path: Path):
    torch.set_num_threads(1)
    for family in ("v41-engram", "v41"):
        ref = reference(write_tiny_family(tmp_path / family, family), tokens_per_page=PAGE, block_tokens=PAGE)
        engine = Engine(ref.weights, pool_tensor(np.zeros((2, ref.layout.bytes_per_page), np.uint8), ref.layout))
        assert engine.reads_ahead is (family == "v41-engram")
        engine.read_ahead(sequence(prompt_of(20, 1)), 0)
    asked: list[tuple[list[int], int]] = []
    engine._rows_ahead = type("", (), {"ask": lambda self, ids, before: asked.append((ids, before))})()
    scheduler, prompts = PrefillScheduler(CHUNK, read_ahead=engine.read_ahead), [prompt_of(40, 3), prompt_of(12, 4)]
    for prompt in prompts:
        scheduler.add(sequence(prompt))
    assert asked == [(prompts[0], CHUNK), (prompts[1], 0)], "ids in front of those wanted are n-grams' beginnings"
    short = PrefillScheduler(64, read_ahead=engine.read_ahead)
    short.add(sequence(prompts[0]))
    assert len(asked) == 2, "all of it is about to run"
    rest = sequence(prompt_of(90, 5))
    rest.prompt, rest.prompt_from, rest.num_computed = rest.prompt[30:], 30, 50  # type: ignore[index]
    engine.read_ahead(rest, 10)
    assert asked[-1] == (prompt_of(90, 5)[44:], 16)


def test_an_engine_does_not_wait_for_what_is_read_ahead(tmp_path: Path):
    ref = reference(write_tiny_family(tmp_path, "v41-engram"), tokens_per_page=PAGE, block_tokens=PAGE)
    engine = Engine(ref.weights, pool_tensor(np.zeros((2, ref.layout.bytes_per_page), np.uint8), ref.layout))
    go_on = threading.Event()
    tables: Any = ref.weights
    for weights in tables._weights.engrams().values():
        weights.table._gather = lambda rows: go_on.wait(10) and torch.zeros(len(rows), 32)
    began = time.monotonic()
    engine.read_ahead(sequence(prompt_of(200, 1)), 0)
    assert time.monotonic() - began < 1.0
    go_on.set()
