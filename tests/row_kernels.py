"""The comparison of the Triton kernels for rows, scores, choices, attention and experts with their plain twins.

TRITON_INTERPRET=1 python row_kernels.py cpu        in Triton's interpreter
python row_kernels.py cuda                          on the GPU

Prints `name: n equal` for each kernel, or `name: ` and what differs.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator

import torch

from tailrace.kernels import (
    candidate_blocks,
    candidate_blocks_triton,
    compressor,
    compressor_triton,
    exact_topk,
    exact_topk_triton,
    experts,
    experts_triton,
    hyper_connections,
    hyper_connections_triton,
    indexer,
    indexer_triton,
    row_formats,
    row_formats_triton,
    sparse_attention,
    sparse_attention_triton,
)
from tailrace.kernels.row_formats import PackedRows, RowFormat, fp4_groups, fp8_tiles, plain
from tailrace.kernels.sparse_attention import PickedRows, RowRange

# Of the published models, then odd ones: tiles that are no power of two, a short last tile, padding.
REAL = (
    fp8_tiles(512, 64, "ue8m0", 64, 1), fp8_tiles(576, 128, "float32", 64), fp8_tiles(512, 32, "ue8m0"),
    fp8_tiles(128, 128, "float32"), fp4_groups(512, 16, "e4m3"), fp4_groups(128, 32, "ue8m0"),
)  # fmt: skip
ODD = (
    fp8_tiles(32, 10, "ue8m0", 8), fp8_tiles(41, 12, "float32", 8, 3), fp4_groups(18, 6, "e4m3"),
    plain(13, torch.float32), plain(13, torch.bfloat16),
)  # fmt: skip


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN being equal to any other."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(
        a.masked_fill(nan, 0).view(torch.int32), b.masked_fill(nan, 0).view(torch.int32)
    )


def odd_rows(dim: int) -> torch.Tensor:
    """Rows of every size, some with numbers that are not finite, denormal, minus zero or at an edge."""
    x = torch.randn(11, dim, generator=generator()) * torch.logspace(-30, 30, 11)[:, None]
    edges = (torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, -0.0, 1e-45, 2.0**-130, 448.0, 6.0)
    for i, value in enumerate(edges):
        x[i, 5 * i % dim] = value
    ties = torch.randint(-24, 25, (3, dim), generator=generator(3)) * 0.25  # between two numbers of e2m1
    more = torch.randint(-448, 449, (3, dim), generator=generator(4)) * 1.0  # and of e4m3
    ties[:, ::7], more[:, ::7] = 6.0, 448.0
    ups = torch.tensor([448.0, 6.0, 448.0 * 2**20, 6.0 * 2**-20])  # where a power of two begins to be too small
    at_edges = torch.randn(12, dim, generator=generator(5)) * 1e-7
    at_edges[:, ::7] = torch.cat((ups, torch.nextafter(ups, ups * 2), torch.nextafter(ups, ups / 2)))[:, None]
    ordinary = torch.randn(4, dim, generator=generator(1))
    return torch.cat((x, ties, more, at_edges, ordinary, torch.zeros(1, dim), -torch.zeros(1, dim)))


def scattered(fmt: RowFormat, x: torch.Tensor, device: str) -> PackedRows:
    """The rows of x at odd places of a memory in which nothing else can be read."""
    places = torch.randperm(3 * len(x), generator=generator(2))[: len(x)] * (fmt.row_bytes + 1) + 3
    memory = torch.full((3 * len(x) * (fmt.row_bytes + 1) + 3,), 0xFF, dtype=torch.uint8)
    row_formats.write_rows(fmt, memory, places, x)
    return PackedRows(fmt, memory.to(device), places.to(device))


def compare_row_formats(device: str) -> Iterator[str]:
    for fmt in (*REAL, *ODD):
        x = odd_rows(fmt.dim)
        if fmt.name.endswith(("bf16-64", "bf16-8")) or fmt.dtype is torch.bfloat16:
            x[:, -fmt.tail_dims or 0 :].nan_to_num_(nan=1.0)  # the bits of a bfloat16 NaN may differ
        packed = fmt.pack(x)
        assert torch.equal(row_formats_triton.pack(fmt, x.to(device)).cpu(), packed), f"pack {fmt.name}"
        rows = torch.randint(0, 256, (40, fmt.row_bytes), dtype=torch.uint8, generator=generator())
        rows = torch.cat((rows, packed, torch.full((1, fmt.row_bytes), 0xFF, dtype=torch.uint8)))
        found = row_formats_triton.unpack(fmt, rows.to(device)).cpu()
        assert same(found, fmt.unpack(rows)), f"unpack {fmt.name}"
        there = scattered(fmt, x, device)
        found = torch.full_like(there.memory, 0xFF)
        row_formats_triton.write_rows(fmt, found, there.offsets, x.to(device))
        assert torch.equal(found, there.memory), f"write {fmt.name}"
        back = row_formats_triton.read_rows(fmt, there.memory, there.offsets)
        assert same(back.cpu(), fmt.unpack(packed)), f"read {fmt.name}"
        yield fmt.name


def compare_far_rows(device: str) -> Iterator[str]:
    """Rows that begin beyond 2^31 bytes: 32 bits of an offset would read or write before them."""
    memory = torch.empty(2**31 + 2**20, dtype=torch.uint8, device=device)  # of which few pages are touched
    offsets = torch.tensor([2**31 - 300, 2**31 + 1000, 2**31 + 70000], device=device)
    for fmt in (REAL[0], REAL[4], plain(40, torch.float32)):
        x = torch.randn(3, fmt.dim, generator=generator()).to(device)
        row_formats_triton.write_rows(fmt, memory, offsets, x)
        expected = fmt.unpack(fmt.pack(x))
        assert torch.equal(row_formats.read_rows(fmt, memory, offsets), expected), f"write {fmt.name}"
        assert torch.equal(row_formats_triton.read_rows(fmt, memory, offsets), expected), f"read {fmt.name}"
        rows = PackedRows(fmt, memory, offsets)
        q, weights = torch.randn(1, 2, fmt.dim, generator=generator(1)).to(device), torch.ones(1, 2, device=device)
        found = indexer_triton.index_scores(q, rows, weights)
        torch.testing.assert_close(found, indexer.index_scores(q, expected, weights), rtol=1e-4, atol=1e-4)
        yield fmt.name


def compare_refusals(device: str) -> Iterator[str]:
    """Arguments of a wrong shape, dtype or stride are refused with their numbers before a kernel reads them."""
    flat, wide = torch.zeros(4, 8, device=device), torch.zeros(8, 8, device=device)
    cube, index = torch.zeros(4, 2, 8, device=device), torch.zeros(4, 3, dtype=torch.int64, device=device)
    fmt, half, other = plain(8, torch.float32), flat.bfloat16(), flat.double()
    memory, turned = torch.zeros(400, dtype=torch.uint8, device=device), wide.t()
    weights = hyper_connections.MixingWeights(torch.zeros(8, 16), torch.zeros(8), torch.zeros(3))
    mixed = hyper_connections.Mixing(flat[:, :2], flat[:, :2], cube)
    attend, route = sparse_attention_triton.sparse_attention, experts_triton.top_k_routing
    wrong: dict[str, Callable[[], object]] = {
        "not torch.bfloat16": lambda: row_formats_triton.pack(fmt, half),
        r"\[n, 8\], not torch.float32 \(8, 4\) \(8, 1\)": lambda: row_formats_triton.pack(fmt, wide[:, :4]),
        r"\[n, 32\], not \(4, 8\)": lambda: row_formats_triton.unpack(fmt, flat.to(torch.uint8)),
        "uint8 memory, not torch.int8": lambda: row_formats_triton.write_rows(fmt, memory.char(), index[:, 0], flat),
        r"contiguous int64 \[4\]": lambda: row_formats_triton.write_rows(fmt, memory, index[:, 0], flat),
        "index scores of q": lambda: indexer_triton.index_scores(cube, flat[:, :7], flat[:, :2]),
        "rows are contiguous float32 or bfloat16, not torch.float64": lambda: indexer_triton.index_scores(
            cube, other, flat[:, :2].contiguous()
        ),
        "weights are contiguous float32": lambda: indexer_triton.index_scores(cube, flat, flat[:, :2]),
        "q is contiguous": lambda: indexer_triton.index_scores(cube.half(), flat, flat[:, :2]),
        "contiguous float32 scores and k >= 1, not torch.bfloat16": lambda: exact_topk_triton.exact_topk(half, 2),
        r"visible counts \(3,\)": lambda: exact_topk_triton.exact_topk(flat, 2, index[0]),
        r"rows \(4, 7\) for 4 queries": lambda: attend(cube, [PickedRows(flat[:, :7], index)], 1.0),
        "row numbers are int64, not torch.int32": lambda: attend(cube, [PickedRows(flat, index.int())], 1.0),
        "sinks are contiguous float32": lambda: attend(cube, [], 1.0, flat[:2, 0]),
        "do not make windows": lambda: compressor_triton.pool(cube, cube[:3]),
        "do not extend a window": lambda: compressor_triton.extend(None, flat[:0], flat[:0]),
        "a compressor's rows are float32": lambda: compressor_triton.pool(cube.bfloat16(), cube.bfloat16()),
        "each contiguous, not": lambda: compressor_triton.extend(None, turned, turned),
        r"an overlap is \[2, 4\]": lambda: compressor_triton.pool_overlapping(
            cube, cube, compressor.Overlap(flat, flat)
        ),
        "streams: contiguous float32 or bfloat16": lambda: hyper_connections_triton.collapse(cube[..., :7], flat),
        r"pre \(4, 8\) does not fit": lambda: hyper_connections_triton.collapse(cube, flat),
        "output, post and combination": lambda: hyper_connections_triton.spread(cube, flat, mixed),
        r"projection is contiguous float32 \(8, 24\)": lambda: hyper_connections_triton.mixing(
            torch.zeros(4, 2, 12, device=device), weights, rms_eps=0.0, floor=0.0, iterations=2
        ),
        "choose 5 of 8 experts from 1 of 2 groups": lambda: route(flat, 5, 1.0, groups=2),
        r"a bias of scores \(4, 8\)": lambda: route(flat, 2, 1.0, flat[0, :7]),
        "scores are contiguous float32, not torch.float64": lambda: route(other, 2, 1.0),
        r"chosen \(3, 3\) do not fit": lambda: experts_triton.hash_routing(flat, index[:3], 1.0),
        "experts of x": lambda: experts_triton.grouped_swiglu(flat, cube, cube, index, index),
        "contiguous and of one dtype, not torch.bfloat16": lambda: experts_triton.grouped_swiglu(
            flat, cube, torch.zeros(4, 8, 1).to(device).bfloat16(), index, index
        ),
    }
    for message, call in wrong.items():
        try:
            call()
        except ValueError as error:
            assert re.search(message, str(error)), (message, error)
            yield message
        else:
            raise AssertionError(f"taken: {message}")


def same_bits(a: torch.Tensor, b: torch.Tensor, device: str) -> bool:
    """Whether two results that differ only in what stood beside them are equal to the bit. In the interpreter a product
    is the host's BLAS, which on some CPUs adds up a tile's last columns in another order: there, nearly equal."""
    if device == "cpu":
        return torch.allclose(a, b, rtol=2**-7 if a.dtype is torch.bfloat16 else 1e-5, atol=1e-5, equal_nan=True)
    return torch.equal(a, b)


def compare_index_scores(device: str) -> Iterator[str]:
    for t, n, heads, dim, fmt in (
        (9, 70, 5, 13, plain(13, torch.float32)), (1, 130, 32, 128, REAL[5]), (3, 65, 64, 128, REAL[3]),
        (2, 20, 3, 41, ODD[1]), (2, 20, 3, 18, ODD[2]),
    ):  # fmt: skip
        q = torch.randn(t, heads, dim, generator=generator())
        x, weights = torch.randn(n, dim, generator=generator(1)), torch.randn(t, heads, generator=generator(2))
        x[5], q[-1, 1, 0] = x[19], torch.nan if t > 2 else 0.5
        keys = scattered(fmt, x, device)
        numbers = keys.read()
        numbers[7] = torch.nan
        for kind in (keys, numbers, numbers.bfloat16()):
            for queries in (q, q.bfloat16()):
                there = kind if isinstance(kind, PackedRows) else kind.to(device)
                found = indexer_triton.index_scores(queries.to(device), there, weights.to(device)).cpu()
                expected = indexer.index_scores(queries.to(device), there, weights.to(device)).cpu()
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
                assert same_bits(found[:, 5], found[:, 19], device), "equal keys"
                part = PackedRows(fmt, there.memory, there.offsets[3:10]) if kind is keys else there[3:10]
                alone = indexer_triton.index_scores(queries[:1].to(device), part, weights[:1].to(device)).cpu()
                assert same_bits(alone, found[:1, 3:10], device), "company"
                yield f"{t} {n}"
    one = torch.ones(1, 1, 1, device=device)
    for key, weight, expected in ((torch.inf, -1.0, 0.0), (torch.inf, 1.0, torch.inf), (torch.nan, 1.0, 0.0)):
        assert indexer_triton.index_scores(one, one[0] * key, one[0] * weight) == expected
        yield "edge"


def compare_exact_topk(device: str) -> Iterator[str]:
    """Rows of few different values, of every size, of neighbours, of nothing; longer than a block; none at all."""
    exact_topk_triton._BLOCK = 128
    few = torch.tensor([-torch.inf, torch.nan, -2.0, -0.0, 0.0, 1e-45, 1.0, torch.inf])
    for n, k in ((300, 12), (9, 4), (5, 8), (0, 3), (1, 1)):
        tied = few[torch.randint(0, 8, (n,), generator=generator(n))]
        sizes = 10.0 ** torch.randint(-30, 30, (n,), generator=generator(1))
        close = 1 + torch.randint(0, 300, (n,), generator=generator(2)) * 2.0**-23
        spread = torch.randn(n, generator=generator(k)) * sizes
        zeros = few[torch.randint(2, 5, (n,), generator=generator(4))]
        scores = torch.stack((tied, tied.flip(0), spread, close, -close, torch.full((n,), -torch.inf), zeros))
        visible = torch.tensor([n, n - 1, n + 1, n, n // 2, n, n])
        found = exact_topk_triton.exact_topk(scores.to(device), k, visible.to(device)).cpu()
        assert torch.equal(found, exact_topk.exact_topk(scores, k, visible)), (n, k)
        yield f"{n} {k}"
    scores = torch.randn(2, 1, 40, generator=generator())
    assert torch.equal(exact_topk_triton.exact_topk(scores.to(device), 5).cpu(), exact_topk.exact_topk(scores, 5))
    yield "all visible"
    assert exact_topk_triton.exact_topk(scores[:0].to(device), 5).shape == (0, 1, 5)
    yield "no rows"


def compare_candidate_blocks(device: str) -> Iterator[str]:
    """Ties, NaN, a short last block, blocks of no power of two, more blocks than there are, more than a program has."""
    candidate_blocks_triton._NUMBERS = 32
    few = torch.tensor([-torch.inf, torch.nan, -1.0, 0.0, 1.0, 2.0])
    for n, size, blocks in ((150, 4, 9), (47, 3, 5), (20, 8, 40), (5, 8, 1), (0, 4, 2)):
        tied = few[torch.randint(0, 6, (3, n), generator=generator(n))]
        scores = torch.cat((tied, torch.randn(3, n, generator=generator(1))))
        visible = torch.tensor([n, max(0, n - 1), n // 2, 0, n, min(n, 1)])
        keep = candidate_blocks.best_blocks(scores, visible, blocks, size)
        found = candidate_blocks_triton.best_blocks(scores.to(device), visible.to(device), blocks, size)
        assert torch.equal(found.cpu(), keep), (n, size)
        within = candidate_blocks_triton.within_blocks(scores.to(device), keep.to(device), size)
        assert same(within.cpu(), candidate_blocks.within_blocks(scores, keep, size)), (n, size)
        yield f"{n} {size}"


def compare_attention(device: str) -> Iterator[str]:
    """Picked rows and a range, each packed or not, with and without sinks, values a part of the row, and nothing."""
    sparse_attention_triton._PROGRAMS = 6
    for t, heads, dim, values, fmt, count in (
        (3, 5, 32, 32, ODD[0], 75), (2, 3, 41, 33, ODD[1], 40), (1, 17, 512, 512, REAL[0], 70),
        (2, 4, 576, 512, REAL[1], 40), (2, 4, 512, 512, REAL[4], 40),
    ):  # fmt: skip
        q = torch.randn(t, heads, dim, generator=generator())
        history = scattered(fmt, torch.randn(count, dim, generator=generator(1)), device)
        window = torch.randn(50, dim, generator=generator(2))
        index = torch.stack([torch.randperm(count, generator=generator(i))[: count - 5] for i in range(t)])
        index[0, 3:9], index[-1, -20:] = -1, -1
        first, end = torch.tensor([0, 7, 50])[:t], torch.tensor([33, 50, 50])[:t]
        sinks = torch.randn(heads, generator=generator(3)).to(device)
        picked = [PickedRows(rows, index.to(device)) for rows in (history, history.read(), history.read().bfloat16())]
        ranges = [RowRange(rows.to(device), first.to(device), end.to(device)) for rows in (window, window.bfloat16())]
        packed = RowRange(scattered(fmt, window, device), first.to(device), end.to(device))
        for number, (parts, sink) in enumerate((
            ([picked[0], ranges[0]], sinks), ([picked[1]], None), ([picked[2], ranges[1]], sinks),
            ([packed, picked[0]], None), ([packed], sinks),
        )):  # fmt: skip
            if number and dim > 32 and number != 3:
                continue  # the kinds of rows do not depend on dims
            queries = q.to(device) if number % 2 == 0 else q.to(device).bfloat16()
            found = sparse_attention_triton.sparse_attention(queries, parts, dim**-0.5, sink, values).cpu()
            expected = sparse_attention.sparse_attention(queries, parts, dim**-0.5, sink, values).cpu()
            assert found.dtype is expected.dtype
            exact = queries.dtype is torch.float32
            torch.testing.assert_close(found, expected, **({"rtol": 1e-4, "atol": 1e-5} if exact else BF16))
            yield f"{t} {heads} {dim}"
    sparse_attention_triton._PROGRAMS, sparse_attention_triton._UNFINISHED = 1, 17 * 32  # a query at a time
    q, rows = torch.randn(3, 17, 32, generator=generator()).to(device), torch.randn(70, 32, generator=generator(1))
    parts = [RowRange(rows.to(device), *torch.tensor([[0, 0, 9], [70, 0, 10]]).to(device))]
    found = sparse_attention_triton.sparse_attention(q, parts, 0.3)
    torch.testing.assert_close(found, sparse_attention.sparse_attention(q, parts, 0.3), rtol=1e-4, atol=1e-5)
    assert (found[1] == 0).all()
    yield "block by block"
    assert (sparse_attention_triton.sparse_attention(q, [], 0.3, q[0, :, 0].contiguous()) == 0).all()
    yield "no parts"


def compare_compressor(device: str) -> Iterator[str]:
    """Windows that overlap or not, after others or none, and one that grows; rows that are a part of wider ones."""
    for windows, m, dim in ((3, 4, 20), (2, 16, 130), (1, 2, 8), (0, 4, 8)):
        both = torch.randn(windows, m, 4 * dim, generator=generator()).to(device)
        both[..., 2 * dim :] *= 20
        values, gates = both[..., : 2 * dim], both[..., 2 * dim :].contiguous()
        for before in (None, compressor.Overlap(*torch.randn(2, m, dim, generator=generator(1)).to(device))):
            found = compressor_triton.pool_overlapping(values, gates, before)
            torch.testing.assert_close(found, compressor.pool_overlapping(values, gates, before), **CLOSE)
            yield "overlapping"
        if not windows:
            continue
        found = compressor_triton.pool(values, gates)
        torch.testing.assert_close(found, compressor.pool(values, gates), **CLOSE)
        running = expected = None
        for rows in (slice(0, 1), slice(1, m)):
            running = compressor_triton.extend(running, values[0, rows], gates[0, rows])
            expected = compressor.extend(expected, values[0, rows], gates[0, rows])
            torch.testing.assert_close(torch.stack(running), torch.stack(expected), **CLOSE)
        torch.testing.assert_close(running.entry(), found[0], **CLOSE)
        yield "plain"


def compare_hyper_connections(device: str) -> Iterator[str]:
    for rows, n, dim in ((3, 4, 24), (2, 3, 130), (1, 1, 16), (0, 4, 8)):
        streams = (torch.randn(rows, n, dim, generator=generator()) * 3).to(device)
        outs = n * (2 + n)
        numbers = [torch.randn(*shape, generator=generator(2)).to(device) for shape in ((outs, n * dim), (outs,), (3,))]
        weights = hyper_connections.MixingWeights(*numbers)
        head = hyper_connections.CollapseWeights(numbers[0][:n], numbers[1][:n], numbers[2][:1])
        output = torch.randn(rows, dim, generator=generator(3)).to(device)
        for x, y, close in ((streams, output, CLOSE), (streams.bfloat16(), output.bfloat16(), BF16)):
            knobs = {"rms_eps": 1e-6, "floor": 1e-6}
            mixed = hyper_connections.mixing(x, weights, iterations=20, **knobs)
            found = hyper_connections_triton.mixing(x, weights, iterations=20, **knobs)
            for one, other in zip(found, mixed, strict=True):
                torch.testing.assert_close(one, other, **CLOSE)
            pre = hyper_connections_triton.collapse_weights(x, head, **knobs)
            torch.testing.assert_close(pre, hyper_connections.collapse_weights(x, head, **knobs), **CLOSE)
            one = hyper_connections_triton.collapse(x, mixed.pre)
            torch.testing.assert_close(one, hyper_connections.collapse(x, mixed.pre), **CLOSE)
            one = hyper_connections_triton.spread(x, y, mixed)
            torch.testing.assert_close(one, hyper_connections.spread(x, y, mixed), **close)
            yield f"{rows} {n} {dim}"


def compare_routing(device: str) -> Iterator[str]:
    """With and without bias, groups and ties; more experts than a power of two; the table's experts."""
    for n, count, k, groups, top_groups in ((7, 9, 4, 3, 2), (2, 8, 6, 1, 1), (6, 12, 2, 4, 1), (2, 5, 5, 5, 5)):
        scores = torch.randn(n, count, generator=generator()).sigmoid()
        scores[-1] = 0.5
        scores[0, 0] = torch.nan
        bias = torch.randn(count, generator=generator(1))
        for add in (bias, torch.zeros(count), None):
            options = {"groups": groups, "top_groups": top_groups, "normalise": add is None}
            chosen, weights = experts.top_k_routing(scores, k, 1.5, add, **options)
            add = None if add is None else add.to(device)
            found, others = experts_triton.top_k_routing(scores.to(device), k, 1.5, add, **options)
            assert torch.equal(found.cpu(), chosen), (n, count, k)
            torch.testing.assert_close(others.cpu(), weights, equal_nan=True, **CLOSE)
            yield f"{n} {count}"
        table = torch.randint(0, count, (n, k), generator=generator(2), dtype=torch.int32)
        found, others = experts_triton.hash_routing(scores.to(device), table.to(device), 2.0)
        assert torch.equal(found.cpu(), table.long())
        torch.testing.assert_close(others.cpu(), experts.hash_routing(scores, table, 2.0)[1], equal_nan=True, **CLOSE)
        yield "hash"


