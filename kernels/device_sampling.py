"""From logits to tokens on the device, by the definition of engine/sampler.py, without a way back to the host.

    params = SamplingRows(device, rows=64)
    variant = params.fill([RowSampling(temperature=0.7, top_p=0.9, seed=7, position=120), ..])
    tokens = sample_rows(logits, params, variant)          or argmax_rows(logits) where all rows are greedy

Temperature, then top-k, top-p and min-p, then one Philox draw that inverts the cumulative distribution of what is kept,
in rising id order. The uniform equals engine/philox.py's to the bit; weights are float32 exponentials summed in
float64, so a token differs from the host's only within the sampler's margin. Ties: the higher score, then the lower id.
What needs penalties, bias, masks or logprobs is the host sampler's.

A row with NaN, or with nothing left to choose, gives NO_TOKEN: who feeds tokens to an embedding keeps that out. On a
GPU this runs device_sampling_triton.py, elsewhere the plain twins. Knows rows of numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tailrace.kernels.device_plan import StagedBuffers

NO_TOKEN = -1
GREEDY, TEMPERATURE_ONLY, ADVANCED = VARIANTS = ("greedy", "temperature_only", "advanced")

_MIN_TEMPERATURE = 1e-6  # as engine/sampler.py
_ROUNDS, _M0, _M1, _W0, _W1, _LOW = 10, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row's token is chosen; fields as in model/sampling_params.py.

    Attributes:
        temperature: 0 is greedy.
        seed: taken modulo 2^64.
        position: absolute position of the token that is drawn.
        sample: index of the sample in its request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    sample: int = 0

    @property
    def variant(self) -> str:
        """The least that must run for this row."""
        if self.temperature == 0.0:
            return GREEDY
        return ADVANCED if self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 else TEMPERATURE_ONLY


class SamplingRows:
    """Sampling of a step's rows in buffers kept on a device, which a captured graph reads. Greedy at first.

    Attributes:
        inverse: [rows] float32: 1 / temperature; 0 is greedy.
        top_k: [rows] int32, 0 is off.  top_p: [rows] float64, 1 is off.  min_p: [rows] float64, 0 is off.
        seed: [rows] int64, the bits of the seed.  position, sample: [rows] int64, below 2^32.
    """

    def __init__(self, device: torch.device, rows: int) -> None:
        self.rows = rows
        self._buffers = StagedBuffers(
            device,
            {
                "inverse": ((rows,), torch.float32),
                "top_k": ((rows,), torch.int32),
                "top_p": ((rows,), torch.float64),
                "min_p": ((rows,), torch.float64),
                "seed": ((rows,), torch.int64),
                "position": ((rows,), torch.int64),
                "sample": ((rows,), torch.int64),
            },
        )
        held = self._buffers.tensors
        self.inverse, self.top_k, self.top_p, self.min_p = (held[n] for n in ("inverse", "top_k", "top_p", "min_p"))
        self.seed, self.position, self.sample = held["seed"], held["position"], held["sample"]

    def fill(self, rows: Sequence[RowSampling]) -> str:
        """Write and send a step's rows; those behind them are greedy.

        Returns:
            The variant that `sample_rows` needs for them, one of VARIANTS.

        Raises:
            ValueError: more rows than there is room for.
        """
        if len(rows) > self.rows:
            raise ValueError(f"{len(rows)} rows to sample, there is room for {self.rows}")
        into = self._buffers.begin()
        n = len(rows)
        into["inverse"][:n] = [
            0.0 if r.temperature == 0.0 else 1.0 / max(r.temperature, _MIN_TEMPERATURE) for r in rows
        ]
        into["inverse"][n:] = 0.0
        into["top_k"][:n] = [r.top_k for r in rows]
        into["top_p"][:n] = [r.top_p for r in rows]
        into["min_p"][:n] = [r.min_p for r in rows]
        into["seed"][:n] = np.array([r.seed & (2**64 - 1) for r in rows], np.uint64).view(np.int64)
        into["position"][:n] = [r.position & _LOW for r in rows]
        into["sample"][:n] = [r.sample & _LOW for r in rows]
        self._buffers.send(("inverse", "sample", self.rows))
        return max((r.variant for r in rows), key=VARIANTS.index, default=GREEDY)


def argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The lowest id of each row's highest logit.

    Args:
        logits: [rows, vocab] float32, each row contiguous.
        out: [rows] int32 or int64, contiguous; int32 made here if None.

    Returns:
        out; NO_TOKEN where the highest is NaN or infinite.

    Raises:
        ValueError: a shape, dtype or stride that does not fit; names what is and what was expected.
    """
    check_sampling(logits, None, GREEDY, out)
    if logits.is_cuda:
        from tailrace.kernels import device_sampling_triton as kernels  # noqa: PLC0415 (an optional package)

        return kernels.argmax_rows(logits, out)
    return plain_argmax_rows(logits, out)


