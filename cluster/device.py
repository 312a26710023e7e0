"""Where a rank keeps weights and pages and computes. Decided by the rank itself, which has torch; no router asks.

Chooses only; what cannot be done on a GPU at all is refused with the configuration (cluster/config_rules.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tailrace.cluster.config import TailraceConfig
from tailrace.cluster.config_rules import unfit_for_cuda
from tailrace.model.config import ModelConfig
from tailrace.model.errors import ConfigError
from tailrace.model.family import FamilyConfig


@dataclass(frozen=True, slots=True)
class Chosen:
    """`why` is for the start log."""

    device: torch.device
    why: str

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def choose_device(config: TailraceConfig, model: ModelConfig | FamilyConfig, has_gpu: bool | None = None) -> Chosen:
    """The device of this process.

    Args:
        has_gpu: whether torch sees one; asked here if None.

    Raises:
        ConfigError: device is cuda, and there is none or the model's rows cannot stand there.
    """
    cpu = torch.device("cpu")
    if config.device == "cpu":
        return Chosen(cpu, "device is 'cpu'")
    has_gpu = torch.cuda.is_available() if has_gpu is None else has_gpu
    if config.device == "cuda":
        if not has_gpu:
            raise ConfigError("device: 'cuda', and torch sees no GPU in this process")
        if not isinstance(model, ModelConfig):
            raise ConfigError(f"device: 'cuda' serves the Llama family; rows of family {model.family} stand on a CPU")
        return Chosen(torch.device("cuda", 0), "device is 'cuda'")
    if not has_gpu:
        return Chosen(cpu, "torch sees no GPU")
    if not isinstance(model, ModelConfig):
        return Chosen(cpu, f"there is a GPU, and rows of family {model.family} stand on a CPU")
    lines = list(unfit_for_cuda(config))
    if lines:
        return Chosen(cpu, f"there is a GPU, and it cannot do what is asked for: {'; '.join(lines)}")
    return Chosen(torch.device("cuda", 0), "torch sees a GPU")
