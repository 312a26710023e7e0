"""Products of one row with a large weight, where the time is that of reading the weight once.

    y = one_row_linear(x, weight, bias)          x W^T + b
    y = one_row_gated(x, weight)                 silu(gate) * up of x W^T, gate first

For one row a library's product leaves up to a third of an H200's bandwidth unused; reading each row of the weight by a
program of its own does not. From two rows on the library is faster (measured). On a GPU with a bfloat16 or float16
weight these run one_row_triton.py, else the plain twins: in float32 the library's sums are kept. Sums are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_DTYPES = (torch.bfloat16, torch.float16)


def takes(x: torch.Tensor) -> bool:
    """Whether the kernel multiplies such rows."""
    return x.is_cuda and x.dtype in _DTYPES and len(x) == 1


def one_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x W^T + b.

    Args:
        x: [rows, n], each row contiguous.
        weight: [m, n] contiguous, of x's dtype.
        bias: [m] of it.
        out: [rows, m] contiguous, of x's dtype or float32; of x's dtype and made here if None.

    Raises:
        ValueError: a shape, dtype or stride that does not fit.
    """
    check(x, weight, bias, out)
    if takes(x):
        from tailrace.kernels import one_row_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.one_row_linear(x, weight, bias, out)
    return plain_one_row_linear(x, weight, bias, out)


def one_row_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        x: [rows, n], each row contiguous.
        weight: [2 * m, n] contiguous, of x's dtype; the gate's rows first.

    Returns:
        [rows, m].

    Raises:
        ValueError: a shape, dtype or stride that does not fit.
    """
    check(x, weight, None, None)
    if len(weight) % 2:
        raise ValueError(f"weight has {len(weight)} rows, expected gate and up, an even number")
    if takes(x):
        from tailrace.kernels import one_row_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.one_row_gated(x, weight)
    return plain_one_row_gated(x, weight)


# --------------------------------------------------------------------------------------------------------------- twins


def plain_one_row_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin."""
    product = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return product.to(x.dtype) if out is None else out.copy_(product)


def plain_one_row_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The twin."""
    gate, up = functional.linear(x.float(), weight.float()).chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)


# -------------------------------------------------------------------------------------------------------------- checks


def check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> None:
    """ValueError unless these are arguments of one_row_linear."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.dtype is not weight.dtype:
        raise ValueError(
            f"x is {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype}: expected [rows, n] and "
            "[m, n] of one dtype"
        )
    if not weight.is_contiguous() or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(f"x has strides {x.stride()}, weight {weight.stride()}: expected contiguous rows")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype is not x.dtype):
        raise ValueError(f"bias is {tuple(bias.shape)} {bias.dtype}, expected {tuple(weight.shape[:1])} {x.dtype}")
    if out is None:
        return
    if out.shape != (len(x), len(weight)) or out.dtype not in (x.dtype, torch.float32) or not out.is_contiguous():
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype}, expected contiguous {(len(x), len(weight))} float32 or {x.dtype}"
        )
