"""The engine on a GPU at the shape of an 8B Llama with random weights, through the worker's loop.

    gpu.decode_step.b1, .b64   tokens/s of one and of 64 sequences of 2k tokens   against byte_floor, transformers
        .waiting               with run_ahead 0;  .device: the step's graphs alone, without a loop
    gpu.prefill.8192           tokens/s of a prompt of 8,192 tokens               against matrix_rate, transformers
    gpu.itl_p99, gpu.goodput.*, gpu.exposed.32k: need a ctx and a gen, each on a GPU of its own

The decode rows time whole passes of a GenLoop (admitted hand-offs, scheduler, step, sampling, deltas), the prefill row
those of a CtxLoop. byte_floor: all weights but the embedding table once, and all keys and values once a step, at the
bandwidth measured in this run. Pages hold random keys and values; greedy tokens are chosen on the device.
"""

from __future__ import annotations

import gc
import importlib.util
import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import gpu_ceilings as ceilings
import numpy as np
import torch
from gpu_checks import gate
from harness import MIN_PAIRS, Row, identity

from tailrace.ctx_worker.loop import CtxLoop
from tailrace.ctx_worker.scheduler import PrefillScheduler
from tailrace.engine.device_engine import DeviceEngine
from tailrace.engine.device_forward import DeviceForward
from tailrace.engine.device_graphs import CaptureSizes
from tailrace.gen_worker.loop import GenLoop
from tailrace.gen_worker.scheduler import DecodeScheduler
from tailrace.kv_cache.layout import PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import ModelConfig, Rope, state_groups
from tailrace.model.device_decoder import DeviceDecoder, exact_products
from tailrace.model.linear import DenseLinear
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.weights import DenseEmbedding, LayerWeights, Weights
from tailrace.transfer.loop_events import Admitted, Arrived, LoopEvent, LoopStats
from tailrace.transfer.messages import Handoff, Submit, pack_ids

NAMES = {
    "gpu.decode_step.b1": ("tokens/s", "higher"),
    "gpu.decode_step.b64": ("tokens/s", "higher"),
    "gpu.decode_step.b1.waiting": ("tokens/s", "higher"),
    "gpu.decode_step.b64.waiting": ("tokens/s", "higher"),
    "gpu.decode_step.b1.device": ("tokens/s", "higher"),
    "gpu.decode_step.b64.device": ("tokens/s", "higher"),
    "gpu.prefill.8192": ("tokens/s", "higher"),
    "gpu.itl_p99": ("ms", "lower"),
    "gpu.goodput.split": ("1/s", "higher"),
    "gpu.goodput.aggregated": ("1/s", "higher"),
    "gpu.exposed.32k": ("ms", "lower"),
}
TWO_GPUS = "needs a ctx and a gen on a GPU each; lifted on a host with two GPUs by a bench that starts both workers"
CONTEXT, PREFILL, BATCHES = 2048, 8192, (1, 64)
PAGE_TOKENS = 16

