"""The lower half of V4.1 alone: the bytes of the whole model stopped at the boundary, from the tensors it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.model.csa2_config import parse_config
from tailrace.model.csa2_decoder import Csa2Decoder
from tailrace.model.csa2_lower import Csa2LowerHalf
from tailrace.model.csa2_tensors import lower_shapes
from tailrace.model.csa2_weights import load_weights
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES, LowerHalfDecoder
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool
from tests.model.csa2_models import DRAFT, ENGRAM, PLAIN, entries, make_decoder, random_ids, random_tensors, token_map
from tests.model.published import V41_FLASH, published_config

NUM = 40
# Engram in front of the boundary, in it, and behind it, where it is of no use here.
AT_BOUNDARY = {**ENGRAM, "engram_layer_ids": [1, 4]}
BEHIND_DRAFT = {**DRAFT, "engram_layer_ids": [1, 6]}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lower_half(raw: dict[str, Any], tensors: Mapping[str, torch.Tensor], seen: list[Any] | None = None):
    config = parse_config(raw, "tiny")
    config = config.drafting() if config.draft is not None else config
    classes = token_map() if config.engram is not None else None

    def progress(done: int, total: int) -> None:
        if seen is not None:
            seen.append((done, total))

    read = load_weights(entries(dict(tensors)), config, torch.float32, classes, progress, lower=True)
    return Csa2LowerHalf(Csa2Decoder(read, 16))


def table_of(layout: RowPages, num_tokens: int) -> np.ndarray:
    return np.arange(1, 1 - (-num_tokens // layout.tokens_per_page) + layout.num_state_pages, dtype=np.int32)


def pages_of(decoder: Any, ids: Sequence[int], cuts: Sequence[int], **how: Any) -> torch.Tensor:
    """A poisoned pool after a prompt in chunks that end at `cuts`."""
    layout = decoder.layout
    pool = RowPool(torch.full((40, layout.bytes_per_page), 0xFF, dtype=torch.uint8), layout)
    table = table_of(layout, len(ids))
    start = 0
    for end in (*cuts, len(ids)):
        span = RowSpan(start, end - start, table, upper_from=len(ids))
        decoder.forward(torch.tensor(ids[start:end]), torch.arange(start, end), pool, [span], **how)
        start = end
    return pool.pages


@pytest.mark.parametrize("raw", [PLAIN, AT_BOUNDARY, BEHIND_DRAFT], ids=["plain", "at", "behind, draft"])
def test_it_leaves_the_bytes_of_the_whole_model_stopped_at_the_boundary(raw: dict[str, Any]):
    whole, ids = make_decoder(raw, seed=3), random_ids(NUM, seed=5)
    needed = {name for name, _ in lower_shapes(whole.config)}
    tensors = random_tensors(raw, 3)
    assert not any(f"layers.{i}." in name for name in needed for i in range(5, 9)) and "head.weight" not in needed
    lower = lower_half(raw, {name: tensors[name] for name in needed})
    assert isinstance(lower, LowerHalfDecoder) and not isinstance(whole, LowerHalfDecoder)
    expected = pages_of(whole, ids, [17])
    assert torch.equal(pages_of(lower, ids, [17]), expected)
    assert torch.equal(pages_of(lower, ids, [7]), pages_of(whole, ids, [7], num_layers=4))
    assert (expected != 0xFF).any()


def test_it_reads_what_it_needs_and_misses_what_is_missing():
    tensors, seen = random_tensors(ENGRAM, 3), []
    config = parse_config(ENGRAM, "tiny")
    lower_half(ENGRAM, tensors, seen)
    nbytes = 4 * sum(tensors[name].numel() for name, _ in lower_shapes(config))
    assert seen[-1] == (nbytes, nbytes) and config.num_lower_parameters * 4 == nbytes
    for name, _ in lower_shapes(config):
        if name.startswith(("layers.4.", "norm", "layers.3.engram")):
            with pytest.raises(ConfigError, match=f"tensor {name} is missing"):
                lower_half(ENGRAM, {n: t for n, t in tensors.items() if n != name})


def test_what_needs_the_upper_layers_is_refused():
    lower = lower_half(PLAIN, random_tensors(PLAIN, 3))
    pool = RowPool(torch.full((9, lower.layout.bytes_per_page), 0xFF, dtype=torch.uint8), lower.layout)
    table = table_of(lower.layout, 8)
    ids, positions = torch.arange(8), torch.arange(8)
    for upper_from in (0, 7):
        with pytest.raises(ValueError, match=f"tokens {upper_from} to 8 need the upper layers"):
            lower.forward(ids, positions, pool, [RowSpan(0, 8, table, upper_from=upper_from)])
    assert (pool.pages == 0xFF).all(), "nothing was written"
    hidden = lower.forward(ids, positions, pool, [RowSpan(0, 8, table, upper_from=8)])
    assert hidden.shape == (8, PLAIN["hidden_size"]) and hidden.isfinite().all()
    with pytest.raises(ValueError, match="no output projection"):
        lower.logits(hidden)
    with pytest.raises(ConfigError, match="has no boundary that a prefill could stop at"):
        FAMILIES["deepseek_v4"].load_lower({}, parse_config(PLAIN, "x"), torch.float32, 16)  # type: ignore[arg-type]


def test_of_v41_flash_it_is_less_than_half_of_the_model_beside_engrams_tables():
    config = parse_config(published_config(V41_FLASH), "config.json")
    assert config.engram is not None and config.engram.layers == (1, 14)
    tables = sum(rows * config.engram.head_dim for rows in config.engram.table_rows)
    share = (config.num_lower_parameters - tables) / (config.num_parameters - tables)
    assert 0.49 < share < 0.51
