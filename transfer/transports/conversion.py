"""Bytes of a pair whose pages differ: tensor parallelism, tokens a page, storage dtype, or a codec on the wire.

    landing    ctx: pack (its ranks' pages -> wire form)      gen: unpack (wire form -> its ranks' pages)
    reading    gen: copy (the peer's mapped ranks' pages -> its ranks' pages)

The wire form of a page has every KV head of the model once, in ctx's page size: [layer, field, kv_head, token, dim],
in ctx's dtype, or encoded. Where the bytes go is decided by transfer/page_plan.py; each call counts what it wrote for
every rank and fails if that is not what the plan says. Rows of a page that no token fills become zero: attention reads
them behind its mask, and what an earlier owner left there may not be finite. Pairs whose pages are alike have no
Conversion: their pages are copied whole. Stateless but for the codec, so helper threads may share one. Knows no peer,
no socket and no generation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tailrace.kv_cache.layout import DTYPE_BYTES
from tailrace.model.errors import PeerError, WorkerError
from tailrace.transfer.codec_choice import RAW, LinkMeter
from tailrace.transfer.leases import Recent
from tailrace.transfer.page_list import PageDescriptor, PageList, UnitList
from tailrace.transfer.page_plan import (
    Destination,
    HeadCopy,
    Moves,
    PoolGeometry,
    check_plan,
    head_map,
    moves,
    owners,
    unfilled,
)

Ranks = Sequence[np.ndarray]
"""One array a rank of a worker, [num_pages, bytes_per_page] uint8; page p of each belongs together."""

Units = Sequence[tuple[PageDescriptor, int]]

_WORDS = {2: np.uint16, 4: np.uint32}
_SLICE_BYTES = 512 << 10  # of a gathering step, which goes through a buffer: it stays in a core's cache
_FORMER_PAIRS = 64
_BIG_BYTES = 32 << 10  # from here on a call a page costs little beside its copy, and needs no buffer


class PageCodec(Protocol):
    """An encoding of whole pages, of transfer/codecs.py. `name`: auto(...) if it may be one of several."""

    name: str


@dataclass(slots=True)
class CodecUse:
    """What one job's codec did. `seconds` of work; `step`: the lossy step its pages came through, empty if none."""

    codec: str = RAW
    seconds: float = 0.0
    step: str = ""


