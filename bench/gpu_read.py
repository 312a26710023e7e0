"""Pages read from another process's pool on a device, through transport `peer`.

    gpu.read.{4k,16k,64k,1m}     GB/s of 1 GiB of pages in random order, completion included      against raw_peer_copy
    gpu.read_int8.64k, _fp8.64k  GB/s of bfloat16 pages that ctx packed: landing, unpacking     against raw_peer_copy
    gpu.read_beside_decode       GB/s while a kernel that only moves memory runs; .kept of its rate alone
    gpu.read_beside_prefill      GB/s while bfloat16 products run; .kept of their rate alone

The rows above are between two GPUs. Where there is one, both processes use it and the rows are held; what was measured
then has the suffix .same_card and is held against a copy within the card through the same mapping. `.full`: with a
program for each processor of the GPU, else `peer_sms` as served. raw_peer_copy: cudaMemcpyAsync of 1 GiB through the
same mapping. Every page that a timed read brought is compared to the byte.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch
from harness import MIN_PAIRS, Row, identity, interleaved, ratio

from tailrace.kernels.device_memory import CudaIpc, Memory, cuda_runtime
from tailrace.kernels.device_reads import CudaReader
from tailrace.kernels.page_codecs import scaled_bytes
from tailrace.kernels.page_read import DEFAULT_PROGRAMS
from tailrace.kv_cache.device_pool import DevicePool
from tailrace.kv_cache.layout import PageLayout, single_layout
from tailrace.model.state_groups import Field, GroupKind, StateGroup
from tailrace.transfer.page_list import PageList, UnitList
from tailrace.transfer.transports.base import ReadDone, ReadJob
from tailrace.transfer.transports.peer import PeerTransport

SIZES = {"4k": 4 << 10, "16k": 16 << 10, "64k": 64 << 10, "1m": 1 << 20}
CODED = {"int8": "gpu.read_int8.64k", "fp8": "gpu.read_fp8.64k"}
BESIDE = ("gpu.read_beside_decode", "gpu.read_beside_prefill")
SAME_CARD = ".same_card"
_RATE, _SHARE = ("GB/s", "higher"), ("fraction", "higher")
_ALL = dict.fromkeys((f"gpu.read.{size}{form}" for size in SIZES for form in ("", ".full")), _RATE)
_ALL |= dict.fromkeys((*CODED.values(), *BESIDE), _RATE) | dict.fromkeys((f"{name}.kept" for name in BESIDE), _SHARE)
NAMES = _ALL | {f"{name}{SAME_CARD}": kind for name, kind in _ALL.items()}

TOTAL = 1 << 30
PAIRS, QUICK_PAIRS = 21, MIN_PAIRS
HELD = "needs two GPUs of one host; lifted by a run where torch sees two"
_FACTOR = 0x9E3779B97F4A7C1
_DEFAULT_COPY = 4  # cudaMemcpyDefault
_BESIDE_S = 1.0
_SMALL_PAGE = (4, 2, 2, 16, 128)  # [layer, field, kv_head, token, dim] bfloat16: 64 KiB


def page_layout(page_bytes: int) -> PageLayout:
    group = StateGroup(GroupKind.HISTORY, (0,), (Field("k", 1, page_bytes // 8), Field("v", 1, page_bytes // 8)))
    return single_layout([group], 1, "float32")


def words(pool: DevicePool) -> torch.Tensor:
    """[num_pages, page_bytes / 8] int64: what ctx writes into its pages."""
    count = pool.num_pages * pool.bytes_per_page // 8
    return (torch.arange(count, device=pool.memory.device) * _FACTOR).view(pool.num_pages, -1)


# ----------------------------------------------------------------------------------------------------- the ctx process


def serve(pipe: Connection, gpu: str) -> None:
    """Makes the pools that it is asked for, one at a time: (page bytes, pages, codec or empty) -> info."""
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    provider = CudaIpc()
    pool: DevicePool | None = None
    number = 0
    while (asked := pipe.recv()) is not None:
        if pool is not None:
            pool.close()
        page_bytes, num_pages, codec = asked
        number += 1
        name = f"ctx{number}_{os.getpid()}"
        pool = DevicePool.create(provider, "bench", name, "b", page_layout(page_bytes), num_pages)
        if codec:
            write_coded(pool, codec)
        else:
            pool.pages.view(torch.int64).copy_(words(pool))
        torch.cuda.synchronize()
        pipe.send(PeerTransport(pool, CudaReader(provider.device)).info_for("gen"))
    if pool is not None:
        pool.close()


def some_pages(seed: int, n: int) -> torch.Tensor:
    """[n, layer, field, kv_head, token, dim] bfloat16, the same in every process."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(n, *_SMALL_PAGE, generator=generator, device="cuda", dtype=torch.float32).to(torch.bfloat16)