def compare_experts(device: str) -> Iterator[str]:
    """An expert with more rows than a block, one with none, one twice in a row; dims that fill no block."""
    for n, count, hidden, inner, k in ((23, 5, 40, 24, 2), (1, 7, 70, 80, 3), (3, 2, 8, 8, 1), (0, 2, 8, 8, 2)):
        x = torch.randn(n, hidden, generator=generator())
        x[1:2, 3] = torch.nan
        gate_up = torch.randn(count, 2 * inner, hidden, generator=generator(1)) * hidden**-0.5
        down = torch.randn(count, hidden, inner, generator=generator(2)) * inner**-0.5
        chosen = torch.randint(1, count, (n, k), generator=generator(3))
        chosen[::2] = 1
        weights = torch.randn(n, k, generator=generator(4))
        for dtype, limit in ((torch.float32, None), (torch.float32, 0.4), (torch.bfloat16, 0.0)):
            places = [v.to(device) for v in (x.to(dtype), gate_up.to(dtype), down.to(dtype), chosen, weights)]
            found = experts_triton.grouped_swiglu(*places, limit)
            close = CLOSE if dtype is torch.float32 else BF16
            torch.testing.assert_close(found, experts.grouped_swiglu(*places, limit), equal_nan=True, **close)
            if n > 1:
                alone = [v[-1:] if i in (0, 3, 4) else v for i, v in enumerate(places)]
                assert same_bits(experts_triton.grouped_swiglu(*alone, limit), found[-1:], device), "company"
            yield f"{n} {hidden}"
        rows, owners = experts_triton._blocks(chosen, count)
        there = rows[rows >= 0]
        assert torch.equal(there.sort().values, torch.arange(n * k)), "every place once"
        assert torch.equal(chosen.flatten()[there], owners.repeat_interleave(rows.shape[1])[rows.flatten() >= 0])
        assert ((owners < count) & (owners >= -1)).all()


CLOSE = {"rtol": 1e-5, "atol": 2e-6}
BF16 = {"rtol": 2e-2, "atol": 2e-2}
COMPARISONS: dict[str, Callable[[str], Iterator[str]]] = {
    "row formats": compare_row_formats,
    "far rows": compare_far_rows,
    "refusals": compare_refusals,
    "index scores": compare_index_scores,
    "exact top-k": compare_exact_topk,
    "candidate blocks": compare_candidate_blocks,
    "sparse attention": compare_attention,
    "compressor": compare_compressor,
    "hyper-connections": compare_hyper_connections,
    "routing": compare_routing,
    "experts": compare_experts,
}


def main(device: str, *names: str) -> None:
    """All comparisons, or those of some names."""
    torch.set_num_threads(1)
    for name, comparison in COMPARISONS.items():
        if names and name not in names:
            continue
        try:
            print(f"{name}: {sum(1 for _ in comparison(device))} equal")  # noqa: T201
        except Exception:  # noqa: BLE001 (all of them are reported)
            print(f"{name}: {traceback.format_exc()}")  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