class Conversion:
    """From the pages of one worker to those of another.

    Args:
        source: ctx's pages.
        destination: gen's pages.
        codec: None for raw, which needs one dtype on both sides.

    Raises:
        PeerError: the dtypes differ and there is no codec, or it has no form for such pages.
        WorkerError: the plan does not fill a page of every rank exactly once.
    """

    def __init__(self, source: PoolGeometry, destination: PoolGeometry, codec: PageCodec | None = None) -> None:
        if codec is None and source.dtype != destination.dtype:
            raise PeerError(f"pages of {source.dtype} become pages of {destination.dtype} only through a codec")
        check_plan(source, destination)
        self.source, self.destination, self.codec = source, destination, codec
        self._coding: Any = None
        if codec is not None:
            from tailrace.transfer.transports.coding import Coding  # imports torch, which only a codec needs

            self._coding = Coding(codec, _whole(source), destination.dtype)
        self._direct = source.tp == 1 and _whole(source, destination.dtype) == destination
        self._owners = owners(source)
        self._heads = head_map(source, destination)
        self._spread = head_map(_whole(source), destination)

    @property
    def wire_page_bytes(self) -> int:
        """Room that one packed page needs, all ranks together."""
        if self.codec is None:
            return self.source.whole_page_bytes
        return self._coding.room_a_page

    @property
    def _recodes(self) -> bool:
        """Whether a reading transport must pass through the codec: only where the dtypes differ."""
        return self.source.dtype != self.destination.dtype

    @property
    def link(self) -> LinkMeter | None:
        """To be told of every write of this pair, if its codec asks for that."""
        return getattr(self.codec, "link", None)

    # ------------------------------------------------------------------------------------------------------------ ctx

    def pack(self, own: Ranks, pages: np.ndarray, out: np.ndarray, use: CodecUse | None = None) -> int:
        """Our pages [n] int64 into `out` uint8, at least n * wire_page_bytes; returns the bytes used."""
        if self.codec is None:
            used = len(pages) * self.source.whole_page_bytes
            self._gather(own, pages, out[:used])
            return used
        use = use or CodecUse()
        if self.source.tp == 1:
            return self._coding.encode(own[0], pages, out, use)
        whole = self._gathered(own, pages)
        return self._coding.encode(whole, np.arange(len(pages)), out, use)

    # ------------------------------------------------------------------------------------------------------------ gen

    def unpack(
        self,
        data: np.ndarray,
        own: Ranks,
        places: Sequence[int],
        units: Units,
        into: Destination,
        use: CodecUse | None = None,
    ) -> None:
        """Wire form into our pages: `places` is where in `data` each unit's page stands.

        Raises:
            PeerError: `data` is no wire form.
        """
        where, ordinals = np.asarray(places, np.int64), UnitList.of(units).src.ordinals
        if self.codec is None:
            whole = data.reshape(-1, self.source.whole_page_bytes)
            self._scatter(whole, self.source, own, where, ordinals, into)
        else:
            self._unpack_coded(data, own, where, ordinals, into, use or CodecUse())

    def may_have(self, nbytes: int, num_pages: int) -> bool:
        """Whether `num_pages` packed pages may have so many bytes."""
        if self.codec is None:
            return nbytes == num_pages * self.source.whole_page_bytes
        return num_pages > 0 and nbytes <= num_pages * self.wire_page_bytes

    def copy(self, source: Ranks, own: Ranks, units: Units, into: Destination, use: CodecUse | None = None) -> int:
        """The peer's mapped pages into ours; returns the bytes read.

        A unit whose page the peer does not have is left out: its generation number will not be found.
        """
        wanted = UnitList.of(units).src
        wanted = wanted.take((wanted.pages > 0) & (wanted.pages < len(source[0])))
        if self._recodes:
            return self._copy_recoded(source, own, wanted, into, use or CodecUse())
        rows = 0
        written = [0] * self.destination.tp
        src_views = [_rows(array, self.source) for array in source]
        dst_views = [_rows(array, self.destination) for array in own]
        for part in self._moves(wanted.ordinals, into):
            rows += len(part.places) * part.n
            at = wanted.pages[part.places]
            for heads in self._heads:
                src, dst = src_views[heads.src_rank], dst_views[heads.dst_rank]
                written[heads.dst_rank] += _move(dst, src, at, part, heads, self.source.dim)
        self._check_written(written, rows)
        self._clear_rest(dst_views, wanted.ordinals, into)
        return rows * self.source.kv_heads * self.source.head_row_bytes

    def logical_bytes(self, units: Units, into: Destination) -> int:
        """Bytes of our pages that these units fill, every head once."""
        parts = self._moves(UnitList.of(units).src.ordinals, into)
        rows = sum(len(part.places) * part.n for part in parts)
        return rows * self.destination.kv_heads * self.destination.head_row_bytes

    # --------------------------------------------------------------------------------------------------------- inside

    @property
    def _decoded(self) -> PoolGeometry:
        """What the codec gives back: ctx's pages in our dtype."""
        s = self.source
        return PoolGeometry(
            s.tokens_per_page, s.num_layers, s.num_fields, s.kv_heads, s.dim, self.destination.dtype, s.tp
        )

    def _copy_recoded(self, source: Ranks, own: Ranks, wanted: PageList, into: Destination, use: CodecUse) -> int:
        step = max(1, _SLICE_BYTES // self.source.whole_page_bytes)
        for low in range(0, len(wanted), step):
            part = wanted[low : low + step]
            places = np.arange(len(part))
            data = np.empty(len(part) * self.wire_page_bytes, np.uint8)
            used = self._coding.encode(self._gathered(source, part.pages), places, data, use)
            self._unpack_coded(data[:used], own, places, part.ordinals, into, use)
        return len(wanted) * self.source.whole_page_bytes

    def _unpack_coded(
        self,
        data: np.ndarray,
        own: Ranks,
        places: np.ndarray,
        ordinals: np.ndarray,
        into: Destination,
        use: CodecUse,
    ) -> None:
        """Straight into our pages where each takes one of ctx's, from its first token on; else by way of a copy."""
        if self._direct and (ordinals * self.source.tokens_per_page >= into.first_token).all():
            pages = np.array(into.pages, np.int64)[ordinals]
            self._coding.decode(data, places, own[0], pages, use)
            self._clear_rest([_rows(own[0], self.destination)], ordinals, into)
            return
        form, there = self._decoded, np.arange(len(places))
        whole = np.empty((len(places), form.whole_page_bytes), np.uint8)
        self._coding.decode(data, places, whole, there, use)
        self._scatter(whole, form, own, there, ordinals, into)

    def _gathered(self, ranks: Ranks, pages: np.ndarray) -> np.ndarray:
        """Pages [n] with each head once: [n, whole_page_bytes] uint8."""
        whole = np.empty((len(pages), self.source.whole_page_bytes), np.uint8)
        self._gather(ranks, pages, whole.reshape(-1))
        return whole

    def _gather(self, ranks: Ranks, pages: np.ndarray, out: np.ndarray) -> None:
        """Pages [n] with each head once into out [n * whole_page_bytes] uint8."""
        whole = _rows(out.reshape(-1, self.source.whole_page_bytes), _whole(self.source))
        step = max(1, _SLICE_BYTES // self.source.whole_page_bytes)
        for rank, first, number in self._owners:
            rows = _rows(ranks[rank], self.source)
            for low in range(0, len(pages), step):
                whole[low : low + step, :, first : first + number] = rows[pages[low : low + step]]

    def _scatter(
        self,
        whole: np.ndarray,
        form: PoolGeometry,
        own: Ranks,
        places: np.ndarray,
        ordinals: np.ndarray,
        into: Destination,
    ) -> None:
        """whole [n, bytes] uint8, pages of `form` with each head once, into our ranks' pages."""
        rows = 0
        written = [0] * self.destination.tp
        src = _rows(whole, _whole(form))
        dst_views = [_rows(array, self.destination) for array in own]
        for part in self._moves(ordinals, into):
            rows += len(part.places) * part.n
            for heads in self._spread:
                dst = dst_views[heads.dst_rank]
                written[heads.dst_rank] += _move(dst, src, places[part.places], part, heads, form.dim)
        self._check_written(written, rows)
        self._clear_rest(dst_views, ordinals, into)

    def _moves(self, ordinals: np.ndarray, into: Destination) -> list[Moves]:
        return moves(self.source.tokens_per_page, self.destination.tokens_per_page, ordinals, into)

    def _clear_rest(self, own_rows: Sequence[np.ndarray], ordinals: np.ndarray, into: Destination) -> None:
        dim = self.destination.dim
        for page, first, end in unfilled(self.source.tokens_per_page, self.destination.tokens_per_page, ordinals, into):
            for rows in own_rows:
                rows[page, :, :, first * dim : end * dim] = 0

    def _check_written(self, written: list[int], rows: int) -> None:
        """What was written for each rank is what its pages need for so many tokens."""
        if written != [rows * self.destination.rank_row_bytes] * self.destination.tp:
            raise WorkerError(f"{written} bytes were written to the ranks of {self.destination} for {rows} tokens")


class PairConversions:
    """The conversion of each paired peer, and of the last that were: what of theirs has landed is still unpacked."""

    def __init__(self) -> None:
        self._paired: dict[str, Conversion] = {}
        self._former: Recent[str, Conversion] = Recent(_FORMER_PAIRS)

    def get(self, boot: str) -> Conversion | None:
        """None if that peer's pages are like ours."""
        return self._paired.get(boot) or self._former.get(boot)

    def put(self, boot: str, conversion: Conversion | None) -> None:
        self.end(boot)
        self._former.pop(boot)
        if conversion is not None:
            self._paired[boot] = conversion

    def end(self, boot: str) -> None:
        """The pair is over."""
        conversion = self._paired.pop(boot, None)
        if conversion is not None:
            self._former.put(boot, conversion)


def _whole(geometry: PoolGeometry, dtype: str | None = None) -> PoolGeometry:
    """The same pages with every head in one rank; in another dtype, if one is given."""
    g = geometry
    return PoolGeometry(g.tokens_per_page, g.num_layers, g.num_fields, g.kv_heads, g.dim, dtype or g.dtype)


def _rows(pages: np.ndarray, geometry: PoolGeometry) -> np.ndarray:
    """One rank's pages as [num_pages, layer * field, kv_head, token * dim] words of an element each."""
    g = geometry
    words = pages.view(_WORDS[DTYPE_BYTES[g.dtype]])
    return words.reshape(len(pages), g.num_layers * g.num_fields, g.heads_per_rank, g.tokens_per_page * g.dim)


def _move(dst: np.ndarray, src: np.ndarray, at: np.ndarray, part: Moves, heads: HeadCopy, dim: int) -> int:
    """The same block of heads and tokens of each source page [m] into each destination page; the bytes written."""
    rows, room = (slice(token * dim, (token + part.n) * dim) for token in (part.src_token, part.dst_token))
    block = src[:, :, heads.src_head : heads.src_head + heads.n, rows]
    into = dst[:, :, heads.dst_head : heads.dst_head + heads.n, room]
    to, nbytes = part.dst_pages, block.shape[1] * heads.n * part.n * dim * src.itemsize
    if nbytes >= _BIG_BYTES:
        for page, place in zip(to.tolist(), at.tolist(), strict=True):
            np.copyto(into[page], block[place])
    else:
        step = max(1, _SLICE_BYTES // nbytes)
        for low in range(0, len(to), step):
            into[to[low : low + step]] = block[at[low : low + step]]
    return len(to) * nbytes
