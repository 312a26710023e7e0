"""DeepSeek V4.1 as mlx-lm 0.32.2 (without Engram) and mlx-vlm 0.7.10 (with it) have it, on the same random weights.

Both round what their caches hold as the model does. mlx-vlm also rounds the inputs of its FP8 products to FP8, as GPU
kernels do, which neither mlx-lm nor this project does: that is switched off here and nowhere else. mlx-lm chooses with
`argpartition`, which leaves open who wins a tie; it is given a stable sort, which is what the reference does.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

Step = Callable[[Sequence[int]], torch.Tensor]
"""The next ids of one sequence -> logits of each, [n, vocab]."""


def mlx_lm_steps(raw: dict[str, Any], tensors: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> Step:
    """A sequence of mlx-lm's model; skips the test where mlx is not installed."""
    mx = pytest.importorskip("mlx.core", reason="the oracle needs mlx[cpu] and mlx-lm 0.32.2")
    module = _module("mlx_lm.models.deepseek_v41", "mlx_lm", "mlx_lm.models")
    patch.setattr(mx, "argpartition", lambda x, kth, axis=-1: mx.argsort(x, axis=axis))
    model = module.Model(module.ModelArgs.from_dict(raw))
    weights = {name: mx.array(x.numpy()) for name, x in tensors.items()}
    model.load_weights(list(model.sanitize(weights).items()))
    cache = model.make_cache()
    return lambda ids: torch.from_numpy(np.array(model(mx.array([list(ids)]), cache=cache)))[0]


def mlx_vlm_steps(
    raw: dict[str, Any], tensors: dict[str, torch.Tensor], token_map: np.ndarray | None, patch: pytest.MonkeyPatch
) -> Step:
    """A sequence of mlx-vlm's language model; skips the test where mlx is not installed."""
    mx = pytest.importorskip("mlx.core", reason="the oracle needs mlx[cpu] and mlx-vlm 0.7.10")
    packages = ("mlx_vlm", "mlx_vlm.models", "mlx_vlm.models.deepseek_v4", "mlx_vlm.models.deepseek_v41")
    module = _module("mlx_vlm.models.deepseek_v41.language", *packages)
    mx.disable_compile()  # it would compile C++ for every new shape
    rounded, head_dim = module.fake_quant_fp8_ue8m0, raw["head_dim"]  # no input of a product has as many columns
    patch.setattr(module, "fake_quant_fp8_ue8m0", lambda x, block=32: rounded(x) if x.shape[-1] == head_dim else x)
    config = module.ModelConfig.from_dict(raw if token_map is not None else {**raw, "engram_layer_ids": []})
    model = module.LanguageModel(config)
    if token_map is not None:
        engram = importlib.import_module("mlx_vlm.models.deepseek_v41.engram")
        model.engram_hash = engram.NgramHashState(config, model.layout, token_map=token_map.tolist())
    weights = {name.replace("embed.weight", "embed_tokens.weight") if name == "embed.weight" else name:
               mx.array(x.numpy()) for name, x in tensors.items()}  # fmt: skip
    for i in range(config.num_hidden_layers):
        weights = module.sanitize_moe_weights(weights, f"layers.{i}.ffn", config.n_routed_experts)
        weights[f"layers.{i}.ffn.gate.bias_vl"] = weights[f"layers.{i}.ffn.gate.bias"]
        wo_a = weights[f"layers.{i}.attn.wo_a.weight"]
        weights[f"layers.{i}.attn.wo_a.weight"] = wo_a.reshape(config.o_groups, config.o_lora_rank, -1)
    model.load_weights(list(weights.items()))
    cache = model.make_cache()
    return lambda ids: torch.from_numpy(np.array(model(mx.array([list(ids)]), cache=cache).logits))[0]


def _module(name: str, *packages: str) -> types.ModuleType:
    """A module of a package whose own `__init__` imports much more than the module needs, and is left out."""
    if packages[0] not in sys.modules:
        found = importlib.util.find_spec(packages[0])
        if found is None or found.origin is None:
            pytest.skip(f"the oracle needs {packages[0]}")
            raise AssertionError  # skip does not return, which not every checker knows
        root = Path(found.origin).parent
        for package in packages:
            hollow = types.ModuleType(package)
            hollow.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
            sys.modules[package] = hollow
    return importlib.import_module(name)
