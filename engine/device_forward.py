"""One step on a device: rows laid out, forward pass, output projection and sampling launched; what came of it fetched.

    flight = forward.launch(rows, picks)       nothing waits for the device, unless a graph's indices are still in use
    tokens, finite = forward.fetch(flight)     waits until the step has ended

`picks` are the positions to draw behind. What runs from a CUDA graph and what eagerly device_graphs.py decides; both
launch the same operators on the same shapes. Hidden states and logits stand in buffers that the next launch overwrites.

It knows rows and pages, no request, and no sampler state beyond RowSampling. It is used by one thread, on that thread's
current stream. A device that does not answer is found by the rank's supervisor, whose progress stamp then stands still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from tailrace.engine.device_graphs import GRAPH_CHUNKS, GREEDY, VARIANTS, Capture, CaptureSizes, GraphBook, Run
from tailrace.engine.step import Row
from tailrace.kernels.device_plan import DevicePlan, PlanShape, StagedBuffers, pieces_of
from tailrace.kernels.device_sampling import RowSampling, SamplingRows, sample_rows
from tailrace.kernels.paged_attention import RowSpan
from tailrace.kv_cache.layout import SCRATCH_PAGE
from tailrace.model.device_decoder import DeviceDecoder
from tailrace.model.errors import ConfigError

MAX_CHUNKS = 64  # of one launch; more run one launch behind the other
_GREEDY = RowSampling()
_NO_IDS = np.zeros(0, np.int32)
_FLIGHTS = 2  # steps whose results may be on their way at once


def capture_cuda(device: torch.device) -> Capture:
    """CUDA graphs that share one memory: they are replayed one behind the other, on one stream."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(run: Run) -> Run:
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()  # compiles kernels, makes handles and workspaces: none of it may happen inside a capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            run()
        return graph.replay

    return capture


def capture_nothing(run: Run) -> Run:
    """Where there are no graphs: the run itself, tried once."""
    run()
    return run


