"""Linear layers that hide how their weights are stored: dense, prepacked for oneDNN, or packed to 4 bits for the CPU.

A decoder calls `linear(x)` with x [rows, in_features] in the store's dtype and gets [rows, out_features] in it. Which
kernel runs is decided here, by the number of rows: 4-bit weights are read at a quarter of the bytes and win while the
rows are few; a bf16 copy in oneDNN's own layout wins for many. Nothing here knows layers or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from tailrace.kernels.cpu_products import has_bf16_products, widened_linear
from tailrace.kernels.steady import steady_linear
from tailrace.model.quantized import GROUP, Int4Groups

# Rows up to which the 4-bit product is faster than the bf16 one. Its time grows with the rows, since every few rows
# decode the weights anew; the bf16 product's time is that of reading its weights, up to about 16 rows.
MAX_INT4_ROWS = 4

ONE_THREAD_ROWS = 8  # a step of so few rows is done sooner on one thread than others can be woken

_PACKING_ROWS = 4096


class Linear(Protocol):
    """y = x W^T + b.  x: [rows, in_features];  y: [rows, out_features]; dtype and device are the store's."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        ...


class _Product(ABC):
    """A dense product, on all threads for many rows even where the step's small operators run on one.

    All threads are those that torch had when the weights were loaded.
    """

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        threads = torch.get_num_threads()
        if x.shape[0] <= ONE_THREAD_ROWS or threads >= self._threads:
            return self._multiply(x)
        torch.set_num_threads(self._threads)
        try:
            return self._multiply(x)
        finally:
            torch.set_num_threads(threads)

    @abstractmethod
    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T + b on the threads that torch has now."""


class DenseLinear(_Product):
    """weight: [out_features, in_features];  bias: [out_features] or None. The only kind in float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.out_features, self.in_features = weight.shape

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


class SteadyLinear(DenseLinear):
    """A dense float32 product whose rows come out the same to the bit whatever rows stand beside them."""

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        y = steady_linear(x, self.weight)
        return y if self.bias is None else y.add_(self.bias)


class PrepackedLinear(_Product):
    """A bf16 weight in oneDNN's blocked layout: the same product without reordering the weight on every call.

    For few rows that reordering is most of the time (measured 1.3 to 2 times faster up to 16 rows, equal from 128).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """weight: [out_features, in_features] bfloat16 on a CPU for which `prepacking_works()`."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")

    @property
    def num_bytes(self) -> int:
        return 2 * self.in_features * self.out_features


class WidenedLinear(DenseLinear):
    """A bf16 weight on a CPU that has no bf16 products: for more than a few rows they are those of float32."""

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return widened_linear(x, self.weight, self.bias)


def prepacking_works() -> bool:
    """True if this torch and CPU multiply bf16 through oneDNN's prepacked layout."""
    return has_bf16_products()


def cpu_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseLinear | PrepackedLinear:
    """The dense product that suits this CPU.  weight: [out_features, in_features], float32 or bfloat16."""
    if weight.dtype is not torch.bfloat16:
        return DenseLinear(weight, bias)
    return PrepackedLinear(weight, bias) if has_bf16_products() else WidenedLinear(weight, bias)


class Int4Linear:
    """4-bit codes in groups of 32 with bf16 scales and zeros, for few rows; bf16 activations only.

    float32 activations work too but run 40 times slower, so a float32 store keeps dense weights.
    """

    def __init__(self, groups: Int4Groups, bias: torch.Tensor | None = None) -> None:
        """groups: codes whose rows `int4_works` accepts."""
        self.out_features, self.in_features = groups.codes.shape
        self.bias = bias
        # The packing op wants int32. Its layout is by blocks of 64 rows, so chunks of whole blocks give the same bytes.
        pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
        self._codes = torch.cat([pack(part.to(torch.int32), 1) for part in groups.codes.split(_PACKING_ROWS)])
        # Rounding a scale to bf16 moves all of its group's weights; the zero point takes up what that adds on average.
        scale = groups.scale.to(torch.bfloat16).float()
        mean_code = groups.codes.unflatten(1, (-1, GROUP)).sum(-1, dtype=torch.int32) / GROUP - 8
        zero = groups.zero + (groups.scale - scale) * mean_code
        # [columns / 32, rows, 2]
        self._scales = torch.stack((scale, zero), -1).transpose(0, 1).to(torch.bfloat16).contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._codes, GROUP, self._scales)
        return y if self.bias is None else y.add_(self.bias)

    @property
    def num_bytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes


def int4_works(rows: int, columns: int) -> bool:
    """True if the packed product takes a weight of this shape."""
    return rows % 16 == 0 and columns % GROUP == 0


class ByRowsLinear:
    """Packed parts, one after another along the output, for few rows; one bf16 product for many."""

    def __init__(self, few: Sequence[Linear], many: Linear) -> None:
        """few: parts whose out_features add up to many's."""
        self.in_features, self.out_features = many.in_features, many.out_features
        self._few, self._many = tuple(few), many

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MAX_INT4_ROWS:
            return self._many(x)
        if len(self._few) == 1:
            return self._few[0](x)
        return torch.cat([part(x) for part in self._few], 1)

    @property
    def num_bytes(self) -> int:
        return self._many.num_bytes + sum(part.num_bytes for part in self._few)
