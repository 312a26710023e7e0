"""Who reads whom among DeepSeek V4.1's layers. Torch-free.

Every layer has a sliding window of its own. Beyond it a layer reads rows that a few *owners* made of all tokens:

    SWA       the window only
    FULL      an owner: makes rows of `ratio` tokens each, index keys beside them, and selects among its own
    REINDEX   selects anew among the owner's rows, with index queries of its own
    REUSE     takes the last list that FULL or REINDEX made

Source: DeepSeek V4.1 model card and inference config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tailrace.model.errors import ConfigError


class Role(StrEnum):
    SWA = "swa"
    FULL = "full"
    REINDEX = "reindex"
    REUSE = "reuse"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one layer reads beyond its window.

    Attributes:
        ratio: tokens a row; 0: it reads none.
        owner: the layer whose rows it reads; its own number if FULL; -1 if SWA.
        restricted: its selection is confined to the blocks that the candidate source published in this step.
    """

    role: Role
    ratio: int = 0
    owner: int = -1
    restricted: bool = False

    @property
    def selects(self) -> bool:
        return self.role in (Role.FULL, Role.REINDEX)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Two-level selection: `layer` keeps its best `blocks` blocks of `block_rows` rows for the layers behind it."""

    layer: int
    blocks: int
    block_rows: int


def layer_plans(
    num_layers: int,
    ratios: Sequence[int],
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    candidates: Candidates | None,
    where: str,
) -> tuple[LayerPlan, ...]:
    """Each layer's role and whom it reads.

    Args:
        ratios: at least one a layer; what follows belongs to draft stages.

    Raises:
        ConfigError: a layer without a source before it, of another ratio than its source, a KV source that selects
            nothing, or selections confined to blocks of other rows than their own.
    """
    if len(ratios) < num_layers:
        raise ConfigError(f"{where}: {len(ratios)} compress_ratios for {num_layers} layers")
    for name, layers in (("kv_source_layer_ids", kv_sources), ("index_source_layer_ids", index_sources)):
        wrong = [i for i in layers if not 0 <= i < num_layers or ratios[i] < 1]
        if wrong:
            raise ConfigError(f"{where}: {name} names layer {wrong[0]}, which is no layer of compress_ratios above 0")
    silent = sorted(set(kv_sources) - set(index_sources))
    if silent:
        raise ConfigError(f"{where}: layer {silent[0]} is in kv_source_layer_ids and not in index_source_layer_ids")
    if not kv_sources:
        raise ConfigError(f"{where}: kv_source_layer_ids is empty")
    source = candidates.layer if candidates is not None else num_layers
    if candidates is not None and source not in index_sources:
        raise ConfigError(f"{where}: candidate_source_layer_id {source} is not in index_source_layer_ids")
    plans: list[LayerPlan] = []
    owner = -1
    for i in range(num_layers):
        ratio = ratios[i]
        if ratio == 0:
            plans.append(LayerPlan(Role.SWA))
            continue
        owner = i if i in kv_sources else owner
        if owner < 0:
            raise ConfigError(f"{where}: layer {i} has compress ratio {ratio} and no KV source before it")
        if ratio != ratios[owner]:
            raise ConfigError(f"{where}: layer {i} has compress ratio {ratio}, its KV source {owner} {ratios[owner]}")
        selects = i in index_sources
        if selects and i > source and owner != plans[source].owner:
            raise ConfigError(
                f"{where}: layer {i} selects among rows of layer {owner}, but its candidates come from layer {source}, "
                f"which reads those of layer {plans[source].owner}"
            )
        role = Role.FULL if owner == i else Role.REINDEX if selects else Role.REUSE
        plans.append(LayerPlan(role, ratio, owner, selects and i > source))
    return tuple(plans)
