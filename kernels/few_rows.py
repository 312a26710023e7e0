"""A decode step of the Llama family for few rows on quantized weights: layouts, packing, and plain PyTorch twins.

The twins say what few_rows_numba.py computes, in float32; where Numba or AVX2 is missing, the decoder's own operators
serve instead (`native` says whether). Weights are the file's own: codes in groups of 32 with a float16 scale and, for
4 bits, a float16 minimum:

    weight = code * scale + minimum     codes 0..15     Q4_0, Q4_1 exactly; Q4_K's products rounded to float16
    weight = code * scale               codes -128..127 Q8_0 exactly

Outputs stand in blocks of 16, two registers (k) of 8 rows each, and two columns of a row side by side:

    Int4Rows.codes   [blocks, groups, k 2, v 4, row 8, parity 2] uint16; nibble n of a word: column 8 v + 2 n + parity
    Int8Rows.codes   [blocks, groups, k 2, pair 16, row 8, parity 2] int8: column 2 pair + parity
    scales           [blocks, groups, k 2, scale | minimum, row 8] float16, as uint16; of Int8Rows no minimum
"""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

GROUP = 32  # weights of a row with one scale
BLOCK = 16  # outputs of a product are a multiple of this
MAX_ROWS = 8  # above it a product of many rows is faster

_LOST = 2**-10  # relative; a scale that float16 rounds further than this is not packed


def native() -> ModuleType | None:
    """The module of compiled kernels; None where it cannot run."""
    if platform.machine() != "x86_64" or torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return None
    if importlib.util.find_spec("numba") is None:
        return None
    from tailrace.kernels import few_rows_numba  # numba is an optional package

    return few_rows_numba


