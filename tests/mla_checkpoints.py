"""Tiny random checkpoints of DeepSeek V3 and V3.2 in Hugging Face form, scaled as tests/checkpoints.py scales its own.

Every parameter that transformers would initialise to zero or one is random too: norms, the index key's norm with its
bias, the experts' correction bias.

    write_tiny_mla(tmp_path / "m", "deepseek_v32")
    write_tiny_mla(tmp_path / "m", "deepseek_v3", q_lora_rank=None, seed=7)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import BOS_ID, EOS_ID, IM_END_ID, VOCAB_SIZE, tiny_tokenizer_json
from safetensors.torch import load_file, save_file

_YARN = {
    "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    "mscale": 1.0, "mscale_all_dim": 0.8,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_theta": 10000.0, "rope_scaling": _YARN, "max_position_embeddings": 256, "rms_norm_eps": 1e-3,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 0,
    "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "torch_dtype": "float32",
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"]},
    "deepseek_v32": {
        "architectures": ["DeepseekV32ForCausalLM"], "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    },
}  # fmt: skip


def tiny_mla_config(family: str, **overrides: object) -> dict[str, Any]:
    """config.json of a tiny model. `family`: deepseek_v3 | deepseek_v32."""
    return _COMMON | {"model_type": family} | _OWN[family] | overrides


def write_tiny_mla(
    directory: Path, family: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, **overrides: object
) -> Path:
    """Write a checkpoint and return its directory.

    Args:
        directory: made if absent.
        family: deepseek_v3 | deepseek_v32.
        seed: of the weights.
        dtype: storage dtype of the weights.
        overrides: config.json keys.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_mla_config(family, **overrides)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, IM_END_ID]}))
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json())
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    tensors = {name: value.to(dtype).contiguous() for name, value in tiny_mla_weights(config, seed).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_knowing_mla(directory: Path, family: str) -> Path:
    """A checkpoint whose next word hangs on the last one most, and whose draft block knows that: it is often right."""
    write_tiny_mla(directory, family, num_nextn_predict_layers=1)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.1
    tensors["model.layers.3.enorm.weight"] = torch.ones(64)
    tensors["model.layers.3.eh_proj.weight"] = torch.cat((torch.eye(64), 0.1 * torch.eye(64)), 1)
    tensors["model.layers.3.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def tiny_mla_weights(c: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Tensors by the checkpoints' names, float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def matrix(out: int, into: int, gain: float = 1.0) -> torch.Tensor:
        return normal(out, into, std=gain / into**0.5)

    def norm(dim: int) -> torch.Tensor:
        return 1.0 + normal(dim, std=0.2)

    def mlp(prefix: str, inner: int) -> dict[str, torch.Tensor]:
        return {
            prefix + "gate_proj.weight": matrix(inner, hidden, 1.5),
            prefix + "up_proj.weight": matrix(inner, hidden, 1.5),
            prefix + "down_proj.weight": matrix(hidden, inner, 1.5),
        }

    def attention(a: str) -> dict[str, torch.Tensor]:
        heads, rank, rope = c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
        q_rows = heads * (c["qk_nope_head_dim"] + rope)
        found = {
            a + "kv_a_proj_with_mqa.weight": matrix(rank + rope, hidden, 1.5),
            a + "kv_a_layernorm.weight": norm(rank),
            a + "kv_b_proj.weight": matrix(heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank, 1.4),
            a + "o_proj.weight": matrix(hidden, heads * c["v_head_dim"], 1.5),
        }
        if c["q_lora_rank"] is None:
            found[a + "q_proj.weight"] = matrix(q_rows, hidden, 1.4)
        else:
            found[a + "q_a_proj.weight"] = matrix(c["q_lora_rank"], hidden)
            found[a + "q_a_layernorm.weight"] = norm(c["q_lora_rank"])
            found[a + "q_b_proj.weight"] = matrix(q_rows, c["q_lora_rank"], 1.4)
        if c["attention_bias"]:
            for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
                if f"{a}{name}.weight" in found:
                    found[f"{a}{name}.bias"] = normal(len(found[f"{a}{name}.weight"]), std=0.3)
        if "index_topk" in c:
            dim = c["index_head_dim"]
            found[a + "indexer.wq_b.weight"] = matrix(c["index_n_heads"] * dim, c["q_lora_rank"])
            found[a + "indexer.wk.weight"] = matrix(dim, hidden)
            found[a + "indexer.k_norm.weight"] = norm(dim)
            found[a + "indexer.k_norm.bias"] = normal(dim, std=0.5)
            found[a + "indexer.weights_proj.weight"] = matrix(c["index_n_heads"], hidden)
        return found

    def block(p: str, is_sparse: bool) -> dict[str, torch.Tensor]:
        found = {p + "input_layernorm.weight": norm(hidden), p + "post_attention_layernorm.weight": norm(hidden)}
        found |= attention(p + "self_attn.")
        if not is_sparse:
            return found | mlp(p + "mlp.", c["intermediate_size"])
        inner = c["moe_intermediate_size"]
        found[p + "mlp.gate.weight"] = matrix(c["n_routed_experts"], hidden)
        found[p + "mlp.gate.e_score_correction_bias"] = normal(c["n_routed_experts"], std=0.2)
        for i in range(c["n_routed_experts"]):
            found |= mlp(f"{p}mlp.experts.{i}.", inner)
        if c["n_shared_experts"]:
            found |= mlp(p + "mlp.shared_experts.", inner * c["n_shared_experts"])
        return found

    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    tensors = {
        "model.embed_tokens.weight": normal(c["vocab_size"], hidden, std=1.0),
        "model.norm.weight": norm(hidden),
        "lm_head.weight": matrix(c["vocab_size"], hidden, 2.0),
    }
    if c["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
        tensors["model.norm.weight"] *= 2.0 / hidden**0.5
    for i in range(layers):
        tensors |= block(f"model.layers.{i}.", i >= c["first_k_dense_replace"])
    for i in range(layers, layers + c["num_nextn_predict_layers"]):
        p = f"model.layers.{i}."
        tensors |= block(p, True) | {p + "enorm.weight": norm(hidden), p + "hnorm.weight": norm(hidden)}
        tensors |= {p + "eh_proj.weight": matrix(hidden, 2 * hidden), p + "shared_head.norm.weight": norm(hidden)}
    return tensors
