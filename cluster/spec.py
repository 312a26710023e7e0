"""What a rank process is told at its start: which part of which application it is. Plain data, sent as one JSON line.

The secret travels here, over the stdin of a child, and so stands in no command line and no environment.
"""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from tailrace.cluster.config import TailraceConfig, load_config
from tailrace.model.errors import ConfigError


def new_boot() -> str:
    """A boot id: random for every start of a process."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """One start of one rank of one worker.

    Attributes:
        role: home pool, `ctx` or `gen`.
        name: the worker's name, stable over its restarts, e.g. `ctx-0`.
        host: address that the worker binds and tells its peers.
        args: the configuration as the operator wrote it.
        secret: the cluster secret, hex or the configured text.
        port: where its links are accepted; 0 for any free one.
        boot: boot id, one for all ranks of the worker.
        ray_address: of the Ray that `transport: ray` joins; auto finds that of its host.
        rank: which of its worker's `tp` ranks; 0 is the one with loop, links and sampler.
    """

    role: str
    name: str
    host: str
    args: dict[str, Any]
    secret: str
    port: int = 0
    boot: str = field(default_factory=new_boot)
    rank: int = 0
    ray_address: str = "auto"

    def __post_init__(self) -> None:
        if self.role not in ("ctx", "gen"):
            raise ConfigError(f"role: {self.role!r} is neither ctx nor gen")
        if not self.name:
            raise ConfigError("name: a worker needs a name")

    @property
    def config(self) -> TailraceConfig:
        return load_config(self.args)

    @property
    def title(self) -> str:
        """The process's name in logs."""
        return f"{self.name}.{self.rank}" if self.rank else self.name

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(**data)
