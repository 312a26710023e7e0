"""What one worker's node is told when it is made. Plain data, checked here; dies with its process."""

from __future__ import annotations

from dataclasses import dataclass, field

from tailrace.model.errors import ConfigError
from tailrace.transfer import core_events as ce
from tailrace.transfer.links import Identity
from tailrace.transfer.messages import CompatRecord


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One worker's identity and what its node needs to know.

    Attributes:
        worker, boot: its stable name, and this process group's boot id.
        home: ctx | gen, its Serve pool.  duty: ctx | gen | both, what it hosts.
        host: the address that it binds and tells its peers.  port: 0 for any free one.
        model: served name, a metric label.  compat: compared with every peer.
        max_num_tokens: tokens a step.  max_request_tokens: of one prompt and its output.
        max_batch_size: sequences that decode here at once; 0 on a ctx.
        transport: `auto` or the name of one.
        heartbeat_s, report_s: periods of Heartbeat, and of the whole set and statistics.
        faults: tests only: obey SetFaults.
        recorder_bytes: what the flight recorder keeps, about; 0: nothing.  recorder_dir: where it dumps; empty: a
            folder of its own where the system keeps temporary files.
        backflow: read what gens offer of finished turns, or offer it.
    """

    worker: str
    boot: str
    home: str
    duty: str
    host: str
    secret: bytes
    compat: CompatRecord
    max_num_tokens: int
    max_request_tokens: int
    port: int = 0
    model: str = ""
    transport: str = "auto"
    core: ce.CoreConfig = field(default_factory=ce.CoreConfig)
    heartbeat_s: float = 0.5
    report_s: float = 1.0
    faults: bool = False
    recorder_bytes: int = 1 << 20
    recorder_dir: str = ""
    backflow: bool = False
    max_batch_size: int = 0

    def __post_init__(self) -> None:
        if self.duty not in ("ctx", "gen", "both"):
            raise ConfigError(f"duty: {self.duty!r} is none of ctx, gen, both")

    @property
    def identity(self) -> Identity:
        return Identity(self.home, self.worker, self.boot)
