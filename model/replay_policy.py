"""How many of a prompt's last tokens are sent through the model again, and what that costs (replay.py). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tailrace.model.errors import ConfigError

if TYPE_CHECKING:
    from tailrace.model.csa2_config import Csa2Config

LOWER_HALF = "lower-half"
"""Fidelity class of state that lacks the windows of the upper layers: good for who replays, and for nobody else."""


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """How much is replayed.

    Attributes:
        decoder: tokens that go through the boundary and the layers above it.
        encoder: tokens that go through the layers below; not fewer. By `resume` what is more changes nothing.
    """

    decoder: int
    encoder: int

    def __post_init__(self) -> None:
        if not 1 <= self.decoder <= self.encoder:
            raise ConfigError(
                f"replay: decoder is {self.decoder} and encoder {self.encoder}, expected 1 <= decoder <= encoder"
            )

    def tail_tokens(self, config: Csa2Config) -> int:
        """Ids at the prompt's end that are needed: those replayed, and what n-grams look back at."""
        return self.encoder + (config.engram.lookback if config.engram is not None else 0)

    def checked(self, config: Csa2Config) -> ReplayPolicy:
        """Itself, if every window row that a later token may read is made; else ConfigError."""
        if self.decoder < config.window:
            raise ConfigError(f"replay: decoder is {self.decoder} tokens, fewer than a window of {config.window}")
        return self

    def step(self, config: Csa2Config, *, resumed: bool) -> str:
        """Name of the lossy step, of a sequence's fidelity; empty if it is exact."""
        exact = exact_replay(config)
        if self.decoder >= exact.decoder and (resumed or self.encoder >= exact.encoder):
            return ""
        return f"replay-{self.decoder}" if resumed else f"replay-{self.decoder}-{self.encoder}"


def exact_replay(config: Csa2Config) -> ReplayPolicy:
    """The smallest policy that loses nothing."""
    back = config.window - 1
    decoder = (config.num_layers - config.boundary) * back + 1
    return ReplayPolicy(decoder, decoder + config.boundary * back)


def bounded_replay(config: Csa2Config, windows: int = 2) -> ReplayPolicy:
    """A policy of so many windows, an approximation."""
    return ReplayPolicy(windows * config.window, windows * config.window)
