"""A stored tensor in one dtype, whatever it is stored as; GGUF's 4-bit groups as torch's packed CPU product reads them.

The packed product wants every group of 32 weights of a row as codes 0..15 with a scale and a zero point:
weight = (code - 8) * scale + zero. Q4_0, Q4_1 and Q4_K are of that form as they stand; nothing is quantized anew.
Q8_0 is left to bf16: torch's 8-bit product, and two 4-bit ones, measured no faster than prepacked bf16, and Q6_K fits
neither.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from tailrace.model.errors import ConfigError
from tailrace.model.scaled_blocks import INTEGER_KINDS, SCALED_KINDS, scaled_rows
from tailrace.model.tensors import TensorEntry

GROUP = 32
INT4_KINDS = ("Q4_0", "Q4_1", "Q4_K")
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 23
ALL_ROWS = slice(None)


def dense(entry: TensorEntry, dtype: torch.dtype, part: slice = ALL_ROWS) -> torch.Tensor:
    """The tensor, or some of its rows, in `dtype`, in memory of its own; float32 values are exactly the file's.

    Block types are decoded some rows at a time, so that no float32 copy of a whole table is ever held. What the file
    says of an FP8 or FP4 weight is value times scale in float32. Raises ConfigError if the entry cannot be read.
    """
    if entry.problem:
        raise ConfigError(entry.problem)
    if entry.kind in INTEGER_KINDS:
        raise ConfigError(f"{entry.file}: tensor {entry.stored_name} has type {entry.kind}, expected a floating type")
    if entry.kind in SCALED_KINDS:
        return scaled_rows(entry, dtype, part)
    rows = entry.rows()[part]
    shape = (len(rows), *entry.shape[1:])
    if entry.kind in _PLAIN:
        # A copy first: the mapped bytes are read-only and may be misaligned.
        return torch.from_numpy(rows.copy()).view(_PLAIN[entry.kind]).reshape(shape).to(dtype)
    result = torch.empty(shape, dtype=dtype)
    step = max(1, _CHUNK_ELEMENTS // entry.shape[-1])
    for start in range(0, len(rows), step):
        some = gguf_dequantize(np.ascontiguousarray(rows[start : start + step]), GGMLQuantizationType[entry.kind])
        result[start : start + step] = torch.from_numpy(some)
    return result


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """codes: [rows, columns] uint8 of 0..15;  scale, zero: [rows, columns / 32] float32."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """[rows, weight columns] float32, for tests and checks."""
        groups = self.codes.unflatten(1, (-1, GROUP))
        return ((groups.float() - 8) * self.scale[..., None] + self.zero[..., None]).flatten(1)


def int4_groups(entry: TensorEntry) -> Int4Groups:
    """The tensor's own codes and scales; its kind must be one of INT4_KINDS."""
    unpack = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
    return unpack[entry.kind](entry.rows())


def _half(blocks: np.ndarray) -> torch.Tensor:
    """float16 values at the head of blocks -> float32. blocks: [rows, blocks, 2 * n] uint8."""
    return torch.from_numpy(np.ascontiguousarray(blocks).view(np.float16).astype(np.float32))


def _nibbles(packed: np.ndarray) -> torch.Tensor:
    """[..., 16] uint8 -> [..., 32] uint8: a group's first half in the low nibbles, its second in the high ones."""
    return torch.from_numpy(np.concatenate((packed & 15, packed >> 4), -1))


def _q4_0(rows: np.ndarray) -> Int4Groups:
    """18 bytes a group: float16 scale, 16 bytes of codes; weight = (code - 8) * scale."""
    blocks = rows.reshape(rows.shape[0], -1, 18)
    scale = _half(blocks[..., :2])[..., 0]
    return Int4Groups(_nibbles(blocks[..., 2:]).flatten(1), scale, torch.zeros_like(scale))


def _q4_1(rows: np.ndarray) -> Int4Groups:
    """20 bytes a group: float16 scale and minimum, 16 bytes of codes; weight = code * scale + minimum."""
    blocks = rows.reshape(rows.shape[0], -1, 20)
    scale, minimum = _half(blocks[..., :4]).unbind(-1)
    return Int4Groups(_nibbles(blocks[..., 4:]).flatten(1), scale, minimum + 8 * scale)


def _q4_k(rows: np.ndarray) -> Int4Groups:
    """144 bytes a block of 8 groups: float16 d and dmin, 8 six-bit scales and minima in 12 bytes, 128 bytes of codes;
    weight = code * d * scale - dmin * minimum. Each 32 bytes of codes hold two groups: low nibbles, then high ones."""
    blocks = rows.reshape(rows.shape[0], -1, 144)
    d, dmin = _half(blocks[..., :4]).unbind(-1)
    packed = blocks[..., 4:16].astype(np.int32)
    first, second, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (rest & 15) | (first >> 6) << 4), -1)
    minima = np.concatenate((second & 63, (rest >> 4) | (second >> 6) << 4), -1)
    scale = d[..., None] * torch.from_numpy(scales)
    zero = 8 * scale - dmin[..., None] * torch.from_numpy(minima)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32)
    codes = np.concatenate((pairs & 15, pairs >> 4), 3)
    return Int4Groups(torch.from_numpy(codes).flatten(1), scale.flatten(1), zero.flatten(1))


def q8_0_rows(rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """34 bytes a group, a float16 scale and 32 signed bytes; weight = byte * scale.

    Returns (scale [rows, columns / 32] float32, values [rows, columns] int8).
    """
    blocks = rows.reshape(rows.shape[0], -1, 34)
    values = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return _half(blocks[..., :2])[..., 0], torch.from_numpy(values).flatten(1)
