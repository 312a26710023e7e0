"""The Triton kernels for rows, scores, choices, attention and experts equal their plain twins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = {
    "row formats": 11,
    "far rows": 3,
    "refusals": 29,
    "index scores": 33,
    "exact top-k": 7,
    "candidate blocks": 5,
    "sparse attention": 15,
    "compressor": 11,
    "hyper-connections": 8,
    "routing": 16,
    "experts": 12,
}


def run_comparison(device: str, **environment: str) -> dict[str, str]:
    program = Path(__file__).parent.with_name("row_kernels.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), device],
        capture_output=True, text=True, timeout=280, env=os.environ | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    parts = re.split(rf"^({'|'.join(KERNELS)}): ", result.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    pytest.importorskip("triton")
    return run_comparison("cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernels_in_the_interpreter_equal_their_twins(kernel: str, interpreted: dict[str, str]):
    assert interpreted[kernel].strip() == f"{KERNELS[kernel]} equal"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels run in the interpreter here")
def test_the_kernels_on_the_gpu_equal_their_twins():
    found = run_comparison("cuda")
    assert {name: text.strip() for name, text in found.items()} == {name: f"{n} equal" for name, n in KERNELS.items()}


@pytest.mark.soak
def test_every_kernel_compiles_for_an_h200_without_one():
    pytest.importorskip("triton")
    program = Path(__file__).parent.with_name("compile_kernels.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program)], capture_output=True, text=True, timeout=1200,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = {line.split()[0] for line in result.stdout.splitlines()}
    defined = {
        re.findall(r"^def (\w+)", source)[0]
        for path in (Path(__file__).parents[2] / "kernels").glob("*_triton.py")
        if "page_" not in path.name  # those are older and have run on one
        for source in path.read_text().split("@triton.jit\n")[1:]
        if '"""grid (' in source
    }
    assert len(defined) >= 15 and defined <= kernels, defined - kernels
