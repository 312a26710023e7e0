"""What follows from the configuration and the model's shape: pages a worker, the longest request. Torch-free.

`derive` refuses what the shapes cannot hold, before any process starts. It reads no file and no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.config_rules import short_tail, unfit_for_rows
from tailrace.kv_cache.layout import Layout, PageLayout, RowLayout
from tailrace.model.config import ModelConfig, state_groups
from tailrace.model.draft_rows import drafting_groups
from tailrace.model.errors import ConfigError
from tailrace.model.family import FamilyConfig
from tailrace.model.replay_policy import ReplayPolicy, bounded_replay
from tailrace.model.row_groups import RowPages
from tailrace.model.shard import Shard, check
from tailrace.model.state_sizes import SUPER_PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Sizes:
    """Derived sizes of one application.

    Attributes:
        ctx_layout, gen_layout: geometry of such a worker's pages, every head once.
        ctx_rank, gen_rank: geometry of what one rank of such a worker holds of a page. With fewer key-value heads than
            ranks, all ranks together hold more than its layout.
        ctx_pages, gen_pages: pages of one worker's pool, the scratch page included; the same pages at all its ranks.
        max_request_tokens: prompt plus output of one request, over both pools.
        replay: what ctx leaves to gen; None: nothing (handoff_mode full).
        replay_step: what state has lost behind a replay; empty: nothing.
    """

    ctx_layout: PageLayout | RowLayout
    gen_layout: PageLayout | RowLayout
    ctx_rank: PageLayout | RowLayout
    gen_rank: PageLayout | RowLayout
    ctx_pages: int
    gen_pages: int
    max_request_tokens: int
    replay: ReplayPolicy | None = None
    replay_step: str = ""

    def num_pages(self, role: str) -> int:
        """Pages of one `ctx` or `gen` worker, scratch included."""
        return self.ctx_pages if role == "ctx" else self.gen_pages

    def layout(self, role: str) -> PageLayout | RowLayout:
        """Geometry of a page of a `ctx` or `gen` worker, every head once."""
        return self.ctx_layout if role == "ctx" else self.gen_layout

    def rank_layout(self, role: str) -> PageLayout | RowLayout:
        """Geometry of one rank's part of a page in a `ctx` or `gen` worker."""
        return self.ctx_rank if role == "ctx" else self.gen_rank


ROLES = ("ctx", "gen")


def derive(config: TailraceConfig, model: ModelConfig | FamilyConfig) -> Sizes:
    """The sizes, or ConfigError naming the key and both numbers."""
    layouts, ranks = _layouts(config, model) if isinstance(model, ModelConfig) else _row_layouts(config, model)
    pages = {role: _pages(config, role, layouts[role], ranks[role]) for role in ROLES}
    tokens = {r: (pages[r] - 1 - layouts[r].num_state_pages) * layouts[r].tokens_per_page for r in ROLES}
    pool_tokens = min(tokens.values())
    limit = config.max_request_tokens
    if limit is None:
        limit = min(model.max_position, pool_tokens)
    elif limit > model.max_position:
        raise ConfigError(f"max_request_tokens: {limit} is over the model's {model.max_position} positions")
    elif limit > pool_tokens:
        small = min(tokens, key=lambda role: tokens[role])
        raise ConfigError(
            f"{_key(config, small)}: {config.pool_bytes(small)} bytes hold {pool_tokens} tokens, "
            f"less than one request of max_request_tokens ({limit})"
        )
    replay, step = _replay(config, model)
    return Sizes(
        layouts["ctx"], layouts["gen"], ranks["ctx"], ranks["gen"], pages["ctx"], pages["gen"], limit, replay, step
    )


def _replay(config: TailraceConfig, model: ModelConfig | FamilyConfig) -> tuple[ReplayPolicy | None, str]:
    """What ctx leaves to gen, and the name of what is lost by it."""
    if config.handoff_mode == "full":
        return None, ""
    if model.family != "csa2":
        raise ConfigError(
            f"handoff_mode: {config.handoff_mode} needs a model whose upper layers keep nothing that grows with the "
            f"prompt, and family {model.family} is none: use full"
        )
    shape: Any = model
    decoder = config.replay.decoder or bounded_replay(shape).decoder
    policy = ReplayPolicy(decoder, config.replay.encoder or decoder).checked(shape)
    wrong = [*short_tail(config, policy.encoder)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    return policy, policy.step(shape, resumed=True)


Layouts = dict[str, PageLayout] | dict[str, RowLayout]
"""By role."""


def _layouts(config: TailraceConfig, model: ModelConfig) -> tuple[Layouts, Layouts]:
    """Of whole pages and of one rank's part of them."""
    if config.gen.drafts:
        raise ConfigError(f"gen.drafts: {config.gen.drafts}, but family {model.family} has no draft block")
    groups = state_groups(model)
    if len(groups) != 1:
        raise ConfigError(f"model: {config.model} has {len(groups)} state groups, this release serves one")
    layouts = {role: PageLayout(groups[0], config.page_tokens(role), config.page_dtype(role)) for role in ROLES}
    return layouts, {role: _rank_layout(config, role, model) for role in ROLES}


def _row_layouts(config: TailraceConfig, model: FamilyConfig) -> tuple[Layouts, Layouts]:
    """Of a family whose rows have formats of their own: one rank, and the same pages at ctx and gen."""
    wrong = [f"{line} (the rows of family {model.family} have formats of their own)" for line in unfit_for_rows(config)]
    if wrong:
        raise ConfigError("\n".join(wrong))
    layouts = {role: _row_layout(config, role, model) for role in ROLES}
    return layouts, layouts


def _row_layout(config: TailraceConfig, role: str, model: FamilyConfig) -> RowLayout:
    dtype = config.page_dtype(role)
    try:
        groups = drafting_groups(model, dtype) if config.gen.drafts else model.row_groups(dtype)
    except ConfigError as error:
        raise ConfigError(f"gen.drafts: {error}") from None
    tokens = config.page_tokens_said(role)
    if tokens is None:
        period = RowPages.period_of(groups)
        tokens = -(-SUPER_PAGE_TOKENS // period) * period  # more only if it must
    try:
        layout = RowLayout(groups, tokens, config.page_dtype(role))
    except ConfigError as error:
        raise ConfigError(f"{error} (family {model.family})") from None
    block = config.block_tokens
    if max(tokens, block) % min(tokens, block):
        raise ConfigError(f"block_tokens: {block} neither divides {tokens} tokens a page nor is a multiple of it")
    return layout


def _key(config: TailraceConfig, role: str) -> str:
    return "kv_bytes" if config.pool(role).kv_bytes is None else f"{role}.kv_bytes"


def _rank_layout(config: TailraceConfig, role: str, model: ModelConfig) -> PageLayout:
    tp = config.pool(role).tp
    check(model, tp, f"{role}.tp")
    group = state_groups(Shard(0, tp).config(model))[0]
    return PageLayout(group, config.page_tokens(role), config.page_dtype(role))


def _pages(config: TailraceConfig, role: str, layout: Layout, rank: Layout) -> int:
    page_bytes = config.pool(role).tp * rank.bytes_per_page
    pages = config.pool_bytes(role) // page_bytes
    needed = 1 + max(1, layout.num_pages(config.block_tokens))
    if pages < needed:
        raise ConfigError(
            f"{_key(config, role)}: {config.pool_bytes(role)} bytes are {pages} pages of {page_bytes} "
            f"bytes; a scratch page and one block need {needed} ({needed * page_bytes} bytes)"
        )
    return pages
