"""The engine's correctness gate: what the GPU computes must be what the CPU does before any speed is shown."""

from __future__ import annotations

import numpy as np
import torch

from tailrace.engine.device_engine import DeviceEngine
from tailrace.engine.device_forward import DeviceForward
from tailrace.engine.device_graphs import CaptureSizes
from tailrace.engine.engine import Engine
from tailrace.engine.offline import Generator
from tailrace.engine.sampler import GREEDY_MARGIN
from tailrace.kv_cache.layout import PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import ModelConfig, Rope, state_groups
from tailrace.model.decoder import Decoder
from tailrace.model.device_decoder import DeviceDecoder, exact_products
from tailrace.model.linear import DenseLinear
from tailrace.model.sampling_params import SamplingParams
from tailrace.model.weights import DenseEmbedding, LayerWeights, Weights

CONFIG = ModelConfig(
    family="llama", vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=3, num_heads=8, num_kv_heads=2,
    head_dim=64, max_position=4096, rms_norm_eps=1e-5, rope=Rope(), windows=(None, 48, None),
)  # fmt: skip
PROMPTS, TOKENS = 20, 64  # a wrong token in 1,280 would be seen


def weights(device: str) -> Weights:
    """Random float32 weights, the same on every device."""
    draw = torch.Generator().manual_seed(5)
    c = CONFIG

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=draw) * scale / columns**0.5).to(device)

    def ones(n: int) -> torch.Tensor:
        return (1 + 0.1 * torch.randn(n, generator=draw)).to(device)

    layers = tuple(
        LayerWeights(
            input_norm=ones(c.hidden_size), qkv_proj=DenseLinear(normal(c.q_size + 2 * c.kv_size, c.hidden_size, 1.6)),
            q_norm=None, k_norm=None, o_proj=DenseLinear(normal(c.hidden_size, c.q_size, 2.0)),
            post_norm=ones(c.hidden_size),
            gate_up_proj=DenseLinear(normal(2 * c.intermediate_size, c.hidden_size, 2.0)),
            down_proj=DenseLinear(normal(c.hidden_size, c.intermediate_size, 2.0)),
        )
        for _ in range(c.num_layers)
    )  # fmt: skip
    embed = (torch.randn(c.vocab_size, c.hidden_size, generator=draw)).to(device)
    head = DenseLinear(normal(c.vocab_size, c.hidden_size, 4.0))
    return Weights(c, torch.float32, DenseEmbedding(embed), layers, ones(c.hidden_size), head, 0)


def gate(device: str = "cuda") -> str:
    """Why the engine on this device is not fit to be measured; empty if it is."""
    exact_products()
    layout = PageLayout(state_groups(CONFIG)[0], 16, "float32")
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, CONFIG.vocab_size, n).tolist() for n in rng.integers(1, 200, PROMPTS)]

    def generate(engine: Engine | DeviceEngine, logprobs: int | None) -> list:
        kv = KvManager(layout, 512, 64)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        return Generator(engine, kv, max_num_tokens=256, max_batch_size=8).generate(prompts, [params] * PROMPTS)

    expected = generate(Engine(Decoder(weights("cpu")), torch.zeros(512, *layout.shape)), 2)
    sizes = CaptureSizes((1, 2, 4, 8), (64, 256), ("greedy",))
    forward = DeviceForward(
        DeviceDecoder(weights(device), 1024), torch.zeros(512, *layout.shape, device=device), sizes,
        max_batch_size=8, max_num_tokens=256, max_pages=64,
    )  # fmt: skip
    engine = DeviceEngine(forward)
    engine.warm_up(256, 8)
    compared = 0
    for number, (want, have) in enumerate(zip(expected, generate(engine, None), strict=True)):
        for at, known in enumerate(want.samples[0].logprobs):
            if known.top[0][1] - known.top[1][1] <= GREEDY_MARGIN:
                break
            if have.ids[at] != known.token:
                return f"prompt {number}, token {at}: {have.ids[at]} on the GPU, {known.token} on the CPU"
            compared += 1
    wanted = int(0.9 * PROMPTS * TOKENS)
    return "" if compared >= wanted else f"only {compared} tokens were clear enough to compare, {wanted} are asked for"
