"""Safetensors files of a model directory, as one table of entries: headers are read, bytes are mapped. Torch-free.

Quantized checkpoints keep a weight's scales as a tensor of their own; here the two become one entry. Which of them
belong together is told by their names, what the bytes mean by the stored types and by the two shapes:

    weight     stored as                    a scale for                    used by
    F8_E4M3    [rows, columns]              a block of the config's size   V3, V3.2 (float32), V4, V4.1 (ue8m0)
    F8_E4M3    [rows, columns]              32 columns of one row          Engram tables of V4.1
    F4_E2M1    [rows, columns / 2] bytes    32 columns of one row          experts of V4 and V4.1

Two F4_E2M1 values stand in a byte, that of the lower column in the low half. Scales are float32, or a byte that is an
exponent with a bias of 127 (ue8m0). Scales of `x.weight` are called `x.weight_scale_inv` or `x.scale`. The last block
of a side may be short. What cannot be read so is said naming file, tensor and both shapes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.model.errors import ConfigError
from tailrace.model.tensors import MappedFile, Scales, TensorEntry

KIND_BYTES = {"F32": 4, "F16": 2, "BF16": 2}  # what a tensor may be stored as on its own
INTEGER_BYTES = {"I64": 8, "I32": 4}  # tables of numbers
SCALED_KINDS = {"F8_E4M3": "F8_E4M3", "I8": "F4_E2M1", "U8": "F4_E2M1"}  # stored type -> what it is beside scales
SCALE_KINDS = {"F32": "F32", "F8_E8M0": "F8_E8M0", "U8": "F8_E8M0"}
GROUP = 32  # columns of a row that share a scale where the config's blocks do not apply
MAX_HEADER_BYTES = 100_000_000

_BYTES = KIND_BYTES | INTEGER_BYTES | {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file has it.  kind: the file's own word;  data: flat uint8, mapped;  file: where it lies."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray
    file: Path


def read_entries(directory: Path, block: tuple[int, int] | None = None) -> tuple[list[TensorEntry], list[MappedFile]]:
    """All tensors but scales, under the names that the files give them, and the files.

    Args:
        directory: holds `model.safetensors`, or several files and `model.safetensors.index.json`.
        block: (rows, columns) that share a scale, of `quantization_block`; None if the config names none.

    The shape of a 4-bit weight counts two columns a byte. A tensor of a type that cannot be read, or whose scales do
    not fit it, becomes an entry that says so: most checkpoints hold some that no model here uses.

    Raises:
        ConfigError: a file is missing, cut short or damaged.
    """
    stored, files = read_directory(directory)
    scales = {name for weight in stored for name in _scale_names(weight) if name in stored}
    entries = []
    for tensor in stored.values():
        if tensor.name not in scales:
            found = [stored[scale] for scale in _scale_names(tensor.name) if scale in stored]
            entries.append(_entry(tensor, found, block))
    return entries, files


def quantization_block(raw: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """(rows, columns) that share a scale, of `quantization_config` in config.json; None if nothing is quantized.

    Raises ConfigError for a method other than fp8 with e4m3 values in square or other two-dimensional blocks.
    """
    settings = raw.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method", "?") if isinstance(settings, dict) else "?"
    if method != "fp8" or settings.get("fmt", "e4m3") != "e4m3":
        form = f"{method} {settings['fmt']}" if method == "fp8" else method
        raise ConfigError(
            f"{where}: quantization_config ({form}) is not supported; use fp8 (e4m3), a GGUF file or full precision"
        )
    block = settings.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n >= 1 for n in block):
        raise ConfigError(f"{where}: quantization_config: weight_block_size is {block!r}, expected two numbers")
    return block[0], block[1]


def _scale_names(weight: str) -> tuple[str, ...]:
    stem = weight.removesuffix(".weight")
    return (f"{weight}_scale_inv",) if stem == weight else (f"{weight}_scale_inv", f"{stem}.scale")


def _entry(tensor: StoredTensor, found: list[StoredTensor], block: tuple[int, int] | None) -> TensorEntry:
    """found: tensors that are named as its scales."""
    scaled = SCALED_KINDS.get(tensor.kind) if found else None
    shape, scales, problem = tensor.shape, None, _problem(tensor, found)
    if scaled == "F4_E2M1" and not problem:
        shape = (shape[0], 2 * shape[1])
    if found and not problem:
        scales, problem = _fitted(tensor, (shape[0], shape[1]), found[0], block)
    kind = tensor.kind if scales is None or scaled is None else scaled
    return TensorEntry(
        tensor.name, tensor.name, shape, kind, tensor.data, scales=scales, file=str(tensor.file), problem=problem
    )


def _both(tensor: StoredTensor, scale: StoredTensor) -> str:
    weight = f"{tensor.file}: tensor {tensor.name} ({tensor.kind} {tensor.shape})"
    return f"{weight} has scales {scale.name} ({scale.kind} {scale.shape})"


def _problem(tensor: StoredTensor, found: list[StoredTensor]) -> str:
    """Why types, names or dimensions cannot be read; empty if they can."""
    at, kind = f"{tensor.file}: tensor {tensor.name}", tensor.kind
    if not found:
        if kind in SCALED_KINDS:
            wanted = " or ".join(_scale_names(tensor.name))
            return f"{at} ({kind} {tensor.shape}) has no scales: {wanted} is missing"
        if kind not in KIND_BYTES and kind not in INTEGER_BYTES:
            known = ", ".join((*KIND_BYTES, *INTEGER_BYTES))
            return f"{at} has type {kind}; supported: {known}, and with scales: {', '.join(SCALED_KINDS)}"
        return ""
    if len(found) > 1:
        return f"{_both(tensor, found[0])} and {found[1].name} as well"
    if kind not in SCALED_KINDS or found[0].kind not in SCALE_KINDS:
        supported = f"{', '.join(SCALED_KINDS)} with scales {', '.join(SCALE_KINDS)}"
        return f"{_both(tensor, found[0])}; supported: {supported}"
    return "" if len(tensor.shape) == 2 else f"{_both(tensor, found[0])}, but is no matrix"


def _fitted(
    tensor: StoredTensor, shape: tuple[int, int], scale: StoredTensor, block: tuple[int, int] | None
) -> tuple[Scales | None, str]:
    """The scales with the size of their blocks, or what is wrong.  shape: of the matrix, logical."""
    groups = (1, GROUP)
    sizes = [groups] if block is None or SCALED_KINDS[tensor.kind] == "F4_E2M1" else [block, groups]
    grids = [(-(-shape[0] // rows), -(-shape[1] // columns)) for rows, columns in sizes]
    for size, grid in zip(sizes, grids, strict=True):
        if scale.shape == grid:
            return Scales(scale.name, SCALE_KINDS[scale.kind], grid, scale.data, size), ""
    wanted = " or ".join(f"{grid} for blocks of {s[0]} x {s[1]}" for s, grid in zip(sizes, grids, strict=True))
    return None, f"{_both(tensor, scale)}, expected {wanted}"


def read_directory(directory: Path) -> tuple[dict[str, StoredTensor], list[MappedFile]]:
    """Every tensor of the directory's safetensors files by its stored name, and the files."""
    index_path = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index_path.exists():
        files = _indexed(index_path)
    elif single.exists():
        files = {single.name: []}
    else:
        raise ConfigError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")
    listed = {name for names in files.values() for name in names}
    stored: dict[str, StoredTensor] = {}
    mapped = []
    for file, expected in files.items():
        mapped.append(MappedFile(directory / file))
        held = _read_header(mapped[-1])
        missing = [name for name in expected if name not in held]
        if missing:
            raise ConfigError(f"{directory / file}: tensor {missing[0]} is missing, though the index names it")
        # Of a name in several files the index says whose counts.
        own = set(expected)
        stored |= {name: tensor for name, tensor in held.items() if name in own or name not in listed}
    return stored, mapped


