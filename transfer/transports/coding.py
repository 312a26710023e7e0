"""A pair's codec at work on page arrays: [number of pages, bytes of each] int64, then the encoded pages, one by one.

Where the pages of both sides are alike but for their dtype, encoding reads ctx's pool and decoding writes gen's, with
no copy between; conversion.py decides. Stateless but for the codec, so helper threads may share one.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from tailrace.model.errors import PeerError
from tailrace.transfer.codec_choice import EXACT, fidelity_class
from tailrace.transfer.page_plan import PoolGeometry
from tailrace.transfer.transports.conversion import CodecUse

_WORD = 8


class Coding:
    """A codec between two geometries.

    Args:
        codec: of transfer/codecs.py.
        source: what it encodes: pages [layer, field, kv_head, token, dim] of one array.
        dtype: of what it decodes into.

    Raises:
        PeerError: the codec has no form for such pages.
    """

    def __init__(self, codec: Any, source: PoolGeometry, dtype: str) -> None:
        self.codec, self._source_dtype, self._dtype = codec, source.dtype, dtype
        self._shape = (source.num_layers, source.num_fields, source.heads_per_rank, source.tokens_per_page, source.dim)
        try:
            self.bound = codec.encoded_bytes(self._shape, getattr(torch, source.dtype))
        except ValueError as error:
            raise PeerError(f"codec {codec.name}: {error}") from None

    @property
    def room_a_page(self) -> int:
        """Bytes that a page needs in a chunk, at most: its own, and its part of what stands before them."""
        return 2 * _WORD + self.bound

    def encode(self, own: np.ndarray, pages: np.ndarray, out: np.ndarray, use: CodecUse) -> int:
        """Pages [n] int64 of `own` [num_pages, bytes] uint8 into `out` uint8; returns the bytes used."""
        n, started = len(pages), time.perf_counter()
        pool = _as_pool(own, self._shape, self._source_dtype)
        at = _WORD * (n + 1)
        rows = torch.from_numpy(out[at : at + n * self.bound]).view(n, self.bound)
        lengths = self.codec.encode_pages(pool, torch.from_numpy(pages), rows).numpy()
        used = at
        for i, length in enumerate(lengths.tolist()):
            if used != at + i * self.bound:
                out[used : used + length] = out[at + i * self.bound : at + i * self.bound + length]
            used += length
        out[:at] = np.concatenate(([n], lengths)).astype(np.int64).view(np.uint8)
        self._count(use, out[at:used], started)
        return used

    def decode(self, data: np.ndarray, places: np.ndarray, own: np.ndarray, pages: np.ndarray, use: CodecUse) -> None:
        """Those that stand at `places` [m] int64 in `data` into pages [m] int64 of `own` [num_pages, bytes] uint8.

        Raises:
            PeerError: `data` is no wire form.
        """
        started = time.perf_counter()
        rows = self._rows(data)
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(rows):
            raise PeerError(f"page {int(places.max())} of {len(rows)} encoded pages")
        if len(places) != len(rows) or (np.diff(places) != 1).any():
            rows = rows[places]
        pool = _as_pool(own, self._shape, self._dtype)
        try:
            self.codec.decode_pages(torch.from_numpy(rows), pool, torch.from_numpy(pages))
            self._count(use, rows.reshape(-1), started)
        except ValueError as error:
            raise PeerError(f"codec {self.codec.name}: {error}") from None

    def _rows(self, data: np.ndarray) -> np.ndarray:
        """[n, bound] uint8: each page at its place."""
        lengths = _lengths(data)
        at = _WORD * (len(lengths) + 1)
        if (lengths > self.bound).any():
            raise PeerError(f"an encoded page of {int(lengths.max())} bytes, at most {self.bound} are possible")
        if (lengths == self.bound).all():
            return data[at:].reshape(-1, self.bound)
        rows = np.empty((len(lengths), self.bound), np.uint8)
        for row, length in zip(rows, lengths.tolist(), strict=True):
            row[:length] = data[at : at + length]
            at += length
        return rows

    def _count(self, use: CodecUse, encoded: np.ndarray, started: float) -> None:
        """What was used, and for how long. `encoded` begins with a page."""
        use.seconds += time.perf_counter() - started
        if len(encoded):
            use.codec = self.codec.made_by(torch.from_numpy(encoded[: self.bound]))
            step = fidelity_class(use.codec, self._source_dtype, self._dtype)
            use.step = "" if step == EXACT else step


def _as_pool(pages: np.ndarray, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.from_numpy(pages).view(getattr(torch, dtype)).view(len(pages), *shape)


def _lengths(data: np.ndarray) -> np.ndarray:
    """[n] int64: of the encoded pages in `data`. Raises PeerError if they do not fit it."""
    n = int(data[:_WORD].view(np.int64)[0]) if len(data) >= _WORD else -1
    end = _WORD * (n + 1)
    fits = n >= 0 and end <= len(data)
    lengths = data[_WORD:end].view(np.int64) if fits else np.full(1, -1)
    if (lengths < 0).any() or end + int(lengths.sum()) != len(data):
        raise PeerError(f"{len(data)} bytes are not {n} encoded pages")
    return lengths
