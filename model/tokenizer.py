"""Text to token ids and back, on the `tokenizers` library; equal to what transformers gives for the same checkpoint.

One exception, on purpose: for GGUF files with a pre-tokenizer that transformers does not know (`smollm`), the split is
the one the vocabulary was trained with. Torch-free; thread-safe, and `encode` releases the interpreter lock.

Special tokens written in user text are recognised as such, as transformers does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from tailrace.model.errors import ClientError, ConfigError

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPACE_MARK = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, 256 and up for the rest, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(shifted)}


_BYTE_OF = byte_alphabet()


class Tokenizer:
    """A checkpoint's tokenizer.

    Attributes:
        special_tokens: `bos_token` etc. -> text, as the chat template may name them.
        special_ids: ids that `decode(skip_special=True)` leaves out.
        vocab_size: ids of the model, >= those of the tokenizer where the model is padded.
    """

    def __init__(
        self, backend: Backend, *, special_tokens: Mapping[str, str], vocab_size: int, where: str = "tokenizer"
    ) -> None:
        """Raise ConfigError if the backend's decoder is of a kind whose bytes are not known."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        self.vocab_size = vocab_size
        added = backend.get_added_tokens_decoder()
        self._added = {i: t.content for i, t in added.items()}
        self.special_ids = frozenset(i for i, t in added.items() if t.special)
        self._byte_level, self._byte_fallback = _decoder_kind(backend, where)
        # Only then can text hold an id that the embedding has no row for.
        self._may_overflow = backend.get_vocab_size(with_added_tokens=True) > vocab_size

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text; special tokens in it become their ids.
            special: put the tokens around it that the checkpoint asks for (BOS). False for a rendered chat template,
                which writes them itself.

        Raises:
            ClientError: the text names a token that the model has no row for.
        """
        # The batch call lets go of the interpreter for all of its work and builds no offsets: a third faster, and a
        # megabyte holds up the other threads 8 ms at a time instead of 40.
        return self._checked(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def encode_parts(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text alone, nothing put around it. Raises as `encode`."""
        return [self._checked(found.ids) for found in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def added_tokens(self) -> list[str]:
        """Tokens that are found in a text before it is split."""
        return list(self._added.values())

    def _checked(self, ids: list[int]) -> list[int]:
        if self._may_overflow and ids and max(ids) >= self.vocab_size:
            token = self._backend.id_to_token(max(ids))
            raise ClientError(f"token {token!r} is not in the model's vocabulary of {self.vocab_size}")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def id_to_bytes(self, token: int) -> bytes:
        """Exact bytes of one token; concatenated over a generation they are its text. b"" for a padding row.

        A token that starts with a space keeps it, also where `decode` would strip it from the start of a text.
        """
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[c] for c in piece])
            except KeyError:
                return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(SPACE_MARK, " ").encode()

    def id_of(self, text: str) -> int | None:
        """Id of exactly this token, None if there is none."""
        return self._backend.token_to_id(text)

    @property
    def bos_id(self) -> int | None:
        text = self.special_tokens.get("bos_token")
        return None if text is None else self.id_of(text)

    @property
    def adds_bos(self) -> bool:
        """True if `encode(special=True)` puts BOS first."""
        ids = self._backend.encode("", add_special_tokens=True).ids
        return bool(ids) and ids[0] == self.bos_id

    def digest_text(self) -> str:
        """All that decides ids, for the model revision."""
        return self._backend.to_str()


def _decoder_kind(backend: Backend, where: str) -> tuple[bool, bool]:
    """(byte level, byte fallback) of the backend's decoder."""
    if backend.decoder is None:
        raise ConfigError(f"{where}: there is no decoder, so token bytes are not known")
    state = json.loads(backend.decoder.__getstate__())
    parts = state.get("decoders", [state])
    kinds = {p["type"] for p in parts}
    marks_spaces = "Metaspace" in kinds or any(
        p["type"] == "Replace" and p["pattern"] == {"String": SPACE_MARK} and p["content"] == " " for p in parts
    )
    if "ByteLevel" in kinds:
        return True, False
    if marks_spaces:
        return False, "ByteFallback" in kinds
    raise ConfigError(f"{where}: decoder {'+'.join(sorted(kinds))} is not supported; byte level or marked spaces are")


def from_hf_json(text: str, config: Mapping[str, Any], *, vocab_size: int, where: str) -> Tokenizer:
    """Tokenizer of a Hugging Face directory.

    Args:
        text: tokenizer.json.
        config: tokenizer_config.json as parsed; {} if absent. Names special tokens and may add some. Its add_bos_token
            and add_eos_token say nothing beside a tokenizer.json, whose post-processor decides.
        vocab_size: rows of the model's embedding.
        where: file, for messages.
    """
    try:
        backend = Backend.from_str(text)
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for every malformed file
        raise ConfigError(f"{where}: not a tokenizer: {error}") from error
    special = {name: t for name in SPECIAL_NAMES if (t := _token_text(config.get(name))) is not None}
    _add_missing(backend, config, special)
    return Tokenizer(backend, special_tokens=special, vocab_size=vocab_size, where=where)


def set_outer_tokens(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Let `encode(special=True)` put these tokens around a text."""
    outer = [(t, i) for t in (bos, eos) if t is not None and (i := backend.token_to_id(t)) is not None]
    single = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    backend.post_processor = TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=outer)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_missing(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Add tokens that tokenizer_config.json names and tokenizer.json does not mark, so that text finds them whole."""
    known = {t.content for t in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        content = _token_text(entry)
        if content is None or content in known:
            continue
        flags = {k: bool(entry.get(k, False)) for k in ("single_word", "lstrip", "rstrip", "special")}
        backend.add_tokens([AddedToken(content, normalized=bool(entry.get("normalized", True)), **flags)])
        known.add(content)
    extra = [*(config.get("additional_special_tokens") or []), *_listed(config.get("extra_special_tokens"))]
    for content in [*special.values(), *(t for e in extra if (t := _token_text(e)) is not None)]:
        if content not in known:
            backend.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            known.add(content)


def _listed(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list) else []
