"""Which CUDA graphs a worker on a GPU captures, from its configuration. Torch-free: `tailrace check` shows them."""

from __future__ import annotations

from tailrace.cluster.config import TailraceConfig
from tailrace.engine.device_graphs import CaptureSizes

_CTX_ROWS = 8


def capture_sizes(config: TailraceConfig, role: str) -> CaptureSizes:
    """Of a `ctx` or `gen` worker. A ctx draws first tokens only, of few prompts a pass."""
    is_gen = role == "gen"
    return CaptureSizes.derive(
        config.max_batch_size if is_gen else min(_CTX_ROWS, config.max_batch_size),
        config.max_num_tokens,
        config.capture_batch_sizes if is_gen else None,
        config.sampling_variants,
        mixes=is_gen,
    )
