"""The kernels of a device step alone, in bfloat16, at the shape of an 8B Llama: 32 heads of 128, 8 key heads.

    gpu.decode_attention.b64_8k, .b64_8k.page64, .b64_2k, .b1_2k    GB/s of keys and values read, against bandwidth
    gpu.decode_attention.ragged                                     the same of 64 rows of 64 to 7,281 tokens
    gpu.prefill_attention.8192, .2048_after_6144                    TFLOP/s, against matrix_rate and torch's own
    gpu.attention_error.{decode,prefill}                            relative L2 over that of torch's own, at most 1.1
    gpu.{add_rms_norm,rotary_write,silu_mul}.8192                   GB/s of a prefill's rows, against bandwidth
    gpu.{add_rms_norm,rotary_write,silu_mul}.64                     us in a graph, against the floor of the bytes
    gpu.sample.{argmax,temperature,top_p}.64                        us in a graph, of 64 rows of 128,256 logits

Errors are from float32 attention on the same inputs; a row whose kernel fails that gate is held. Small kernels run in a
graph, one after another over buffers larger than the cache where the product's do not stay in it. Ceilings and peers
are timed in turns with ours.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace

import gpu_ceilings as ceilings
import torch
from harness import MIN_PAIRS, Row, identity, interleaved, row_of
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from tailrace.kernels.device_attention import decode_attention, plain_decode_attention, prefill_attention
from tailrace.kernels.device_plan import DevicePlan, pieces_of
from tailrace.kernels.device_sampling import RowSampling, SamplingRows, argmax_rows, sample_rows
from tailrace.kernels.device_step import add_rms_norm, rotary_write, silu_mul
from tailrace.kernels.paged_attention import RowSpan

HEADS, KV_HEADS, DIM, HIDDEN, INNER, VOCAB = 32, 8, 128, 4096, 14336, 128256
SCALE = DIM**-0.5
MOST_ERROR = 1.1  # of torch's own
_COPY_BYTES = 2 << 30
_IN_GRAPH = 32  # launches in a graph
_PIECE = 3  # runs a sample

DECODE: dict[str, tuple[list[int], int]] = {  # row -> tokens of each row, tokens of a page
    "gpu.decode_attention.b64_8k": ([8192] * 64, 16),
    "gpu.decode_attention.b64_8k.page64": ([8192] * 64, 64),
    "gpu.decode_attention.b64_2k": ([2048] * 64, 16),
    "gpu.decode_attention.b1_2k": ([2048], 16),
    "gpu.decode_attention.ragged": ([8192 * 8 // (8 + i) if i % 4 else 64 * (i + 1) for i in range(64)], 16),
}
PREFILL = {  # row -> new tokens, tokens before
    "gpu.prefill_attention.8192": (8192, 0),
    "gpu.prefill_attention.2048_after_6144": (2048, 6144),
}
STEP = ("add_rms_norm", "rotary_write", "silu_mul")
SAMPLE = {
    "gpu.sample.argmax.64": RowSampling(),
    "gpu.sample.temperature.64": RowSampling(temperature=0.8),
    "gpu.sample.top_p.64": RowSampling(temperature=0.8, top_p=0.9),
}
NAMES = (
    dict.fromkeys(DECODE, ("GB/s", "higher"))
    | dict.fromkeys(PREFILL, ("TFLOP/s", "higher"))
    | {f"gpu.attention_error.{kind}": ("of sdpa", "lower") for kind in ("decode", "prefill")}
    | {f"gpu.{kernel}.8192": ("GB/s", "higher") for kernel in STEP}
    | {f"gpu.{kernel}.64": ("us", "lower") for kernel in STEP}
    | dict.fromkeys(SAMPLE, ("us", "lower"))
)

Measures = Mapping[str, Callable[[], float]]


def rows(quick: bool) -> list[Row]:
    """Every row of NAMES; about half a minute if quick."""
    pairs = MIN_PAIRS if quick else 3 * MIN_PAIRS
    found = [*attention_errors()]
    reasons = {row.name.rpartition(".")[2]: row.reason for row in found}
    for name, (lengths, page) in DECODE.items():
        found.append(measured(name, decode_measures(lengths, page), pairs, reasons["decode"], page=page))
        torch.cuda.empty_cache()
    for name, (new, before) in PREFILL.items():
        found.append(measured(name, prefill_measures(new, before), pairs, reasons["prefill"]))
    for count, kernel in ((n, k) for n in (8192, 64) for k in STEP):
        found.append(measured(f"gpu.{kernel}.{count}", step_measures(kernel, count), pairs))
    found += [measured(name, sample_measures(how), pairs) for name, how in SAMPLE.items()]
    return found


def measured(name: str, measures: Measures, pairs: int, reason: str = "", **what: object) -> Row:
    """A row of interleaved samples; held if there is a reason."""
    shapes = f"{HEADS} heads of {DIM}, {KV_HEADS} key heads, hidden {HIDDEN}, bfloat16"
    about = identity(path="triton", card=ceilings.card(), shapes=shapes, **what)
    row = row_of(name, *NAMES[name], interleaved(measures, pairs), about)
    return replace(row, status="held", reason=reason) if reason else row


def seconds(run: Callable[[], object]) -> float:
    return statistics.median(ceilings.seconds_of(run, _PIECE, warm_ups=1))


def graph_of(run: Callable[[int], object], launches: int = _IN_GRAPH) -> torch.cuda.CUDAGraph:
    """A graph of run(0), run(1), .."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(launches):
                run(i)
    torch.cuda.synchronize()
    return graph


