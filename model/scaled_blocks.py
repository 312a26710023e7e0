"""FP8 and FP4 weights as tensors: value times the scale of its block, computed in float32 and rounded once.

Some rows at a time, from the mapped file: a table far larger than memory gives its rows one by one, and no float32 copy
of a matrix is made beside one in another dtype. Formats and names are those of safetensors_files.py. Bytes that are no
number raise ConfigError when they are read: looking for them at opening would read the whole checkpoint.
"""

from __future__ import annotations

import numpy as np
import torch

from tailrace.model.errors import ConfigError
from tailrace.model.tensors import Scales, TensorEntry

SCALED_KINDS = ("F8_E4M3", "F4_E2M1")
INTEGER_KINDS = ("I64", "I32")
_CHUNK_ELEMENTS = 1 << 18
_LARGEST = {"F8_E4M3": 448.0, "F4_E2M1": 6.0}


def scaled_rows(entry: TensorEntry, dtype: torch.dtype, part: slice) -> torch.Tensor:
    """Rows `part` of a matrix with scales: [rows, columns] in `dtype`.

    Raises ConfigError naming file and tensor if a value or a scale read is no finite number.
    """
    start, stop, step = part.indices(entry.shape[0])
    index = np.arange(start, stop, step)
    result = torch.empty((len(index), entry.shape[1]), dtype=dtype)
    some = max(1, _CHUNK_ELEMENTS // entry.shape[1])
    for first in range(0, len(index), some):
        result[first : first + some] = _dequantized(entry, index[first : first + some])
    return result


def gathered_rows(entry: TensorEntry, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a matrix by number, in any order and as often as asked for; of the file, no other row is read.

    Args:
        entry: with scales, or of a plain floating kind.
        index: [..] int64, each from 0 to the matrix's rows.

    Returns [.., columns] in `dtype`. Raises IndexError for a number outside; ConfigError as `scaled_rows` does.
    """
    if entry.problem:
        raise ConfigError(entry.problem)
    rows = index.reshape(-1).numpy()
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < entry.shape[0]:
        outside = rows[(rows < 0) | (rows >= entry.shape[0])][0]
        raise IndexError(f"{entry.file}: tensor {entry.stored_name} has {entry.shape[0]} rows, not row {outside}")
    if entry.scales is not None:
        values = _dequantized(entry, rows)
    else:
        kind = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[entry.kind]
        values = torch.from_numpy(entry.data.reshape(entry.shape[0], -1)[rows]).view(kind)
    return values.to(dtype).reshape(*index.shape, entry.shape[1])


def integers(entry: TensorEntry) -> torch.Tensor:
    """A table of numbers as int64, in memory of its own; its kind must be `I64` or `I32`."""
    if entry.problem:
        raise ConfigError(entry.problem)
    if entry.kind not in INTEGER_KINDS:
        raise ConfigError(f"{entry.file}: tensor {entry.stored_name} has type {entry.kind}, expected I64 or I32")
    kind = torch.int64 if entry.kind == "I64" else torch.int32
    return torch.from_numpy(entry.data.copy()).view(kind).reshape(entry.shape).to(torch.int64)


def _dequantized(entry: TensorEntry, rows: np.ndarray) -> torch.Tensor:
    """Some rows in float32.  rows: [n] int64."""
    assert entry.scales is not None
    stored = torch.from_numpy(entry.data.reshape(entry.shape[0], -1)[rows])
    if entry.kind == "F4_E2M1":
        values = _e2m1(stored)
    else:
        _refuse(entry, (stored & 0x7F) == 0x7F, rows, "no number")
        values = _e4m3(stored)
    height, width = entry.scales.block
    # A row of scales is read once, not once for each of the rows that share it.
    grid_rows, which = np.unique(rows // height, return_inverse=True)
    scales = _scales(entry, entry.scales, grid_rows)[torch.from_numpy(which)]
    columns = entry.shape[1]
    whole = columns // width * width
    values[:, :whole].unflatten(1, (-1, width)).mul_(scales[:, : columns // width, None])
    values[:, whole:].mul_(scales[:, columns // width :])
    if not bool((scales * _LARGEST[entry.kind]).isfinite().all()):
        _refuse(entry, ~values.isfinite(), rows, "beyond float32")
    return values


# Both small formats are float16 with fewer bits: moved to its places their exponent is off by a constant. torch's own
# cast from e4m3 gives the same numbers; reading a matrix took three times as long with it.


def _e4m3(stored: torch.Tensor) -> torch.Tensor:
    """[n, columns] uint8 -> float32; NaN is not looked for."""
    wide = stored.to(torch.int16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(torch.float16).float().mul_(2.0**8)


def _e2m1(stored: torch.Tensor) -> torch.Tensor:
    """[n, bytes] uint8 -> [n, 2 bytes] float32, the low half first."""
    wide = stored.to(torch.int16)
    halves = torch.stack((wide & 15, wide >> 4), -1).flatten(1)
    return ((halves & 8) << 12 | (halves & 7) << 9).view(torch.float16).float().mul_(2.0**14)


def _refuse(entry: TensorEntry, wrong: torch.Tensor, rows: np.ndarray, what: str) -> None:
    """ConfigError if any of `wrong` [n, columns] is set.  rows: their numbers."""
    if not bool(wrong.any()):
        return
    row, column = (int(i) for i in wrong.nonzero()[0])
    assert entry.scales is not None
    raise ConfigError(
        f"{entry.file}: tensor {entry.stored_name} ({entry.kind} {entry.shape}) is {what} at "
        f"[{int(rows[row])}, {column}], with scales {entry.scales.stored_name} {entry.scales.shape}"
    )


def _scales(entry: TensorEntry, scales: Scales, rows: np.ndarray) -> torch.Tensor:
    """Rows of the grid of scales: [n, grid columns] float32."""
    stored = torch.from_numpy(scales.data.reshape(scales.shape[0], -1)[rows])
    values = stored.view(torch.float32) if scales.kind == "F32" else stored.view(torch.float8_e8m0fnu).float()
    if not bool(values.isfinite().all()):
        row, column = (int(i) for i in (~values.isfinite()).nonzero()[0])
        raise ConfigError(
            f"{entry.file}: scale {scales.stored_name} {scales.shape} of tensor {entry.stored_name} {entry.shape} "
            f"is no finite number at [{int(rows[row])}, {column}]"
        )
    return values
