"""What follows from the configuration and the model's shape: pages a worker, the longest request. Torch-free.

`derive` refuses what the shapes cannot hold, before any process starts. It reads no file and no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.cluster.config import TailraceConfig
from tailrace.kv_cache.layout import PageLayout
from tailrace.model.config import ModelConfig, state_groups
from tailrace.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sizes:
    """Derived sizes of one application.

    Attributes:
        layout: the pages' geometry, one state group.
        ctx_pages, gen_pages: pages of one worker's pool, the scratch page included.
        max_request_tokens: prompt plus output of one request, over both pools.
    """

    layout: PageLayout
    ctx_pages: int
    gen_pages: int
    max_request_tokens: int

    def num_pages(self, role: str) -> int:
        """Pages of one `ctx` or `gen` worker, scratch included."""
        return self.ctx_pages if role == "ctx" else self.gen_pages


def derive(config: TailraceConfig, model: ModelConfig) -> Sizes:
    """The sizes, or ConfigError naming the key and both numbers."""
    groups = state_groups(model)
    if len(groups) != 1:
        raise ConfigError(f"model: {config.model} has {len(groups)} state groups, this release serves one")
    layout = PageLayout(groups[0], config.tokens_per_page, config.dtype)
    pages = {role: _pages(config, role, layout) for role in ("ctx", "gen")}
    pool_tokens = min(pages.values()) * layout.tokens_per_page - layout.tokens_per_page
    limit = config.max_request_tokens
    if limit is None:
        limit = min(model.max_position, pool_tokens)
    elif limit > model.max_position:
        raise ConfigError(f"max_request_tokens: {limit} is over the model's {model.max_position} positions")
    elif limit > pool_tokens:
        small = min(pages, key=lambda role: pages[role])
        raise ConfigError(
            f"{_key(config, small)}: {config.pool_bytes(small)} bytes hold {pool_tokens} tokens, "
            f"less than one request of max_request_tokens ({limit})"
        )
    return Sizes(layout, pages["ctx"], pages["gen"], limit)


def _key(config: TailraceConfig, role: str) -> str:
    return "kv_bytes" if config.pool(role).kv_bytes is None else f"{role}.kv_bytes"


def _pages(config: TailraceConfig, role: str, layout: PageLayout) -> int:
    pages = config.pool_bytes(role) // layout.bytes_per_page
    needed = 1 + max(1, layout.num_pages(config.block_tokens))
    if pages < needed:
        raise ConfigError(
            f"{_key(config, role)}: {config.pool_bytes(role)} bytes are {pages} pages of {layout.bytes_per_page} "
            f"bytes; a scratch page and one block need {needed} ({needed * layout.bytes_per_page} bytes)"
        )
    return pages
