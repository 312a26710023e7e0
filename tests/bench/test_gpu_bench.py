"""The GPU bench where there is no GPU: rows say why they are not there; its loops and its gate run on a tiny model."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def engine_bench() -> Iterator[ModuleType]:
    ours = sys.modules.pop("harness", None)  # the tests' own module of that name
    before = dict(sys.modules)
    sys.path.insert(0, str(BENCH))
    try:
        import gpu_engine

        yield gpu_engine
    finally:
        sys.path.remove(str(BENCH))
        for name in set(sys.modules) - set(before):
            if name in ("harness", "gpu_engine", "gpu_checks", "gpu_ceilings"):
                del sys.modules[name]
        if ours is not None:
            sys.modules["harness"] = ours


@without_gpu
def test_without_a_gpu_every_row_is_unsupported_and_says_why(tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH / "gpu.py"), "--quick", "--json", str(file)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    rows = json.loads(file.read_text())
    assert {"gpu.decode_step.b1", "gpu.decode_step.b64", "gpu.prefill.8192"} <= {row["name"] for row in rows}
    assert {(row["status"], row["reason"]) for row in rows} == {("unsupported", "torch sees no GPU")}
    assert all(row["unit"] and row["value"] is None for row in rows)
    assert "unsupported: torch sees no GPU" in printed


def test_the_loops_that_are_timed_decode_and_prefill(engine_bench):
    tiny = replace(
        engine_bench.LLAMA_8B, vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=16, windows=(None, None),
    )  # fmt: skip
    rig = engine_bench.Rig.make(tiny, 64, "cpu")
    engine = rig.engine((4,), 64)
    for ahead in (True, False):
        assert len(engine_bench.decode_passes(rig, engine, 4, 5, context=40, ahead=ahead)) == 5
    assert len(engine_bench.prefill_seconds(rig, engine, 64, 2)) == 2
    assert rig.kv.counts().used == 0


def test_the_gate_passes_on_the_twins_and_finds_a_wrong_token(engine_bench, monkeypatch):
    import gpu_checks

    monkeypatch.setattr(gpu_checks, "PROMPTS", 4)
    monkeypatch.setattr(gpu_checks, "TOKENS", 12)
    assert gpu_checks.gate("cpu") == ""
    real = gpu_checks.weights

    def other(device):
        made = real(device)
        if device == "cpu" and other.calls:
            made.layers[1].o_proj.weight[0] += 0.5
        other.calls += 1
        return made

    other.calls = 0
    monkeypatch.setattr(gpu_checks, "weights", other)
    assert "on the GPU" in gpu_checks.gate("cpu")


def test_operations_of_a_prompt_are_those_of_its_shapes(engine_bench):
    """8B: about 2 operations a parameter of the layers and token, attention beside."""
    total = engine_bench.flops(engine_bench.LLAMA_8B, 8192)
    layers = engine_bench.LLAMA_8B.num_parameters - 2 * 128256 * 4096
    assert 2 * 8192 * layers < total < 1.2 * 2 * 8192 * layers
