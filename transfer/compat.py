"""What two workers must agree on before a page may move: the records that pairing compares. Types only."""

from __future__ import annotations

from dataclasses import dataclass

ROWS = "rows"


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A state group as its worker has allocated it, all ranks together.

    Of kind ROWS: pages of a family whose rows have formats of their own (kv_cache/layout.py, RowLayout), all its groups
    in one record; `layers`: number and description of each group, `dim`: bytes a page.

    `layers`: number and rows of each, e.g. (3, "k 2x16, v 2x16"): heads x dims. `kv_heads`: of the model, whatever tp.
    """

    kind: str
    window: int | None
    layers: tuple[tuple[int, str], ...]
    fields: int
    kv_heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class CompatRecord:
    """What two workers tell each other before a page may move; what may differ is said in transfer/pairing.py.

    `page_bytes`: of a page of each group, every head once. `codecs`: by falling preference.
    """

    protocol: int
    model: str  # hash over config, weights revision and tokenizer
    dtype: str
    tokens_per_page: int
    block_tokens: int
    groups: tuple[GroupRecord, ...]
    page_bytes: tuple[int, ...]
    tp: int
    codecs: tuple[str, ...]
