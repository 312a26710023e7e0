"""A GGUF file: metadata, mapped tensors, and the model config that its metadata means.

The container is parsed here rather than by gguf's reader, which builds an array object for each of a vocabulary's
strings (seconds, and 100 MB in every process that only wants the tokenizer); types and block sizes are the library's.
Torch-free. A file that is cut, malformed or of an unsupported kind raises ConfigError naming what was found.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from tailrace.model.config import ModelConfig, Rope, RopeKind, checked_layers
from tailrace.model.config_keys import yarn_mscale
from tailrace.model.errors import ConfigError
from tailrace.model.tensors import MappedFile, TensorEntry, TensorTable, expected_shapes

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
MAX_ITEMS = 10_000_000
DEFAULT_MISTRAL_WINDOW = 4096

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}

_STORED_PARTS = {
    "attn_norm": "input_norm",
    "ffn_norm": "post_norm",
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_output": "o_proj",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_gate": "gate_proj",
    "ffn_up": "up_proj",
    "ffn_down": "down_proj",
}
_STORED_TOP = {"token_embd": "embed", "output_norm": "norm", "output": "lm_head"}
_ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """kind: type name; shape: row-major (the file lists it reversed); data: flat bytes, mapped."""

    kind: str
    shape: tuple[int, ...]
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: key -> number, bool, text, or list of one of these."""

    mapped: MappedFile
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def path(self) -> Path:
        return self.mapped.path


class _Cursor:
    """Reads little-endian values one after another and refuses to run past the end."""

    def __init__(self, data: np.ndarray, path: Path) -> None:
        self.view, self.offset, self.path = data.data, 0, path

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if size < 0 or end > len(self.view):
            raise ConfigError(f"{self.path}: cut off: {size} bytes wanted at {self.offset} of {len(self.view)}")
        part = self.view[self.offset : end]
        self.offset = end
        return part

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, what: str) -> int:
        value = self.number("Q")
        if value > MAX_ITEMS:
            raise ConfigError(f"{self.path}: {value} {what} is more than {MAX_ITEMS}: not a GGUF file or damaged")
        return value

    def text(self) -> str:
        start = self.offset
        raw = self.take(self.number("Q"))
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self.path}: text at byte {start} is not UTF-8: {error}") from error

    def value_type(self) -> GGUFValueType:
        code = self.number("I")
        try:
            return GGUFValueType(code)
        except ValueError:
            raise ConfigError(f"{self.path}: unknown value type {code} at byte {self.offset}") from None

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is not GGUFValueType.ARRAY:
            return self.number(_SCALARS[kind])
        item, length = self.value_type(), self.count("array items")
        if item is GGUFValueType.STRING:
            return [self.text() for _ in range(length)]
        if item is GGUFValueType.ARRAY:
            raise ConfigError(f"{self.path}: arrays of arrays at byte {self.offset} are not supported")
        code = f"<{length}{_SCALARS[item]}"
        return list(struct.unpack(code, self.take(struct.calcsize(code))))


