"""Products of one row: the Triton kernel equals its twin, and what does not fit is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tailrace.kernels.one_row import one_row_gated, one_row_linear, takes

PROGRAM = Path(__file__).parent.with_name("one_row_kernels.py")


def compare(device: str, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), device]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | environment)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def test_the_kernels_in_the_interpreter_equal_their_twins():
    pytest.importorskip("triton")
    assert compare("cpu", TRITON_INTERPRET="1", OMP_NUM_THREADS="1") == "12 equal"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the kernels run in the interpreter here")
def test_the_kernels_on_the_gpu_equal_their_twins():
    assert compare("cuda") == "48 equal"


def test_a_product_on_the_cpu_is_the_plain_one():
    x, weight = torch.randn(3, 16), torch.randn(10, 16)
    assert not takes(x)
    torch.testing.assert_close(one_row_linear(x, weight), x @ weight.T)
    gate, up = (x @ weight.T).chunk(2, -1)
    torch.testing.assert_close(one_row_gated(x, weight), gate.sigmoid() * gate * up)


@pytest.mark.parametrize(
    ("x", "weight", "more", "why"),
    [
        ((2, 16), (10, 15), {}, r"x is \(2, 16\) torch.float32, weight \(10, 15\)"),
        ((2, 16), (10, 16), {"bias": torch.zeros(9)}, r"bias is \(9,\)"),
        ((2, 16), (10, 16), {"out": torch.zeros(2, 9)}, r"out is \(2, 9\)"),
        ((2, 16), (10, 16), {"out": torch.zeros(10, 2).T}, r"out is \(2, 10\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(x, weight, more, why):
    with pytest.raises(ValueError, match=why):
        one_row_linear(torch.zeros(x), torch.zeros(weight), **more)


def test_an_odd_gate_is_refused():
    with pytest.raises(ValueError, match="expected gate and up"):
        one_row_gated(torch.zeros(1, 4), torch.zeros(3, 4))