def copy_measure() -> Callable[[], float]:
    """GB/s of a large copy, read and written bytes counted."""
    src = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    return lambda: 2 * _COPY_BYTES / seconds(lambda: dst.copy_(src)) / 1e9


# ----------------------------------------------------------------------------------------------------------- attention


def pool_of(count: int, length: int, page: int, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of random numbers, and the scattered pages of so many rows: [count, pages] int32."""
    pages = -(-length // page)
    kv = torch.randn(count * pages + 1, layers, 2, KV_HEADS, page, DIM, device="cuda", dtype=torch.bfloat16)
    return kv, (torch.randperm(count * pages, device="cuda") + 1).view(count, pages).int()


def decode_measures(lengths: list[int], page: int) -> Measures:
    """One launch for each of some layers, together larger than the cache; rows are divided as a step's are."""
    count, num_bytes = len(lengths), sum(lengths) * KV_HEADS * DIM * 4
    layers = max(1, min(32, (1 << 30) // num_bytes))
    kv, table = pool_of(count, max(lengths), page, layers)
    plan = DevicePlan(
        torch.device("cuda"), rows=count, chunks=1, tokens=count, pages=table.shape[1], tokens_per_page=page,
        pieces=pieces_of(KV_HEADS),
    )  # fmt: skip
    plan.fill([RowSpan(n - 1, 1, pages) for n, pages in zip(lengths, table.cpu().numpy(), strict=True)])
    q = torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, tasks = torch.empty_like(q), plan.decode_tasks(count)

    def run(i: int) -> None:
        decode_attention(q, kv, i % layers, plan.page_table, plan.lengths, scale=SCALE, out=out, tasks=tasks)

    graph = graph_of(run)
    return {
        "ours": lambda: _IN_GRAPH * num_bytes / seconds(graph.replay) / 1e9,
        "bandwidth": copy_measure(),
    }


def prefill_measures(new: int, before: int) -> Measures:
    """Torch's own: flash attention over gathered pages where nothing stands before, and cuDNN's."""
    length = new + before
    kv, table = pool_of(1, length, 16, 1)
    q = torch.randn(new, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts, context = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, new], [before]))
    out = torch.zeros_like(q)
    tera = 4 * HEADS * DIM * new * (before + (new + 1) / 2) / 1e12

    def ours() -> float:
        return tera / seconds(lambda: prefill_attention(q, kv, 0, starts, context, table, new, scale=SCALE, out=out))

    measures: dict[str, Callable[[], float]] = {"ours": ours}
    measures["matrix_rate"] = lambda: ceilings.matrix_rate() / 1e12
    if not before:
        turned, pages = q.transpose(0, 1)[None], table[0].long()

        def theirs(backend: SDPBackend) -> float:
            def run() -> None:
                k, v = kv[pages, 0].permute(1, 2, 0, 3, 4).reshape(2, 1, KV_HEADS, length, DIM)
                functional.scaled_dot_product_attention(turned, k, v, is_causal=True, enable_gqa=True)

            with sdpa_kernel(backend):
                return tera / seconds(run)

        measures["sdpa_flash"] = lambda: theirs(SDPBackend.FLASH_ATTENTION)
        measures["sdpa_cudnn"] = lambda: theirs(SDPBackend.CUDNN_ATTENTION)
    return measures


def attention_errors() -> list[Row]:
    """Relative L2 from float32 attention on the same inputs, ours over torch's, of decode rows and of a prompt."""
    length, count, page = 4096, 4, 16
    kv, table = pool_of(count, length, page, 1)
    k, v = kv[table.long(), 0].permute(2, 0, 3, 1, 4, 5).reshape(2, count, KV_HEADS, length, DIM)
    lengths = torch.full((count,), length, dtype=torch.int32, device="cuda")

    def error(found: torch.Tensor, q: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor) -> float:
        exact = plain_decode_attention(q.float(), kv.float(), 0, table, lengths, scale=SCALE)
        return float((found.double() - exact).norm() / exact.double().norm())

    q = torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    ours = decode_attention(q, kv, 0, table, lengths, scale=SCALE)
    theirs = functional.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    errors = {"decode": (error(ours, q, table, lengths), error(theirs, q, table, lengths))}

    q = torch.randn(length, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    starts, context = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, length], [0]))
    ours = prefill_attention(q, kv, 0, starts, context, table[:1], length, scale=SCALE)
    theirs = functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[:1], v[:1], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    some = torch.arange(0, length, 61, device="cuda")
    places = (q[some], table[:1].expand(len(some), -1), (some + 1).int())
    errors["prefill"] = (error(ours[some], *places), error(theirs[some], *places))
    about = identity(path="triton", card=ceilings.card(), shapes=f"{count} rows, or one prompt, of {length} tokens")
    found = []
    for kind, (mine, other) in errors.items():
        name, ratio = f"gpu.attention_error.{kind}", mine / other
        row = Row(name, ratio, *NAMES[name], identity=about | {"ours": mine, "sdpa": other})
        if not ratio <= MOST_ERROR:
            row.status, row.reason = "held", f"{mine:.2e} from float32, torch {other:.2e}: at most {MOST_ERROR} of it"
        found.append(row)
    return found


