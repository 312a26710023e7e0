"""What a worker on a GPU is made of in place of arenas and the CPU's engine. Part of the composition root."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tailrace.cluster.captures import capture_sizes
from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.sizes import Sizes
from tailrace.engine.device_engine import DeviceEngine
from tailrace.engine.device_forward import DeviceForward
from tailrace.engine.engine import TORCH_DTYPES
from tailrace.kernels.device_memory import CudaIpc
from tailrace.kernels.device_reads import CudaReader
from tailrace.kernels.page_read import DEFAULT_PROGRAMS
from tailrace.kv_cache.device_pool import DevicePool
from tailrace.kv_cache.layout import PageLayout
from tailrace.model.device_decoder import DeviceDecoder, exact_products
from tailrace.model.source import ModelSource
from tailrace.model.weights import load_weights
from tailrace.router.api_types import MAX_SAMPLES
from tailrace.transfer.transports.base import PageHook
from tailrace.transfer.transports.peer import PeerTransport


class DeviceParts:
    """Pool, weights and engine of one worker on one GPU.

    Attributes:
        pool: the pages, mapped by peers on the host, and the arena of their generation numbers.
        pages: [num_pages, layer, field, kv_head, token, dim], the same memory.

    Raises:
        ConfigError: the GPU has no room for the pool, or its kernels do not take the model.
    """

    def __init__(
        self,
        config: TailraceConfig,
        source: ModelSource,
        sizes: Sizes,
        role: str,
        device: torch.device,
        owner: str,
        boot: str,
        progress: Callable[[float], None],
    ) -> None:
        layout, num_pages = sizes.rank_layout(role), sizes.num_pages(role)
        assert isinstance(layout, PageLayout)
        dtype = TORCH_DTYPES[layout.dtype]
        exact_products()
        self.pool = DevicePool.create(
            CudaIpc(device.index or 0), config.app_name, owner, boot, layout, num_pages, waiting=lambda: progress(0.0)
        )
        self.pages = self.pool.pages.view(dtype).view(num_pages, *layout.shape)
        weights = load_weights(
            source, dtype=dtype, quantized=False, progress=lambda done, total: progress(done / total), device=device
        )
        forward = DeviceForward(
            DeviceDecoder(weights, sizes.max_request_tokens), self.pages, capture_sizes(config, role),
            max_batch_size=config.max_batch_size, max_num_tokens=config.max_num_tokens,
            max_pages=layout.num_pages(sizes.max_request_tokens), max_samples=MAX_SAMPLES,
        )  # fmt: skip
        self.engine = DeviceEngine(forward)

    def transport(self, config: TailraceConfig, hook: PageHook | None) -> PeerTransport:
        """How this worker's pages and its peers' are read."""
        programs = config.peer_sms or DEFAULT_PROGRAMS
        return PeerTransport(self.pool, CudaReader(self.pool.memory.device, programs), hook=hook)