LLAMA_8B = ModelConfig(
    family="llama", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32,
    num_kv_heads=8, head_dim=128, max_position=131072, rms_norm_eps=1e-5, rope=Rope(theta=500000.0),
    windows=(None,) * 32,
)  # fmt: skip


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Normal weights, made on the device; scaled so that the residual stays finite."""

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=dtype, device=device).normal_(0, columns**-0.5)

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, dtype=dtype, device=device)

    hidden, inner, c = config.hidden_size, config.intermediate_size, config
    layers = tuple(
        LayerWeights(
            input_norm=ones(hidden), qkv_proj=DenseLinear(normal(c.q_size + 2 * c.kv_size, hidden)), q_norm=None,
            k_norm=None, o_proj=DenseLinear(normal(hidden, c.q_size)), post_norm=ones(hidden),
            gate_up_proj=DenseLinear(normal(2 * inner, hidden)), down_proj=DenseLinear(normal(hidden, inner)),
        )
        for _ in range(c.num_layers)
    )  # fmt: skip
    embed, head = normal(c.vocab_size, hidden), DenseLinear(normal(c.vocab_size, hidden))
    held = 2 * c.num_parameters
    return Weights(config, dtype, DenseEmbedding(embed), layers, ones(hidden), head, held)


class SilentNode:
    """A transfer thread's port that brings what it is given and counts what it is told."""

    def __init__(self) -> None:
        self.loop_stats = LoopStats()
        self.events: deque[LoopEvent] = deque()
        self.num_deltas = 0
        self.ends: list[tuple[Any, ...]] = []

    def poll_events(self) -> list[LoopEvent]:
        events = list(self.events)
        self.events.clear()
        return events

    def wait(self, timeout_s: float) -> bool:
        return bool(self.events)

    def tokens(self, deltas: Any) -> None:
        self.num_deltas += len(deltas)

    def chunk_launched(self, *what: Any) -> None: ...

    def chunk_done(self, *what: Any) -> None: ...

    def turn_ended(self, turn: Any) -> None: ...

    def prefill_done(self, *what: Any) -> None:
        self.ends.append(what)

    def ended(self, *what: Any) -> None:
        self.ends.append(what)

    def failed(self, *what: Any) -> None:
        raise RuntimeError(f"a request of the bench failed: {what}")


@dataclass
class Rig:
    """One model with its pool; the engines of both loops share the pages."""

    decoder: DeviceDecoder
    kv: KvManager
    pool: torch.Tensor

    @classmethod
    def make(cls, config: ModelConfig, num_pages: int, device: str = "cuda") -> Rig:
        exact_products()
        layout = PageLayout(state_groups(config)[0], PAGE_TOKENS, "bfloat16")
        pool = torch.empty(num_pages, *layout.shape, dtype=torch.bfloat16, device=device)
        for part in pool.split(256):
            part.normal_()
        decoder = DeviceDecoder(random_weights(config, pool.device), 4 * PREFILL)
        return cls(decoder, KvManager(layout, num_pages, 64), pool)

    def engine(self, batches: tuple[int, ...], max_num_tokens: int, *, chunks: tuple[int, ...] = ()) -> DeviceEngine:
        """With graphs for these batches (greedy) and numbers of prompt tokens."""
        sizes = CaptureSizes(batches, chunks, ("greedy",))
        forward = DeviceForward(
            self.decoder, self.pool, sizes, max_batch_size=max((1, *batches)), max_num_tokens=max_num_tokens,
            max_pages=2 * PREFILL // PAGE_TOKENS,
        )  # fmt: skip
        engine = DeviceEngine(forward)
        engine.warm_up(max_num_tokens, max((1, *batches)))
        return engine

    def floor_bytes(self, batch: int) -> int:
        """What one decode step must read at least."""
        c = self.decoder.config
        weights = 2 * (c.num_parameters - c.vocab_size * c.hidden_size)
        return weights + batch * CONTEXT * 2 * 2 * c.num_layers * c.kv_size


def handoff(name: str, tokens: int, max_tokens: int) -> Handoff:
    return Handoff(
        request=name, attempt=0, num_prompt_tokens=tokens, num_tokens=tokens, first_tokens=(7,), finished=(False,),
        tail_ids=pack_ids([7] * tokens), counts={}, output_ids=b"", hashes=b"", namespace=b"", samples=1, priority=0,
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), lease_s=5.0,
    )  # fmt: skip


