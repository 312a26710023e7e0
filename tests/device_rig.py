"""An engine on a device beside the CPU's own: the same checkpoints, the same generator. On the CPU it runs on the plain
twins of its kernels, so all but the kernels and the graphs is tested without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tailrace.engine.device_engine import DeviceEngine
from tailrace.engine.device_forward import DeviceForward
from tailrace.engine.device_graphs import CaptureSizes
from tailrace.engine.engine import TORCH_DTYPES
from tailrace.engine.grammar import Grammars
from tailrace.engine.offline import Generator
from tailrace.kv_cache.layout import PageLayout
from tailrace.kv_cache.manager import KvManager
from tailrace.model.config import ModelConfig, state_groups
from tailrace.model.device_decoder import DeviceDecoder, exact_products
from tailrace.model.source import ModelSource, open_source
from tailrace.model.weights import load_weights

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
"""For parametrize: the twins, and the kernels where there is a GPU."""


@dataclass
class DeviceReference:
    """As oracle.Reference, on a device."""

    source: ModelSource
    decoder: DeviceDecoder
    kv: KvManager
    forward: DeviceForward
    engine: DeviceEngine
    pool: torch.Tensor
    generator: Generator = field(repr=False)


def device_reference(
    model: str | Path | ModelSource,
    device: str,
    *,
    dtype: str = "float32",
    tokens_per_page: int = 16,
    num_pages: int = 256,
    max_num_tokens: int = 512,
    max_batch_size: int = 32,
    max_samples: int = 1,
    sizes: CaptureSizes | None = None,
    warm: bool = False,
) -> DeviceReference:
    """Load a model and put a device engine on a poisoned pool of its own; `warm`: with its graphs captured."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    exact_products()
    source = model if isinstance(model, ModelSource) else open_source(str(model))
    assert isinstance(source.config, ModelConfig)
    where = torch.device(device)
    decoder = DeviceDecoder(load_weights(source, dtype=TORCH_DTYPES[dtype], quantized=False, device=where), 2048)
    layout = PageLayout(state_groups(source.config)[0], tokens_per_page, dtype)
    pool = torch.full((num_pages, *layout.shape), torch.nan, dtype=TORCH_DTYPES[dtype], device=where)
    forward = DeviceForward(
        decoder, pool, sizes or CaptureSizes.derive(max_batch_size, max_num_tokens),
        max_batch_size=max_batch_size, max_num_tokens=max_num_tokens, max_pages=-(-2048 // tokens_per_page),
        max_samples=max_samples,
    )  # fmt: skip
    engine = DeviceEngine(forward)
    if warm:
        engine.warm_up(max_num_tokens, max_batch_size)
    kv = KvManager(layout, num_pages, 64)
    kv.set_poison(engine.poison)
    grammars = Grammars(lambda: source.tokenizer, source.config.vocab_size, source.eos_ids)
    generator = Generator(
        engine, kv, eos_ids=source.eos_ids, max_num_tokens=max_num_tokens, max_batch_size=max_batch_size,
        grammars=grammars,
    )  # fmt: skip
    return DeviceReference(source, decoder, kv, forward, engine, pool, generator)