def sample_rows(
    logits: torch.Tensor, params: SamplingRows, variant: str = ADVANCED, out: torch.Tensor | None = None
) -> torch.Tensor:
    """A token a row.

    Args:
        logits: [rows, vocab] float32, each row contiguous; not changed.
        params: of these rows, the first of its own.
        variant: what `params.fill` gave, or a later one of VARIANTS: what an earlier one leaves out is not looked at.
        out: as of argmax_rows.

    Returns:
        out.

    Raises:
        ValueError: as of argmax_rows.
    """
    check_sampling(logits, params, variant, out)
    if variant == GREEDY:
        return argmax_rows(logits, out)
    if logits.is_cuda:
        from tailrace.kernels import device_sampling_triton as kernels  # noqa: PLC0415 (an optional package)

        # To pyright, which is given this file by its path, the class here is another than the one imported there.
        return kernels.sample_rows(logits, params, variant, out)  # pyright: ignore[reportArgumentType]
    return plain_sample_rows(logits, params, variant, out)


# --------------------------------------------------------------------------------------------------------------- twins


def plain_argmax_rows(logits: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The twin."""
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device) if out is None else out
    top = logits.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = torch.where(logits == top, ids, logits.shape[1]).amin(-1)
    out.copy_(torch.where(top[:, 0].isfinite(), best, NO_TOKEN))
    return out


def plain_sample_rows(
    logits: torch.Tensor, params: SamplingRows, variant: str = ADVANCED, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The twin: row by row, what filters keep by sorting. It waits for the device."""
    out = plain_argmax_rows(logits, out)
    uniform = philox_uniforms(params.seed, params.position, params.sample)
    for row in range(len(logits)):
        if params.inverse[row] == 0.0 or out[row] == NO_TOKEN:
            continue
        scores = (logits[row] - logits[row].max()) * params.inverse[row]
        filters = (int(params.top_k[row]), float(params.top_p[row]), float(params.min_p[row]))
        if variant != ADVANCED or filters == (0, 1.0, 0.0):
            ids, weights = torch.arange(len(scores), device=scores.device), scores.exp().double()
        else:
            ids, weights = _kept(scores, *filters)
        below = weights.cumsum(0)
        at = int(torch.searchsorted(below, uniform[row] * below[-1], right=True))
        if at == len(below):
            at = int(torch.searchsorted(below, below[-1]))
        out[row] = ids[at]
    return out


def _kept(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids rising, and weights, of what the filters leave of scores [vocab], the highest of which is 0."""
    ordered, ids = (scores + 0.0).sort(descending=True, stable=True)
    weights = ordered.double().exp()
    if 0 < top_k < len(ids):
        ids, weights = ids[:top_k], weights[:top_k]
    if top_p < 1.0:
        shares = (weights / weights.sum()).cumsum(0)
        count = min(int(torch.searchsorted(shares, top_p)) + 1, len(ids))
        ids, weights = ids[:count], weights[:count]
    if min_p > 0.0:
        large = weights / weights[0] >= min_p
        ids, weights = ids[large], weights[large]
    ids, order = ids.sort()
    return ids, weights[order]


def philox_uniforms(seed: torch.Tensor, position: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
    """engine/philox.uniforms of draw 0: int64 [n] each -> [n] float64."""
    x0, x1, x2, x3 = position & _LOW, sample & _LOW, torch.zeros_like(seed), torch.zeros_like(seed)
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        p0, p1 = x0 * _M0, x2 * _M1  # what passes 63 bits wraps, and the bits are right
        x0, x1, x2, x3 = ((p1 >> 32) & _LOW) ^ x1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ x3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return ((x0 >> 5).double() * 67108864.0 + (x1 >> 6).double()) / 9007199254740992.0


# -------------------------------------------------------------------------------------------------------------- checks


def check_sampling(logits: torch.Tensor, params: SamplingRows | None, variant: str, out: torch.Tensor | None) -> None:
    """ValueError unless these are arguments of sample_rows."""
    if logits.dim() != 2 or logits.dtype is not torch.float32 or not 1 <= logits.shape[1] < 2**31:
        raise ValueError(f"logits are {tuple(logits.shape)} {logits.dtype}, expected [rows, vocab] torch.float32")
    if logits.stride(1) != 1 and logits.shape[1] > 1:
        raise ValueError(f"logits have strides {logits.stride()}, expected (any, 1)")
    if params is not None and params.rows < len(logits):
        raise ValueError(f"sampling of {params.rows} rows for logits of {len(logits)}")
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}, expected one of {VARIANTS}")
    if out is not None and (out.shape != (len(logits),) or out.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"out is {tuple(out.shape)} {out.dtype}, expected ({len(logits)},) int32 or int64")
    if out is not None and not out.is_contiguous():
        raise ValueError(f"out has stride {out.stride()}, expected (1,)")
