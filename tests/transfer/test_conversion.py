"""Pages between unlike workers: where every byte goes is compared with one token of one head at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.model.errors import ConfigError, PeerError
from tailrace.transfer.messages import LandingGrant, PageDescriptor
from tailrace.transfer.page_plan import (
    Destination,
    PoolGeometry,
    head_map,
    moves,
    overlapping,
    owners,
    planned_bytes,
    segments,
    unit_segments,
)
from tailrace.transfer.transports.base import PostJob, ReadJob
from tailrace.transfer.transports.conversion import Conversion, PairConversions
from tailrace.transfer.transports.copying import SplitCopier
from tailrace.transfer.transports.landing import HEADER_BYTES
from tailrace.transfer.transports.packing import PackJob, UnpackJob
from tailrace.transfer.transports.reading import CopyJob, Mapped, check_alike

LAYERS, FIELDS, DIM = 2, 2, 3
POISON = 0xEE


def geometry(tokens: int, heads: int, tp: int, dtype: str = "float32") -> PoolGeometry:
    return PoolGeometry(tokens, LAYERS, FIELDS, heads, DIM, dtype, tp)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[PoolGeometry, PoolGeometry]:
    """Two workers of one model; page sizes divide or are multiples of a block of 8."""
    heads = draw(st.sampled_from([1, 2, 4]))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    tokens = st.sampled_from([1, 2, 4, 8, 16, 24])
    tps = st.sampled_from([1, 2, 4, 8])
    return geometry(draw(tokens), heads, draw(tps), dtype), geometry(draw(tokens), heads, draw(tps), dtype)


class Pools:
    """Two workers' pools and one sequence in the first: every (token, layer, field, head, dim) has a value of its own.

    The reference knows only where one token of one head stands in one rank's page.
    """

    def __init__(self, pair: tuple[PoolGeometry, PoolGeometry], num_tokens: int, rng: np.random.Generator) -> None:
        source, destination = pair
        self.source, self.destination, self.num_tokens = source, destination, num_tokens
        self.word = np.uint32 if source.dtype == "float32" else np.uint16
        shape = (num_tokens, LAYERS, FIELDS, source.kv_heads, DIM)
        self.values = rng.integers(0, np.iinfo(self.word).max, shape, dtype=self.word)
        self.ctx, self.ctx_pages = self._pool(source, rng)
        self.gen, self.gen_pages = self._pool(destination, rng)
        for token in range(num_tokens):
            page, row = self.ctx_pages[token // source.tokens_per_page], token % source.tokens_per_page
            for rank in range(source.tp):
                for i, head in enumerate(_heads(source, rank)):
                    self._view(self.ctx[rank], source)[page, :, :, i, row] = self.values[token, :, :, head]
        self.before = [pages.copy() for pages in self.gen]

    def _pool(self, g: PoolGeometry, rng: np.random.Generator) -> tuple[list[np.ndarray], list[int]]:
        n = -(-self.num_tokens // g.tokens_per_page)
        pages = [int(p) for p in rng.permutation(np.arange(1, n + 4))[:n]]
        return [np.full((n + 4, g.rank_page_bytes), POISON, np.uint8) for _ in range(g.tp)], pages

    def _view(self, pages: np.ndarray, g: PoolGeometry) -> np.ndarray:
        return pages.view(self.word).reshape(len(pages), LAYERS, FIELDS, len(_heads(g, 0)), g.tokens_per_page, DIM)

    def into(self, first_token: int) -> Destination:
        return Destination(tuple(self.gen_pages), first_token, self.num_tokens)

    def units(self, first_token: int) -> list[tuple[PageDescriptor, int]]:
        ordinals = overlapping(self.source.tokens_per_page, first_token, self.num_tokens)
        return [(PageDescriptor(0, o, self.ctx_pages[o], 7), 0) for o in ordinals]

    def check(self, first_token: int) -> None:
        """Tokens from `first_token` on are there, for each rank, and every other byte of other pages is as it was.

        Rows that no token fills, before the first and behind the last in their pages, are zero.
        """
        g = self.destination
        for rank in range(g.tp):
            expected = self.before[rank].copy()
            for token in {first_token, self.num_tokens - 1} if first_token < self.num_tokens else ():
                expected[self.gen_pages[token // g.tokens_per_page]] = 0
            for token in range(first_token, self.num_tokens):
                page, row = self.gen_pages[token // g.tokens_per_page], token % g.tokens_per_page
                for i, head in enumerate(_heads(g, rank)):
                    self._view(expected, g)[page, :, :, i, row] = self.values[token, :, :, head]
            np.testing.assert_array_equal(self.gen[rank], expected)


def _heads(g: PoolGeometry, rank: int) -> list[int]:
    """The model's heads of a rank, said another way: head h belongs to the ranks whose share of the ranks it is."""
    if g.tp <= g.kv_heads:
        return [h for h in range(g.kv_heads) if h * g.tp // g.kv_heads == rank]
    return [rank // (g.tp // g.kv_heads)]


@settings(deadline=None, max_examples=120)
@given(pair=pairs(), num_tokens=st.integers(1, 70), held=st.integers(0, 70), seed=st.integers(0, 1000))
def test_copied_bytes_are_those_of_a_copy_of_one_token_of_one_head_at_a_time(pair, num_tokens, held, seed):
    pools = Pools(pair, num_tokens, np.random.default_rng(seed))
    first = min(held, num_tokens)
    units = pools.units(first)
    nbytes = Conversion(*pair).copy(pools.ctx, pools.gen, units, pools.into(first))
    pools.check(first)
    assert nbytes == (num_tokens - first) * pair[0].kv_heads * pair[0].head_row_bytes


@settings(deadline=None, max_examples=120)
@given(pair=pairs(), num_tokens=st.integers(1, 70), held=st.integers(0, 70), seed=st.integers(0, 1000))
def test_packed_and_unpacked_bytes_are_those_of_a_copy_of_one_token_of_one_head_at_a_time(pair, num_tokens, held, seed):
    rng = np.random.default_rng(seed)
    pools = Pools(pair, num_tokens, rng)
    first = min(held, num_tokens)
    units = pools.units(first)
    order = [int(i) for i in rng.permutation(len(units))]  # pages may stand in a chunk in any order
    conversion = Conversion(*pair)
    room = np.full(len(units) * conversion.wire_page_bytes, POISON, np.uint8)
    numbers = np.array([units[i][0].page for i in order], np.int64)
    used = conversion.pack(pools.ctx, numbers, room)
    assert used == len(units) * pair[0].tokens_per_page * pair[0].kv_heads * pair[0].head_row_bytes
    places = [order.index(i) for i in range(len(units))]
    conversion.unpack(room[:used], pools.gen, places, units, pools.into(first))
    pools.check(first)


@given(pair=pairs(), pages=st.integers(1, 9))
def test_the_plan_of_whole_pages_fills_exactly_the_page_bytes_of_every_rank(pair, pages):
    source, destination = pair
    planned = planned_bytes(source, destination, 0, pages * destination.tokens_per_page)
    assert planned == [pages * destination.rank_page_bytes] * destination.tp


@given(pair=pairs(), first=st.integers(0, 100), n=st.integers(0, 100))
def test_segments_cover_each_token_once_and_stay_within_their_pages(pair, first, n):
    a, b = (g.tokens_per_page for g in pair)
    tokens = []
    for s in segments(a, b, first, first + n):
        assert s.src_token + s.n <= a and s.dst_token + s.n <= b
        assert s.src_ordinal * a + s.src_token == s.dst_ordinal * b + s.dst_token
        tokens += range(s.src_ordinal * a + s.src_token, s.src_ordinal * a + s.src_token + s.n)
    assert tokens == list(range(first, first + n))
    ordinals = {s.src_ordinal for s in segments(a, b, first, first + n)}
    assert sorted(ordinals) == list(overlapping(a, first, first + n))


@given(pair=pairs(), num_tokens=st.integers(1, 150), held=st.integers(0, 150), order=st.randoms())
def test_grouped_moves_are_the_segments_of_each_page(pair, num_tokens, held, order):
    a, b = (g.tokens_per_page for g in pair)
    into = Destination(tuple(range(100, 100 + -(-num_tokens // b))), min(held, num_tokens), num_tokens)
    ordinals = list(range(-(-num_tokens // a)))
    order.shuffle(ordinals)
    found = [
        (ordinals[place], page, part.src_token, part.dst_token, part.n)
        for part in moves(a, b, np.array(ordinals, np.int64), into)
        for place, page in zip(part.places.tolist(), part.dst_pages.tolist(), strict=True)
    ]
    expected = [
        (s.src_ordinal, into.pages[s.dst_ordinal], s.src_token, s.dst_token, s.n)
        for ordinal in ordinals
        for s in unit_segments(a, b, ordinal, into)
    ]
    assert sorted(found) == sorted(expected)


def test_a_head_that_several_ranks_hold_is_read_from_one_and_written_to_all():
    one, four = geometry(4, 2, 1), geometry(4, 2, 4)
    assert owners(four) == [(0, 0, 1), (2, 1, 1)]
    assert [c[:4] for c in head_map(four, one)] == [(0, 0, 0, 0), (2, 0, 0, 1)]
    assert [c[:4] for c in head_map(one, four)] == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 2, 0), (0, 1, 3, 0)]


def test_heads_that_ranks_cannot_share_evenly_are_refused():
    with pytest.raises(ConfigError, match="3 ranks cannot share 2 KV heads"):
        geometry(4, 2, 3)


def test_another_dtype_without_a_codec_is_refused_with_both_named():
    with pytest.raises(PeerError, match=r"float32 .*bfloat16"):
        Conversion(geometry(4, 2, 1), geometry(4, 2, 1, "bfloat16"))


# ------------------------------------------------------------------------------------------------ inside the transports

KEY = ("r", 0)


def finish(job: Any) -> Any:
    assert all(job.steps())
    return job.result()


def landed(pools: Pools, conversion: Conversion, generations: np.ndarray, order: list[int]) -> tuple[np.ndarray, Any]:
    """A chunk that ctx has packed, and what its notification says."""
    units = pools.units(0)
    pages = tuple(units[i][0] for i in order)
    room = len(units) * conversion.wire_page_bytes
    chunk = np.full(HEADER_BYTES + room, POISON, np.uint8)
    job = PostJob(1, KEY, "g", pages, LandingGrant(0, 1, room, len(units)))
    pack = finish(PackJob(job, 0, chunk, Mapped(tuple(pools.ctx), generations), None, conversion))
    assert pack.error is None and pack.nbytes == pack.landed.nbytes <= room
    return chunk, pack.landed


@settings(deadline=None, max_examples=30)
@given(pair=pairs(), num_tokens=st.integers(1, 50), held=st.integers(0, 50), seed=st.integers(0, 1000))
def test_a_landing_chunk_carries_ctxs_pages_and_gen_unpacks_what_it_lacks(pair, num_tokens, held, seed):
    rng = np.random.default_rng(seed)
    pools = Pools(pair, num_tokens, rng)
    conversion, first = Conversion(*pair), min(held, num_tokens)
    order = rng.permutation(len(pools.units(0))).tolist()
    chunk, notice = landed(pools, conversion, np.full(len(pools.ctx[0]), 7, np.uint64), order)
    lacking = dict(pools.units(first))
    units = tuple((page, 0) for page in notice.pages if page in lacking)  # gen takes them in the order of the chunk
    job = ReadJob(1, KEY, "c", units, notice, pools.into(first))
    done = finish(UnpackJob(job, notice, chunk, tuple(pools.gen), None, conversion))
    assert done.error is None and list(done.units_ok) == [page for page, _ in units]
    assert done.logical_bytes == (num_tokens - first) * pair[0].kv_heads * pair[0].head_row_bytes
    pools.check(first)


def test_a_landing_chunk_with_a_flipped_byte_writes_nothing():
    pools = Pools((geometry(8, 2, 2), geometry(16, 2, 1)), 20, np.random.default_rng(0))
    conversion = Conversion(pools.source, pools.destination)
    chunk, notice = landed(pools, conversion, np.full(len(pools.ctx[0]), 7, np.uint64), [0, 1, 2])
    chunk[HEADER_BYTES + 100] ^= 1
    job = ReadJob(1, KEY, "c", tuple(pools.units(0)), notice, pools.into(0))
    done = finish(UnpackJob(job, notice, chunk, tuple(pools.gen), None, conversion))
    assert done.error == "corrupt" and not done.units_ok
    assert all((now == before).all() for now, before in zip(pools.gen, pools.before, strict=True))


def test_a_page_that_changed_while_it_was_read_is_found_stale_also_between_unlike_pages():
    pools = Pools((geometry(8, 2, 2), geometry(16, 2, 1)), 20, np.random.default_rng(0))
    generations = np.full(len(pools.ctx[0]), 7, np.uint64)
    generations[pools.ctx_pages[1]] = 8
    conversion = Conversion(pools.source, pools.destination)
    job = ReadJob(1, KEY, "c", tuple(pools.units(0)), None, pools.into(0))
    source, copier = Mapped(tuple(pools.ctx), generations), SplitCopier("test", threads=1)
    done = finish(CopyJob(job, source, tuple(pools.gen), copier, None, conversion))
    assert [d.ordinal for d in done.units_ok] == [0, 2] and [d.ordinal for d in done.units_stale] == [1]


def test_a_peer_whose_memory_is_not_what_it_said_is_refused_with_both_sizes():
    ctx, gen = geometry(8, 2, 2), geometry(16, 2, 1)
    conversion = Conversion(ctx, gen)
    right, ours = [np.zeros((2, ctx.rank_page_bytes), np.uint8)] * 2, [np.zeros((2, gen.rank_page_bytes), np.uint8)]
    check_alike("c", right, ours, conversion)
    for wrong in (right[:1], [right[0], right[1][:, :-4]], [*right, right[0]]):
        with pytest.raises(PeerError, match=f"by what it said {ctx.rank_page_bytes} \\+ {ctx.rank_page_bytes}"):
            check_alike("c", wrong, ours, conversion)
    with pytest.raises(PeerError, match=f"{ctx.rank_page_bytes} bytes, ours {gen.rank_page_bytes}"):
        check_alike("c", right[:1], ours, None)


def test_what_a_former_peer_has_landed_can_still_be_unpacked_and_few_of_them_are_remembered():
    conversions, one = PairConversions(), Conversion(geometry(8, 2, 1), geometry(16, 2, 1))
    conversions.put("c0", one)
    conversions.put("alike", None)
    conversions.end("c0")
    assert conversions.get("c0") is one and conversions.get("alike") is None
    conversions.put("lives", one)
    for n in range(1, 100):
        conversions.put(f"c{n}", one)
        conversions.end(f"c{n}")
    assert conversions.get("c0") is None and conversions.get("c99") is one and conversions.get("lives") is one
    conversions.put("c99", None)
    assert conversions.get("c99") is None