@dataclass(frozen=True, slots=True)
class Pick:
    """A place to draw behind. row: its number in the step; draw: how the token is chosen, None: by the host."""

    row: int
    draw: RowSampling | None


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step.

    Attributes:
        slot: of its results on the host.
        lasts: [rows] int64, where each row's last token stands in `hidden`.
        picked: the row of each pick.
        others: rows without a pick; their results stand from `others_at` on.
    """

    slot: int
    lasts: np.ndarray
    picked: Sequence[int]
    others: Sequence[int]
    others_at: int


class DeviceForward:
    """Runs one decoder over its pages.

    Args:
        decoder: with its weights on a device.
        kv: [num_pages, layer, field, kv_head, token, dim] there, in the decoder's dtype; page 0 is scratch.
        sizes: what `warm_up` captures.
        max_batch_size, max_num_tokens: rows of one token, and tokens, of one launch at most.
        max_pages: pages of one row at most.
        max_samples: draws behind one row at most, however many rows a launch has.
        capture: makes graphs; by the device if None.

    Attributes:
        max_picks: of one launch.
    """

    def __init__(
        self,
        decoder: DeviceDecoder,
        kv: torch.Tensor,
        sizes: CaptureSizes,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        max_pages: int,
        max_samples: int = 1,
        capture: Capture | None = None,
    ) -> None:
        config, device = decoder.config, decoder.device
        want = (config.num_layers, 2, config.num_kv_heads, config.head_dim)
        have = (*kv.shape[1:4], kv.shape[5])
        if have != want or kv.dtype != decoder.dtype or kv.device != device:
            raise ConfigError(f"pages are {have} {kv.dtype} on {kv.device}, the model needs {want} {decoder.dtype}")
        self.decoder, self.kv, self.sizes = decoder, kv, sizes
        self.max_batch_size, self.max_num_tokens = max_batch_size, max_num_tokens
        self._page_tokens = kv.shape[4]
        rows = max((max_batch_size, *sizes.rows))
        tokens = max((max_num_tokens, *sizes.tokens)) + rows  # rows may be padded beside chunks
        self.plan = DevicePlan(
            device, rows=rows, chunks=MAX_CHUNKS, tokens=tokens, pages=max_pages, tokens_per_page=self._page_tokens,
            pieces=pieces_of(config.num_kv_heads),
        )  # fmt: skip
        self.max_picks = picks = max(rows + MAX_CHUNKS, max_samples)
        if capture is None:
            capture = capture_cuda(device) if device.type == "cuda" else capture_nothing
        self.book = GraphBook(capture)
        self._staged = StagedBuffers(device, {"picks": ((2 * picks,), torch.int64)})
        self._picks = self._staged.tensors["picks"]
        self._fed = StagedBuffers(device, {"rows": ((rows,), torch.int64), "picks": ((rows,), torch.int64)})
        self._sampling = SamplingRows(device, picks)
        self.hidden = torch.zeros(tokens, config.hidden_size, dtype=decoder.dtype, device=device)
        self.logits = torch.zeros(picks, config.vocab_size, dtype=torch.float32, device=device)
        # [0]: tokens. [1], as float32: sums of hidden states, those of rows without a draw behind the others.
        self._out = torch.zeros(2, 2 * picks, dtype=torch.int32, device=device)
        self._sums = self._out[1].view(torch.float32)
        on_gpu = device.type == "cuda"
        self._fetched = [torch.zeros(self._out.shape, dtype=torch.int32, pin_memory=on_gpu) for _ in range(_FLIGHTS)]
        self._ended = [torch.cuda.Event() if on_gpu else None for _ in range(_FLIGHTS)]
        self._slot = 0
        kv[SCRATCH_PAGE].zero_()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture all that `sizes` asks for, on padding alone: nothing but the scratch page is written."""
        for rows in reversed(self.sizes.rows):  # the largest first: the others then fit into its memory
            shape = self.plan.fill([], decode_rows=rows, ids=_NO_IDS)
            self.book.add(("rows", rows), partial(self._body, shape))
        for picks in reversed(self.sizes.heads):
            for variant in self.sizes.variants:
                self.book.add(("head", picks, variant), partial(self._head, picks, variant))
        for tokens in reversed(self.sizes.tokens):
            shape = self.plan.fill([], decode_rows=0, chunks=GRAPH_CHUNKS, tokens=tokens, ids=_NO_IDS)
            self.book.add(("tokens", tokens), partial(self._body, replace(shape, max_new=tokens)))
        for tokens in reversed(self.sizes.beside):
            rows = self.sizes.rows[-1]
            shape = self.plan.fill([], decode_rows=rows, chunks=GRAPH_CHUNKS, tokens=rows + tokens, ids=_NO_IDS)
            self.book.add(("beside", tokens), partial(self._body, replace(shape, max_new=tokens)))
        self.kv[SCRATCH_PAGE].zero_()

    # --------------------------------------------------------------------------------------------------------- launch

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether these rows are not too many for one launch."""
        decode = sum(1 for row in rows if len(row.ids) == 1)
        return (
            decode <= self.max_batch_size
            and len(rows) - decode <= MAX_CHUNKS
            and sum(len(row.ids) for row in rows) <= self.max_num_tokens
            and sum(max(1, len(row.samplers)) for row in rows) <= self.max_picks
        )

    def launch(self, rows: Sequence[Row], picks: Sequence[Pick], feed: Sequence[tuple[int, int]] = ()) -> Flight:
        """Launch a step; what it gives is overwritten by the second launch after it.

        Args:
            rows: those of one token first; they `fits`.
            picks: by rising row.
            feed: (row of one token, pick of the launch before): the row's id is what is drawn there.
        """
        lasts = self._launch_body(rows, feed)
        picked = [pick.row for pick in picks]
        others = sorted(set(range(len(rows))).difference(picked))
        draws = [_GREEDY if pick.draw is None else pick.draw for pick in picks]
        variant = max((draw.variant for draw in draws), key=VARIANTS.index, default=GREEDY)
        padded = self._pad_head(len(picks), variant)
        into = self._staged.begin()["picks"]
        into[: len(picks)] = lasts[picked]
        into[len(picks) : padded] = 0
        into[padded : padded + len(others)] = lasts[others]
        self._staged.send(("picks", "picks", padded + len(others)))
        if variant != GREEDY:
            self._sampling.fill(draws)
        if picks:
            self.book.run(("head", padded, variant), partial(self._head, padded, variant))
        if others:
            self._look(padded, padded + len(others))
        return Flight(self._send_back(), lasts, picked, others, padded)

    def _launch_body(self, rows: Sequence[Row], feed: Sequence[tuple[int, int]]) -> np.ndarray:
        """Returns where each row's last token stands in `hidden`: [rows] int64."""
        counts = np.fromiter((len(row.ids) for row in rows), np.int64, len(rows))
        decode = int((counts == 1).sum())
        key, padding = self._padding(decode, len(rows) - decode, int(counts[decode:].sum()))
        ids = np.maximum(np.concatenate([row.ids for row in rows]), 0)  # UNKNOWN ones are fed
        shape = self.plan.fill([self._span(row) for row in rows], ids=ids, **padding)
        if key is not None and key[0] != "rows":
            shape = replace(shape, max_new=key[1])
        if feed:
            self._feed(feed)
        self.book.run(key, partial(self._body, shape))
        lasts = counts.cumsum() - 1
        lasts[decode:] += shape.decode_rows - decode
        return lasts

    def _padding(self, decode: int, chunks: int, tokens: int) -> tuple[tuple[str, int] | None, dict[str, int]]:
        """The graph of a body of so many decode rows, chunks and tokens of chunks, and what the step is padded to."""
        if not chunks:
            padded = self.sizes.padded_rows(decode)
            return (None, {}) if padded is None else (("rows", padded), {"decode_rows": padded})
        if chunks > GRAPH_CHUNKS:
            return None, {}
        if not decode:
            padded = self.sizes.padded_tokens(tokens)
            filled = {"decode_rows": 0, "chunks": GRAPH_CHUNKS, "tokens": padded}
            return (None, {}) if padded is None else (("tokens", padded), filled)
        both = self.sizes.padded_beside(decode, tokens)
        if both is None:
            return None, {}
        return ("beside", both[1]), {"decode_rows": both[0], "chunks": GRAPH_CHUNKS, "tokens": sum(both)}

    def _feed(self, feed: Sequence[tuple[int, int]]) -> None:
        """Put tokens that were drawn on the device among the ids; NO_TOKEN, whose row has failed, becomes 0."""
        count = len(feed)
        if all(row == pick == i for i, (row, pick) in enumerate(feed)):
            self.plan.ids[:count].copy_(self._out[0, :count].clamp(min=0))
            return
        into = self._fed.begin()
        into["rows"][:count], into["picks"][:count] = zip(*feed, strict=True)
        self._fed.send(("rows", "picks", count))
        rows, picks = self._fed.tensors["rows"][:count], self._fed.tensors["picks"][:count]
        self.plan.ids.index_copy_(0, rows, self._out[0].index_select(0, picks).clamp(min=0).long())

    def _span(self, row: Row) -> RowSpan:
        needed = -(-(row.start + len(row.ids)) // self._page_tokens)
        return RowSpan(row.start, len(row.ids), row.pages[:needed])

    def _pad_head(self, count: int, variant: str) -> int:
        padded = self.sizes.padded_head(count)
        if padded is None or not count:
            return count
        if variant not in self.sizes.variants:
            self.book.tell_variant(variant)
            return count
        return padded

    def _send_back(self) -> int:
        self._slot = (self._slot + 1) % _FLIGHTS
        self._fetched[self._slot].copy_(self._out, non_blocking=True)
        event = self._ended[self._slot]
        if event is not None:
            event.record()
        return self._slot

    # ---------------------------------------------------------------------------------------------------------- fetch

    def fetch(self, flight: Flight) -> tuple[list[int], list[bool]]:
        """Wait for the step's end.

        Returns:
            The token of each pick, NO_TOKEN where none can be drawn (of a pick without a draw: meaningless); and of
            each row whether its last hidden state is finite.
        """
        event = self._ended[flight.slot]
        if event is not None:
            event.synchronize()
        tokens, bits = self._fetched[flight.slot].numpy()
        sums = bits.view(np.float32)
        finite = np.empty(len(flight.lasts), bool)
        finite[flight.picked] = np.isfinite(sums[: len(flight.picked)])
        finite[flight.others] = np.isfinite(sums[flight.others_at : flight.others_at + len(flight.others)])
        return tokens[: len(flight.picked)].tolist(), finite.tolist()

    def wait(self) -> None:
        """Until all has ended that was launched on this thread's stream."""
        if self.kv.is_cuda:
            torch.cuda.current_stream(self.kv.device).synchronize()

    # --------------------------------------------------------------------------------------------- what may be captured

    def _body(self, shape: PlanShape) -> None:
        self.hidden[: shape.tokens].copy_(self.decoder.forward(self.plan, shape, self.kv))

    def _head(self, count: int, variant: str) -> None:
        last = self.hidden.index_select(0, self._picks[:count])
        torch.sum(last, -1, dtype=torch.float32, out=self._sums[:count])
        logits = self.decoder.logits(last, self.logits[:count])
        sample_rows(logits, self._sampling, variant, out=self._out[0, :count])

    def _look(self, first: int, last: int) -> None:
        """At rows that draw nothing."""
        states = self.hidden.index_select(0, self._picks[first:last])
        torch.sum(states, -1, dtype=torch.float32, out=self._sums[first:last])
