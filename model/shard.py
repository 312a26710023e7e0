"""How a decoder is split over the ranks of one worker: heads, MLP columns, and what every rank keeps whole. Torch-free.

Each rank runs all layers with its share of the query heads and of the MLP's inner width, and adds what it computed to
the others' twice a layer. Key-value heads are split as far as they go; with fewer of them than ranks, each is held by
several ranks: rank r then holds head r * kv_heads // tp, the one that its query heads attend to. Embedding and norms
are whole on every rank; the output projection is rank 0's alone, since only rank 0 samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailrace.model.config import ModelConfig
from tailrace.model.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `tp`."""

    rank: int = 0
    tp: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp:
            raise ConfigError(f"rank {self.rank} of {self.tp}: ranks are numbered from 0")

    def kv_heads(self, total: int) -> range:
        """The key-value heads, of `total` in all, that this rank holds."""
        if total >= self.tp:
            return self.part(total)
        first = self.rank * total // self.tp
        return range(first, first + 1)

    def part(self, total: int) -> range:
        """This rank's share of `total` things of which every rank has as many."""
        each = total // self.tp
        return range(self.rank * each, (self.rank + 1) * each)

    def config(self, model: ModelConfig) -> ModelConfig:
        """What one rank's decoder looks like: fewer heads and a narrower MLP, else the model's own.

        Raises:
            ConfigError: the model cannot be split so; the message names both numbers.
        """
        check(model, self.tp, "tp")
        return replace(
            model,
            num_heads=model.num_heads // self.tp,
            num_kv_heads=len(self.kv_heads(model.num_kv_heads)),
            intermediate_size=model.intermediate_size // self.tp,
        )


WHOLE = Shard()


def check(model: ModelConfig, tp: int, key: str) -> None:
    """Raise ConfigError, naming `key` and both numbers, if the model cannot be split over `tp` ranks."""
    if model.num_heads % tp:
        raise ConfigError(f"{key}: {tp} ranks cannot share {model.num_heads} attention heads: not a multiple")
    if model.intermediate_size % tp:
        raise ConfigError(
            f"{key}: {tp} ranks cannot share an MLP of width {model.intermediate_size}: it is no multiple of them"
        )
    large, small = max(model.num_kv_heads, tp), min(model.num_kv_heads, tp)
    if large % small:
        raise ConfigError(
            f"{key}: {tp} ranks can neither share {model.num_kv_heads} key-value heads nor each hold one equally often"
        )
