"""Which bytes of which page of which rank go where, between two workers whose pages differ. Pure, torch-free.

Workers may differ in tensor parallelism, in tokens a page and in storage dtype. Everything is found by absolute
position: a token by its place in the sequence, a head by its number in the model. No length of any list counts.

    head map    (source rank, heads) -> (destination rank, heads)    fixed for a pair
    segments    (source page, rows)  -> (destination page, rows)     for a range of tokens

A head that several source ranks hold is read from the first of them, and written to every destination rank that holds
it. Knows no page number, no address and no dtype but its size. Nothing here can die; a wrong plan is refused when it is
made (`check_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tailrace.kv_cache.layout import DTYPE_BYTES as PAGE_DTYPES
from tailrace.model.errors import ConfigError, WorkerError

DTYPE_BYTES = PAGE_DTYPES | {"uint8": 1}  # uint8: a page that is taken whole


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Pages of one state group of one worker, all its ranks together.

    Attributes:
        kv_heads: of the model. Rank r of `tp` holds an equal part of them in order or, with more ranks than heads, one
            head, which `tp / kv_heads` neighbouring ranks share.

    Raises:
        ConfigError: heads and ranks do not divide one another.
    """

    tokens_per_page: int
    num_layers: int
    num_fields: int
    kv_heads: int
    dim: int
    dtype: str
    tp: int = 1

    def __post_init__(self) -> None:
        more, less = max(self.kv_heads, self.tp), min(self.kv_heads, self.tp)
        if less < 1 or more % less:
            raise ConfigError(f"tp: {self.tp} ranks cannot share {self.kv_heads} KV heads evenly")

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.kv_heads // self.tp)

    def heads_of(self, rank: int) -> range:
        """The model's heads that this rank holds."""
        first = rank * self.kv_heads // self.tp
        return range(first, first + self.heads_per_rank)

    @property
    def head_row_bytes(self) -> int:
        """One token of one head: all layers and fields."""
        return self.num_layers * self.num_fields * self.dim * DTYPE_BYTES[self.dtype]

    @property
    def rank_row_bytes(self) -> int:
        """One token in one rank's page."""
        return self.heads_per_rank * self.head_row_bytes

    @property
    def rank_page_bytes(self) -> int:
        return self.tokens_per_page * self.rank_row_bytes

    @property
    def whole_page_bytes(self) -> int:
        """A page with every head once, as it crosses uncoded."""
        return self.tokens_per_page * self.kv_heads * self.head_row_bytes


class HeadCopy(NamedTuple):
    """`n` heads from `src_head` on in a source rank's page stand from `dst_head` on in a destination rank's page."""

    src_rank: int
    src_head: int
    dst_rank: int
    dst_head: int
    n: int


