"""RMSNorm over the last dimension. Plain PyTorch, the CPU path."""

from __future__ import annotations

import torch
from torch.nn import functional

_FEW_ROWS = 64  # up to here the number of operators decides, above it the number of passes over memory


class RmsNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight, in float32 inside, rounded once.

    Args:
        weight: [dim], of the dtype that results have.
        eps: added to the mean square.
    """

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps
        self._dim, self._dtype = weight.shape[0], weight.dtype
        self._weight32 = weight.float()
        self._doubled = {dtype: torch.cat((weight, weight)).to(dtype) for dtype in {self._dtype, torch.float32}}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., dim] of the weight's dtype or float32 -> the same shape in the weight's dtype."""
        if self._dtype is torch.float32 or x.shape[0] > _FEW_ROWS:
            weight = self._weight32 if x.dtype is torch.float32 else self._weight
            return functional.rms_norm(x, (self._dim,), weight, self._eps).to(self._dtype)
        # PyTorch has a fused layer norm on the CPU but composes rms_norm of six others. The mean of [x, -x] is 0 and
        # its variance is the mean square of x, so the layer norm of that is the RMS norm; for few rows in half the time
        both = torch.cat((x, x.neg()), -1)
        normed = torch.native_layer_norm(both, (2 * self._dim,), self._doubled[x.dtype], None, self._eps)[0]
        return normed[..., : self._dim].to(self._dtype).contiguous()
