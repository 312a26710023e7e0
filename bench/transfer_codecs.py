"""What each codec takes, saves and does to a model's answers, on SmolLM2's own keys and values of a real text.

    transfer.codec.<codec>              packing and unpacking of 64 MiB of bfloat16 pages, one after the other on one
                                        thread, GB/s of wire bytes, against copy (one memory copy of the pages)
    transfer.codec.<codec>.rate         the same in GB/s of page bytes
    transfer.codec.<codec>.break_even   wire GB/s below which the codec pays, if nothing of it overlaps
    transfer.codec.<codec>.ratio        bytes of bfloat16 pages over bytes on the wire
    transfer.codec.<codec>.kl           mean KL(next token, decoded KV || float32 KV), see codec_fidelity.py
    transfer.codec.<codec>.agreement    share of positions whose best token is the same

A row whose KL is above its bound, or whose bits should be equal and are not, is held.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch
from codec_fidelity import Fidelity, Reader
from harness import MIN_PAIRS, Options, Row, identity, interleaved, row_of

from tailrace.transfer.codecs import PageCodec, codec_named
from tailrace.transfer.page_list import PageDescriptor
from tailrace.transfer.page_plan import Destination, PoolGeometry
from tailrace.transfer.transports.conversion import Conversion

CODECS = ("int8", "fp8", "int4", "lossless")
SUFFIXES = ("", ".rate", ".break_even", ".ratio", ".kl", ".agreement")
NAMES = (
    "transfer.codec.int8",
    "transfer.codec.fp8",
    "transfer.codec.int4",
    "transfer.codec.lossless",
    *(f"transfer.codec.{codec}{suffix}" for codec in CODECS for suffix in SUFFIXES[1:]),
)
KL_BOUNDS = {"int8": 3e-4, "fp8": 3e-3, "int4": 2e-2, "lossless": 0.0}
TOTAL = 64 << 20
PREFIX, TAIL = 1504, 192
CHUNK_PAGES = 11  # of SmolLM2, in a landing chunk of 4 MiB


class Wire:
    """Packs pages of real keys and values and unpacks them, chunk by chunk, as ctx and gen do."""

    def __init__(self, codec: PageCodec, kv: torch.Tensor) -> None:
        narrow = kv.to(torch.bfloat16)
        self.n = TOTAL // (narrow[0].numel() * 2)
        repeats = -(-self.n // len(narrow))
        pages = torch.cat([narrow[:1], narrow.repeat(repeats, *[1] * 5)[: self.n]])  # page 0 is scratch
        self.source = pages.view(torch.uint8).view(len(pages), -1).numpy()
        self.target = np.ones_like(self.source)
        layers, fields, heads, tokens, dim = narrow.shape[1:]
        geometry = PoolGeometry(tokens, layers, fields, heads, dim, "bfloat16")
        self._conversion = Conversion(geometry, geometry, codec)
        self._room = np.ones(CHUNK_PAGES * self._conversion.wire_page_bytes, np.uint8)
        order = np.random.default_rng(1).permutation(np.arange(1, self.n + 1))
        self._into = Destination(tuple(order.tolist()), 0, self.n * tokens)
        self.page_bytes = self.n * self.source.shape[1]
        self.wire_bytes = 0

    def run(self) -> float:
        """Seconds of packing and unpacking all pages."""
        started, self.wire_bytes = time.perf_counter(), 0
        for low in range(0, self.n, CHUNK_PAGES):
            pages = np.arange(low, min(self.n, low + CHUNK_PAGES)) + 1
            used = self._conversion.pack([self.source], pages, self._room)
            self.wire_bytes += used
            units = [(PageDescriptor(0, int(page) - 1, int(page), 1), 0) for page in pages]
            self._conversion.unpack(self._room[:used], [self.target], range(len(units)), units, self._into)
        return time.perf_counter() - started

    def copy(self) -> float:
        started = time.perf_counter()
        np.copyto(self.target, self.source)
        return time.perf_counter() - started


def rows(options: Options) -> list[Row]:
    wanted = [codec for codec in CODECS if any(options.wants(f"transfer.codec.{codec}{s}") for s in SUFFIXES)]
    if not wanted:
        return []
    torch.set_num_threads(1)
    reader = Reader(PREFIX, TAIL)
    found = [row for codec in wanted for row in _rows_of(codec, reader, max(MIN_PAIRS, options.pairs))]
    return [row for row in found if options.wants(row.name)]


def _rows_of(name: str, reader: Reader, pairs: int) -> list[Row]:
    codec = codec_named(name)
    fidelity = reader.through(codec)
    wire = Wire(codec, reader.kv)
    samples = interleaved({"ours": wire.run, "copy": wire.copy}, pairs)
    what = identity(
        code_path="Conversion.pack, unpack; PyTorch twins, one thread",
        shapes=f"{wire.n} pages of {wire.source.shape[1]} bytes, {CHUNK_PAGES} a chunk",
        logical_bytes=wire.page_bytes,
        wire_bytes=wire.wire_bytes,
        text=f"{PREFIX} + {TAIL} tokens",
        model="SmolLM2-135M",
    )
    rate = {"ours": [wire.page_bytes / s / 1e9 for s in samples["ours"]]}
    rate["copy"] = [wire.page_bytes / s / 1e9 for s in samples["copy"]]
    on_wire = rate | {"ours": [wire.wire_bytes / s / 1e9 for s in samples["ours"]]}
    ratio = fidelity.ratio
    break_even = statistics.median(rate["ours"]) * (1 - 1 / ratio)
    base = f"transfer.codec.{name}"
    made = [
        row_of(base, "GB/s", "higher", on_wire, what),
        row_of(f"{base}.rate", "GB/s", "higher", rate, what),
        Row(f"{base}.break_even", break_even, "GB/s", "higher", identity=what),
        Row(f"{base}.ratio", ratio, "fraction", "higher", identity=what),
        Row(f"{base}.kl", fidelity.kl, "nats", "lower", identity=what),
        Row(f"{base}.agreement", fidelity.agreement, "fraction", "higher", identity=what),
    ]
    problem = _problem(name, fidelity)
    if problem:
        for row in made:
            row.status, row.reason = "held", problem
    return made


def _problem(name: str, fidelity: Fidelity) -> str:
    if fidelity.kl > KL_BOUNDS[name]:
        return f"KL {fidelity.kl:.2g} is above {KL_BOUNDS[name]:g}; lifted when it is not"
    if name == "lossless" and not fidelity.bit_equal:
        return "the bits are not equal; lifted when they are"
    return ""