@dataclass(frozen=True, slots=True)
class Int4Rows:
    """See the module's docstring."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """See the module's docstring."""

    codes: np.ndarray
    scales: np.ndarray

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Weight rows.  ids: [n] -> [n, columns] float32."""
        at = ids.numpy()
        block, k, row = at // BLOCK, at // 8 % 2, at % 8
        codes = self.codes.reshape(*self.codes.shape[:2], 2, 16, 8, 2)[block, :, k, :, row].astype(np.float32)
        scales = self.scales.view(np.float16).reshape(*self.scales.shape[:2], 2, 8)[block, :, k, row]
        return torch.from_numpy((codes.reshape(*scales.shape, GROUP) * scales[..., None]).reshape(len(at), -1))


class Layers(NamedTuple):
    """All layers' weights, stacked over them; codes and scales as Int4Rows has them.

    input_norm, post_norm [layers, size], head_norms [layers, q | k, dim or 0], norm [size], qkv_bias [layers or 0,
    outputs]: float32. The outputs of qkv are [q heads | k heads | v heads] x dim, those of gate_up [gate | up].
    windows: [layers] int64, positions seen, own included; 0: all. scale: of q k^T.
    """

    input_norm: np.ndarray
    qkv: np.ndarray
    qkv_scales: np.ndarray
    qkv_bias: np.ndarray
    head_norms: np.ndarray
    o: np.ndarray
    o_scales: np.ndarray
    post_norm: np.ndarray
    gate_up: np.ndarray
    gate_up_scales: np.ndarray
    down: np.ndarray
    down_scales: np.ndarray
    norm: np.ndarray
    windows: np.ndarray
    eps: np.float32
    scale: np.float32

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self)


class Places(NamedTuple):
    """Where a step's tokens stand: table [rows, pages] int32, each token's own page table; positions [rows] int64;
    cos, sin [rows, dim / 2] float32."""

    table: np.ndarray
    positions: np.ndarray
    cos: np.ndarray
    sin: np.ndarray


def packable(rows: int, columns: int) -> bool:
    """True if a weight of this shape can be packed."""
    return rows % BLOCK == 0 and columns % GROUP == 0


def _halves(values: np.ndarray) -> np.ndarray | None:
    """float32 -> float16, or None if that loses too much."""
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves if np.allclose(halves.astype(np.float32), values, rtol=_LOST, atol=0) else None


def pack_int4(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> Int4Rows | None:
    """codes: [rows, columns] uint8 of 0..15;  scale, minimum: [rows, groups] float32. None: float16 loses too much."""
    rows, groups = scale.shape
    halves = _halves(scale.numpy())
    # Rounding a scale moves all of its group's weights; the minimum takes up what that adds on average. A minimum that
    # is nothing but a rounding error of how it was worked out may become zero.
    if halves is None:
        return None
    lost = (scale.numpy() - halves.astype(np.float32)) * codes.unflatten(1, (groups, GROUP)).float().mean(-1).numpy()
    least = (minimum.numpy() + lost).astype(np.float16)
    if not np.allclose(
        least.astype(np.float32), minimum.numpy() + lost, rtol=_LOST, atol=float(scale.abs().max()) / 64
    ):
        return None
    c = codes.numpy().reshape(-1, 2, 8, groups, 4, 4, 2).astype(np.uint16)  # block, k, row, group, v, nibble, parity
    words = c[..., 0, :] | c[..., 1, :] << 4 | c[..., 2, :] << 8 | c[..., 3, :] << 12
    words = np.ascontiguousarray(words.transpose(0, 3, 1, 4, 2, 5))
    both = np.stack((halves, least)).reshape(2, -1, 2, 8, groups).transpose(1, 4, 2, 0, 3)
    blocks = rows // BLOCK
    return Int4Rows(
        words.reshape(blocks, groups, -1), np.ascontiguousarray(both).view(np.uint16).reshape(blocks, groups, -1)
    )


def pack_int8(values: torch.Tensor, scale: torch.Tensor) -> Int8Rows | None:
    """values: [rows, columns] int8;  scale: [rows, groups] float32. None: float16 loses too much."""
    rows, groups = scale.shape
    halves = _halves(scale.numpy())
    if halves is None:
        return None
    blocks = rows // BLOCK
    codes = values.numpy().reshape(blocks, 2, 8, groups, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    scales = np.ascontiguousarray(halves.reshape(blocks, 2, 8, groups).transpose(0, 3, 1, 2)).view(np.uint16)
    return Int8Rows(np.ascontiguousarray(codes).reshape(blocks, groups, -1), scales.reshape(blocks, groups, -1))


# ---------------------------------------------------------------------------------------------------------------- twins


def weight_of(packed: Int4Rows | Int8Rows) -> torch.Tensor:
    """[rows, columns] float32."""
    blocks, groups = packed.codes.shape[:2]
    scales = packed.scales.view(np.float16).astype(np.float32)
    if isinstance(packed, Int8Rows):
        codes = packed.codes.reshape(blocks, groups, 2, 16, 8, 2).transpose(0, 2, 4, 1, 3, 5).astype(np.float32)
        scale = scales.reshape(blocks, groups, 2, 8).transpose(0, 2, 3, 1)
        weight = codes.reshape(*scale.shape, GROUP) * scale[..., None]
        return torch.from_numpy(weight.reshape(blocks * BLOCK, -1))
    words = packed.codes.reshape(blocks, groups, 2, 4, 8, 1, 2) >> np.arange(0, 16, 4, dtype=np.uint16)[:, None] & 15
    codes = words.transpose(0, 2, 4, 1, 3, 5, 6).astype(np.float32)
    scale, minimum = scales.reshape(blocks, groups, 2, 2, 8).transpose(3, 0, 2, 4, 1)
    weight = codes.reshape(*scale.shape, GROUP) * scale[..., None] + minimum[..., None]
    return torch.from_numpy(weight.reshape(blocks * BLOCK, -1))


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """16-bit activations.  x: [rows, columns] float32.

    Returns:
        [rows, columns] int16, and [rows, groups, 2] float32: what each group's numbers are multiples of, and the sum of
        those multiples, so that a minimum does not bring in what their rounding lost.
        Of a group that is not finite: zeros, and NaN in both places.
    """
    groups = x.unflatten(1, (-1, GROUP))
    largest, total = groups.abs().amax(-1), groups.sum(-1)
    finite = total.isfinite() & (largest < 1e37)
    inverse = torch.where(finite & (largest > 1e-30), 32767 / largest, 0.0)
    words = torch.where(finite[..., None], (groups * inverse[..., None]).round(), 0.0).to(torch.int16)
    scale = torch.where(finite, largest / 32767, torch.nan)
    return words.flatten(1), torch.stack((scale, words.sum(-1) * scale), -1)


def product(x: torch.Tensor, packed: Int4Rows | Int8Rows) -> torch.Tensor:
    """Both products.  x: [rows, columns] float32 -> [rows, outputs]. The kernels take it as quantize_rows leaves it."""
    return functional.linear(x, weight_of(packed))


def run_layers(
    hidden: np.ndarray, num_layers: int, heads: int, layers: Layers, places: Places, pool: np.ndarray, out: np.ndarray
) -> None:
    """The blocks and the final norm for some tokens, whose keys and values go to the pool; one block after another.

    Args:
        hidden: [rows, size] float32, the embedded tokens; overwritten.
        num_layers: the first so many layers run.
        heads: of q.
        pool: [page, layer, k|v, kv_head, token, dim] uint16, the bits of bfloat16.
        out: [rows, size] float32.
    """
    x, kv = torch.from_numpy(hidden), torch.from_numpy(pool.view(np.int16)).view(torch.bfloat16)
    kv_heads, size, dim = kv.shape[3:]
    rows, per_head = len(x), heads // kv_heads
    turns = [torch.from_numpy(t)[:, None].repeat(1, 1, 2) for t in (places.cos, places.sin)]
    pages = [
        torch.from_numpy(places.table[r, : p // size + 1].astype(np.int64)) for r, p in enumerate(places.positions)
    ]

    def through(x: torch.Tensor, codes: np.ndarray, scales: np.ndarray) -> torch.Tensor:
        return product(x, Int4Rows(codes, scales))

    def normed(x: torch.Tensor, weight: np.ndarray) -> torch.Tensor:
        return functional.rms_norm(x, (x.shape[-1],), torch.from_numpy(weight), float(layers.eps))

    for i in range(num_layers):
        qkv = through(normed(x, layers.input_norm[i]), layers.qkv[i], layers.qkv_scales[i])
        if len(layers.qkv_bias):
            qkv += torch.from_numpy(layers.qkv_bias[i])
        q, k, v = qkv.view(rows, -1, dim).split((heads, kv_heads, kv_heads), 1)
        if layers.head_norms.shape[2]:
            q, k = (normed(part, weight) for part, weight in zip((q, k), layers.head_norms[i], strict=True))
        q, k = (
            part * turns[0] + torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1) * turns[1]
            for part in (q, k)
        )
        for r, p in enumerate(places.positions):
            kv[places.table[r, p // size], i, :, :, p % size] = torch.stack((k[r], v[r])).bfloat16()
        attended = torch.empty_like(q)
        for r, p in enumerate(places.positions):
            window = int(layers.windows[i])
            seen = slice(max(0, int(p) + 1 - window) if window else 0, int(p) + 1)
            keys, values = kv[pages[r], i].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, seen].float()
            scores = q[r].view(kv_heads, per_head, dim) @ keys.transpose(1, 2) * float(layers.scale)
            attended[r] = (scores.softmax(-1) @ values).view(heads, dim)
        x += through(attended.flatten(1), layers.o[i], layers.o_scales[i])
        gate, up = through(normed(x, layers.post_norm[i]), layers.gate_up[i], layers.gate_up_scales[i]).chunk(2, 1)
        x += through(functional.silu(gate) * up, layers.down[i], layers.down_scales[i])
    out[:] = normed(x, layers.norm).numpy()