def _indexed(path: Path) -> dict[str, list[str]]:
    """File name -> the tensors that the index says it holds."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map is missing")
    files: dict[str, list[str]] = {}
    for stored, file in weight_map.items():
        if not isinstance(file, str) or (file not in files and Path(file).name != file):
            raise ConfigError(f"{path}: {stored} lies in {file!r}, expected a file of this directory")
        files.setdefault(file, []).append(stored)
    return files


def _read_header(file: MappedFile) -> dict[str, StoredTensor]:
    """By name, what one file holds: 8 bytes header length, JSON header, tensor bytes."""
    path, data = file.path, file.data
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > MAX_HEADER_BYTES or 8 + size > len(data):
        raise ConfigError(f"{path}: not a safetensors file (header of {size} bytes in a file of {len(data)})")
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: not a safetensors file: its header is no object")
    body = data[8 + size :]
    result = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            kind, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            start, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}: header of tensor {name} is malformed: {error}") from error
        expected = math.prod(shape) * _BYTES[kind] if kind in _BYTES else end - start
        if not 0 <= start <= end <= len(body) or end - start != expected or min(shape, default=1) < 1:
            raise ConfigError(f"{path}: tensor {name} ({kind} {shape}) lies at bytes {start}..{end} of {len(body)}")
        result[name] = StoredTensor(name, kind, shape, body[start:end], path)
    return result
