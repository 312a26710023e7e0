"""Writes a float model as a quantized DeepSeek directory: FP8 blocks, FP4 experts, FP8 table rows, and their scales.

Values are rounded by torch's own casts, and what was written is returned as float32, so that an oracle can be given
exactly the weights that the directory holds:

    held = write_quantized_checkpoint(tmp_path, model.state_dict(), config, V4)
    oracle.load_state_dict(held)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GROUP = 32
E4M3_MAX, E2M1_MAX = 448.0, 6.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# What stays as it is in all published checkpoints, by the names of either naming: tables of ids, norms, the router,
# hyper-connections, the compressor, and the indexer's head weights.
PLAIN = (
    r"embed_tokens\.|^embed\.|lm_head\.|^head\.|norm|gate\.|hc_|_hc\.|sink|ape|position_bias"
    r"|compressor\.|weights_proj\.|wgate\.|q_weight|k_weight"
)


@dataclass(frozen=True)
class Style:
    """How a published checkpoint is quantized.

    Attributes:
        block: (rows, columns) of an FP8 weight that share a scale; also what config.json says.
        ue8m0: scales are powers of two, a byte each; else float32.
        suffix: what follows a weight's name without `.weight` in its scale's name.
        four_bit: pattern of weights that become FP4.
        tables: pattern of matrices that become FP8 with scales of one row each.
        bytes_as: stored type of the FP4 bytes and, where not None, of the ue8m0 bytes.
    """

    block: tuple[int, int]
    ue8m0: bool
    suffix: str
    four_bit: str = "$^"
    tables: str = "$^"
    bytes_as: tuple[torch.dtype, torch.dtype | None] = (torch.int8, None)


V3 = Style((128, 128), ue8m0=False, suffix=".weight_scale_inv")
V4 = Style((128, 128), ue8m0=True, suffix=".scale", four_bit=r"\.experts\.\d+\.")
V41 = Style((32, 32), ue8m0=True, suffix=".scale", four_bit=r"\.experts\.\d+\.", tables=r"engram\.embed\.weight$")


def write_quantized_checkpoint(
    directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], style: Style, *, shards: int = 1
) -> dict[str, torch.Tensor]:
    """Write config.json (with its quantization_config) and safetensors files; no tokenizer.

    Args:
        directory: made if absent.
        tensors: by stored name. Matrices named `.weight` are quantized unless PLAIN finds their name.
        config: config.json without quantization_config.
        shards: number of files. A weight and its scales fall into different ones where there are several.

    Returns what the directory holds, dequantized to float32, by stored name; integers as they are.
    """
    directory.mkdir(parents=True, exist_ok=True)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    settings = {**quantization, "weight_block_size": list(style.block)}
    if style.ue8m0:
        settings["scale_fmt"] = "ue8m0"
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}, indent=1))
    stored: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and re.search(style.tables, name):
            parts = quantized_fp8(tensor, (1, GROUP), ue8m0=style.ue8m0)
        elif tensor.dim() != 2 or not name.endswith(".weight") or re.search(PLAIN, name):
            stored[name] = tensor.contiguous()
            held[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        elif re.search(style.four_bit, name):
            parts = quantized_fp4(tensor)
            parts = (parts[0].view(style.bytes_as[0]), *parts[1:])
        else:
            parts = quantized_fp8(tensor, style.block, ue8m0=style.ue8m0)
        stored[name], scales, held[name] = parts
        if scales.dtype == torch.float8_e8m0fnu and style.bytes_as[1] is not None:
            scales = scales.view(style.bytes_as[1])
        stored[name.removesuffix(".weight") + style.suffix] = scales
    save_sharded(stored, directory, shards)
    return held


def save_sharded(stored: Mapping[str, torch.Tensor], directory: Path, shards: int = 1) -> None:
    """One `model.safetensors`, or several files and their index; neighbours by name lie in different files."""
    if shards == 1:
        save_file(dict(stored), directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(sorted(stored))}
    for file in sorted(set(files.values())):
        save_file({n: stored[n] for n in stored if files[n] == file}, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def quantized_fp8(
    matrix: torch.Tensor, block: tuple[int, int], *, ue8m0: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values [rows, columns] e4m3, scales [grid] float32 or e8m0, what they say [rows, columns] float32)."""
    scales = _block_scales(matrix.float(), block, E4M3_MAX, ue8m0=ue8m0)
    spread = _spread(scales, block, matrix)
    values = (matrix.float() / spread).to(torch.float8_e4m3fn)
    return values, scales.to(torch.float8_e8m0fnu) if ue8m0 else scales, values.float() * spread


def quantized_fp4(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pairs [rows, columns / 2] uint8, scales [rows, columns / 32] e8m0, what they say [rows, columns] float32)."""
    scales = _block_scales(matrix.float(), (1, GROUP), E2M1_MAX, ue8m0=True)
    spread = _spread(scales, (1, GROUP), matrix)
    ratio = matrix.float() / spread
    code = (ratio.abs()[..., None] - E2M1).abs().argmin(-1)
    held = E2M1[code] * ratio.sign() * spread
    code = code + 8 * (ratio < 0)
    return (code[:, ::2] + 16 * code[:, 1::2]).to(torch.uint8), scales.to(torch.float8_e8m0fnu), held


def _block_scales(matrix: torch.Tensor, block: tuple[int, int], largest: float, *, ue8m0: bool) -> torch.Tensor:
    """One a block, so that the block's largest value becomes `largest`, or less where scales are powers of two."""
    (rows, columns), (height, width) = matrix.shape, block
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    padded[:rows, :columns] = matrix.abs()
    most = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width)).amax((1, 3)).clamp(min=1e-6)
    scales = most / largest
    return torch.exp2(torch.ceil(torch.log2(scales))) if ue8m0 else scales


def _spread(scales: torch.Tensor, block: tuple[int, int], matrix: torch.Tensor) -> torch.Tensor:
    """Scales by element of the matrix."""
    full = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return full[: matrix.shape[0], : matrix.shape[1]]
