"""The sums that gen compares where its pages are not ctx's: any ranks, any page sizes, from any first missing token."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tailrace.transfer.core_events import SumJob, SumPart
from tailrace.transfer.messages import PageDescriptor
from tailrace.transfer.page_plan import Destination, PoolGeometry, overlapping, unit_segments
from tailrace.transfer.page_proof import PageSummer
from tailrace.transfer.transports.conversion import Conversion

HEADS = 2
TOKENS = 75


def geometry(tp: int, page: int) -> PoolGeometry:
    return PoolGeometry(page, 2, 2, HEADS, 8, "bfloat16", tp)


class Side:
    def __init__(self, tp: int, page: int, rng: np.random.Generator) -> None:
        self.geometry = geometry(tp, page)
        self.count = -(-TOKENS // page)
        shape = (self.count + 3, self.geometry.rank_page_bytes)
        self.ranks = [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(tp)]
        self.generations = np.full(self.count + 3, 5, np.uint64)
        self.pages = (rng.permutation(self.count + 2)[: self.count] + 1).tolist()
        self.summer = PageSummer(self.ranks, self.geometry, self.generations)

    def share_heads(self) -> None:
        """Ranks that hold the same head have the same bytes."""
        for rank in range(self.geometry.tp):
            first = next(r for r in range(rank + 1) if self.geometry.heads_of(r) == self.geometry.heads_of(rank))
            self.ranks[rank][:] = self.ranks[first]


def rows(ordinal: int, page: int, first_token: int) -> tuple[int, int]:
    start = ordinal * page
    return max(0, first_token - start), min(page, TOKENS - start)


def moved(src: Side, dst: Side, first_token: int) -> tuple[list[int], Destination, SumJob]:
    """Copy by the product's conversion; ordinals, where they went, and the job of gen's helper thread."""
    into = Destination(tuple(dst.pages), first_token, TOKENS)
    page = src.geometry.tokens_per_page
    ordinals = list(overlapping(page, first_token, TOKENS))
    units = [(PageDescriptor(0, o, src.pages[o], 5), dst.pages[0]) for o in ordinals]
    Conversion(src.geometry, dst.geometry).copy(tuple(src.ranks), tuple(dst.ranks), units, into)
    sources = []
    for o in ordinals:
        low, high = rows(o, page, first_token)
        sources.append((SumPart(src.pages[o], low, high - low, low),))
    sums = src.summer.sums_of(SumJob(1, tuple(sources), generations=(5,) * len(ordinals))).sums
    parts = tuple(
        tuple(
            SumPart(into.pages[s.dst_ordinal], s.dst_token, s.n, s.src_token)
            for s in unit_segments(page, dst.geometry.tokens_per_page, o, into)
        )
        for o in ordinals
    )
    return ordinals, into, SumJob(2, parts, expected=sums)


@pytest.mark.parametrize("src_tp", [1, 2, 4])
@pytest.mark.parametrize("dst_tp", [1, 2, 4])
def test_pages_that_were_converted_have_the_sums_of_their_source(src_tp, dst_tp):
    rng = np.random.default_rng(src_tp * 10 + dst_tp)
    for src_page, dst_page in ((16, 16), (8, 64), (64, 8), (16, 8), (8, 16)):
        src, dst = Side(src_tp, src_page, rng), Side(dst_tp, dst_page, rng)
        src.share_heads()
        for first_token in (0, 8, 64, 3):
            ordinals, _, job = moved(src, dst, first_token)
            assert dst.summer.sums_of(job).equal == (True,) * len(ordinals)


@pytest.mark.parametrize(("src_tp", "dst_tp", "src_page", "dst_page"), [(2, 4, 16, 8), (4, 2, 8, 64), (1, 2, 64, 16)])
def test_a_byte_that_changes_on_any_rank_is_found_in_its_page_and_others_do_not_matter(
    src_tp, dst_tp, src_page, dst_page
):
    rng, pick = np.random.default_rng(7), random.Random(7)
    src, dst = Side(src_tp, src_page, rng), Side(dst_tp, dst_page, rng)
    src.share_heads()
    ordinals, into, job = moved(src, dst, 8)
    row_bytes = dst.geometry.dim * 2
    for _ in range(60):
        rank, ordinal = pick.randrange(dst_tp), pick.randrange(dst.count)
        at, bit = pick.randrange(dst.geometry.rank_page_bytes), 1 << pick.randrange(8)
        token = ordinal * dst_page + at // row_bytes % dst_page
        dst.ranks[rank][dst.pages[ordinal], at] ^= bit
        equal = dst.summer.sums_of(job).equal
        dst.ranks[rank][dst.pages[ordinal], at] ^= bit
        lacked = into.first_token <= token < TOKENS
        wrong = [o for o, same in zip(ordinals, equal, strict=True) if not same]
        assert wrong == ([token // src_page] if lacked else [])


def test_sums_of_a_page_that_was_used_anew_are_left_out():
    side = Side(2, 16, np.random.default_rng(1))
    parts = tuple((SumPart(page, 0, 16, 0),) for page in side.pages[:2])
    side.generations[side.pages[1]] += np.uint64(1)
    first, second = side.summer.sums_of(SumJob(1, parts, generations=(5, 5))).sums
    assert len(first) == 8 * 2 * 2 * HEADS and second == b""


def test_sums_of_another_shape_are_not_equal():
    side = Side(1, 16, np.random.default_rng(1))
    job = SumJob(1, ((SumPart(side.pages[0], 0, 16, 0),),), expected=(b"12345678",))
    assert side.summer.sums_of(job).equal == (False,)
