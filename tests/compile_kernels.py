"""Compiles the Triton kernels for an H200 (sm_90, down to machine code) on a machine that has no GPU.

python compile_kernels.py            prints a line for each: its name and the shared memory it needs

Triton is given a device that answers what it is and runs nothing, and every launch ends once the kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tailrace.kernels import (
    candidate_blocks_triton,
    compressor,
    compressor_triton,
    device_attention_triton,
    device_sampling_triton,
    device_step_triton,
    exact_topk_triton,
    experts_triton,
    hyper_connections,
    hyper_connections_triton,
    indexer_triton,
    one_row_triton,
    overlap_triton,
    page_read,
    page_read_triton,
    row_formats_triton,
    sparse_attention_triton,
)
from tailrace.kernels.device_memory import Memory
from tailrace.kernels.device_plan import DevicePlan
from tailrace.kernels.device_sampling import ADVANCED, TEMPERATURE_ONLY, SamplingRows
from tailrace.kernels.row_formats import PackedRows, RowFormat, fp4_groups, fp8_tiles, plain
from tailrace.kernels.sparse_attention import PickedRows, RowRange

V4, V32 = fp8_tiles(512, 64, "ue8m0", 64, 1), fp8_tiles(576, 128, "float32", 64)
WINDOW, MAIN = fp8_tiles(512, 32, "ue8m0"), fp4_groups(512, 16, "e4m3")
KEY8, KEY4 = fp8_tiles(128, 128, "float32"), fp4_groups(128, 32, "ue8m0")
BF16 = torch.bfloat16


class _H200:
    """What Triton asks its device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def packed(fmt: RowFormat, n: int = 140) -> PackedRows:
    return PackedRows(fmt, torch.zeros(n * fmt.row_bytes, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))