def write_coded(pool: DevicePool, codec: str) -> None:
    """Every page of `pool` is a page of some_pages in its wire form."""
    from tailrace.kernels import page_codecs_triton

    encode = getattr(page_codecs_triton, f"encode_{codec}")
    step = 1024
    for low in range(0, pool.num_pages, step):
        n = min(step, pool.num_pages - low)
        encode(some_pages(low, n), torch.arange(n, device="cuda"), pool.pages[low : low + n])


class Ctx:
    """The process whose pages are read; `gpu`: the one that it sees."""

    def __init__(self, gpu: str) -> None:
        server = multiprocessing.get_context("spawn")
        self._pipe, theirs = server.Pipe()
        self._process = server.Process(target=serve, args=(theirs, gpu), daemon=True)
        self._process.start()
        theirs.close()

    def pool(self, page_bytes: int, num_pages: int, codec: str = "") -> bytes:
        self._pipe.send((page_bytes, num_pages, codec))
        if not self._pipe.poll(120):
            raise TimeoutError("the ctx process makes no pool")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


# ------------------------------------------------------------------------------------------------------------- gen


class Reading:
    """A gen's pool of TOTAL bytes and its transport, paired with a ctx whose pool is twice as large.

    `parts`: jobs of which a read is made; the pages of each come into a part of the pool of its own.
    """

    def __init__(
        self, ctx: Ctx, page_bytes: int, programs: int, codec: str = "", wire_bytes: int = 0, parts: int = 1
    ) -> None:
        self.page_bytes, self.parts = page_bytes, parts
        on_wire = wire_bytes or page_bytes
        self.n = TOTAL // page_bytes
        self.provider = CudaIpc()
        self.reader = CudaReader(self.provider.device, programs)
        name = f"gen{time.monotonic_ns()}"
        self.own = DevicePool.create(self.provider, "bench", name, "b", page_layout(on_wire), self.n + 1)
        self.transport = PeerTransport(self.own, self.reader)
        self.transport.connect("ctx", ctx.pool(on_wire, 2 * self.n + 1, codec))
        if not self.transport.probe("ctx"):
            raise RuntimeError("the probe's page did not come over intact")
        rng = random.Random(page_bytes)
        self.at = np.array(rng.sample(range(1, 2 * self.n + 1), self.n), np.int64)
        step = self.n // parts
        blocks = [rng.sample(range(low, low + step), step) for low in range(1, self.n + 1, step)]
        self.to = np.concatenate(blocks).astype(np.int64)
        zeros = np.zeros(self.n, np.int64)
        src = PageList(zeros, np.arange(self.n), self.at, zeros.astype(np.uint64))
        units = UnitList(src, self.to)
        self._units = [units[low : low + step] for low in range(0, self.n, step)]
        self._jobs = iter(range(1, 1 << 30))

    @property
    def mapped(self) -> Memory:
        memory = self.transport._peers["ctx"]._memory
        assert memory is not None
        return memory

    def start(self) -> None:
        for part, units in enumerate(self._units):
            self.transport.read(ReadJob(next(self._jobs), ("bench", part), "ctx", units))

    def ended(self) -> list[int]:
        """Parts of reads that have ended since the last call; all their pages must count."""
        events = self.transport.poll()
        assert all(isinstance(e, ReadDone) and len(e.units_ok) == self.n // self.parts for e in events)
        return [event.key[1] for event in events]

    def seconds(self) -> float:
        """Of one read of all pages, from the call to its answer."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.start()
        left = self.parts
        while left:
            left -= len(self.ended())
        return time.perf_counter() - started

    def raw_seconds(self) -> float:
        """Of one copy of TOTAL bytes through the mapping; of fewer, where our pool has fewer, and in proportion."""
        nbytes = min(TOTAL, self.own.num_pages * self.own.bytes_per_page)
        torch.cuda.synchronize()
        started = time.perf_counter()
        code = cuda_runtime().cudaMemcpyAsync(
            ctypes.c_void_p(self.own.memory.address), ctypes.c_void_p(self.mapped.address), ctypes.c_size_t(nbytes),
            ctypes.c_int(_DEFAULT_COPY), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )  # fmt: skip
        if code:
            raise RuntimeError(f"cudaMemcpyAsync says {code}")
        end = torch.cuda.Event()
        end.record()
        while not end.query():
            pass
        return (time.perf_counter() - started) * TOTAL / nbytes

    def wrong_pages(self) -> int:
        """Reads once into poisoned pages and compares all of them."""
        self.own.pages.fill_(0xEE)
        self.seconds()
        wrong = 0
        column = torch.arange(self.page_bytes // 8, device="cuda")
        at, to = (torch.from_numpy(pages).cuda() for pages in (self.at, self.to))
        for low in range(0, self.n, 1 << 14):
            part = slice(low, low + (1 << 14))
            expected = (at[part, None] * (self.page_bytes // 8) + column) * _FACTOR
            found = self.own.pages.view(torch.int64)[to[part]]
            wrong += int((found != expected).any(1).sum())
        return wrong

    def close(self) -> None:
        self.transport.close()
        torch.cuda.synchronize()
        self.own.close()


def rate_row(name: str, seconds: dict[str, list[float]], wrong: int, what: dict[str, object]) -> Row:
    rates = {key: [TOTAL / s / 1e9 for s in values] for key, values in seconds.items()}
    against = {"raw_peer_copy": ratio(rates["ours"], rates["raw_peer_copy"])}
    status, reason = ("held", f"{wrong} pages came wrong; lifted when none does") if wrong else ("ok", "")
    value = statistics.median(rates["ours"])
    return Row(name, value, "GB/s", "higher", against, status, reason, identity=what, samples=rates)


def read_rows(ctx: Ctx, pairs: int, suffix: str) -> list[Row]:
    rows = []
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for size, page_bytes in SIZES.items():
        for form, programs in (("", DEFAULT_PROGRAMS), (".full", processors)):
            reading = Reading(ctx, page_bytes, programs)
            wrong = reading.wrong_pages()
            seconds = interleaved({"ours": reading.seconds, "raw_peer_copy": reading.raw_seconds}, pairs, warm_ups=3)
            what = about(page_bytes=page_bytes, programs=programs, logical_bytes=TOTAL, wire_bytes=TOTAL)
            rows.append(rate_row(f"gpu.read.{size}{form}{suffix}", seconds, wrong, what))
            reading.close()
    return rows


# ------------------------------------------------------------------------------------------------------- codecs


def coded_rows(ctx: Ctx, pairs: int, suffix: str) -> list[Row]:
    """ctx has packed its pages; their wire rows are read into a landing pool in four parts, and each is unpacked into
    pages while the next one comes."""
    from tailrace.kernels import page_codecs, page_codecs_triton

    rows = []
    wire_bytes = scaled_bytes(_SMALL_PAGE)
    for codec, name in CODED.items():
        decode, twin = (getattr(where, f"decode_{codec}") for where in (page_codecs_triton, page_codecs))
        reading = Reading(ctx, SIZES["64k"], DEFAULT_PROGRAMS, codec, wire_bytes, parts=4)
        pages = torch.empty(reading.n, *_SMALL_PAGE, dtype=torch.bfloat16, device="cuda")
        order = torch.randperm(reading.n, device="cuda")

        def seconds(reading: Reading = reading, decode: Callable = decode, order: torch.Tensor = order) -> float:
            torch.cuda.synchronize()
            started, left, step = time.perf_counter(), reading.parts, reading.n // reading.parts
            reading.start()
            while left:
                for part in reading.ended():
                    low = part * step
                    decode(reading.own.pages[1 + low : 1 + low + step], pages, order[low : low + step])  # noqa: B023
                    left -= 1
            torch.cuda.synchronize()
            return time.perf_counter() - started

        seconds()
        wrong = wrong_coded(reading, codec, pages, order, twin)
        measured = interleaved({"ours": seconds, "raw_peer_copy": reading.raw_seconds}, pairs, warm_ups=3)
        what = about(page_bytes=SIZES["64k"], codec=codec, logical_bytes=TOTAL, wire_bytes=reading.n * wire_bytes)
        rows.append(rate_row(f"{name}{suffix}", measured, wrong, what))
        reading.close()
    return rows


def wrong_coded(reading: Reading, codec: str, pages: torch.Tensor, order: torch.Tensor, twin: Callable) -> int:
    """Of ctx's first pages: whose wire rows did not come over, or did not become what the twin makes of them."""
    from tailrace.kernels import page_codecs_triton

    n = 1024
    sent = torch.empty(n, reading.own.bytes_per_page, dtype=torch.uint8, device="cuda")
    getattr(page_codecs_triton, f"encode_{codec}")(some_pages(0, n), torch.arange(n, device="cuda"), sent)
    first = np.flatnonzero(reading.at < n)
    at, to = (torch.from_numpy(pages[first]).cuda() for pages in (reading.at, reading.to))
    expected = torch.empty(len(first), *_SMALL_PAGE, dtype=torch.bfloat16)
    twin(sent[at].cpu(), expected, torch.arange(len(first)))
    landed = (reading.own.pages[to] != sent[at]).any(1).cpu()
    unpacked = (pages[order[to - 1]].cpu().view(torch.int16) != expected.view(torch.int16)).flatten(1).any(1)
    return int((landed | unpacked).sum())


# ------------------------------------------------------------------------------------------------------------ beside


def beside_rows(ctx: Ctx, quick: bool, suffix: str) -> list[Row]:
    """Reads one after another while other work runs on the same GPU, and that work alone; rates of both."""
    reading = Reading(ctx, SIZES["64k"], DEFAULT_PROGRAMS)
    wrong = reading.wrong_pages()
    numbers = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    works = dict(zip(BESIDE, (numbers.sum, lambda: torch.mm(a, b, out=out)), strict=True))
    rows = []
    for name, work in works.items():
        kept, rates, raw = [], [], []
        for _ in range(MIN_PAIRS if not quick else 3):
            _, alone = both(None, work)
            read, beside = both(reading, work)
            rates.append(read)
            kept.append(beside / alone)
            raw.append(TOTAL / reading.raw_seconds() / 1e9)
        what = about(page_bytes=SIZES["64k"], programs=DEFAULT_PROGRAMS, wire_bytes=TOTAL)
        status, reason = ("held", f"{wrong} pages came wrong; lifted when none does") if wrong else ("ok", "")
        samples = {"ours": rates, "raw_peer_copy": raw}
        against = {"raw_peer_copy": ratio(rates, raw)}
        value = statistics.median(rates)
        rows.append(Row(f"{name}{suffix}", value, "GB/s", "higher", against, status, reason, what, samples))
        value = statistics.median(kept)
        rows.append(Row(f"{name}.kept{suffix}", value, "fraction", "higher", {}, status, reason, what, {"ours": kept}))
    reading.close()
    return rows


def both(reading: Reading | None, work: Callable[[], object]) -> tuple[float, float]:
    """(GB/s read, runs of `work` a second) while both go on; two of each are queued at any time."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    marks: list[torch.cuda.Event] = []
    reads = ended = runs = 0
    while time.perf_counter() - started < _BESIDE_S:
        if reading is not None:
            while reads < 2:
                reading.start()
                reads += 1
            over = len(reading.ended())
            reads, ended = reads - over, ended + over
        while len(marks) < 3:
            work()
            mark = torch.cuda.Event()
            mark.record()
            marks.append(mark)
        while marks and marks[0].query():
            del marks[0]
            runs += 1
    seconds = time.perf_counter() - started
    while reading is not None and reads:
        reads -= len(reading.ended())
    torch.cuda.synchronize()
    return ended * TOTAL / 1e9 / seconds, runs / seconds


def about(**what: object) -> dict[str, object]:
    card = torch.cuda.get_device_properties(0).name
    return identity(path="peer, cuda_ipc, page_read_triton", card=card, gpus=torch.cuda.device_count(), **what)


def rows(quick: bool) -> list[Row]:
    """All rows; the ctx process gets the second GPU if there is one."""
    two = torch.cuda.device_count() > 1
    suffix, pairs = "" if two else SAME_CARD, QUICK_PAIRS if quick else PAIRS
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ctx = Ctx(visible[1] if two else visible[0])
    try:
        found = [*read_rows(ctx, pairs, suffix), *coded_rows(ctx, pairs, suffix), *beside_rows(ctx, quick, suffix)]
    finally:
        ctx.close()
    if not two:
        found += [Row(n, None, *kind, status="held", reason=HELD, identity=about()) for n, kind in _ALL.items()]
    else:
        reason = "there are two GPUs: the row without the suffix is measured"
        found += [
            Row(f"{n}{SAME_CARD}", None, *kind, status="unsupported", reason=reason, identity=about())
            for n, kind in _ALL.items()
        ]
    return found
