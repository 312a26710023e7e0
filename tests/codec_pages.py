"""Pages that codecs must take, and the comparison of every Triton kernel with its twin; run as a program it makes it.

TRITON_INTERPRET=1 python codec_pages.py cpu        in Triton's interpreter
python codec_pages.py cuda                          on the GPU
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

DTYPES = (torch.bfloat16, torch.float32)
INTS = {torch.bfloat16: (torch.int16, 16), torch.float16: (torch.int16, 16), torch.float32: (torch.int32, 32)}


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int64 bit patterns as numbers of `dtype`."""
    kind, size = INTS[dtype]
    return torch.where(bits >= 1 << (size - 1), bits - (1 << size), bits).to(kind).view(dtype)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return from_bits(torch.randint(0, 1 << INTS[dtype][1], shape, generator=generator), dtype)


def ordinary(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """As keys and values are: heads of different size, an outlier channel, zeros where no token has been."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.logspace(-1, 1, shape[3]).view(-1, 1, 1)
    x[..., shape[-1] // 3] *= 20
    x[-1, ..., shape[-2] // 2 :, :] = 0
    return x.to(dtype)


def broken(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """NaN, infinities, denormals, minus zero, the largest numbers, each in some rows."""
    x = ordinary(shape, dtype).view(-1, shape[-1]).clone()
    largest = torch.finfo(dtype).max
    odd = [torch.nan, torch.inf, -torch.inf, largest, -largest, -0.0, 2.0**-130, -(2.0**-133), 1e-30, 3e38]
    for i, value in enumerate(odd):
        x[3 * i % len(x), (5 * i) % shape[-1]] = value
    x[-1] = 0.0
    x[-2] = 2.0**-133
    x[-3] = torch.tensor([largest, -largest] * (shape[-1] // 2)).to(dtype)
    x[-4] = from_bits(torch.tensor([0x7F81, 0xFFC1] if dtype is torch.bfloat16 else [0x7FFFFFFF, 0xFFFFFFFF]), dtype)[0]
    return x.view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, any NaN being equal to any other."""
    nan = torch.isnan(a)
    return bool((nan == torch.isnan(b)).all()) and same_bits(a.masked_fill(nan, 0), b.masked_fill(nan, 0))


def cases() -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, pool, page numbers): odd shapes, both dims, an odd number of pages in no order, a page of no tokens."""
    for dtype in DTYPES:
        for dim, tokens, heads in ((64, 16, 3), (128, 5, 1), (96, 3, 2)):
            shape = (6, 1, 2, heads, tokens, dim)
            pages = torch.tensor([4, 1, 5])
            name = f"{str(dtype)[6:]}-{dim}"
            yield f"ordinary-{name}", ordinary(shape, dtype), pages
            if dim == 64:
                yield f"broken-{name}", broken(shape, dtype), pages
                yield f"random-{name}", random_bits(shape, dtype), pages
    yield "none", ordinary((3, 1, 2, 1, 4, 64), torch.bfloat16), torch.empty(0, dtype=torch.int64)


def compare(device: str) -> int:
    """Every kernel against its twin: wire rows to the bit, pages to the bit; returns the number of comparisons."""
    from tailrace.kernels import page_codecs, page_codecs_lossless, page_codecs_lossless_triton, page_codecs_triton

    done = 0
    for name, pool, pages in cases():
        shape = pool.shape[1:]
        for codec in ("int8", "fp8", "int4"):
            bound = page_codecs.int4_bytes(shape) if codec == "int4" else page_codecs.scaled_bytes(shape)
            rows = torch.full((len(pages), bound), 7, dtype=torch.uint8)
            found = rows.to(device, copy=True)
            getattr(page_codecs, f"encode_{codec}")(pool, pages, rows)
            getattr(page_codecs_triton, f"encode_{codec}")(pool.to(device), pages.to(device), found)
            assert same_bits(rows, found.cpu()), (codec, name, "encode")
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                twin, kernel = torch.full_like(pool, 9, dtype=dtype), torch.full_like(pool, 9, dtype=dtype).to(device)
                getattr(page_codecs, f"decode_{codec}")(rows, twin, pages)
                getattr(page_codecs_triton, f"decode_{codec}")(found, kernel, pages.to(device))
                assert same(twin, kernel.cpu()), (codec, name, dtype, "decode")
                done += 1
        rows = torch.full((len(pages), page_codecs_lossless.lossless_bound(shape, pool.dtype)), 7, dtype=torch.uint8)
        found = rows.to(device, copy=True)
        lengths = page_codecs_lossless.encode_lossless(pool, pages, rows)
        others = page_codecs_lossless_triton.encode_lossless(pool.to(device), pages.to(device), found).cpu()
        assert torch.equal(lengths, others), ("lossless", name, lengths, others)
        for row, other, length in zip(rows, found.cpu(), lengths.tolist(), strict=True):
            assert same_bits(row[:length], other[:length]), ("lossless", name, "encode")
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            twin, kernel = torch.full_like(pool, 9, dtype=dtype), torch.full_like(pool, 9, dtype=dtype).to(device)
            page_codecs_lossless.decode_lossless(rows, twin, pages)
            page_codecs_lossless_triton.decode_lossless(found, kernel, pages.to(device))
            equal = same_bits if dtype == pool.dtype else same
            assert equal(twin, kernel.cpu()), ("lossless", name, dtype, "decode")
            done += 1
    return done


if __name__ == "__main__":
    sys.stdout.write(f"{compare(sys.argv[1])} equal\n")
