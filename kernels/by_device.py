"""The kernels that decoders of row families call: each is its plain twin on the CPU and its Triton kernel on a GPU.

    from tailrace.kernels.by_device import exact_topk, index_scores, ..

Which one runs is decided a call, by where the first tensor among the arguments is; names, arguments and results are
the twin's. So a decoder is one code whatever it runs on. Triton is imported when the first tensor on a GPU comes, and
not at all where there is none.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from tailrace.kernels import candidate_blocks as _blocks
from tailrace.kernels import compressor as _compressor
from tailrace.kernels import exact_topk as _topk
from tailrace.kernels import experts as _experts
from tailrace.kernels import hyper_connections as _streams
from tailrace.kernels import indexer as _indexer
from tailrace.kernels import row_formats as _rows
from tailrace.kernels import sparse_attention as _attention

P = ParamSpec("P")
R = TypeVar("R")


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a call about this tensor is the Triton kernel's."""
    return tensor.is_cuda


def _entry(twin: Callable[P, R], module: str) -> Callable[P, R]:
    """`twin`, or its namesake in kernels/<module>.py."""

    @functools.wraps(twin)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(arg for arg in args if isinstance(arg, torch.Tensor))
        if not on_gpu(first):
            return twin(*args, **kwargs)
        kernel: Any = getattr(importlib.import_module(f"tailrace.kernels.{module}"), twin.__name__)
        return kernel(*args, **kwargs)

    return entry


index_scores = _entry(_indexer.index_scores, "indexer_triton")
exact_topk = _entry(_topk.exact_topk, "exact_topk_triton")
best_blocks = _entry(_blocks.best_blocks, "candidate_blocks_triton")
within_blocks = _entry(_blocks.within_blocks, "candidate_blocks_triton")
sparse_attention = _entry(_attention.sparse_attention, "sparse_attention_triton")
pool = _entry(_compressor.pool, "compressor_triton")
pool_overlapping = _entry(_compressor.pool_overlapping, "compressor_triton")
extend = _entry(_compressor.extend, "compressor_triton")
mixing = _entry(_streams.mixing, "hyper_connections_triton")
collapse_weights = _entry(_streams.collapse_weights, "hyper_connections_triton")
collapse = _entry(_streams.collapse, "hyper_connections_triton")
spread = _entry(_streams.spread, "hyper_connections_triton")
top_k_routing = _entry(_experts.top_k_routing, "experts_triton")
hash_routing = _entry(_experts.hash_routing, "experts_triton")
grouped_swiglu = _entry(_experts.grouped_swiglu, "experts_triton")
pack = _entry(_rows.pack, "row_formats_triton")
unpack = _entry(_rows.unpack, "row_formats_triton")


def rounded(fmt: _rows.RowFormat, x: torch.Tensor) -> torch.Tensor:
    """What is left of x [.., fmt.dim] of any float dtype after a round trip, in float32."""
    return unpack(fmt, pack(fmt, x.reshape(-1, fmt.dim).float())).view(x.shape)
