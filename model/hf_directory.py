"""A Hugging Face model directory: config.json, safetensors (one file or sharded), tokenizer.json, chat template.

Reads headers and small JSON files only; tensors are mapped, not loaded. Torch-free. A directory that cannot be served
raises ConfigError naming the file and the key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailrace.model import safetensors_files
from tailrace.model.config import ModelConfig, checked_layers
from tailrace.model.config_keys import Keys, parse_rope
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES as OWN_ROWS
from tailrace.model.tensors import TensorTable, expected_shapes

Json = dict[str, Any]
Block = tuple[int, int] | None

TOKEN_MAP_FILE = "engram_token_map.json"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

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
    except (OSError, ValueError, RecursionError) as error:
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
        known = ", ".join((*FAMILIES, *OWN_ROWS))
        raise ConfigError(f"{where}: architecture {family!r} is not supported; supported: {known}")
    safetensors_files.quantization_block(raw, where)
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"{where}: hidden_act {activation!r} is not supported, only 'silu'")
    number = Keys(raw, where)
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
        rms_norm_eps=number.real("rms_norm_eps", 1e-6, least=0),
        rope=parse_rope(raw, max_position, where),
        windows=_windows(raw, family, layers, where),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
    )


def _windows(raw: Mapping[str, Any], family: str, layers: int, where: str) -> tuple[int | None, ...]:
    number = Keys(raw, where)
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


def tensor_table(directory: Path, config: ModelConfig, block: Block = None) -> TensorTable:
    """What the config needs of the directory's safetensors files, by canonical name, mapped.

    `block`: as `safetensors_files.quantization_block` gives it.
    """
    entries, files = safetensors_files.read_entries(directory, block)
    named = [replace(entry, name=name) for entry in entries if (name := canonical_name(entry.stored_name)) is not None]
    return TensorTable(named, files, str(directory), expected_shapes(config))


def stored_tensors(directory: Path, block: Block = None) -> TensorTable:
    """All tensors under the names that the files give them, of whatever type: a family of its own reads them.

    Scales have no entries of their own. What is wrong with a tensor is said once it is asked for by `required`.
    """
    entries, files = safetensors_files.read_entries(directory, block)
    return TensorTable(entries, files, str(directory))


def with_text_config(raw: Mapping[str, Any]) -> Json:
    """`raw`, and what only the `text_config` within it says: models that also see nest their text model there."""
    text = raw.get("text_config")
    return {**(text if isinstance(text, dict) else {}), **raw}


def token_map_bytes(directory: Path) -> bytes:
    """engram_token_map.json as it is, empty if there is none: rows that two maps made must not be mixed."""
    path = directory / TOKEN_MAP_FILE
    try:
        return path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


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
