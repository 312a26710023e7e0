"""A tokenizer from a GGUF file's metadata: byte-level BPE (`gpt2`) and SentencePiece-style BPE (`llama`). Torch-free.

A GGUF names its pre-tokenizer and leaves the split itself to the reader. Names that are not known here are refused
rather than split some other way: the ids would be valid and the answers subtly worse.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from tailrace.model.errors import ConfigError
from tailrace.model.gguf_file import GgufFile
from tailrace.model.tokenizer import SPACE_MARK, Tokenizer, byte_alphabet, set_outer_tokens

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "smaug-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
_GPT2_NAMES = ("gpt-2", "gpt2", "default")
_DIGIT_NAMES = ("smollm",)


def read_tokenizer(file: GgufFile, *, vocab_size: int) -> Tokenizer:
    """Tokenizer of a GGUF file.

    Args:
        file: the parsed file.
        vocab_size: rows of the model's embedding.

    Raises:
        ConfigError: a tokenizer model or pre-tokenizer that is not supported, or lists that do not fit.
    """
    metadata, where = file.metadata, str(file.path)
    tokens = _list(file, "tokenizer.ggml.tokens")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        backend = _byte_level(file, tokens)
    elif model == "llama":
        backend = _sentencepiece(file, tokens)
    else:
        raise ConfigError(f"{where}: tokenizer {model!r} is not supported; supported: gpt2, llama")
    _mark_special(backend, tokens, metadata.get("tokenizer.ggml.token_type") or [], byte_level=model == "gpt2")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            raise ConfigError(f"{where}: tokenizer.ggml.{key}_token_id {token} is outside {len(tokens)} tokens")
        special[f"{name}_token"] = tokens[token]
    # A SentencePiece vocabulary without the flag is an old file, for which BOS is always wanted.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", model == "llama")
    set_outer_tokens(
        backend,
        special.get("bos_token") if add_bos else None,
        special.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    return Tokenizer(backend, special_tokens=special, vocab_size=vocab_size, where=where)


def _list(file: GgufFile, key: str) -> list[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{file.path}: {key} is missing")
    return value


def _merges(file: GgufFile, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in _list(file, "tokenizer.ggml.merges"):
        left, _, right = str(line).partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ConfigError(f"{file.path}: merge {line!r} names a token that is not in the vocabulary")
        merges.append((left, right))
    return merges


def _byte_level(file: GgufFile, tokens: list[str]) -> Backend:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    if name in _SPLITS:
        splitter = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif name in _DIGIT_NAMES:
        splitter = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif name in _GPT2_NAMES:
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join(sorted([*_SPLITS, *_GPT2_NAMES, *_DIGIT_NAMES]))
        raise ConfigError(f"{file.path}: pre-tokenizer {name!r} is not supported; supported: {known}")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(BPE(vocab=vocab, merges=_merges(file, vocab), fuse_unk=False))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Backend:
    vocab = {token: i for i, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in file.metadata:
        merges = _merges(file, vocab)
    else:
        scores = _list(file, "tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise ConfigError(f"{file.path}: {len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens")
        merges = _merges_by_score(vocab, dict(zip(tokens, scores, strict=True)))
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    backend = Backend(
        BPE(
            vocab=vocab,
            merges=merges,
            fuse_unk=True,
            byte_fallback=True,
            unk_token=tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None,
        )
    )
    prefix_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE_MARK, prepend_scheme="first" if prefix_space else "never", split=False
    )
    steps: list[Any] = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(vocab: Mapping[str, int], scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Merges that a scored vocabulary implies: every way to join two tokens into a third, best score first."""
    merges: list[tuple[str, str, float]] = []
    for token, score in scores.items():
        ways = [
            (token[:cut], token[cut:], score)
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        merges += sorted(ways, key=lambda way: (vocab[way[0]], vocab[way[1]]))
    merges.sort(key=lambda way: (way[2], len(way[0]), len(way[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def _mark_special(backend: Backend, tokens: list[str], types: list[int], *, byte_level: bool) -> None:
    """Tokens that text must find whole. In a byte-level vocabulary one spelled outside its alphabet is a mislabel."""
    alphabet = set(byte_alphabet())
    control, user = [], []
    for token, kind in zip(tokens, types, strict=False):
        if kind == CONTROL and not (byte_level and not set(token) <= alphabet):
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            user.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(user)


def digest(file: GgufFile) -> bytes:
    """Hash over all that decides ids."""
    keys = sorted(k for k in file.metadata if k.startswith("tokenizer.ggml."))
    h = hashlib.sha256()
    for key in keys:
        h.update(f"{key}={file.metadata[key]!r}\n".encode())
    return h.digest()
