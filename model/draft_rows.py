"""What a sequence keeps for a draft block of its model, by config alone: torch-free, for sizes and pairing.

`drafting_config` is the config that a decoder with its draft block is loaded with; `drafting_groups` are the state
groups of both, the CARRY row of the state in front of the next token included (drafting.py says what it is for; the
stages of V4.1 keep windows instead).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from tailrace.model.errors import ConfigError
from tailrace.model.family import FamilyConfig
from tailrace.model.row_groups import RowField, RowGroup
from tailrace.model.state_groups import GroupKind

CARRIED = "draft_state"


def drafting_config(config: FamilyConfig) -> FamilyConfig:
    """The same model with its first draft block in use.

    Raises:
        ConfigError: its family's draft blocks are not served, or the checkpoint has none.
    """
    if config.family == "csa2":
        return cast(FamilyConfig, cast(Any, config).drafting())
    if not hasattr(config, "num_draft_layers"):
        raise ConfigError(f"family {config.family} has no draft block that is served")
    if not cast(Any, config).num_draft_layers_stored:
        raise ConfigError("the checkpoint has no draft block (num_nextn_predict_layers is 0)")
    return cast(FamilyConfig, dataclasses.replace(cast(Any, config), num_draft_layers=1))


def state_width(config: FamilyConfig) -> int:
    """Elements of a token's state behind the last layer, which the block takes."""
    return int(getattr(config, "streams", 1)) * config.hidden_size


def carried_group(config: FamilyConfig) -> RowGroup:
    """The state behind the last layer at the last token."""
    width = state_width(config)
    return RowGroup(GroupKind.CARRY, (0,), (RowField(CARRIED, 4 * width, f"float32x{width}"),), rows=1)


def drafting_groups(config: FamilyConfig, kv_dtype: str) -> tuple[RowGroup, ...]:
    """All of the model's and its draft block's. Raises ConfigError as drafting_config."""
    config = drafting_config(config)
    if config.family == "csa2":
        return config.row_groups(kv_dtype)
    return (*config.row_groups(kv_dtype), carried_group(config))


def num_accepted(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """How many leading drafts are what was chosen in their place. chosen[i] stands in the place of drafts[i]."""
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count