def launches() -> Iterator[str]:
    """Every kernel, at the dims of published models; each step launches some."""
    for fmt in (V4, V32, MAIN, KEY4, plain(512, BF16)):
        rows = row_formats_triton.pack(fmt, torch.zeros(40, fmt.dim))
        row_formats_triton.read_rows(fmt, rows, torch.zeros(3, dtype=torch.int64))
        yield fmt.name
    for heads, fmt in ((64, KEY8), (32, KEY4)):
        indexer_triton.index_scores(torch.zeros(3, heads, 128, dtype=BF16), packed(fmt), torch.zeros(3, heads))
        yield fmt.name
    exact_topk_triton.exact_topk(torch.zeros(3, 4000), 512, torch.zeros(3, dtype=torch.int64))
    yield "exact top-k"
    scores, keep = torch.zeros(3, 4000), torch.zeros(3, 500, dtype=torch.bool)
    candidate_blocks_triton.best_blocks(scores, torch.zeros(3, dtype=torch.int64), 200, 8)
    candidate_blocks_triton.within_blocks(scores, keep, 8)
    yield "candidate blocks"
    index = torch.zeros(3, 128, dtype=torch.int64)
    for fmt, window in ((V4, V4), (MAIN, WINDOW), (V32, None)):
        parts: list[PickedRows | RowRange] = [PickedRows(packed(fmt), index)]
        if window is not None:
            parts.append(RowRange(packed(window), index[:, 0], index[:, 0]))
        q = torch.zeros(3, 64, fmt.dim, dtype=BF16)
        sparse_attention_triton.sparse_attention(q, parts, 1.0, torch.zeros(64), 512)
        yield fmt.name
    values = torch.zeros(3, 4, 1024)
    compressor_triton.pool(values, values)
    compressor_triton.pool_overlapping(values, values, compressor.Overlap(*torch.zeros(2, 4, 512)))
    compressor_triton.extend(compressor.Running(*torch.zeros(3, 1024)), values[0], values[0])
    yield "compressor"
    streams = torch.zeros(3, 4, 5120, dtype=BF16)
    weights = hyper_connections.MixingWeights(torch.zeros(24, 20480), torch.zeros(24), torch.zeros(3))
    mixed = hyper_connections_triton.mixing(streams, weights, rms_eps=1e-6, floor=1e-6, iterations=20)
    hyper_connections_triton.collapse(streams, mixed.pre)
    hyper_connections_triton.spread(streams, streams[:, 0].contiguous(), mixed)
    yield "hyper-connections"
    experts_triton.top_k_routing(torch.zeros(3, 256), 8, 2.5, torch.zeros(256), groups=8, top_groups=4)
    experts_triton.top_k_routing(torch.zeros(3, 384), 6, 1.5, torch.zeros(384))
    yield "routing"
    gate_up, down = torch.zeros(3, 256, 256, dtype=BF16), torch.zeros(3, 256, 128, dtype=BF16)
    experts_triton.grouped_swiglu(torch.zeros(3, 256, dtype=BF16), gate_up, down, index[:, :2], torch.zeros(3, 2), 10.0)
    yield "experts"
    pool, numbers = Memory(1 << 33, 1 << 31, torch.device("cuda")), torch.zeros(2, 3, dtype=torch.int32)
    for page_bytes in (4096, 65_536, 368_640, 96, 7):
        unit = page_read.unit_of(page_bytes)
        page_read_triton.read_spans(pool, pool, numbers, page_bytes // unit, page_bytes // unit, unit)
    yield "page read"
    yield from device_launches()


def device_launches() -> Iterator[str]:
    """The kernels of a device step, at the dims and page sizes of published models."""
    numbers, starts = torch.zeros(4, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    table, sinks, weight = torch.zeros(4, 2000, dtype=torch.int32), torch.zeros(32), torch.zeros(4096, dtype=BF16)
    for dtype, dim, page, window in ((BF16, 64, 64, 128), (BF16, 128, 16, None), (BF16, 256, 16, None)):
        kv, q = torch.zeros(3, 1, 2, 8, page, dim, dtype=dtype), torch.zeros(4, 32, dim, dtype=dtype)
        options = {"scale": 1.0, "window": window, "sinks": sinks}
        for rows in (1, 4):
            device_attention_triton.decode_attention(q[:rows], kv, 0, table[:rows], numbers[:rows], **options)
        device_attention_triton.decode_attention(q, kv, 0, table, numbers, splits=1, **options)
        tasks = DevicePlan(torch.device("cpu"), rows=4, chunks=1, tokens=4, pages=2000, tokens_per_page=page)
        device_attention_triton.decode_attention(q, kv, 0, table, numbers, tasks=tasks.decode_tasks(4), **options)
        device_attention_triton.prefill_attention(q, kv, 0, starts, numbers, table, 300, **options)
        turns, qkv = torch.zeros(4, 1, dim), torch.zeros(4, 48, dim, dtype=dtype)
        norms = (weight[:dim], weight[:dim]) if dim == 128 else ()
        device_step_triton.rotary_write(qkv, turns, turns, torch.zeros(4, dtype=torch.int64), kv, 0, *norms)
        yield f"device attention {dim}"
    for dtype in (torch.float32, BF16):
        device_step_triton.add_rms_norm(torch.zeros(4, 4096), torch.zeros(4, 4096, dtype=dtype), weight, 1e-5)
        device_step_triton.silu_mul(torch.zeros(4, 28672, dtype=dtype))
    yield "device step"
    for n in (576, 4096, 14336):
        x, wide = torch.zeros(1, n, dtype=BF16), torch.zeros(64, n, dtype=BF16)
        one_row_triton.one_row_linear(x, wide, weight[:64])
        one_row_triton.one_row_gated(x, wide)
    yield "one row"
    logits, params = torch.zeros(4, 128256), SamplingRows(torch.device("cpu"), 4)
    device_sampling_triton.argmax_rows(logits)
    for variant in (TEMPERATURE_ONLY, ADVANCED):
        device_sampling_triton.sample_rows(logits, params, variant)
    yield "device sampling"


def main() -> None:
    driver.set_active(_H200())
    overlap_triton.can_overlap = lambda device: True  # as on an H200, though the tensors here are on no GPU
    compile_and_launch = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_and_launch(self, *args, grid=grid, warmup=True, **options)
        assert kernel.asm["cubin"] and kernel.metadata.target.arch == 90
        assert kernel.metadata.shared <= 227 << 10, "what a block of an H200 may have"
        print(self.__name__, kernel.metadata.shared)  # noqa: T201
        return kernel

    JITFunction.run = compile_only
    print(f"compiled {sum(1 for _ in launches())}")  # noqa: T201


if __name__ == "__main__":
    main()
