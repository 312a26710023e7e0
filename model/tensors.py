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
class TensorEntry:
    """One stored tensor.

    Attributes:
        name: canonical, e.g. `layers.3.q_proj.weight`.
        stored_name: what the file calls it, for messages.
        shape: logical, row-major: a weight is (out_features, in_features).
        kind: storage type: `F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q4_K Q6_K`.
        data: the stored bytes, flat uint8, a read-only view into the mapped file.
        interleaved_heads: above 0 where rows are stored in the interleaved rotary order, of so many heads.
    """

    name: str
    stored_name: str
    shape: tuple[int, ...]
    kind: str
    data: np.ndarray
    interleaved_heads: int = 0

    @property
    def num_bytes(self) -> int:
        return int(self.data.size)

    def rows(self) -> np.ndarray:
        """[rows, bytes a row] uint8 (a vector: one element a row), with rows in the half-split rotary order."""
        rows = self.data.reshape(self.shape[0], -1)
        if not self.interleaved_heads:
            return rows
        pairs = rows.reshape(self.interleaved_heads, -1, 2, rows.shape[1])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def sample(self) -> bytes:
        """Some bytes from the middle: enough to tell two fine-tunes of one model apart without reading either."""
        middle = self.num_bytes // 2
        return self.data[middle : middle + SAMPLE_BYTES].tobytes()


class TensorTable(Mapping[str, TensorEntry]):
    """Entries by canonical name, checked against the config: nothing missing, nothing of a wrong shape."""

    def __init__(self, entries: Sequence[TensorEntry], files: Sequence[MappedFile], config: ModelConfig) -> None:
        """Raise ConfigError naming the first tensor that is missing or has another shape.

        Args:
            entries: what the files hold; entries that this config does not use are left out.
            files: all files that the entries' bytes lie in.
        """
        where = ", ".join(str(f.path) for f in files)
        found = {e.name: e for e in entries}
        self._files = tuple(files)
        self._entries: dict[str, TensorEntry] = {}
        for name, shape in expected_shapes(config).items():
            entry = found.get(name)
            if entry is None:
                raise ConfigError(f"{where}: tensor {name} is missing")
            if entry.shape != shape:
                raise ConfigError(f"{where}: tensor {entry.stored_name} has shape {entry.shape}, expected {shape}")
            self._entries[name] = entry

    def drop_pages(self) -> None:
        """Give back the memory of mapped bytes, once weights are loaded."""
        for file in self._files:
            file.drop_pages()

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

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
