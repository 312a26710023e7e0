"""Families whose rows have formats of their own (row_groups.py): what the rest knows of one, and where one is found.

A family is two modules. The config module is torch-free and has

    parse_config(raw: Mapping, where: str) -> FamilyConfig      ConfigError names the key

and the decoder module

    load(tensors: TensorTable, config, dtype: torch.dtype, tokens_per_page: int, progress=None) -> RowDecoder

where `tensors` are those of the checkpoint under the names its files give them (hf_directory.stored_tensors), and
`progress` is told (bytes read, bytes in all) after each. They are imported when a checkpoint of theirs is opened or
loaded: neither a family that is not served nor its absence costs anything.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from tailrace.model.errors import ConfigError
from tailrace.model.row_groups import RowGroup, RowPages

if TYPE_CHECKING:
    import torch

    from tailrace.kernels.paged_attention import RowSpan
    from tailrace.model.row_store import RowPool
    from tailrace.model.tensors import TensorTable

Progress = Callable[[int, int], None]


class FamilyConfig(Protocol):
    """A frozen dataclass; its repr is part of the model's revision.

    Attributes:
        num_parameters: of the whole checkpoint, counted from the config.
    """

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def num_parameters(self) -> int: ...

    def row_groups(self, kv_dtype: str) -> tuple[RowGroup, ...]:
        """What decode needs of the past. `kv_dtype`: float32 (plain rows) or bfloat16 (the family's packed formats)."""
        ...


class RowDecoder(Protocol):
    """One family's model, whole. The result for a token depends neither on how its prompt was cut into chunks nor on
    the other rows of a step.

    Attributes:
        dtype: of weights and activations.
        layout: where the rows stand; equal wherever config, dtype and tokens_per_page are.
    """

    config: Any
    dtype: torch.dtype
    layout: RowPages

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        pool: RowPool,
        rows: Sequence[RowSpan],
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """Write the rows' state, after the final norm -> [len(ids), hidden_size].

        Args:
            ids, positions: [tokens or more] int64, rows one behind the other; what lies behind them is padding, which
                is computed and stored nowhere.
            rows: each with its sequence's whole page table. Pages of a fresh sequence hold garbage.
            num_layers: only the first ones; all if None.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        ...


class Guessed(NamedTuple):
    """tokens: guesses of what comes, in order. chances: of each to be right if those before it are, 0 to 1."""

    tokens: list[int]
    chances: list[float]


@runtime_checkable
class DraftingRowDecoder(RowDecoder, Protocol):
    """A decoder that can guess further tokens. Its `forward` may return wider rows than [n, hidden_size]; `logits` and
    `propose` take them as they are."""

    def propose(
        self, hidden: torch.Tensor, ids: torch.Tensor, pool: RowPool, rows: Sequence[RowSpan], counts: Sequence[int]
    ) -> list[Guessed]:
        """Guess what follows each row, as far as its pages have room.

        Args:
            hidden: [tokens, width] from `forward`, of the tokens in front of `ids`, rows one behind the other.
            ids: [tokens] int64; the last of a row has not been computed, those before it not been kept.
            rows: of `ids`; all of them are drafts.
            counts: tokens wanted of each row, at most.
        """
        ...


class RowsAhead(Protocol):
    """Fetches what steps over some ids will look up; see model/engram.py."""

    def ask(self, ids: Sequence[int], num_before: int) -> object: ...


@runtime_checkable
class ReadingAhead(Protocol):
    """A decoder that looks rows up by token ids, in tables that may not be in memory."""

    def rows_ahead(self) -> RowsAhead | None:
        """A reader of its own; None if this checkpoint has no tables."""
        ...


@runtime_checkable
class LowerHalfDecoder(RowDecoder, Protocol):
    """The layers in front of a boundary, and nothing else: it makes what it can for rows that end before their
    `upper_from`, and draws nothing; `logits` is a ValueError. See Family.load_lower."""

    boundary: int


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the two modules; see above. `lower_module`: the one whose `load` gives a LowerHalfDecoder, if any."""

    config_module: str
    decoder_module: str
    lower_module: str = ""

    def parse(self, raw: Mapping[str, Any], where: str) -> FamilyConfig:
        """`raw`: config.json as parsed; `where`: the file, for messages. Raises ConfigError naming file and key."""
        try:
            return importlib.import_module(self.config_module).parse_config(raw, where)
        except ConfigError as error:  # one of the config's own checks knows no file
            raise error if where in str(error) else ConfigError(f"{where}: {error}") from None

    def load(
        self,
        tensors: TensorTable,
        config: FamilyConfig,
        dtype: torch.dtype,
        tokens_per_page: int,
        progress: Progress | None = None,
    ) -> RowDecoder:
        """Raises ConfigError: a tensor is missing or has another shape, or tokens_per_page does not fit."""
        module = importlib.import_module(self.decoder_module)
        return module.load(tensors, config, dtype, tokens_per_page, progress)

    def load_lower(
        self,
        tensors: TensorTable,
        config: FamilyConfig,
        dtype: torch.dtype,
        tokens_per_page: int,
        progress: Progress | None = None,
    ) -> LowerHalfDecoder:
        """What a worker needs that leaves the upper layers to another. Raises ConfigError as `load`."""
        if not self.lower_module:
            raise ConfigError(f"family {config.family} has no boundary that a prefill could stop at")
        return importlib.import_module(self.lower_module).load(tensors, config, dtype, tokens_per_page, progress)


_MLA = Family("tailrace.model.mla_config", "tailrace.model.mla_decoder")
FAMILIES: dict[str, Family] = {  # by `model_type`
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "deepseek_v4": Family("tailrace.model.csa_config", "tailrace.model.csa_decoder"),
    "deepseek_v41": Family("tailrace.model.csa2_config", "tailrace.model.csa2_decoder", "tailrace.model.csa2_lower"),
}
