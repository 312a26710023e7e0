"""What a rank process is told at its start: which part of which application it is. Plain data, sent as one JSON line.

The secret travels here, over the stdin of a child, and so stands in no command line and no environment.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass
from typing import Any, Self

from tailrace.cluster.config import TailraceConfig, load_config
from tailrace.model.errors import ConfigError


def new_boot() -> str:
    """A boot id: random for every start of a process."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One rank of one worker.

    Attributes:
        role: home pool, `ctx` or `gen`.
        name: the worker's name, stable over its restarts, e.g. `ctx-0`.
        host: address that the worker binds and tells its peers.
        args: the configuration as the operator wrote it.
        secret: the cluster secret, hex or the configured text.
    """

    role: str
    name: str
    host: str
    args: dict[str, Any]
    secret: str

    def __post_init__(self) -> None:
        if self.role not in ("ctx", "gen"):
            raise ConfigError(f"role: {self.role!r} is neither ctx nor gen")
        if not self.name:
            raise ConfigError("name: a worker needs a name")

    @property
    def config(self) -> TailraceConfig:
        return load_config(self.args)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)
