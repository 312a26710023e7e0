"""DeepSeek V3 and V3.2: embedding, blocks of latent attention, output projection, over rows in packed pages.

It knows tensors and pages, not sequences' lives; between steps it holds nothing. Each token's result depends on its
own row alone, and rows are read back as they were stored, so that where a prompt was cut makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tailrace.kernels.paged_attention import RowSpan
from tailrace.kernels.row_formats import fp8_tiles, plain
from tailrace.model.family import Progress
from tailrace.model.linear import Linear
from tailrace.model.mla_block import Block, RowFormats, Step
from tailrace.model.mla_config import PACKED_TILE, MlaConfig
from tailrace.model.mla_weights import WeightReader
from tailrace.model.rope import frequencies
from tailrace.model.row_groups import RowPages
from tailrace.model.row_store import RowPool
from tailrace.model.tensors import TensorTable
from tailrace.model.weights import DTYPES, DenseEmbedding, Embedding


class MlaDecoder:
    """The whole model.

    Args:
        reader: of its weights.
        tokens_per_page: any number from 1 on.
        kv_dtype: of the rows, as `MlaConfig.row_groups` has it; the weights' own if None.
    """

    def __init__(self, reader: WeightReader, tokens_per_page: int, kv_dtype: str | None = None) -> None:
        self.config, self.dtype = reader.config, reader.dtype
        config = self.config
        self.kv_dtype = _name(self.dtype) if kv_dtype is None else kv_dtype
        self.layout = RowPages(config.row_groups(self.kv_dtype), tokens_per_page)
        self.frequencies = frequencies(config.rope, config.rope_dim)
        self.embed, self._lm_head = _ends(reader)
        self._norm = reader.norm("model.norm.weight")
        formats = row_formats(config, self.kv_dtype)
        self._blocks = tuple(
            Block(config, reader.block(f"model.layers.{i}.", is_sparse), formats, i)
            for i, is_sparse in enumerate(config.is_sparse)
        )

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Run the blocks and store the new tokens' rows.

        Args:
            ids, positions: [tokens or more] int64, rows one behind the other; what lies past them is padding.
            pool: pages of `self.layout`.
            rows: each with its sequence's whole page table.
            num_layers: only the first blocks; all if None.

        Returns:
            [len(ids), hidden_size] after the final norm.
        """
        step = Step(self.config, self.frequencies, positions, pool, rows)
        hidden = self.embed(ids).float()  # the sum over blocks is kept in float32 whatever the dtype
        for block in self._blocks[:num_layers]:
            block(hidden, step)
        return self._norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden_size] from `forward` -> [rows, vocab_size] float32."""
        return self._lm_head(hidden).float()


def load(
    tensors: TensorTable, config: MlaConfig, dtype: torch.dtype, tokens_per_page: int, progress: Progress | None = None
) -> MlaDecoder:
    """A decoder from a checkpoint's tensors by their stored names.

    Raises:
        ConfigError: a tensor is missing or has another shape, tokens_per_page is below 1, or dtype is not supported.
    """
    with torch.no_grad():
        decoder = MlaDecoder(WeightReader(tensors, config, dtype, progress), tokens_per_page)
    tensors.drop_pages()
    return decoder


def row_formats(config: MlaConfig, kv_dtype: str) -> RowFormats:
    """The formats of `config.row_groups(kv_dtype)`."""
    dtype = DTYPES[kv_dtype]
    latent, key = plain(config.latent_dim, dtype), None
    if config.indexer is not None and kv_dtype == "float32":
        key = plain(config.indexer.dim, dtype)
    elif config.indexer is not None:
        latent = fp8_tiles(config.latent_dim, PACKED_TILE, "float32", tail_dims=config.rope_dim)
        key = fp8_tiles(config.indexer.dim, PACKED_TILE, "float32")
    written = [(f.name, f.row_bytes) for f in (latent, key) if f is not None]
    declared = [(f.row_format, f.row_bytes) for f in config.row_groups(kv_dtype)[0].fields]
    if written != declared:
        raise AssertionError(f"rows are declared as {declared} and written as {written}")
    return RowFormats(latent, key)


def _name(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known is dtype)


def _ends(reader: WeightReader) -> tuple[Embedding, Linear]:
    """Embedding and output projection; in float32 of one memory where they are tied."""
    table = reader.tensor("model.embed_tokens.weight")
    head = table if reader.config.tie_embeddings else reader.tensor("lm_head.weight")
    return DenseEmbedding(table), reader.linear(head)