# --------------------------------------------------------------------------------------------------- small and sampling


def step_measures(kernel: str, count: int) -> Measures:
    """8192 rows: GB/s beside a copy. 64 rows: us, beside what the copy would need for the bytes."""
    draw = {"device": "cuda", "dtype": torch.bfloat16}
    if kernel == "add_rms_norm":
        hidden, part = torch.randn(count, HIDDEN, device="cuda"), torch.randn(count, HIDDEN, **draw)
        weight, num_bytes = torch.randn(HIDDEN, **draw), 12 * count * HIDDEN

        def run(_: int) -> None:
            add_rms_norm(hidden, part, weight, 1e-5)

    elif kernel == "rotary_write":
        total = HEADS + 2 * KV_HEADS
        kv = torch.zeros(-(-count // 16) + 1, 1, 2, KV_HEADS, 16, DIM, **draw)
        qkv, (cos, sin) = torch.randn(count, total, DIM, **draw), torch.randn(2, count, 1, DIM, device="cuda")
        slots, num_bytes = torch.randperm(count, device="cuda") + 16, 4 * count * (total + 2) * DIM

        def run(_: int) -> None:
            rotary_write(qkv, cos, sin, slots, kv, 0)

    else:
        gate_up, num_bytes = torch.randn(count, 2 * INNER, **draw), 6 * count * INNER

        def run(_: int) -> None:
            silu_mul(gate_up)

    graph, copy = graph_of(run), copy_measure()
    if count == 64:
        return {
            "ours": lambda: seconds(graph.replay) / _IN_GRAPH * 1e6,
            "byte_floor": lambda: num_bytes / copy() / 1e3,
        }
    return {"ours": lambda: _IN_GRAPH * num_bytes / seconds(graph.replay) / 1e9, "bandwidth": copy}


def sample_measures(how: RowSampling) -> Measures:
    """64 rows of logits, a few of which stand out; beside reading them once, and torch's argmax."""
    logits = 3 * torch.randn(64, VOCAB, device="cuda")
    logits[:, 1000:1200] += torch.linspace(20, 6, 200, device="cuda")
    out, params = torch.empty(64, dtype=torch.int32, device="cuda"), SamplingRows(torch.device("cuda"), 64)
    variant = params.fill([how] * 64)
    copy = copy_measure()
    if how.temperature == 0.0:
        graph, theirs = graph_of(lambda _: argmax_rows(logits, out)), graph_of(lambda _: logits.argmax(-1))
        more: dict[str, Callable[[], float]] = {"torch": lambda: seconds(theirs.replay) / _IN_GRAPH * 1e6}
    else:
        graph, more = graph_of(lambda _: sample_rows(logits, params, variant, out)), {}
    return {
        "ours": lambda: seconds(graph.replay) / _IN_GRAPH * 1e6,
        "byte_floor": lambda: logits.nbytes / copy() / 1e3,
    } | more