def read_gguf(path: Path) -> GgufFile:
    """Parse the header and map the tensors of one file."""
    mapped = MappedFile(path)
    data = mapped.data
    cursor = _Cursor(data, path)
    magic, version = bytes(cursor.take(4)), cursor.number("I")
    if magic != b"GGUF":
        raise ConfigError(f"{path}: not a GGUF file (it starts with {magic!r})")
    if version not in (2, 3):
        raise ConfigError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian)")
    num_tensors, num_keys = cursor.count("tensors"), cursor.count("keys")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.value_type())
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{path}: split over {metadata['split.count']} files; merge it into one first")
    infos = []
    for _ in range(num_tensors):
        name, num_dims = cursor.text(), cursor.number("I")
        if num_dims > 4:
            raise ConfigError(f"{path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
        infos.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ConfigError(f"{path}: general.alignment is {alignment!r}")
    base = -(-cursor.offset // alignment) * alignment
    tensors = {
        name: _map_tensor(path, data, name, shape, type_id, base + offset) for name, shape, type_id, offset in infos
    }
    return GgufFile(mapped, metadata, tensors)


def _map_tensor(path: Path, data: np.ndarray, name: str, shape: tuple[int, ...], type_id: int, at: int) -> StoredTensor:
    try:
        quantization = GGMLQuantizationType(type_id)
    except ValueError:
        raise ConfigError(f"{path}: tensor {name} has unknown type {type_id}") from None
    if quantization.name not in KINDS:
        raise ConfigError(
            f"{path}: tensor {name} has type {quantization.name}, which is not supported; supported: {', '.join(KINDS)}"
        )
    block, block_bytes = GGML_QUANT_SIZES[quantization]
    columns = shape[-1] if shape else 0
    if columns < 1 or columns % block:
        raise ConfigError(
            f"{path}: tensor {name} {shape} has rows that are no multiple of {quantization.name}'s {block}"
        )
    size = math.prod(shape) // block * block_bytes
    if at + size > len(data):
        raise ConfigError(f"{path}: cut off: tensor {name} ends at byte {at + size} of {len(data)}")
    return StoredTensor(quantization.name, shape, data[at : at + size])


class _Keys:
    """Metadata of one architecture, with messages that name file and key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def number(self, key: str, default: float | None = None) -> float:
        value = self._file.metadata.get(f"{self._prefix}.{key}", default)
        if value is None:
            raise ConfigError(f"{self._file.path}: {self._prefix}.{key} is missing")
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # a list with one entry a layer
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(
                f"{self._file.path}: {self._prefix}.{key} is {value!r}, expected one number for all layers"
            )
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.number(key, default))

    def text(self, key: str, default: str) -> str:
        return str(self._file.metadata.get(f"{self._prefix}.{key}", default))


def parse_config(file: GgufFile) -> ModelConfig:
    """ModelConfig from metadata; what metadata leaves open (biases, tying) is read off the tensors that are there."""
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path}: architecture {architecture!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
        )
    keys = _Keys(file, architecture)
    if keys.integer("expert_count", 0):
        raise ConfigError(f"{file.path}: architecture {architecture} with mixture of experts is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{file.path}: tensor token_embd.weight is missing")
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    layers = checked_layers(keys.integer("block_count"), str(file.path))
    head_dim = keys.integer("attention.key_length", hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise ConfigError(
                f"{file.path}: {architecture}.{key} is {keys.integer(key)}, only the head size {head_dim} is supported"
            )
    window = keys.integer("attention.sliding_window", DEFAULT_MISTRAL_WINDOW if architecture == "mistral" else 0)
    return ModelConfig(
        family=architecture,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=keys.integer("context_length"),
        rms_norm_eps=float(keys.number("attention.layer_norm_rms_epsilon")),
        rope=_parse_rope(file, keys),
        windows=(window or None,) * layers,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
    )


def _parse_rope(file: GgufFile, keys: _Keys) -> Rope:
    theta = float(keys.number("rope.freq_base", 10000.0))
    name = keys.text("rope.scaling.type", "none")
    divisors = file.tensors.get(_ROPE_DIVISORS)
    if divisors is not None:
        if divisors.kind != "F32" or name != "none":
            raise ConfigError(f"{file.path}: {_ROPE_DIVISORS} ({divisors.kind}) beside rope scaling {name!r}")
        return Rope(RopeKind.FACTORS, theta, divisors=tuple(divisors.data.view("<f4").tolist()))
    if name == "none":
        return Rope(theta=theta)
    factor = float(keys.number("rope.scaling.factor", 1.0))
    if name == "linear":
        return Rope(RopeKind.LINEAR, theta, factor=factor)
    if name != "yarn":
        raise ConfigError(f"{file.path}: rope scaling {name!r} is not supported; supported: none, linear, yarn")
    return Rope(
        RopeKind.YARN,
        theta,
        factor=factor,
        original_max_position=keys.integer("rope.scaling.original_context_length", keys.integer("context_length")),
        beta_fast=float(keys.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(keys.number("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=yarn_mscale(factor, 1.0) * float(keys.number("rope.scaling.attn_factor", 1.0)),
    )


def tensor_table(file: GgufFile, config: ModelConfig) -> TensorTable:
    """Table by canonical name. A tensor that the decoder would ignore is refused: the answers would be wrong."""
    entries = []
    for stored_name, tensor in file.tensors.items():
        if stored_name == _ROPE_DIVISORS or stored_name.endswith(".attn_rot_embd.weight"):
            continue
        name = _canonical_name(stored_name)
        if name is None:
            raise ConfigError(f"{file.path}: tensor {stored_name} is not known in a {config.family} model")
        interleaved = 0
        # llama.cpp's converter stores q and k of this one architecture in its interleaved rotary order.
        if config.family == "llama" and ".q_proj." in name:
            interleaved = config.num_heads
        elif config.family == "llama" and ".k_proj." in name:
            interleaved = config.num_kv_heads
        if interleaved and (tensor.shape[0] != interleaved * config.head_dim):
            raise ConfigError(f"{file.path}: tensor {stored_name} has shape {tensor.shape}, not {interleaved} heads")
        entries.append(TensorEntry(name, stored_name, tensor.shape, tensor.kind, tensor.data, interleaved))
    return TensorTable(entries, [file.mapped], str(file.path), expected_shapes(config))


def _canonical_name(stored: str) -> str | None:
    part, _, leaf = stored.rpartition(".")
    if leaf not in ("weight", "bias"):
        return None
    if part in _STORED_TOP:
        return f"{_STORED_TOP[part]}.{leaf}"
    prefix, _, rest = part.partition(".")
    index, _, part = rest.partition(".")
    if prefix != "blk" or not index.isdigit() or part not in _STORED_PARTS:
        return None
    return f"layers.{index}.{_STORED_PARTS[part]}.{leaf}"


def eos_ids(file: GgufFile) -> list[int]:
    """Ids that end a generation: end of sequence, of turn, of message."""
    keys = [f"tokenizer.ggml.{k}_token_id" for k in ("eos", "eot", "eom")]
    return sorted({int(file.metadata[k]) for k in keys if k in file.metadata})


def chat_template(file: GgufFile) -> str | None:
    """The default template; None if the file has none."""
    value = file.metadata.get("tokenizer.chat_template")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{file.path}: tokenizer.chat_template is a {type(value).__name__}, expected text")
    return value
