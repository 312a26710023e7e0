"""Programmatic dependent launch: a kernel is set up while the one before it on the stream still runs.

A kernel of a decode step runs for some microseconds, and starting it takes one more. A launch with `overlapped(device)`
among its options begins as soon as every program of the kernel before has called `begin` or ended; `begin` then waits
until that kernel has ended and what it wrote can be read. So each kernel that is launched so calls `begin` before it
reads or writes anything that another kernel touches, which makes the order of effects the same as without. What no
kernel of a step writes (weights) may be read before.

From compute capability 9.0 on; before that, and in the interpreter, both are nothing. Importable only where triton is.
"""

# ruff: noqa: ANN001, ANN202 (Triton itself types what a kernel takes)
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@triton.jit
def begin(OVERLAPPED: tl.constexpr) -> None:
    """Let the next kernel be set up, and wait for the end of the one before."""
    if OVERLAPPED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def overlapped(device: torch.device) -> dict[str, bool]:
    """Options of a launch whose kernel has the constant OVERLAPPED and calls `begin` with it."""
    if not can_overlap(device):
        return {"OVERLAPPED": False}
    return {"OVERLAPPED": True, "launch_pdl": True}


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether the device launches so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
