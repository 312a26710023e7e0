"""The comparison of the Triton kernels of a device step with their plain twins.

TRITON_INTERPRET=1 python device_kernels.py cpu        in Triton's interpreter, small
python device_kernels.py cuda                          on the GPU, in real sizes

Prints `name: n equal` for each kernel, or `name: ` and what differs. Names behind the device choose some.
"""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from tailrace.kernels import (
    device_attention,
    device_attention_triton,
    device_sampling,
    device_sampling_triton,
    device_step,
    device_step_triton,
)
from tailrace.kernels.device_attention_triton import Tile
from tailrace.kernels.device_plan import DecodeTasks, DevicePlan
from tailrace.kernels.device_sampling import RowSampling, SamplingRows
from tailrace.kernels.paged_attention import RowSpan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NEAR = {F32: 2e-6, F16: 1e-3, BF16: 6e-3}  # relative L2 from the float32 twin on the same inputs

# dtype, page, dim, heads, kv_heads, window, sinks
SMALL = (
    (F32, 8, 16, 6, 2, None, True), (F32, 16, 32, 4, 4, 24, False), (F16, 8, 16, 8, 1, None, False),
    (F32, 5, 16, 6, 3, 11, True),
)  # fmt: skip
REAL = (
    (BF16, 8, 64, 14, 2, None, False), (BF16, 16, 128, 32, 8, None, True), (BF16, 64, 128, 32, 8, 777, False),
    (BF16, 128, 256, 16, 16, None, False), (F32, 16, 128, 32, 8, None, True), (F32, 16, 64, 9, 3, 100, False),
    (F16, 32, 128, 64, 1, None, False), (F32, 16, 256, 8, 4, None, False), (BF16, 16, 64, 48, 8, 128, True),
)  # fmt: skip


def generator(device: str, seed: int = 0) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def apart(found: torch.Tensor, twin: torch.Tensor) -> float:
    """Relative L2; NaN if either has one."""
    twin = twin.double()
    return float((found.double() - twin).norm() / twin.norm())


