"""Decoders of row families on the Triton kernels instead of the plain twins: the same logits.

python decoder_kernels.py            in Triton's interpreter (TRITON_INTERPRET=1), on the CPU; prints a line a family
python decoder_kernels.py v4 v41     some of them

The entry points (kernels/by_device.py) are told that every tensor is on a GPU, and a decoder runs a prompt in two
chunks and some tokens behind it, on pages of its own either way.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from equal import prompt_of  # noqa: E402
from tiny_families import write_tiny_family  # noqa: E402

from tailrace.kernels import by_device  # noqa: E402
from tailrace.kernels.paged_attention import RowSpan  # noqa: E402
from tailrace.model.row_store import RowPool  # noqa: E402
from tailrace.model.source import open_source  # noqa: E402

PROMPT, CHUNK, DECODED, PAGE = 38, 21, 2, 16
FAMILIES = ("v3", "v32", "v4", "v41-engram")


@torch.inference_mode()
def logits_of(decoder: Any) -> torch.Tensor:
    """[DECODED + 1, vocabulary]: behind the prompt and each token after it."""
    size = PROMPT + DECODED
    layout = decoder.layout
    pages = -(-size // layout.tokens_per_page) + layout.num_state_pages
    pool = RowPool(torch.full((pages + 1, layout.bytes_per_page), 0xFF, dtype=torch.uint8), layout)
    table, ids = np.arange(1, 1 + pages, dtype=np.int32), torch.tensor(prompt_of(size, 3))
    found, start = [], 0
    for end in (CHUNK, PROMPT, *range(PROMPT + 1, size + 1)):
        hidden = decoder.forward(ids[start:end], torch.arange(start, end), pool, [RowSpan(start, end - start, table)])
        if end >= PROMPT:
            found.append(decoder.logits(hidden[-1:])[0])
        start = end
    return torch.stack(found)


def compare(family: str) -> float:
    with tempfile.TemporaryDirectory() as directory:
        source = open_source(str(write_tiny_family(Path(directory), family)))
        config: Any = source.config
        assert source.family is not None
        decoder = source.family.load(source.tensors, config, torch.float32, PAGE)
        plain = logits_of(decoder)
        by_device.on_gpu = lambda tensor: True
        on_kernels = logits_of(decoder)
        by_device.on_gpu = lambda tensor: False
    assert plain.isfinite().all()
    return float((on_kernels - plain).abs().max())


def main(*names: str) -> None:
    torch.set_num_threads(1)
    for family in names or FAMILIES:
        try:
            print(f"{family}: {compare(family):.1e}")  # noqa: T201
        except Exception:  # noqa: BLE001 (all of them are reported)
            print(f"{family}: {traceback.format_exc()}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
