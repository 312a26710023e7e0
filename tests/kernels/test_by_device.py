"""Entry points: the twin on the CPU, its namesake of the same signature on a GPU, and nothing else in the decoders."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tailrace.kernels import by_device
from tailrace.kernels.compressor import Running

ROOT = Path(__file__).parents[2]
ENTRIES = {name: f for name, f in vars(by_device).items() if hasattr(f, "__wrapped__")}
TWINS = {f.__wrapped__.__module__.rpartition(".")[2] for f in ENTRIES.values()}


def test_every_entry_has_a_kernel_of_its_name_and_signature():
    pytest.importorskip("triton")
    assert len(ENTRIES) == 17 and len(TWINS) == 8
    for name, entry in ENTRIES.items():
        twin = entry.__wrapped__
        module = importlib.import_module(f"{twin.__module__}_triton")
        assert module.__name__.endswith(by_device_module(entry)), name
        assert inspect.signature(getattr(module, twin.__name__)) == inspect.signature(twin), name


def by_device_module(entry) -> str:
    """What the entry imports for a tensor on a GPU."""
    return inspect.getclosurevars(entry).nonlocals["module"]


def test_where_the_first_tensor_is_decides(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    scores = torch.tensor([[1.0, 3.0, 2.0]])
    assert by_device.exact_topk(scores, 2).tolist() == [[1, 2]], "on the CPU it is the twin"
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(by_device, "on_gpu", lambda tensor: asked.append(tensor) or True)
    for name, module in (("exact_topk", "exact_topk_triton"), ("extend", "compressor_triton")):
        kernel = importlib.import_module(f"tailrace.kernels.{module}")
        monkeypatch.setattr(kernel, name, lambda *args, **options: (args, options))
    assert by_device.exact_topk(scores, k=2) == ((scores,), {"k": 2})
    rows = torch.zeros(2, 4)
    assert by_device.extend(None, rows, rows)[0][1] is rows, "an argument that is no tensor says nothing"
    state = Running(*torch.zeros(3, 4))
    by_device.extend(state, rows, rows)
    assert [t is rows for t in asked] == [False, True, True]


def test_decoders_call_entries_and_no_twin():
    """So what runs here is what runs on a GPU: a function of a twin's module that has an entry is imported nowhere in
    model/ but from by_device."""
    found = 0
    for path in (ROOT / "model").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tailrace.kernels."):
                names, module = {alias.name for alias in node.names}, (node.module or "").rpartition(".")[2]
                found += module == "by_device"
                assert module not in TWINS or not names & ENTRIES.keys(), (path.name, module, names & ENTRIES.keys())
            if isinstance(node, ast.ImportFrom) and node.module == "tailrace.kernels":
                assert not {alias.name for alias in node.names} & TWINS, path.name
        assert not re.search(r"\.(un)?pack\((?!\")|\.rounded\(", path.read_text()) or path.name == "gguf_file.py", path
    assert found >= 5


@pytest.mark.soak
@pytest.mark.parametrize("family", ["v3", "v32", "v4", "v41-engram"])
def test_a_decoder_on_the_kernels_gives_the_logits_of_the_twins(family: str):
    """A prompt in two chunks and two tokens behind it, in the interpreter."""
    pytest.importorskip("triton")
    program = Path(__file__).parent.with_name("decoder_kernels.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), family], capture_output=True, text=True, timeout=1800,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    name, _, error = result.stdout.partition(": ")
    assert name == family and float(error) < 1e-4, result.stdout
