"""A Hugging Face model directory: config.json, safetensors (one file or sharded), tokenizer.json, chat template.

Reads headers and small JSON files only; tensors are mapped, not loaded. Torch-free. A directory that cannot be served
raises ConfigError naming the file and the key.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.model.config import ModelConfig, Rope, RopeKind, checked_layers
from tailrace.model.errors import ConfigError
from tailrace.model.tensors import MappedFile, TensorEntry, TensorTable

Json = dict[str, Any]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
KIND_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
MAX_HEADER_BYTES = 100_000_000

# Defaults of the families' own config classes, for keys that older files leave out.
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_DEFAULT_HEAD_DIM = {"qwen3": 128}
_DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}
_DEFAULT_WINDOW = 4096
_DEFAULT_WINDOW_LAYERS = 28

_STORED_PARTS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_proj": "q_proj",
    "self_attn.k_proj": "k_proj",
    "self_attn.v_proj": "v_proj",
    "self_attn.o_proj": "o_proj",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate_proj",
    "mlp.up_proj": "up_proj",
    "mlp.down_proj": "down_proj",
}


def read_json(path: Path, *, required: bool = False) -> Json:
    """The object in a JSON file; {} if the file is absent and not required. ConfigError if it is not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: not found") from None
        return {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def parse_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """ModelConfig from the object in config.json.

    Args:
        raw: config.json as parsed.
        where: the file, for messages.
    """
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{where}: architecture {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "?")
        raise ConfigError(
            f"{where}: quantization_config ({method}) is not supported; use a GGUF file or full precision"
        )
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{where}: hidden_act {activation!r} is not supported, only 'silu'")
    number = _Numbers(raw, where)
    hidden, heads = number.integer("hidden_size"), number.integer("num_attention_heads")
    layers = checked_layers(number.integer("num_hidden_layers"), where)
    bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    head_dim = number.integer("head_dim", _DEFAULT_HEAD_DIM.get(family, hidden // max(heads, 1)))
    # An explicit null means one kv head a head; an absent key means the family's own default.
    default_kv_heads = heads if "num_key_value_heads" in raw else _DEFAULT_KV_HEADS.get(family, heads)
    max_position = number.integer("max_position_embeddings", _DEFAULT_MAX_POSITION[family])
    return ModelConfig(
        family=family,
        vocab_size=number.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=number.integer("num_key_value_heads", default_kv_heads),
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=number.real("rms_norm_eps", 1e-6),
        rope=parse_rope(raw, max_position, where),
        windows=_windows(raw, family, layers, where),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


class _Numbers:
    """Typed look-ups that name the file and the key when they fail. `null` counts as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = raw, where

    def real(self, key: str, default: float | None = None) -> float:
        value = self._raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{self._where}: {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self._where}: {key} is {value!r}, expected a number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.real(key, default)
        if value != int(value):
            raise ConfigError(f"{self._where}: {key} is {value!r}, expected a whole number")
        return int(value)


def parse_rope(raw: Mapping[str, Any], max_position: int, where: str) -> Rope:
    """Rotary settings, from `rope_parameters` or the older `rope_scaling` beside `rope_theta`."""
    scaling = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ConfigError(f"{where}: rope_scaling is {scaling!r}, expected an object")
    if any(isinstance(v, dict) for v in scaling.values()):
        raise ConfigError(f"{where}: rope parameters that differ by layer type are not supported")
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    supported = [k.value for k in RopeKind if k is not RopeKind.FACTORS]
    if name not in supported:
        raise ConfigError(f"{where}: rope type {name!r} is not supported; supported: {', '.join(supported)}")
    number = _Numbers(scaling, f"{where}: rope")
    theta = number.real("rope_theta", _Numbers(raw, where).real("rope_theta", 10000.0))
    partial = number.real("partial_rotary_factor", _Numbers(raw, where).real("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ConfigError(f"{where}: partial_rotary_factor {partial} is not supported, only 1.0")
    original = raw.get("original_max_position_embeddings")
    if original is None:
        original = scaling.get("original_max_position_embeddings")
    original = _Numbers({"original_max_position_embeddings": original}, f"{where}: rope").integer(
        "original_max_position_embeddings", max_position
    )
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return Rope(theta=theta)
    if kind is RopeKind.LINEAR:
        return Rope(kind, theta, factor=number.real("factor"))
    if kind is RopeKind.LLAMA3:
        return Rope(
            kind,
            theta,
            factor=number.real("factor"),
            original_max_position=original,
            low_freq_factor=number.real("low_freq_factor"),
            high_freq_factor=number.real("high_freq_factor"),
        )
    factor = number.real("factor", max_position / original)
    return Rope(
        kind,
        theta,
        factor=factor,
        original_max_position=original,
        # A zero counts as unset, as it does for transformers.
        beta_fast=number.real("beta_fast", 32.0) or 32.0,
        beta_slow=number.real("beta_slow", 1.0) or 1.0,
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, number, factor),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], number: _Numbers, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return number.real("attention_factor")
    mscale, mscale_all_dim = number.real("mscale", 0.0), number.real("mscale_all_dim", 0.0)
    if mscale and mscale_all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much yarn sharpens attention for a context stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _windows(raw: Mapping[str, Any], family: str, layers: int, where: str) -> tuple[int | None, ...]:
    number = _Numbers(raw, where)
    if family == "mistral":
        window = number.integer("sliding_window") if raw.get("sliding_window", _DEFAULT_WINDOW) is not None else None
        return (window,) * layers
    if family == "llama" or not raw.get("use_sliding_window", False) or raw.get("sliding_window", 0) is None:
        return (None,) * layers
    window = number.integer("sliding_window", _DEFAULT_WINDOW)
    kinds = raw.get("layer_types")
    if kinds is None:
        first = number.integer("max_window_layers", _DEFAULT_WINDOW_LAYERS)
        return tuple(window if i >= first else None for i in range(layers))
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{where}: layer_types {kinds!r} must be {layers} of full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def canonical_name(stored: str) -> str | None:
    """Canonical name of a stored tensor; None for tensors that are derived (old rotary buffers) or not ours."""
    stored = stored.removeprefix("model.")
    fixed = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
    if stored in fixed:
        return fixed[stored]
    prefix, _, rest = stored.partition(".")
    index, _, rest = rest.partition(".")
    part, _, leaf = rest.rpartition(".")
    if prefix != "layers" or not index.isdigit() or part not in _STORED_PARTS or leaf not in ("weight", "bias"):
        return None
    return f"layers.{index}.{_STORED_PARTS[part]}.{leaf}"


def tensor_table(directory: Path, config: ModelConfig) -> TensorTable:
    """Table over all safetensors files of the directory, mapped."""
    index_path = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index_path.exists():
        weight_map = read_json(index_path, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index_path}: weight_map is missing")
        files: dict[str, list[str]] = {}
        for stored, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ConfigError(f"{index_path}: {stored} lies in {file!r}, expected a file of this directory")
            files.setdefault(file, []).append(stored)
    elif single.exists():
        files = {single.name: []}
    else:
        raise ConfigError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")
    entries, mapped = [], []
    for file, expected in files.items():
        mapped.append(MappedFile(directory / file))
        stored = _read_safetensors(mapped[-1])
        missing = [name for name in expected if name not in stored]
        if missing:
            raise ConfigError(f"{directory / file}: tensor {missing[0]} is missing, though the index names it")
        for stored_name, (kind, shape, data) in stored.items():
            name = canonical_name(stored_name)
            if name is None or (name == "lm_head.weight" and config.tie_embeddings):
                continue
            if kind not in KIND_BYTES:
                known = ", ".join(KIND_BYTES)
                raise ConfigError(f"{directory / file}: tensor {stored_name} has type {kind}; supported: {known}")
            entries.append(TensorEntry(name, stored_name, shape, kind, data))
    return TensorTable(entries, mapped, config)


def _read_safetensors(file: MappedFile) -> dict[str, tuple[str, tuple[int, ...], np.ndarray]]:
    """name -> (type, shape, flat bytes) of one file: 8 bytes header length, JSON header, tensor bytes."""
    path, data = file.path, file.data
    size = int.from_bytes(data[:8].tobytes(), "little")
    if len(data) < 8 or size > MAX_HEADER_BYTES or 8 + size > len(data):
        raise ConfigError(f"{path}: not a safetensors file (header of {size} bytes in a file of {len(data)})")
    try:
        header = json.loads(data[8 : 8 + size].tobytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
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
        expected = math.prod(shape) * KIND_BYTES[kind] if kind in KIND_BYTES else end - start
        if not 0 <= start <= end <= len(body) or end - start != expected or min(shape, default=1) < 1:
            raise ConfigError(f"{path}: tensor {name} ({kind} {shape}) lies at bytes {start}..{end} of {len(body)}")
        result[name] = (kind, shape, body[start:end])
    return result


def eos_ids(directory: Path, config: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: generation_config.json's, else config.json's. Empty if neither names any."""
    path = directory / "generation_config.json"
    for where, raw in ((path, read_json(path)), (directory / "config.json", config)):
        value = raw.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ConfigError(f"{where}: eos_token_id {value!r} is no token id")
        return ids
    return []


def tokenizer_config(directory: Path) -> Json:
    """tokenizer_config.json, over the special tokens that older checkpoints name in a file of their own."""
    return read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")


def chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Text of chat_template.jinja, else of chat_template.json, else tokenizer_config.json's (`default` of several)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error
    value = read_json(directory / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{directory}: chat_template is a {type(value).__name__}, expected text")
    return value
