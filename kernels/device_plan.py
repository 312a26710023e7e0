"""The index tensors of one step as buffers that stay where they are on a device, so that a captured graph reads them.

`StagedBuffers` keeps named arrays in one memory of the device and fills them from the host through page-locked slots:
a slot is written again only after the device has taken what it held. `DevicePlan` is those of attention and of the
writing of keys and values; a step's rows stand as in paged_attention.py, rows of one token first, then the chunks:

    plan = DevicePlan(device, rows=64, chunks=8, tokens=8192, pages=512, tokens_per_page=16)
    shape = plan.fill(spans, decode_rows=64)                 64 rows, of which some are padding
    decode_attention(q[:64], kv, layer, plan.page_table[:64], plan.lengths[:64], scale=..)

Padding is a row of length 0, a chunk of no tokens, a token at position 0 whose slot lies in scratch page 0: it changes
no page but that one. Pages past a row's length are not read, and may be any number that an earlier step left there.

Knows no model and no sequence. It is one thread's, which launches the steps in order on one stream. A copy that the
device does not take within WAIT_S raises TimeoutError: the device is stuck, and the rank's supervisor ends it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

from tailrace.kernels.paged_attention import RowSpan

WAIT_S = 30.0
MOST_PIECES = 32  # of one decode row's keys
_SLOTS = 3  # page-locked copies: one that is filled, two whose steps may still be waiting for the device
_ALIGN = 256  # bytes


def pieces_of(kv_heads: int) -> int:
    """Pieces that keep an H200 busy with the decode rows of a model: two programs for each of its 132 processors."""
    return max(1, 264 // kv_heads)


class StagedBuffers:
    """Arrays kept on a device, and page-locked slots through which they are filled.

    Args:
        device: on the CPU there is one slot and nothing to wait for.
        fields: name -> (shape, dtype), in the order in which they stand in memory.

    Attributes:
        tensors: name -> the tensor on the device; the same memory for as long as this lives. Zero at first.
    """

    def __init__(self, device: torch.device, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self._offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in fields.items():
            self._offsets[name] = size
            size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN) * _ALIGN
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._slots = [torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(_SLOTS if on_gpu else 1)]
        self._taken = [torch.cuda.Event() if on_gpu else None for _ in self._slots]
        self._now = 0
        self.tensors = MappingProxyType(self._views(self._memory, fields))
        self._arrays = [
            {name: view.numpy() for name, view in self._views(slot, fields).items()} for slot in self._slots
        ]

    def _views(
        self, memory: torch.Tensor, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> dict[str, torch.Tensor]:
        views = {}
        for name, (shape, dtype) in fields.items():
            at = self._offsets[name]
            views[name] = memory[at : at + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)
        return views

    def begin(self) -> Mapping[str, np.ndarray]:
        """The arrays of the next slot, to be written and then sent. They hold what an earlier step wrote."""
        self._now = (self._now + 1) % len(self._slots)
        event = self._taken[self._now]
        if event is not None and not event.query():
            until = time.monotonic() + WAIT_S
            while not event.query():
                if time.monotonic() > until:
                    raise TimeoutError(f"the device has not taken a step's indices within {WAIT_S:g} s")
        return self._arrays[self._now]

    def send(self, *ranges: tuple[str, str, int]) -> None:
        """Copy to the device, on the current stream, without waiting.

        Args:
            ranges: (first field, last field, entries): the fields from the first to the last, of which the last one's
                first `entries` along its first dimension are enough.
        """
        slot = self._slots[self._now]
        for first, last, entries in ranges:
            array = self._arrays[self._now][last]
            begin, end = self._offsets[first], self._offsets[last] + entries * array[0:1].nbytes
            if end > begin:
                self._memory[begin:end].copy_(slot[begin:end], non_blocking=True)
        event = self._taken[self._now]
        if event is not None:
            event.record()


@dataclass(frozen=True, slots=True)
class DecodeTasks:
    """How the keys of the decode rows are divided among programs.

    Attributes:
        tasks: [n, 4] int32: row (-1: none), piece, pieces of the row (1 to MOST_PIECES), keys of the row. A row's
            pieces stand one behind the other.
        firsts: [rows, 2] int32: first task of each row, its pieces.
    """

    tasks: torch.Tensor
    firsts: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlanShape:
    """What of the buffers one step uses.

    Attributes:
        decode_rows: rows of one token, padding included; tokens [0, decode_rows) are theirs.
        chunks: chunks, padding included; their tokens stand from decode_rows on.
        tokens: all tokens, padding included.
        max_new: tokens of the longest chunk.
    """

    decode_rows: int
    chunks: int
    tokens: int
    max_new: int


class DevicePlan:
    """See the module's docstring.

    Args:
        rows, chunks, tokens: the most that a step has, padding included.
        pages: the most pages of a row.
        pieces: that the decode rows' keys are cut into in all, about; see pieces_of.

    Attributes:
        page_table: [rows, pages] int32, of the decode rows.
        lengths: [rows] int32: keys seen, own included; 0 is a padding row.
        chunk_starts: [chunks + 1] int32: first token of each chunk and the end of the last, counted from the first
            token after the decode rows.
        context: [chunks] int32: tokens before the chunk.
        chunk_pages: [chunks, pages] int32.
        positions: [tokens] int64, absolute.
        slots: [tokens] int64: page * tokens_per_page + place in the page.
        ids: [tokens] int64, written only where `fill` is given ids (else what the device itself put there stays).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rows: int,
        chunks: int,
        tokens: int,
        pages: int,
        tokens_per_page: int,
        pieces: int = 33,
    ) -> None:
        self._limits = {"decode_rows": rows, "chunks": chunks, "tokens": tokens, "pages": pages}
        self._tokens_per_page, self._pieces = tokens_per_page, pieces
        self._buffers = StagedBuffers(
            device,
            {
                "ids": ((tokens,), torch.int64),
                "positions": ((tokens,), torch.int64),
                "slots": ((tokens,), torch.int64),
                "chunk_starts": ((chunks + 1,), torch.int32),
                "context": ((chunks,), torch.int32),
                "lengths": ((rows,), torch.int32),
                "firsts": ((rows, 2), torch.int32),
                "tasks": ((rows + pieces, 4), torch.int32),
                "page_table": ((rows, pages), torch.int32),
                "chunk_pages": ((chunks, pages), torch.int32),
            },
        )
        held = self._buffers.tensors
        self.ids, self.positions, self.slots = held["ids"], held["positions"], held["slots"]
        self.page_table, self.lengths = held["page_table"], held["lengths"]
        self._tasks, self._firsts = held["tasks"], held["firsts"]
        self.chunk_starts, self.context, self.chunk_pages = held["chunk_starts"], held["context"], held["chunk_pages"]

    def decode_tasks(self, decode_rows: int) -> DecodeTasks:
        """The division of a step filled for so many decode rows."""
        return DecodeTasks(self._tasks[: decode_rows + self._pieces], self._firsts[:decode_rows])

    def fill(
        self,
        spans: Sequence[RowSpan],
        *,
        decode_rows: int | None = None,
        chunks: int | None = None,
        tokens: int | None = None,
        ids: np.ndarray | None = None,
    ) -> PlanShape:
        """Write a step's indices and send them; the copy stands on the current stream before what is launched next.

        Args:
            spans: rows of one token first, then the others. With decode_rows=0 rows of one token are chunks as well.
            decode_rows, chunks, tokens: what the step is padded to; what there is if None.
            ids: [tokens of the spans], in their order (padding between decode rows and chunks is left out).

        Raises:
            ValueError: more than the buffers hold, or fewer than there are; names both numbers.
        """
        num_decode = 0 if decode_rows == 0 else sum(1 for span in spans if span.num_new == 1)
        decode, others = spans[:num_decode], spans[num_decode:]
        new = np.fromiter((span.num_new for span in others), np.int64, len(others))
        decode_rows = num_decode if decode_rows is None else decode_rows
        chunks = len(others) if chunks is None else chunks
        end = decode_rows + int(new.sum())
        tokens = end if tokens is None else tokens
        self._check(
            decode_rows=(num_decode, decode_rows), chunks=(len(others), chunks), tokens=(end, tokens),
            pages=(0, max((len(span.pages) for span in spans), default=0)),
        )  # fmt: skip
        size = self._tokens_per_page
        starts = np.fromiter((span.start for span in decode), np.int64, num_decode)
        short = starts >= size * np.fromiter((len(span.pages) for span in decode), np.int64, num_decode)
        if short.any():  # what stood in the buffer before would be taken for its page
            span = decode[int(short.argmax())]
            raise ValueError(f"a row's token {span.start} lies behind its {len(span.pages)} pages of {size}")
        into = self._buffers.begin()
        places, slots = into["positions"], into["slots"]
        places[num_decode:tokens] = 0
        slots[num_decode:tokens] = 0
        for row, span in zip(into["page_table"], decode, strict=False):
            row[: len(span.pages)] = span.pages
        if decode:  # many rows a step, so not one by one
            own = into["page_table"][np.arange(num_decode), starts // size].astype(np.int64)
            places[:num_decode], into["lengths"][:num_decode] = starts, starts + 1
            slots[:num_decode] = own * size + starts % size
        into["lengths"][num_decode:decode_rows] = 0
        self._divide(into["lengths"][:decode_rows], into["tasks"], into["firsts"])
        into["chunk_starts"][: len(others) + 1] = np.concatenate(([0], new.cumsum()))
        into["chunk_starts"][len(others) + 1 : chunks + 1] = new.sum()
        into["context"][len(others) : chunks] = 0
        at = decode_rows
        for i, span in enumerate(others):
            into["chunk_pages"][i, : len(span.pages)] = span.pages
            into["context"][i] = span.start
            own = np.arange(span.start, span.start + span.num_new)
            places[at : at + span.num_new] = own
            slots[at : at + span.num_new] = span.pages[own // size].astype(np.int64) * size + own % size
            at += span.num_new
        ranges = [("positions", "page_table", decode_rows)]
        if ids is not None:
            into["ids"][:num_decode] = ids[:num_decode]
            into["ids"][num_decode:tokens] = 0
            into["ids"][decode_rows:end] = ids[num_decode:]
            ranges.append(("ids", "ids", tokens))
        self._buffers.send(*ranges, ("chunk_pages", "chunk_pages", chunks))
        return PlanShape(decode_rows, chunks, tokens, int(new.max()) if len(new) else 0)

    def _divide(self, lengths: np.ndarray, tasks: np.ndarray, firsts: np.ndarray) -> None:
        """Cut each row into its share of the pieces, rounded, at least one: no more in all than pieces and rows."""
        whole = max(1, int(lengths.sum(dtype=np.int64)))
        pieces = (lengths * np.int64(2 * self._pieces) + whole) // (2 * whole)
        pieces = pieces.clip(1, MOST_PIECES)
        ends = pieces.cumsum()
        rows, count = np.repeat(np.arange(len(lengths)), pieces), int(ends[-1]) if len(ends) else 0
        firsts[: len(lengths), 0], firsts[: len(lengths), 1] = ends - pieces, pieces
        tasks[:count, 0], tasks[:count, 1] = rows, np.arange(count) - (ends - pieces)[rows]
        tasks[:count, 2], tasks[:count, 3] = pieces[rows], lengths[rows]
        tasks[count : len(lengths) + self._pieces, 0] = -1

    def _check(self, **wanted: tuple[int, int]) -> None:
        """Of each: what there is, and what it is padded to."""
        for name, (needed, padded) in wanted.items():
            if not needed <= padded <= self._limits[name]:
                raise ValueError(f"a step has {needed} {name}, padded to {padded}, of at most {self._limits[name]}")
