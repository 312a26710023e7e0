"""A checkpoint's tensors before anything is read of them: names, shapes, storage types, and raw bytes on demand.

Names are canonical, whatever the file called them; both file formats hand over this one table. Torch-free, so that a
revision and sizes can be derived where no torch is loaded.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tailrace.model.config import ModelConfig
from tailrace.model.errors import ConfigError

SAMPLE_BYTES = 256


class MappedFile:
    """A file's bytes, read through a mapping.  data: flat uint8, read-only."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if the file is absent, empty or cannot be read."""
        try:
            with path.open("rb") as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
        self.path = path
        self.data = np.frombuffer(self._memory, dtype=np.uint8)

    def drop_pages(self) -> None:
        """Give back the memory of what was read; a later read fetches it from the file again."""
        self._memory.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True)
class Scales:
    """What a quantized matrix is multiplied with: one number for each `block` of it, in a grid of `shape`.

    Attributes:
        stored_name: what the file calls it, for messages.
        kind: `F32`, or `F8_E8M0`: a byte is an exponent of 2 with a bias of 127, and 255 is no number.
        shape: (rows / block[0], columns / block[1]) of the matrix, rounded up.
        data: the stored bytes, flat uint8, a read-only view into a mapped file.
        block: (rows, columns) of the matrix that share one; the last of either side may be short.
    """

    stored_name: str
    kind: str
    shape: tuple[int, int]
    data: np.ndarray
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor.

    Attributes:
        name: canonical, e.g. `layers.3.q_proj.weight`.
        stored_name: what the file calls it, for messages.
        shape: logical, row-major: a weight is (out_features, in_features).
        kind: storage type: `F32 F16 BF16`, a file's block type `Q8_0 Q4_0 Q4_1 Q4_K Q6_K`, with scales beside it
            `F8_E4M3 F4_E2M1` (two a byte), or a table of numbers `I64 I32`.
        data: the stored bytes, flat uint8, a read-only view into the mapped file.
        interleaved_heads: above 0 where rows are stored in the interleaved rotary order, of so many heads.
        scales: of `F8_E4M3` and `F4_E2M1`, None for every other kind.
        file: where it lies, for messages.
        problem: why it cannot be read, naming file and shapes; empty if it can.
    """

    name: str
    stored_name: str
    shape: tuple[int, ...]
    kind: str
    data: np.ndarray
    interleaved_heads: int = 0
    scales: Scales | None = None
    file: str = ""
    problem: str = ""

    @property
    def num_bytes(self) -> int:
        """Of the file, scales included."""
        return int(self.data.size) + (0 if self.scales is None else int(self.scales.data.size))

    def rows(self) -> np.ndarray:
        """[rows, bytes a row] uint8 (a vector: one element a row), with rows in the half-split rotary order."""
        rows = self.data.reshape(self.shape[0], -1)
        if not self.interleaved_heads:
            return rows
        pairs = rows.reshape(self.interleaved_heads, -1, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def sample(self) -> bytes:
        """Some bytes from the middle: enough to tell two fine-tunes of one model apart without reading either."""
        parts = [self.data] if self.scales is None else [self.data, self.scales.data]
        return b"".join(part[part.size // 2 :][:SAMPLE_BYTES].tobytes() for part in parts)


class TensorTable(Mapping[str, TensorEntry]):
    """Entries by canonical name, checked against a model: nothing missing, nothing of a wrong shape."""

    def __init__(
        self,
        entries: Sequence[TensorEntry],
        files: Sequence[MappedFile],
        where: str,
        expected: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """Raise ConfigError naming the first tensor that is missing or has another shape.

        Args:
            entries: what the files hold; entries that are not expected are left out.
            files: all files that the entries' bytes lie in.
            where: the file or directory, for messages.
            expected: logical shape of every tensor that the model needs. None: all entries are kept, and whoever takes
                one asks by `required`.
        """
        self._where = where
        self._files = tuple(files)
        self._entries: dict[str, TensorEntry] = {e.name: e for e in entries}
        if expected is not None:
            self._entries = {name: self.required(name, shape) for name, shape in expected.items()}

    @property
    def directory(self) -> Path:
        """Where the files lie, of which there is one at least."""
        return self._files[0].path.parent

    def drop_pages(self) -> None:
        """Give back the memory of mapped bytes, once weights are loaded."""
        for file in self._files:
            file.drop_pages()

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def required(self, name: str, shape: Sequence[int] | None = None) -> TensorEntry:
        """The entry of this name; ConfigError if it is missing, cannot be read, or has another shape than `shape`."""
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"{self._where}: tensor {name} is missing")
        if entry.problem:
            raise ConfigError(entry.problem)
        if shape is not None and entry.shape != tuple(shape):
            where = entry.file or self._where
            raise ConfigError(f"{where}: tensor {entry.stored_name} has shape {entry.shape}, expected {tuple(shape)}")
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum(e.num_bytes for e in self._entries.values())

    def digest(self) -> bytes:
        """Hash over names, shapes, types, sizes and a sample of each tensor; fast, as most bytes are not read."""
        h = hashlib.sha256()
        for name in sorted(self._entries):
            e = self._entries[name]
            h.update(f"{name} {e.shape} {e.kind} {e.num_bytes}\n".encode())
            h.update(e.sample())
        return h.digest()


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by canonical name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        p = f"layers.{i}."
        shapes[p + "input_norm.weight"] = (hidden,)
        shapes[p + "post_norm.weight"] = (hidden,)
        rows = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        for name, out in rows.items():
            shapes[p + name + ".weight"] = (out, hidden)
            if config.qkv_bias:
                shapes[p + name + ".bias"] = (out,)
        shapes[p + "o_proj.weight"] = (hidden, config.q_size)
        if config.o_bias:
            shapes[p + "o_proj.bias"] = (hidden,)
        if config.qk_norm:
            shapes[p + "q_norm.weight"] = shapes[p + "k_norm.weight"] = (config.head_dim,)
        mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        for name, (out, columns) in mlp.items():
            shapes[p + name + ".weight"] = (out, columns)
            if config.mlp_bias:
                shapes[p + name + ".bias"] = (out,)
    return shapes