def decode_passes(
    rig: Rig, engine: DeviceEngine, batch: int, passes: int, *, context: int = CONTEXT, ahead: bool = True
) -> list[float]:
    """Seconds of each pass of a gen loop that decodes `batch` hand-offs of `context` tokens; `ahead`: run_ahead 1."""
    node = SilentNode()
    scheduler = DecodeScheduler(
        rig.kv.layout, max_batch_size=batch, max_num_tokens=4 * batch, max_gen_init_admissions_per_pass=batch
    )
    loop = GenLoop(
        engine, rig.kv, node, scheduler, PrefillScheduler(4 * batch), eos_ids=frozenset(),  # pyright: ignore[reportArgumentType]
        run_ahead=engine if ahead else None,
    )  # fmt: skip
    for i in range(batch):
        pages = rig.kv.allocate(rig.kv.layout.num_pages(context))
        assert pages is not None
        node.events.append(Admitted(handoff(f"r{i}", context, passes + 4), tuple(pages), 0, 0.0))
    for _ in range(3):
        loop.run_pass()
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        loop.run_pass()
        seconds.append(time.perf_counter() - start)
    while loop.run_pass():
        pass
    assert len(node.ends) == batch and rig.kv.counts().used == 0
    return seconds


def device_seconds(rig: Rig, engine: DeviceEngine, batch: int, repeats: int) -> list[float]:
    """Seconds of the graphs of a decode step alone, one behind the other, without a loop."""
    forward = engine._run
    from tailrace.kernels.paged_attention import RowSpan

    size = rig.kv.layout.num_pages(CONTEXT)
    spans = [RowSpan(CONTEXT - 1, 1, np.arange(1 + i * size, 1 + (i + 1) * size, dtype=np.int32)) for i in range(batch)]
    forward.plan.fill(spans, decode_rows=batch, ids=np.zeros(batch, np.int32))

    def step() -> None:
        forward.book.run(("rows", batch), _not_captured)
        forward.book.run(("head", batch, "greedy"), _not_captured)

    return ceilings.seconds_of(step, repeats)


def _not_captured() -> None:
    raise RuntimeError("the step is not captured")


def prefill_seconds(rig: Rig, engine: DeviceEngine, tokens: int, repeats: int) -> list[float]:
    """Seconds of a ctx loop from a prompt's arrival to the hand-off of its first token."""
    node = SilentNode()
    loop = CtxLoop(engine, rig.kv, node, PrefillScheduler(tokens), eos_ids=frozenset())  # pyright: ignore[reportArgumentType]
    rng = np.random.default_rng(0)
    seconds = []
    for i in range(repeats + 1):
        ids = rng.integers(0, rig.decoder.config.vocab_size, tokens).tolist()
        submit = Submit(
            request=f"p{i}", attempt=0, leg="prefill", prompt_ids=pack_ids(ids), output_ids=b"", samples=1,
            params=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), hashes=b"", namespace=b"",
            priority=0, lease_s=5.0, timeout_s=None, no_cache=False,
        )  # fmt: skip
        start = time.perf_counter()
        node.events.append(Arrived(submit, time.monotonic()))
        while len(node.ends) == i:
            loop.run_pass()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