class Segment(NamedTuple):
    """`n` tokens of a source page's ordinal stand in a destination page's ordinal; both by absolute position."""

    dst_ordinal: int
    dst_token: int
    src_ordinal: int
    src_token: int
    n: int


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a hand-off's tokens go. Only tokens first_token..num_tokens-1 may be written.

    Attributes:
        pages: our page of each of our ordinals.
        first_token: tokens before it are held already, or lie before the window.
        num_tokens: of the sequence.
    """

    pages: tuple[int, ...]
    first_token: int
    num_tokens: int


def owners(geometry: PoolGeometry) -> list[tuple[int, int, int]]:
    """(rank, the first head it holds, number) that together hold every head of the model once."""
    found: list[tuple[int, int, int]] = []
    covered = 0
    for rank in range(geometry.tp):
        heads = geometry.heads_of(rank)
        if heads.start == covered:
            found.append((rank, heads.start, len(heads)))
            covered = heads.stop
    return found


def head_map(source: PoolGeometry, destination: PoolGeometry) -> list[HeadCopy]:
    """For every destination rank, where each of its heads comes from."""
    copies = []
    for dst_rank in range(destination.tp):
        wanted = destination.heads_of(dst_rank)
        for src_rank, first, number in owners(source):
            low, high = max(wanted.start, first), min(wanted.stop, first + number)
            if low < high:
                copies.append(HeadCopy(src_rank, low - first, dst_rank, low - wanted.start, high - low))
    return copies


def overlapping(tokens_per_page: int, first_token: int, end_token: int) -> range:
    """Ordinals of the pages that hold a token of first_token..end_token-1."""
    if first_token >= end_token:
        return range(0)
    return range(first_token // tokens_per_page, -(-end_token // tokens_per_page))


def segments(source_tokens: int, destination_tokens: int, first_token: int, end_token: int) -> Iterator[Segment]:
    """Cut first_token..end_token-1 at every border of both page sizes (tokens a page), in order."""
    token = first_token
    while token < end_token:
        src_ordinal, src_token = divmod(token, source_tokens)
        dst_ordinal, dst_token = divmod(token, destination_tokens)
        n = min(source_tokens - src_token, destination_tokens - dst_token, end_token - token)
        yield Segment(dst_ordinal, dst_token, src_ordinal, src_token, n)
        token += n


def unit_segments(source_tokens: int, destination_tokens: int, ordinal: int, into: Destination) -> Iterator[Segment]:
    """The part of one source page that `into` lacks."""
    first = max(into.first_token, ordinal * source_tokens)
    end = min(into.num_tokens, (ordinal + 1) * source_tokens)
    return segments(source_tokens, destination_tokens, first, end)


class Moves(NamedTuple):
    """Parts of many source pages that are alike: `n` tokens from `src_token` on go to `dst_token` and on.

    `places`: [m] int64, which of the source pages; `dst_pages`: [m] int64, our page of each.
    """

    places: np.ndarray
    dst_pages: np.ndarray
    src_token: int
    dst_token: int
    n: int


def moves(source_tokens: int, destination_tokens: int, ordinals: np.ndarray, into: Destination) -> list[Moves]:
    """`unit_segments` of many source pages at once, grouped.

    Args:
        ordinals: [m] int64, of source pages; a place is an index into it.
    """
    begins = ordinals * source_tokens
    token = np.maximum(begins, into.first_token)
    end = np.minimum(begins + source_tokens, into.num_tokens)
    pages = np.array(into.pages, np.int64)
    places = np.arange(len(ordinals))
    found = []
    while (left := token < end).any():
        places, begins, token, end = places[left], begins[left], token[left], end[left]
        dst_ordinal, dst_token = np.divmod(token, destination_tokens)
        n = np.minimum(end, (dst_ordinal + 1) * destination_tokens) - token
        kinds, kind = np.unique(np.stack((token - begins, dst_token, n)), axis=1, return_inverse=True)
        for i, (src_at, dst_at, number) in enumerate(kinds.T.tolist()):
            alike = np.flatnonzero(kind.reshape(-1) == i)
            found.append(Moves(places[alike], pages[dst_ordinal[alike]], src_at, dst_at, number))
        token = token + n
    return found


def unfilled(
    source_tokens: int, destination_tokens: int, ordinals: np.ndarray, into: Destination
) -> list[tuple[int, int, int]]:
    """(our page, first row, end row) that no token fills, in the pages where the lacking tokens begin and end.

    Only what belongs to a source page [m] int64 among these: whoever brings the first token clears the rows before it,
    whoever brings the last the rows behind it.
    """
    if into.first_token >= into.num_tokens:
        return []
    found = []
    (first, row), (last, end) = (divmod(t, destination_tokens) for t in (into.first_token, into.num_tokens - 1))
    if row and (ordinals == into.first_token // source_tokens).any():
        found.append((into.pages[first], 0, row))
    if end + 1 < destination_tokens and (ordinals == (into.num_tokens - 1) // source_tokens).any():
        found.append((into.pages[last], end + 1, destination_tokens))
    return found


def planned_bytes(source: PoolGeometry, destination: PoolGeometry, first_token: int, end_token: int) -> list[int]:
    """Bytes that the plan for these tokens writes into each destination rank's pages."""
    rows = sum(s.n for s in segments(source.tokens_per_page, destination.tokens_per_page, first_token, end_token))
    planned = [0] * destination.tp
    for copy in head_map(source, destination):
        planned[copy.dst_rank] += rows * copy.n * destination.head_row_bytes
    return planned


def check_plan(source: PoolGeometry, destination: PoolGeometry) -> None:
    """Raises WorkerError unless the plan fills every destination rank's page, each byte of it once."""
    planned = planned_bytes(source, destination, 0, destination.tokens_per_page)
    if planned != [destination.rank_page_bytes] * destination.tp:
        raise WorkerError(
            f"the plan from {source} writes {planned} bytes of a page to the ranks of {destination}, "
            f"whose pages have {destination.rank_page_bytes}"
        )
    for rank in range(destination.tp):
        filled = sorted(h for c in head_map(source, destination) if c.dst_rank == rank
                        for h in range(c.dst_head, c.dst_head + c.n))  # fmt: skip
        if filled != list(range(destination.heads_per_rank)):
            raise WorkerError(f"the plan from {source} fills heads {filled} of rank {rank} of {destination}")
