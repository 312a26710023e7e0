"""The comparison of the Triton products of one row with their plain twins.

TRITON_INTERPRET=1 python one_row_kernels.py cpu        in Triton's interpreter
python one_row_kernels.py cuda                          on the GPU, at the shapes of a model, too

Prints how many cases are equal within the rounding of a result, and what differs.
"""

from __future__ import annotations

import sys

import torch

from tailrace.kernels import one_row, one_row_triton

SMALL = ((8, 40), (6, 2048), (10, 9000), (2, 1))
REAL = ((6144, 4096), (4096, 14336), (128256, 4096), (49152, 576))


def main() -> None:
    device = torch.device(sys.argv[1])
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    equal, draw = 0, torch.Generator(device).manual_seed(0)
    for m, n in SMALL + (REAL if device.type == "cuda" else ()):
        for dtype in dtypes:
            x = torch.randn(1, n + 8, generator=draw, device=device).to(dtype)[:, :n]
            weight = (torch.randn(m, n, generator=draw, device=device) / n**0.5).to(dtype)
            bias = torch.randn(m, generator=draw, device=device).to(dtype)
            wide = torch.full((1, m), torch.nan, device=device)
            pairs = [
                (one_row_triton.one_row_linear(x, weight), one_row.plain_one_row_linear(x, weight), dtype),
                (
                    one_row_triton.one_row_linear(x, weight, bias, wide),
                    one_row.plain_one_row_linear(x, weight, bias, torch.empty_like(wide)),
                    torch.float32,
                ),
                (one_row_triton.one_row_gated(x, weight), one_row.plain_one_row_gated(x, weight), dtype),
            ]
            for found, expected, kind in pairs:
                tolerance = 1e-5 if kind is torch.float32 else 2.0 * torch.finfo(dtype).eps
                torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
                equal += 1
    print(f"{equal} equal")  # noqa: T201


if __name__ == "__main__":
    main()