class Transformers:
    """The same shape with random weights of its own, bf16, its own cache, scaled dot product attention."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        c = LLAMA_8B
        config = LlamaConfig(
            vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
            max_position_embeddings=c.max_position, rms_norm_eps=c.rms_norm_eps,
        )  # fmt: skip
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                self._model: Any = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        ids = torch.randint(0, LLAMA_8B.vocab_size, (1, tokens), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).tolist()
        return time.perf_counter() - start

    @torch.inference_mode()
    def decode(self, batch: int, steps: int) -> float:
        """Seconds of a step, behind CONTEXT tokens each."""
        ids = torch.randint(0, LLAMA_8B.vocab_size, (batch, CONTEXT), device="cuda")
        out = self._model(ids, use_cache=True, logits_to_keep=1)
        for i in range(steps + 2):
            if i == 2:
                torch.cuda.synchronize()
                start = time.perf_counter()
            ids = out.logits[:, -1].argmax(-1, keepdim=True)
            out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1].argmax(-1).tolist()
        return (time.perf_counter() - start) / steps


def rows(quick: bool) -> list[Row]:
    """All rows of this module."""
    what = identity(
        card=ceilings.card(), policy="greedy, CUDA graphs", shapes=f"8B Llama, {CONTEXT} tokens a sequence, bf16",
        path="cuda, triton kernels, cuBLAS",
    )  # fmt: skip
    held = [
        Row(name, None, *NAMES[name], status="held", reason=TWO_GPUS, identity=what)
        for name in ("gpu.itl_p99", "gpu.goodput.split", "gpu.goodput.aggregated", "gpu.exposed.32k")
    ]
    wrong = gate()
    measured = [name for name in NAMES if name not in {row.name for row in held}]
    if wrong:
        return [Row(n, None, *NAMES[n], status="held", reason=wrong, identity=what) for n in measured] + held
    ceilings.bandwidth(), ceilings.matrix_rate()  # while the card is cool: after minutes of work products are slower
    theirs = _transformers(quick)
    pages = 1 + max(BATCHES) * (CONTEXT + 512) // PAGE_TOKENS
    rig = Rig.make(LLAMA_8B, pages)
    made: list[Row] = []
    for batch in BATCHES:
        made += _decode_rows(rig, batch, quick, theirs, what)
    made.append(_prefill_row(rig, quick, theirs, what))
    return made + held


def _transformers(quick: bool) -> dict[str, float]:
    """Its tokens/s, measured before ours is loaded, if it is there: both do not fit beside each other's caches."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    model = Transformers()
    rates = {"prefill": PREFILL / min(model.prefill(PREFILL) for _ in range(3))}
    for batch in BATCHES:
        rates[f"b{batch}"] = batch / model.decode(batch, 8 if quick else 32)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return rates


def _decode_rows(rig: Rig, batch: int, quick: bool, theirs: dict[str, float], what: dict[str, Any]) -> list[Row]:
    engine = rig.engine((batch,), 4 * batch)
    passes = 40 if quick else 200
    samples: dict[str, list[float]] = {"ahead": [], "waiting": []}
    for _ in range(3):
        for way, rates in samples.items():
            seconds = decode_passes(rig, engine, batch, passes, ahead=way == "ahead")
            rates.append(batch / statistics.median(seconds))
    samples["device"] = [batch / s for s in device_seconds(rig, engine, batch, 20 if quick else 100)]
    floor = batch * ceilings.bandwidth() / rig.floor_bytes(batch)
    made = []
    for way, rates in samples.items():
        name = f"gpu.decode_step.b{batch}" + ("" if way == "ahead" else f".{way}")
        value = statistics.median(rates)
        against = {"byte_floor": value / floor}
        if way == "ahead" and theirs:
            against["transformers"] = value / theirs[f"b{batch}"]
        made.append(Row(name, value, *NAMES[name], against, identity=what, samples={"ours": rates}))
    return made


def flops(config: ModelConfig, tokens: int) -> float:
    """Of a prompt: the layers' products, causal attention counted as half, one row of the output projection."""
    c = config
    layer = (
        c.hidden_size * (c.q_size + 2 * c.kv_size) + c.q_size * c.hidden_size + 3 * c.hidden_size * c.intermediate_size
    )
    attention = 2 * tokens * tokens * c.q_size  # two products, 2 operations each, half of them hidden
    return c.num_layers * (2 * tokens * layer + attention) + 2 * c.hidden_size * c.vocab_size


def _prefill_row(rig: Rig, quick: bool, theirs: dict[str, float], what: dict[str, Any]) -> Row:
    engine = rig.engine((1,), PREFILL)
    seconds = prefill_seconds(rig, engine, PREFILL, MIN_PAIRS if quick else 3 * MIN_PAIRS)
    value = PREFILL / statistics.median(seconds)
    rate = flops(rig.decoder.config, PREFILL) * value / PREFILL
    against = {"matrix_rate": rate / ceilings.matrix_rate()} | (
        {"transformers": value / theirs["prefill"]} if theirs else {}
    )
    return Row("gpu.prefill.8192", value, *NAMES["gpu.prefill.8192"], against, identity=what, samples={"ours": seconds})
