"""The codecs by name: wire forms of whole pages, on the device that the pages are on.

A codec of a pair is made by `codec_named` and used by its Conversion: at ctx `encode`, at gen `decode`. The plain twins
of kernels/page_codecs*.py work on the CPU, the Triton kernels on a GPU. `auto(...)` is a codec whose wire rows say
which one made them: [int32 index, bytes of a number, length, 0 | that codec's row]. Codecs may be used by several
threads at once. Knows no peer and no transport.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from tailrace.kernels import page_codecs, page_codecs_lossless
from tailrace.kernels.page_codecs import aligned
from tailrace.transfer.codec_choice import KINDS, LOSSLESS, RAW, Choice, Cost, LinkMeter, candidates_of, choose

_TAG_BYTES = 16
_NUMBERED = tuple(KINDS)  # a wire row's index
_DTYPES = {torch.bfloat16: 2, torch.float32: 4}
_TRIED_NUMBERS = 1 << 17  # numbers of pages that a codec is timed on before its first use
_FADE_BYTES = 256 << 20


class PageCodec(Protocol):
    """An encoding of whole pages. `lossy`: what comes out may differ from what went in."""

    name: str
    lossy: bool

    def encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Most bytes of a wire row of a page [layer, field, kv_head, token, dim]. ValueError: it has no such form."""
        ...

    def encode(self, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """pages [n, layer, field, kv_head, token, dim] into out [n, bound] uint8; lengths [n] int64."""
        ...

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """data [n, bound] uint8 into out [n, layer, field, kv_head, token, dim] of any float dtype.

        Raises:
            ValueError: a row is none of this codec.
        """
        ...

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """As encode, of pages [n] int64 of a pool, in one pass."""
        ...

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        """As decode, into pages [n] int64 of a pool, in one pass."""
        ...

    def made_by(self, row: torch.Tensor) -> str:
        """The codec that made a wire row. ValueError: it is none of ours."""
        ...


class _Base:
    """`encode` and `decode` of all pages in order; rows that say nothing of who made them."""

    name: str

    def made_by(self, row: torch.Tensor) -> str:
        return self.name

    def encode(self, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self.encode_pages(pages, torch.arange(len(pages), device=pages.device), out)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        self.decode_pages(data, out, torch.arange(len(out), device=out.device))

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        raise NotImplementedError


class ScaledCodec(_Base):
    """int8, fp8 and int4: rows of one length, whatever dtype they are made from."""

    lossy = True

    def __init__(self, name: str) -> None:
        self.name = name

    def encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return page_codecs.int4_bytes(shape) if self.name == "int4" else page_codecs.scaled_bytes(shape)

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        getattr(_scaled_kernels(pool), f"encode_{self.name}")(pool, pages, out)
        return torch.full((len(pages),), out.shape[1], dtype=torch.int64, device=out.device)

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        getattr(_scaled_kernels(pool), f"decode_{self.name}")(data, pool, pages)


class LosslessCodec(_Base):
    """Exponent coding: every bit comes back, rows of different length."""

    name, lossy = LOSSLESS, False

    def encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return page_codecs_lossless.lossless_bound(shape, dtype)

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return _lossless_kernels(pool).encode_lossless(pool, pages, out)

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        _lossless_kernels(pool).decode_lossless(data, pool, pages)


class RawRows(_Base):
    """Pages as they are, as one of the forms of `auto`; a pair whose codec is raw copies without it.

    `source`: what the rows to be decoded were made from.
    """

    name, lossy = RAW, False

    def __init__(self, source: torch.dtype = torch.bfloat16) -> None:
        self._source = source

    def encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return _page_bytes(shape, dtype)

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        rows = pool.view(torch.uint8).view(len(pool), -1)
        out[:, : rows.shape[1]] = rows.index_select(0, pages)
        return torch.full((len(pages),), rows.shape[1], dtype=torch.int64, device=out.device)

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        rows = data[:, : _page_bytes(pool.shape[1:], self._source)].contiguous().view(self._source)
        page_codecs.scatter(pool, pages, rows)


class AutoCodec(_Base):
    """The cheapest of several codecs, by what this pair's link and these codecs are seen to take.

    Attributes:
        name: auto(...).
        lossy: whether one of them is.
        choice: the present one and why; ctx's.
        link: told of every write of the pair, by whoever posts.
        told: called with the choice for each post, in the thread that encodes.
    """

    def __init__(self, name: str, candidates: Sequence[str]) -> None:
        self.name = name
        self.told: Callable[[Choice], None] = lambda choice: None
        self.lossy = any(KINDS[one].lossy for one in candidates)
        self.choice = Choice(RAW if RAW in candidates else candidates[0], "nothing was sent yet")
        self.link = LinkMeter()
        self._codecs = {one: codec_named(one) for one in candidates}
        self._seen: dict[str, _Seen] = {}
        self._lock = threading.Lock()

    def encoded_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return _TAG_BYTES + max(
            aligned(codec.encoded_bytes(shape, dtype)) for codec in self._usable(shape, dtype).values()
        )

    def encode_pages(self, pool: torch.Tensor, pages: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        usable = self._usable(pool.shape[1:], pool.dtype)
        name = self._choose(usable, pool)
        room = torch.empty((len(pages), usable[name].encoded_bytes(pool.shape[1:], pool.dtype)), dtype=torch.uint8,
                           device=out.device)  # fmt: skip
        started = time.perf_counter()
        lengths = usable[name].encode_pages(pool, pages, room)
        self._spent(name, len(pages) * _page_bytes(pool.shape[1:], pool.dtype), int(lengths.sum()), started)
        tags = torch.zeros((len(pages), 4), dtype=torch.int32)
        tags[:, 0], tags[:, 1], tags[:, 2] = _NUMBERED.index(name), _DTYPES[pool.dtype], lengths.to(torch.int32)
        out[:, :_TAG_BYTES] = tags.view(torch.uint8)
        out[:, _TAG_BYTES : _TAG_BYTES + room.shape[1]] = room
        return lengths + _TAG_BYTES

    def decode_pages(self, data: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor) -> None:
        if not len(pages):
            return
        name, source = self._tag(data[0])
        codec = RawRows(source) if name == RAW else self._codecs[name]
        bound = codec.encoded_bytes(pool.shape[1:], source)
        if _TAG_BYTES + bound > data.shape[1]:
            raise ValueError(f"rows of {data.shape[1]} bytes do not hold pages by {name}")
        codec.decode_pages(data[:, _TAG_BYTES : _TAG_BYTES + bound].contiguous(), pool, pages)

    def made_by(self, row: torch.Tensor) -> str:
        return self._tag(row)[0]

    def _tag(self, row: torch.Tensor) -> tuple[str, torch.dtype]:
        index, number_bytes, _, _ = row[:_TAG_BYTES].cpu().clone().view(torch.int32).tolist()
        dtypes = [dtype for dtype, size in _DTYPES.items() if size == number_bytes]
        if not 0 <= index < len(_NUMBERED) or _NUMBERED[index] not in self._codecs or not dtypes:
            raise ValueError(f"a wire row of codec {index} and numbers of {number_bytes} bytes cannot be")
        return _NUMBERED[index], dtypes[0]

    def _usable(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, PageCodec]:
        """Those that have a form for such pages."""
        return {name: codec for name, codec in self._codecs.items() if supports(codec, shape, dtype)}

    def _choose(self, usable: dict[str, PageCodec], pool: torch.Tensor) -> str:
        with self._lock:
            present, rate = self.choice.codec, self.link.rate
            if rate is not None:
                for name, codec in usable.items():
                    if name not in self._seen:
                        self._seen[name] = _tried(codec, pool)
            costs = {name: self._seen[name].cost for name in usable if name in self._seen}
            choice = self.choice = choose(costs, rate, present)
        self.told(choice)
        return choice.codec

    def _spent(self, name: str, page_bytes: int, wire_bytes: int, started: float) -> None:
        took = time.perf_counter() - started
        with self._lock:
            if name in self._seen:
                self._seen[name].add(page_bytes, wire_bytes, took)


class _Seen:
    """What a codec's encoding takes, the newest weighing most; its decoding as it was tried."""

    def __init__(self, decode: float) -> None:
        self._bytes = self._wire = self._seconds = 0.0
        self._decode = decode

    def add(self, page_bytes: int, wire_bytes: int, seconds: float) -> None:
        self._bytes += page_bytes
        self._wire += wire_bytes
        self._seconds += seconds
        if self._bytes > _FADE_BYTES:
            self._bytes, self._wire, self._seconds = self._bytes / 2, self._wire / 2, self._seconds / 2

    @property
    def cost(self) -> Cost:
        return Cost(self._seconds / self._bytes, self._decode, self._bytes / self._wire)


def _tried(codec: PageCodec, pool: torch.Tensor) -> _Seen:
    """Encode and decode a few pages of a pool, twice: the first time pays for what is only paid once."""
    number = max(1, min(len(pool), _TRIED_NUMBERS // max(1, pool[0].numel())))
    pages = torch.arange(len(pool) - number, len(pool), device=pool.device)
    rows = torch.empty((number, codec.encoded_bytes(pool.shape[1:], pool.dtype)), dtype=torch.uint8, device=pool.device)
    back = torch.empty_like(pool[:number])
    page_bytes = number * _page_bytes(pool.shape[1:], pool.dtype)
    decoder = RawRows(pool.dtype) if codec.name == RAW else codec
    started = between = ended = 0.0
    wire = 0
    for _ in range(2):
        started = time.perf_counter()
        wire = int(codec.encode_pages(pool, pages, rows).sum())
        between = time.perf_counter()
        decoder.decode(rows, back)
        ended = time.perf_counter()
    free = codec.name == RAW  # its copy is made whatever the codec
    seen = _Seen(0.0 if free else (ended - between) / page_bytes)
    seen.add(page_bytes, wire, 0.0 if free else between - started)
    return seen


def codec_named(name: str) -> PageCodec:
    """A codec, or `auto(...)` over several. ValueError: there is none such."""
    candidates = candidates_of(name)
    if candidates != (name,):
        return AutoCodec(name, candidates)
    if name == RAW:
        return RawRows()
    return LosslessCodec() if name == LOSSLESS else ScaledCodec(name)


def supports(codec: PageCodec, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a codec has a form for pages [layer, field, kv_head, token, dim]."""
    try:
        codec.encoded_bytes(shape, dtype)
    except ValueError:
        return False
    return True


def _page_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    rows, dim = page_codecs.rows_and_dim(shape)
    return rows * dim * dtype.itemsize


def _scaled_kernels(pool: torch.Tensor) -> Any:
    if not pool.is_cuda:
        return page_codecs
    from tailrace.kernels import page_codecs_triton  # triton is not there without a GPU

    return page_codecs_triton


def _lossless_kernels(pool: torch.Tensor) -> Any:
    if not pool.is_cuda:
        return page_codecs_lossless
    from tailrace.kernels import page_codecs_lossless_triton  # triton is not there without a GPU

    return page_codecs_lossless_triton
