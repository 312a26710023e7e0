"""The Triton kernels of a device step equal their plain twins: in the interpreter here, in real sizes on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SMALL = {
    "decode attention": 6, "prefill attention": 4, "far pages": 3, "norm": 16, "rotary": 8, "gate": 8, "sampling": 3,
    "refusals": 29,
}  # fmt: skip
REAL = SMALL | {"decode attention": 36, "prefill attention": 9, "sampling": 9, "beside SDPA": 6, "graphs": 5}


def run_comparison(device: str, **environment: str) -> dict[str, str]:
    program = Path(__file__).parent.with_name("device_kernels.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), device],
        capture_output=True, text=True, timeout=280, env=os.environ | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    parts = re.split(rf"^({'|'.join(REAL)}): ", result.stdout, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], (text.strip() for text in parts[1::2]), strict=True))


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    pytest.importorskip("triton")
    return run_comparison("cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


@pytest.mark.parametrize("kernel", SMALL)
def test_the_kernels_in_the_interpreter_equal_their_twins(kernel: str, interpreted: dict[str, str]):
    assert interpreted[kernel] == f"{SMALL[kernel]} equal"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels run in the interpreter here")
def test_the_kernels_on_the_gpu_equal_their_twins():
    found = run_comparison("cuda")
    assert found == {name: f"{n} equal" for name, n in REAL.items()}
