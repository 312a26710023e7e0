"""Tiny random checkpoints in Hugging Face form, written without transformers so that writing one takes milliseconds.

The weights are scaled so that greedy output varies and depends on every cached row: a usual random initialisation emits
one constant token, behind which a corrupt page hides. Each comes with a real byte-level BPE tokenizer (512 ids, every
byte covered) and a ChatML template. The same (family, overrides) gives the same files everywhere.

    write_tiny_checkpoint(tmp_path / "m", "qwen3")
    write_tiny_checkpoint(tmp_path / "m", "mistral", sliding_window=8, num_hidden_layers=3, seed=7, shards=2)
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 0, 1, 2, 3
VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "torch_dtype": "float32",
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
_YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0},
    "llama3": {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE},
    "llama-linear": {
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "llama-yarn": {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": _YARN_ROPE},
    "mistral": {"model_type": "mistral", "rope_theta": 10000.0, "sliding_window": 24},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1000000.0},
    "qwen2-window": {
        "model_type": "qwen2",
        "rope_theta": 1000000.0,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "qwen3": {"model_type": "qwen3", "rope_theta": 1000000.0},
}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_TRAINING_TEXT = """
The river turns below the old mill, and the water that has passed the wheel is called the tail race. Every morning the
miller opened the gate, counted the turns of the stone, and wrote the number of sacks in a small brown book. When the
rain came the river rose, the wheel went faster, and there was more flour than anyone in the valley could carry home.
What is the capital of France? The capital of France is Paris. What is two plus two? Two plus two is four. Please write
a short story about a young engineer who builds a bridge between two islands, and explain how she measured the current.
def count(words: list[str]) -> dict[str, int]:
    result = {}
    for word in words:
        result[word] = result.get(word, 0) + 1
    return result
for (int i = 0; i < 1024; i++) { total += values[i] * 2; }
SELECT name, price FROM products WHERE price > 10.50 ORDER BY name; 1234567890 2024-05-17 3.14159 https://example.org/
You are a helpful assistant. Answer the question. Tell me about the history of the city, its people and their work.
Grüße aus München, señor, ça va très bien; привет мир, 你好，世界, こんにちは, 안녕하세요, مرحبا, 🙂🚀👩‍🔬.
"""


@functools.cache
def tiny_tokenizer_json(*, add_bos: bool = False) -> str:
    """tokenizer.json of the tiny byte-level BPE: 4 special tokens, 256 bytes, the rest merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, IM_START, IM_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT.splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise AssertionError(f"the training text gives {tokenizer.get_vocab_size()} ids, not {VOCAB_SIZE}")
    if add_bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
                ),
            ]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer.to_str()


def write_tiny_checkpoint(
    directory: Path,
    family: str,
    *,
    seed: int = 1,
    shards: int = 1,
    add_bos: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: object,
) -> Path:
    """Write a checkpoint and return its directory.

    Args:
        directory: made if absent.
        family: a key of FAMILIES.
        seed: of the weights.
        shards: number of safetensors files; 1 is `model.safetensors` without an index.
        add_bos: the tokenizer puts BOS before each text.
        dtype: storage dtype of the weights.
        overrides: config.json keys, e.g. num_hidden_layers=3, tie_word_embeddings=True.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = _COMMON | FAMILIES[family] | overrides
    config["architectures"] = [_ARCHITECTURES[str(config["model_type"])]]
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, IM_END_ID]}))
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json(add_bos=add_bos))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    _save({k: v.to(dtype).contiguous() for k, v in tiny_weights(config, seed).items()}, directory, shards)
    return directory


def tiny_weights(config: dict[str, object], seed: int) -> dict[str, torch.Tensor]:
    """Tensors by Hugging Face name, float32.

    Every branch adds about as much as the residual stream holds, attention is peaked and differs by head, and the
    logits have a standard deviation near 4: the next token then depends on all of the past, and near ties are rare.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    def integer(key: str) -> int:
        value = config[key]
        assert isinstance(value, int)
        return value

    hidden, inner = integer("hidden_size"), integer("intermediate_size")
    heads, kv_heads, dim = integer("num_attention_heads"), integer("num_key_value_heads"), integer("head_dim")
    kind = config["model_type"]
    # Qwen3 norms q and k itself, so there the norm weights set how peaked attention is.
    peak = 1.0 if kind == "qwen3" else 1.6
    tensors = {
        "model.embed_tokens.weight": normal(integer("vocab_size"), hidden, std=1.0),
        "model.norm.weight": 1.0 + normal(hidden, std=0.1),
    }
    if config["tie_word_embeddings"]:
        tensors["model.norm.weight"] *= 4.0 / hidden**0.5
    else:
        tensors["lm_head.weight"] = normal(integer("vocab_size"), hidden, std=4.0 / hidden**0.5)
    for i in range(integer("num_hidden_layers")):
        p, a = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
        tensors[a + "q_proj.weight"] = normal(heads * dim, hidden, std=peak / hidden**0.5)
        tensors[a + "k_proj.weight"] = normal(kv_heads * dim, hidden, std=peak / hidden**0.5)
        tensors[a + "v_proj.weight"] = normal(kv_heads * dim, hidden, std=2.0 / hidden**0.5)
        tensors[a + "o_proj.weight"] = normal(hidden, heads * dim, std=2.0 / (heads * dim) ** 0.5)
        if kind == "qwen2" or config.get("attention_bias"):
            for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
                tensors[a + f"{name}_proj.bias"] = normal(rows, std=0.5)
        if config.get("attention_bias") and kind != "qwen2":
            tensors[a + "o_proj.bias"] = normal(hidden, std=0.2)
        if kind == "qwen3":
            tensors[a + "q_norm.weight"] = 1.6 + normal(dim, std=0.2)
            tensors[a + "k_norm.weight"] = 1.6 + normal(dim, std=0.2)
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            tensors[p + f"mlp.{name}_proj.weight"] = normal(rows, columns, std=2.0 / columns**0.5)
            if config.get("mlp_bias"):
                tensors[p + f"mlp.{name}_proj.bias"] = normal(rows, std=0.2)
        tensors[p + "input_layernorm.weight"] = 1.0 + normal(hidden, std=0.1)
        tensors[p + "post_attention_layernorm.weight"] = 1.0 + normal(hidden, std=0.1)
    return tensors


def _save(tensors: dict[str, torch.Tensor], directory: Path, shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        part = {n: tensors[n] for n in names if weight_map[n] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
