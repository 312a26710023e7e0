"""Tiny GGUF files, written with gguf's own writer from the tiny random checkpoints, in llama.cpp's conventions.

write_tiny_gguf(tmp_path / "m.gguf", "llama", kind="Q4_1")
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from checkpoints import _COMMON, BOS_ID, CHAT_TEMPLATE, EOS_ID, FAMILIES, tiny_tokenizer_json, tiny_weights

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_TOP["lm_head.weight"] = "output.weight"


def stored_name(name: str) -> str:
    """Hugging Face tensor name -> GGUF tensor name."""
    if name in _TOP:
        return _TOP[name]
    _, _, index, rest = name.split(".", 3)
    part, _, leaf = rest.rpartition(".")
    return f"blk.{index}.{_NAMES[part]}.{leaf}"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rotary row order -> the interleaved one that llama.cpp's converter writes for `llama`."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_blocks(rows: int, columns: int, kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """Valid random blocks of a type that gguf cannot write: random codes, small finite float16 scales."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, columns // elements, size), dtype=np.uint8)
    scale = random.uniform(0.001, 0.01, (rows, columns // elements, 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q4_K":
        data[..., :4] = scale
    else:  # Q6_K: its scale stands last
        data[..., -2:] = scale[..., :2]
    return data.reshape(rows, -1)


def encode(tensor: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int = 0) -> np.ndarray:
    """A float32 matrix as raw bytes of `kind`; the K types get random blocks instead of its values."""
    if kind.name in ("Q4_K", "Q6_K"):
        return random_blocks(*tensor.shape, kind, seed)
    return gguf.quants.quantize(tensor, kind)


def write_tiny_gguf(
    path: Path,
    family: str,
    *,
    kind: str = "F32",
    seed: int = 1,
    pre: str = "gpt-2",
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    kinds: dict[str, str] | None = None,
    **overrides: object,
) -> Path:
    """Write a file and return its path.

    Args:
        path: file to write; its folder must exist.
        family: a key of checkpoints.FAMILIES whose rope is the default one.
        kind: storage type of matrices; vectors are F32.
        seed: of the weights: the same as write_tiny_checkpoint's for the same seed, family and overrides.
        pre: name of the pre-tokenizer.
        edit: called before writing, to add keys or tensors.
        kinds: storage type by stored name, instead of `kind`.
        overrides: config.json keys.
    """
    config = _COMMON | FAMILIES[family] | overrides
    architecture = str(config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, config)
    _write_tokenizer(writer, pre)
    if edit is not None:
        edit(writer)
    for i, (name, tensor) in enumerate(tiny_weights(config, seed).items()):
        stored, array = stored_name(name), tensor.numpy()
        if architecture == "llama" and "q_proj" in name:
            array = interleave(array, int(str(config["num_attention_heads"])))
        if architecture == "llama" and "k_proj" in name:
            array = interleave(array, int(str(config["num_key_value_heads"])))
        if array.ndim == 1:
            writer.add_tensor(stored, np.ascontiguousarray(array))
            continue
        quantization = gguf.GGMLQuantizationType[(kinds or {}).get(stored, kind)]
        writer.add_tensor(stored, encode(np.ascontiguousarray(array), quantization, i), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: dict[str, object]) -> None:
    def integer(key: str) -> int:
        return int(str(config[key]))

    writer.add_context_length(integer("max_position_embeddings"))
    writer.add_embedding_length(integer("hidden_size"))
    writer.add_block_count(integer("num_hidden_layers"))
    writer.add_feed_forward_length(integer("intermediate_size"))
    writer.add_head_count(integer("num_attention_heads"))
    writer.add_head_count_kv(integer("num_key_value_heads"))
    writer.add_key_length(integer("head_dim"))
    writer.add_value_length(integer("head_dim"))
    writer.add_rope_dimension_count(integer("head_dim"))
    writer.add_rope_freq_base(float(str(config["rope_theta"])))
    writer.add_layer_norm_rms_eps(float(str(config["rms_norm_eps"])))
    if config.get("sliding_window") and config["model_type"] == "mistral":
        writer.add_sliding_window(integer("sliding_window"))


def _write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    model = json.loads(tiny_tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def torch_dequantized(data: np.ndarray, kind: gguf.GGMLQuantizationType) -> torch.Tensor:
    """gguf's own decoding, the oracle."""
    return torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32))
