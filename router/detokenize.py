"""Token ids of one sample in, decided text out, one piece a token and in order.

    bytes of the token -> held while they may belong to a stop string -> UTF-8 decoded -> Piece

A piece is final: what a client was sent is never taken back. Without stop strings nothing is held. The text of all
pieces together is the same however the ids were cut into frames, and it is what decoding all bytes at once gives:
U+FFFD stands only where the ids form invalid UTF-8. Special tokens and the id that ended the sample have no text.

Pure and without I/O; belongs to one request and dies with it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tailrace.router.stop_strings import StopStrings
from tailrace.transfer.messages import TokenLogprob

_Decoder = codecs.getincrementaldecoder("utf-8")


class Vocabulary(Protocol):
    """What this module needs of a tokenizer (model/tokenizer.py)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def id_to_bytes(self, token: int) -> bytes: ...


class TokenTable:
    """Bytes of every id, read once: the per-token path is one list access.

    Attributes:
        size: ids below it are in the vocabulary.
        max_bytes: length of the longest token.
        special: ids without text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.vocab_size
        self.special = vocabulary.special_ids
        self._bytes = [vocabulary.id_to_bytes(token) for token in range(self.size)]
        self.max_bytes = max((len(b) for b in self._bytes), default=1) or 1

    def literal(self, token: int) -> bytes:
        """Bytes of the token itself, special or not; empty for an id beyond the vocabulary (a padded output row)."""
        return self._bytes[token] if 0 <= token < self.size else b""

    def text_bytes(self, token: int) -> bytes:
        """Bytes that the token adds to the text: none if it is special."""
        return b"" if token in self.special else self.literal(token)

    def label(self, token: int) -> str:
        """The token in words, for logprobs; `bytes:\\xf0\\x9f` if it is no whole character."""
        data = self.literal(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)

    def open_bytes(self, ids: Iterable[int]) -> bytes:
        """The incomplete character at the end of `ids`' text, empty if there is none."""
        data = b"".join(self.text_bytes(token) for token in ids)
        decoder = _Decoder("replace")
        decoder.decode(data)
        return decoder.getstate()[0]


class Piece(NamedTuple):
    """One token's share of the text.

    Attributes:
        token: its id; None for text that no token brought (the U+FFFD of a character that never ended).
        text: characters that became complete with it, without those of a stop string.
        data: its bytes that are part of the text.
        logprob: as the worker sent it, if it was asked for.
    """

    token: int | None
    text: str
    data: bytes
    logprob: TokenLogprob | None


class _Utf8:
    """Bytes in, the characters that became complete out. Most tokens are ASCII, and need no decoder.

    Args:
        open_bytes: of an incomplete character that came before.
    """

    def __init__(self, open_bytes: bytes = b"") -> None:
        self._decoder: codecs.IncrementalDecoder | None = None  # made when it is needed first
        self._open = False  # it holds an incomplete character
        self.decode(open_bytes)

    def decode(self, data: bytes, final: bool = False) -> str:
        if data.isascii() and not self._open:
            return data.decode("ascii")
        if self._decoder is None:
            self._decoder = _Decoder("replace")
        text = self._decoder.decode(data, final)
        self._open = bool(self._decoder.getstate()[0])
        return text


class _Held(NamedTuple):
    token: int
    data: bytes
    end: int  # bytes of the stream up to and with this token
    logprob: TokenLogprob | None


class TextStream:
    """Detokenizer and stop-string search of one sample.

    Args:
        stops: the request's automaton, or None.
        min_tokens: a stop string counts only if it ends with a later token than this many.
        open_bytes: the incomplete character that an echoed prompt ended with.

    Attributes:
        stopped: a stop string was found; later tokens are ignored.
    """

    def __init__(
        self, table: TokenTable, stops: StopStrings | None = None, *, min_tokens: int = 0, open_bytes: bytes = b""
    ) -> None:
        self.stopped = False
        self._table, self._stops, self._min_tokens = table, stops, min_tokens
        self._decoder = _Utf8(open_bytes)
        self._state = 0
        self._num_tokens = 0
        self._num_bytes = 0  # of the stream, held ones included
        self._held: deque[_Held] = deque()

    def push(self, token: int, logprob: TokenLogprob | None = None, *, ends: bool = False) -> list[Piece]:
        """Add a token; returns the pieces that are now decided.

        Args:
            ends: it is the stop id or EOS that ended the sample, which is no part of the text.
        """
        if self.stopped:
            return []
        data = b"" if ends else self._table.text_bytes(token)
        self._num_tokens += 1
        if self._stops is None:
            return [Piece(token, self._decoder.decode(data), data, logprob)]
        start = self._num_bytes
        self._num_bytes += len(data)
        self._held.append(_Held(token, data, self._num_bytes, logprob))
        cut = self._search(self._stops, data, start)
        if cut is not None:
            self.stopped = True
            return self._cut(cut)
        return self._decided(self._num_bytes - self._stops.held[self._state])

    def finish(self) -> list[Piece]:
        """The sample has ended: what was held is text after all, and an incomplete character is U+FFFD."""
        pieces = self._decided(self._num_bytes)
        rest = self._decoder.decode(b"", True)
        if rest:
            pieces.append(Piece(None, rest, b"", None))
        return pieces

    def _search(self, stops: StopStrings, data: bytes, start: int) -> int | None:
        """Position in the stream where the first stop string to end begins, or None."""
        state, counts = self._state, self._num_tokens > self._min_tokens
        for position, byte in enumerate(data, start + 1):
            state = stops.step(state, byte)
            if counts and stops.matched[state]:
                return position - stops.matched[state]
        self._state = state
        return None

    def _decided(self, num_bytes: int) -> list[Piece]:
        """Give out the tokens that end within the first `num_bytes` bytes of the stream."""
        pieces = []
        while self._held and self._held[0].end <= num_bytes:
            token, data, _, logprob = self._held.popleft()
            pieces.append(Piece(token, self._decoder.decode(data), data, logprob))
        return pieces

    def _cut(self, num_bytes: int) -> list[Piece]:
        """Give out everything, without the text after the first `num_bytes` bytes."""
        pieces = []
        for token, data, end, logprob in self._held:
            kept = data[: max(0, len(data) - max(0, end - num_bytes))]
            pieces.append(Piece(token, self._decoder.decode(kept), kept, logprob))
        self._held.clear()
        rest = self._decoder.decode(b"", True)
        if rest:
            pieces.append(Piece(None, rest, b"", None))
        return pieces