class Pages:
    """A pool [.., 2 layers] in which rows of some lengths stand in scattered pages; nothing else of it may be read."""

    def __init__(self, device: str, lengths: tuple[int, ...], case: tuple, *, first_page: int = 1) -> None:
        dtype, page, dim, self.heads, kv_heads, self.window, has_sinks = case
        draw = generator(device)
        counts = [-(-n // page) for n in lengths]
        num_pages = first_page + sum(counts)
        self.kv = torch.empty(num_pages, 2, 2, kv_heads, page, dim, dtype=dtype, device=device)
        self.kv[0] = torch.nan
        self.kv[first_page:] = torch.nan
        order = torch.randperm(sum(counts), generator=draw, device=device) + first_page
        self.table = torch.full((len(lengths), max(counts) + 1), -(2**30), dtype=torch.int32, device=device)
        at = 0
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            own = order[at : at + count]
            at += count
            self.table[row, :count] = own.int()
            for ordinal in range(count):
                filled = min(page, length - ordinal * page)
                numbers = torch.randn(2, kv_heads, filled, dim, generator=draw, device=device)
                self.kv[own[ordinal], 1, :, :, :filled] = numbers.to(dtype)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.sinks = torch.randn(self.heads, generator=draw, device=device) if has_sinks else None
        self.draw, self.dtype, self.dim = draw, dtype, dim

    def queries(self, n: int) -> torch.Tensor:
        q = torch.randn(n, self.heads, self.dim, generator=self.draw, device=self.kv.device)
        return q.to(self.dtype)

    @property
    def options(self) -> dict:
        return {"scale": self.dim**-0.5, "window": self.window, "sinks": self.sinks}


def float_pool(kv: torch.Tensor) -> torch.Tensor:
    return kv.float() if kv.numel() < 2**28 else kv


def tasks_of(lengths: tuple[int, ...], device: str) -> DecodeTasks:
    """Those of a plan with rows of such lengths, padding last; given in the order of `lengths`."""
    count = len(lengths)
    plan = DevicePlan(torch.device("cpu"), rows=count, chunks=1, tokens=count, pages=1, tokens_per_page=4096, pieces=9)
    order = sorted(range(count), key=lambda i: not lengths[i])
    plan.fill([RowSpan(lengths[i] - 1, 1, np.ones(1, np.int32)) for i in order if lengths[i]], decode_rows=count)
    found = plan.decode_tasks(count)
    assert found.tasks[:, 2].max() > 2, "a long row is cut"
    rows = found.tasks[:, 0]
    rows[rows >= 0] = torch.tensor(order, dtype=torch.int32)[rows[rows >= 0]]
    firsts = torch.empty_like(found.firsts)
    firsts[order] = found.firsts
    return DecodeTasks(found.tasks.to(device), firsts.to(device))


def compare_decode(device: str) -> Iterator[str]:
    """Rows of many lengths, one of them padding; every number of splits."""
    real = device == "cuda"
    lengths = (3001, 0, 5, 2048, 1, 64, 700) if real else (37, 0, 5, 40, 1)
    for case in REAL if real else SMALL:
        rows = Pages(device, lengths, case)
        q = rows.queries(len(lengths))
        twin = device_attention.plain_decode_attention(
            q.float(), float_pool(rows.kv), 1, rows.table, rows.lengths, **rows.options
        )
        for splits in (None, 1, 8, "tasks") if real else (1, 4, "tasks") if case is SMALL[0] else ("tasks",):
            tile = None if real else Tile(keys=16, warps=4, stages=2)
            how: dict = {"tasks": tasks_of(lengths, device)} if splits == "tasks" else {"splits": splits}
            found = device_attention_triton.decode_attention(
                q, rows.kv, 1, rows.table, rows.lengths, tile=tile, **how, **rows.options
            )
            assert apart(found, twin) < NEAR[case[0]], f"{case} {splits}: {apart(found, twin):.1e}"
            assert not found[1].any(), "padding"
            yield f"{case} {splits}"
            if splits == "tasks":  # a NaN that a row sees is its own, and comes out
                last = int(rows.lengths[0]) - 1
                held = rows.kv[rows.table[0, last // case[1]], 1, :, :, last % case[1]]
                held[0] = torch.nan
                broken = device_attention_triton.decode_attention(
                    q, rows.kv, 1, rows.table, rows.lengths, tile=tile, **how, **rows.options
                )
                assert broken[0].isnan().all() and torch.equal(broken[1:], found[1:]), "NaN"


def compare_prefill(device: str) -> Iterator[str]:
    """Chunks with and without a past, one of no tokens; tokens behind the last chunk."""
    real = device == "cuda"
    new, context = ((300, 0, 1, 517, 64), (0, 0, 900, 333, 2000)) if real else ((20, 0, 5, 1), (0, 0, 19, 7))
    for case in REAL if real else SMALL:
        rows = Pages(device, tuple(a + b for a, b in zip(new, context, strict=True)), case)
        starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32, device=device)
        before = torch.tensor(context, dtype=torch.int32, device=device)
        q = rows.queries(sum(new) + 3)
        places = (1, starts, before, rows.table, max(new))
        twin = device_attention.plain_prefill_attention(q.float(), float_pool(rows.kv), *places, **rows.options)
        tile = None if real else Tile(queries=16, keys=16, warps=4, stages=2)
        found = device_attention_triton.prefill_attention(q, rows.kv, *places, tile=tile, **rows.options)
        assert apart(found, twin) < NEAR[case[0]], f"{case}: {apart(found, twin):.1e}"
        assert not found[sum(new) :].any(), "tokens behind the last chunk"
        rows.kv[rows.table[0, 0], 1, 0, :, 0] = torch.nan  # a key that all of the first chunk's queries saw
        broken = device_attention_triton.prefill_attention(q, rows.kv, *places, tile=tile, **rows.options)
        assert broken[0].isnan().all() and torch.equal(broken[new[0] :], found[new[0] :]), "NaN"
        yield str(case)


def compare_far_pages(device: str) -> Iterator[str]:
    """Pages that begin beyond 2^31 numbers: 32 bits of an offset would read or write before them."""
    dtype, dim, kv_heads, page = F16, 64, 8, 128  # a page is 2^18 numbers
    rows = Pages(device, (200, 31), (dtype, page, dim, 8, kv_heads, None, False), first_page=2**31 // 2**18 + 1)
    assert rows.kv.numel() > 2**31
    q = rows.queries(2)
    tile = None if device == "cuda" else Tile(queries=16, keys=64, warps=4, stages=2)
    places = (q, rows.kv, 1, rows.table, rows.lengths)
    found = device_attention_triton.decode_attention(*places, splits=1, tile=tile, **rows.options)
    assert apart(found, device_attention.plain_decode_attention(*places, **rows.options)) < NEAR[dtype]
    yield "decode"
    starts, before = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 1, 2], [199, 30]))
    places = (q, rows.kv, 1, starts, before, rows.table, 1)
    found = device_attention_triton.prefill_attention(*places, tile=tile, **rows.options)
    assert apart(found, device_attention.plain_prefill_attention(*places, **rows.options)) < NEAR[dtype]
    yield "prefill"
    qkv = torch.randn(2, 3 * kv_heads, dim, generator=rows.draw, device=device).to(dtype)
    turns = torch.randn(2, 2, 1, dim, generator=rows.draw, device=device)
    slots = torch.tensor([(len(rows.kv) - 1) * page + 127, (len(rows.kv) - 2) * page + 3], device=device)
    device_step_triton.rotary_write(qkv, *turns, slots, rows.kv, 1)
    for token, slot in enumerate(slots.tolist()):
        assert torch.equal(rows.kv[slot // page, 1, 1, :, slot % page], qkv[token, 2 * kv_heads :])
    yield "write"


def compare_norm(device: str) -> Iterator[str]:
    draw = generator(device)
    for dtype, size, rows in itertools.product((F32, BF16 if device == "cuda" else F16), (300, 4096), (1, 5)):
        hidden, part = torch.randn(2, rows, size, generator=draw, device=device)
        part, weight = part.to(dtype), torch.randn(size, generator=draw, device=device).to(dtype)
        for added in (part, None):
            kept, twins = hidden.clone(), hidden.clone()
            found = device_step_triton.add_rms_norm(kept, added, weight, 1e-5)
            twin = device_step.plain_add_rms_norm(twins, added, weight, 1e-5, F32)
            assert torch.equal(kept, twins), "the residual"
            assert found.dtype is dtype and apart(found, twin) < NEAR[dtype], apart(found, twin)
            yield f"{dtype} {size} {rows}"


def compare_rotary(device: str) -> Iterator[str]:
    """Dims that are no power of two, heads that fill no block, rows of a wider tensor."""
    draw = generator(device)
    half = BF16 if device == "cuda" else F16
    for dtype, dim, heads, kv_heads in ((F32, 24, 5, 1), (half, 128, 32, 8), (F32, 64, 9, 3), (half, 80, 7, 7)):
        total = heads + 2 * kv_heads
        wide = torch.randn(7, total + 1, dim, generator=draw, device=device).to(dtype)
        turns = torch.randn(2, 7, 1, dim, generator=draw, device=device)
        slots = torch.randperm(48, generator=draw, device=device)[:7]
        for norms in ((), tuple(torch.randn(2, dim, generator=draw, device=device))):
            kv = torch.randn(6, 2, 2, kv_heads, 8, dim, generator=draw, device=device).to(dtype)
            twins = kv.float()
            q = device_step_triton.rotary_write(wide[:, :total], *turns, slots, kv, 1, *norms, eps=1e-6)
            twin = device_step.plain_rotary_write(wide[:, :total].float(), *turns, slots, twins, 1, *norms, eps=1e-6)
            assert apart(q, twin) < NEAR[dtype] and apart(kv, twins) < NEAR[dtype], (apart(q, twin), apart(kv, twins))
            assert torch.equal(kv[:, :, 1].float(), twins[:, :, 1]), "values are copied"
            yield f"{dtype} {dim}"


def compare_gate(device: str) -> Iterator[str]:
    for dtype, n, rows in itertools.product((F32, BF16 if device == "cuda" else F16), (7, 2500), (1, 3)):
        gate_up = 4 * torch.randn(rows, 2 * n, generator=generator(device), device=device).to(dtype)
        gate_up[0, :2] = -100.0
        twin = device_step.plain_silu_mul(gate_up.float())
        found = device_step_triton.silu_mul(gate_up)
        assert found.dtype is dtype and apart(found, twin) < NEAR[dtype], apart(found, twin)
        yield f"{dtype} {n}"


def sampling_case(device: str, vocab: int, rows: int) -> tuple[torch.Tensor, SamplingRows, str]:
    """Rows of every combination of filters; some of equal scores, some flat, one of NaN, one of nothing."""
    logits = 3 * torch.randn(rows, vocab, generator=generator("cpu"))
    logits[3] = -torch.inf
    logits[4] = 1.0
    logits[5, 7] = torch.nan
    logits[6] = torch.randint(0, 3, (vocab,), generator=generator("cpu")).float()
    logits[8, 1:] = -torch.inf
    rows_of = [
        RowSampling(
            temperature=(0.0, 0.7, 1.3, 30.0)[i % 4], top_k=(0, 5, 50, 3000)[i // 3 % 4],
            top_p=(1, 0.9, 0.3)[i // 9 % 3], min_p=(0.0, 0.05)[i % 2],
            seed=i * 2**58 + 3, position=2**31 + i, sample=i % 2,
        )
        for i in range(rows)
    ]  # fmt: skip
    params = SamplingRows(torch.device(device), rows + 1)
    return logits.to(device), params, params.fill(rows_of)


def compare_sampling(device: str) -> Iterator[str]:
    for vocab, rows in ((128256, 108), (5000, 108), (9, 40)) if device == "cuda" else ((4500, 24),):
        logits, params, variant = sampling_case(device, vocab, rows)
        assert variant == device_sampling.ADVANCED
        for chosen in (device_sampling.ADVANCED, device_sampling.TEMPERATURE_ONLY):
            found = device_sampling_triton.sample_rows(logits, params, chosen)
            twin = device_sampling.plain_sample_rows(logits, params, chosen)
            assert torch.equal(found, twin), f"{vocab} {chosen}: rows {(found != twin).nonzero()[:, 0].tolist()}"
            yield f"{vocab} {chosen}"
        out = torch.zeros(rows, dtype=torch.int64, device=device)
        found = device_sampling_triton.argmax_rows(logits, out)
        assert found is out and torch.equal(found, device_sampling.plain_argmax_rows(logits).long())
        assert found[3] == found[5] == device_sampling.NO_TOKEN and found[4] == 0
        yield f"{vocab} greedy"


def compare_refusals(device: str) -> Iterator[str]:
    """Arguments of a wrong shape, dtype or stride are refused with their numbers before a kernel reads them."""
    kv = torch.zeros(3, 2, 2, 2, 8, 16, device=device)
    q, qkv, flat = (torch.zeros(s, device=device) for s in ((4, 6, 16), (4, 10, 16), (4, 32)))
    turns, slots = torch.zeros(4, 1, 16, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    table, lengths = (torch.zeros(s, dtype=torch.int32, device=device) for s in ((4, 5), (4,)))
    starts = torch.zeros(5, dtype=torch.int32, device=device)

    def decode(**other: object) -> object:
        given = {"q": q, "kv": kv, "layer": 1, "page_table": table, "lengths": lengths, "scale": 1.0}
        return device_attention_triton.decode_attention(**(given | other))  # type: ignore[arg-type]

    def prefill(*, starts: torch.Tensor = starts, context: torch.Tensor = lengths, new: int = 1) -> object:
        return device_attention_triton.prefill_attention(q, kv, 1, starts, context, table, new, scale=1.0)

    rotary, norm = device_step_triton.rotary_write, device_step_triton.add_rms_norm
    sample = device_sampling_triton.sample_rows
    params = SamplingRows(torch.device(device), 2)
    plan = DevicePlan(torch.device(device), rows=4, chunks=1, tokens=4, pages=5, tokens_per_page=8)
    wrong: dict[str, Callable[[], object]] = {
        r"a pool is contiguous .* not \(3, 2, 2, 2, 16, 8\)": lambda: decode(kv=kv.transpose(4, 5)),
        "layer 2 of a pool of 2 layers": lambda: decode(layer=2),
        r"heads a multiple of 2, not \(4, 5, 16\)": lambda: decode(q=q[:, :5]),
        r"q is \[rows, heads, 16\].* not \(4, 6, 8\)": lambda: decode(q=q[..., :8]),
        "q is torch.float64, the pool torch.float32": lambda: decode(q=q.double()),
        r"q has strides \(16, 64, 1\), expected \(any, 16, 1\)": lambda: decode(
            q=q.transpose(0, 1).contiguous().transpose(0, 1)
        ),  # noqa: E501
        "a head has 24 numbers, one of": lambda: decode(kv=torch.zeros(3, 2, 2, 2, 8, 24), q=torch.zeros(4, 6, 24)),
        r"page_table is \(3, 5\) torch.int32, expected \(4, pages\)": lambda: decode(page_table=table[:3]),
        r"page_table is \(4, 5\) torch.int64, expected": lambda: decode(page_table=table.long()),
        r"lengths are \(3,\) torch.int32 \(1,\), expected contiguous \(4,\)": lambda: decode(lengths=lengths[:3]),
        r"tasks are \(36, 4\) of 3 rows, expected \(n, 4\) of 4": lambda: decode(tasks=plan.decode_tasks(3)),
        "a window of 0 positions": lambda: decode(window=0),
        r"sinks are \(5,\) torch.float32, expected \(6,\)": lambda: decode(sinks=flat[0, :5]),
        r"out is \(4, 3, 16\) .* expected contiguous \(4, 6, 16\)": lambda: decode(out=q[:, :3]),
        r"chunk_starts are \(4,\) .* expected contiguous \(5,\)": lambda: prefill(starts=starts[:4]),
        r"chunk_pages is \(4, 5\) .* expected \(3, pages\)": lambda: prefill(context=lengths[:3]),
        "max_new is -1": lambda: prefill(new=-1),
        r"hidden is \(4, 32\) torch.float64": lambda: norm(flat.double(), None, flat[0], 1.0),
        r"part is \(4, 31\) torch.float32, expected \(4, 32\)": lambda: norm(flat, flat[:, :31], flat[0], 1.0),
        r"weight is \(31,\) torch.float32, expected contiguous \(32,\)": lambda: norm(flat, None, flat[0, :31], 1.0),
        r"qkv is \(4, 4, 16\), expected \[tokens, heads \+ 4, 16\]": lambda: rotary(
            qkv[:, :4], turns, turns, slots, kv, 1
        ),
        r"slots are \(4,\) torch.int32, expected": lambda: rotary(qkv, turns, turns, slots.int(), kv, 1),
        r"cos is \(3, 1, 16\) .* expected contiguous \(4, 1, 16\)": lambda: rotary(qkv, turns[:3], turns, slots, kv, 1),
        r"k_norm is \(8,\) torch.float32, expected \(16,\)": lambda: rotary(
            qkv, turns, turns, slots, kv, 1, turns[0, 0], turns[0, 0, :8]
        ),
        r"gate_up is \(4, 31\) torch.float32": lambda: device_step_triton.silu_mul(flat[:, :31]),
        r"logits are \(4, 32\) torch.float64": lambda: sample(flat.double(), params),
        "sampling of 2 rows for logits of 4": lambda: sample(flat, params),
        "variant 'other', expected one of": lambda: sample(flat[:2], params, "other"),
        r"out is \(3,\) torch.int64, expected \(2,\)": lambda: sample(flat[:2], params, out=slots[:3]),
    }
    for message, call in wrong.items():
        try:
            call()
        except ValueError as error:
            assert re.search(message, str(error)), (message, error)
            yield message
        else:
            raise AssertionError(f"taken: {message}")


def compare_beside_sdpa(device: str) -> Iterator[str]:
    """From float32 attention of the same bfloat16 inputs, at most 1.1 times as far as torch's own operator."""
    for page, dim, heads, kv_heads, length in ((16, 128, 32, 8, 8192), (64, 64, 16, 4, 3000), (32, 256, 8, 8, 2048)):
        case = (BF16, page, dim, heads, kv_heads, None, False)
        lengths = (length,) * 4
        rows = Pages(device, lengths, case)
        kept = rows.kv[rows.table[:, : -(-length // page)].long(), 1]  # [row, page, k|v, kv_head, token, dim]
        k, v = kept.permute(2, 0, 3, 1, 4, 5).reshape(2, 4, kv_heads, -1, dim)[..., :length, :]
        q = rows.queries(4)
        twin = device_attention.plain_decode_attention(
            q.float(), float_pool(rows.kv), 1, rows.table, rows.lengths, **rows.options
        )
        theirs = functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
        found = device_attention_triton.decode_attention(q, rows.kv, 1, rows.table, rows.lengths, **rows.options)
        assert apart(found, twin) <= 1.1 * apart(theirs, twin), (apart(found, twin), apart(theirs, twin))
        yield f"decode {dim}: {apart(found, twin):.2e} beside {apart(theirs, twin):.2e}"
        q = rows.queries(length)
        starts, before = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, length], [0]))
        places = (1, starts, before, rows.table[:1], length)
        found = device_attention_triton.prefill_attention(q, rows.kv, *places, **rows.options)
        theirs = functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], k[:1], v[:1], is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        some = torch.arange(0, length, 97, device=device)  # row by row: all at once would be 8 GB of scores
        lengths = (some + 1).int()
        table = rows.table[:1].expand(len(some), -1)
        twin = device_attention.plain_decode_attention(
            q[some].float(), float_pool(rows.kv), 1, table, lengths, **rows.options
        )
        ours, others = apart(found[some], twin), apart(theirs[some], twin)
        assert ours <= 1.1 * others, (ours, others)
        yield f"prefill {dim}: {ours:.2e} beside {others:.2e}"


def compare_graphs(device: str) -> Iterator[str]:
    """A captured step, filled anew, gives what an eager one gives: other lengths, pages, padding and draws."""
    size, rows, heads, kv_heads, dim = 16, 8, 8, 2, 64
    gpu = torch.device(device)
    draw = generator(device)
    kv = torch.randn(200, 1, 2, kv_heads, size, dim, generator=draw, device=gpu).to(BF16)
    qkv = torch.randn(rows + 64, heads + 2 * kv_heads, dim, generator=draw, device=gpu).to(BF16)
    logits = torch.randn(rows, 5000, generator=draw, device=gpu)
    plan = DevicePlan(gpu, rows=rows, chunks=3, tokens=rows + 64, pages=20, tokens_per_page=size)
    params = SamplingRows(gpu, rows)
    turns = torch.randn(2, rows + 64, 1, dim, generator=draw, device=gpu)

    def step() -> tuple[torch.Tensor, ...]:
        q = device_step.rotary_write(qkv, *turns, plan.slots, kv, 0)
        decoded = device_attention.decode_attention(
            q[:rows], kv, 0, plan.page_table, plan.lengths, scale=0.1, window=100, tasks=plan.decode_tasks(rows)
        )
        chunks = device_attention.prefill_attention(
            q[rows:], kv, 0, plan.chunk_starts, plan.context, plan.chunk_pages, 64, scale=0.1
        )
        return kv, decoded, chunks, device_sampling.sample_rows(logits, params)

    def fill(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(199).astype(np.int32) + 1
        spans = [RowSpan(37 * i % 300, 1, order[20 * i : 20 * i + 20]) for i in range(1, 5 + seed % 3)]
        spans += [RowSpan(16 * seed, 30, order[160:180]), RowSpan(0, 17 + seed, order[180:199])]
        plan.fill(spans, decode_rows=rows, chunks=3, tokens=rows + 64)
        params.fill([RowSampling(temperature=0.5 + i / 8, top_p=0.8, seed=seed, position=i) for i in range(rows - 1)])

    fill(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        for seed in range(1, 6):
            before = kv.clone()
            fill(seed)
            graph.replay()
            found = [t.clone() for t in captured]
            kv.copy_(before)
            for name, one, other in zip(("pool", "decode", "chunks", "tokens"), found, step(), strict=True):
                assert torch.equal(one[1:] if name == "pool" else one, other[1:] if name == "pool" else other), name
            yield str(seed)


COMPARISONS: dict[str, Callable[[str], Iterator[str]]] = {
    "decode attention": compare_decode,
    "prefill attention": compare_prefill,
    "far pages": compare_far_pages,
    "norm": compare_norm,
    "rotary": compare_rotary,
    "gate": compare_gate,
    "sampling": compare_sampling,
    "refusals": compare_refusals,
    "beside SDPA": compare_beside_sdpa,  # these two on a GPU only
    "graphs": compare_graphs,
}


def main(device: str, *names: str) -> None:
    """All comparisons that a device can run, or those of some names."""
    torch.set_num_threads(1)
    for name, comparison in COMPARISONS.items():
        if (names and name not in names) or (device == "cpu" and name in ("beside SDPA", "graphs")):
            continue
        try:
            print(f"{name}: {sum(1 for _ in comparison(device))} equal")  # noqa: T201
        except Exception:  # noqa: BLE001 (all of them are reported)
            print(f"{name}: {traceback.format_exc()}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
