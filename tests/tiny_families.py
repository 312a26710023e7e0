"""Tiny random checkpoints of every family with rows of its own, with the tiny tokenizer: what serving tests run on.

    write_tiny_family(tmp_path / "m", "v4")          # one of FAMILIES, or v41-draft, whose draft stages are often right

Windows, ratios and top-k are small, so that a prompt of a hundred tokens passes them all; nothing stays at an init of
zero or one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import BOS, CHAT_TEMPLATE, EOS, EOS_ID, IM_END_ID, VOCAB_SIZE, tiny_tokenizer_json
from mla_checkpoints import write_tiny_mla
from safetensors.torch import save_file

from tailrace.model import csa2_config, csa_config, csa_tensors
from tests.model.csa2_models import DRAFT, ENGRAM, PLAIN, knowing_tensors, random_tensors
from tests.model.csa_models import tiny_config

FAMILIES = ("v3", "v32", "v4", "v41", "v41-engram")
RATIOS = {"v3": (1,), "v32": (1,), "v4": (4, 16), "v41": (1, 2), "v41-engram": (1, 2)}
WINDOWS = {"v4": 8, "v41": 16, "v41-engram": 16}
_CLASSES = 300


def write_tiny_family(directory: Path, family: str, seed: int = 1) -> Path:
    """Write a checkpoint and return its directory."""
    if family in ("v3", "v32"):
        return write_tiny_mla(directory, f"deepseek_{family}", seed=seed, max_position_embeddings=1024)
    directory.mkdir(parents=True, exist_ok=True)
    if family == "v4":
        raw = tiny_config("WWCHC", vocab_size=VOCAB_SIZE)
        config = csa_config.parse_config(raw, "tiny")
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            name: _random_v4(name, shape, config.num_experts, generator)
            for name, shape in csa_tensors.tensor_shapes(config)
        }
    else:
        raw = {"v41": PLAIN, "v41-engram": ENGRAM, "v41-draft": DRAFT}[family]
        raw = raw | {"vocab_size": VOCAB_SIZE, "image_token_id": 3}
        if family != "v41":
            raw |= {"engram_compressed_vocab_size": _CLASSES}
            rng = np.random.default_rng(5)
            classes = [*range(_CLASSES), *rng.integers(0, _CLASSES, VOCAB_SIZE - _CLASSES).tolist()]
            (directory / "engram_token_map.json").write_text(json.dumps(classes))
        csa2_config.parse_config(raw, "tiny")
        if family == "v41-draft":
            raw |= {"dspark_markov_rank": raw["hidden_size"]}
        tensors = (knowing_tensors if family == "v41-draft" else random_tensors)(raw, seed)
        tensors["head.weight"] = tensors["head.weight"] * 3
    (directory / "config.json").write_text(json.dumps(raw, indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_ID, IM_END_ID]}))
    (directory / "tokenizer.json").write_text(tiny_tokenizer_json())
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT_TEMPLATE}))
    save_file(
        {n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


def _random_v4(name: str, shape: tuple[int, ...], num_experts: int, generator: torch.Generator) -> torch.Tensor:
    if name.endswith("tid2eid"):
        chosen = [torch.randperm(num_experts, generator=generator)[: shape[1]] for _ in range(shape[0])]
        return torch.stack(chosen)
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("scale"):
        return 1 + 0.3 * noise
    if name.endswith(("base", "attn_sink", "ape")) or name == "embed.weight":
        return noise
    if name.endswith("gate.bias"):
        return 0.2 * noise
    return (1 if name.endswith("_fn") else 4 if name == "head.weight" else 2) * noise * shape[-1] ** -0.5
