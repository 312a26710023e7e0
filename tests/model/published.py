"""The published models' config.json, written anew from their public descriptions: V3, V3.2, V4 and V4.1.

V4.1 nests its text model in `text_config`, beside the vision part that this project leaves out. How its file calls the
experts of the draft stages is not known from any public reader: `dspark_n_routed_experts` and
`dspark_num_experts_per_tok` are names of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tailrace.model.hf_directory import read_json

V3, V32, V4_FLASH, V4_PRO, V41_FLASH = PUBLISHED = (
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4-flash",
    "deepseek-v4-pro",
    "deepseek-v4.1-flash",
)


def published_directory(name: str) -> Path:
    """A directory that holds config.json alone."""
    return Path(__file__).parent / "configs" / name


def published_config(name: str) -> dict[str, Any]:
    """config.json as parsed, in memory of the caller's own."""
    return read_json(published_directory(name) / "config.json", required=True)
