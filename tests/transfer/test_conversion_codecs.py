"""Codecs between unlike workers: the bytes are those of the codec alone on whole pages, wherever they end up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_pages import ordinary
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import PeerError
from tailrace.transfer.codecs import codec_named
from tailrace.transfer.page_list import PageDescriptor
from tailrace.transfer.page_plan import Destination, PoolGeometry, overlapping
from tailrace.transfer.transports.conversion import CodecUse, Conversion

LAYERS, FIELDS, DIM = 2, 2, 64
AUTO = "auto(raw,lossless,int8)"


def geometry(tokens: int, heads: int, tp: int, dtype: str) -> PoolGeometry:
    return PoolGeometry(tokens, LAYERS, FIELDS, heads, DIM, dtype, tp)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PoolGeometry, PoolGeometry]:
    heads = draw(st.sampled_from([1, 2, 4]))
    tokens, tps = st.sampled_from([4, 8, 24]), st.sampled_from([1, 1, 2, 4])
    dtypes = st.sampled_from(["float32", "bfloat16"])
    return tuple(geometry(draw(tokens), heads, draw(tps), draw(dtypes)) for _ in range(2))  # type: ignore[return-value]


class Scene:
    """A sequence in a ctx's pool of whole pages, and the pools of unlike workers that it is to cross between."""

    def __init__(self, source: PoolGeometry, destination: PoolGeometry, num_tokens: int, seed: int) -> None:
        self.source, self.destination, self.num_tokens = source, destination, num_tokens
        rng = np.random.default_rng(seed)
        self.whole = geometry(source.tokens_per_page, source.kv_heads, 1, source.dtype)
        n = -(-num_tokens // source.tokens_per_page)
        dtype = getattr(torch, source.dtype)
        shape = (n + 2, LAYERS, FIELDS, source.kv_heads, source.tokens_per_page, DIM)
        self.pages = ordinary(shape, dtype, seed)
        self.ctx_pages = [int(p) for p in rng.permutation(np.arange(1, n + 2))[:n]]
        m = -(-num_tokens // destination.tokens_per_page)
        self.gen_pages = [int(p) for p in rng.permutation(np.arange(1, m + 3))[:m]]
        self.num_gen_pages = m + 3

    def ranks(self) -> list[np.ndarray]:
        """Ctx's pages, each rank's heads in its array."""
        ours = [np.zeros((len(self.pages), self.source.rank_page_bytes), np.uint8) for _ in range(self.source.tp)]
        units = [(PageDescriptor(0, o, o, 1), 0) for o in range(1, len(self.pages))]
        into = Destination(tuple(range(len(self.pages))), 0, len(self.pages) * self.source.tokens_per_page)
        Conversion(self.whole, self.source).copy([self._bytes(self.pages)], ours, units, into)
        return ours

    def _bytes(self, pages: torch.Tensor) -> np.ndarray:
        return pages.view(torch.uint8).view(len(pages), -1).numpy()

    def units(self, first: int) -> list[tuple[PageDescriptor, int]]:
        ordinals = overlapping(self.source.tokens_per_page, first, self.num_tokens)
        return [(PageDescriptor(0, o, self.ctx_pages[o], 7), 0) for o in ordinals]

    def into(self, first: int) -> Destination:
        return Destination(tuple(self.gen_pages), first, self.num_tokens)

    def empty(self, poison: int = 0xEE) -> list[np.ndarray]:
        shape = (self.num_gen_pages, self.destination.rank_page_bytes)
        return [np.full(shape, poison, np.uint8) for _ in range(self.destination.tp)]

    def expected(self, codec: str, first: int, poison: int) -> list[np.ndarray]:
        """Whole pages through the codec alone, then a copy without one."""
        made = codec_named(codec)
        rows = torch.empty((len(self.pages), made.encoded_bytes(self.pages.shape[1:], self.pages.dtype)),
                           dtype=torch.uint8)  # fmt: skip
        made.encode(self.pages, rows)
        back = torch.empty_like(self.pages, dtype=getattr(torch, self.destination.dtype))
        made.decode(rows, back)
        form = geometry(self.source.tokens_per_page, self.source.kv_heads, 1, self.destination.dtype)
        gen = self.empty(poison)
        Conversion(form, self.destination).copy([self._bytes(back)], gen, self.units(first), self.into(first))
        return gen

    def check(self, found: list[np.ndarray], codec: str, first: int) -> None:
        """Every byte that the tokens have is right; pages that have none of them are untouched."""
        for mine, one, other in zip(
            found, self.expected(codec, first, 0xEE), self.expected(codec, first, 0x11), strict=True
        ):
            written = one == other
            np.testing.assert_array_equal(mine[written], one[written])
            untouched = ~written.any(1)
            assert (mine[untouched] == 0xEE).all()


@settings(deadline=None, max_examples=40)
@given(
    pair=pairs(),
    num_tokens=st.integers(1, 50),
    held=st.integers(0, 50),
    seed=st.integers(0, 1000),
    codec=st.sampled_from(["lossless", "int8", "int4", AUTO]),
)
def test_packed_and_unpacked_pages_are_those_of_the_codec_alone(pair, num_tokens, held, seed, codec):
    scene, first = Scene(*pair, num_tokens, seed), min(held, num_tokens - 1)
    conversion, units = Conversion(*pair, codec_named(codec)), scene.units(first)
    order = [int(i) for i in np.random.default_rng(seed).permutation(len(units))]
    room = np.full(len(units) * conversion.wire_page_bytes, 0xDD, np.uint8)
    packing, unpacking = CodecUse(), CodecUse()
    numbers = np.array([units[i][0].page for i in order], np.int64)
    used = conversion.pack(scene.ranks(), numbers, room, packing)
    assert used <= len(room) and conversion.may_have(used, len(units))
    gen = scene.empty()
    places = [order.index(i) for i in range(len(units))]
    conversion.unpack(room[:used], gen, places, units, scene.into(first), unpacking)
    scene.check(gen, codec, first)
    assert packing.codec == unpacking.codec == ("raw" if codec == AUTO else codec)
    lossy = codec in ("int8", "int4") or pair[0].dtype != pair[1].dtype
    assert packing.step == unpacking.step and bool(packing.step) == lossy
    assert packing.seconds > 0 and unpacking.seconds > 0


@settings(deadline=None, max_examples=20)
@given(pair=pairs(), num_tokens=st.integers(1, 50), held=st.integers(0, 50), seed=st.integers(0, 1000))
def test_a_reader_converts_only_what_has_another_dtype(pair, num_tokens, held, seed):
    scene, first = Scene(*pair, num_tokens, seed), min(held, num_tokens - 1)
    gen, use = scene.empty(), CodecUse()
    Conversion(*pair, codec_named("int8")).copy(scene.ranks(), gen, scene.units(first), scene.into(first), use)
    recoded = pair[0].dtype != pair[1].dtype
    scene.check(gen, "int8" if recoded else "lossless", first)
    assert (use.codec, use.step) == (("int8", f"{pair[0].dtype}+int8") if recoded else ("raw", ""))


def test_wire_forms_that_cannot_be_are_refused_and_nothing_is_written():
    ours, theirs = (geometry(8, 2, 1, "bfloat16") for _ in range(2))
    scene = Scene(ours, theirs, 30, 3)
    conversion, units = Conversion(ours, theirs, codec_named("lossless")), scene.units(0)
    room = np.zeros(len(units) * conversion.wire_page_bytes, np.uint8)
    used = conversion.pack(scene.ranks(), np.array([d.page for d, _ in units]), room)
    gen = scene.empty()
    for spoil in (slice(0, 8), slice(8, 16), slice(40, 44)):  # number of pages, a length, the first page's head
        data = room[:used].copy()
        data[spoil] = 0xFF
        with pytest.raises(PeerError):
            conversion.unpack(data, gen, range(len(units)), units, scene.into(0))
    with pytest.raises(PeerError):
        conversion.unpack(room[: used - 1], gen, range(len(units)), units, scene.into(0))
    assert all((pages == 0xEE).all() for pages in gen)


def test_a_codec_that_has_no_form_for_the_pages_is_refused_by_name():
    narrow = PoolGeometry(8, LAYERS, FIELDS, 2, 80, "bfloat16")
    with pytest.raises(PeerError, match="codec int4: .*multiple of 32, not 80"):
        Conversion(narrow, narrow, codec_named("int4"))
